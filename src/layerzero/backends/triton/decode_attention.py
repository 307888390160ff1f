"""Attention of few queries over many keys, in one launch: each byte of K and V is read once.

One program serves one KV head, one row of the batch and one stretch of the keys. The query heads that share the KV
head, and their few tokens, are the rows of one tile. Scores are computed transposed (keys down, queries across), so
that K and V go from shared memory straight into the tensor cores and the few queries are the narrow side.

Each program leaves its part (unnormalised sum, maximum, sum of exponentials). The last one to finish, found by a
counter, merges the parts of its KV head and sets the counter back to zero: no second launch, and a captured graph
can be replayed as often as wanted.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _pages(table_ptr, first, end, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """The pages of the keys from `first` on; 0 for those past `end`."""
    key = first + tl.arange(0, BLOCK_N)
    if PAGE > 0:  # noqa: SIM108  Triton wants one assignment for each
        page = tl.load(table_ptr + key // PAGE, mask=key < end, other=0).to(tl.int64)
    else:
        page = key.to(tl.int64)
    return page


@triton.jit
def _tile(
    first, page, acc, best, total, q, k_ptr, v_ptr, place, slope, real, end, k_token, v_token, k_page, v_page,
    scale, softcap, left, right, dim, dim_v,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):
    """The keys from `first` on: one step of the online softmax, in powers of two. MASKED: some lie past `end`."""
    key = first + tl.arange(0, BLOCK_N)
    inside = key < end
    if PAGE > 0:
        k_at = page * k_page + (key % PAGE) * k_token
        v_at = page * v_page + (key % PAGE) * v_token
    else:
        k_at = key.to(tl.int64) * k_token
        v_at = key.to(tl.int64) * v_token
    k_place, v_place = k_ptr + k_at[:, None] + dim[None, :], v_ptr + v_at[:, None] + dim_v[None, :]
    if MASKED or dim.shape[0] != DIM:
        k = tl.load(k_place, mask=inside[:, None] & (dim[None, :] < DIM), other=0.0)
    else:
        k = tl.load(k_place)
    scores = tl.dot(k.to(q.dtype), q)                                          # (BLOCK_N, ROWS)
    if SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores * scale / softcap) - 1)  # the hyperbolic tangent
        factor = LOG2E
    else:
        factor = scale * LOG2E
    if ALIBI:
        scores = scores * factor - slope[None, :] * tl.abs(place[None, :] - key[:, None])
        factor = 1.0
    if LEFT or RIGHT or MASKED:
        seen = inside[:, None] & real[None, :]
        if RIGHT:
            seen = seen & (key[:, None] <= place[None, :] + right)
        if LEFT:
            seen = seen & (key[:, None] >= place[None, :] - left)
        scores = tl.where(seen, scores, float("-inf"))
    # A factor below zero would turn the order round: the rules refuse a scale that is not positive.
    higher = tl.maximum(best, tl.max(scores, 0) * factor)
    safe = tl.where(higher == float("-inf"), 0.0, higher)                      # a row that has seen nothing yet
    p = tl.exp2(scores * factor - safe[None, :])
    fade = tl.exp2(best - safe)
    total = total * fade + tl.sum(p, 0)
    if MASKED or dim_v.shape[0] != DIM_V:
        v = tl.load(v_place, mask=inside[:, None] & (dim_v[None, :] < DIM_V), other=0.0)
    else:
        v = tl.load(v_place)
    acc = tl.dot(tl.trans(v.to(q.dtype)), p.to(q.dtype), acc * fade[None, :])  # (DIM_V, ROWS)
    return acc, higher, total


@triton.jit(do_not_specialize=["left", "right", "keys", "room", "splits"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, stat_ptr, count_ptr, table_ptr, lengths_ptr, starts_ptr,
    slopes_ptr, k_scale_ptr, v_scale_ptr,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    out_batch, out_head, out_token, lse_batch, lse_head, lse_token, table_batch, k_scale_head, v_scale_head,
    scale, softcap, left, right, keys, room, splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    DIM_POW: tl.constexpr, DIM_V_POW: tl.constexpr, PAGE: tl.constexpr, LENGTHS: tl.constexpr, STARTS: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, LSE: tl.constexpr, SPLITS: tl.constexpr, USED: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr,
):
    """`keys` long context, at most `room` queries of each head. PAGE 0: K and V as one tensor; else pages by table.

    Query i sits at key i + offset, where the offset is 0, or with BOTTOM such that the last query is at the last key.
    LENGTHS: the keys of each row of the batch. STARTS: where its queries begin in a packed tensor of them.
    """
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    far = batch.to(tl.int64)
    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    if PAGE > 0:
        table_ptr += far * table_batch
    else:
        k_ptr += far * k_batch
        v_ptr += far * v_batch
    length = keys
    if LENGTHS:
        length = tl.load(lengths_ptr + batch).to(tl.int32)
    tokens = room
    q_ptr += far * q_batch
    out_ptr += far * out_batch
    lse_ptr += far * lse_batch
    if STARTS:
        begin = tl.load(starts_ptr + batch).to(tl.int64)
        tokens = (tl.load(starts_ptr + batch + 1).to(tl.int64) - begin).to(tl.int32)
        q_ptr += begin * q_token
        out_ptr += begin * out_token
        lse_ptr += begin * lse_token
    offset = 0
    if BOTTOM:
        offset = length - tokens

    lowest, highest = 0, length                    # outside of these no query sees anything
    if LEFT:
        lowest = tl.maximum(offset - left, 0) // BLOCK_N * BLOCK_N
    if RIGHT:
        highest = tl.maximum(tl.minimum(length, offset + tokens + right), 0)
    stretch = tl.cdiv(tl.cdiv(tl.maximum(highest - lowest, 0), BLOCK_N), splits) * BLOCK_N
    start = lowest + split * stretch
    end = tl.minimum(start + stretch, highest)
    full = start + tl.maximum(end - start, 0) // BLOCK_N * BLOCK_N             # up to here no key lies outside
    dim, dim_v = tl.arange(0, DIM_POW), tl.arange(0, DIM_V_POW)

    row = tl.arange(0, ROWS)                       # a query head of the group and a token
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    real = token < tokens
    # Read here, once: read in the loop, which would let the first keys travel with them, they gave wrong results on an
    # H200 with Triton 3.6.
    q = tl.load(q_ptr + head[None, :] * q_head + token[None, :] * q_token + dim[:, None],
                mask=real[None, :] & (dim[:, None] < DIM), other=0.0)          # (DIM, ROWS)
    place = offset + token
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2E
    if K_SCALE:
        scale *= tl.load(k_scale_ptr + kv_head * k_scale_head).to(tl.float32)
    v_scale = 1.0
    if V_SCALE:
        v_scale = tl.load(v_scale_ptr + kv_head * v_scale_head).to(tl.float32)

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((DIM_V_POW, ROWS), tl.float32)
    # The pages of a tile are asked for while the tile before it is: were they in the loop with the keys, the compiler
    # would not ask for keys far ahead.
    page = _pages(table_ptr, start, end, BLOCK_N, PAGE)
    for first in tl.range(start, full, BLOCK_N, num_stages=STAGES):
        acc, best, total = _tile(
            first, page, acc, best, total, q, k_ptr, v_ptr, place, slope, real, end, k_token, v_token, k_batch,
            v_batch, scale, softcap, left, right, dim, dim_v, BLOCK_N, DIM, DIM_V, PAGE, LEFT, RIGHT, ALIBI, SOFTCAP,
            False)
        page = _pages(table_ptr, first + BLOCK_N, end, BLOCK_N, PAGE)
    if full < end:
        # Read once more: with what the loop left behind, results were wrong on an H200 with Triton 3.6.
        page = _pages(table_ptr, full, end, BLOCK_N, PAGE)
        acc, best, total = _tile(
            full, page, acc, best, total, q, k_ptr, v_ptr, place, slope, real, end, k_token, v_token, k_batch,
            v_batch, scale, softcap, left, right, dim, dim_v, BLOCK_N, DIM, DIM_V, PAGE, LEFT, RIGHT, ALIBI, SOFTCAP,
            True)

    if SPLITS == 1:
        share = tl.where(total > 0, v_scale / total, 0.0)
        tl.store(out_ptr + (head * out_head + token * out_token)[None, :] + dim_v[:, None],
                 (acc * share[None, :]).to(out_ptr.dtype.element_ty),
                 mask=real[None, :] & (dim_v[:, None] < DIM_V))
        if LSE:
            lse = tl.where(total > 0, (best + tl.log2(total)) / LOG2E, float("-inf"))
            tl.store(lse_ptr + head * lse_head + token * lse_token, lse, mask=real)
    else:
        used = GROUP * room                        # rows that are kept
        home = far * kv_heads + kv_head
        mine = home * splits + split
        weighed = tl.where(total > 0, best + tl.log2(total), float("-inf"))    # log2 of the part's weight
        tl.store(part_ptr + mine * used * DIM_V + dim_v[:, None] * used + row[None, :],
                 acc * tl.where(total > 0, 1.0 / total, 0.0)[None, :], mask=real[None, :] & (dim_v[:, None] < DIM_V))
        tl.store(stat_ptr + mine * used + row, weighed, mask=real)
        tl.debug_barrier()                         # every thread's part is written before the counter says so
        done = tl.atomic_add(count_ptr + home, 1, sem="acq_rel")
        if done == splits - 1:
            tl.store(count_ptr + home, 0)
            _merge(out_ptr, lse_ptr, part_ptr + home * splits * used * DIM_V, stat_ptr + home * splits * used, kv_head,
                   tokens, used, splits, v_scale, out_head, out_token, lse_head, lse_token, GROUP, DIM_V, DIM_V_POW,
                   LSE, SPLITS, USED, DEPTH)


@triton.jit
def _merge(
    out_ptr, lse_ptr, part_ptr, stat_ptr, kv_head, tokens, used, splits, v_scale, out_head, out_token, lse_head,
    lse_token, GROUP: tl.constexpr, DIM_V: tl.constexpr, DIM_V_POW: tl.constexpr, LSE: tl.constexpr,
    SPLITS: tl.constexpr, USED: tl.constexpr, DEPTH: tl.constexpr,
):
    """The parts of one KV head, each weighed by its share of the exponentials. Tiles of (parts, dimensions, rows):
    all loads of a tile go out together, and most of the sum over the parts is within a thread."""
    part, r = tl.arange(0, SPLITS), tl.arange(0, USED)
    token, head = r // GROUP, kv_head * GROUP + r % GROUP
    ours = (r < used) & (token < tokens)
    near = (part < splits)[:, None] & ours[None, :]
    weight = tl.load(stat_ptr + part[:, None] * used + r[None, :], mask=near, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top)[None, :])
    whole = tl.sum(share, 0)
    share *= tl.where(whole > 0, v_scale / whole, 0.0)[None, :]
    for begin in range(0, DIM_V_POW, DEPTH):
        d = begin + tl.arange(0, DEPTH)
        its = tl.load(part_ptr + (part[:, None, None] * DIM_V + d[None, :, None]) * used + r[None, None, :],
                      mask=near[:, None, :] & (d < DIM_V)[None, :, None], other=0.0, cache_modifier=".cg")
        merged = tl.sum(its * share[:, None, :], 0)
        tl.store(out_ptr + (head * out_head + token * out_token)[None, :] + d[:, None],
                 merged.to(out_ptr.dtype.element_ty), mask=(d < DIM_V)[:, None] & ours[None, :])
    if LSE:
        lse = tl.where(whole > 0, (top + tl.log2(whole)) / LOG2E, float("-inf"))
        tl.store(lse_ptr + head * lse_head + token * lse_token, lse, mask=ours)
