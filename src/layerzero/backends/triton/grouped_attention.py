"""Attention of items, forward: one launch for query rows that attend to overlapping keys.

A program serves one block of an item's rows for one KV head: the query heads that share the head,
and their tokens, are the rows. Keys are found by chunks, so that keys which lie in pieces (another
rank's share, pages) are read where they are: in long chunks with one address for all keys of a
tile (SEGMENTS), in short ones by a lookup for each key (LOOKUP). Products of float32 are
three of tf32 each: exact enough, and compiled in seconds where plain float32 takes minutes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# How keys are addressed: the position is the row; a chunk for each tile; a lookup for each key.
PLAIN, SEGMENTS, LOOKUP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_rows(ptr, row_stride, first, low, end, row, k_start, chunk_ptr, length, column,
              COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ADDRESS: tl.constexpr,
              MASKED: tl.constexpr):
    """Loads the keys or values of a tile, those from `low` to `end`. The first of the tile is at
    `row`; with LOOKUP each is where its chunk says."""
    near = tl.arange(0, BLOCK)
    inside = (first + near >= low) & (first + near < end)
    if ADDRESS == LOOKUP:
        position = k_start + first + near
        chunk = tl.load(chunk_ptr + position // length, mask=inside, other=0)
        rows = (chunk + position % length).to(tl.int64) * row_stride
        ptrs = ptr + rows[:, None] + column[None, :]
    else:
        ptrs = ptr + row * row_stride + (near[:, None] * row_stride + column[None, :])
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
def visible(key, low, end, diagonal, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Returns which keys a row sees; `key` and `diagonal` broadcast against each other."""
    seen = (key >= low) & (key < end) & (diagonal == diagonal)
    if RIGHT:
        seen = seen & (key <= diagonal + right)
    if LEFT:
        seen = seen & (key >= diagonal - left)
    return seen


@triton.jit
def key_range(first_row, n, m, left, right, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
              LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Returns the keys that a block of rows sees, [low, high), and where those end that all its
    rows see."""
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
def tile_range(low, high, common, k_start, length, BLOCK_N: tl.constexpr, ADDRESS: tl.constexpr):
    """Returns the first tile of the keys [low, high), the first that needs a mask, and the end.

    With SEGMENTS tiles are counted from position 0, and each is in one chunk: if chunks are whole
    tiles, only the last ones of a block need a mask, else all.
    """
    if ADDRESS == SEGMENTS:
        tiles = tl.cdiv(length, BLOCK_N)
        position, last = k_start + low, k_start + tl.maximum(high, low + 1) - 1
        first = position // length * tiles + position % length // BLOCK_N
        end = last // length * tiles + last % length // BLOCK_N + 1
        end = tl.where(high > low, end, first)
        whole = tl.where((length % BLOCK_N == 0) & (position % BLOCK_N == 0),
                         tl.maximum(common - low, 0) // BLOCK_N, 0)
    else:
        first, end = 0, tl.cdiv(tl.maximum(high - low, 0), BLOCK_N)
        whole = tl.maximum(common - low, 0) // BLOCK_N
    return first, tl.minimum(first + whole, end), end


@triton.jit
def chunk_table(chunk_ptr, chunks, TABLE: tl.constexpr):
    """Loads where all chunks of an item start: loaded in the loop, keys would have to wait."""
    chunk = tl.arange(0, TABLE)
    return tl.load(chunk_ptr + chunk, mask=chunk < chunks, other=0)


@triton.jit
def tile_place(tile, low, high, k_start, table, length, BLOCK_N: tl.constexpr,
               ADDRESS: tl.constexpr):
    """Returns the first key of a tile, where its keys end, and the row of the first key."""
    if ADDRESS == SEGMENTS:
        tiles = tl.cdiv(length, BLOCK_N)
        chunk, begin = tile // tiles, tile % tiles * BLOCK_N
        first = chunk * length + begin - k_start
        end = tl.minimum(first - begin + length, high)
        start = tl.sum(tl.where(tl.arange(0, table.shape[0]) == chunk, table, 0), 0)
        row = start.to(tl.int64) + begin
    else:
        first, end = low + tile * BLOCK_N, high
        row = (k_start + first).to(tl.int64)
    return first, end, row


@triton.jit
def _tile(first, low, end, row, acc, row_max, total, q, k_ptr, v_ptr, k_token, v_token, k_start,
          chunk_ptr, length, diagonal, scale, softcap, left, right, dim, dim_v,
          BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, ADDRESS: tl.constexpr,
          LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """One step of the online softmax in base 2."""
    k = load_rows(k_ptr, k_token, first, low, end, row, k_start, chunk_ptr, length, dim, DIM,
                  BLOCK_N, ADDRESS, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")                  # (BLOCK_M, BLOCK_N)
    if SOFTCAP:
        scores = cap(scores * scale, softcap)
        factor = LOG2E
    else:
        factor = scale * LOG2E
    if MASKED:
        key = first + tl.arange(0, BLOCK_N)
        seen = visible(key[None, :], low, end, diagonal[:, None], left, right, LEFT, RIGHT)
        scores = tl.where(seen, scores, float("-inf"))
    # A negative factor would reverse the order: the rules require a positive scale.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)   # a row that has seen no key yet
    p = tl.exp2(scores * factor - safe_max[:, None])
    rescale = tl.exp2(row_max - safe_max)
    v = load_rows(v_ptr, v_token, first, low, end, row, k_start, chunk_ptr, length, dim_v, DIM_V,
                  BLOCK_N, ADDRESS, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="tf32x3")
    return acc, new_max, total * rescale + tl.sum(p, 1)


@triton.jit(do_not_specialize=["left", "right", "blocks", "chunks"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, items_ptr, order_ptr, chunks_ptr, lengths_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, heads, scale, softcap, left, right, blocks,
    chunks, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr,
    DIM_V: tl.constexpr, DIM_POW: tl.constexpr, DIM_V_POW: tl.constexpr, ADDRESS: tl.constexpr,
    TABLE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
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
    tile, whole, end_tile = tile_range(low, high, common, k_start, length, BLOCK_N, ADDRESS)
    table = chunk_table(chunks_ptr, chunks, TABLE)
    if not LEFT:                               # a window is narrow: all its tiles are masked
        for i in tl.range(tile, whole, num_stages=STAGES):
            first, end, place = tile_place(i, low, high, k_start, table, length, BLOCK_N, ADDRESS)
            acc, row_max, total = _tile(
                first, low, end, place, acc, row_max, total, q, k_ptr, v_ptr, k_token, v_token,
                k_start, chunks_ptr, length, diagonal, scale, softcap, left, right, dim, dim_v,
                BLOCK_N, DIM, DIM_V, ADDRESS, LEFT, RIGHT, SOFTCAP, False)
    for i in tl.range(whole, end_tile, num_stages=STAGES):
        first, end, place = tile_place(i, low, high, k_start, table, length, BLOCK_N, ADDRESS)
        acc, row_max, total = _tile(
            first, low, end, place, acc, row_max, total, q, k_ptr, v_ptr, k_token, v_token,
            k_start, chunks_ptr, length, diagonal, scale, softcap, left, right, dim, dim_v,
            BLOCK_N, DIM, DIM_V, ADDRESS, LEFT, RIGHT, SOFTCAP, True)
    out = acc * tl.where(total == 0, 0.0, 1.0 / total)[:, None]   # NaN stays NaN
    to = at * heads + head
    tl.store(out_ptr + (to * DIM_V)[:, None] + dim_v[None, :], out.to(out_ptr.dtype.element_ty),
             mask=valid[:, None] & (dim_v < DIM_V)[None, :])
    lse = tl.where(total == 0, float("-inf"), (row_max + tl.log2(total)) / LOG2E)
    tl.store(lse_ptr + to, lse, mask=valid)
