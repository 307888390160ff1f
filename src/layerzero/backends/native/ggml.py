"""Linear layers with weights in ggml's formats, multiplied as bytes; see quant/linear.h.

A weight is packed once, its rows interleaved so that one vector load feeds several of them, and
kept beside the weight (see _packing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops.formulas.ggml import GGML_FORMATS
from .._packing import PACKED
from . import build

# as quant/blocks.h numbers them
FORMATS = {f: i for i, f in enumerate(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k",
                                       "q6_k"))}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}      # as kernels.cpp numbers them


def pack_weight(weight_q: Tensor, format: str, portable: bool = False) -> Tensor:
    """Returns a weight (out_features, row_bytes) in the layout of this build, or the portable one,
    in memory aligned to cache lines."""
    module, number = build.module(), FORMATS[format]
    outputs, row_bytes = weight_q.shape
    inputs = GGML_FORMATS[format].row_width(row_bytes)
    size = module.ggml_packed_bytes(portable, number, outputs, inputs)
    memory = torch.empty(size + 63, dtype=torch.uint8)
    packed = memory[-memory.data_ptr() % 64:][:size]
    module.ggml_pack(portable, number, weight_q.data_ptr(), packed.data_ptr(), outputs, inputs,
                     torch.get_num_threads())
    return packed


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, format: str,
             portable: bool = False) -> Tensor:
    inputs = x.shape[-1]
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype)
    if not x.is_contiguous() and x.dim() != 2:
        x = x.contiguous()
    build.module().ggml_linear(
        portable, FORMATS[format], DTYPES[x.dtype], x.data_ptr(), packed.data_ptr(),
        None if bias is None else bias.data_ptr(), out.data_ptr(), out.numel() // outputs, inputs,
        outputs, x.stride(0) if x.dim() == 2 else inputs, torch.get_num_threads())
    return out


def linear() -> Callable[..., Any]:
    build.module()                             # raises at load, not in a call, if it is not built
    packers = {f: partial(pack_weight, format=f) for f in FORMATS}

    def run(x: Tensor, weight_q: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None,
            bias: Tensor | None = None, *, format: str, group_size: int = 0,
            activations: str = "q8") -> Tensor:
        packed = PACKED.get(f"ggml {format}", packers[format], weight_q)
        return multiply(x, packers[format](weight_q) if packed is None else packed, bias,
                        len(weight_q), format)

    return run
