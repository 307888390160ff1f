"""Launches decode.cu for dense K and V and for a paged cache."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....spec import replay
from ....spec.replay import Varying
from .. import compiler

LOG2E = 1.4426950408889634
MAX_ROWS = 32              # query heads of a KV head times their tokens
KEYS = 16                  # per step of a warp
SPLITS = (8, 4, 2)         # cluster sizes

_PARAMS = struct.Struct("@3P6i5P11i2f")


class Config(NamedTuple):
    warps: int
    stages: int
    splits: int


def shared_bytes(rows: int, dim: int, warps: int, stages: int) -> int:
    """Returns the bytes of shared memory: keys and values of each warp, tiles of queries, inbox."""
    # an upper bound: columns are distributed in fours
    inbox = rows * (dim * 4 + SPLITS[0] * 24) + 16
    return warps * stages * 2 * KEYS * dim * 2 + -(-rows // 8) * 8 * dim * 2 + inbox


@lru_cache(maxsize=4096)
def config(rows: int, kv_rows: int, keys: int, dim: int, paged: bool,
           machine: compiler.Machine) -> Config:
    """Returns the launch configuration for `kv_rows`, batch x KV heads.

    As measured on an H200: one block per multiprocessor, and at least two steps per warp; for many
    paged sequences two blocks per KV head, because lengths differ.
    """
    saturated = kv_rows >= machine.processors
    warps, stages = (8, 2) if saturated and paged else (4, 3) if saturated or dim > 128 else (8, 3)
    if rows <= 16 and keys < 2 * SPLITS[0] * warps * KEYS:
        warps, stages = 4, 2
    while shared_bytes(rows, dim, warps, stages) > machine.shared and (warps > 2 or stages > 2):
        warps, stages = (warps // 2, stages) if warps > 2 else (warps, stages - 1)
    # Clusters of several blocks that each fill a multiprocessor use at most eight of nine.
    one_per_processor = 2 * shared_bytes(rows, dim, warps, stages) > machine.shared
    max_blocks = {s: machine.processors * 8 // 9 if one_per_processor and s > 2
                  else machine.processors for s in SPLITS}
    if saturated and paged:
        max_blocks[2] = 2 * kv_rows
    splits = next((s for s in SPLITS if 2 * s * warps * KEYS <= keys
                   and s * kv_rows <= max_blocks[s]), 1)
    return Config(warps, stages, splits)


def same_config_range(keys: int, left: int, max_queries: int) -> tuple[int, int]:
    """Returns the range of key counts with the same `config`, whose bounds are powers of two."""
    if left >= 0 and left + max_queries <= keys:
        return left + max_queries, replay.MAX_INT32        # only the window matters
    last = 2 * SPLITS[0] * 8 * KEYS                        # its highest bound
    low, high = 1, replay.MAX_INT32
    if keys < last:
        low = 1 << (keys.bit_length() - 1) if keys else 0
        high = max(2 * low - 1, keys)
    else:
        low = last
    return low, high if left < 0 else min(high, left + max_queries - 1)


@lru_cache(maxsize=None)
def _compiled(bf16: bool, dim: int, group: int, rows: int, k_token: int, v_token: int, page: int,
              starts: bool, causal: bool, window: bool, cfg: Config) -> Any:
    macros = (("BF16", int(bf16)), ("DIM", dim), ("GROUP", group), ("ROWS", rows),
              ("SPLITS", cfg.splits), ("WARPS", cfg.warps), ("STAGES", cfg.stages),
              ("K_TOKEN", k_token), ("V_TOKEN", v_token), ("PAGE", page), ("STARTS", int(starts)),
              ("CAUSAL", int(causal)), ("WINDOW", int(window)))
    return compiler.kernel("attention/decode.cu", "decode", macros, cfg.warps * 32,
                           shared_bytes(rows, dim, cfg.warps, cfg.stages), cfg.splits)


def launch(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None,
    shape: tuple[int, ...], strides: tuple[int, ...], tokens: tuple[int, int], scale: float,
    left: int, causal: bool, table: Tensor | None = None, lengths: Tensor | None = None,
    starts: Tensor | None = None, page: int = 0, chosen: Config | None = None,
    varying: tuple[Varying, ...] = (),
) -> None:
    """Launches decode.cu. `shape`: batch, kv_heads, group, max_queries (per head), keys, dim.
    `strides`: batch, head, token of the query; batch, head of key and value; batch, head, token of
    out and lse; row of the table. `tokens`: token strides of key and value. `varying`: the
    arguments that may differ in a replay."""
    batch, kv_heads, group, max_queries, keys, dim = shape
    rows = group * max_queries
    seen = keys if left < 0 else min(keys, left + max_queries)
    cfg = (chosen or config(rows, batch * kv_heads, seen, dim, page > 0,
                            compiler.machine_of(query.device)))
    run = _compiled(query.dtype == torch.bfloat16, dim, group, rows, *tokens, page,
                    starts is not None, causal, left >= 0, cfg)
    run.launch((cfg.splits, kv_heads, batch), _PARAMS, query, key, value, *strides[3:7], keys,
               max_queries, out, lse, table, lengths, starts, *strides[:3], *strides[7:], left,
               scale * LOG2E, 1.0 / (scale * LOG2E), varying=varying)


# Indices of fields in the struct: strides of batch and head; `keys`; `table_batch`.
K_STRIDES, V_STRIDES, KEY_COUNT, TABLE_STRIDE = (3, 4), (5, 6), 7, 23


def varying_keys(key: Tensor, value: Tensor, head: int, seq: int, left: int,
                 max_queries: int) -> tuple[Varying, ...]:
    """Returns what varies as keys are appended: their number, and the strides of dense tensors."""
    low, high = same_config_range(key.shape[seq], left, max_queries)
    varying = [Varying(key, "size", seq, KEY_COUNT, low, high),
               Varying(value, "size", seq, -1, low, high)]
    for tensor, fields in ((key, K_STRIDES), (value, V_STRIDES)):
        varying += [Varying(tensor, "stride", axis, field, 1)
                    for axis, field in zip((0, head), fields)
                    if tensor.stride(axis) > 0]            # 0: expanded, read as one
    return tuple(varying)


def attention_decode(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None,
    *, causal_align: str | None = None, window_left: int = -1, return_lse: bool = False,
    layout: str = "bhsd",
) -> Any:
    return dense(query, key, value, is_causal, scale, window_left, return_lse, layout)


def dense(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None,
    window_left: int = -1, return_lse: bool = False, layout: str = "bhsd",
    chosen: Config | None = None,
) -> Any:
    """Returns the attention of queries of which the last is aligned with the last key. `chosen`
    overrides the configuration, for benchmarks."""
    head, seq = (1, 2) if layout == "bhsd" else (2, 1)
    sizes = query.shape
    batch, heads, max_queries, dim = sizes[0], sizes[head], sizes[seq], sizes[3]
    watched = replay.watcher() is not None and chosen is None
    varying = varying_keys(key, value, head, seq, window_left, max_queries) if watched else ()
    if key.stride(head) == 0 == value.stride(head) and heads * max_queries <= MAX_ROWS:
        # one expanded head: read it once
        key, value = key.narrow(head, 0, 1), value.narrow(head, 0, 1)
    kv_heads, keys = key.shape[head], key.shape[seq]
    out = torch.empty(sizes, dtype=query.dtype, device=query.device)
    lse = (torch.empty((batch, heads, max_queries), dtype=torch.float32, device=query.device)
           if return_lse else None)
    strides = (query.stride(0), query.stride(head), query.stride(seq), key.stride(0),
               key.stride(head), value.stride(0), value.stride(head), out.stride(0),
               out.stride(head), out.stride(seq), heads * max_queries, max_queries, 1, 0)
    launch(query, key, value, out, lse, (batch, kv_heads, heads // kv_heads, max_queries, keys,
                                         dim), strides,
           (key.stride(seq), value.stride(seq)), dim ** -0.5 if scale is None else scale,
           window_left, is_causal and max_queries > 1, chosen=chosen, varying=varying)
    return out if lse is None else (out, lse)


def paged_attention_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, window_left: int = -1,
    max_seqlen_q: int | None = None, return_lse: bool = False, kv_layout: str = "NHD",
) -> Any:
    return paged(query, key_cache, value_cache, block_table, context_lens, cu_seqlens_q, is_causal,
                 scale, window_left, max_seqlen_q, return_lse, kv_layout)


def paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, window_left: int = -1, max_seqlen_q: int | None = None,
    return_lse: bool = False, kv_layout: str = "NHD", chosen: Config | None = None,
) -> Any:
    tokens, heads, dim = query.shape
    slot, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    page, kv_heads = key_cache.shape[slot], key_cache.shape[head]
    batch, pages = block_table.shape
    max_queries = 1 if cu_seqlens_q is None else int(max_seqlen_q or 0)
    out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
    lse = (torch.empty((tokens, heads), dtype=torch.float32, device=query.device) if return_lse
           else None)
    if max_queries and batch:
        # Without cu_seqlens_q each token is a batch entry; with it, it says where the queries of a
        # sequence begin.
        packed = cu_seqlens_q is not None
        varying: tuple[Varying, ...] = ()
        # the table widens as sequences grow
        if replay.watcher() is not None and chosen is None:
            low, high = same_config_range(pages * page, window_left, max_queries)
            varying = (Varying(block_table, "size", 1, KEY_COUNT, -(-low // page), high // page,
                               factor=page),
                       Varying(block_table, "stride", 0, TABLE_STRIDE))
        strides = (0 if packed else query.stride(0), query.stride(1), query.stride(0),
                   key_cache.stride(0), key_cache.stride(head), value_cache.stride(0),
                   value_cache.stride(head), 0 if packed else out.stride(0), out.stride(1),
                   out.stride(0), 0 if packed else heads, 1, heads, block_table.stride(0))
        launch(query, key_cache, value_cache, out, lse, (batch, kv_heads, heads // kv_heads,
                                                         max_queries, pages * page, dim),
               strides, (key_cache.stride(slot), value_cache.stride(slot)), dim ** -0.5
               if scale is None else scale, window_left, is_causal and max_queries > 1, block_table,
               context_lens, cu_seqlens_q, page, chosen, varying)
    return out if lse is None else (out, lse)
