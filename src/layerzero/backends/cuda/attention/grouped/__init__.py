"""Launches grouped.cu, for items over one key buffer, and cascade.cu, for a paged cache whose
sequences share leading pages: both read a key once for all queries that see it."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....spec import replay
from .....spec.replay import Varying
from ... import compiler

LOG2E = 1.4426950408889634
UNBOUNDED = 1 << 29        # a window that hides nothing
KEYS = 16                  # of an MMA tile

_GROUPED, _CASCADE = struct.Struct("@7P12i2f"), struct.Struct("@9P17i2f")
TABLE_STRIDE, TABLE_WIDTH = 13, 25             # indices of fields in the struct of cascade.cu
PLANNERS = 1024            # threads of the block that plans


class Config(NamedTuple):
    warps: int
    cols: int              # tiles of 8 rows that a warp holds in registers
    stages: int
    step: int              # keys of a stage; KEYS of each warp for cascade.cu
    # grouped.cu: into how many ranges keys are cut; cascade.cu: about as many blocks in all
    splits: int = 1
    weight: int = 128      # what reading a key costs, in rows that it is multiplied with
    wgmma: bool = False    # grouped_wgmma.cu, which keeps the queries in shared memory

    @property
    def rows(self) -> int:
        """Returns how many query rows a block holds."""
        return self.warps * self.cols * 8

    def ring(self, dim: int) -> int:
        """Returns the bytes of shared memory for the stages of keys and values."""
        return self.stages * self.step * dim * 4

    def queries(self, dim: int) -> int:
        """Returns the bytes of shared memory that queries keep, and what aligns the stages."""
        return self.rows * dim * 2 + 1024 if self.wgmma else 0


def grouped_shared_bytes(dim: int, cfg: Config) -> int:
    """Returns the bytes of shared memory: stages of keys and values, spans, columns, and steps."""
    return cfg.ring(dim) + cfg.queries(dim) + cfg.stages * 8 + cfg.rows * 32 + 24


def cascade_shared_bytes(dim: int, cfg: Config) -> int:
    """Returns the bytes of shared memory: stages of keys and values, and columns."""
    return cfg.ring(dim) + cfg.rows * 16 + cfg.warps * 4


# By head dim, the fastest on an H200, and what fits smaller devices.
GROUPED = {64: (Config(8, 4, 6, 128), Config(4, 4, 4, 64)),
           128: (Config(8, 2, 3, 128), Config(4, 2, 4, 32)),
           256: (Config(8, 1, 3, 64), Config(4, 1, 3, 32))}
# grouped_wgmma.cu on Hopper: by head dim, (most rows, config), the fastest on an H200. With fewer
# rows than that grouped.cu is taken.
WGMMA = {128: ((64, Config(8, 2, 2, 128, weight=256, wgmma=True)),
               (128, Config(8, 4, 2, 128, wgmma=True)),
               (UNBOUNDED, Config(16, 2, 2, 128, weight=256, wgmma=True)))}
WGMMA_ROWS = 64
MERGERS = 8                # warps of a block that merges
CASCADE = {64: (Config(8, 2, 6, 128), Config(4, 2, 6, 64)),
           128: (Config(8, 2, 3, 128), Config(4, 2, 3, 64)),
           256: (Config(4, 1, 3, 64), Config(2, 1, 3, 32))}


@lru_cache(maxsize=4096)
def grouped_config(rows: int, items: int, kv_heads: int, keys: int, dim: int,
                   machine: compiler.Machine) -> Config:
    """Returns the launch configuration for `items` of up to `rows` rows each and `keys` keys in
    all: one block per multiprocessor."""
    large, small = GROUPED[dim]
    cfg = large if grouped_shared_bytes(dim, large) <= machine.shared else small
    if machine.sm == 90 and items * rows >= WGMMA_ROWS:
        wgmma_cfg = next((c for most, c in WGMMA.get(dim, ()) if items * rows <= most), cfg)
        cfg = wgmma_cfg if grouped_shared_bytes(dim, wgmma_cfg) <= machine.shared else cfg
    passes = -(-items // (cfg.rows // rows))
    splits = min(machine.processors // (kv_heads * passes), -(-keys // (2 * cfg.step)))
    return cfg._replace(splits=max(splits, 1))


@lru_cache(maxsize=4096)
def cascade_config(dim: int, machine: compiler.Machine) -> Config:
    """Returns the launch configuration for heads of this size: as many blocks as run at once, as
    twice as many take 12 % more."""
    large, small = CASCADE[dim]
    cfg = large if cascade_shared_bytes(dim, large) <= machine.shared else small
    at_once = 2 if 2 * cascade_shared_bytes(dim, cfg) <= machine.shared else 1
    return cfg._replace(splits=at_once * machine.processors)


def _macros(query: Tensor, group: int, tokens: tuple[int, int], softcap: float,
            cfg: Config) -> compiler.Macros:
    """Returns the macros of a kernel. `tokens`: token strides of key and value."""
    return (("BF16", int(query.dtype == torch.bfloat16)), ("DIM", query.shape[2]),
            ("GROUP", group), ("WARPS", cfg.warps), ("COLS", cfg.cols), ("STAGES", cfg.stages),
            ("STEP", cfg.step), ("K_TOKEN", tokens[0]), ("V_TOKEN", tokens[1]),
            ("SOFTCAP", int(softcap > 0)))


@lru_cache(maxsize=None)
def _compiled_grouped(macros: compiler.Macros, threads: int, shared: int,
                      wgmma: bool) -> tuple[Any, Any]:
    source = "attention/grouped/grouped_wgmma.cu" if wgmma else "attention/grouped/grouped.cu"
    return (compiler.kernel(source, "grouped", macros, threads, shared),
            compiler.kernel(source, "merge", macros, MERGERS * 32))


@lru_cache(maxsize=None)
def _compiled_cascade(macros: compiler.Macros, threads: int, shared: int,
                      plan_shared: int) -> tuple[Any, Any, Any]:
    source = "attention/grouped/cascade.cu"
    return (compiler.kernel(source, "plan", macros, PLANNERS, plan_shared),
            compiler.kernel(source, "attend", macros, threads, shared),
            compiler.kernel(source, "merge", macros, threads))


def _results(query: Tensor, lse: bool) -> tuple[Tensor, Tensor | None]:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, torch.empty(query.shape[:2], dtype=torch.float32,
                            device=query.device) if lse else None


def _factors(dim: int, scale: float | None, softcap: float) -> tuple[float, float]:
    """Returns what scores are multiplied with, and the softcap. With one, scores are multiplied
    inside tanh, which is computed as an exponential."""
    scale = dim ** -0.5 if scale is None else scale
    return ((2 * LOG2E * scale / softcap, softcap * LOG2E) if softcap > 0
            else (scale * LOG2E, 0.0))


def _windows(left: int, right: int) -> tuple[int, int]:
    return UNBOUNDED if left < 0 else left, UNBOUNDED if right < 0 else right


def grouped_attention_decode(
    query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
    window_right: int = -1, softcap: float = 0.0, return_lse: bool = False,
) -> Any:
    rows, heads, dim = query.shape
    kv_heads, count = key.shape[1], items.shape[0]
    group = heads // kv_heads
    cfg = grouped_config(group * max_seqlen_q, count, kv_heads,
                         min(key.shape[0], count * max_seqlen_k), dim,
                         compiler.machine_of(query.device))
    macros = _macros(query, group, (key.stride(0), value.stride(0)), softcap, cfg)
    attend, merge = _compiled_grouped(macros, cfg.warps * 32, grouped_shared_bytes(dim, cfg),
                                      cfg.wgmma)
    # a pass has as many items as fit into a block, even if all of them see a key
    passes = -(-count // (cfg.rows // (group * max_seqlen_q)))
    out, log_sums = _results(query, return_lse)
    size = (passes * (cfg.splits + 1)
            + cfg.splits * count * max_seqlen_q * heads * (dim + 2))
    workspace = torch.empty(size, dtype=torch.float32, device=query.device)
    params = (_GROUPED, query, key, value, items, out, log_sums, workspace, key.stride(1),
              value.stride(1), query.stride(0), query.stride(1), heads, cfg.splits, count, passes,
              max_seqlen_q, *_windows(window_left, 0 if is_causal else window_right), cfg.weight,
              *_factors(dim, scale, softcap))
    attend.launch((cfg.splits, kv_heads, passes), *params)
    merge.launch((-(-heads // MERGERS), rows, 1), *params)
    return out if log_sums is None else (out, log_sums)


def paged_attention_shared(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, window_left: int = -1, softcap: float = 0.0,
    max_seqlen_q: int | None = None, return_lse: bool = False, kv_layout: str = "NHD",
) -> Any:
    rows, heads, dim = query.shape
    slot, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    page, kv_heads, count = key_cache.shape[slot], key_cache.shape[head], block_table.shape[0]
    group, max_queries = heads // kv_heads, 1 if cu_seqlens_q is None else int(max_seqlen_q or 0)
    cfg = cascade_config(dim, compiler.machine_of(query.device))
    strides = key_cache.stride(slot), value_cache.stride(slot)
    macros = (*_macros(query, group, strides, softcap, cfg), ("PAGE", page), ("PLANNERS", PLANNERS))
    capacity = max(64, 1 << (count - 1).bit_length())  # sequences; few sizes, as each is loaded
    plan, attend, merge = _compiled_cascade(macros, cfg.warps * 32,
                                            cascade_shared_bytes(dim, cfg), 16 + 88 * capacity)
    out, log_sums = _results(query, return_lse)
    # Each sequence has two places: what it shares, and its own.
    units = cfg.splits // kv_heads + 1 + 2 * count
    parts = (cfg.splits // kv_heads + 1) * cfg.rows + 2 * count * max_queries * group
    size = units * 8 + 6 * count + rows + 8 + parts * kv_heads * (dim + 2)
    workspace = torch.empty(size, dtype=torch.float32, device=query.device)
    varying: tuple[Varying, ...] = ()
    if replay.watcher() is not None:               # the table widens as sequences grow
        varying = (Varying(block_table, "size", 1, TABLE_WIDTH, block_table.shape[1],
                           UNBOUNDED // page),
                   Varying(block_table, "stride", 0, TABLE_STRIDE))
    params = (_CASCADE, query, key_cache, value_cache, block_table, context_lens, cu_seqlens_q,
              out, log_sums, workspace, key_cache.stride(head), value_cache.stride(head),
              key_cache.stride(0), value_cache.stride(0), block_table.stride(0), query.stride(0),
              query.stride(1), kv_heads, count, max_queries, rows, units, cfg.splits,
              *_windows(window_left, 0 if is_causal else -1), cfg.weight, block_table.shape[1],
              *_factors(dim, scale, softcap))
    plan.launch((1, 1, 1), *params, varying=varying)
    attend.launch((kv_heads, units, 1), *params, varying=varying)
    merge.launch((-(-heads // cfg.warps), rows, 1), *params, varying=varying)
    return out if log_sums is None else (out, log_sums)
