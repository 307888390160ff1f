"""One token through a recognised decoder, made of kernels that were chosen once.

What a decoder layer does, in the order it is done here: the norm of what comes in was taken by the
layer before, in one pass with its residual where there is a kernel for it; queries, keys and values
are one product; they are rotated, and keys and values written into the cache; attention; the
product that follows, whose result is added and normed; the feed-forward part (feed_forward.py).

Where keys and values go, and how the attention over them is called, is said by a `StepKV`: one
whose length the host knows (host_kv.py, a cache that grows), and one whose length the device
knows (cuda/captured.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ....backends.native import build as native_build
from ....backends.native.declaration import DTYPES
from ....models.weights.codes import WeightCodes
from ....plan.bake import ChosenKernels
from ....plan.table import Span
from ....spec.errors import LayerZeroError
from ....world import snapshot as worlds
from ..decoders.families import NotRecognised
from ..decoders.parts import OWN, LatentParts
from ..decoders.recognition import Angles, CrossParts, DecoderParts, LayerParts, Linear, Norm
from ..quantized import codes_of
from ..replacements import ROTATIONS
from . import feed_forward, latent_attention
from .feed_forward import JoinedFeedForward, plain_part
from .joined import Joined, Weight, check_movable
from .planning import Binder, Run, with_weights

ANY = Span()


class StepKV(Protocol):
    """Keys and values of all layers, while one token goes through them."""

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        """`qk` are queries and keys, (batch, 1, heads + kv_heads, dim); the value is (batch, 1,
        kv_heads, dim). Keep the key and the value, and give the attention of the queries over all
        that is kept, (batch, 1, heads * dim)."""
        # of decoders with cross-attention also cross_attend(layer, query): see encoder_decoder.py


class JoinedLayer:
    """The weights of one decoder layer as the step reads them."""

    def __init__(self, parts: LayerParts) -> None:
        self.parts, self.qkv, self.out = parts, Joined(parts.qkv), Joined((parts.out,))
        self.gains: list[Joined] = []          # of the heads of queries, and of keys
        try:
            self.gains += [Joined(gains) for gains in _gains(parts)]
            self.mlp = JoinedFeedForward(parts.mlp)
        # an interrupt too: the weights go back to where they were
        except BaseException:
            for joined in (self.qkv, *self.gains):
                joined.undo()
            raise

    def undo(self) -> None:
        for joined in (self.qkv, *self.gains):
            joined.undo()
        self.mlp.undo()


def _gains(parts: LayerParts) -> list[tuple[Linear, ...]]:
    return [norm.gains for norm in (parts.q_norm, parts.k_norm) if norm is not None and norm.gains]


def join_layers(model: nn.Module, parts: DecoderParts) -> tuple[JoinedLayer, ...]:
    """Joins the weights of all layers, or changes nothing: NotRecognised says why."""
    plain = [plain_part(layer.mlp) for layer in parts.layers]
    check_movable(model, [*(layer.qkv for layer in parts.layers),
                          *(p.gate_up for p in plain if p is not None),
                          *(gains for layer in parts.layers for gains in _gains(layer))])
    layers: list[JoinedLayer] = []
    try:
        for layer in parts.layers:
            layers.append(JoinedLayer(layer))
    # passed on: there was no memory for it, or someone interrupted
    except BaseException:
        for joined in layers:
            joined.undo()
        raise
    return tuple(layers)


@dataclass(frozen=True)
class BoundLayer:
    """The steps of one layer, each a function of the data alone."""

    qkv: Run
    by_head: bool
    head_norms: Run | None
    norm_last: bool
    rope: Run | None
    out: Run
    # of a layer whose parts work side by side, where they have a norm each
    side_norm: Run | None
    # branch, residual -> normed, residual; None where they do
    middle: Run | None
    mlp: Run
    end: Run                                   # as the middle
    cross: BoundCross | None
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    window: int | None
    angles: int | None
    sinks: Tensor | None
    latent: Run | None


@dataclass(frozen=True)
class BoundCross:
    """Cross-attention between the attention and the middle."""

    norm: Run                                  # as the middle
    query: Run
    out: Run
    shape: tuple[int, ...]                     # of its queries


class DecodeStep(ChosenKernels):
    """The step for one batch size. It gives the logits, or the last hidden state without a head."""

    def __init__(self, parts: DecoderParts, layers: tuple[JoinedLayer, ...], batch: int,
                 captured: bool = False) -> None:
        self.parts, self.batch, self.bind = parts, batch, self._binder(captured)
        self.rotation = parts.rotation
        self.joined = layers
        self.world = worlds.current()
        weights, self.half = parts.weights, parts.half
        x = weights.new_zeros((batch, 1, weights.shape[1]))
        self._like, begin = x, layers[0].parts
        first = None if begin.normed_sums else begin.norm
        self.fast = _on_device() if captured and x.is_cuda else None
        self._first_norm = None if first is None else self._norm("norm", first, x)
        following = [*(None if layer.parts.normed_sums else layer.parts.norm
                       for layer in layers[1:]), parts.norm]
        self.layers = tuple(self._bound(layers, i, after) for i, after in enumerate(following))
        self._softcap, self._logit_scale = parts.softcap, parts.logit_scale
        self._head = None if parts.head is None else self._linear(
            "head", x, [codes_of(parts.head.module) or parts.head.module.weight],
            parts.head.module.bias)
        if (self.fast is not None and self._head is not None and parts.head is not None
                and codes_of(parts.head.module) is None):
            self._head = self.fast.in_float32(self._head, self.bind.kernels["head"],
                                        parts.head.module.weight, parts.head.module.bias)
        self._attention: dict[Any, tuple[Run, Span]] = {}
        self.token = self._compiled_token()

    def _binder(self, captured: bool) -> Binder:
        return Binder(captured)

    def _compiled_token(self) -> Run | None:
        """Our compiled kernel that rotates, stores and attends; None if lz may not choose it."""
        like, plain = (self._like, self.rotation == "rotate_half"
                       and all(not bound.softcap and not bound.norm_last and bound.sinks is None
                               and bound.latent is None for bound in self.layers))
        if like.device.type != "cpu" or like.dtype not in DTYPES or not plain:
            return None
        token = None
        for bound in self.layers:
            query = like.new_empty((self.batch, bound.heads, 1, bound.head_dim))
            keys = like.new_empty((self.batch, bound.kv_heads, 64, bound.head_dim))
            name = "native.attention_decode" + ("" if bound.heads > bound.kv_heads else "_mha")
            try:
                self.bind("attention", "attention", query, keys, keys, None, scale=bound.scale,
                          backend=name)
            except LayerZeroError:             # not built, or policy says no
                return None
            token = getattr(native_build.module(), "token", None)
        if token is not None:
            self.bind.kernels[
                "attention"] = "native.attention_decode, with rope and cache in one call"
        return token

    def _linear(self, what: str, x: Tensor, weights: Sequence[Weight], bias: Tensor | None) -> Run:
        """Bind the product with weights[0]; the others are of later layers, timed beside it."""
        first, biases = weights[0], () if bias is None else (bias.detach(),)
        if isinstance(first, WeightCodes):
            return self._quantized_linear(what, x, weights, first, bias)
        alike = [w.detach() for w in weights if isinstance(w, Tensor) and w.shape == first.shape]
        return with_weights(self.bind.fastest(what, "linear", *((x, w, *biases) for w in alike)),
                            alike[0], *biases)

    def _quantized_linear(self, what: str, x: Tensor, weights: Sequence[Weight],
                          first: WeightCodes, bias: Tensor | None) -> Run:
        alike = [w for w in weights if isinstance(w, WeightCodes) and w.shape == first.shape
                 and w.format == first.format]
        fixed_bias = None if bias is None else bias.detach()
        calls = ((x, w.codes, w.scales, None, fixed_bias) for w in alike)
        run = self.bind.fastest(what, "quantized_linear", *calls, **first.options(self.batch))
        tensors = (first.codes, first.scales, fixed_bias, first.global_scale)
        return with_weights(run, *(t for t in tensors if t is not None))

    def _norm(self, what: str, norm: Norm, x: Tensor) -> Run:
        if norm.op == OWN:
            self.bind.kernels[what] = f"{OWN} ({type(norm.module).__name__})"
            return norm.module  # type: ignore[no-any-return]
        fixed = {"eps": norm.eps, **({"offset": norm.offset} if norm.offset else {})}
        return with_weights(self.bind.fastest(what, norm.op, (x, *norm.weights), **fixed),
                            *norm.weights)

    def _add_norm(self, norm: Norm | None, post: Norm | None, scale: float,
                  normed_sum: bool = False) -> Run:
        """Binds the end of a branch: its result, normed by `post` and times `scale`, is added to
        the residual; that and its norm, or its norm twice (`normed_sum`)."""
        x = self._like
        inner = None if post is None else self._norm("norm of a branch", post, x)
        if (norm is not None and norm.op == "rms_norm" and norm.weights and not norm.offset
            and inner is None and scale == 1.0 and not normed_sum):
            weight, = norm.weights
            run = self.bind.fastest("add and norm", "add_rms_norm", (x, x, weight), eps=norm.eps)
            return lambda branch, residual: run(branch, residual, weight)
        outer = None if norm is None else self._norm("norm", norm, x)
        if normed_sum and outer is not None:
            normed = outer

            def sum_norm(branch: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
                total = normed(residual + branch)
                return total, total

            return sum_norm

        def add_norm(branch: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            total = torch.add(residual, branch if inner is None else inner(branch), alpha=scale)
            return (total if outer is None else outer(total)), total

        return add_norm

    def _bound(self, layers: tuple[JoinedLayer, ...], index: int,
               following: Norm | None) -> BoundLayer:
        layer, rest, x = layers[index], layers[index:], self._like
        p, bind = layer.parts, self.bind
        heads = x.new_zeros((self.batch, 1, p.heads + 2 * p.kv_heads, p.head_dim))
        rope: Run | None = None
        if self.half:
            qk = heads[:, :, :p.heads + p.kv_heads]
            angles = x.new_zeros((self.batch, 1, 2 * self.half))[..., :self.half]
            rope = bind("rope", "rope", qk, None, angles, angles,
                        style=ROTATIONS[self.rotation][0], layout="bshd", rotary_dim=2 * self.half)
            if bind.kernels["rope"].startswith("torch.") and 2 * self.half == p.head_dim and \
                    self.rotation == "rotate_half":
                # made of several operations: fewer of them do, see _Rotation
                rope = None
        return BoundLayer(
            qkv=self._linear("qkv", x, [other.qkv.weight for other in rest], layer.qkv.bias),
            by_head=p.by_head, head_norms=self._head_norms(layer, heads), norm_last=p.norm_last,
            rope=rope,
            out=self._out(layer, rest),
            side_norm=self._norm("norm", p.mlp_norm, x) if p.parallel and p.mlp_norm is not None
            else None,
            middle=None if p.parallel else self._middle(p),
            cross=None if p.cross is None else self._cross(p, [o.parts.cross for o in rest]),
            mlp=feed_forward.bound([other.mlp for other in rest], x, bind, self._linear, self.fast),
            end=self._add_norm(p.mlp_norm, None, 1.0, True) if p.normed_sums
            else self._add_norm(following, p.mlp_post, p.branch_scale),
            heads=p.heads, kv_heads=p.kv_heads, head_dim=p.head_dim, scale=p.scale,
            softcap=p.softcap,
            window=p.window, angles=p.angles, sinks=p.sinks,
            latent=None if p.latent is None else self._latent(p, p.latent, x))

    def _latent(self, p: LayerParts, latent: LatentParts, x: Tensor) -> Any:
        up = Joined((latent.up,)).weight
        if not isinstance(up, Tensor):
            raise NotRecognised("latent attention whose weights are quantized")
        return latent_attention.bound(p, up, x, self._linear, self._norm)

    def _out(self, layer: JoinedLayer, rest: Sequence[JoinedLayer]) -> Run:
        p = layer.parts
        x = self._like.new_zeros((self.batch, 1, p.heads * p.head_dim))
        out = self._linear("out", x, [other.out.weight for other in rest], layer.out.bias)
        if p.out_norm is None:
            return out
        norm = self._norm("norm of heads", p.out_norm, x)
        return lambda x: out(norm(x))

    def _middle(self, p: LayerParts) -> Run:
        """Binds what follows the last attention of a layer."""
        if not p.normed_sums:
            return self._add_norm(p.mlp_norm, p.attn_post, p.branch_scale)
        return self._add_norm(p.norm if p.cross is None else p.cross.norm, None, 1.0, True)

    def _cross(self, p: LayerParts, rest: Sequence[CrossParts | None]) -> BoundCross:
        c, x = p.cross, self._like
        assert c is not None
        alike = [other for other in rest if other is not None]
        out = x.new_zeros((self.batch, 1, c.heads * c.head_dim))
        before = p.norm if p.normed_sums else c.norm
        return BoundCross(
            norm=self._add_norm(before, p.attn_post, p.branch_scale, p.normed_sums),
            query=self._linear("query across", x, [Joined((o.query,)).weight for o in alike],
                               c.query.module.bias),
            out=self._linear("out across", out, [Joined((o.out,)).weight for o in alike],
                             c.out.module.bias),
            shape=(self.batch, 1, c.heads, c.head_dim))

    def _head_norms(self, layer: JoinedLayer, heads: Tensor) -> Run | None:
        """Bind the norms of queries and keys in (batch, 1, heads + 2 * kv_heads, dim)."""
        p = layer.parts
        if p.q_norm is None or p.k_norm is None:
            return None
        sizes, dim = [p.heads, p.kv_heads, p.kv_heads], p.head_dim
        query, key, _ = heads.split(sizes, 2)
        at_once = bool(p.q_norm.weights) and len(p.q_norm.weights[0]) != dim   # over all heads
        if at_once:
            query, key = query.flatten(2), key.flatten(2)
            sizes = [n * dim for n in sizes]
        q_norm, k_norm = self._norm("norm of heads", p.q_norm,
                                    query), self._norm("norm of heads", p.k_norm, key)
        gains = [joined.weight for joined in layer.gains]
        q_gain, k_gain = [g.view(-1, dim) for g in gains if isinstance(g, Tensor)] or (None, None)

        def normed(heads: Tensor) -> Tensor:
            query, key, value = (heads.flatten(2) if at_once else heads).split(sizes, 2)
            query, key = q_norm(query), k_norm(key)
            if q_gain is not None:
                query, key = query * q_gain, key * k_gain
            return torch.cat((query, key, value), 2).view(*heads.shape)

        return normed

    def cross_attention(self, layer: int, keys: Tensor, values: Tensor, *mask: Tensor) -> Run:
        """Returns the kernel of a layer for the keys and values of the encoder."""
        cross = self.parts.layers[layer].cross
        assert cross is not None
        key = keys.shape, keys.stride(), values.stride(), cross.scale, len(mask)
        run, _ = self._attention.get(key, (None, ANY))
        if run is None:
            query = self._like.new_empty((self.batch, 1, cross.heads, cross.head_dim))
            run = self.bind("attention across", "attention", query.transpose(1, 2), keys, values,
                            *(mask or (None,)), scale=cross.scale)
            self._attention[key] = run, ANY
        return run

    def attention(self, layer: int, length: int, masked: bool, biased: bool = False) -> Run:
        """Returns the kernel of a layer for `length` keys in a growing cache; the mask shows some
        of them to all heads, or is a bias for each head."""
        bound = self.layers[layer]
        key = (bound.heads, bound.kv_heads, bound.head_dim, bound.scale, bound.softcap, masked,
               biased, bound.sinks is None)
        run, span = self._attention.get(key, (None, ANY))
        if run is None or not span.covers(length):
            query = self._like.new_empty((self.batch, 1, bound.heads, bound.head_dim))
            keys = self._like.new_empty((self.batch, length, bound.kv_heads, bound.head_dim))
            query, keys = query.transpose(1, 2), keys.transpose(1, 2)
            mask = (self._like.new_ones((self.batch, 1, 1, length), dtype=torch.bool) if masked
                    else None)
            if biased:
                mask = self._like.new_zeros((self.batch if masked else 1, bound.heads, 1, length))
            more = {} if bound.sinks is None else {"return_lse": True}
            run = self.bind("attention", "attention", query, keys, keys, mask, scale=bound.scale,
                            softcap=bound.softcap, **more)
            span = dict(run.row.sizes).get("seq_k", ANY)  # type: ignore[attr-defined]
            self._attention[key] = run, span
        return run

    def __call__(self, x: Tensor, angles: Angles | None, kv: StepKV) -> Tensor:
        """`x` (batch, 1, hidden) is the embedded token; angles are cos and sin, (batch, 1, 2 *
        half), as the model has them for each kind of layer, or None where `kv` rotates by
        itself or nothing is rotated."""
        normed = self._last_state(x, angles, kv)
        return normed if self._head is None else self._logits(normed)

    def _last_state(self, x: Tensor, angles: Angles | None, kv: StepKV) -> Tensor:
        """Computes all layers and the last norm for any tokens: (batch, tokens, hidden)."""
        normed, attend = x if self._first_norm is None else self._first_norm(x), kv.attend
        lead = x.shape[:2]
        rotations = [_Rotation(*pair, lead, self.half) for pair in angles or ()]
        for i, bound in enumerate(self.layers):
            rotated = bound.heads + bound.kv_heads
            heads = bound.qkv(normed)
            if bound.latent is not None:
                attended = bound.latent(i, heads, kv)
            else:
                if bound.by_head:
                    heads = heads.view(*lead, bound.heads, 3, bound.head_dim)
                    heads = heads.transpose(2, 3).reshape(*lead, -1, bound.head_dim)
                else:
                    heads = heads.view(*lead, rotated + bound.kv_heads, bound.head_dim)
                if bound.head_norms is not None and not bound.norm_last:
                    heads = bound.head_norms(heads)
                qk = heads[:, :, :rotated]
                if rotations and bound.angles is not None:
                    qk = rotations[bound.angles](bound.rope, qk)
                if bound.head_norms is not None and bound.norm_last:
                    heads = bound.head_norms(torch.cat((qk, heads[:, :, rotated:]), 2))
                    qk = heads[:, :, :rotated]
                attended = attend(i, qk, heads[:, :, rotated:])
            branch = bound.out(attended)
            if bound.cross is not None:
                normed, x = bound.cross.norm(branch, x)
                query = bound.cross.query(normed).view(bound.cross.shape)
                branch = bound.cross.out(kv.cross_attend(i, query))       # type: ignore[attr-defined]
            if bound.middle is None:
                mlp_input = normed if bound.side_norm is None else bound.side_norm(x)
                branch = branch + bound.mlp(mlp_input)
            else:
                normed, x = bound.middle(branch, x)
                branch = bound.mlp(normed)
            normed, x = bound.end(branch, x)
        return normed

    def _logits(self, normed: Tensor) -> Tensor:
        assert self._head is not None
        logits: Tensor = self._head(normed)
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits


class _Rotation:
    """Rotary positions of (batch, tokens), for all layers."""

    def __init__(self, cos: Tensor, sin: Tensor, lead: tuple[int, ...], half: int) -> None:
        self._half = half
        self._halves = tuple(t[..., :half].expand(*lead, half) for t in (cos, sin))
        self._cos = cos.unsqueeze(2)
        self._sin = torch.cat((-sin[..., :half], sin[..., half:]), -1).unsqueeze(2)

    def __call__(self, rope: Run | None, qk: Tensor) -> Tensor:
        if rope is not None:
            return rope(qk, *self._halves)  # type: ignore[no-any-return]
        # rotate_half(x) * sin is x with its halves changed, times -sin and sin.
        return torch.addcmul(qk * self._cos, qk.roll(self._half, -1), self._sin)


def _on_device() -> Any:
    """Returns the kernels of cuda/triton_step.py; None where Triton is not installed."""
    try:
        from .cuda import triton_step
    except ImportError:
        return None
    return triton_step
