"""Quantizes to int8 and fp8 codes and scales, bitwise equal to the reference.

Each step rounds as the reference does: divisions are IEEE's (Triton's `/` is not), ties go to even.
A program holds whole blocks: each row of a tile has its own scale, or all rows share one if a block
has several rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.formulas.quant import FORMATS, scale_shape
from ...ops.quantize import check_given_scales
from .launch import Launcher

TILE = 4096
TINY = tl.constexpr(1.1754943508222875e-38)
EVEN = tl.constexpr(12582912.0)    # adding and subtracting it rounds values below 2^22 to integers


@triton.jit
def _round(x):
    return (x + EVEN) - EVEN


@triton.jit
def _e4m3(x):
    """Encodes |x| <= 448 as a byte: sign, four bits of exponent, three of mantissa; below 2^-6 in
    steps of 2^-9. Done by hand, since not every GPU that runs Triton has a cast to this type."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # three bits of mantissa, ties to even
    nearest = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    code = tl.where(magnitude < 0x3C800000, _round(tl.abs(x) * 512.0).to(tl.int32), nearest - 960)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["rows"])
def quantize_kernel(
    x_ptr, out_ptr, scales_ptr, rows, width, groups, x_row, x_batch, out_batch, scales_batch,
    INT8: tl.constexpr, LARGEST: tl.constexpr, INVERSE: tl.constexpr, HAS_SCALES: tl.constexpr,
    SHARED: tl.constexpr, SIZE: tl.constexpr, SIZE_POW: tl.constexpr, ROWS: tl.constexpr,
    ROWS_POW: tl.constexpr,
):
    """Quantizes blocks of SIZE columns and ROWS rows, or rows. Grid: row blocks, groups, batch."""
    group, block, batch = tl.program_id(1), tl.program_id(0), tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, ROWS_POW)
    row = (block * ROWS + inner).to(tl.int64)
    column = group * SIZE + tl.arange(0, SIZE_POW)
    inside = ((row < rows) & (inner < ROWS))[:, None] & ((column < width)
                                                         & (tl.arange(0, SIZE_POW) < SIZE))[None, :]
    x = tl.load(x_ptr + batch * x_batch + row[:, None] * x_row + column[None, :], mask=inside,
                other=0.0).to(tl.float32)
    scale_ptr = scales_ptr + batch * scales_batch + group
    if HAS_SCALES:
        if SHARED:
            scale = tl.load(scale_ptr + block * groups) + tl.zeros((ROWS_POW,), tl.float32)
        else:
            scale = tl.load(scale_ptr + row * groups, mask=row < rows, other=1.0)
    else:
        magnitude = tl.abs(x)
        # without NaN and infinity
        amax = tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1)
        if SHARED:
            amax = tl.max(amax, 0) + tl.zeros((ROWS_POW,), tl.float32)
        # torch multiplies by the reciprocal of a constant on a GPU, and divides on the CPU.
        scale = tl.maximum(amax * INVERSE if INVERSE > 0 else tl.div_rn(amax, LARGEST), TINY)
        if SHARED:
            tl.store(scale_ptr + block * groups + inner, scale, mask=inner == 0)
        else:
            tl.store(scale_ptr + row * groups, scale, mask=(row < rows) & (inner < ROWS))
    ratio = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
    bounded = tl.minimum(tl.maximum(ratio, -LARGEST), LARGEST)
    if INT8:
        code = _round(tl.where(ratio == ratio, bounded, 0.0)).to(tl.int8)
    else:
        code = tl.where(ratio == ratio, _e4m3(bounded), 0x7F).to(tl.uint8)     # NaN stays NaN
    tl.store(out_ptr + batch * out_batch + row[:, None] * width + column[None, :], code,
             mask=inside)


_launch = Launcher(quantize_kernel)


@lru_cache(maxsize=None)
def _inverse(largest: float) -> float:
    return float(1.0 / torch.tensor(largest, dtype=torch.float32))


def quantize(x: Tensor, format: str, granularity: str | None = None, block_size: int = 0, *,
             block_rows: int = 1, scales: Tensor | None = None) -> Any:
    return encode(x, format, granularity, block_size, block_rows, scales)


def encode(x: Tensor, format: str, granularity: str | None, block_size: int, block_rows: int,
           scales: Tensor | None, tile: int = TILE, warps: int = 4) -> tuple[Tensor, Tensor]:
    fmt = FORMATS[format]
    grain = granularity or fmt.granularity
    width = x.shape[-1]
    block_size = (block_size or fmt.block_size) if grain == "block" else width
    has_scales = scales is not None
    if scales is not None:
        check_given_scales(x, grain, block_size, block_rows, scales, None, None)
        scales = scales.clone()
    else:
        scales = torch.empty(scale_shape(x.shape, grain, block_size, block_rows), dtype=fmt.scale,
                             device=x.device)
    codes = torch.empty(x.shape, dtype=fmt.storage, device=x.device)
    if not codes.numel():
        return codes, scales
    size_pow = triton.next_power_of_2(min(block_size, width))
    shared = grain == "block" and block_rows > 1 and x.dim() > 1
    # blocks of several rows do not cross batch entries
    if shared:
        flat = x.reshape(-1, x.shape[-2], width)
        batch, rows, _ = flat.shape
        block_height = block_rows
    else:
        flat = x.reshape(1, -1, width)
        batch, rows = 1, flat.shape[1]
        block_height = max(1, min(tile // size_pow, triton.next_power_of_2(rows)))
    groups = scales.shape[-1]
    tiles = -(-rows // block_height)
    constants = {
        "INT8": format == "int8", "LARGEST": fmt.largest,
        "INVERSE": _inverse(fmt.largest) if x.is_cuda else 0.0, "HAS_SCALES": has_scales,
        "SHARED": shared, "SIZE": min(block_size, width), "SIZE_POW": size_pow,
        "ROWS": block_height, "ROWS_POW": triton.next_power_of_2(block_height),
        "num_warps": warps}
    _launch((tiles, groups, batch), (
        flat, codes if format == "int8" else codes.view(torch.uint8), scales, rows, width, groups,
        flat.stride(1), flat.stride(0), rows * width, tiles * groups if shared else 0), constants)
    return codes, scales
