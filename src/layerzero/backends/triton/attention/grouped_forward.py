"""Attention of items, forward: one launch for query rows that attend to overlapping keys.

A program serves one block of an item's rows for one KV head: the query heads that share the head,
and their tokens, are the rows. Keys are found by chunks, so that keys which lie in pieces (another
rank's share, pages) are read where they are: long chunks in one loop each, with one address for
all keys of a tile (SEGMENTS), short ones by a lookup for each key (LOOKUP). Products of float32 are
three of tf32 each: exact enough, and compiled in seconds where plain float32 takes minutes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# How keys are addressed: their index is the row; chunks one by one; a lookup for each key.
PLAIN, SEGMENTS, LOOKUP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_rows(ptr, row_stride, first, end, shift, k_start, chunk_ptr, length, column,
              COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ADDRESS: tl.constexpr,
              MASKED: tl.constexpr):
    """Loads keys or values `first` to `end` of an item: key j is row shift + j, or by its chunk."""
    near = tl.arange(0, BLOCK)
    inside = first + near < end
    if ADDRESS == LOOKUP:
        position = k_start + first + near
        chunk = tl.load(chunk_ptr + position // length, mask=inside, other=0)
        rows = (chunk + position % length).to(tl.int64) * row_stride
        ptrs = ptr + rows[:, None] + column[None, :]
    else:
        ptrs = ptr + (shift + first) * row_stride + (near[:, None] * row_stride + column[None, :])
    if MASKED:
        tile = tl.load(ptrs, mask=inside[:, None] & (column < COLUMNS)[None, :], other=0.0)
    elif column.shape[0] != COLUMNS:
        tile = tl.load(ptrs, mask=(column < COLUMNS)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def cap(scores, softcap):
    """softcap * tanh(scores / softcap)"""
    return softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)


@triton.jit
def visible(key, end, diagonal, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Returns which keys a row sees; `key` and `diagonal` broadcast against each other."""
    seen = (key < end) & (diagonal == diagonal)
    if RIGHT:
        seen = seen & (key <= diagonal + right)
    if LEFT:
        seen = seen & (key >= diagonal - left)
    return seen


@triton.jit
def key_range(first_row, n, m, left, right, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
              LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Returns the keys [low, high) that a block of rows sees, and the end of those all rows see."""
    first, last = first_row // GROUP, tl.minimum((first_row + BLOCK_M - 1) // GROUP, n - 1)
    low, high, common = 0, m, m
    if RIGHT:
        high = tl.maximum(tl.minimum(last + m - n + right + 1, m), 0)
        common = tl.minimum(first + m - n + right + 1, m)
    if LEFT:
        low = tl.maximum(first + m - n - left, 0)
        common = 0
    return low, high, common


@triton.jit
def segment(chunk, low, high, k_start, chunk_ptr, length, ADDRESS: tl.constexpr):
    """Returns the keys [low, high) in a chunk, and where key 0's row would be in it."""
    shift = k_start.to(tl.int64)
    if ADDRESS == SEGMENTS:
        start = chunk * length - k_start       # of the chunk, as a key of the item
        low, high = tl.maximum(low, start), tl.minimum(high, start + length)
        shift = tl.load(chunk_ptr + chunk).to(tl.int64) - start
    return low, high, shift


@triton.jit
def chunk_range(low, high, k_start, length, ADDRESS: tl.constexpr):
    """Returns the first chunk of the keys [low, high) and the one after the last; without
    SEGMENTS all keys are one chunk."""
    first, end = 0, 1
    if ADDRESS == SEGMENTS:
        first = (k_start + low) // length
        end = tl.where(high > low, (k_start + high - 1) // length + 1, first)
    return first, end


@triton.jit
def _tile(first, end, shift, acc, row_max, total, q, k_ptr, v_ptr, k_token, v_token, k_start,
          chunk_ptr, length, diagonal, scale, softcap, left, right, dim, dim_v,
          BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, ADDRESS: tl.constexpr,
          LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """One step of the online softmax in base 2."""
    k = load_rows(k_ptr, k_token, first, end, shift, k_start, chunk_ptr, length, dim, DIM, BLOCK_N,
                  ADDRESS, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")                  # (BLOCK_M, BLOCK_N)
    if SOFTCAP:
        scores = cap(scores * scale, softcap)
        factor = LOG2E
    else:
        factor = scale * LOG2E
    if MASKED:
        key = first + tl.arange(0, BLOCK_N)
        scores = tl.where(visible(key[None, :], end, diagonal[:, None], left, right, LEFT, RIGHT),
                          scores, float("-inf"))
    # A negative factor would reverse the order: the rules require a positive scale.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)   # a row that has seen no key yet
    p = tl.exp2(scores * factor - safe_max[:, None])
    rescale = tl.exp2(row_max - safe_max)
    v = load_rows(v_ptr, v_token, first, end, shift, k_start, chunk_ptr, length, dim_v, DIM_V,
                  BLOCK_N, ADDRESS, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="tf32x3")
    return acc, new_max, total * rescale + tl.sum(p, 1)


@triton.jit(do_not_specialize=["left", "right", "blocks", "chunks"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, items_ptr, order_ptr, chunks_ptr, lengths_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, heads, scale, softcap, left, right, blocks,
    chunks, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr,
    DIM_V: tl.constexpr, DIM_POW: tl.constexpr, DIM_V_POW: tl.constexpr, ADDRESS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):
    """Programs begin with the item of most keys and with its last rows: those see most keys."""
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
    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM_V_POW), tl.float32)
    low, high, common = key_range(first_row, n, m, left, right, GROUP, BLOCK_M, LEFT, RIGHT)
    first_chunk, end_chunk = chunk_range(low, high, k_start, length, ADDRESS)
    for chunk in range(first_chunk, end_chunk):
        start, end, shift = segment(chunk, low, high, k_start, chunks_ptr, length, ADDRESS)
        whole = start + tl.maximum(tl.minimum(end, common) - start, 0) // BLOCK_N * BLOCK_N
        if not LEFT:                           # a window is narrow: all its tiles are masked
            for first in tl.range(start, whole, BLOCK_N, num_stages=STAGES):
                acc, row_max, total = _tile(
                    first, end, shift, acc, row_max, total, q, k_ptr, v_ptr, k_token, v_token,
                    k_start, chunks_ptr, length, diagonal, scale, softcap, left, right, dim, dim_v,
                    BLOCK_N, DIM, DIM_V, ADDRESS, LEFT, RIGHT, SOFTCAP, False)
        for first in tl.range(whole, end, BLOCK_N, num_stages=STAGES):
            acc, row_max, total = _tile(
                first, end, shift, acc, row_max, total, q, k_ptr, v_ptr, k_token, v_token, k_start,
                chunks_ptr, length, diagonal, scale, softcap, left, right, dim, dim_v, BLOCK_N,
                DIM, DIM_V, ADDRESS, LEFT, RIGHT, SOFTCAP, True)
    out = acc * tl.where(total == 0, 0.0, 1.0 / total)[:, None]   # NaN stays NaN
    to = at * heads + head
    tl.store(out_ptr + (to * DIM_V)[:, None] + dim_v[None, :], out.to(out_ptr.dtype.element_ty),
             mask=valid[:, None] & (dim_v < DIM_V)[None, :])
    lse = tl.where(total == 0, float("-inf"), (row_max + tl.log2(total)) / LOG2E)
    tl.store(lse_ptr + to, lse, mask=valid)
