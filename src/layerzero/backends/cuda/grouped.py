"""Launches grouped.cu: for items over one key buffer, and for a paged cache whose sequences share
leading pages."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec import replay
from ...spec.replay import Varying
from . import compiler

LOG2E = 1.4426950408889634
UNBOUNDED = 1 << 29        # a window that hides nothing

_PARAMS = struct.Struct("@10P18i2f")
TABLE_STRIDE, TABLE_WIDTH = 14, 24             # indices of fields in the struct


class Config(NamedTuple):
    warps: int
    cols: int              # tiles of 8 rows that a warp holds in registers
    stages: int
    step: int              # keys of a stage
    splits: int
    weight: int = 128      # what reading a key costs, in rows that it is multiplied with

    @property
    def rows(self) -> int:
        """Of a block: as many as the items of a pass have."""
        return self.warps * self.cols * 8


def shared_bytes(dim: int, cfg: Config) -> int:
    """Returns the bytes of shared memory: stages of keys and values, spans, columns and sources of
    items, and steps."""
    return cfg.stages * (cfg.step * dim * 4 + 8) + cfg.rows * 40 + 8


# By head dim, the fastest on an H200, and what fits into half of its shared memory.
CONFIGS = {64: (Config(8, 4, 6, 128, 1), Config(4, 4, 4, 64, 1)),
           128: (Config(8, 2, 3, 128, 1), Config(4, 2, 4, 32, 1)),
           256: (Config(8, 1, 3, 64, 1), Config(4, 1, 3, 32, 1))}


@lru_cache(maxsize=4096)
def config(rows: int, items: int, kv_heads: int, keys: int, dim: int,
           machine: compiler.Machine) -> Config:
    """Returns the launch configuration for `items` of up to `rows` rows each and `keys` keys in
    all: one block per multiprocessor."""
    large, small = CONFIGS[dim]
    cfg = large if shared_bytes(dim, large) <= machine.shared else small
    passes = -(-items // (cfg.rows // rows))
    splits = min(machine.processors // (kv_heads * passes), -(-keys // (2 * cfg.step)))
    return cfg._replace(splits=max(splits, 1))


class _Launches(NamedTuple):
    compare: Any
    attend: Any
    merge: Any


@lru_cache(maxsize=None)
def _compiled(bf16: bool, dim: int, group: int, k_token: int, v_token: int, page: int,
              softcap: bool, cfg: Config) -> _Launches:
    macros = (("BF16", int(bf16)), ("DIM", dim), ("GROUP", group), ("WARPS", cfg.warps),
              ("COLS", cfg.cols), ("STAGES", cfg.stages), ("STEP", cfg.step), ("K_TOKEN", k_token),
              ("V_TOKEN", v_token), ("PAGE", page), ("SOFTCAP", int(softcap)))
    threads = cfg.warps * 32
    return _Launches(
        compiler.kernel("grouped.cu", "compare", macros, threads, 4 * cfg.warps) if page else None,
        compiler.kernel("grouped.cu", "grouped", macros, threads, shared_bytes(dim, cfg)),
        compiler.kernel("grouped.cu", "merge", macros, threads))


def _launch(
    query: Tensor, key: Tensor, value: Tensor, lse: bool, strides: tuple[int, ...],
    tokens: tuple[int, int], sizes: tuple[int, int, int, int], windows: tuple[int, int],
    scale: float, softcap: float, cfg: Config, items: Tensor | None = None,
    pages: tuple[Tensor | None, ...] = (None, None, None), page: int = 0,
    varying: tuple[Varying, ...] = (),
) -> Any:
    """`strides`: head of key and value, page of key and value, row of the table. `tokens`: token
    strides of key and value. `sizes`: KV heads, items or sequences, items that one of them
    becomes, and the most queries of one."""
    kv_heads, entries, parts, max_queries = sizes
    max_pages = pages[0].shape[1] if pages[0] is not None else 0
    rows, heads, dim = query.shape
    group = heads // kv_heads
    run = _compiled(query.dtype == torch.bfloat16, dim, group, *tokens, page, softcap > 0,
                    cfg._replace(splits=1, weight=0))
    # a pass has as many entries as fit into a block, even if all of them see a key
    per_pass = cfg.rows // (group * max_queries * parts)
    passes = -(-entries // per_pass)
    count = parts * (passes * per_pass if page else entries)
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    log_sums = (torch.empty((rows, heads), dtype=torch.float32, device=query.device) if lse
                else None)
    size = ((8 * count + entries if page else 0) + passes * (cfg.splits + 1)
            + cfg.splits * count * max_queries * heads * (dim + 2))
    workspace = torch.empty(size, dtype=torch.float32, device=query.device)
    # With a softcap, scores are multiplied inside tanh, which is computed as an exponential.
    factors = ((2 * LOG2E * scale / softcap, softcap * LOG2E) if softcap > 0
               else (scale * LOG2E, 0.0))
    params = (_PARAMS, query, key, value, items, *pages, out, log_sums, workspace, *strides,
              query.stride(0), query.stride(1), heads, cfg.splits, count, passes,
              parts * per_pass, max_queries, entries, max_pages,
              *(UNBOUNDED if w < 0 else w for w in windows), cfg.weight, *factors)
    if page:
        run.compare.launch((entries, 1, 1), *params, varying=varying)
    run.attend.launch((cfg.splits, kv_heads, passes), *params, varying=varying)
    run.merge.launch((-(-heads // cfg.warps), rows, 1), *params, varying=varying)
    return out if log_sums is None else (out, log_sums)


def grouped_attention_decode(
    query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
    window_right: int = -1, softcap: float = 0.0, return_lse: bool = False,
) -> Any:
    return grouped(query, key, value, items, max_seqlen_q, max_seqlen_k, is_causal, scale,
                   window_left, window_right, softcap, return_lse)


def grouped(
    query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool = False, scale: float | None = None, window_left: int = -1,
    window_right: int = -1, softcap: float = 0.0, return_lse: bool = False,
    chosen: Config | None = None,
) -> Any:
    """`chosen` overrides the configuration, for benchmarks."""
    heads, dim, kv_heads, count = query.shape[1], query.shape[2], key.shape[1], items.shape[0]
    cfg = chosen or config(heads // kv_heads * max_seqlen_q, count, kv_heads,
                           min(key.shape[0], count * max_seqlen_k), dim,
                           compiler.machine_of(query.device))
    return _launch(query, key, value, return_lse, (key.stride(1), value.stride(1), 0, 0, 0),
                   (key.stride(0), value.stride(0)), (kv_heads, count, 1, max_seqlen_q),
                   (window_left, 0 if is_causal else window_right),
                   dim ** -0.5 if scale is None else scale, softcap, cfg, items)


def paged_attention_shared(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, window_left: int = -1, softcap: float = 0.0,
    max_seqlen_q: int | None = None, return_lse: bool = False, kv_layout: str = "NHD",
) -> Any:
    return paged(query, key_cache, value_cache, block_table, context_lens, cu_seqlens_q, is_causal,
                 scale, window_left, softcap, max_seqlen_q, return_lse, kv_layout)


def paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, window_left: int = -1, softcap: float = 0.0,
    max_seqlen_q: int | None = None, return_lse: bool = False, kv_layout: str = "NHD",
    chosen: Config | None = None,
) -> Any:
    heads, dim = query.shape[1:]
    slot, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    page, kv_heads = key_cache.shape[slot], key_cache.shape[head]
    batch, pages = block_table.shape
    max_queries = 1 if cu_seqlens_q is None else int(max_seqlen_q or 0)
    # twice the rows: a sequence is an item for its shared pages, and one for its own
    facts = 2 * heads // kv_heads * max_queries, batch, kv_heads
    machine = compiler.machine_of(query.device)
    cfg = chosen or config(*facts, batch * pages * page, dim, machine)
    varying: tuple[Varying, ...] = ()
    # the table widens as sequences grow
    if replay.watcher() is not None and cfg == config(*facts, UNBOUNDED, dim, machine):
        varying = (Varying(block_table, "size", 1, TABLE_WIDTH, pages, UNBOUNDED // page),
                   Varying(block_table, "stride", 0, TABLE_STRIDE))
    strides = (key_cache.stride(head), value_cache.stride(head), key_cache.stride(0),
               value_cache.stride(0), block_table.stride(0))
    return _launch(query, key_cache, value_cache, return_lse, strides,
                   (key_cache.stride(slot), value_cache.stride(slot)),
                   (kv_heads, batch, 2, max_queries), (window_left, 0 if is_causal else -1),
                   dim ** -0.5 if scale is None else scale, softcap, cfg,
                   pages=(block_table, context_lens, cu_seqlens_q), page=page, varying=varying)
