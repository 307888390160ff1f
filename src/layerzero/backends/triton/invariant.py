"""Products whose results keep their bits, whatever else is in the batch and on this rank.

Every number of the result is one sum over the inputs, in order, of the same tensor-core
instructions: tiles of 64 inputs, never split between programs. The tile of the result may be
small or large, since an instruction computes its numbers independently of each other; that the
bits agree is checked on the device (verify/certification/invariance.py), as for every invariant
kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated import _activate, gate
from .launch import Launcher

KINDS = {None: -1, "silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
FEW_ROWS = 64                                  # below a tile of many rows
BLOCK_K = 64


class Tile(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int


def tile_of(rows: int, itemsize: int) -> Tile:
    """Returns a tile of at least 64 rows: fewer would use another instruction of Hopper."""
    if itemsize == 4:                              # no tensor cores: float32 is not rounded to TF32
        return Tile(64, 32, 4, 2) if rows <= FEW_ROWS else Tile(64, 64, 4, 2)
    return Tile(64, 32, 4, 5) if rows <= FEW_ROWS else Tile(128, 128, 8, 3)


@triton.jit(do_not_specialize=["rows", "n"])
def product_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, rows, n, x_row, w_row,
    K: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):
    """Programs of GROUP row blocks go through the columns together: the weight stays in cache."""
    blocks_m, blocks_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP * blocks_n) * GROUP
    height = tl.minimum(blocks_m - first, GROUP)
    inner = program % (GROUP * blocks_n)
    m = (first + inner % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = inner // height * BLOCK_N + tl.arange(0, BLOCK_N)
    # what is past the end is clamped, and not stored
    x_rows = x_ptr + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * x_row
    w_rows = w_ptr + tl.minimum(column, n - 1).to(tl.int64)[None, :] * w_row
    even: tl.constexpr = K % BLOCK_K == 0
    # Sums of float32 as long as K, one product after the other, would lose digits that torch keeps.
    if x_ptr.dtype.element_ty == tl.float32:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if even:
            x = tl.load(x_rows + k[None, :])
            w = tl.load(w_rows + k[:, None])
        else:
            x = tl.load(x_rows + k[None, :], mask=k[None, :] < K, other=0.0)
            w = tl.load(w_rows + k[:, None], mask=k[:, None] < K, other=0.0)
        if x_ptr.dtype.element_ty == tl.float32:
            acc += tl.dot(x, w, input_precision="ieee").to(tl.float64)
        else:
            acc = tl.dot(x, w, acc)
    acc = acc.to(tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    if KIND >= 0:
        acc = _activate(acc, KIND)
    tl.store(out_ptr + m[:, None].to(tl.int64) * n + column[None, :],
             acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < rows) & (column[None, :] < n))


_product = Launcher(product_kernel)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None,
           activation: str | None = None) -> Tensor:
    k, n = x.shape[-1], weight.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    flat = x.reshape(-1, k)
    rows = flat.shape[0]
    if out.numel():
        tile = tile_of(rows, x.element_size())
        grid = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns)
        _product((grid,), (flat, weight, x if bias is None else bias, out, rows, n, flat.stride(0),
                           weight.stride(0)),
                 {"K": k, "BIAS": bias is not None, "KIND": KINDS[activation],
                  "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": BLOCK_K, "GROUP": 8,
                  "STAGES": tile.stages, "num_warps": tile.warps})
    return out


def mlp(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str = "swiglu", *,
        weight_up: Tensor | None = None, bias_in: Tensor | None = None,
        bias_up: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
    if activation in KINDS:
        inner = linear(x, weight_in, bias_in, activation)
        return linear(inner, weight_down, bias_down)
    first = linear(x.reshape(-1, x.shape[-1]), weight_in, bias_in)
    gates, ups = (first.chunk(2, -1) if weight_up is None
                  else (first, linear(x.reshape(-1, x.shape[-1]), weight_up, bias_up)))
    inner = gate(gates, ups, activation)
    return linear(inner, weight_down, bias_down).view(*x.shape[:-1], weight_down.shape[0])
