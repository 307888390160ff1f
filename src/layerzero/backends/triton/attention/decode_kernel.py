"""Attention of few queries over many keys, in one launch: each byte of K and V is read once.

One program serves one KV head, one batch entry and one split of the keys. The query heads that
share the KV head, and their few tokens, are the rows of one tile. Scores are computed transposed
(keys x queries), so that K and V go from shared memory straight into the tensor cores and the few
queries are the narrow side.

Each program stores its part (unnormalised sum, maximum, sum of exponentials). The last one to
finish, found by a counter, merges the parts of its KV head and resets the counter: there is no
second launch, and a captured graph can be replayed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..dependent import wait_for_previous

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _pages(table_ptr, first, end, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Loads the pages of the keys from `first` on; 0 for those past `end`."""
    key = first + tl.arange(0, BLOCK_N)
    if PAGE > 0:                               # Triton wants one assignment for each
        page = tl.load(table_ptr + key // PAGE, mask=key < end, other=0).to(tl.int64)
    else:
        page = key.to(tl.int64)
    return page


@triton.jit
def _tile(
    first, page, acc, row_max, total, q, k_ptr, v_ptr, position, slope, valid, end, k_token,
    v_token, k_page, v_page, scale, softcap, left, right, dim, dim_v, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):
    """One step of the online softmax in base 2 from key `first` on. MASKED: some are past `end`."""
    key = first + tl.arange(0, BLOCK_N)
    inside = key < end
    if PAGE > 0:
        k_offset = page * k_page + (key % PAGE) * k_token
        v_offset = page * v_page + (key % PAGE) * v_token
    else:
        k_offset = key.to(tl.int64) * k_token
        v_offset = key.to(tl.int64) * v_token
    k_ptrs, v_ptrs = k_ptr + k_offset[:, None] + dim[None,
                                                     :], v_ptr + v_offset[:, None] + dim_v[None, :]
    if MASKED or dim.shape[0] != DIM:
        k = tl.load(k_ptrs, mask=inside[:, None] & (dim[None, :] < DIM), other=0.0)
    else:
        k = tl.load(k_ptrs)
    scores = tl.dot(k.to(q.dtype), q)                                          # (BLOCK_N, ROWS)
    if SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores * scale / softcap) - 1)  # tanh
        factor = LOG2E
    else:
        factor = scale * LOG2E
    if ALIBI:
        scores = scores * factor - slope[None, :] * tl.abs(position[None, :] - key[:, None])
        factor = 1.0
    if LEFT or RIGHT or MASKED:
        seen = inside[:, None] & valid[None, :]
        if RIGHT:
            seen = seen & (key[:, None] <= position[None, :] + right)
        if LEFT:
            seen = seen & (key[:, None] >= position[None, :] - left)
        scores = tl.where(seen, scores, float("-inf"))
    # A negative factor would reverse the order: the rules require a positive scale.
    new_max = tl.maximum(row_max, tl.max(scores, 0) * factor)
    # a row without visible keys so far
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores * factor - safe_max[None, :])
    rescale = tl.exp2(row_max - safe_max)
    total = total * rescale + tl.sum(p, 0)
    if MASKED or dim_v.shape[0] != DIM_V:
        v = tl.load(v_ptrs, mask=inside[:, None] & (dim_v[None, :] < DIM_V), other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = tl.dot(tl.trans(v.to(q.dtype)), p.to(q.dtype), acc * rescale[None, :])  # (DIM_V, ROWS)
    return acc, new_max, total


@triton.jit(do_not_specialize=["left", "right", "keys", "max_queries", "splits"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, stat_ptr, count_ptr, table_ptr, lengths_ptr,
    starts_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr, q_batch, q_head, q_token, k_batch, k_head,
    k_token, v_batch, v_head, v_token, out_batch, out_head, out_token, lse_batch, lse_head,
    lse_token, table_batch, k_scale_head, v_scale_head, scale, softcap, left, right, keys,
    max_queries, splits, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_POW: tl.constexpr, DIM_V_POW: tl.constexpr,
    PAGE: tl.constexpr, LENGTHS: tl.constexpr, STARTS: tl.constexpr, K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr, BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, LSE: tl.constexpr, SPLITS: tl.constexpr,
    USED: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr,
):
    """Attends to `keys` keys with at most `max_queries` queries per head. PAGE 0: dense K and V;
    else a page table.

    Query i is at key i + offset, where the offset is 0, or with BOTTOM such that the last query is
    at the last key.
    LENGTHS: the number of keys of each batch entry. STARTS: where its queries begin in a packed
    tensor.
    """
    wait_for_previous(WAIT)
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    batch64 = batch.to(tl.int64)
    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    if PAGE > 0:
        table_ptr += batch64 * table_batch
    else:
        k_ptr += batch64 * k_batch
        v_ptr += batch64 * v_batch
    length = keys
    if LENGTHS:
        length = tl.load(lengths_ptr + batch).to(tl.int32)
    tokens = max_queries
    q_ptr += batch64 * q_batch
    out_ptr += batch64 * out_batch
    lse_ptr += batch64 * lse_batch
    if STARTS:
        begin = tl.load(starts_ptr + batch).to(tl.int64)
        tokens = (tl.load(starts_ptr + batch + 1).to(tl.int64) - begin).to(tl.int32)
        q_ptr += begin * q_token
        out_ptr += begin * out_token
        lse_ptr += begin * lse_token
    offset = 0
    if BOTTOM:
        offset = length - tokens

    lowest, highest = 0, length                    # no query sees keys outside of these
    if LEFT:
        lowest = tl.maximum(offset - left, 0) // BLOCK_N * BLOCK_N
    if RIGHT:
        highest = tl.maximum(tl.minimum(length, offset + tokens + right), 0)
    split_keys = tl.cdiv(tl.cdiv(tl.maximum(highest - lowest, 0), BLOCK_N), splits) * BLOCK_N
    start = lowest + split * split_keys
    end = tl.minimum(start + split_keys, highest)
    # whole tiles end here
    full = start + tl.maximum(end - start, 0) // BLOCK_N * BLOCK_N
    dim, dim_v = tl.arange(0, DIM_POW), tl.arange(0, DIM_V_POW)

    row = tl.arange(0, ROWS)                       # a query head of the group and a token
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    valid = token < tokens
    # Loaded before the loop: loaded in it, to overlap with the first keys, results were wrong on an
    # H200 with Triton 3.6.
    q = tl.load(q_ptr + head[None, :] * q_head + token[None, :] * q_token + dim[:, None],
                mask=valid[None, :] & (dim[:, None] < DIM), other=0.0)         # (DIM, ROWS)
    position = offset + token
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
    if K_SCALE:
        scale *= tl.load(k_scale_ptr + kv_head * k_scale_head).to(tl.float32)
    v_scale = 1.0
    if V_SCALE:
        v_scale = tl.load(v_scale_ptr + kv_head * v_scale_head).to(tl.float32)

    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((DIM_V_POW, ROWS), tl.float32)
    # The pages of a tile are loaded one iteration ahead: loaded with its keys, the compiler would
    # not pipeline the keys.
    page = _pages(table_ptr, start, end, BLOCK_N, PAGE)
    for first in tl.range(start, full, BLOCK_N, num_stages=STAGES):
        acc, row_max, total = _tile(
            first, page, acc, row_max, total, q, k_ptr, v_ptr, position, slope, valid, end, k_token,
            v_token, k_batch, v_batch, scale, softcap, left, right, dim, dim_v, BLOCK_N, DIM, DIM_V,
            PAGE, LEFT, RIGHT, ALIBI, SOFTCAP, False)
        page = _pages(table_ptr, first + BLOCK_N, end, BLOCK_N, PAGE)
    if full < end:
        # Loaded again: with the loop's last value results were wrong on an H200 with Triton 3.6.
        page = _pages(table_ptr, full, end, BLOCK_N, PAGE)
        acc, row_max, total = _tile(
            full, page, acc, row_max, total, q, k_ptr, v_ptr, position, slope, valid, end, k_token,
            v_token, k_batch, v_batch, scale, softcap, left, right, dim, dim_v, BLOCK_N, DIM, DIM_V,
            PAGE, LEFT, RIGHT, ALIBI, SOFTCAP, True)

    if SPLITS == 1:
        factor = tl.where(total > 0, v_scale / total, 0.0)
        tl.store(out_ptr + (head * out_head + token * out_token)[None, :] + dim_v[:, None],
                 (acc * factor[None, :]).to(out_ptr.dtype.element_ty),
                 mask=valid[None, :] & (dim_v[:, None] < DIM_V))
        if LSE:
            lse = tl.where(total > 0, (row_max + tl.log2(total)) / LOG2E, float("-inf"))
            tl.store(lse_ptr + head * lse_head + token * lse_token, lse, mask=valid)
    else:
        used = GROUP * max_queries                 # rows that are stored
        kv_row = batch64 * kv_heads + kv_head
        part_index = kv_row * splits + split
        part_lse = tl.where(total > 0, row_max + tl.log2(total),
                            float("-inf"))         # log2 of the part's sum of exponentials
        tl.store(part_ptr + part_index * used * DIM_V + dim_v[:, None] * used + row[None, :],
                 acc * tl.where(total > 0, 1.0 / total, 0.0)[None, :],
                 mask=valid[None, :] & (dim_v[:, None] < DIM_V))
        tl.store(stat_ptr + part_index * used + row, part_lse, mask=valid)
        tl.debug_barrier()  # all threads have stored their part before the counter is incremented
        done = tl.atomic_add(count_ptr + kv_row, 1, sem="acq_rel")
        if done == splits - 1:
            tl.store(count_ptr + kv_row, 0)
            _merge(out_ptr, lse_ptr, part_ptr + kv_row * splits * used * DIM_V,
                   stat_ptr + kv_row * splits * used, kv_head,
                   tokens, used, splits, v_scale, out_head, out_token, lse_head, lse_token, GROUP,
                   DIM_V, DIM_V_POW, LSE, SPLITS, USED, DEPTH)


@triton.jit
def _merge(
    out_ptr, lse_ptr, part_ptr, stat_ptr, kv_head, tokens, used, splits, v_scale, out_head,
    out_token, lse_head, lse_token, GROUP: tl.constexpr, DIM_V: tl.constexpr,
    DIM_V_POW: tl.constexpr, LSE: tl.constexpr, SPLITS: tl.constexpr, USED: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Merges the parts of one KV head, weighted by their sums of exponentials.

    In tiles of (parts, dimensions, rows): all loads of a tile are issued together, and most of the
    sum over the parts is within a thread.
    """
    part, r = tl.arange(0, SPLITS), tl.arange(0, USED)
    token, head = r // GROUP, kv_head * GROUP + r % GROUP
    valid = (r < used) & (token < tokens)
    part_mask = (part < splits)[:, None] & valid[None, :]
    part_lse = tl.load(stat_ptr + part[:, None] * used + r[None, :], mask=part_mask,
                       other=float("-inf"), cache_modifier=".cg")
    max_lse = tl.max(part_lse, 0)
    share = tl.exp2(part_lse - tl.where(max_lse == float("-inf"), 0.0, max_lse)[None, :])
    total = tl.sum(share, 0)
    share *= tl.where(total > 0, v_scale / total, 0.0)[None, :]
    for begin in range(0, DIM_V_POW, DEPTH):
        d = begin + tl.arange(0, DEPTH)
        part_values = tl.load(part_ptr + (part[:, None, None] * DIM_V + d[None, :, None]) * used
                              + r[None, None, :], mask=part_mask[:, None, :]
                              & (d < DIM_V)[None, :, None], other=0.0, cache_modifier=".cg")
        merged = tl.sum(part_values * share[:, None, :], 0)
        tl.store(out_ptr + (head * out_head + token * out_token)[None, :] + d[:, None],
                 merged.to(out_ptr.dtype.element_ty), mask=(d < DIM_V)[:, None] & valid[None, :])
    if LSE:
        lse = tl.where(total > 0, (max_lse + tl.log2(total)) / LOG2E, float("-inf"))
        tl.store(lse_ptr + head * lse_head + token * lse_token, lse, mask=valid)
