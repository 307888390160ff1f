"""Attention of few queries of each item over keys that the items share: K and V are read once.

A program serves one KV head, one split of the keys, and up to BLOCK_M rows: the query heads that
share the KV head, of the few tokens of several items. Items are taken in descending order of where
their keys end, so that the rows of a program end near each other and programs past their end do
nothing. What a row may see is one range of keys (causality and windows only move its ends), so a
tile of keys is masked only if it is not inside the ranges of all rows.

Each program stores the normalised result of its split and its log-sum-exp; a second launch merges
them.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(1 << 30)


@triton.jit
def _item_of(slot, items_ptr, n_items, ITEMS: tl.constexpr, SORTED: tl.constexpr):
    """Returns the items whose keys end last, next to last, ...: those of rank `slot`."""
    if SORTED:
        index = tl.arange(0, ITEMS)
        known = index < n_items
        end = tl.load(items_ptr + 4 * index + 2, mask=known, other=-1) + tl.load(
            items_ptr + 4 * index + 3, mask=known, other=0)
        later = (end[None, :] > end[:, None]) | (
            (end[None, :] == end[:, None]) & (index[None, :] < index[:, None]))
        rank = tl.sum(later.to(tl.int32), 1)
        item = tl.sum(tl.where(rank[None, :] == slot[:, None], index[None, :], 0), 1)
    else:
        item = slot
    return item


@triton.jit
def _key_range(items_ptr, item, token, valid, left, right, LEFT: tl.constexpr,
               RIGHT: tl.constexpr):
    """Returns the first query row of the items, and the first and last key that `token` of each may
    see; valid is False for tokens that an item does not have."""
    start = tl.load(items_ptr + 4 * item, mask=valid, other=0)
    n = tl.load(items_ptr + 4 * item + 1, mask=valid, other=0)
    first = tl.load(items_ptr + 4 * item + 2, mask=valid, other=0)
    m = tl.load(items_ptr + 4 * item + 3, mask=valid, other=0)
    valid = valid & (token < n)
    diagonal = first + m - n + token
    last = first + m - 1
    if RIGHT:
        last = tl.minimum(last, diagonal + right)
    if LEFT:
        first = tl.maximum(first, diagonal - left)
    return start, first, last, valid


@triton.jit
def _attend(
    begin, end, acc, row_max, total, q, k_ptr, v_ptr, first, last, k_token, v_token, scale, softcap,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    DIM_POW: tl.constexpr, DIM_V_POW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):
    """Goes through the keys from `begin` to `end`; MASKED: not all rows see all of them."""
    dim, dim_v = tl.arange(0, DIM_POW), tl.arange(0, DIM_V_POW)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        row = key.to(tl.int64)
        k_ptrs = k_ptr + row[None, :] * k_token + dim[:, None]
        v_ptrs = v_ptr + row[:, None] * v_token + dim_v[None, :]
        if MASKED:
            seen = (key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None])
            inside = tl.max(seen.to(tl.int32), 0) > 0          # others may hold anything, NaN too
        else:
            inside = key >= 0
        if MASKED or DIM_POW != DIM or DIM_V_POW != DIM_V:
            k = tl.load(k_ptrs, mask=inside[None, :] & (dim[:, None] < DIM), other=0.0)
            v = tl.load(v_ptrs, mask=inside[:, None] & (dim_v[None, :] < DIM_V), other=0.0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        scores = tl.dot(q, k)
        if SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores * scale / softcap) - 1) * LOG2E   # tanh
        else:
            scores = scores * (scale * LOG2E)
        if MASKED:
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
        p = tl.exp2(scores - base[:, None])
        fade = tl.exp2(row_max - base)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        row_max = top
    return acc, row_max, total


@triton.jit
def attend_kernel(
    q_ptr, k_ptr, v_ptr, items_ptr, part_ptr, part_lse_ptr, q_token, q_head, k_token, k_head,
    v_token, v_head, n_items, heads, kv_heads, tiles, splits, keys, scale, softcap, left, right,
    MAX_Q: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_POW: tl.constexpr, DIM_V_POW: tl.constexpr,
    ITEMS: tl.constexpr, SORTED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """`keys`: of a split, a multiple of BLOCK_N."""
    pid = tl.program_id(0)
    tile, kv_head, split = pid % tiles, pid // tiles % kv_heads, pid // (tiles * kv_heads)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    slot, token, member = row // (MAX_Q * GROUP), row // GROUP % MAX_Q, row % GROUP
    valid = slot < n_items
    item = _item_of(tl.where(valid, slot, 0), items_ptr, n_items, ITEMS, SORTED)
    start, first, last, valid = _key_range(items_ptr, item, token, valid, left, right, LEFT, RIGHT)
    valid = valid & (first <= last)
    first, last = tl.where(valid, first, FAR), tl.where(valid, last, -1)
    begin = split * keys
    end = tl.minimum(begin + keys, tl.max(last) + 1)
    begin = tl.maximum(begin, tl.min(first) // BLOCK_N * BLOCK_N)
    if begin < end:
        head = kv_head * GROUP + member
        dim, dim_v = tl.arange(0, DIM_POW), tl.arange(0, DIM_V_POW)
        query = (start + token).to(tl.int64)
        q = tl.load(q_ptr + (query * q_token + head * q_head)[:, None] + dim[None, :],
                    mask=valid[:, None] & (dim[None, :] < DIM), other=0.0)
        k_ptr += kv_head.to(tl.int64) * k_head
        v_ptr += kv_head.to(tl.int64) * v_head
        # the tiles of keys that every row sees
        full = tl.maximum(tl.max(tl.where(valid, first, 0)), begin)
        full = tl.minimum((full - begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N + begin, end)
        inside = tl.minimum(tl.min(tl.where(valid, last, FAR)) + 1, end) - full
        full_end = full + tl.maximum(inside, 0) // BLOCK_N * BLOCK_N
        acc = tl.zeros([BLOCK_M, DIM_V_POW], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc, row_max, total = _attend(
            begin, full, acc, row_max, total, q, k_ptr, v_ptr, first, last, k_token, v_token, scale,
            softcap, BLOCK_N, DIM, DIM_V, DIM_POW, DIM_V_POW, SOFTCAP, True)
        acc, row_max, total = _attend(
            full, full_end, acc, row_max, total, q, k_ptr, v_ptr, first, last, k_token, v_token,
            scale, softcap, BLOCK_N, DIM, DIM_V, DIM_POW, DIM_V_POW, SOFTCAP, False)
        acc, row_max, total = _attend(
            full_end, end, acc, row_max, total, q, k_ptr, v_ptr, first, last, k_token, v_token,
            scale, softcap, BLOCK_N, DIM, DIM_V, DIM_POW, DIM_V_POW, SOFTCAP, True)
        valid = valid & (first < end) & (last >= begin)
        part = (query * heads + head) * splits + split
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(part_ptr + part[:, None] * DIM_V + dim_v[None, :], acc,
                 mask=valid[:, None] & (dim_v[None, :] < DIM_V))
        tl.store(part_lse_ptr + part, row_max + tl.log2(total), mask=valid)


@triton.jit
def merge_kernel(
    part_ptr, part_lse_ptr, items_ptr, out_ptr, lse_ptr, n_items, heads, splits, keys, left, right,
    MAX_Q: tl.constexpr, DIM_V: tl.constexpr, DIM_V_POW: tl.constexpr, PARTS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, LSE: tl.constexpr,
):
    """Merges the splits of one query row and head."""
    pid = tl.program_id(0)
    head, token, item = pid % heads, pid // heads % MAX_Q, pid // (heads * MAX_Q)
    start, first, last, valid = _key_range(items_ptr, item, token, item < n_items, left, right,
                                           LEFT, RIGHT)
    if valid & (first <= last):
        row = (start + token).to(tl.int64) * heads + head
        dim_v = tl.arange(0, DIM_V_POW)
        acc = tl.zeros([DIM_V_POW], tl.float32)
        top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
        end = last // keys + 1
        for begin in tl.range(first // keys, end, PARTS):
            part = begin + tl.arange(0, PARTS)
            lse = tl.load(part_lse_ptr + row * splits + part, mask=part < end,
                          other=float("-inf"))
            values = tl.load(part_ptr + (row * splits + part)[:, None] * DIM_V + dim_v[None, :],
                             mask=(part < end)[:, None] & (dim_v[None, :] < DIM_V), other=0.0)
            higher = tl.maximum(top, tl.max(lse, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight, fade = tl.exp2(lse - base), tl.exp2(top - base)
            acc = acc * fade + tl.sum(values * weight[:, None], 0)
            total = total * fade + tl.sum(weight, 0)
            top = higher
        acc = acc / tl.where(total > 0, total, 1.0)
        tl.store(out_ptr + row * DIM_V + dim_v, acc.to(out_ptr.dtype.element_ty),
                 mask=dim_v < DIM_V)
        if LSE:
            tl.store(lse_ptr + row + tl.arange(0, 1), (top + tl.log2(total)) / LOG2E)
