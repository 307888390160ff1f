"""One decoder layer of `lz demo` in three styles: through lz, in torch, as libraries write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .... import add_rms_norm, attention, rms_norm
from ....models.decoder import Decoder, Trace
from ....models.decoder_config import Weights, cast, make_weights
from ....models.positions import rope_tables
from ....verify.model.plain import PlainTorch
from .fit import ModelStep, Sizes

OPS = ("rms_norm", "attention", "add_rms_norm")        # what the styles do differently


@dataclass
class Style:
    """The `call_op` of a Decoder: its own version of three operations, plain torch for others."""

    own: Mapping[str, Callable[..., Any]]
    kernel: str = ""

    def __call__(self, op: str, /, **arguments: Any) -> Any:
        run = self.own.get(op)
        return _plain(op, **arguments) if run is None else run(**arguments)


_plain = PlainTorch()


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _torch_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)


def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor,
                        eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _torch_rms_norm(total, weight, eps), total


def _model_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    upcast = x.to(torch.promote_types(x.dtype, torch.float32))
    upcast = upcast * torch.rsqrt(upcast.pow(2).mean(-1, keepdim=True) + eps)
    return weight * upcast.to(x.dtype)


def _model_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    batch, kv_heads, seq, dim = key.shape
    group = query.shape[1] // kv_heads

    def repeat_kv(t: Tensor) -> Tensor:
        expanded = t[:, :, None].expand(batch, kv_heads, group, seq, dim)
        return expanded.reshape(batch, kv_heads * group, seq, dim)

    key, value = repeat_kv(key), repeat_kv(value)
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def _model_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor,
                        eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _model_rms_norm(total, weight, eps), total


_OWN: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "lz": (rms_norm, attention, add_rms_norm),
    "torch": (_torch_rms_norm, _torch_attention, _torch_add_rms_norm),
    "model code": (_model_rms_norm, _model_attention, _model_add_rms_norm)}
STYLES = {name: Style(dict(zip(OPS, own))) for name, own in _OWN.items()}
STYLE_NOTES = {
    "torch": "F.rms_norm, the residual added before it, "
             "F.scaled_dot_product_attention(enable_gqa=True)",
    "model code": "as model libraries write Llama: the RMSNorm formula op by op, "
                  "repeat_kv before the same SDPA",
}


class _Context:
    """The `memory` of a Decoder: keys and values of a context as (batch, kv_heads, seq, head_dim).
    A step writes to the same place every time, so that each call of it does the same work."""

    def __init__(self, keys: Tensor, values: Tensor, length: int = 0) -> None:
        self.keys, self.values, self.length = keys, values, length

    def attend(self, call_op: Callable[..., Any], layer: int, q: Tensor, k: Tensor,
               v: Tensor) -> Tensor:
        end = self.length + q.shape[1]
        self.keys[:, :, self.length:end] = k.transpose(1, 2)
        self.values[:, :, self.length:end] = v.transpose(1, 2)
        causal = q.shape[1] > 1                # a single token attends to the whole context
        out: Tensor = call_op("attention", query=q.transpose(1, 2), key=self.keys[:, :, :end],
                         value=self.values[:, :, :end], is_causal=causal)
        return out.transpose(1, 2)


class DecodeLayer:
    """One layer with its weights, an input, and the keys and values of a context."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        gen = torch.Generator().manual_seed(seed + 1)
        heads = (1, sizes.kv_heads, sizes.context, sizes.head_dim)
        shapes = {"x": (1, sizes.prompt, sizes.hidden), "keys": heads, "values": heads}
        inputs = {name: torch.randn(shape, generator=gen) for name, shape in shapes.items()}
        inputs["cos"], inputs["sin"] = rope_tables(sizes.head_dim, sizes.context)
        self.weights: Weights = cast(make_weights(sizes.config, seed), dtype, device)
        self.inputs: dict[str, Tensor] = cast(inputs, dtype, device)

    def to(self, dtype: torch.dtype) -> DecodeLayer:
        """Return the same layer in another dtype."""
        twin = object.__new__(DecodeLayer)
        twin.sizes, twin.dtype, twin.device = self.sizes, dtype, self.device
        twin.weights, twin.inputs = cast(self.weights, dtype), cast(self.inputs, dtype)
        return twin

    def bind_step(self, step: ModelStep, style: Style,
                  trace: Trace | None = None) -> Callable[[], Tensor]:
        """Return a function that computes the step in one style; `trace` records every stage."""
        inputs = self.inputs
        tables = inputs["cos"], inputs["sin"]
        decoder = Decoder(self.sizes.config, self.weights, style, tables, fused=True, trace=trace)
        context = _Context(inputs["keys"], inputs["values"], step.past)
        x, positions = inputs["x"][:, :step.tokens], decoder.positions(step.tokens, context)
        return lambda: decoder.layer(0, x, positions, context)
