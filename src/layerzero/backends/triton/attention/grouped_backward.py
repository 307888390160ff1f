"""Backward of attention of items: dQ by blocks of rows, dK and dV by blocks of keys.

A program for keys goes through the items that see them, adds up in float32 registers and writes
once: no atomics, the same result on every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .grouped_forward import LOG2E, PLAIN, cap, chunk_range, key_range, load_rows, segment, visible


@triton.jit
def delta_kernel(out_ptr, grad_ptr, lse_grad_ptr, delta_ptr, rows, heads, grad_token, grad_head,
                 BLOCK: tl.constexpr, DIM_V: tl.constexpr, DIM_V_POW: tl.constexpr,
                 LSE_GRAD: tl.constexpr):
    """delta = sum(out * grad) - grad of lse: what the softmax subtracts from each row of dP."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dim, inside = tl.arange(0, DIM_V_POW), row < rows
    mask = inside[:, None] & (dim < DIM_V)[None, :]
    out = tl.load(out_ptr + (row * DIM_V)[:, None] + dim[None, :], mask=mask, other=0.0)
    at = row // heads * grad_token + row % heads * grad_head
    grad = tl.load(grad_ptr + at[:, None] + dim[None, :], mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if LSE_GRAD:
        delta -= tl.load(lse_grad_ptr + row, mask=inside, other=0.0)
    tl.store(delta_ptr + row, delta, mask=inside)


@triton.jit
def _weights(scores, scale, softcap, lse, SOFTCAP: tl.constexpr):
    """Returns the weights, and the derivative of the scores by the scaled products; lse is in base
    2, +inf for a row that counts nothing."""
    softcap_grad = 1.0
    if SOFTCAP:
        scores = cap(scores * scale, softcap)
        softcap_grad = 1.0 - (scores / softcap) * (scores / softcap)
        p = tl.exp2(scores * LOG2E - lse)
    else:
        p = tl.exp2(scores * (scale * LOG2E) - lse)
    return p, softcap_grad


@triton.jit
def _row_lse(lse_ptr, rows, valid):
    lse = tl.load(lse_ptr + rows, mask=valid, other=float("-inf")) * LOG2E
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def _query_tile(first, end, shift, acc, q, grad, lse, delta, k_ptr, v_ptr, k_token, v_token,
                k_start, chunk_ptr, length, diagonal, scale, softcap, left, right, dim, dim_v,
                BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
                ADDRESS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    k = load_rows(k_ptr, k_token, first, end, shift, k_start, chunk_ptr, length, dim, DIM, BLOCK_N,
                  ADDRESS, MASKED)
    v = load_rows(v_ptr, v_token, first, end, shift, k_start, chunk_ptr, length, dim_v, DIM_V,
                  BLOCK_N, ADDRESS, MASKED)
    p, softcap_grad = _weights(tl.dot(q, tl.trans(k), input_precision="tf32x3"), scale, softcap,
                               lse[:, None], SOFTCAP)
    if MASKED:
        key = first + tl.arange(0, BLOCK_N)
        p = tl.where(visible(key[None, :], end, diagonal[:, None], left, right, LEFT, RIGHT), p,
                     0.0)
    ds = p * (tl.dot(grad, tl.trans(v), input_precision="tf32x3") - delta[:, None]) * softcap_grad
    return tl.dot(ds.to(k.dtype), k, acc, input_precision="tf32x3")


@triton.jit(do_not_specialize=["left", "right", "blocks", "chunks"])
def query_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, items_ptr, order_ptr, chunks_ptr,
    lengths_ptr, q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, heads,
    scale, softcap, left, right, blocks, chunks, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_POW: tl.constexpr,
    DIM_V_POW: tl.constexpr, ADDRESS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):
    """dQ, by programs in the order of forward_kernel."""
    kv_heads = heads // GROUP
    slot, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    item = tl.load(order_ptr + slot // blocks).to(tl.int32)
    first_row = (blocks - 1 - slot % blocks) * BLOCK_M
    q_start, n = tl.load(items_ptr + item * 4), tl.load(items_ptr + item * 4 + 1)
    k_start, m = tl.load(items_ptr + item * 4 + 2), tl.load(items_ptr + item * 4 + 3)
    if first_row >= n * GROUP:
        return
    length = 1
    if ADDRESS != PLAIN:
        length = tl.load(lengths_ptr + item)
        chunks_ptr += item.to(tl.int64) * chunks
    row = first_row + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    valid, diagonal = token < n, token + m - n
    at = (q_start + token).to(tl.int64)
    dim, dim_v = tl.arange(0, DIM_POW), tl.arange(0, DIM_V_POW)
    q = tl.load(q_ptr + (at * q_token + head * q_head)[:, None] + dim[None, :],
                mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    grad = tl.load(grad_ptr + (at * grad_token + head * grad_head)[:, None] + dim_v[None, :],
                   mask=valid[:, None] & (dim_v < DIM_V)[None, :], other=0.0)
    lse = _row_lse(lse_ptr, at * heads + head, valid)
    delta = tl.load(delta_ptr + at * heads + head, mask=valid, other=0.0)
    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    acc = tl.zeros((BLOCK_M, DIM_POW), tl.float32)
    low, high, common = key_range(first_row, n, m, left, right, GROUP, BLOCK_M, LEFT, RIGHT)
    first_chunk, end_chunk = chunk_range(low, high, k_start, length, ADDRESS)
    for chunk in range(first_chunk, end_chunk):
        start, end, shift = segment(chunk, low, high, k_start, chunks_ptr, length, ADDRESS)
        whole = start + tl.maximum(tl.minimum(end, common) - start, 0) // BLOCK_N * BLOCK_N
        if not LEFT:                           # a window is narrow: all its tiles are masked
            for first in tl.range(start, whole, BLOCK_N, num_stages=STAGES):
                acc = _query_tile(
                    first, end, shift, acc, q, grad, lse, delta, k_ptr, v_ptr, k_token, v_token,
                    k_start, chunks_ptr, length, diagonal, scale, softcap, left, right, dim, dim_v,
                    BLOCK_N, DIM, DIM_V, ADDRESS, LEFT, RIGHT, SOFTCAP, False)
        for first in tl.range(whole, end, BLOCK_N, num_stages=STAGES):
            acc = _query_tile(
                first, end, shift, acc, q, grad, lse, delta, k_ptr, v_ptr, k_token, v_token,
                k_start, chunks_ptr, length, diagonal, scale, softcap, left, right, dim, dim_v,
                BLOCK_N, DIM, DIM_V, ADDRESS, LEFT, RIGHT, SOFTCAP, True)
    tl.store(dq_ptr + ((at * heads + head) * DIM)[:, None] + dim[None, :],
             (acc * scale).to(dq_ptr.dtype.element_ty),
             mask=valid[:, None] & (dim < DIM)[None, :])


@triton.jit
def _pairs(pair, pairs, items_ptr, chunks_ptr, lengths_ptr, chunks, ADDRESS: tl.constexpr):
    """Returns of pairs of an item and one of its chunks: the item's n, m and q_start, its keys
    [low, high) in the chunk, and what to add to a key for its row. Without chunks a pair is an
    item."""
    inside = pair < pairs
    item = pair // chunks
    at = items_ptr + item * 4
    q_start, n = tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0)
    k_start, m = tl.load(at + 2, mask=inside, other=0), tl.load(at + 3, mask=inside, other=0)
    low, high, shift = 0 * m, m, k_start.to(tl.int64)
    if ADDRESS != PLAIN:
        length = tl.load(lengths_ptr + item, mask=inside, other=1)
        start = pair % chunks * length - k_start
        low, high = tl.maximum(start, 0), tl.minimum(start + length, m)
        shift = tl.load(chunks_ptr + pair, mask=inside & (high > low), other=0).to(tl.int64) - start
    return q_start, n, m, low, high, shift


@triton.jit
def _sees(block_start, BLOCK_N: tl.constexpr, n, low, high, shift):
    return ((n > 0) & (high > low) & (shift + low < block_start + BLOCK_N)
            & (shift + high > block_start))


@triton.jit
def _first_token(key, n, m, right, RIGHT: tl.constexpr):
    """Returns the first token that sees a key."""
    token = 0 * key
    if RIGHT:
        token = tl.maximum(key - (m - n) - right, 0)
    return token


@triton.jit(do_not_specialize=["left", "right", "pairs", "chunks"])
def work_kernel(work_ptr, items_ptr, chunks_ptr, lengths_ptr, left, right, pairs, chunks,
                BLOCK_N: tl.constexpr, PAIRS: tl.constexpr, ADDRESS: tl.constexpr,
                LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Counts the tokens that see a block of keys, for the order of key_kernel."""
    block_start = tl.program_id(0).to(tl.int64) * BLOCK_N
    tokens = 0
    for first in range(0, pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        _start, n, m, low, high, shift = _pairs(pair, pairs, items_ptr, chunks_ptr, lengths_ptr,
                                                chunks, ADDRESS)
        key = tl.maximum(block_start - shift, low.to(tl.int64)).to(tl.int32)
        seen = n - _first_token(key, n, m, right, RIGHT)
        if LEFT:
            seen = tl.minimum(seen, left + BLOCK_N)
        tokens += tl.sum(tl.where(_sees(block_start, BLOCK_N, n, low, high, shift), seen, 0), 0)
    tl.store(work_ptr + tl.program_id(0), tokens)


@triton.jit
def _key_tile(row_start, rows_end, dk, dv, k, v, key, usable, q_ptr, grad_ptr, lse_ptr, delta_ptr,
              q_token, q_head, grad_token, grad_head, heads, q_start, offset, kv_head, scale,
              softcap, left, right, dim, dim_v, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
              DIM: tl.constexpr, DIM_V: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    # One 64-bit address for the tile, 32-bit steps from there: they are registers for each row.
    row = row_start + tl.arange(0, BLOCK_M)
    valid, token, head = row < rows_end, row // GROUP, row % GROUP
    first, step = (q_start + row_start // GROUP).to(tl.int64), token - row_start // GROUP
    q_ptr += first * q_token + kv_head * GROUP * q_head
    grad_ptr += first * grad_token + kv_head * GROUP * grad_head
    stat, lse_ptr = step * heads + head, lse_ptr + first * heads + kv_head * GROUP
    delta_ptr += first * heads + kv_head * GROUP
    q = tl.load(q_ptr + (step * q_token + head * q_head)[:, None] + dim[None, :],
                mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    lse = _row_lse(lse_ptr, stat, valid)
    p, softcap_grad = _weights(tl.dot(k, tl.trans(q), input_precision="tf32x3"), scale, softcap,
                        lse[None, :], SOFTCAP)                               # (BLOCK_N, BLOCK_M)
    if MASKED:
        seen = usable[:, None] & visible(key[:, None], 1 << 30, (token + offset)[None, :], left,
                                         right, LEFT, RIGHT)
        p = tl.where(seen, p, 0.0)
    grad = tl.load(grad_ptr + (step * grad_token + head * grad_head)[:, None] + dim_v[None, :],
                   mask=valid[:, None] & (dim_v < DIM_V)[None, :], other=0.0)
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="tf32x3")
    delta = tl.load(delta_ptr + stat, mask=valid, other=0.0)
    ds = p * (tl.dot(v, tl.trans(grad), input_precision="tf32x3") - delta[None, :]) * softcap_grad
    if MASKED:                                 # a row of the buffer that no item has may be NaN
        ds = tl.where(seen, ds, 0.0)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="tf32x3")
    return dk, dv


@triton.jit(do_not_specialize=["left", "right", "pairs", "chunks"])
def key_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, items_ptr, order_ptr,
    chunks_ptr, lengths_ptr, q_token, q_head, k_token, k_head, v_token, v_head, grad_token,
    grad_head, heads, tokens_k, scale, softcap, left, right, pairs, chunks, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    DIM_POW: tl.constexpr, DIM_V_POW: tl.constexpr, PAIRS: tl.constexpr, ADDRESS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):
    """dK and dV of one block of rows of the key buffer and one KV head, over all items."""
    kv_heads = heads // GROUP
    kv_head = tl.program_id(0) % kv_heads
    block_start = tl.load(order_ptr + tl.program_id(0) // kv_heads).to(tl.int64) * BLOCK_N
    dim, dim_v = tl.arange(0, DIM_POW), tl.arange(0, DIM_V_POW)
    buffer_row = block_start + tl.arange(0, BLOCK_N)
    k_mask = (buffer_row < tokens_k)[:, None] & (dim < DIM)[None, :]
    v_mask = (buffer_row < tokens_k)[:, None] & (dim_v < DIM_V)[None, :]
    k = tl.load(k_ptr + kv_head * k_head + (buffer_row * k_token)[:, None] + dim[None, :],
                mask=k_mask, other=0.0)
    v = tl.load(v_ptr + kv_head * v_head + (buffer_row * v_token)[:, None] + dim_v[None, :],
                mask=v_mask, other=0.0)
    dk = tl.zeros((BLOCK_N, DIM_POW), tl.float32)
    dv = tl.zeros((BLOCK_N, DIM_V_POW), tl.float32)
    for first in range(0, pairs, PAIRS):
        candidate = first + tl.arange(0, PAIRS)
        _start, n_all, _m, low_all, high_all, shift_all = _pairs(
            candidate, pairs, items_ptr, chunks_ptr, lengths_ptr, chunks, ADDRESS)
        sees = _sees(block_start, BLOCK_N, n_all, low_all, high_all, shift_all)
        pair = first - 1
        for _count in range(tl.sum(sees.to(tl.int32), 0)):
            pair = tl.min(tl.where(sees & (candidate > pair), candidate, 1 << 30), 0)
            q_start, n, m, low, high, shift = _pairs(pair, pairs, items_ptr, chunks_ptr,
                                                     lengths_ptr, chunks, ADDRESS)
            first_key = (block_start - shift).to(tl.int32)
            key = first_key + tl.arange(0, BLOCK_N)
            usable = (key >= low) & (key < high)
            rows_end = n * GROUP
            row_start = _first_token(tl.maximum(first_key, low), n, m, right, RIGHT) * GROUP
            if LEFT:
                rows_end = tl.minimum(rows_end, tl.maximum(
                    tl.minimum(first_key + BLOCK_N, high) - (m - n) + left, 0) * GROUP)
            common = rows_end                  # from here on all rows see all keys
            if not LEFT:
                if (first_key >= low) & (first_key + BLOCK_N <= high):
                    start = _first_token(first_key + BLOCK_N - 1, n, m, right, RIGHT) * GROUP
                    common = tl.minimum(row_start + tl.cdiv(tl.maximum(start - row_start, 0),
                                                            BLOCK_M) * BLOCK_M, rows_end)
            for row in tl.range(row_start, common, BLOCK_M, num_stages=STAGES):
                dk, dv = _key_tile(
                    row, rows_end, dk, dv, k, v, key, usable, q_ptr, grad_ptr, lse_ptr, delta_ptr,
                    q_token, q_head, grad_token, grad_head, heads, q_start, m - n, kv_head, scale,
                    softcap, left, right, dim, dim_v, GROUP, BLOCK_M, DIM, DIM_V, LEFT, RIGHT,
                    SOFTCAP, True)
            for row in tl.range(common, rows_end, BLOCK_M, num_stages=STAGES):
                dk, dv = _key_tile(
                    row, rows_end, dk, dv, k, v, key, usable, q_ptr, grad_ptr, lse_ptr, delta_ptr,
                    q_token, q_head, grad_token, grad_head, heads, q_start, m - n, kv_head, scale,
                    softcap, left, right, dim, dim_v, GROUP, BLOCK_M, DIM, DIM_V, LEFT, RIGHT,
                    SOFTCAP, False)
    to = (buffer_row * kv_heads + kv_head)[:, None]
    tl.store(dk_ptr + to * DIM + dim[None, :], (dk * scale).to(dk_ptr.dtype.element_ty),
             mask=k_mask)
    tl.store(dv_ptr + to * DIM_V + dim_v[None, :], dv.to(dv_ptr.dtype.element_ty), mask=v_mask)
