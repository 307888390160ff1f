"""All layers of a token in one call of our compiled kernels; see backends/native/quant/decode.h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...backends.native import ACTIVATIONS, ggml
from ...backends.native import build as native_build
from ...backends.native.declaration import DTYPES
from ...models.decoder import APART, Decoder
from ...models.sequence_kv import SequenceKV
from ...models.weights.ggml import GgmlWeight, raw_tensor

PRODUCTS = ("qkv", "out", "in", "down")       # as quant/decode.h orders them
NO_PRODUCT = [0] * 5
NORMS = ("ln1", "ln2", "q_norm", "k_norm", "post_attention", "post_mlp")


def why_not_native(decoder: Decoder, kv: SequenceKV) -> str:
    """Return why a token of this model cannot be one call, "" if it can."""
    c, weights = decoder.config, decoder.weights
    norm = weights["norm"]
    if not isinstance(norm, Tensor) or norm.device.type != "cpu" or norm.dtype != torch.float32:
        return "it is not float32 on a CPU"
    if c.experts or not c.gated or c.norm != "rms" or c.rope_style != "rotate_half":
        return "it has experts, or no gate, RMS norms or rope in halves"
    if kv.keys[0].dtype not in DTYPES or kv.keys[0].shape[0] != 1:
        return f"keys and values are kept as {kv.kind}"
    if c.hidden % 32 or c.inner % 32 or (c.qk_norm and c.head_dim % 32):
        return "its sizes are no multiples of 32"
    names = [n for i in range(c.layers) for name in PRODUCTS
             for n in _parts(decoder, f"{i}.{name}", name)]
    unquantized = [n for n in (*names, "embed" if c.tied else "head")
             if not isinstance(weights.get(n), GgmlWeight)]
    if unquantized or decoder.activations != "q8":
        return f"{unquantized[0] if unquantized else 'q8'} is not one quantized product"
    formats = {w.format for w in weights.values() if isinstance(w, GgmlWeight)}
    if not formats <= ggml.FORMATS.keys():
        return f"there is no kernel for {', '.join(sorted(formats - ggml.FORMATS.keys()))}"
    return "" if hasattr(native_build.module(), "ggml_decode") else "lz build has not compiled it"


def _parts(decoder: Decoder, full_name: str, name: str) -> list[str]:
    """Return the names of a product's weights: one, or several where their formats differ."""
    return [full_name] if full_name in decoder.weights else [
        full_name.removesuffix(name) + part for part in APART.get(name, (name,))]


class NativeDecode:
    """Calling it with a token and its place gives the logits and the likeliest id."""

    def __init__(self, decoder: Decoder, kv: SequenceKV) -> None:
        self.decoder, self.kv = decoder, kv
        self._run = native_build.module().ggml_decode
        self._held: list[Any] = []             # what the addresses point to
        self.refresh()

    def refresh(self) -> None:
        """Read the addresses again: the buffers of keys and values have moved."""
        c, weights = self.decoder.config, self.decoder.weights
        self._held.clear()
        rows = [self._layer(i) for i in range(c.layers)]
        self._layers = torch.tensor(rows, dtype=torch.int64)
        self._ends = torch.tensor([*self._embedding(), *self._product("embed" if c.tied else
                                                                      "head")], dtype=torch.int64)
        norm = weights["norm"]
        assert isinstance(norm, Tensor)
        scale = c.attention_scale or c.head_dim ** -0.5
        self._fixed = (DTYPES[self.kv.keys[0].dtype], self._layers.data_ptr(), c.layers,
                       self._ends.data_ptr(), norm.data_ptr(), c.hidden, c.heads, c.kv_heads,
                       c.head_dim, c.rotated // 2, c.inner, ACTIVATIONS[c.activation], c.eps,
                       scale, c.softcap, c.embed_scale)
        self._vocab = c.vocab

    def __call__(self, token: int, position: int) -> tuple[Tensor, int]:
        logits = torch.empty((1, self._vocab))
        greedy_token: int = self._run(*self._fixed, token, logits.data_ptr(), position,
                                   torch.get_num_threads())
        return logits, greedy_token

    def _embedding(self) -> list[int]:
        """Returns what quant/decode.h reads the rows of tokens from: a product without a kernel."""
        weight = self.decoder.weights["embed"]
        rows = raw_tensor(weight).contiguous()
        self._held.append(rows)
        return [rows.data_ptr(), 0, ggml.FORMATS[weight.format]
                if isinstance(weight, GgmlWeight) else -1, *reversed(weight.shape)]

    def _layer(self, i: int) -> list[int]:
        c, d = self.decoder.config, self.decoder
        tables = d.window_tables if c.has_window(i) else d.tables
        assert tables is not None
        cos, sin = (t.float().contiguous() for t in tables)
        self._held += [cos, sin]
        products = [n for name in PRODUCTS for n in self._products(i, name)]
        return [*(self._address(f"{i}.{name}") for name in NORMS), *products,
                self.kv.keys[i].data_ptr(), self.kv.values[i].data_ptr(), cos.data_ptr(),
                sin.data_ptr(), c.window if c.has_window(i) else 0]

    def _products(self, i: int, name: str) -> list[int]:
        """Returns the products, padded with empty ones to what quant/decode.h has room for."""
        parts = _parts(self.decoder, f"{i}.{name}", name)
        numbers = [n for part in parts for n in self._product(part)]
        return numbers + NO_PRODUCT * (len(APART.get(name, (name,))) - len(parts))

    def _product(self, name: str) -> list[int]:
        weight = self.decoder.weights[name]
        assert isinstance(weight, GgmlWeight)
        packed, (outputs, inputs) = ggml.packed_weight(weight.blocks, weight.format), weight.shape
        self._held.append(packed)
        return [packed.data_ptr(), self._address(f"{name}.bias"), ggml.FORMATS[weight.format],
                inputs, outputs]

    def _address(self, name: str) -> int:
        weight = self.decoder.weights.get(name)
        if weight is None:
            return 0
        assert isinstance(weight, Tensor)
        self._held.append(weight)
        return weight.data_ptr()
