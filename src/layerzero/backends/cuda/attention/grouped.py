"""Launches grouped.cu: for items over one key buffer."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compiler

LOG2E = 1.4426950408889634
UNBOUNDED = 1 << 29        # a window that hides nothing

_PARAMS = struct.Struct("@7P12i2f")


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
    """Returns the bytes of shared memory: stages of keys and values, spans, columns, and steps."""
    return cfg.stages * (cfg.step * dim * 4 + 8) + cfg.rows * 32 + 8


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


@lru_cache(maxsize=None)
def _compiled(bf16: bool, dim: int, group: int, k_token: int, v_token: int, softcap: bool,
              cfg: Config) -> tuple[Any, Any]:
    macros = (("BF16", int(bf16)), ("DIM", dim), ("GROUP", group), ("WARPS", cfg.warps),
              ("COLS", cfg.cols), ("STAGES", cfg.stages), ("STEP", cfg.step), ("K_TOKEN", k_token),
              ("V_TOKEN", v_token), ("SOFTCAP", int(softcap)))
    threads = cfg.warps * 32
    return (compiler.kernel("attention/grouped.cu", "grouped", macros, threads,
                            shared_bytes(dim, cfg)),
            compiler.kernel("attention/grouped.cu", "merge", macros, threads))


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
    rows, heads, dim = query.shape
    kv_heads, count = key.shape[1], items.shape[0]
    group = heads // kv_heads
    cfg = chosen or config(group * max_seqlen_q, count, kv_heads,
                           min(key.shape[0], count * max_seqlen_k), dim,
                           compiler.machine_of(query.device))
    attend, merge = _compiled(query.dtype == torch.bfloat16, dim, group, key.stride(0),
                              value.stride(0), softcap > 0, cfg._replace(splits=1, weight=0))
    # a pass has as many items as fit into a block, even if all of them see a key
    passes = -(-count // (cfg.rows // (group * max_seqlen_q)))
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    log_sums = (torch.empty((rows, heads), dtype=torch.float32, device=query.device) if return_lse
                else None)
    size = (passes * (cfg.splits + 1)
            + cfg.splits * count * max_seqlen_q * heads * (dim + 2))
    workspace = torch.empty(size, dtype=torch.float32, device=query.device)
    scale = dim ** -0.5 if scale is None else scale
    # With a softcap, scores are multiplied inside tanh, which is computed as an exponential.
    factors = ((2 * LOG2E * scale / softcap, softcap * LOG2E) if softcap > 0
               else (scale * LOG2E, 0.0))
    windows = window_left, 0 if is_causal else window_right
    params = (_PARAMS, query, key, value, items, out, log_sums, workspace, key.stride(1),
              value.stride(1), query.stride(0), query.stride(1), heads, cfg.splits, count, passes,
              max_seqlen_q, *(UNBOUNDED if w < 0 else w for w in windows), cfg.weight, *factors)
    attend.launch((cfg.splits, kv_heads, passes), *params)
    merge.launch((-(-heads // cfg.warps), rows, 1), *params)
    return out if log_sums is None else (out, log_sums)
