"""The keys and values of one generation, for every layer: buffers that grow in place.

It is a Decoder's `past` while text is generated. Keys and values are kept in float32, bfloat16 or
float16, or as q8_0 (ggml's: 34 bytes for 32 values). What is kept narrower than the query is
upcast for each call: that saves memory, not time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.formulas.ggml import GGML_FORMATS, dequantize_blocks, quantize_blocks
from ..spec.errors import CacheFull, ConfigError
from .decoder_config import DecoderConfig

KINDS = ("float32", "bfloat16", "float16", "q8_0")
MIN_CAPACITY = 256                             # tokens


class SequenceKV:
    """`kind` is how keys and values are kept, `capacity` the most tokens that may be."""

    def __init__(self, config: DecoderConfig, capacity: int, kind: str = "float32",
                 batch: int = 1, device: str | torch.device = "cpu") -> None:
        if kind not in KINDS:
            raise ConfigError(f"a KV cache is kept as one of {', '.join(KINDS)}; got {kind!r}")
        if kind == "q8_0" and config.head_dim % GGML_FORMATS[kind].block:
            raise ConfigError(f"a KV cache in q8_0 wants heads of a multiple of "
                              f"{GGML_FORMATS[kind].block}, got {config.head_dim}; keep it as "
                              "bfloat16")
        self.config, self.capacity, self.kind, self.length = config, capacity, kind, 0
        width = (GGML_FORMATS[kind].row_bytes(config.head_dim) if kind == "q8_0"
                 else config.head_dim)
        dtype = torch.uint8 if kind == "q8_0" else getattr(torch, kind)
        tokens = min(capacity, MIN_CAPACITY)
        self.keys, self.values = (
            [torch.empty((batch, tokens, config.kv_heads, width), dtype=dtype, device=device)
             for _ in range(config.layers)] for _ in range(2))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def reserve(self, layer: int, end: int) -> None:
        """Make sure that a layer has room for tokens up to `end`."""
        if end > self.capacity:
            raise CacheFull.of(f"{end} tokens are to be kept", f"it has room for {self.capacity}")
        for buffers in (self.keys, self.values):
            old = buffers[layer]
            if end > old.shape[1]:
                size = min(self.capacity, max(end, 2 * old.shape[1]))
                buffers[layer] = old.new_empty((old.shape[0], size, *old.shape[2:]))
                buffers[layer][:, :self.length] = old[:, :self.length]

    def attend(self, call_op: Callable[..., Any], layer: int, q: Tensor, k: Tensor,
               v: Tensor) -> Tensor:
        end = self.length + q.shape[1]
        self.reserve(layer, end)
        tensors = []
        for buffer, new in ((self.keys[layer], k), (self.values[layer], v)):
            if self.kind == "q8_0":
                buffer[:, self.length:end] = quantize_blocks(new.float(), "q8_0")
                tensors.append(dequantize_blocks(buffer[:, :end], "q8_0").to(q.dtype))
            else:
                buffer[:, self.length:end] = new
                tensors.append(buffer[:, :end].to(q.dtype))
        out: Tensor = call_op("attention", query=q, key=tensors[0], value=tensors[1],
                              is_causal=True, causal_align="bottom_right", layout="bshd",
                              **self.config.attention_options(layer))
        return out
