"""Attention over a paged KV cache: one ragged batch that may mix prefill and decode.

The query is packed, (tokens, heads, dim); `cu_seqlens_q` divides it into sequences, and without it
every sequence has one query (decode). The cache is a pool of pages: `kv_layout="NHD"` is (pages,
page_size, kv_heads, dim), "HND" is (pages, kv_heads, page_size, dim). Row i of `block_table` lists
the pages of sequence i, `context_lens[i]` counts all its keys, those of its own queries included:
the last query is aligned with the last key, and causality and the window are relative to that. A
slot beyond context_lens may hold anything, even NaN, and is never read; nor are table entries.

A cache in another dtype than the query's (float8, int8, another float) needs `key_scale` and
`value_scale`, one number or one per KV head: a key is the stored value times its scale. A scale of
1.0 is a plain cast; the setting allow_adaptation inserts it for a cache of another float dtype
without a scale. A query row that sees no key gives zeros, and -inf as its log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.mistake import Mistake
from ..spec.op import INT32, Adaptation, Op, Redirect, Tolerance
from ..spec.plan import Transform
from ..spec.reason import Code, Reason
from ..spec.rules import Condition, any_of, at_least, dtypes, equals, one_of, present, when
from .formulas.common import FLOATS, HEAD_WORDS, READS_ON_HOST, attend, empty_result
from .formulas.mistakes import LSE, PAGES, SCORES, SOFTCAP, WINDOW, replace_argument
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

STORED = (*FLOATS, "float8_e4m3fn", "float8_e5m2", "int8")


def reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, window_left: int = -1,
    softcap: float = 0.0, key_scale: Tensor | None = None, value_scale: Tensor | None = None,
    max_seqlen_q: int | None = None, return_lse: bool = False,
    kv_layout: Literal["NHD", "HND"] = "NHD",
) -> Any:
    """Attention over a paged KV cache; see lz.attention for the shared arguments.

    block_table: (batch, max_pages), the pages of each sequence. context_lens: (batch,), its keys,
    new ones included.
    cu_seqlens_q: (batch + 1,), where each sequence's queries begin; None for one query each.
    is_causal and window_left are relative to the last query, which is aligned with the last key.
    key_scale, value_scale: factors of the stored values, one number or one per KV head.
    max_seqlen_q: the longest query; some kernels need it on the host.
    return_lse: also the log-sum-exp of each query row, (tokens, heads), natural log (divide by ln 2
    for base 2).
    """
    if kv_layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    outs = [query.new_empty((0, query.shape[1], value_cache.shape[3]))]
    lses = [query.new_empty((0, query.shape[1]),
                            dtype=torch.promote_types(query.dtype, torch.float32))]
    for i, s in enumerate(read_spans("paged_attention", query.shape[0], block_table, context_lens,
                                     cu_seqlens_q, key_cache.shape[1], max_seqlen_q)):
        key = dequantize_cache(gather_pages(key_cache, block_table[i], s.length), key_scale,
                               query.dtype)
        value = dequantize_cache(gather_pages(value_cache, block_table[i], s.length), value_scale,
                                 query.dtype)
        q, k, v = (t.transpose(0, 1)[None] for t in (query[s.first:s.last], key, value))
        out, lse = attend(q, k, v, None, 0.0, is_causal, scale, "bottom_right", window_left, -1,
                          None, softcap)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return (torch.cat(outs), torch.cat(lses)) if return_lse else torch.cat(outs)


def dequantize_cache(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns (tokens, kv_heads, dim) in `dtype`; `scale` is one number or one per KV head."""
    if scale is None:
        return stored.to(dtype)
    acc_dtype = torch.promote_types(dtype, torch.float32)
    return (stored.to(acc_dtype) * scale.to(acc_dtype).reshape(-1, 1)).to(dtype)


def meta(query: Tensor, key_cache: Tensor, value_cache: Tensor, *args: Any,
         return_lse: bool = False, **kwargs: Any) -> Any:
    return empty_result(query, value_cache.shape[3], return_lse)


def inputs(
    context: tuple[int, ...] = (17, 5, 40), lengths_q: tuple[int, ...] = (), hq: int = 4,
    hkv: int = 2, d: int = 32, dv: int = 0, page_size: int = 16, causal: bool = True,
    window: int = -1, softcap: float = 0.0, scale: float | None = None, stored: str = "",
    stored_v: str = "", scales: str = "", lse: bool = False, layout: str = "NHD",
    table: str = "int32", order: str = "shuffled", stride: str = "", extreme: bool = False,
    large_pool: bool = False, bound: bool = True, dtype: torch.dtype = torch.float32,
    device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """Returns random arguments for one case; unused slots hold inf and NaN, and table entries -1.
    No lengths_q: decode.

    `stored`: the dtype of the caches, `stored_v`: another one of the values, with `scales` "one" or
    per "head". `stride`: query and cache rows "padded" or "sparse". `bound`: max_seqlen_q is given.
    """
    gen = torch.Generator("cpu").manual_seed(seed)
    integers = getattr(torch, table)
    block_table, context_lens, used, pages = random_table(gen, context, page_size, integers, device,
                                                          order, 33_000 if large_pool else 2)

    def strided(t: Tensor) -> Tensor:
        if not stride:
            return t
        spread = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)
        return (spread[..., ::2] if stride == "sparse" else spread[..., :t.shape[-1]]).copy_(t)

    def cache(dim: int, stored: str, unused: float) -> tuple[Tensor, Tensor | None]:
        t = torch.randn((pages, page_size, hkv, dim), generator=gen) * (3 if extreme else 1)
        factor = (torch.rand(hkv if scales == "head" else (), generator=gen) + 0.5 if scales
                  else torch.ones(()))
        if stored == "int8" or stored.startswith("float8"):
            factor = factor / (30 if stored == "int8" else 2)
        t = t / factor.reshape(-1, 1)
        t[~used] = {"int8": 113.0, "float8_e4m3fn": 448.0}.get(stored, unused)
        t = t.round().clamp(-127, 127) if stored == "int8" else t
        t = t.to(getattr(torch, stored) if stored else dtype)
        t = t.transpose(1, 2).contiguous() if layout == "HND" else t
        return strided(t).to(device), factor.to(device) if scales else None

    rows = torch.randn((sum(lengths_q) if lengths_q else len(context), hq, d), generator=gen)
    query = strided((rows * (30 if extreme else 1)).to(dtype)).to(device)
    keys, key_scale = cache(d, stored, math.inf)
    values, value_scale = cache(dv or d, stored_v or stored, math.nan)
    return {"query": query, "key_cache": keys, "value_cache": values, "block_table": block_table,
            "context_lens": context_lens, "cu_seqlens_q": cu_seqlens(lengths_q, integers,
                                                                     device) if lengths_q else None,
            "is_causal": causal, "scale": scale, "window_left": window, "softcap": softcap,
            "key_scale": key_scale, "value_scale": value_scale,
            "max_seqlen_q": max(lengths_q, default=1) if bound else None, "return_lse": lse,
            "kv_layout": layout}


CASES: tuple[dict[str, Any], ...] = (
    {"context": (70, 9), "lengths_q": (9, 1), "d": 128}, {}, {"lse": True}, {"layout": "HND"},
    {"layout": "HND", "lse": True, "page_size": 4}, {"page_size": 1},
    {"page_size": 64, "context": (130, 64)},
    {"page_size": 256, "context": (3, 300), "layout": "HND"}, {"hkv": 1}, {"hkv": 4, "d": 72},
    {"context": (24, 24, 24)}, {"context": (24, 24), "layout": "HND", "window": 9}, {"window": 6},
    {"window": 0, "lse": True}, {"softcap": 5.0},
    {"softcap": 8.0, "lse": True, "lengths_q": (3, 1, 5)}, {"scale": 0.3, "table": "int64"},
    {"context": (0, 7, 33), "lse": True}, {"context": (1,), "page_size": 1}, {"context": ()},
    {"context": (90, 50), "order": "neighbours", "lse": True},
    {"context": (90, 70, 100), "order": "shared", "d": 64, "lse": True}, {"lengths_q": (17, 1, 40)},
    {"context": (90, 70, 77), "order": "prefix", "lse": True}, {"context": (40, 37),
                                                                "order": "prefix"},
    {"context": (37, 90, 41), "order": "prefix", "lengths_q": (3, 1, 2)},
    {"lengths_q": (3, 0, 8), "lse": True}, {"lengths_q": (2, 5, 1), "causal": False},
    {"lengths_q": (0, 2, 1)},                              # as many queries as sequences
    {"lengths_q": (5, 2), "context": (40, 3), "layout": "HND", "table": "int64"},
    {"lengths_q": (6, 3, 9), "window": 4}, {"lengths_q": (3, 1, 5), "bound": False},
    {"lengths_q": (6, 3, 9), "window": 4, "causal": False, "lse": True},
    {"lengths_q": (5, 4), "context": (3, 0), "lse": True},
    {"lengths_q": (4, 40), "context": (20, 50), "hq": 6, "hkv": 1}, {"d": 40, "dv": 24},
    {"stride": "padded"}, {"stride": "sparse", "lengths_q": (4, 1, 2)}, {"extreme": True},
    {"extreme": True, "scale": -0.3},
    {"stored": "float8_e4m3fn", "scales": "one"},
    {"stored": "float8_e5m2", "scales": "head", "layout": "HND"},
    {"stored": "int8", "scales": "head", "lengths_q": (4, 1, 9), "lse": True},
    {"stored": "float8_e4m3fn", "stored_v": "float8_e5m2", "scales": "one"},
    {"stored": "int8", "stored_v": "float8_e4m3fn", "scales": "head", "lengths_q": (3, 1, 2)},
    # keys in fewer bits than values, and the other way round
    {"stored": "float8_e4m3fn", "stored_v": "float16", "scales": "one", "lengths_q": (3, 1, 2)},
    {"stored": "bfloat16", "stored_v": "int8", "scales": "head", "lse": True},
    {"stored": "int8", "scales": "one"}, {"stored": "float16", "scales": "one"}, {"scales": "head"},
    {"context": (700, 9), "hq": 16, "hkv": 8, "d": 128}, {"hq": 14},
    {"stored": "int8", "scales": "head", "context": (9, 20), "hq": 8, "hkv": 8},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    heads, kv_heads, page_size = facts["heads"], facts["kv_heads"], facts["page_size"]
    if heads % kv_heads:
        swapped = heads % page_size == 0
        raise InvalidCall.of("paged_attention", Reason(
            Code.KV_CACHE_LAYOUT_MISMATCH, f"one whose KV heads divide the query's {heads}",
            f"{kv_heads} KV heads and pages of {page_size} by kv_layout={facts['kv_layout']!r} of "
            "key_cache"
            + (": it looks like the other layout" if swapped else ""), "key_cache"))
    check_metadata("paged_attention", values, facts)


def canonical(values: dict[str, Any]) -> Redirect | None:
    """Rewrites nothing; raises InvalidCall for malformed shapes."""
    inner = "page_size, kv_heads" if values["kv_layout"] == "NHD" else "kv_heads, page_size"
    check_shapes("paged_attention", values, f"(pages, {inner}, dim)", "key_cache", "value_cache")
    kv_heads = values["key_cache"].shape[2 if values["kv_layout"] == "NHD" else 1]
    for name in ("key_scale", "value_scale"):
        if values[name] is not None and tuple(values[name].shape) not in ((), (1,), (kv_heads,)):
            raise InvalidCall.of("paged_attention", Reason(
                Code.SCALE_LAYOUT_MISMATCH, f"one number or {kv_heads}, one per KV head",
                f"shape {tuple(values[name].shape)} for {name}", name))
    return None


def adapt(values: dict[str, Any]) -> Adaptation | None:
    """Reads a cache of another float dtype through a scale of 1, which casts the pages in the
    table, not the pool. A quantized cache cannot be read without its own scales."""
    query, changed, casts = values["query"], dict(values), []
    for name in ("key", "value"):
        cache = values[f"{name}_cache"]
        if cache.dtype == query.dtype or values[f"{name}_scale"] is not None:
            continue
        if str(cache.dtype).removeprefix("torch.") not in FLOATS:
            return None
        changed[f"{name}_scale"] = torch.ones((), device=cache.device)
        elements = values["block_table"].numel() * math.prod(cache.shape[1:])
        casts.append(Transform("cast", f"{name}_cache", elements * query.dtype.itemsize))
    return Adaptation(changed, tuple(casts)) if casts else None


def _cache_dtype_rules(cache: str, scale: str) -> tuple[Condition, ...]:
    """Without a scale the cache has the query's dtype: one rule per dtype, as for constants."""
    return (one_of(f"{cache}.dtype", *STORED, code=Code.KV_CACHE_DTYPE_MISMATCH),
            *(when(equals("dtype", d), any_of(present(f"{scale}.dtype"),
                                              one_of(f"{cache}.dtype", d,
                                                     code=Code.KV_CACHE_DTYPE_MISMATCH)))
              for d in FLOATS),
            one_of(f"{scale}.dtype", None, *FLOATS, code=Code.SCALE_LAYOUT_MISMATCH))


_SHARED = {"block_table": "batch max_pages", "context_lens": "batch", "cu_seqlens_q": "boundaries",
           "key_scale": "~kv_heads", "value_scale": "~kv_heads"}

STRESS: tuple[dict[str, Any], ...] = (
    # more than 256 pages, keys beyond 2^13, page ids beyond 2^15
    {"context": (1_037, 3), "page_size": 4, "hq": 2, "hkv": 1, "d": 8},
    {"context": (8_269,), "page_size": 64, "hq": 2, "hkv": 1, "d": 8},
    {"context": (9, 70), "page_size": 1, "large_pool": True, "hq": 2, "hkv": 1, "d": 8},
    {"hq": 128, "hkv": 8, "lengths_q": (3, 1), "context": (70, 9), "d": 16},
    {"context": (16, 32, 48)}, {"context": (15, 33, 1)}, {"page_size": 5, "context": (21, 4, 5)},
    {"context": (64, 192), "page_size": 64, "hq": 6, "hkv": 3},
    {"context": (33,) * 9, "order": "neighbours"},
    {"softcap": 3.0, "scale": 0.7}, {"window": 1, "lengths_q": (3, 2, 5)}, {"window": 0},
    {"lengths_q": (3, 0, 9), "causal": False, "hkv": 4}, {"context": (2000, 3), "page_size": 16},
    {"layout": "HND", "hkv": 4, "page_size": 4, "lengths_q": (2, 5, 7)},
    {"stored": "int8", "scales": "head", "layout": "HND", "hkv": 4, "hq": 8})

GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {}, {"lse": True}, {"layout": "HND"}, {"lengths_q": (17, 1, 40)}, {"window": 6},
    {"softcap": 5.0}, {"lse": True, "lengths_q": (2, 5, 1)}, {"d": 40, "dv": 24},
    {"lengths_q": (5, 4), "context": (3, 7)},              # queries that see no key
    # two sequences add to the gradient of one page
    {"order": "shared", "context": (20, 18, 24), "page_size": 4})

MISTAKES: tuple[Mistake, ...] = (
    *SCORES, *SOFTCAP, *WINDOW[:2], *WINDOW[4:5], *PAGES, *LSE,
    replace_argument("scale", "key_scale ignored", "key_scale",
                     lambda v: torch.ones_like(v["key_scale"])),
    replace_argument("scale", "value_scale ignored", "value_scale",
                     lambda v: torch.ones_like(v["value_scale"])))

OP = Op(
    name="paged_attention", family="attention", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, gradient_cases=GRADIENT_CASES, stress=STRESS, mistakes=MISTAKES,
    reference_kernel={**READS_ON_HOST, "workspace": "3 * itemsize * heads * tokens * seq_k"},
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-5),
                         "float64": (1e-8, 1e-8)}),
    variant="kv_layout",
    shapes={
        "NHD": {"query": "tokens heads head_dim", "key_cache": "pages page_size kv_heads head_dim",
                "value_cache": "pages page_size kv_heads head_dim_v", **_SHARED},
        "HND": {"query": "tokens heads head_dim", "key_cache": "pages kv_heads page_size head_dim",
                "value_cache": "pages kv_heads page_size head_dim_v", **_SHARED},
    },
    returns={"NHD": ("tokens heads head_dim_v", "tokens heads"),
             "HND": ("tokens heads head_dim_v", "tokens heads")},
    derived={**DERIVED, "group": "heads // kv_heads", "head_dim_gap": "head_dim - head_dim_v"},
    words={**WORDS, **HEAD_WORDS},
    exact=("heads", "kv_heads", "head_dim", "head_dim_v", "page_size"),
    ranges={"window_left": INT32, "max_seqlen_q": INT32},
    requires=(
        dtypes(*FLOATS), at_least("kv_heads", 1, Code.EMPTY_INPUT), *METADATA_RULES,
        *_cache_dtype_rules("key_cache", "key_scale"),
        *_cache_dtype_rules("value_cache", "value_scale"),
        at_least("window_left", -1, Code.VALUE_OUT_OF_RANGE),
        at_least("softcap", 0.0, Code.VALUE_OUT_OF_RANGE),
    ),
    flops="2 * tokens * heads * seq_k * (head_dim + head_dim_v)",
    bytes="itemsize * (head_dim + head_dim_v) * (tokens * heads + batch * kv_heads * seq_k)",
    differentiable=("query", "key_cache", "value_cache"), canonical=canonical,
    extra_check=extra_check,
    adapt=adapt, outputs="Tensor[]",
)
