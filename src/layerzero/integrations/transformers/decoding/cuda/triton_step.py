"""What the captured step does on a CUDA device between the products, in fewer launches than the ops
would need.

In a graph a small kernel costs two microseconds or more, whatever little it does. Rotating queries
and keys, writing keys and values into the cache, and the attention are one launch where our CUDA
kernel can (backends/cuda/attention/token.cu), else two; the length of the cache is read where it
lies on the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....backends.cuda import compiler
from .....backends.cuda.attention import token
from .....backends.cuda.linear import rows
from .....backends.triton import gemv
from .....backends.triton.attention.decode import MAX_ROWS, launch
from .....backends.triton.dependent import wait_for_previous, waits
from .....backends.triton.gated import gate
from .....backends.triton.launch import Launcher

__all__ = ["MAX_ROWS", "attend", "attend_rows", "attend_token", "attention_kernel", "gate", "gated",
           "in_float32"]
Run = Callable[..., Any]
ONE_LAUNCH = "cuda.attention_token, with rope and cache in one launch"
ROWS = "triton.attention_decode of all rows, after rope and cache in one launch"
TWO_LAUNCHES = "triton.attention_decode, after rope and cache in one launch"


@triton.jit
def _rotate_and_store_kernel(
    both_ptr, value_ptr, angle_ptr, position_ptr, query_ptr, keys_ptr, values_ptr, both_row,
    both_head, value_row, value_head, room_row, room_token, position_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_POW: tl.constexpr, REST_POW: tl.constexpr, DIM_POW: tl.constexpr, WAIT: tl.constexpr,
):
    """One program for each head of one token: queries first, then keys, then values."""
    wait_for_previous(WAIT)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(position_ptr + row * position_row)
    if head < HEADS + KV_HEADS:
        source = both_ptr + row * both_row + head * both_head
        if head < HEADS:
            target = query_ptr + (row * HEADS + head) * DIM
        else:
            target = keys_ptr + row * room_row + position * room_token + (head - HEADS) * DIM
        pair = tl.arange(0, HALF_POW)
        here = pair < HALF
        # cos twice, then sin twice
        angle = angle_ptr + position * (4 * HALF) + pair
        cos = tl.load(angle, mask=here, other=0.0).to(tl.float32)
        sin = tl.load(angle + 2 * HALF, mask=here, other=0.0).to(tl.float32)
        first = tl.load(source + pair, mask=here, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + pair, mask=here, other=0.0).to(tl.float32)
        tl.store(target + pair, (first * cos - second * sin).to(query_ptr.dtype.element_ty),
                 mask=here)
        tl.store(target + HALF + pair, (second * cos + first * sin).to(query_ptr.dtype.element_ty),
                 mask=here)
        if 2 * HALF < DIM:
            rest = 2 * HALF + tl.arange(0, REST_POW)
            tl.store(target + rest, tl.load(source + rest, mask=rest < DIM), mask=rest < DIM)
    else:
        kv_head = head - HEADS - KV_HEADS
        column = tl.arange(0, DIM_POW)
        inside = column < DIM
        value = tl.load(value_ptr + row * value_row + kv_head * value_head + column, mask=inside)
        tl.store(values_ptr + row * room_row + position * room_token + kv_head * DIM + column,
                 value, mask=inside)


_rotate_and_store = Launcher(_rotate_and_store_kernel)


def rotate_and_store(qk: Tensor, value: Tensor, angles: Tensor, position: Tensor, keys: Tensor,
                     values: Tensor) -> Tensor:
    """Rotate queries and keys; return the queries (batch, heads, dim), write keys and values into
    the buffers at `position`, (1,) or one for each row.

    qk: queries and keys, (batch, 1, heads + kv_heads, dim); value: (batch, 1, kv_heads, dim),
    last dimensions dense.
    angles: (positions, 4 * half), cos and sin as models of transformers give them. keys, values:
    (batch, room, kv_heads, dim), contiguous and alike, or those of one text for all rows.
    """
    batch, _, rotated, dim = qk.shape
    kv_heads = value.shape[2]
    heads, half = rotated - kv_heads, angles.shape[1] // 4
    query = torch.empty((batch, heads, dim), dtype=qk.dtype, device=qk.device)
    _rotate_and_store((batch, rotated + kv_heads), (
        qk, value, angles, position, query, keys, values, qk.stride(0), qk.stride(2),
        value.stride(0), value.stride(2), keys.stride(0) if len(keys) == batch else 0,
        keys.stride(1), 1 if len(position) > 1 else 0), {
        "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "HALF": half,
        "HALF_POW": triton.next_power_of_2(half),
        "REST_POW": triton.next_power_of_2(max(1, dim - 2 * half)),
        "DIM_POW": triton.next_power_of_2(dim), "WAIT": waits(qk.device), "num_warps": 1})
    return query


def attention_kernel(like: Tensor, dim: int, group: int, half: int, softcap: float) -> str:
    """Returns the kernel that attend_token takes for tensors like this one."""
    fits = not softcap and waits(like.device) and compiler.ready() is True and token.supports(
        like.dtype, dim, group, half, compiler.machine_of(like.device))
    return ONE_LAUNCH if fits else TWO_LAUNCHES


def attend_token(qk: Tensor, value: Tensor, angles: Tensor, position: Tensor, lengths: Tensor,
                 keys: Tensor, values: Tensor, scale: float, window: int | None = None,
                 softcap: float = 0.0) -> Tensor:
    """Rotate queries and keys, write keys and values into the buffers at `position`, and return the
    attention over the first lengths[i] tokens of these, position + 1. The other arguments are those
    of rotate_and_store and attend."""
    (_, _, rotated, dim), kv_heads = qk.shape, value.shape[2]
    kernel = attention_kernel(qk, dim, (rotated - kv_heads) // kv_heads, angles.shape[1] // 4,
                              softcap)
    if kernel == ONE_LAUNCH:
        return token.attend(qk, value, angles, position, keys, values, scale, window)
    query = rotate_and_store(qk, value, angles, position, keys, values)
    return attend(query, keys, values, lengths, scale, window, softcap)


def attend(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float,
           window: int | None = None, softcap: float = 0.0) -> Tensor:
    """Attention of query (batch, heads, dim) over the first lengths[i] tokens of keys and values,
    as above; over the last `window` of these."""
    batch, heads, dim = query.shape
    capacity, kv_heads, dim_v = keys.shape[1], keys.shape[2], values.shape[3]
    out = torch.empty((batch, heads, dim_v), dtype=query.dtype, device=query.device)

    def strides(t: Tensor) -> tuple[int, int, int]:
        return t.stride(0), t.stride(2), t.stride(1)

    launch(query, keys, values, out, None, (batch, heads, kv_heads, 1, capacity, dim, dim_v),
           (query.stride(0), query.stride(1), 0), strides(keys), strides(values),
           (out.stride(0), out.stride(1), 0), (0, 0, 0), scale, softcap, window - 1 if window
           else -1, -1, True, lengths=lengths)
    return out


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, length: Tensor, scale: float,
                softcap: float = 0.0) -> Tensor:
    """Attention of tokens (rows, heads, dim) that are the last of the `length` (1,) in the buffers
    of one text, each over those up to itself: what they have in common is read once."""
    rows, heads, dim = query.shape
    capacity, kv_heads, dim_v = keys.shape[1], keys.shape[2], values.shape[3]
    out = torch.empty((rows, heads, dim_v), dtype=query.dtype, device=query.device)
    launch(query, keys, values, out, None, (1, heads, kv_heads, rows, capacity, dim, dim_v),
           (0, query.stride(1), query.stride(0)), (0, keys.stride(2), keys.stride(1)),
           (0, values.stride(2), values.stride(1)), (0, out.stride(1), out.stride(0)), (0, 0, 0),
           scale, softcap, -1, 0, True, lengths=length)
    return out


def gated(kernel: str, weight: Tensor, bias: Tensor | None, kind: str) -> Run | None:
    """Returns the product of gate and up, which lie in one weight, with the activation at its end;
    None if `kernel`, which was fastest without one, has none."""
    if kernel != "cuda.linear_rows" or kind != "swiglu":
        return None
    return lambda x: rows.launch(x, weight, bias, gated=True)


def in_float32(run: Run, kernel: str, weight: Tensor, bias: Tensor | None) -> Run:
    """Returns the product `run` with a float32 result, if it is one of our kernels for few rows:
    logits may differ by less than a half type resolves."""
    if kernel == "cuda.linear_rows":
        return lambda x: rows.launch(x, weight, bias, dtype=torch.float32)
    if not kernel.startswith("triton.linear_gemv"):
        return run
    return lambda x: gemv.launch(x, weight, None, None, bias, "", 0, dtype=torch.float32)
