"""Paged attention with torch alone; the kernels differ in how they read the pages.

gather   copies the pages of each sequence together for torch's attention: all the contract allows,
         on any device
pieces   on the CPU, piece by piece: adjacent pages are read in place, scattered ones gathered into
         what fits a core's cache; attention over the pieces is merged by log-sum-exp
padded   decode without reading a length on the host: all table rows at full width, masked
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.formulas.common import FLOATS, position_terms
from ..ops.formulas.paged import Part, gather_pages, group_heads, read_spans, ungroup_heads
from ..ops.paged_attention import OP as paged_attention
from ..ops.paged_attention import dequantize_cache
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._pages import (
    DECODE,
    HALF_OFF_CPU,
    ON_HOST,
    PagedCache,
    attend_by_pieces,
    cpu_flash,
    empty_result,
    full_width,
    gather_visible,
    is_checkable,
)
from ._sequences import EFFICIENT_DIM_ON_CUDA, HEADS_OF_A_LAUNCH, ON_16_BYTES, sdpa

# gather: any device

def _gather() -> Callable[..., Any]:
    return gather_attention


def gather_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, window_left: int = -1,
    softcap: float = 0.0, key_scale: Tensor | None = None, value_scale: Tensor | None = None,
    max_seqlen_q: int | None = None, return_lse: bool = False,
) -> Any:
    out, lse = empty_result(query, value_cache.shape[3])
    for i, s in enumerate(read_spans("paged_attention", query.shape[0], block_table, context_lens,
                                     cu_seqlens_q, key_cache.shape[1], max_seqlen_q)):
        if s.first == s.last or s.length == 0:
            continue
        rows, count = slice(s.first, s.last), s.last - s.first
        key = dequantize_cache(gather_pages(key_cache, block_table[i], s.length), key_scale,
                               query.dtype)
        value = dequantize_cache(gather_pages(value_cache, block_table[i], s.length), value_scale,
                                 query.dtype)
        explicit = softcap > 0.0 or return_lse
        # as torch's is_causal
        square = is_causal and window_left < 0 and count == s.length and not explicit
        hidden = None
        if not square and (count > 1 or window_left >= 0):
            _, hidden = position_terms(count, s.length, is_causal, "bottom_right", window_left, -1,
                                       None, query.device)
        if explicit:
            out[rows], lse[rows] = _explicit_softmax(query[rows], key, value, hidden, scale,
                                                     softcap)
        else:
            q = group_heads(query[rows], key.shape[1])
            k, v = (t.transpose(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for t in (key, value))
            attended = sdpa(q, k, v, None if hidden is None else ~hidden, 0.0, square, scale=scale)
            out[rows] = ungroup_heads(attended)
        if is_causal and count > s.length:     # torch's kernels differ on rows that see no key
            out[s.first:s.last - s.length] = 0
    return (out, lse) if return_lse else out


def _explicit_softmax(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None,
                      scale: float | None, softcap: float) -> Part:
    """Computes softmax step by step, with the query heads of one KV head as rows of one matmul."""
    q = group_heads(query, key.shape[1])
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.flatten(1, 2) @ key.permute(1, 2, 0)).unflatten(1, q.shape[1:3]).to(acc_dtype)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.softmax(scores, -1).masked_fill(lse == -math.inf, 0.0).to(q.dtype)
    out = (weights.flatten(1, 2) @ value.transpose(0, 1)).unflatten(1, q.shape[1:3])
    return ungroup_heads(out), ungroup_heads(lse)[..., 0]


# pieces: CPU


def _pieces() -> Callable[..., Any]:
    cpu_flash()

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, key_scale: Tensor | None = None,
            value_scale: Tensor | None = None, max_seqlen_q: int | None = None,
            return_lse: bool = False, kv_layout: str = "NHD") -> Any:
        cache = PagedCache(key_cache, value_cache, kv_layout, query.dtype)
        # A scale per head commutes with both matmuls: scale query and output, not the cache.
        scaled_query = (query if key_scale is None
                        else _scale_heads(query, key_scale, cache.kv_heads))
        out, lse = attend_by_pieces("paged_attention", cache, scaled_query, block_table,
                                     context_lens, cu_seqlens_q, is_causal,
                                     scale, window_left, max_seqlen_q)
        out = out if value_scale is None else _scale_heads(out, value_scale, cache.kv_heads)
        return (out, lse) if return_lse else out

    return run


def _scale_heads(t: Tensor, scale: Tensor, kv_heads: int) -> Tensor:
    """Returns (tokens, heads, dim) times one number, or one per KV head."""
    acc_dtype = torch.promote_types(t.dtype, torch.float32)
    scaled = t.unflatten(1, (kv_heads, -1)).to(acc_dtype) * scale.to(acc_dtype).reshape(-1, 1, 1)
    return scaled.to(t.dtype).flatten(1, 2)


# padded: decode on any device, nothing is read on the host

def _padded() -> Callable[..., Any]:
    return padded_decode


def padded_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, is_causal: bool = False, scale: float | None = None, *,
    window_left: int = -1, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None, max_seqlen_q: int | None = None, return_lse: bool = False,
) -> Any:
    """Decodes: one query per sequence, which sees all its keys with or without is_causal."""
    if is_checkable(context_lens):
        read_spans("paged_attention", query.shape[0], block_table, context_lens, None,
                   key_cache.shape[1], max_seqlen_q)
    pages, seen = full_width(block_table, context_lens, key_cache.shape[1], window_left)
    key, value = (gather_visible(pool, pages, seen).transpose(1, 2).to(query.dtype)
                  for pool in (key_cache, value_cache))
    kv_heads = key_cache.shape[2]
    scaled_query = query if key_scale is None else _scale_heads(query, key_scale, kv_heads)
    q, mask = scaled_query.unflatten(1, (kv_heads, -1)), seen[:, None, None]
    lse = None
    if return_lse:
        upcast = torch.zeros(mask.shape, dtype=torch.promote_types(query.dtype, torch.float32),
                           device=query.device)
        out, lse = cpu_flash()(q, key, value, 0.0, False,
                                attn_mask=upcast.masked_fill(~mask, -math.inf), scale=scale)
        lse = lse.flatten(1).masked_fill((context_lens == 0)[:, None], -math.inf)
    else:
        out = sdpa(q, key, value, mask, scale=scale)
    out = out.flatten(1, 2).masked_fill((context_lens == 0)[:, None, None], 0.0).to(query.dtype)
    out = out if value_scale is None else _scale_heads(out, value_scale, kv_heads)
    return (out, lse) if return_lse else out


SAME_HEAD_DIM = r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID)
NO_SOFTCAP = r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED)
KEYS = "itemsize * seq_k * kv_heads * (head_dim + head_dim_v)"


KERNELS = (
    Kernel("torch.paged_gather", paged_attention, _gather, prior=2.5, overhead_us=25.0,
           baseline=True, variants=("NHD",), graph_safe=False, traceable=False,
           workspace=f"2 * {KEYS}",
           # keys and values are gathered: they begin where a tensor of their own does
           requires=(HALF_OFF_CPU, HEADS_OF_A_LAUNCH, *EFFICIENT_DIM_ON_CUDA, ON_16_BYTES[0]),
           note=ON_HOST),
    Kernel("torch.paged_pieces", paged_attention, _pieces, prior=10.0, overhead_us=35.0,
           variants=("NHD", "HND"), differentiable=False, graph_safe=False, traceable=False,
           workspace=f"2 * {KEYS}",
           requires=(
               r.device("cpu"), r.dtypes(*FLOATS), SAME_HEAD_DIM, NO_SOFTCAP,
               r.unit_stride("query")),
           note=f"{ON_HOST}; reads neighbouring pages where they lie"),
    Kernel("torch.paged_padded", paged_attention, _padded, prior=2.0, overhead_us=40.0,
           variants=("NHD",),
           workspace=f"2 * batch * {KEYS}", requires=(
               *DECODE, HALF_OFF_CPU, SAME_HEAD_DIM, NO_SOFTCAP, r.unit_stride("query"),
               *EFFICIENT_DIM_ON_CUDA, ON_16_BYTES[0],
               r.any_of(r.off("return_lse"), r.device("cpu")),
               r.any_of(r.off("return_lse"), r.off("grad", Code.BACKWARD_UNSUPPORTED))),
           note="reads every table row to its full width; no length leaves the device"),
)
