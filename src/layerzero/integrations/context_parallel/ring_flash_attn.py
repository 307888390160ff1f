"""The functions of the ring-flash-attention repository, by their names and arguments.

Tensors are as there: packed (tokens, heads, dim) for the varlen functions, (batch, seq, heads, dim)
for the others, each rank's own part; `kvpacked` and `qkvpacked` take them stacked on the axis
before the heads. `return_attn_probs=True` gives (out, log-sum-exp, None). What lz does not compute
in a sharded sequence (dropout, ALiBi) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...spec.errors import ConfigError
from .methods import items_attention, ring_attention, zigzag_attention
from .sharding import Items, Layout, equal_lengths

Window = tuple[int, int]


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int,
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Returns cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k and local_k_slice for the
    rank-th of world_size equal parts of packed sequences; reads them on the host."""
    bounds = cu_seqlens.tolist()
    if bounds[-1] % world_size:
        raise ConfigError(f"{world_size} ranks must divide the {bounds[-1]} tokens of all "
                          "sequences; pad the last one")
    length = bounds[-1] // world_size
    first, last = rank * length, (rank + 1) * length
    inside = [(a, b) for a, b in pairwise(bounds) if a < last and b > first]
    queries = [0] + [min(b, last) - first for _, b in inside]
    begin = inside[0][0] if inside else first
    ends = [min(b, last) if causal else b for _, b in inside]
    keys = [0] + [end - begin for end in ends]

    def longest(starts: list[int]) -> int:
        return max((b - a for a, b in pairwise(starts)), default=0)

    cu_q, cu_k = (torch.tensor(starts, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
                  for starts in (queries, keys))
    return cu_q, cu_k, longest(queries), longest(keys), slice(begin, ends[-1] if ends else begin)


def llama3_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Any:
    """Packed sequences in equal contiguous parts, whatever the boundaries; keys are all-gathered,
    `heads_k_stride` heads at a time. The other arguments come from
    llama3_flash_attn_prepare_cu_seqlens."""
    _refuse("llama3_flash_attn_varlen_func", dropout_p, alibi_slopes, window_size, causal)
    starts_q, starts_k = cu_seqlens_q[:-1], cu_seqlens_k[:-1]
    items = torch.stack((starts_q, cu_seqlens_q[1:] - starts_q,
                         starts_k + (local_k_slice.start or 0), cu_seqlens_k[1:] - starts_k), 1)
    result = items_attention(
        q, k, v, Items(items.to(q.device, torch.int32, non_blocking=True), max_seqlen_q,
                       max_seqlen_k),
        is_causal=causal, scale=softmax_scale, window_left=window_size[0],
        return_lse=return_attn_probs, heads_k_stride=heads_k_stride, group=group)
    return _with_probs(result, return_attn_probs)


def zigzag_llama3_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, heads_k_stride: int,
    local_k_slice: slice | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
    use_fused_kernel_forward: bool = False, use_fused_kernel_backward: bool = False,
    n_chunks: int = 2, use_triton_grouped: bool = False, use_grouped_attention: bool = True,
) -> Any:
    """Sequences in zigzag over the ranks; keys are all-gathered, `heads_k_stride` heads at a time.

    cu_seqlens_q: the local boundaries, those of the sequences // ranks. max_seqlen_q: at least the
    longest local part; the less it is, the less a kernel has to launch.
    use_grouped_attention: one call per chunk of heads that addresses the gathered keys where they
    lie; False copies them in order and calls twice. Which kernel serves is lz's affair: the other
    `use_` arguments change nothing, cu_seqlens_k, max_seqlen_k and local_k_slice follow from the
    local boundaries.
    """
    _refuse("zigzag_llama3_flash_attn_varlen_func", dropout_p, alibi_slopes, window_size, causal)
    if n_chunks != 2:
        raise ConfigError(f"a rank holds 2 chunks of every sequence in zigzag, got n_chunks="
                          f"{n_chunks}")
    result = zigzag_attention(
        q, k, v, cu_seqlens_q, max_seqlen_q, is_causal=causal, scale=softmax_scale,
        window_left=window_size[0], return_lse=return_attn_probs, heads_k_stride=heads_k_stride,
        group=group, rearrange=not use_grouped_attention)
    return _with_probs(result, return_attn_probs)


def _ring_varlen(name: str, layout: Layout) -> Callable[..., Any]:
    def function(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int | None,
        dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
    ) -> Any:
        _refuse(name, dropout_p, alibi_slopes, window_size, causal, ring=True)
        result = ring_attention(q, k, v, cu_seqlens, max_seqlen, is_causal=causal,
                                scale=softmax_scale, return_lse=return_attn_probs, layout=layout,
                                group=group)
        return _with_probs(result, return_attn_probs)

    return _named(function, name, "Packed sequences, each in " + (
        "zigzag" if layout == "zigzag" else "contiguous chunks") + " over the ranks; keys go "
        "around the ring. cu_seqlens are the local boundaries.")


def _ring(name: str, layout: Layout) -> Callable[..., Any]:
    def function(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
    ) -> Any:
        _refuse(name, dropout_p, alibi_slopes, window_size, causal, ring=True)
        batch, length, heads, _ = q.shape
        result = ring_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
                                equal_lengths(batch, length, q.device), length, is_causal=causal,
                                scale=softmax_scale, return_lse=return_attn_probs, layout=layout,
                                group=group)
        if not return_attn_probs:
            return result.view(batch, length, heads, -1)
        out, lse = result
        return (out.view(batch, length, heads, -1),
                lse.view(batch, length, heads).transpose(1, 2), None)

    return _named(function, name, "A batch of sequences, each in " + (
        "zigzag" if layout == "zigzag" else "contiguous chunks") + " over the ranks; keys go "
        "around the ring.")


def _kvpacked(function: Callable[..., Any]) -> Callable[..., Any]:
    def packed(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(q, *kv.unbind(-3), *args, **kwargs)

    name = function.__name__.replace("_func", "_kvpacked_func")
    return _named(packed, name, f"As {function.__name__}, with keys and values in one tensor.")


def _qkvpacked(function: Callable[..., Any]) -> Callable[..., Any]:
    def packed(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(*qkv.unbind(-3), *args, **kwargs)

    name = function.__name__.replace("_func", "_qkvpacked_func")
    return _named(packed, name, f"As {function.__name__}, with all three in one tensor.")


def _named(function: Callable[..., Any], name: str, doc: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


ring_flash_attn_func = _ring("ring_flash_attn_func", "contiguous")
ring_flash_attn_varlen_func = _ring_varlen("ring_flash_attn_varlen_func", "contiguous")
zigzag_ring_flash_attn_func = _ring("zigzag_ring_flash_attn_func", "zigzag")
zigzag_ring_flash_attn_varlen_func = _ring_varlen("zigzag_ring_flash_attn_varlen_func", "zigzag")
llama3_flash_attn_varlen_kvpacked_func = _kvpacked(llama3_flash_attn_varlen_func)
llama3_flash_attn_varlen_qkvpacked_func = _qkvpacked(llama3_flash_attn_varlen_func)
ring_flash_attn_kvpacked_func = _kvpacked(ring_flash_attn_func)
ring_flash_attn_qkvpacked_func = _qkvpacked(ring_flash_attn_func)
ring_flash_attn_varlen_kvpacked_func = _kvpacked(ring_flash_attn_varlen_func)
ring_flash_attn_varlen_qkvpacked_func = _qkvpacked(ring_flash_attn_varlen_func)
zigzag_llama3_flash_attn_varlen_kvpacked_func = _kvpacked(zigzag_llama3_flash_attn_varlen_func)
zigzag_llama3_flash_attn_varlen_qkvpacked_func = _qkvpacked(zigzag_llama3_flash_attn_varlen_func)
zigzag_ring_flash_attn_kvpacked_func = _kvpacked(zigzag_ring_flash_attn_func)
zigzag_ring_flash_attn_qkvpacked_func = _qkvpacked(zigzag_ring_flash_attn_func)
zigzag_ring_flash_attn_varlen_kvpacked_func = _kvpacked(zigzag_ring_flash_attn_varlen_func)
zigzag_ring_flash_attn_varlen_qkvpacked_func = _qkvpacked(zigzag_ring_flash_attn_varlen_func)


def _refuse(name: str, dropout_p: float, alibi_slopes: Tensor | None, window_size: Window,
            causal: bool, ring: bool = False) -> None:
    for argument, value, wanted in (("dropout_p", dropout_p, 0.0),
                                    ("alibi_slopes", alibi_slopes, None)):
        if value is not None and (wanted is None or value != wanted):
            raise ConfigError(f"{name} does not compute {argument} over sharded sequences; pass "
                              f"{argument}={wanted}")
    if max(window_size) >= 0 and (ring or not causal or window_size[1] > 0):
        raise ConfigError(
            f"{name} does not compute window_size={window_size}"
            + (" in a ring; zigzag_llama3_flash_attn_varlen_func has causal windows" if ring
               else "; it has causal windows: causal=True and (left, -1) or (left, 0)"))


def _with_probs(result: Any, wanted: bool) -> Any:
    """Returns the results as ring_flash_attn does: the log-sum-exp is (heads, tokens) there."""
    return (result[0], result[1].transpose(0, 1), None) if wanted else result
