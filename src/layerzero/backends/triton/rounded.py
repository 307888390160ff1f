"""Linear layers whose inputs are rounded too: one pass rounds x, torch multiplies codes with codes.

torch.int8_dynamic_linear and torch.fp8_dynamic_linear run a kernel for each step of the rounding,
and int8 products, which torch sums in int32, take as many steps to become floats.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import encode
from .launch import Launcher


@triton.jit(do_not_specialize=["n"])
def scale_kernel(sum_ptr, step_ptr, scales_ptr, bias_ptr, out_ptr, n, BIAS: tl.constexpr,
                 BLOCK: tl.constexpr):
    """out = sums * step of the row * scale of the column + bias. Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    total = tl.load(sum_ptr + row * n + column, mask=inside, other=0).to(tl.float32)
    total *= tl.load(scales_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total *= tl.load(step_ptr + row)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + column, total.to(out_ptr.dtype.element_ty), mask=inside)


_scale = Launcher(scale_kernel)
BLOCK = 1024


def scaled(sums: Tensor, step: Tensor, scales: Tensor, bias: Tensor | None,
           dtype: torch.dtype) -> Tensor:
    """Returns int32 sums (rows, n) times a step for each row and a scale for each column."""
    rows, n = sums.shape
    out = torch.empty((rows, n), dtype=dtype, device=sums.device)
    _scale((rows, -(-n // BLOCK)), (sums, step, scales, scales if bias is None else bias, out, n),
           {"BIAS": bias is not None, "BLOCK": BLOCK, "num_warps": 4})
    return out


def int8_linear(x: Tensor, weight_q: Tensor, scales: Tensor, bias: Tensor | None = None, *,
                format: str, activations: str) -> Tensor:
    codes, step = encode(x.reshape(-1, x.shape[-1]), "int8", "channel", 0, 1, None)
    out = scaled(torch._int_mm(codes, weight_q.t()), step, scales, bias, x.dtype)
    return out.view(*x.shape[:-1], len(weight_q))


def fp8_linear(x: Tensor, weight_q: Tensor, scales: Tensor, bias: Tensor | None = None, *,
               format: str, activations: str) -> Tensor:
    codes, step = encode(x.reshape(-1, x.shape[-1]), "fp8_e4m3", "channel", 0, 1, None)
    out = torch._scaled_mm(codes, weight_q.t(), step, scales.view(1, -1), bias, out_dtype=x.dtype)
    return out.view(*x.shape[:-1], len(weight_q))
