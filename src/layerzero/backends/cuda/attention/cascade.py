"""Launches cascade.cu: for a paged cache whose sequences share leading pages, and for items over
one key buffer."""

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
UNBOUNDED = 1 << 29        # a window that hides nothing

_PARAMS = struct.Struct("@10P17i2f")
TABLE_STRIDE, TABLE_WIDTH = 14, 26             # indices of fields in the struct
PLANNERS = 1024            # threads of the block that plans


class Config(NamedTuple):
    warps: int
    cols: int              # tiles of 8 rows that a warp holds in registers, 1 or 2
    stages: int
    blocks: int = 1        # about as many are launched for all KV heads
    weight: int = 128      # what reading a key costs, in rows that it is multiplied with

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.warps * self.cols * 8


def shared_bytes(dim: int, cfg: Config) -> int:
    """Returns the bytes of shared memory: stages of 16 keys and values per warp, and columns."""
    return cfg.stages * cfg.warps * 64 * dim + cfg.rows * 16 + cfg.warps * 4


# By head dim: one block for each multiprocessor of an H200; and what fits smaller ones.
CONFIGS = {64: (Config(8, 2, 6), Config(4, 2, 6)), 128: (Config(8, 2, 3), Config(4, 2, 3)),
           256: (Config(4, 1, 3), Config(2, 1, 3))}
WAVES = 1                  # blocks that each place for one serves in turn; 2 take 12 % more


@lru_cache(maxsize=4096)
def config(dim: int, machine: compiler.Machine) -> Config:
    """Returns the launch configuration for heads of this size."""
    large, small = CONFIGS[dim]
    cfg = large if shared_bytes(dim, large) <= machine.shared else small
    at_once = 2 if 2 * shared_bytes(dim, cfg) <= machine.shared else 1
    return cfg._replace(blocks=WAVES * at_once * machine.processors)


class _Launches(NamedTuple):
    plan: Any
    attend: Any
    merge: Any


@lru_cache(maxsize=None)
def _compiled(bf16: bool, dim: int, group: int, k_token: int, v_token: int, page: int,
              softcap: bool, items: int, cfg: Config) -> _Launches:
    macros = (("BF16", int(bf16)), ("DIM", dim), ("GROUP", group), ("WARPS", cfg.warps),
              ("COLS", cfg.cols), ("STAGES", cfg.stages), ("PLANNERS", PLANNERS),
              ("K_TOKEN", k_token), ("V_TOKEN", v_token), ("PAGE", page), ("SOFTCAP", int(softcap)))
    threads = cfg.warps * 32
    return _Launches(
        compiler.kernel("attention/cascade.cu", "plan", macros, PLANNERS, 16 + 24 * items),
        compiler.kernel("attention/cascade.cu", "attend", macros, threads, shared_bytes(dim, cfg)),
        compiler.kernel("attention/cascade.cu", "merge", macros, threads))


def _launch(
    query: Tensor, key: Tensor, value: Tensor, lse: bool, strides: tuple[int, ...],
    tokens: tuple[int, int], sizes: tuple[int, int, int], windows: tuple[int, int],
    scale: float, softcap: float, cfg: Config, items: Tensor | None = None,
    pages: tuple[Tensor | None, ...] = (None, None, None), page: int = 0,
    varying: tuple[Varying, ...] = (),
) -> Any:
    """`strides`: head of key and value, page of key and value, row of the table. `tokens`: token
    strides of key and value. `sizes`: KV heads, items or sequences, and the most queries of
    one."""
    kv_heads, count, max_queries = sizes
    rows, heads, dim = query.shape
    group = heads // kv_heads
    room = max(64, 1 << (count - 1).bit_length())  # items; few sizes, as each is loaded
    run = _compiled(query.dtype == torch.bfloat16, dim, group, *tokens, page, softcap > 0, room,
                    cfg._replace(blocks=1, weight=0))
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    log_sums = (torch.empty((rows, heads), dtype=torch.float32, device=query.device) if lse
                else None)
    places = 2 if page else 1                      # of an item: what it shares, and its own
    units = cfg.blocks // kv_heads + 1 + places * count
    parts = (cfg.blocks // kv_heads + 1) * cfg.rows + places * count * max_queries * group
    size = units * 8 + (11 * places + 1) * count + rows + 8 + parts * kv_heads * (dim + 2)
    workspace = torch.empty(size, dtype=torch.float32, device=query.device)
    # With a softcap, scores are multiplied inside tanh, which is computed as an exponential.
    factors = ((2 * LOG2E * scale / softcap, softcap * LOG2E) if softcap > 0
               else (scale * LOG2E, 0.0))
    params = (_PARAMS, query, key, value, items, *pages, out, log_sums, workspace, *strides,
              query.stride(0), query.stride(1), kv_heads, count, max_queries, rows, units,
              cfg.blocks, *(UNBOUNDED if w < 0 else w for w in windows), cfg.weight,
              0 if pages[0] is None else pages[0].shape[1], *factors)
    run.plan.launch((1, 1, 1), *params, varying=varying)
    run.attend.launch((kv_heads, units, 1), *params, varying=varying)
    run.merge.launch((-(-heads // cfg.warps), rows, 1), *params, varying=varying)
    return out if log_sums is None else (out, log_sums)


def grouped(
    query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool = False, scale: float | None = None, window_left: int = -1,
    window_right: int = -1, softcap: float = 0.0, return_lse: bool = False,
    chosen: Config | None = None,
) -> Any:
    """`chosen` overrides the configuration, for benchmarks."""
    dim, kv_heads, count = query.shape[2], key.shape[1], items.shape[0]
    cfg = chosen or config(dim, compiler.machine_of(query.device))
    return _launch(query, key, value, return_lse, (key.stride(1), value.stride(1), 0, 0, 0),
                   (key.stride(0), value.stride(0)), (kv_heads, count, max_seqlen_q),
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
    dim = query.shape[2]
    slot, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    page, kv_heads = key_cache.shape[slot], key_cache.shape[head]
    max_queries = 1 if cu_seqlens_q is None else int(max_seqlen_q or 0)
    cfg = chosen or config(dim, compiler.machine_of(query.device))
    varying: tuple[Varying, ...] = ()
    if replay.watcher() is not None:               # the table widens as sequences grow
        pages = block_table.shape[1]
        varying = (Varying(block_table, "size", 1, TABLE_WIDTH, pages, UNBOUNDED // page),
                   Varying(block_table, "stride", 0, TABLE_STRIDE))
    strides = (key_cache.stride(head), value_cache.stride(head), key_cache.stride(0),
               value_cache.stride(0), block_table.stride(0))
    return _launch(query, key_cache, value_cache, return_lse, strides,
                   (key_cache.stride(slot), value_cache.stride(slot)),
                   (kv_heads, block_table.shape[0], max_queries),
                   (window_left, 0 if is_causal else -1),
                   dim ** -0.5 if scale is None else scale, softcap, cfg,
                   pages=(block_table, context_lens, cu_seqlens_q), page=page, varying=varying)
