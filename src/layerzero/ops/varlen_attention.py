"""Attention over packed sequences: (tokens, heads, dim), with the boundaries in cu_seqlens.

Sequence i of the query is rows cu_seqlens_q[i]:cu_seqlens_q[i+1], likewise for key and value.
Causality and windows are relative to each sequence's own diagonal, as in lz.attention.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import CausalAlignmentWarning, InvalidCall, warn_caller
from ..spec.mistake import Mistake, Values
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import Wording, at_least, at_most, dtypes, equals
from .formulas.common import FLOATS, HEAD_WORDS, READS_ON_HOST, attend, empty_result
from .formulas.mistakes import LSE, SCORES, SOFTCAP, WINDOW, drop_argument, flip_alignment


def reference(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, is_causal: bool = False, scale: float | None = None, *,
    causal_align: Literal["top_left", "bottom_right"] | None = None, window_left: int = -1,
    window_right: int = -1, softcap: float = 0.0, dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None, return_lse: bool = False,
) -> Any:
    """Attention over packed sequences; see lz.attention for the shared arguments.

    return_lse: also the log-sum-exp of each query row, (tokens_q, heads), natural log:
    lz.merge_attention merges results over disjoint keys by it.
    """
    starts_q = read_starts(cu_seqlens_q, query, "cu_seqlens_q")
    starts_k = read_starts(cu_seqlens_k, key, "cu_seqlens_k")
    parts = [query.new_empty((0, query.shape[1], value.shape[2]))]
    lses = [query.new_empty((0, query.shape[1]),
                            dtype=torch.promote_types(query.dtype, torch.float32))]
    for i in range(len(starts_q) - 1):
        rows_q, rows_k = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        q, k, v = (t.transpose(0, 1)[None] for t in (query[rows_q], key[rows_k], value[rows_k]))
        out, lse = attend(q, k, v, None, dropout_p, is_causal, scale, causal_align, window_left,
                          window_right, alibi_slopes, softcap)
        parts.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return (torch.cat(parts), torch.cat(lses)) if return_lse else torch.cat(parts)


def read_starts(cu_seqlens: Tensor, rows: Tensor, name: str) -> list[int]:
    """Returns where each sequence starts, read on the host and checked."""
    starts: list[int] = cu_seqlens.tolist()
    if any(b < a for a, b in zip((0, *starts), starts)) or (starts and starts[-1] > len(rows)):
        raise InvalidCall.of("varlen_attention", Reason(
            Code.VALUE_OUT_OF_RANGE, f"never falling and at most {len(rows)} (the packed rows)",
            str(starts)[:200], name))
    return starts


def meta(query: Tensor, key: Tensor, value: Tensor, *args: Any, return_lse: bool = False,
         **kwargs: Any) -> Any:
    return empty_result(query, value.shape[2], return_lse)


def inputs(
    lengths_q: tuple[int, ...] = (5, 33, 1, 16), lengths_k: tuple[int, ...] = (), hq: int = 4,
    hkv: int = 4, d: int = 64, dv: int = 0, causal: bool = False, align: str | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, scale: float | None = None,
    alibi: bool = False, lse: bool = False, starts: str = "int32",
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """`starts`: the dtype of the boundaries."""
    gen = torch.Generator("cpu").manual_seed(seed)
    lengths_k = lengths_k or lengths_q

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(device=device, dtype=dtype)

    def boundaries(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths], device=device).cumsum(0).to(getattr(torch, starts))

    return {"query": rand(sum(lengths_q), hq, d), "key": rand(sum(lengths_k), hkv, d),
            "value": rand(sum(lengths_k), hkv, dv or d), "cu_seqlens_q": boundaries(lengths_q),
            "cu_seqlens_k": boundaries(lengths_k), "max_seqlen_q": max(lengths_q, default=0),
            "max_seqlen_k": max(lengths_k, default=0), "is_causal": causal,
            "scale": scale, "causal_align": align, "window_left": window[0],
            "window_right": window[1], "softcap": softcap, "return_lse": lse,
            "alibi_slopes": torch.tensor([2.0 ** (-8.0 * (i + 1) / hq) for i in range(hq)],
                                         device=device) if alibi else None}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"causal": True, "align": "top_left"}, {"causal": True, "align": "bottom_right", "hkv": 2},
    {"lengths_q": (1, 1, 1), "lengths_k": (64, 7, 130), "causal": True, "align": "bottom_right",
     "hkv": 1},
    {"lengths_q": (4, 9), "lengths_k": (20, 9), "causal": True, "align": "bottom_right"},
    {"lengths_q": (0, 12, 3)}, {"lengths_q": (70,), "d": 72}, {"d": 40, "dv": 24, "hkv": 2},
    {"lengths_q": (9, 4), "lengths_k": (5, 12), "starts": "int64"},
    # no sequences, no queries at all
    {"lengths_q": ()}, {"lengths_q": (0, 0), "lengths_k": (3, 4), "lse": True},
    # no queries, or no keys, between sequences that have them
    {"lengths_q": (4, 0, 9), "lengths_k": (7, 5, 20), "hkv": 2},
    {"lengths_q": (3, 5, 0, 2), "lengths_k": (6, 0, 4, 9), "causal": True, "align": "bottom_right"},
    # many more keys than queries
    {"lengths_q": (16, 20), "lengths_k": (150, 90), "hq": 14, "hkv": 2, "causal": True,
     "align": "bottom_right"},
    {"window": (8, 0), "causal": True, "align": "top_left"},
    {"softcap": 10.0}, {"scale": 0.5, "hkv": 2}, {"lse": True, "hkv": 2},
    {"lengths_q": (4, 9, 3), "lengths_k": (20, 4, 0), "causal": True, "align": "bottom_right",
     "lse": True},
    {"lengths_q": (1, 9), "lengths_k": (33, 20), "alibi": True, "align": "bottom_right", "hkv": 2},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if facts[f"{name}.dtype"] not in ("int32", "int64"):
            raise InvalidCall.of("varlen_attention",
                                 Reason(Code.WRONG_TYPE, "int32", facts[f"{name}.dtype"], name))
    uses_diagonal = facts["is_causal"] or facts["window_left"] >= 0 or facts["window_right"] >= 0 \
        or facts["alibi_slopes.dtype"] is not None
    if uses_diagonal and facts["causal_align"] is None:
        warn_caller(
            "lz.varlen_attention: causal_align is not given: 'top_left' is used. Decoding with a "
              "KV cache wants causal_align='bottom_right'.", CausalAlignmentWarning)

STRESS: tuple[dict[str, Any], ...] = (
    # the heads of a prompt of latent attention, and values wider than keys
    {"lengths_q": (9, 4), "d": 192, "dv": 128, "causal": True, "align": "bottom_right",
     "lse": True}, {"d": 24, "dv": 40, "softcap": 5.0, "lengths_q": (7, 12)},
    # keys beyond 2^16
    {"lengths_q": (1, 2), "lengths_k": (65_990, 61), "hq": 1, "hkv": 1, "d": 8},
    {"lengths_q": (0, 0, 5)}, {"lengths_q": (5, 0), "lengths_k": (7, 3)},
    {"lengths_q": (3,), "lengths_k": (0,)},
    {"lengths_q": (64, 192), "causal": True, "align": "top_left"},
    # windows that are longer than the keys, and more queries yet
    {"window": (-1, 9), "lengths_q": (24, 3), "lengths_k": (8, 9), "align": "bottom_right",
     "d": 16},
    {"window": (9, -1), "lengths_q": (3, 24), "lengths_k": (9, 8), "align": "top_left", "d": 16},
    # single queries over several splits of the keys, beside each argument
    *({"lengths_q": (1, 1), "lengths_k": (700, 1_061), "hq": 2, "hkv": 1, "d": 8,
       "align": "bottom_right", **argument} for argument in (
        {"alibi": True}, {"softcap": 5.0}, {"window": (600, 0)}, {"scale": 0.5, "lse": True})),
    # single queries at the beginning of their keys
    {"lengths_q": (1, 1, 1), "lengths_k": (30, 7, 66), "causal": True, "align": "top_left"},
    {"lengths_q": (1, 0, 1, 1), "lengths_k": (20, 7, 33, 9), "hkv": 2},
    {"lengths_q": (1,) * 40, "hkv": 1}, {"lengths_q": (4, 9), "lengths_k": (9, 4), "causal": True,
                                         "align": "bottom_right"},
    {"softcap": 3.0, "scale": 0.7, "hkv": 2},
    {"window": (2, 1), "lengths_q": (9, 20), "lengths_k": (30, 20),
    "align": "bottom_right"},
    {"lengths_q": (9, 4), "lengths_k": (4, 9), "window": (2, -1), "align": "top_left", "lse": True},
    {"lengths_q": (7, 1), "lengths_k": (7, 30), "causal": True, "align": "bottom_right",
     "alibi": True, "lse": True})

GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {}, {"causal": True, "align": "bottom_right", "hkv": 2}, {"lengths_q": (0, 12, 3)},
    {"lengths_q": (4, 9), "lengths_k": (20, 9), "window": (3, 0)},
    {"lse": True, "alibi": True, "align": "top_left"}, {"d": 40, "dv": 24, "lengths_q": (7, 12)},
    # queries that see no key
    {"lengths_q": (9, 4), "lengths_k": (4, 9), "causal": True, "align": "bottom_right"})


# Mistakes that a kernel for this op could make.

def _merge_sequences(op: Any, v: Values) -> Values:
    ends = {f"cu_seqlens_{x}": v[f"cu_seqlens_{x}"][[0, -1]] for x in "qk"}
    return {**v, **ends, "max_seqlen_q": v["query"].shape[0], "max_seqlen_k": v["key"].shape[0]}


MISTAKES: tuple[Mistake, ...] = (
    Mistake("alignment", "the diagonal at the other corner", flip_alignment), *SCORES, *SOFTCAP,
    Mistake("position bias", "ALiBi left out", drop_argument("alibi_slopes")),
    *WINDOW, *LSE, Mistake("mask", "all sequences taken for one", _merge_sequences))

OP = Op(
    name="varlen_attention", family="attention", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, gradient_cases=GRADIENT_CASES, stress=STRESS, mistakes=MISTAKES,
    dropout_case={"lengths_q": (32,), "lengths_k": (64,), "scale": 0.05},
    reference_kernel={**READS_ON_HOST,
                      "workspace": "3 * itemsize * heads * max_seqlen_q * max_seqlen_k"},
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-5),
                         "float64": (1e-8, 1e-8)}),
    shapes={"query": "tokens_q heads head_dim", "key": "tokens_k kv_heads head_dim",
            "value": "tokens_k kv_heads head_dim_v", "cu_seqlens_q": "boundaries",
            "cu_seqlens_k": "boundaries", "alibi_slopes": "heads"},
    returns=("tokens_q heads head_dim_v", "tokens_q heads"), same_dtype=("query", "key", "value"),
    derived={"batch": "boundaries - 1", "group": "heads // kv_heads",
             "group_rest": "heads % kv_heads",
             "head_dim_gap": "head_dim - head_dim_v",
             "seq_q": "max_seqlen_q", "seq_k": "max_seqlen_k"},
    words={**HEAD_WORDS,
           "batch": Wording("the number of sequences", "{boundaries} numbers in cu_seqlens_q"),
           "boundaries": Wording("the length of cu_seqlens_q")},
    exact=("heads", "kv_heads", "head_dim", "head_dim_v"),
    ranges={"max_seqlen_q": INT32, "max_seqlen_k": INT32, "window_left": INT32,
            "window_right": INT32},
    requires=(
        dtypes(*FLOATS), equals("group_rest", 0, Code.HEADS_NOT_DIVISIBLE),
        at_least("boundaries", 1, Code.VALUE_OUT_OF_RANGE),
        at_least("max_seqlen_q", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("max_seqlen_k", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("window_left", -1, Code.VALUE_OUT_OF_RANGE),
        at_least("window_right", -1, Code.VALUE_OUT_OF_RANGE),
        at_least("dropout_p", 0.0, Code.VALUE_OUT_OF_RANGE),
        at_most("dropout_p", 1.0, Code.VALUE_OUT_OF_RANGE),
        at_least("softcap", 0.0, Code.VALUE_OUT_OF_RANGE),
    ),
    flops="2 * tokens_q * heads * max_seqlen_k * (head_dim + head_dim_v)",
    bytes="itemsize * (head_dim + head_dim_v) * (tokens_q * heads + tokens_k * kv_heads)",
    differentiable=("query", "key", "value"), autocast="lower", sdpa_switches=True,
    extra_check=extra_check, outputs="Tensor[]",
)
