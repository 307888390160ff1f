"""Multi-head latent attention over pages with torch alone.

matmul   explicit matrix products, which are large because all heads share one key
pieces   on the CPU, piece by piece, like paged attention
padded   decode without reading a length on the host: all table rows at full width, masked
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.formulas.common import FLOATS, position_terms
from ..ops.formulas.paged import gather_pages, read_spans
from ..ops.mla_paged_attention import OP as mla_paged_attention
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._pages import (
    DECODE,
    HALF_OFF_CPU,
    ON_HOST,
    LatentCache,
    attend_by_pieces,
    cpu_flash,
    empty_result,
    full_width,
    gather_visible,
    is_checkable,
)


def _mla_matmul() -> Callable[..., Any]:
    return mla_matmul


def mla_matmul(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False, *,
    scale: float, max_seqlen_q: int | None = None, return_lse: bool = False,
) -> Any:
    out, lse = empty_result(q_nope, q_nope.shape[2])
    for i, s in enumerate(read_spans("mla_paged_attention", q_nope.shape[0], block_table,
                                     context_lens, cu_seqlens_q, ckv_cache.shape[1], max_seqlen_q)):
        # earlier rows see no key
        first = max(s.first, s.last - s.length) if is_causal else s.first
        count = s.last - first
        if count <= 0 or s.length == 0:
            continue
        ckv, kpe = (gather_pages(cache, block_table[i], s.length)
                    for cache in (ckv_cache, kpe_cache))
        nope, pe = (q[first:s.last].flatten(0, 1) for q in (q_nope, q_pe))
        scores = torch.addmm(pe @ kpe.T, nope, ckv.T).to(lse.dtype) * scale
        if is_causal and count > 1:
            _, hidden = position_terms(count, s.length, True, "bottom_right", -1, -1, None,
                                       scores.device)
            assert hidden is not None
            scores = scores.unflatten(0, (count, -1)).masked_fill(hidden[:, None],
                                                                  -math.inf).flatten(0, 1)
        out[first:s.last] = (torch.softmax(scores, -1).to(ckv.dtype)
                             @ ckv).unflatten(0, (count, -1))
        if return_lse:
            lse[first:s.last] = torch.logsumexp(scores, -1).unflatten(0, (count, -1))
    return (out, lse) if return_lse else out


def _mla_pieces() -> Callable[..., Any]:
    cpu_flash()

    def run(q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False, *,
            scale: float, max_seqlen_q: int | None = None, return_lse: bool = False) -> Any:
        out, lse = attend_by_pieces("mla_paged_attention", LatentCache(ckv_cache, kpe_cache),
                                    torch.cat((q_nope, q_pe), -1), block_table, context_lens,
                                    cu_seqlens_q, is_causal, scale, -1, max_seqlen_q)
        out = out[..., :q_nope.shape[2]].contiguous()
        return (out, lse) if return_lse else out

    return run


def _mla_padded() -> Callable[..., Any]:
    return mla_padded_decode


def mla_padded_decode(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, is_causal: bool = False, *, scale: float, max_seqlen_q: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Decodes: one query per sequence, which sees all its keys with or without is_causal."""
    if is_checkable(context_lens):
        read_spans("mla_paged_attention", q_nope.shape[0], block_table, context_lens, None,
                   ckv_cache.shape[1], max_seqlen_q)
    pages, seen = full_width(block_table, context_lens, ckv_cache.shape[1], -1)
    ckv, kpe = (gather_visible(cache, pages, seen) for cache in (ckv_cache, kpe_cache))
    acc_dtype = torch.promote_types(q_nope.dtype, torch.float32)
    scores = torch.baddbmm(q_pe @ kpe.transpose(1, 2), q_nope, ckv.transpose(1, 2))
    scores = (scores.to(acc_dtype) * scale).masked_fill(~seen[:, None], -math.inf)
    weights = torch.softmax(scores, -1).masked_fill((context_lens == 0)[:, None, None], 0.0)
    out = (weights.to(ckv.dtype) @ ckv).to(q_nope.dtype)
    return (out, torch.logsumexp(scores, -1)) if return_lse else out


KERNELS = (
    Kernel("torch.mla_paged_matmul", mla_paged_attention, _mla_matmul, prior=1.3, overhead_us=25.0,
           baseline=True, graph_safe=False, traceable=False,
           workspace="(itemsize + 8) * heads * tokens * seq_k", note=ON_HOST),
    Kernel("torch.mla_paged_pieces", mla_paged_attention, _mla_pieces, prior=1.8, overhead_us=45.0,
           differentiable=False, graph_safe=False, traceable=False,
           workspace="2 * itemsize * seq_k * head_dim", requires=(
               r.device("cpu"), r.dtypes(*FLOATS),
               r.at_least("seq_q", 64, Code.SEQ_LEN_UNSUPPORTED)),
           note=f"{ON_HOST}; for a few queries the matrix products are quicker"),
    Kernel("torch.mla_paged_padded", mla_paged_attention, _mla_padded, prior=0.8, overhead_us=45.0,
           workspace="2 * itemsize * batch * seq_k * head_dim", requires=(*DECODE, HALF_OFF_CPU),
           note="reads every table row to its full width; no length leaves the device"),
)
