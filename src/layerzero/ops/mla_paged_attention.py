"""Multi-head latent attention (MLA) over a paged cache, in absorbed form.

Every token is stored once for all heads: a compressed key-value vector (`ckv_cache`, 512 wide in
DeepSeek) and the part of the key that carries the position (`kpe_cache`, 64 wide). The scores are
scale * (q_nope . ckv + q_pe . kpe), and the values are ckv itself, so the output is as wide as ckv.
Page tables are as in lz.paged_attention.

`scale` has no default: it depends on the head size before absorption, 1 / sqrt(128 + 64) in
DeepSeek.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..spec.mistake import Mistake
from ..spec.op import INT32, Op, Redirect, Tolerance
from ..spec.reason import Code
from ..spec.rules import Condition, dtypes, equals, one_of, when
from .formulas.common import FLOATS, READS_ON_HOST, position_terms
from .formulas.mistakes import LSE, PAGES, SCORES, replace_argument, zeros_like
from .formulas.paged import (
    DERIVED,
    METADATA_RULES,
    WORDS,
    check_metadata,
    check_shapes,
    cu_seqlens,
    gather_pages,
    random_table,
    read_spans,
)


def reference(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False, *,
    scale: float, max_seqlen_q: int | None = None, return_lse: bool = False,
) -> Any:
    """Multi-head latent attention over a paged cache, in absorbed form; see lz.paged_attention for
    the page table.

    q_nope: (tokens, heads, ckv), q_pe: (tokens, heads, kpe), ckv_cache: (pages, page_size, ckv),
    kpe_cache: (pages, page_size, kpe). The output is (tokens, heads, ckv). scale: 1 / sqrt of the
    head size before the absorption.
    return_lse: also the log-sum-exp of each query row, (tokens, heads), natural log (divide by ln 2
    for base 2).
    """
    outs = [torch.empty_like(q_nope[:0])]
    lses = [q_nope.new_empty((0, q_nope.shape[1]),
                             dtype=torch.promote_types(q_nope.dtype, torch.float32))]
    for i, s in enumerate(read_spans("mla_paged_attention", q_nope.shape[0], block_table,
                                     context_lens, cu_seqlens_q, ckv_cache.shape[1], max_seqlen_q)):
        ckv, kpe = (gather_pages(cache, block_table[i], s.length)
                    for cache in (ckv_cache, kpe_cache))
        rows = slice(s.first, s.last)
        scores = (q_nope[rows] @ ckv.T + q_pe[rows] @ kpe.T) * scale       # (queries, heads, keys)
        _, hidden = position_terms(s.last - s.first, s.length, is_causal, "bottom_right", -1, -1,
                                   None, scores.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None], -math.inf)
        weights = torch.softmax(scores, -1)
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
        outs.append(weights @ ckv)
        lses.append(torch.logsumexp(scores.to(lses[0].dtype), -1))
    return (torch.cat(outs), torch.cat(lses)) if return_lse else torch.cat(outs)


def meta(q_nope: Tensor, *args: Any, return_lse: bool = False, **kwargs: Any) -> Any:
    out = torch.empty_like(q_nope, memory_format=torch.contiguous_format)
    if not return_lse:
        return out
    return out, q_nope.new_empty(out.shape[:2],
                                 dtype=torch.promote_types(q_nope.dtype, torch.float32))


def inputs(
    context: tuple[int, ...] = (17, 5, 40), lengths_q: tuple[int, ...] = (), heads: int = 4,
    ckv: int = 64, kpe: int = 16, page_size: int = 16, causal: bool = True, scale: float = 0.125,
    lse: bool = False, table: str = "int32", order: str = "shuffled", one_buffer: bool = False,
    extreme: bool = False, large_pool: bool = False, bound: bool = True,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """Returns random arguments for one case; unused slots hold inf. `one_buffer`: shared views.
    `bound`: max_seqlen_q is given."""
    gen = torch.Generator("cpu").manual_seed(seed)
    integers = getattr(torch, table)
    block_table, context_lens, used, pages = random_table(gen, context, page_size, integers, device,
                                                          order, 33_000 if large_pool else 2)
    tokens = sum(lengths_q) if lengths_q else len(context)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    stored = rand(pages, page_size, ckv + kpe) * (3 if extreme else 1)
    stored[~used] = math.inf
    stored = stored.to(device=device, dtype=dtype)
    parts = stored[..., :ckv], stored[..., ckv:]
    magnitude = 10 if extreme else 1
    q_nope, q_pe = ((rand(tokens, heads, n) * magnitude).to(device=device, dtype=dtype)
                    for n in (ckv, kpe))
    return {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": parts[0] if one_buffer
            else parts[0].contiguous(), "kpe_cache": parts[1] if one_buffer
            else parts[1].contiguous(), "block_table": block_table,
            "context_lens": context_lens, "cu_seqlens_q": cu_seqlens(lengths_q, integers,
                                                                     device) if lengths_q else None,
            "is_causal": causal, "scale": scale, "return_lse": lse,
            "max_seqlen_q": max(lengths_q, default=1) if bound else None}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"lse": True}, {"page_size": 1}, {"page_size": 64, "context": (130, 64)},
    {"heads": 1, "table": "int64"}, {"ckv": 512, "kpe": 64, "heads": 16, "context": (33,),
                                     "scale": 576 ** -0.5}, {"context": (24, 24, 24)},
    {"context": (0, 7, 33), "lse": True}, {"context": ()},
    # sequences that begin with the same pages
    {"order": "shared", "context": (40, 37)}, {"order": "prefix", "context": (40, 37, 90)},
    {"lengths_q": (3, 1, 5), "bound": False},
    {"one_buffer": True, "order": "neighbours"}, {"lengths_q": (17, 1, 40)},
    {"lengths_q": (3, 0, 8), "lse": True}, {"lengths_q": (2, 5, 1), "causal": False},
    {"lengths_q": (5, 4), "context": (3, 0), "lse": True}, {"extreme": True},
    {"extreme": True, "scale": -0.05},
    {"heads": 40, "lengths_q": (3, 1, 5), "context": (20, 9, 33)},
    {"lengths_q": (4, 30), "context": (20, 50), "one_buffer": True},
    {"lengths_q": (70,), "context": (90,)},
    {"lengths_q": (80, 64), "context": (80, 64), "lse": True, "page_size": 64},
    {"lengths_q": (66,), "context": (70,), "causal": False},
    {"lengths_q": (140, 0), "context": (130, 4), "lse": True},
    {"ckv": 40, "kpe": 8, "lengths_q": (2, 1, 3), "table": "int64"},
    {"ckv": 512, "kpe": 64, "heads": 16, "context": (33, 7), "lengths_q": (2, 1)},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    check_metadata("mla_paged_attention", values, facts)


def canonical(values: dict[str, Any]) -> Redirect | None:
    """Rewrites nothing; raises InvalidCall for malformed shapes."""
    check_shapes("mla_paged_attention", values, "(pages, page_size, dim)", "ckv_cache", "kpe_cache")
    return None


# One rule per dtype: a rule compares a fact with constants.
SAME_DTYPE: tuple[Condition, ...] = tuple(
    when(equals("dtype", d), one_of(f"{cache}.dtype", d, code=Code.KV_CACHE_DTYPE_MISMATCH))
    for cache in ("ckv_cache", "kpe_cache") for d in FLOATS)

STRESS: tuple[dict[str, Any], ...] = (
    # more than 256 pages, keys beyond 2^13, page ids beyond 2^15
    {"context": (1_037, 3), "page_size": 4, "heads": 2, "ckv": 8, "kpe": 4},
    {"context": (8_269,), "page_size": 64, "heads": 2, "ckv": 8, "kpe": 4},
    {"context": (9, 70), "page_size": 1, "large_pool": True, "heads": 2, "ckv": 8, "kpe": 4},
    # as many heads as in the models, which fill several tiles
    {"heads": 128, "lengths_q": (3, 1), "context": (70, 9), "ckv": 16, "kpe": 8},
    {"context": (16, 32, 48)}, {"page_size": 5, "context": (21, 4, 5)},
    {"lengths_q": (3, 0, 9), "causal": False})

MISTAKES: tuple[Mistake, ...] = (
    *SCORES[2:], replace_argument("scale", "the scale of the absorbed size", "scale", lambda v: (
    v["q_nope"].shape[-1] + v["q_pe"].shape[-1]) ** -0.5), *PAGES, *LSE,
    replace_argument("scale", "the scale left out", "scale", 1.0),
    replace_argument("position bias", "the position part left out", "q_pe", zeros_like("q_pe")))

OP = Op(
    name="mla_paged_attention", family="attention", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS, mistakes=MISTAKES,
    reference_kernel={**READS_ON_HOST, "workspace": "3 * itemsize * heads * tokens * seq_k"},
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-5),
                         "float64": (1e-8, 1e-8)}),
    shapes={"q_nope": "tokens heads head_dim_ckv", "q_pe": "tokens heads head_dim_kpe",
            "ckv_cache": "pages page_size head_dim_ckv",
            "kpe_cache": "pages page_size head_dim_kpe", "block_table": "batch max_pages",
            "context_lens": "batch", "cu_seqlens_q": "boundaries"},
    returns=("tokens heads head_dim_ckv", "tokens heads"), same_dtype=("q_nope", "q_pe"),
    derived={**DERIVED, "head_dim": "head_dim_ckv + head_dim_kpe"}, words=WORDS,
    exact=("heads", "head_dim_ckv", "head_dim_kpe", "page_size"),
    ranges={"max_seqlen_q": INT32},
    requires=(dtypes(*FLOATS), *METADATA_RULES, *SAME_DTYPE),
    flops="2 * tokens * heads * seq_k * (2 * head_dim_ckv + head_dim_kpe)",
    bytes="itemsize * (tokens * heads * (2 * head_dim_ckv + head_dim_kpe) + batch * seq_k * "
          "head_dim)",
    differentiable=("q_nope", "q_pe", "ckv_cache", "kpe_cache"), canonical=canonical,
    extra_check=extra_check,
    outputs="Tensor[]",
)
