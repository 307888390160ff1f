"""RMS norm, optionally fused with a residual add, in one pass: each row is read once and stays in
registers.

A program holds a few whole rows at a time and loops over its rows; the weight is loaded once,
before the rows. For one row latency is everything: the weight is loaded while the squares are
summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher
from .machine import device_size

TILE = 4096                                    # elements of narrow rows per program


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, rows, x_row, residual_row, eps, offset,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WEIGHT: tl.constexpr,
    RESIDUAL: tl.constexpr, STAGES: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    whole: tl.constexpr = BLOCK == HIDDEN
    if WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < HIDDEN,
                         other=0.0).to(tl.float32) + offset
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < rows) & (column < HIDDEN)
        if ROWS == 1 and whole:                # nothing to mask
            x = tl.load(x_ptr + row * x_row + column)
            if RESIDUAL:
                y = tl.load(residual_ptr + row * residual_row + column)
        else:
            x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0)
            if RESIDUAL:
                y = tl.load(residual_ptr + row * residual_row + column, mask=inside, other=0.0)
        upcast = x.to(tl.float32)
        if RESIDUAL:
            # rounded before it is normalised
            x = (upcast + y.to(tl.float32)).to(x.dtype)
            tl.store(total_ptr + row * HIDDEN + column, x, mask=inside)
            upcast = x.to(tl.float32)
        upcast = upcast * tl.rsqrt(tl.sum(upcast * upcast, 1) / HIDDEN + eps)[:, None]
        if WEIGHT:
            upcast = upcast * weight
        tl.store(out_ptr + row * HIDDEN + column, upcast.to(out_ptr.dtype.element_ty), mask=inside)


_launch = Launcher(rms_norm_kernel)


def config(rows: int, hidden: int, device: torch.device) -> tuple[int, int, int, int]:
    """Returns (rows of a tile, warps, programs, stages)."""
    block = triton.next_power_of_2(hidden)
    tile = 1 if block >= TILE // 2 else min(TILE // block, triton.next_power_of_2(rows))
    tiles = -(-rows // tile)
    elements = tile * block
    if tiles <= device_size(device)[0]:        # latency-bound: one thread per 16-byte load
        return tile, max(1, min(16, elements // 256)), tiles, 1
    return tile, max(1, min(16, elements // 1024)), tiles, 1


def launch(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float,
           chosen: tuple[int, int, int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Returns (normalised, sum); the sum is x itself without a residual."""
    hidden = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    if not out.numel():
        return out, total
    flat = x.reshape(-1, hidden)               # a view if the rows are evenly spaced
    other = flat if residual is None else residual.reshape(-1, hidden)
    tile, warps, programs, stages = chosen or config(flat.shape[0], hidden, x.device)
    _launch((programs,), (
        flat, other, flat if weight is None else weight, out, total, flat.shape[0], flat.stride(0),
        other.stride(0), eps, offset), {
        "HIDDEN": hidden, "BLOCK": triton.next_power_of_2(hidden), "ROWS": tile,
        "WEIGHT": weight is not None, "RESIDUAL": residual is not None, "STAGES": stages,
        "num_warps": warps})
    return out, total


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *,
             offset: float = 0.0) -> Tensor:
    return launch(x, None, weight, eps, offset)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None,
                 eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return launch(x, residual, weight, eps, 0.0)
