"""Launches the kernels of grouped_decode_attention.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .grouped_decode_attention import attend_kernel, merge_kernel
from .launch import Launcher
from .machine import device_size

MAX_SORTED = 128           # items whose order every program finds by itself
PARTS = 16                 # splits that are merged at a time

_attend, _merge = Launcher(attend_kernel), Launcher(merge_kernel)


class Config(NamedTuple):
    block_m: int = 64
    block_n: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 2          # that run on a multiprocessor at once
    waves: int = 2             # of programs, so that short items do not leave the device idle


def grouped_attention_decode(
    query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
    window_right: int = -1, softcap: float = 0.0, return_lse: bool = False,
    config: Config | None = None,
) -> Any:
    config = config or Config()
    tokens, heads, dim = query.shape
    tokens_k, kv_heads, dim_v = value.shape
    count, group = items.shape[0], heads // kv_heads
    out = query.new_zeros((tokens, heads, dim_v))      # rows of no item stay as they are
    lse = query.new_full((tokens, heads), -torch.inf, dtype=torch.float32) if return_lse else None
    if count and tokens and tokens_k and max_seqlen_q:
        most = max_seqlen_q + max_seqlen_k
        left = -1 if window_left > most else window_left
        right = 0 if is_causal else -1 if window_right > most else window_right
        block_m = min(config.block_m, max(16, triton.next_power_of_2(
            count * max_seqlen_q * group)))
        tiles = triton.cdiv(count * max_seqlen_q * group, block_m)
        units = device_size(query.device)[0] * config.programs * config.waves
        keys = triton.cdiv(triton.cdiv(tokens_k * kv_heads * tiles, units),
                           config.block_n) * config.block_n
        splits = triton.cdiv(tokens_k, keys)
        part = query.new_empty((tokens, heads, splits, dim_v), dtype=torch.float32)
        part_lse = query.new_empty((tokens, heads, splits), dtype=torch.float32)
        features = {"MAX_Q": max_seqlen_q, "DIM_V": dim_v,
                    "DIM_V_POW": max(16, triton.next_power_of_2(dim_v)), "LEFT": left >= 0,
                    "RIGHT": right >= 0}
        _attend((tiles * kv_heads * splits,), (
            query, key, value, items, part, part_lse, *query.stride()[:2], *key.stride()[:2],
            *value.stride()[:2], count, heads, kv_heads, tiles, splits, keys,
            dim ** -0.5 if scale is None else scale, softcap, left, right),
            {**features, "GROUP": group, "BLOCK_M": block_m, "BLOCK_N": config.block_n,
             "DIM": dim, "DIM_POW": max(16, triton.next_power_of_2(dim)),
             "ITEMS": triton.next_power_of_2(min(count, MAX_SORTED)), "SORTED": count <= MAX_SORTED,
             "SOFTCAP": softcap > 0.0, "num_warps": config.warps, "num_stages": config.stages})
        _merge((count * max_seqlen_q * heads,), (
            part, part_lse, items, out, part_lse if lse is None else lse, count, heads, splits,
            keys, left, right),
            {**features, "PARTS": PARTS, "LSE": lse is not None, "num_warps": 4})
    return out if lse is None else (out, lse)
