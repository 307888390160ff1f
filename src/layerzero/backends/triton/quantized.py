"""Linear layers with quantized weights for several rows of x, in every format with separate scales.

Up to 64 rows the codes are decoded on their way to the tensor cores, and reading them is
most of the time. For more rows products take longer than reading: one kernel writes the weight in
x's dtype, and torch's matmul follows.

Integer codes are not converted one by one, which is slow on a GPU: in the mantissa of a float with
a fixed exponent code n reads as 2^23 + n, and the excess is subtracted. Bits of an fp8 code are
moved to those of a float, up to a power of two. Other four-bit codes are looked up in a table of
sixteen floats, which is one cache line.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ...ops.formulas.quant import code_values
from .gemv import store_tile
from .launch import Launcher
from .machine import counters, device_size

# four bits first
INT4, TABLE, INT8, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
KINDS = {"int4": 0, "nf4": 1, "mxfp4": 1, "nvfp4": 1, "int8": 2, "fp8_e4m3": 3}
# how scales are stored: as floats of any kind, as a power of two, as fp8_e4m3
SCALE_KINDS = {torch.float8_e8m0fnu: 1, torch.float8_e4m3fn: 2}
EXCESS = tl.constexpr(8388608.0)               # 2^23


@triton.jit
def _e4m3(byte):
    """The float32 values of fp8_e4m3 codes, as uint8."""
    codes = byte.to(tl.int32)
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36           # 2^120
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _integer(code):
    """Codes of at most 23 bits as float32."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - EXCESS


@triton.jit
def _scale(ptr, mask, SCALES: tl.constexpr):
    raw = tl.load(ptr, mask=mask, other=0)
    if SCALES == 1:
        codes = raw.to(tl.int32)
        value = (codes << 23).to(tl.float32, bitcast=True)
        value = tl.where(codes == 0, 5.877471754111438e-39, value)              # 2^-127
        return tl.where(codes == 255, float("nan"), value)
    if SCALES == 2:
        return _e4m3(raw)
    return raw.to(tl.float32)


@triton.jit
def _decode(w, zero, table_ptr, KIND: tl.constexpr, ZEROS: tl.constexpr, HIGH: tl.constexpr):
    """The values of codes in units of their scale; of four-bit ones the low or the high nibbles."""
    if KIND == FP8:
        return _e4m3(w)
    if KIND == INT8:
        value = _integer(w ^ 0x80) - 128.0
        return value - zero if ZEROS else value
    code = (w >> 4) if HIGH else (w & 15)
    if KIND == TABLE:
        return tl.load(table_ptr + code)
    return _integer(code) - zero if ZEROS else _integer(code) - 8.0


@triton.jit
def _scales_of(scales_ptr, zeros_ptr, whole_ptr, at, inside, SCALES: tl.constexpr,
               ZEROS: tl.constexpr, WHOLE: tl.constexpr):
    """Scales and zeros at these offsets."""
    scale = _scale(scales_ptr + at, inside, SCALES)
    if WHOLE:
        scale *= tl.load(whole_ptr).to(tl.float32)
    zero = scale
    if ZEROS:
        zero = tl.load(zeros_ptr + at, mask=inside, other=0).to(tl.float32)
    return scale, zero


@triton.jit(do_not_specialize=["rows", "n", "splits"])
def tiled_kernel(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, table_ptr, whole_ptr, out_ptr, part_ptr,
    count_ptr, rows, n, splits, x_row, w_row, scale_row,
    K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):
    """BLOCK_K bytes of BLOCK_N rows of the weight at a time, times up to ROWS rows of x.

    GROUP: bytes that share a scale, 0 for the row. Low nibbles belong to even inputs. Grid: blocks
    of the weight's rows, splits of the inputs.
    """
    block, split = tl.program_id(0), tl.program_id(1)
    row = block * BLOCK_N + tl.arange(0, BLOCK_N)
    source = tl.minimum(row, n - 1).to(tl.int64)           # rows past the end are not stored
    m = tl.arange(0, ROWS)
    four: tl.constexpr = KIND <= TABLE
    width: tl.constexpr = K // 2 if four else K
    even: tl.constexpr = width % BLOCK_K == 0
    by_tile: tl.constexpr = GROUP == 0 or GROUP % BLOCK_K == 0
    span = tl.cdiv(tl.cdiv(width, BLOCK_K), splits) * BLOCK_K
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for first in tl.range(split * span, tl.minimum((split + 1) * span, width), BLOCK_K,
                          num_stages=STAGES):
        column = first + tl.arange(0, BLOCK_K)
        inside = column < width
        w_ptrs = w_ptr + source[:, None] * w_row + column[None, :]
        w = tl.load(w_ptrs) if even else tl.load(w_ptrs, mask=inside[None, :], other=0)
        at = source[:, None] * scale_row
        if by_tile:
            scale, zero = _scales_of(scales_ptr, zeros_ptr, whole_ptr,
                                     at + (first // GROUP if GROUP > 0 else 0), row[:, None] >= 0,
                                     SCALES, ZEROS, WHOLE)
        else:
            scale, zero = _scales_of(scales_ptr, zeros_ptr, whole_ptr,
                                     at + (column // GROUP)[None, :],
                                     inside[None, :] & (row[:, None] >= 0), SCALES, ZEROS, WHOLE)
        low = (_decode(w, zero, table_ptr, KIND, ZEROS, False) * scale).to(x_ptr.dtype.element_ty)
        if four:
            pair = first * 2 + tl.arange(0, 2 * BLOCK_K)
            x = tl.load(x_ptr + m[:, None] * x_row + pair[None, :],
                        mask=(m[:, None] < rows) & (pair[None, :] < K), other=0.0)
            x_even, x_odd = tl.split(tl.reshape(x, (ROWS, BLOCK_K, 2)))
            high = (_decode(w, zero, table_ptr, KIND, ZEROS, True) * scale).to(x.dtype)
            acc = tl.dot(low, tl.trans(x_even), acc)
            acc = tl.dot(high, tl.trans(x_odd), acc)
        else:
            x = tl.load(x_ptr + m[:, None] * x_row + column[None, :],
                        mask=(m[:, None] < rows) & inside[None, :], other=0.0)
            acc = tl.dot(low, tl.trans(x), acc)
    if splits > 1:
        offset = (block.to(tl.int64) * splits + split) * BLOCK_N * ROWS
        inner = tl.arange(0, BLOCK_N)[:, None] * ROWS + m[None, :]
        tl.store(part_ptr + offset + inner, acc)
        tl.debug_barrier()
        done = tl.atomic_add(count_ptr + block, 1, sem="acq_rel")
        if done == splits - 1:
            tl.store(count_ptr + block, 0)
            acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
            # in order, so that the result is deterministic
            for s in range(splits):
                offset = (block.to(tl.int64) * splits + s) * BLOCK_N * ROWS
                acc += tl.load(part_ptr + offset + inner, cache_modifier=".cg")
            store_tile(acc, row, m, rows, n, bias_ptr, out_ptr, BIAS)
    else:
        store_tile(acc, row, m, rows, n, bias_ptr, out_ptr, BIAS)


@triton.jit(do_not_specialize=["n"])
def decode_kernel(
    w_ptr, scales_ptr, zeros_ptr, table_ptr, whole_ptr, out_ptr, n, w_row, scale_row,
    K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Writes the weight in the dtype of `out`. Grid: blocks of rows, blocks of BLOCK_K bytes."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    four: tl.constexpr = KIND <= TABLE
    width: tl.constexpr = K // 2 if four else K
    column = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    inside = (row < n) & (column < width)
    w = tl.load(w_ptr + row * w_row + column, mask=inside, other=0)
    at = row * scale_row + (column // GROUP if GROUP > 0 else column * 0)
    scale, zero = _scales_of(scales_ptr, zeros_ptr, whole_ptr, at, inside, SCALES, ZEROS, WHOLE)
    low = (_decode(w, zero, table_ptr, KIND, ZEROS, False) * scale).to(out_ptr.dtype.element_ty)
    if four:
        high = (_decode(w, zero, table_ptr, KIND, ZEROS, True) * scale).to(low.dtype)
        both = tl.reshape(tl.join(low, high), (BLOCK_N, 2 * BLOCK_K))
        pair = (tl.program_id(1) * 2 * BLOCK_K + tl.arange(0, 2 * BLOCK_K))[None, :]
        tl.store(out_ptr + row * K + pair, both, mask=(row < n) & (pair < K))
    else:
        tl.store(out_ptr + row * K + column, low, mask=inside)


_tiled, _write = Launcher(tiled_kernel), Launcher(decode_kernel)


class Config(NamedTuple):
    block_n: int
    block_k: int                               # bytes of the weight
    warps: int
    stages: int
    splits: int = 1                            # of the inputs


def config(rows: int, n: int, width: int, device: torch.device) -> Config:
    """Returns the launch configuration for a weight of n rows of `width` bytes."""
    processors, _ = device_size(device)
    block_n = 64 if n >= 32 * processors else 32
    block_k = min(64 if rows <= 32 else 32, max(16, triton.next_power_of_2(width)))
    splits = max(1, min(2 * processors // -(-n // block_n), width // (4 * block_k)))
    return Config(block_n, block_k, 4, 4 if rows <= 32 else 3, splits)


@lru_cache(maxsize=None)
def _table(format: str, device: torch.device) -> Tensor:
    return code_values(format, device)


class Codes(NamedTuple):
    """The tensors of a weight that both kernels read."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    table: Tensor
    whole: Tensor | None
    options: dict[str, Any]


def read(weight: Tensor, scales: Tensor, zeros: Tensor | None, format: str, group_size: int,
          whole: Tensor | None, k: int) -> Codes:
    kind = KINDS[format]
    group = 0 if not group_size or group_size >= k else group_size
    table = _table(format, weight.device) if kind == 1 else scales
    stored = SCALE_KINDS.get(scales.dtype, 0)
    options = {"K": k, "GROUP": group // 2 if kind < 2 else group, "KIND": kind,
               "SCALES": stored, "ZEROS": zeros is not None, "WHOLE": whole is not None}
    return Codes(weight.view(torch.uint8), scales.view(torch.uint8) if stored else scales, zeros,
                  table, whole, options)


def dequantized(codes: Codes, dtype: torch.dtype) -> Tensor:
    """Returns the weight (outputs, inputs) in this dtype."""
    weight, (n, width) = codes.weight, codes.weight.shape
    out = torch.empty((n, codes.options["K"]), dtype=dtype, device=weight.device)
    block_k = min(512, triton.next_power_of_2(width))
    block_n = max(1, 2048 // block_k)
    _write((-(-n // block_n), -(-width // block_k)), (
        weight, codes.scales, weight if codes.zeros is None else codes.zeros, codes.table,
        weight if codes.whole is None else codes.whole, out, n, weight.stride(0),
        codes.scales.stride(0)), {**codes.options, "BLOCK_N": block_n, "BLOCK_K": block_k,
                                  "num_warps": 4})
    return out


def launch(x: Tensor, codes: Codes, bias: Tensor | None, chosen: Config | None = None) -> Tensor:
    """Multiplies at most 64 rows; `chosen` is for benchmarks."""
    k, weight = x.shape[-1], codes.weight
    n, flat = len(weight), x.reshape(-1, k)
    rows = len(flat)
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    cfg = chosen or config(rows, n, weight.shape[1], x.device)
    blocks, padded = -(-n // cfg.block_n), max(16, triton.next_power_of_2(rows))
    parts = count = x
    if cfg.splits > 1:
        parts = torch.empty(blocks * cfg.splits * cfg.block_n * padded, dtype=torch.float32,
                            device=x.device)
        count = counters(x.device, blocks)
    _tiled((blocks, cfg.splits), (
        flat, weight, codes.scales, weight if codes.zeros is None else codes.zeros,
        x if bias is None else bias, codes.table, weight if codes.whole is None else codes.whole,
        out, parts, count, rows, n, cfg.splits, flat.stride(0), weight.stride(0),
        codes.scales.stride(0)), {
        **codes.options, "BIAS": bias is not None, "BLOCK_N": cfg.block_n, "BLOCK_K": cfg.block_k,
        "ROWS": padded, "STAGES": cfg.stages, "num_warps": cfg.warps})
    return out


def quantized_linear(x: Tensor, weight_q: Tensor, scales: Tensor, zeros: Tensor | None = None,
                     bias: Tensor | None = None, *, format: str, group_size: int = 0,
                     global_scale: Tensor | None = None) -> Tensor:
    return launch(x, read(weight_q, scales, zeros, format, group_size, global_scale, x.shape[-1]),
                  bias)


def decoded_linear(x: Tensor, weight_q: Tensor, scales: Tensor, zeros: Tensor | None = None,
                   bias: Tensor | None = None, *, format: str, group_size: int = 0,
                   global_scale: Tensor | None = None) -> Tensor:
    codes = read(weight_q, scales, zeros, format, group_size, global_scale, x.shape[-1])
    return F.linear(x, dequantized(codes, x.dtype), bias)
