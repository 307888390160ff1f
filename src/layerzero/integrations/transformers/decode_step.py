"""One token through a recognised decoder, made of kernels that were chosen once.

What a decoder layer does, in the order it is done here: the norm of what comes in was taken by the layer before, in one
pass with its residual; queries, keys and values are one product; they are turned, and keys and values written into the
cache; attention; the product that follows, whose result is added and normed in one pass; gate and up are one product;
the product down.

Where keys and values go, and how the attention over them is called, is said by a `Memory`: one whose length the host
knows (HostMemory, a cache that grows), and one whose length the device knows (captured.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...backends.native import build as native_build
from ...plan.table import Span
from ...runtime import world as worlds
from ...spec.errors import LayerZeroError
from .decoders import DecoderParts, LayerParts, Norm
from .planning import Binder, Run

ANY = Span()


class Memory(Protocol):
    """Keys and values of all layers, while one token goes through them."""

    def attend(self, layer: int, both: Tensor, value: Tensor) -> Tensor:
        """`both` are queries and keys, (batch, 1, heads + kv_heads, dim); the value is (batch, 1, kv_heads, dim). Keep
        the key and the value, and give the attention of the queries over all that is kept, (batch, 1, heads * dim)."""


class Joined:
    """Weights of several linear layers as one tensor, of which each layer's own weight is a view."""

    def __init__(self, layers: tuple[nn.Linear, ...]) -> None:
        self._layers = layers
        self.weight = self._join([p.weight for p in layers])
        biases = [p.bias for p in layers if p.bias is not None]
        self.bias = self._join(biases) if biases else None

    @staticmethod
    def _join(parts: list[Any]) -> Tensor:
        if len(parts) == 1:
            return parts[0].detach()  # type: ignore[no-any-return]
        whole = torch.cat([p.detach() for p in parts])
        for part, view in zip(parts, whole.split([len(p) for p in parts])):
            part.data = view
        return whole

    def undo(self) -> None:
        """Memory of its own for each weight."""
        for layer in self._layers if len(self._layers) > 1 else ():
            layer.weight.data = layer.weight.detach().clone()
            if layer.bias is not None:
                layer.bias.data = layer.bias.detach().clone()


class JoinedLayer:
    def __init__(self, parts: LayerParts) -> None:
        self.parts, self.qkv, self.gate_up = parts, Joined(parts.qkv), Joined(parts.gate_up)

    def undo(self) -> None:
        self.qkv.undo()
        self.gate_up.undo()


@dataclass(frozen=True)
class BoundLayer:
    """What one layer does, each a function of the data alone."""

    qkv: Run
    head_norms: Run | None
    rope: Run | None
    out: Run
    post_norm: Run
    mlp: Run
    next_norm: Run
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


class DecodeStep:
    """The step for one size of batch. Calling it gives the logits, or the last hidden state where there is no head."""

    def __init__(self, parts: DecoderParts, layers: tuple[JoinedLayer, ...], batch: int,
                 captured: bool = False) -> None:
        self.batch, self.bind = batch, Binder(captured)
        self.world = worlds.current()
        weights, self.half = parts.weights, int(parts.rotary.inv_freq.shape[0])
        x = weights.new_zeros((batch, 1, weights.shape[1]))
        self._like, first = x, layers[0].parts.norm
        self.fast = _on_device() if captured and x.is_cuda else None
        norm = self.bind.fastest("norm", "rms_norm", (x, first.weight), eps=first.eps)
        self._first_norm = _with(norm, first.weight)
        following = [*(layer.parts.norm for layer in layers[1:]), parts.norm]
        self.layers = tuple(self._bound(layers, i, after, x) for i, after in enumerate(following))
        self._head = None if parts.head is None else self._linear("head", x, [parts.head.weight], parts.head.bias)
        self._attention: dict[Any, tuple[Run, Span]] = {}
        self.token = self._compiled_token()

    def _compiled_token(self) -> Run | None:
        """Our own compiled kernel that turns, keeps and attends; None where lz may not choose its attention here."""
        like, plain = self._like, all(at.head_norms is None for at in self.layers)
        if like.device.type != "cpu" or like.dtype not in (torch.float32, torch.bfloat16) or not plain:
            return None
        found = None
        for at in self.layers:
            query = like.new_empty((self.batch, at.heads, 1, at.head_dim))
            keys = like.new_empty((self.batch, at.kv_heads, 64, at.head_dim))
            name = "native.attention_decode" + ("" if at.heads > at.kv_heads else "_mha")
            try:
                self.bind("attention", "attention", query, keys, keys, None, scale=at.scale, backend=name)
            except LayerZeroError:             # not built, or policy says no
                return None
            found = getattr(native_build.module(), "token", None)
        if found is not None:
            self.bind.kernels["attention"] = "native.attention_decode, with rope and cache in one call"
        return found

    def stale(self) -> bool:
        """Has policy or the health of a kernel changed since the kernels were chosen?"""
        now = worlds.current()
        if now is self.world:
            return False
        changed = (now.policy, now.health) != (self.world.policy, self.world.health)
        self.world = now if not changed else self.world
        return changed

    def _linear(self, what: str, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Run:
        """Of the first of these weights; the others are those of the layers after it."""
        alike = [w.detach() for w in weights if w.shape == weights[0].shape]
        given = () if bias is None else (bias.detach(),)
        return _with(self.bind.fastest(what, "linear", *((x, w, *given) for w in alike)), alike[0], *given)

    def _bound(self, layers: tuple[JoinedLayer, ...], at: int, following: Norm, x: Tensor) -> BoundLayer:
        layer, rest = layers[at], layers[at:]
        p, bind = layer.parts, self.bind
        heads = x.new_zeros((self.batch, 1, p.heads + 2 * p.kv_heads, p.head_dim))
        both = heads[:, :, :p.heads + p.kv_heads]
        angles = x.new_zeros((self.batch, 1, 2 * self.half))[..., :self.half]
        rope: Run | None = bind("rope", "rope", both, None, angles, angles, style="rotate_half", layout="bshd",
                                rotary_dim=2 * self.half)
        if bind.kernels["rope"].startswith("torch.") and 2 * self.half == p.head_dim:
            rope = None                        # made of several operations: fewer of them do, see _Turner

        def add_norm(norm: Norm) -> Run:
            weight = norm.weight
            run = bind.fastest("add and norm", "add_rms_norm", (x, x, weight), eps=norm.eps)
            return lambda branch, residual: run(branch, residual, weight)

        return BoundLayer(
            self._linear("qkv", x, [other.qkv.weight for other in rest], layer.qkv.bias), self._head_norms(p, heads),
            rope, self._linear("out", x.new_zeros((self.batch, 1, p.heads * p.head_dim)),
                               [other.parts.out.weight for other in rest], p.out.bias),
            add_norm(p.post_norm), self._mlp(rest, x), add_norm(following), p.heads, p.kv_heads, p.head_dim, p.scale)

    def _mlp(self, rest: tuple[JoinedLayer, ...], x: Tensor) -> Run:
        layer, p = rest[0], rest[0].parts
        if self.fast is not None:             # two products and one launch between them
            first = self._linear("gate and up", x, [other.gate_up.weight for other in rest], layer.gate_up.bias)
            inner = x.new_zeros((self.batch, 1, p.down.in_features))
            second = self._linear("down", inner, [other.parts.down.weight for other in rest], p.down.bias)
            gate, kind = self.fast.gate, p.activation
            return lambda x: second(gate(*first(x).squeeze(1).chunk(2, -1), kind).unsqueeze(1))
        bias = {n: b.detach() for n, b in (("bias_in", layer.gate_up.bias), ("bias_down", p.down.bias))
                if b is not None}
        down = p.down.weight.detach()
        run = self.bind("mlp", "mlp", x, layer.gate_up.weight, down, activation=p.activation, **bias)
        return _with(run, layer.gate_up.weight, down, *bias.values())

    def _head_norms(self, p: LayerParts, heads: Tensor) -> Run | None:
        if p.q_norm is None or p.k_norm is None:
            return None
        queries, keys = heads[:, :, :p.heads], heads[:, :, :p.kv_heads]
        q_norm = _with(self.bind("norm of heads", "rms_norm", queries, p.q_norm.weight, eps=p.q_norm.eps),
                       p.q_norm.weight)
        k_norm = _with(self.bind("norm of heads", "rms_norm", keys, p.k_norm.weight, eps=p.k_norm.eps),
                       p.k_norm.weight)
        return lambda both: torch.cat((q_norm(both[:, :, :p.heads]), k_norm(both[:, :, p.heads:])), 2)

    def attention(self, layer: int, length: int, masked: bool) -> Run:
        """The kernel of a layer for so many keys in a growing cache."""
        at = self.layers[layer]
        key = at.heads, at.kv_heads, at.head_dim, at.scale, masked
        run, span = self._attention.get(key, (None, ANY))
        if run is None or not span.covers(length):
            query = self._like.new_empty((self.batch, 1, at.heads, at.head_dim)).transpose(1, 2)
            keys = self._like.new_empty((self.batch, length, at.kv_heads, at.head_dim)).transpose(1, 2)
            mask = self._like.new_ones((self.batch, 1, 1, length), dtype=torch.bool) if masked else None
            run = self.bind("attention", "attention", query, keys, keys, mask, scale=at.scale)
            span = dict(run.row.sizes).get("seq_k", ANY)  # type: ignore[attr-defined]
            self._attention[key] = run, span
        return run

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, memory: Memory) -> Tensor:
        """`x` (batch, 1, hidden) is the embedded token; angles are cos and sin, (batch, 1, 2 * half), as the model has
        them, or None where the memory turns by itself."""
        normed, attend = self._first_norm(x), memory.attend
        turner = None if angles is None else _Turner(*angles, self.batch, self.half)
        for i, at in enumerate(self.layers):
            turned = at.heads + at.kv_heads
            heads = at.qkv(normed).view(self.batch, 1, turned + at.kv_heads, at.head_dim)
            both = heads[:, :, :turned]
            if at.head_norms is not None:
                both = at.head_norms(both)
            if turner is not None:
                both = turner(at.rope, both)
            seen = attend(i, both, heads[:, :, turned:])
            normed, x = at.post_norm(at.out(seen), x)
            normed, x = at.next_norm(at.mlp(normed), x)
        return normed if self._head is None else self._head(normed)


class _Turner:
    """Rotary positions of one token, for all layers."""

    def __init__(self, cos: Tensor, sin: Tensor, batch: int, half: int) -> None:
        self._half = half
        self._halves = tuple(t[..., :half].expand(batch, 1, half) for t in (cos, sin))
        self._cos = cos.unsqueeze(2)
        self._sin = torch.cat((-sin[..., :half], sin[..., half:]), -1).unsqueeze(2)

    def __call__(self, rope: Run | None, both: Tensor) -> Tensor:
        if rope is not None:
            return rope(both, *self._halves)  # type: ignore[no-any-return]
        # rotate_half(x) * sin is x with its halves changed, times -sin and sin.
        return torch.addcmul(both * self._cos, both.roll(self._half, -1), self._sin)


def _on_device() -> Any:
    """The kernels of triton_step.py; None where Triton is not installed."""
    try:
        from . import triton_step
    except ImportError:
        return None
    return triton_step


def _with(run: Run, *weights: Tensor) -> Run:
    """As a function of the data alone."""
    if len(weights) == 1:
        weight, = weights
        return lambda x: run(x, weight)
    return lambda x: run(x, *weights)


class HostMemory:
    """A cache whose layers append in place; see growing_cache.py. `mask` is (batch, 1, 1, keys), True: seen.

    `angles` are those of the token. Where the compiled kernels can do it they turn, keep and attend in one call.
    """

    def __init__(self, step: DecodeStep, layers: list[Any], mask: Tensor | None, angles: tuple[Tensor, Tensor]) -> None:
        self._step, self._layers, self._mask = step, layers, () if mask is None else (mask,)
        self.lengths = [layer.reserve(1) for layer in layers]
        self._token = step.token if mask is None else None
        self.angles = angles if self._token is None else None      # for the step to turn by
        self._own_angles = angles
        self._runs = [step.attention(i, length + 1, mask is not None) for i, length in enumerate(
            self.lengths)] if self._token is None else []

    def attend(self, layer: int, both: Tensor, value: Tensor) -> Tensor:
        at, length = self._layers[layer], self.lengths[layer]
        if self._token is not None:
            bound = self._step.layers[layer]
            cos, sin = self._own_angles
            out = both.new_empty((len(both), 1, bound.heads * bound.head_dim))
            self._token(both.dtype is torch.bfloat16, both.data_ptr(), cos.data_ptr(), sin.data_ptr(),
                        at.key_room.data_ptr(), at.value_room.data_ptr(), out.data_ptr(), len(both), bound.heads,
                        bound.kv_heads, bound.head_dim, self._step.half, cos.stride(0) if len(cos) > 1 else 0,
                        at.key_room.stride(0), length, bound.scale, torch.get_num_threads())
            at.show(length + 1)
            return out
        queries = both.shape[2] - value.shape[2]
        at.write(length, both[:, :, queries:], value)
        out = self._runs[layer](both[:, :, :queries].transpose(1, 2), at.keys, at.values, *self._mask)
        return out.transpose(1, 2).reshape(len(both), 1, -1)  # type: ignore[no-any-return]

    def undo(self) -> None:
        """As it was before this token: the step broke."""
        for layer, length in zip(self._layers, self.lengths):
            layer.show(length)
