"""Launches decode_kernel for dense K and V and for a paged cache."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ....spec import replay
from ....spec.replay import MAX_INT32, Varying
from ..dependent import waits
from ..launch import Launcher
from ..machine import counters, device_size
from .decode_kernel import decode_kernel

MAX_ROWS = 64              # of one tile: query heads of a KV head times their tokens
MAX_SPLITS = 32            # the last program of a KV head merges all: more cost more than they save
MERGE_TILE = 8192          # elements of a tile of parts
FIXED_ROWS = 8             # KV heads for which keys are split, where the batch must not count


_launch = Launcher(decode_kernel)
FIELDS = {name: i for i, name in enumerate(decode_kernel.arg_names)}


class Config(NamedTuple):
    block_n: int
    warps: int
    stages: int
    splits: int


def stage_bytes(dim: int, dim_v: int, key_bytes: int, value_bytes: int) -> int:
    """Returns the bytes of 64 keys and values in shared memory; Triton's tiles are powers of 2."""
    return 64 * (_tile(dim) * key_bytes + _tile(dim_v) * value_bytes)


def bytes_beside_stages(rows: int, dim: int, dim_v: int, converted: bool) -> int:
    """Returns the bytes of shared memory beside the stages: queries, probabilities, pages, and
    converted tiles. As Triton's compiler lays it out; a test on a GPU compares."""
    block_n = 64 if rows <= 16 else 128
    return (2 * rows * (_tile(dim) + block_n) + 16 * block_n
            + (2 * block_n * max(_tile(dim), _tile(dim_v)) if converted else 0))


def _tile(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


@lru_cache(maxsize=4096)
def config(rows: int, kv_rows: int, tiles_of_64: int, stage_bytes_of_64: int, paged: bool,
           device: torch.device, programs: float = 1.0, beside: int = 16 << 10) -> Config:
    """Returns the launch configuration for `kv_rows`, batch x KV heads.

    A split has at least one tile; on an H200 one program per multiprocessor was fastest. Paged
    sequences differ in length, so four programs per KV head balance better than one. `programs` is
    a multiple of that, for tuning.
    """
    processors, shared = device_size(device)
    block_n, warps = (64, 4) if rows <= 16 else (128, 8)
    fit = (shared - beside) // (stage_bytes_of_64 * (block_n // 64))
    stages = max(1, min(4 if block_n == 64 and not paged else 3, fit))
    tiles = max(1, tiles_of_64 * 64 // block_n)
    splits = max(int(4 * programs) if paged else 1,
                 min(int(processors * programs) // kv_rows, MAX_SPLITS))
    return Config(block_n, warps, stages, min(splits, tiles))


def same_config_range(keys: int, reach: int, config_of: Callable[[int], Config]) -> tuple[int, int]:
    """Returns the range of key counts with the same configuration; `reach`: keys inside the window,
    -1 for all. Splits never decrease with the number of tiles, and nothing else depends on it."""
    if 0 <= reach <= keys:
        return reach, MAX_INT32
    tiles, last = -(-keys // 64), MAX_INT32 // 64
    current = config_of(tiles)
    first = bisect_left(range(tiles), True, key=lambda t: config_of(t) == current)
    beyond = bisect_left(range(tiles, last), True, key=lambda t: config_of(t) != current) + tiles
    low, high = max(0, 64 * (first - 1) + 1), MAX_INT32 if beyond == last else 64 * (beyond - 1)
    return low, high if reach < 0 else min(high, reach - 1)


def launch(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None,
    shape: tuple[int, ...], q_strides: tuple[int, int, int], k_strides: tuple[int, int, int],
    v_strides: tuple[int, int, int], out_strides: tuple[int, int, int],
    lse_strides: tuple[int, int, int], scale: float, softcap: float, left: int,
    right: int, bottom: bool, slopes: Tensor | None = None, table: Tensor | None = None,
    lengths: Tensor | None = None, starts: Tensor | None = None, page: int = 0,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    chosen: Config | None = None, programs: float = 1.0,
    growing: Callable[[int, int], tuple[Varying, ...]] | None = None, fixed: bool = False,
) -> None:
    """Launches the kernels. `shape`: batch, heads, kv_heads, max_queries (per head), keys, dim,
    dim_v. Strides: batch, head, token. `growing(low, high)`: the arguments that may vary in a
    replay with low to high keys."""
    batch, heads, kv_heads, max_queries, keys, dim, dim_v = shape
    group = heads // kv_heads
    rows = max(16, triton.next_power_of_2(group * max_queries))
    reach = -1 if left < 0 else left + max_queries + 63
    seen = keys if reach < 0 else min(keys, reach)
    sizes = key.element_size(), value.element_size()
    stage, beside = stage_bytes(dim, dim_v, *sizes), bytes_beside_stages(rows, dim, dim_v,
                                                                         min(sizes) < 2)

    def config_of(tiles: int) -> Config:
        return (chosen or config(rows, FIXED_ROWS if fixed else batch * kv_heads, tiles, stage,
                                 page > 0, query.device, programs, beside))

    cfg = config_of(-(-seen // 64))
    varying: tuple[Varying, ...] = ()
    if growing is not None and replay.watcher() is not None:
        varying = growing(*same_config_range(keys, reach, config_of))
    splits, splits_pow = cfg.splits, triton.next_power_of_2(cfg.splits)
    rows_pow = triton.next_power_of_2(group * max_queries)
    parts = stats = count = query                  # unused with one split
    if splits > 1:
        parts = torch.empty(batch * heads * max_queries * splits * dim_v, dtype=torch.float32,
                            device=query.device)
        stats = torch.empty(batch * heads * max_queries * splits, dtype=torch.float32,
                            device=query.device)
        count = counters(query.device, batch * kv_heads)
    _launch((splits, kv_heads, batch), (
        query, key, value, out, query if lse is None else lse, parts, stats, count,
        query if table is None else table, query if lengths is None else lengths,
        query if starts is None else starts, query if slopes is None else slopes,
        query if k_scale is None else k_scale, query if v_scale is None else v_scale,
        *q_strides, *k_strides, *v_strides, *out_strides, *lse_strides, 0 if table is None
        else table.stride(0), _per_head(k_scale), _per_head(v_scale), scale, softcap, left, right,
        keys, max_queries, splits), { "GROUP": group, "ROWS": rows, "BLOCK_N": cfg.block_n,
                                     "DIM": dim, "DIM_V": dim_v,
        "DIM_POW": max(16, triton.next_power_of_2(dim)),
                                     "DIM_V_POW": max(16, triton.next_power_of_2(dim_v)),
        "PAGE": page, "LENGTHS": lengths is not None, "STARTS": starts is not None,
                                     "K_SCALE": k_scale is not None,
        "V_SCALE": v_scale is not None, "BOTTOM": bottom, "LEFT": left >= 0, "RIGHT": right >= 0,
        "ALIBI": slopes is not None, "SOFTCAP": softcap > 0.0, "LSE": lse is not None,
        "SPLITS": splits_pow, "USED": rows_pow,
        "DEPTH": min(triton.next_power_of_2(dim_v), max(1, MERGE_TILE // (splits_pow * rows_pow))),
        "STAGES": cfg.stages, "WAIT": waits(query.device), "num_warps": cfg.warps}, varying)


def _per_head(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def attention_decode(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None,
    *, causal_align: str | None = None, window_left: int = -1, window_right: int = -1,
    alibi_slopes: Tensor | None = None, softcap: float = 0.0, return_lse: bool = False,
    layout: str = "bhsd", programs: float = 1.0,
) -> Any:
    return dense(query, key, value, is_causal, scale, causal_align, window_left, window_right,
                 alibi_slopes, softcap, return_lse, layout, None, programs)


def attention_invariant(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None,
    *, causal_align: str | None = None, window_left: int = -1, window_right: int = -1,
    alibi_slopes: Tensor | None = None, softcap: float = 0.0, return_lse: bool = False,
    layout: str = "bhsd",
) -> Any:
    return dense(query, key, value, is_causal, scale, causal_align, window_left, window_right,
                 alibi_slopes, softcap, return_lse, layout, fixed=True)


def dense(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None,
    causal_align: str | None = None, window_left: int = -1, window_right: int = -1,
    alibi_slopes: Tensor | None = None, softcap: float = 0.0, return_lse: bool = False,
    layout: str = "bhsd", chosen: Config | None = None, programs: float = 1.0, fixed: bool = False,
) -> Any:
    """Returns the attention over dense keys. `chosen` overrides the configuration, for benchmarks;
    `fixed`: it depends on neither batch nor heads."""
    head, seq = (1, 2) if layout == "bhsd" else (2, 1)
    sizes = query.shape
    batch, heads, max_queries, dim = sizes[0], sizes[head], sizes[seq], sizes[3]
    whole = key, value
    if (key.stride(head) == 0 == value.stride(head) and heads * max_queries <= MAX_ROWS
            and not fixed):
        # one expanded head: read it once
        key, value = key.narrow(head, 0, 1), value.narrow(head, 0, 1)
    kv_heads, keys, dim_v = key.shape[head], key.shape[seq], value.shape[3]
    out = torch.empty((*sizes[:3], dim_v), dtype=query.dtype, device=query.device)
    lse = (torch.empty((batch, heads, max_queries), dtype=torch.float32, device=query.device)
           if return_lse else None)
    bottom = causal_align == "bottom_right"
    right = 0 if is_causal else window_right
    if bottom and max_queries == 1:
        # the query is at the last key: nothing is to its right
        right = -1

    def strides(t: Tensor) -> tuple[int, int, int]:
        return t.stride(0), t.stride(head), t.stride(seq)

    def growing(low: int, high: int) -> tuple[Varying, ...]:
        """Returns what varies as keys are appended: their number, strides of dense tensors."""
        return (Varying(whole[0], "size", seq, FIELDS["keys"], low, high),
                Varying(whole[1], "size", seq, -1, low, high),
                *(Varying(t, "stride", axis, FIELDS[f"{name}_{axis_name}"], 1)
                  for t, name in zip(whole, "kv")
                  for axis, axis_name in ((0, "batch"), (head, "head")) if t.stride(axis) > 0))

    launch(query, key, value, out, lse, (batch, heads, kv_heads, max_queries, keys, dim, dim_v),
           strides(query), strides(key), strides(value), strides(out),
           (heads * max_queries, max_queries, 1), dim ** -0.5 if scale is None else scale, softcap,
           window_left, right, bottom, alibi_slopes, chosen=chosen, programs=programs, fixed=fixed,
           growing=growing)
    return out if lse is None else (out, lse)


def paged_attention_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, window_left: int = -1,
    softcap: float = 0.0, key_scale: Tensor | None = None, value_scale: Tensor | None = None,
    max_seqlen_q: int | None = None, return_lse: bool = False, kv_layout: str = "NHD",
    programs: float = 1.0,
) -> Any:
    return paged(query, key_cache, value_cache, block_table, context_lens, cu_seqlens_q, is_causal,
                 scale, window_left, softcap, key_scale, value_scale, max_seqlen_q, return_lse,
                 kv_layout, None, programs)


def paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, window_left: int = -1,
    softcap: float = 0.0, key_scale: Tensor | None = None, value_scale: Tensor | None = None,
    max_seqlen_q: int | None = None, return_lse: bool = False, kv_layout: str = "NHD",
    chosen: Config | None = None, programs: float = 1.0,
) -> Any:
    tokens, heads, dim = query.shape
    slot, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    page, kv_heads, dim_v = key_cache.shape[slot], key_cache.shape[head], value_cache.shape[3]
    batch, pages = block_table.shape
    max_queries = 1 if cu_seqlens_q is None else int(max_seqlen_q or 0)
    out = torch.empty((tokens, heads, dim_v), dtype=query.dtype, device=query.device)
    lse = (torch.empty((tokens, heads), dtype=torch.float32, device=query.device) if return_lse
           else None)
    if max_queries and batch:
        # Without cu_seqlens_q each token is a batch entry; with it, it says where the queries of a
        # sequence begin.
        packed = cu_seqlens_q is not None

        def strides(t: Tensor) -> tuple[int, int, int]:
            return (0 if packed else t.stride(0)), t.stride(1), t.stride(0)

        def pool(t: Tensor) -> tuple[int, int, int]:
            return t.stride(0), t.stride(head), t.stride(slot)

        def growing(low: int, high: int) -> tuple[Varying, ...]:
            return (Varying(block_table, "size", 1, FIELDS["keys"], -(-low // page), high // page,
                            factor=page),
                    Varying(block_table, "stride", 0, FIELDS["table_batch"], 1))

        launch(query, key_cache, value_cache, out, lse,
               (batch, heads, kv_heads, max_queries, pages * page, dim, dim_v),
               strides(query), pool(key_cache), pool(value_cache), strides(out),
               (0 if packed else heads, 1, heads), dim ** -0.5 if scale is None else scale, softcap,
               window_left, 0 if is_causal and max_queries > 1 else -1, True, None, block_table,
               context_lens, cu_seqlens_q, page, key_scale, value_scale, chosen, programs, growing)
    return out if lse is None else (out, lse)
