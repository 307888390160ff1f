"""One token of one sequence through a GGUF model, by kernels that were chosen once.

A small model spends as long in calling as in computing. So every call is bound when the step is
made (lz.tables.bind), the residual and the norm that follows are one call, and where our compiled
kernels can do it rope, cache and attention are one. `stale` says when to make the step anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends.native import build as native_build
from ...backends.native.declaration import DTYPES
from ...models.decoder import APART, Decoder
from ...models.decoder_config import activate
from ...models.sequence_kv import SequenceKV
from ...models.weights.ggml import GgmlWeight, Weight
from ...plan.bake import ChosenKernels, bind, chosen_kernel
from ...plan.table import Span
from ...spec.errors import InvalidCall, LayerZeroError
from ...world import snapshot as worlds
from .calls import call_op
from .native_decode import NativeDecode, why_not_native

Run = Callable[..., Any]


class BoundLayer(NamedTuple):
    """The steps of one layer, each a function of the data alone."""

    qkv: Run
    attend: Run                                # of the qkv row
    out: Run
    middle: Run                                # branch, residual -> normed, residual
    mlp: Run
    end: Run                                   # as the middle


class TokenStep(ChosenKernels):
    """Calling it with a token gives its logits, (1, vocab), and keeps its keys and values."""

    def __init__(self, decoder: Decoder, kv: SequenceKV) -> None:
        self.decoder, self.kv, self.config = decoder, kv, decoder.config
        self.world = worlds.current()
        self.kernels: dict[str, str] = {}
        c, self._bound = self.config, {}  # type: Any, dict[Any, Any]
        norm = decoder.weights["norm"]
        assert isinstance(norm, Tensor) and decoder.tables is not None
        self._x = norm.new_zeros((1, 1, c.hidden))
        self._narrow = kv.keys[0].dtype != self._x.dtype
        self.greedy_token: int | None = None      # the next token, where the kernels tell it
        self._native = self._compiled_decoder()
        if self._native is not None:
            return
        self._token = self._compiled_token()
        self._first = self._norm("0.ln1", self._x)
        self.layers = [self._layer(i) for i in range(c.layers)]
        self._head = self._linear("", "embed" if c.tied else "head", self._x)

    def __call__(self, token: int) -> Tensor:
        kv, c = self.kv, self.config
        if not 0 <= token < c.vocab:           # the native step reads the row at this address
            raise InvalidCall(f"wanted a token below {c.vocab}, the size of the vocabulary, got "
                              f"{token}")
        position = kv.length
        if position >= kv.keys[0].shape[1]:
            for i in range(c.layers):
                kv.reserve(i, position + 1)
            if self._native is not None:
                self._native.refresh()
        logits = self._decode(token, position)
        kv.length, cap = position + 1, c.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _decode(self, token: int, position: int) -> Tensor:
        logits: Tensor
        if self._native is not None:
            logits, self.greedy_token = self._native(token, position)
            return logits
        x = self._embed(token)
        normed = self._first(x)
        for layer in self.layers:
            normed, x = layer.middle(layer.out(layer.attend(layer.qkv(normed), position)), x)
            normed, x = layer.end(layer.mlp(normed), x)
        logits = self._head(normed)[0]
        return logits

    def _embed(self, token: int) -> Tensor:
        weight, scale = self.decoder.weights["embed"], self.config.embed_scale
        row = (GgmlWeight(weight.blocks[token:token + 1], weight.format).dequantized()
               if isinstance(weight, GgmlWeight) else weight[token:token + 1].clone())
        x = row.to(self._x.dtype)[None]
        return x if scale == 1.0 else x * scale

    # binding

    def _bind(self, op: str, *tensors: Tensor, **fixed: Any) -> Run:
        key = (op, tuple((t.shape, t.stride(), t.dtype) for t in tensors), tuple(fixed.items()))
        run = self._bound.get(key)
        if run is None:
            run = self._bound[key] = bind(op, *tensors, **fixed)
            self.kernels[f"{op} {fixed.get('format', '')}".strip()] = run.kernel
        return run  # type: ignore[no-any-return]

    def _linear(self, prefix: str, name: str, x: Tensor) -> Run:
        weights = self.decoder.weights
        if prefix + name not in weights:
            parts = [self._linear(prefix, n, x) for n in APART[name]]
            return lambda x: torch.cat([part(x) for part in parts], -1)
        weight, bias = weights[prefix + name], weights.get(f"{prefix}{name}.bias")
        return self._product(x, weight, bias if isinstance(bias, Tensor) else None)

    def _product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Run:
        if isinstance(weight, GgmlWeight):
            weights, options = weight.blocks, {"format": weight.format,
                                            "activations": self.decoder.activations}
            named = {} if bias is None else {"bias": bias}
            run = self._bind("quantized_linear", x, weights, **named, **options)
        else:
            weights = weight
            run = self._bind("linear", x, weights, *(() if bias is None else (bias,)))
        return (lambda x: run(x, weights)) if bias is None else (lambda x: run(x, weights, bias))

    def _norm(self, name: str, x: Tensor) -> Run:
        weight = self.decoder.weights[name]
        assert isinstance(weight, Tensor)
        run = self._bind("rms_norm", x, weight, eps=self.config.eps)
        return lambda x: run(x, weight)

    def _add_norm(self, name: str, post: str) -> Run:
        weight, x = self.decoder.weights[name], self._x
        assert isinstance(weight, Tensor)
        run = self._bind("add_rms_norm", x, x, weight, eps=self.config.eps)
        if not self.config.post_norms:
            return lambda branch, residual: run(branch, residual, weight)
        inner = self._norm(post, x)
        return lambda branch, residual: run(inner(branch), residual, weight)

    def _layer(self, i: int) -> BoundLayer:
        c, prefix, x = self.config, f"{i}.", self._x
        after = f"{i + 1}.ln1" if i + 1 < c.layers else "norm"
        return BoundLayer(
            self._linear(prefix, "qkv", x), self._attend(i),
            self._linear(prefix, "out", x.new_zeros((1, 1, c.heads * c.head_dim))),
            self._add_norm(f"{prefix}ln2", f"{prefix}post_attention"), self._mlp(i),
            self._add_norm(after, f"{prefix}post_mlp"))

    def _mlp(self, i: int) -> Run:
        c = self.config
        if c.experts:
            return lambda x: self.decoder.run_experts(i, x)
        first = self._linear(f"{i}.", "in", self._x)
        second = self._linear(f"{i}.", "down", self._x.new_zeros((1, 1, c.inner)))
        if c.activation == "swiglu":
            silu, inner = torch.nn.functional.silu, c.inner

            def gated(x: Tensor) -> Any:
                gate_up = first(x)
                return second(silu(gate_up[..., :inner]) * gate_up[..., inner:])

            return gated
        return lambda x: second(activate(c, first(x)))

    def _compiled_decoder(self) -> NativeDecode | None:
        """Returns the whole token as one call; None where lz may not choose our kernels."""
        decoder = self.decoder
        if why_not_native(decoder, self.kv):
            return None
        quantized = [w for w in decoder.weights.values() if isinstance(w, GgmlWeight)]
        examples = {(w.format, w.shape): w for w in quantized}
        used = {chosen_kernel("quantized_linear", self._x.new_zeros((1, 1, w.shape[-1])), w.blocks,
                              format=w.format, activations=decoder.activations)
                for w in examples.values()}
        if not all(kernel.startswith("native.") for kernel in used) or not self._may_attend():
            return None
        self.kernels = {"decode": f"{', '.join(sorted(used))}, all layers in one call"}
        return NativeDecode(decoder, self.kv)

    # attention

    def _may_attend(self) -> bool:
        """May lz choose our compiled attention here?"""
        c, like = self.config, self._x
        query = like.new_zeros((1, c.heads, 1, c.head_dim))
        keys = like.new_zeros((1, c.kv_heads, 64, c.head_dim))
        name = "native.attention_decode" + ("" if c.heads > c.kv_heads else "_mha")
        try:
            chosen_kernel("attention", query, keys, keys, backend=name)
        except LayerZeroError:                 # not built, or policy says no
            return False
        return True

    def _compiled_token(self) -> Run | None:
        """Our compiled kernel that rotates, keeps and attends; None where it cannot serve."""
        c, like = self.config, self._x
        if (like.device.type != "cpu" or like.dtype not in DTYPES or self._narrow or c.softcap
                or c.qk_norm or c.rope_style != "rotate_half"):
            return None
        if not self._may_attend():
            return None
        self.kernels["attention"] = "native.attention_decode, with rope and cache in one call"
        return getattr(native_build.module(), "token", None)

    def _attend(self, i: int) -> Run:
        c, kv, token = self.config, self.kv, self._token
        tables = (self.decoder.window_tables if c.has_window(i) else self.decoder.tables)
        assert tables is not None
        window = c.window if c.has_window(i) else 0
        scale = c.attention_scale or c.head_dim ** -0.5
        if token is None:
            return self._attend_in_parts(i, tables, window, scale)
        (cos, sin), dtype, empty = tables, DTYPES[self._x.dtype], torch.empty
        if cos.dtype != self._x.dtype:
            cos, sin = cos.to(self._x.dtype), sin.to(self._x.dtype)
        at_cos, at_sin, row = cos.data_ptr(), sin.data_ptr(), cos.stride(0) * cos.element_size()
        heads, kv_heads, dim, half = c.heads, c.kv_heads, c.head_dim, c.rotated // 2
        shape, kind, threads = (1, 1, heads * dim), self._x.dtype, torch.get_num_threads
        token_bytes = kv_heads * dim * self._x.element_size()

        def attend(qkv: Tensor, position: int, kept_alive: Any = (cos, sin)) -> Tensor:
            keys, values = kv.keys[i], kv.values[i]
            out = empty(shape, dtype=kind)
            first = max(0, position + 1 - window) if window else 0
            before, angle = first * token_bytes, position * row
            token(dtype, qkv.data_ptr(), at_cos + angle, at_sin + angle, keys.data_ptr() + before,
                  values.data_ptr() + before, out.data_ptr(), 1, heads, kv_heads, dim, half, 0,
                  keys.stride(0), position - first, scale, threads())
            return out

        return attend

    def _attend_in_parts(self, i: int, tables: tuple[Tensor, Tensor], window: int,
                         scale: float) -> Run:
        c, kv, like = self.config, self.kv, self._x
        sizes = (c.heads, c.kv_heads, c.kv_heads)
        heads = like.new_zeros((1, 1, sum(sizes), c.head_dim))
        q, k, _ = heads.split(sizes, 2)
        norms = [self._norm(f"{i}.{n}_norm", t) for n, t in (("q", q), ("k", k))] if c.qk_norm \
            else None
        fixed = {} if c.rotated == c.head_dim else {"rotary_dim": c.rotated}
        if norms:
            q, k = q.clone(), k.clone()
        rope = self._bind("rope", q, k, tables[0][:1], tables[1][:1], style=c.rope_style,
                          layout="bshd", **fixed)
        options = {"scale": scale, **({"softcap": c.softcap} if c.softcap else {})}

        def attend(qkv: Tensor, position: int) -> Tensor:
            q, k, v = qkv.view(1, 1, -1, c.head_dim).split(sizes, 2)
            if norms:
                q, k = norms[0](q), norms[1](k)
            q, k = rope(q, k, tables[0][position:position + 1], tables[1][position:position + 1])
            if self._narrow:
                out: Tensor = kv.attend(call_op, i, q, k, v)
                return out.flatten(2)
            keys, values = kv.keys[i], kv.values[i]
            keys[:, position:position + 1], values[:, position:position + 1] = k, v
            first = max(0, position + 1 - window) if window else 0
            seen = slice(first, position + 1)
            attended: Tensor = self._attention(q.transpose(1, 2), keys[:, seen].transpose(1, 2),
                                               values[:, seen].transpose(1, 2), options)
            return attended.transpose(1, 2).flatten(2)

        return attend

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        run, span = self._bound.get("attention", (None, Span()))
        if run is None or not span.covers(k.shape[2]):
            run = bind("attention", q, k, v, **options)
            span = dict(run.row.sizes).get("seq_k", Span())
            self._bound["attention"], self.kernels["attention"] = (run, span), run.kernel
        return run(q, k, v)
