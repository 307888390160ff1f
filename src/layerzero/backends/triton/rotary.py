"""Rotary positions of queries and keys in one launch; either convention, any strides with a dense
last dimension.

A program rotates a block of heads of one token. It loads before it stores, so the output may be the
input.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher

TILE = 2048                # pairs per program


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, head, heads, cos, sin, x_head, out_head, HALF: tl.constexpr, DIM: tl.constexpr,
    HALF_POW: tl.constexpr, REST_POW: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    inside = head[:, None] < heads
    x_ptr += head[:, None].to(tl.int64) * x_head
    out_ptr += head[:, None].to(tl.int64) * out_head
    pair = tl.arange(0, HALF_POW)[None, :]
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF_POW)[None, :]
        both = tl.load(x_ptr + column, mask=inside & (column < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (head.shape[0], HALF_POW, 2)))
    else:
        first = tl.load(x_ptr + pair, mask=inside & (pair < HALF), other=0.0).to(tl.float32)
        second = tl.load(x_ptr + HALF + pair, mask=inside & (pair < HALF), other=0.0).to(tl.float32)
    if 2 * HALF < DIM:
        rest = 2 * HALF + tl.arange(0, REST_POW)[None, :]
        unrotated = tl.load(x_ptr + rest, mask=inside & (rest < DIM), other=0.0)
        tl.store(out_ptr + rest, unrotated, mask=inside & (rest < DIM))
    rotated_first, rotated_second = first * cos - second * sin, second * cos + first * sin
    if INTERLEAVED:
        both = tl.reshape(tl.join(rotated_first, rotated_second), (head.shape[0], 2 * HALF_POW))
        tl.store(out_ptr + column, both.to(out_ptr.dtype.element_ty),
                 mask=inside & (column < 2 * HALF))
    else:
        tl.store(out_ptr + pair, rotated_first.to(out_ptr.dtype.element_ty),
                 mask=inside & (pair < HALF))
        tl.store(out_ptr + HALF + pair, rotated_second.to(out_ptr.dtype.element_ty),
                 mask=inside & (pair < HALF))


@triton.jit(do_not_specialize=["seq", "positions"])
def rope_kernel(
    q_ptr, k_ptr, to_q_ptr, to_k_ptr, cos_ptr, sin_ptr, ids_ptr, seq, positions, heads, kv_heads,
    q_blocks, q_batch, q_head, q_token, k_batch, k_head, k_token, to_q_batch, to_q_head, to_q_token,
    to_k_batch, to_k_head, to_k_token, cos_batch, cos_row, sin_batch, sin_row, ids_batch, ids_token,
    IDS: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, HALF_POW: tl.constexpr,
    REST_POW: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    token, block = tl.program_id(0), tl.program_id(1)
    batch, position = (token // seq).to(tl.int64), (token % seq).to(tl.int64)
    row = position
    pair = tl.arange(0, HALF_POW)[None, :]
    valid = pair < HALF
    if IDS:                                        # an id outside the table gives NaN
        row = tl.load(ids_ptr + batch * ids_batch + position * ids_token).to(tl.int64)
        valid = valid & (row + pair * 0 >= 0) & (row + pair * 0 < positions)
    cos = tl.load(cos_ptr + batch * cos_batch + row * cos_row + pair, mask=valid,
                  other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + batch * sin_batch + row * sin_row + pair, mask=valid,
                  other=float("nan")).to(tl.float32)
    if block < q_blocks:
        _rotate_heads(q_ptr + batch * q_batch + position * q_token,
                      to_q_ptr + batch * to_q_batch + position * to_q_token,
                      block * HEADS + tl.arange(0, HEADS), heads, cos, sin, q_head, to_q_head, HALF,
                      DIM, HALF_POW, REST_POW, INTERLEAVED)
    else:
        _rotate_heads(k_ptr + batch * k_batch + position * k_token,
                      to_k_ptr + batch * to_k_batch + position * to_k_token,
                      (block - q_blocks) * HEADS + tl.arange(0, HEADS), kv_heads, cos, sin, k_head,
                      to_k_head, HALF, DIM, HALF_POW, REST_POW, INTERLEAVED)


launch = Launcher(rope_kernel)


def rotate(q: Tensor, k: Tensor | None, to_q: Tensor, to_k: Tensor | None, cos: Tensor, sin: Tensor,
           position_ids: Tensor | None, style: str, layout: str, tile: int = TILE,
           warps: int = 4) -> None:
    """Writes the rotated q and k to `to_q` and `to_k`, which may be q and k themselves."""
    head, token = (-3, -2) if layout == "bhsd" else (-2, -3)
    batch = q.shape[0] if q.dim() == 4 else 1
    heads, seq, dim = q.shape[head], q.shape[token], q.shape[-1]
    half = cos.shape[-1]
    kv_heads = 0 if k is None else k.shape[head]
    if not batch * seq:
        return

    def strides(t: Tensor) -> tuple[int, int, int]:
        return t.stride(0) if t.dim() == 4 else 0, t.stride(head), t.stride(token)

    def table(t: Tensor) -> tuple[int, int]:
        return t.stride(0) if t.dim() == 3 and t.shape[0] > 1 else 0, t.stride(-2)

    half_pow = triton.next_power_of_2(half)
    block = max(1, min(tile // half_pow, triton.next_power_of_2(max(heads, kv_heads))))
    q_blocks = -(-heads // block)
    ids = (0, 0) if position_ids is None else (
        position_ids.stride(0) if position_ids.dim() == 2 and position_ids.shape[0] > 1 else 0,
        position_ids.stride(-1))
    other, to_other = (q, to_q) if k is None or to_k is None else (k, to_k)
    launch((batch * seq, q_blocks + -(-kv_heads // block)), (
        q, other, to_q, to_other, cos, sin, cos if position_ids is None else position_ids, seq,
        cos.shape[-2], heads, kv_heads, q_blocks, *strides(q), *strides(other), *strides(to_q),
        *strides(to_other), *table(cos), *table(sin), *ids), {
        "IDS": position_ids is not None, "HALF": half, "DIM": dim, "HALF_POW": half_pow,
        "REST_POW": triton.next_power_of_2(max(1, dim - 2 * half)), "HEADS": block,
        "INTERLEAVED": style == "interleaved", "num_warps": warps})


def rope(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None,
         *, style: str, layout: str = "bhsd", rotary_dim: int | None = None) -> Any:
    to_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    to_k = None if k is None else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    rotate(q, k, to_q, to_k, cos, sin, position_ids, style, layout)
    return to_q if to_k is None else (to_q, to_k)
