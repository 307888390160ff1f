"""Values to int8 and fp8 codes with their scales, the reference's to the bit.

Each step rounds as the contract's formula does: divisions are IEEE's (Triton's own `/` is not), halves go to even.
A program holds whole blocks: the rows of a tile have a scale each, or, where a block has several rows, one together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.formulas.quant import FORMATS, blocks_of
from ...ops.quantize import check_given
from .launch import Launcher

TILE = 4096
TINY = tl.constexpr(1.1754943508222875e-38)
EVEN = tl.constexpr(12582912.0)    # added and taken off again, it rounds what is smaller than 2^22 to an integer


@triton.jit
def _round(x):
    return (x + EVEN) - EVEN


@triton.jit
def _e4m3(x):
    """The code of |x| <= 448 as a byte: a sign, four bits of exponent, three of mantissa; below 2^-6 steps of 2^-9.

    Spelled out, since not every GPU that runs Triton has a cast to this type.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    nearest = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20                      # three bits of mantissa, ties to even
    code = tl.where(size < 0x3C800000, _round(tl.abs(x) * 512.0).to(tl.int32), nearest - 960)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["rows"])
def quantize_kernel(
    x_ptr, out_ptr, scales_ptr, rows, width, groups, x_row, x_sheet, out_sheet, scales_sheet,
    INT8: tl.constexpr, LARGEST: tl.constexpr, INVERSE: tl.constexpr, GIVEN: tl.constexpr, SHARED: tl.constexpr,
    SIZE: tl.constexpr, SIZE_POW: tl.constexpr, ROWS: tl.constexpr, ROWS_POW: tl.constexpr,
):
    """Blocks of SIZE columns; of each ROWS rows, or with a scale for each row. Grid: groups, blocks of rows, sheets."""
    group, block, sheet = tl.program_id(1), tl.program_id(0), tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, ROWS_POW)
    row = (block * ROWS + inner).to(tl.int64)
    column = group * SIZE + tl.arange(0, SIZE_POW)
    inside = ((row < rows) & (inner < ROWS))[:, None] & ((column < width) & (tl.arange(0, SIZE_POW) < SIZE))[None, :]
    x = tl.load(x_ptr + sheet * x_sheet + row[:, None] * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    home = scales_ptr + sheet * scales_sheet + group
    if GIVEN:
        if SHARED:
            scale = tl.load(home + block * groups) + tl.zeros((ROWS_POW,), tl.float32)
        else:
            scale = tl.load(home + row * groups, mask=row < rows, other=1.0)
    else:
        size = tl.abs(x)
        most = tl.max(tl.where(size < float("inf"), size, 0.0), 1)             # neither NaN nor infinity counts
        if SHARED:
            most = tl.max(most, 0) + tl.zeros((ROWS_POW,), tl.float32)
        # On a GPU torch multiplies by the reciprocal of a constant, on the CPU it divides.
        scale = tl.maximum(most * INVERSE if INVERSE > 0 else tl.div_rn(most, LARGEST), TINY)
        if SHARED:
            tl.store(home + block * groups + inner, scale, mask=inner == 0)
        else:
            tl.store(home + row * groups, scale, mask=(row < rows) & (inner < ROWS))
    ratio = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
    bounded = tl.minimum(tl.maximum(ratio, -LARGEST), LARGEST)
    if INT8:
        code = _round(tl.where(ratio == ratio, bounded, 0.0)).to(tl.int8)
    else:
        code = tl.where(ratio == ratio, _e4m3(bounded), 0x7F).to(tl.uint8)     # NaN stays NaN
    tl.store(out_ptr + sheet * out_sheet + row[:, None] * width + column[None, :], code, mask=inside)


_launch = Launcher(quantize_kernel)


@lru_cache(maxsize=None)
def _inverse(largest: float) -> float:
    return float(1.0 / torch.tensor(largest))                                  # in float32


def quantize(x: Tensor, format: str, granularity: str | None = None, block_size: int = 0, *, block_rows: int = 1,
             scales: Tensor | None = None) -> Any:
    return encode(x, format, granularity, block_size, block_rows, scales)


def encode(x: Tensor, format: str, granularity: str | None, block_size: int, block_rows: int, scales: Tensor | None,
           tile: int = TILE, warps: int = 4) -> tuple[Tensor, Tensor]:
    form = FORMATS[format]
    by = granularity or form.granularity
    width = x.shape[-1]
    block_size = (block_size or form.block_size) if by == "block" else width
    given = scales is not None
    if scales is not None:
        check_given(x, by, block_size, block_rows, scales, None, None)
        scales = scales.clone()
    else:
        scales = torch.empty(blocks_of(x.shape, by, block_size, block_rows), dtype=form.scale, device=x.device)
    codes = torch.empty(x.shape, dtype=form.storage, device=x.device)
    if not codes.numel():
        return codes, scales
    size_pow = triton.next_power_of_2(min(block_size, width))
    shared = by == "block" and block_rows > 1 and x.dim() > 1
    if shared:                                     # blocks of several rows do not cross from sheet to sheet
        flat = x.reshape(-1, x.shape[-2], width)
        sheets, rows, _ = flat.shape
        tall = block_rows
    else:
        flat = x.reshape(1, -1, width)
        sheets, rows = 1, flat.shape[1]
        tall = max(1, min(tile // size_pow, triton.next_power_of_2(rows)))
    groups = scales.shape[-1]
    _launch((-(-rows // tall), groups, sheets), (
        flat, codes if format == "int8" else codes.view(torch.uint8), scales, rows, width, groups, flat.stride(1),
        flat.stride(0), rows * width, -(-rows // tall) * groups if shared else 0), {
        "INT8": format == "int8", "LARGEST": form.largest, "INVERSE": _inverse(form.largest) if x.is_cuda else 0.0,
        "GIVEN": given, "SHARED": shared, "SIZE": min(block_size, width), "SIZE_POW": size_pow, "ROWS": tall,
        "ROWS_POW": triton.next_power_of_2(tall), "num_warps": warps})
    return codes, scales
