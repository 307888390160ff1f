"""Launches token.cu: rotary positions, the write into the cache and the attention of one new token
of each sequence."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compiler
from .decode import LOG2E

KEYS, WARPS = 16, 8                            # keys of a step of a warp
DIMS, MAX_GROUP = (64, 128), 8
SPLITS = (8, 4, 2)                             # cluster sizes
MIN_SM = 90                                    # of clusters
_PARAMS = struct.Struct("@7Pq7i2f")


class Config(NamedTuple):
    splits: int
    warps: int = WARPS
    blocks: int = 2            # thread blocks per multiprocessor that registers must suffice for


def supports(dtype: torch.dtype, dim: int, group: int, half: int,
             machine: compiler.Machine) -> bool:
    """Can this kernel serve such a call? `half`: columns whose angles differ."""
    return (dtype in (torch.float16, torch.bfloat16) and dim in DIMS and group <= MAX_GROUP
            and 2 * half == dim and machine.sm >= MIN_SM)


def shared_bytes(group: int, dim: int, cfg: Config) -> int:
    """Returns the bytes of shared memory: the warps' parts, queries, a key, a value, the inbox."""
    parts = cfg.warps * -(-group * (dim + 6) * 4 // 16) * 16
    share = -(-dim // 4 // cfg.splits)
    inbox = cfg.splits * group * (share * 16 + 8) + 8
    return parts + group * (2 * dim + 64) + 4 * dim + inbox


@lru_cache(maxsize=4096)
def config(kv_rows: int, room: int, machine: compiler.Machine) -> Config:
    """Returns the launch configuration for `kv_rows`, batch x KV heads, and caches of `room`
    tokens: a block per multiprocessor, and for each warp at least one step."""
    return Config(next((s for s in SPLITS if s * kv_rows <= machine.processors
                        and s * WARPS * KEYS <= room), 1))


@lru_cache(maxsize=None)
def _compiled(bf16: bool, wide_angles: bool, dim: int, group: int, window: bool,
              cfg: Config) -> Any:
    macros = (("BF16", int(bf16)), ("WIDE_ANGLES", int(wide_angles)), ("DIM", dim),
              ("GROUP", group), ("SPLITS", cfg.splits), ("WARPS", cfg.warps),
              ("WINDOW", int(window)), ("BLOCKS", cfg.blocks))
    return compiler.kernel("attention/token.cu", "token", macros, cfg.warps * 32,
                           shared_bytes(group, dim, cfg), cfg.splits)


def attend(qk: Tensor, value: Tensor, angles: Tensor, position: Tensor, keys: Tensor,
           values: Tensor, scale: float, window: int | None = None,
           chosen: Config | None = None) -> Tensor:
    """Rotate queries and keys, write keys and values into the caches at `position`, and return the
    attention of the queries over the tokens up to there, or the last `window` of them: (batch,
    heads, dim). In a graph, nothing in front of this call may write `position` or the caches.

    qk: queries and keys, (batch, 1, heads + kv_heads, dim); value: (batch, 1, kv_heads, dim), last
    dimensions dense. angles: (positions, 2 * dim), cosine of each column and sine. position: one
    int64. keys, values: (batch, room, kv_heads, dim), contiguous and alike. `chosen` overrides the
    configuration, for benchmarks."""
    batch, _, rotated, dim = qk.shape
    room, kv_heads = keys.shape[1], keys.shape[2]
    heads = rotated - kv_heads
    cfg = chosen or config(batch * kv_heads, room if window is None else min(room, window),
                           compiler.machine_of(qk.device))
    if value.data_ptr() % 16 or value.stride(0) % 8 or value.stride(2) % 8:
        value = value.contiguous()
    out = torch.empty((batch, heads, dim), dtype=qk.dtype, device=qk.device)
    run = _compiled(qk.dtype == torch.bfloat16, angles.dtype == torch.float32, dim,
                    heads // kv_heads, window is not None, cfg)
    run.launch((cfg.splits, kv_heads, batch), _PARAMS, position, qk, value, angles, keys, values,
               out, keys.stride(0), keys.stride(1), qk.stride(0), qk.stride(2), value.stride(0),
               value.stride(2), heads, 0 if window is None else window - 1, scale * LOG2E,
               1.0 / (scale * LOG2E))
    return out
