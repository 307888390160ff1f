"""Linear layers for few rows of x: the weight is read once, at memory bandwidth.

One row: every thread reads 16 bytes of each of several rows of the weight, multiplies in float32,
and the threads of a program reduce at the end. No shared memory, no tensor cores, and each thread
has eight loads in flight.

Two to sixteen rows of a weight of floats (quantized.py has those of codes): tensor cores, with the
weight as the M side. If the weight has too few rows to occupy the device, several programs split
the inputs (split-K); the last one to finish adds up their parts, always in the same order.

Four-bit codes are not converted one by one. In the mantissa of a float with a fixed exponent, code
n reads as 256 + n or 16 + n, depending on the position of its bits in the word; the excess is
subtracted once for all rows. If a row of x fits into the registers of a program, the program keeps
it and goes through many rows of the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent import prefetch_rows, prefetched, wait_for_previous, waits
from .launch import Launcher
from .machine import counters, device_size

MAX_ROWS = 16


@triton.jit
def _load_x(x_ptr, column, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x_ptr + column).to(tl.float32)
    return tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def _add_two_products(word, x_low, x_high, total, ASM: tl.constexpr):
    """Adds the products of two codes plus their offsets; the codes are in bits 15 to 18 and 19 to
    22.

    On a GPU `and` and `or` are one lop3 instruction; the compiler would use two for two constants.
    """
    if ASM:
        low = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x78000, $2, 0xEA;", "=r,r,r",
            [word, tl.full(word.shape, 0x43800000, tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
        high = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x780000, $2, 0xEA;", "=r,r,r",
            [word, tl.full(word.shape, 0x41800000, tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low, high = (word & 0x78000) | 0x43800000, (word & 0x780000) | 0x41800000
    # 256 + n, 16 + n
    low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    return total + low * x_low[None, :, :] + high * x_high[None, :, :]


@triton.jit
def _load_eight(x_ptr, word, K: tl.constexpr, EVEN: tl.constexpr):
    """Loads the eight inputs for the codes of each of `word` (quads, 4), as eight such tensors."""
    column = word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    x = _load_x(x_ptr, column, K, EVEN)
    even, odd = tl.split(tl.reshape(x, (word.shape[0], 4, 4, 2)))
    x04, x26 = tl.split(tl.reshape(even, (word.shape[0], 4, 2, 2)))
    x15, x37 = tl.split(tl.reshape(odd, (word.shape[0], 4, 2, 2)))
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _store_row(total, row, n, scales_ptr, scale_row, bias_ptr, out_ptr, BY_ROW: tl.constexpr,
               BIAS: tl.constexpr):
    inside = row < n
    if BY_ROW:
        total *= tl.load(scales_ptr + row * scale_row, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def one_row_kernel(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, n, w_row, scale_row,
    K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    STAGES: tl.constexpr, WAIT: tl.constexpr, REQUESTS: tl.constexpr,
):
    """Multiply by weights of floats or one-byte codes. GROUP: inputs per scale, 0 for the row."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end are clamped, and not stored
    source = tl.minimum(row, n - 1).to(tl.int64)
    prefetch_rows(w_ptr + source * w_row, REQUESTS)
    wait_for_previous(WAIT)
    block: tl.constexpr = LANES * VEC
    even: tl.constexpr = K % block == 0
    lane = tl.arange(0, LANES)
    column = lane[:, None] * VEC + tl.arange(0, VEC)[None, :]
    total = tl.zeros((BLOCK_N, LANES), tl.float32)
    for first in tl.range(0, K, block, num_stages=STAGES):
        w_ptrs = w_ptr + source[:, None, None] * w_row + (first + column)[None, :, :]
        if even:
            w = tl.load(w_ptrs, eviction_policy="evict_first")
        else:
            w = tl.load(w_ptrs, mask=(first + column)[None, :, :] < K, other=0.0,
                        eviction_policy="evict_first")
        x = _load_x(x_ptr, first + column, K, even)
        sums = tl.sum(w.to(tl.float32) * x[None, :, :], 2)
        if GROUP > 0 or ZEROS:
            in_row = first + lane * VEC < K
            scale_offset = source[:, None] * scale_row
            if GROUP > 0:
                scale_offset += ((first + lane * VEC) // GROUP)[None, :]
            if ZEROS:
                zero = tl.load(zeros_ptr + scale_offset, mask=in_row[None, :],
                               other=0).to(tl.float32)
                sums -= zero * tl.sum(x, 1)[None, :]
            if GROUP > 0:
                sums *= tl.load(scales_ptr + scale_offset, mask=in_row[None, :],
                                other=0.0).to(tl.float32)
        total += sums
    _store_row(tl.sum(total, 1), row, n, scales_ptr, scale_row, bias_ptr, out_ptr, SCALED
               and GROUP == 0, BIAS)


@triton.jit
def _load_int4(
    w_ptr, scales_ptr, zeros_ptr, source, first, scale_row,
    K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, QUADS: tl.constexpr,
):
    """Loads the words (rows, quads, 4) from `first` on, and each quad's scale and zero."""
    words: tl.constexpr = K // 8
    even: tl.constexpr = words % (4 * QUADS) == 0
    quad = tl.arange(0, QUADS)
    word = first + quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    w_ptrs = w_ptr + source[:, None, None] * words + word[None, :, :]
    if even:
        w = tl.load(w_ptrs, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptrs, mask=word[None, :, :] < words, other=0, eviction_policy="evict_first")
    scale_offset = source[:, None] * scale_row
    if GROUP > 0:
        scale_offset += ((first + quad * 4) * 8 // GROUP)[None, :]
    in_row = (first + quad * 4 < words)[None, :]
    scale, zero = 1.0, 0.0
    if GROUP > 0:
        scale = tl.load(scales_ptr + scale_offset) if even else tl.load(scales_ptr + scale_offset,
                                                                        mask=in_row, other=0.0)
    if ZEROS:
        zero = (tl.load(zeros_ptr + scale_offset) if even
                else tl.load(zeros_ptr + scale_offset, mask=in_row, other=0))
    return w, scale, zero


@triton.jit
def _int4_products(
    w, scale, zero, x0, x1, x2, x3, x4, x5, x6, x7, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Returns (rows, quads), the sums of products of these words."""
    low, high = x0 + x2 + x4 + x6, x1 + x3 + x5 + x7
    excess = low * 256.0 + high * 16.0
    if not ZEROS:
        excess += (low + high) * 8.0
    part = tl.zeros(w.shape, tl.float32) - excess[None, :, :]
    part = _add_two_products(w << 15, x0, x1, part, ASM)
    part = _add_two_products(w << 7, x2, x3, part, ASM)
    part = _add_two_products(w >> 1, x4, x5, part, ASM)
    part = _add_two_products(w >> 9, x6, x7, part, ASM)
    part = tl.sum(part, 2)
    if ZEROS:
        part -= zero.to(tl.float32) * tl.sum(low + high, 1)[None, :]
    if GROUP > 0:
        part *= scale.to(tl.float32)
    return part


@triton.jit(do_not_specialize=["n"])
def one_row_int4_kernel(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, n, scale_row,
    K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, QUADS: tl.constexpr, ASM: tl.constexpr,
):
    """Eight codes per word, the first in the lowest bits. Programs take blocks of rows in turn."""
    words: tl.constexpr = K // 8
    even: tl.constexpr = words % (4 * QUADS) == 0
    word = tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    inner = tl.arange(0, BLOCK_N)
    begin, blocks, step = tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.num_programs(0)
    if words <= 4 * QUADS:                                 # all of x is kept in registers
        row = begin * BLOCK_N + inner
        # Rows past the end are clamped, and not stored.
        w, scale, zero = _load_int4(w_ptr, scales_ptr, zeros_ptr,
                                    tl.minimum(row, n - 1).to(tl.int64), 0, scale_row, K,
                                    GROUP, ZEROS, QUADS)
        x0, x1, x2, x3, x4, x5, x6, x7 = _load_eight(x_ptr, word, K, even)
        # the next block is loaded while this one is computed
        for block in range(begin, blocks, step):
            row = (block + step) * BLOCK_N + inner
            w_next, scale_next, zero_next = _load_int4(
                w_ptr, scales_ptr, zeros_ptr, tl.minimum(row, n - 1).to(tl.int64), 0, scale_row, K,
                GROUP, ZEROS, QUADS)
            part = _int4_products(w, scale, zero, x0, x1, x2, x3, x4, x5, x6, x7, GROUP, ZEROS, ASM)
            _store_row(tl.sum(part, 1), block * BLOCK_N + inner, n, scales_ptr, scale_row, bias_ptr,
                       out_ptr, GROUP == 0, BIAS)
            w, scale, zero = w_next, scale_next, zero_next
    else:
        for block in range(begin, blocks, step):
            row = block * BLOCK_N + inner
            source = tl.minimum(row, n - 1).to(tl.int64)
            total = tl.zeros((BLOCK_N, QUADS), tl.float32)
            for first in range(0, words, 4 * QUADS):
                w, scale, zero = _load_int4(w_ptr, scales_ptr, zeros_ptr, source, first, scale_row,
                                            K, GROUP, ZEROS, QUADS)
                x0, x1, x2, x3, x4, x5, x6, x7 = _load_eight(x_ptr, first + word, K, even)
                total += _int4_products(w, scale, zero, x0, x1, x2, x3, x4, x5, x6, x7, GROUP,
                                        ZEROS, ASM)
            _store_row(tl.sum(total, 1), row, n, scales_ptr, scale_row, bias_ptr, out_ptr,
                       GROUP == 0, BIAS)


@triton.jit(do_not_specialize=["rows", "n", "splits"])
def few_rows_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, count_ptr, rows, n, splits, x_row, w_row,
    K: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr, REQUESTS: tl.constexpr,
):
    """Multiply few rows by weights of floats; those of codes are in quantized.py."""
    block, split = tl.program_id(0), tl.program_id(1)
    row = block * BLOCK_N + tl.arange(0, BLOCK_N)
    source = tl.minimum(row, n - 1).to(tl.int64)
    m = tl.arange(0, ROWS)
    even: tl.constexpr = K % BLOCK_K == 0
    split_width = tl.cdiv(tl.cdiv(K, BLOCK_K), splits) * BLOCK_K
    prefetch_rows(w_ptr + source * w_row + tl.minimum(split * split_width, K - STAGES * BLOCK_K),
                  REQUESTS)
    wait_for_previous(WAIT)
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for first in tl.range(split * split_width, tl.minimum((split + 1) * split_width, K),
                          BLOCK_K, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK_K)
        w_ptrs = w_ptr + source[:, None] * w_row + column[None, :]
        x_ptrs = x_ptr + m[None, :] * x_row + column[:, None]
        w = tl.load(w_ptrs) if even else tl.load(w_ptrs, mask=column[None, :] < K, other=0)
        x = tl.load(x_ptrs, mask=(m[None, :] < rows) & (column[:, None] < K), other=0.0)
        acc = tl.dot(w, x, acc)
    if splits > 1:
        part = (tl.program_id(0).to(tl.int64) * splits + split) * BLOCK_N * ROWS
        inner = tl.arange(0, BLOCK_N)[:, None] * ROWS + m[None, :]
        tl.store(part_ptr + part + inner, acc)
        tl.debug_barrier()
        done = tl.atomic_add(count_ptr + block, 1, sem="acq_rel")
        if done == splits - 1:
            tl.store(count_ptr + block, 0)
            acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
            # in order, so that the result is deterministic
            for s in range(splits):
                part = (tl.program_id(0).to(tl.int64) * splits + s) * BLOCK_N * ROWS
                acc += tl.load(part_ptr + part + inner, cache_modifier=".cg")
            store_tile(acc, row, m, rows, n, bias_ptr, out_ptr, BIAS)
    else:
        store_tile(acc, row, m, rows, n, bias_ptr, out_ptr, BIAS)


@triton.jit
def store_tile(acc, row, m, rows, n, bias_ptr, out_ptr, BIAS: tl.constexpr):
    inside = row < n
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + m[None, :].to(tl.int64) * n + row[:, None], acc.to(out_ptr.dtype.element_ty),
             mask=inside[:, None] & (m[None, :] < rows))


_one_row, _one_row_int4, _few_rows = Launcher(one_row_kernel), Launcher(
    one_row_int4_kernel), Launcher(few_rows_kernel)


class Config(NamedTuple):
    block_n: int
    block_k: int               # one row: lanes of 16 bytes; few rows: columns of the weight
    warps: int
    stages: int
    # of the inputs; one row of four-bit codes: programs per multiprocessor
    splits: int = 1


def config(rows: int, n: int, width: int, int4: bool, device: torch.device,
           programs: float = 1.0) -> Config:
    """Returns the launch configuration; `width`: elements in a row of the weight. `programs` is a
    multiple of what was fastest on an H200, for tuning."""
    processors, _ = device_size(device)
    # enough threads to hold all of x, if possible
    if rows == 1 and int4:
        quads = max(128, triton.next_power_of_2(-(-width // 16)))
        quads = quads if quads <= 512 else 128
        return Config(2, quads, quads // 32, 1, max(1, int(512 // quads * programs)))
    if rows == 1:
        return Config(int((4 if n >= 4 * 4 * processors else 2) / programs), 128, 4, 1)
    block_n = 64 if n >= 64 * processors else 32
    block_k = min(128, max(16, triton.next_power_of_2(width)))
    splits = max(1, min(int(2 * processors * programs) // -(-n // block_n), width // (4 * block_k)))
    return Config(block_n, block_k, 4, 4, splits)


def launch(x: Tensor, weight: Tensor, scales: Tensor | None, zeros: Tensor | None,
           bias: Tensor | None, format: str, group_size: int, chosen: Config | None = None,
           programs: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Launches the product. `format`: that of the codes, which are multiplied with one row, or ""
    for a weight of floats; `dtype`: of the result, that of x by default."""
    k, n = x.shape[-1], weight.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=dtype or x.dtype, device=x.device)
    flat = x.reshape(-1, k)
    rows = flat.shape[0]
    int4 = format == "int4"
    group = 0 if group_size >= k else group_size
    optional_args = (x if scales is None else scales, x if zeros is None else zeros,
                     x if bias is None else bias)
    scale_row = 0 if scales is None else scales.stride(0)
    if not out.numel():
        return out
    cfg = chosen or config(rows, n, weight.shape[1], int4, x.device, programs)
    options: dict[str, Any] = {"K": k, "GROUP": group, "ZEROS": zeros is not None,
                               "BIAS": bias is not None, "BLOCK_N": cfg.block_n,
                               "STAGES": cfg.stages, "num_warps": cfg.warps}
    grid = (-(-n // cfg.block_n),)
    if rows == 1 and int4:
        programs = min(grid[0], cfg.splits * device_size(x.device)[0])
        del options["STAGES"]
        _one_row_int4((programs,), (flat, weight.view(torch.int32), *optional_args, out, n,
                                    scale_row), {
            **options, "ASM": x.is_cuda and torch.version.hip is None,      # PTX
            "QUADS": min(cfg.block_k, triton.next_power_of_2(-(-k // 32)))})
    elif rows == 1:
        vec = 16 // weight.element_size()
        _one_row(grid, (flat, weight, *optional_args, out, n, weight.stride(0), scale_row), {
            **options, "SCALED": scales is not None, "VEC": vec,
            "LANES": (lanes := min(cfg.block_k, triton.next_power_of_2(-(-k // vec)))),
            "WAIT": waits(x.device), "REQUESTS": prefetched(weight, lanes * vec)})
    else:
        parts = count = x
        if cfg.splits > 1:
            parts = torch.empty(grid[0] * cfg.splits * cfg.block_n * MAX_ROWS, dtype=torch.float32,
                                device=x.device)
            count = counters(x.device, grid[0])
        _few_rows((grid[0], cfg.splits), (
            flat, weight, optional_args[2], out, parts, count, rows, n, cfg.splits, flat.stride(0),
            weight.stride(0)), {
            "K": k, "BIAS": bias is not None, "BLOCK_N": cfg.block_n, "BLOCK_K": cfg.block_k,
            "ROWS": MAX_ROWS, "STAGES": cfg.stages, "WAIT": waits(x.device),
            "REQUESTS": prefetched(weight, cfg.stages * cfg.block_k), "num_warps": cfg.warps})
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
           programs: float = 1.0) -> Tensor:
    return launch(x, weight, None, None, bias, "", 0, None, programs)


def quantized_linear(x: Tensor, weight_q: Tensor, scales: Tensor, zeros: Tensor | None = None,
                     bias: Tensor | None = None, *, format: str, group_size: int = 0,
                     programs: float = 1.0) -> Tensor:
    return launch(x, weight_q, scales, zeros, bias, format, group_size, None, programs)
