"""Scaled dot-product attention.

`layout="bhsd"` is torch's (batch, heads, seq, dim) and the default; `"bshd"` is (batch, seq, heads,
dim). The query may have a multiple of the key's heads (GQA, MQA). Query i is aligned with key i +
offset, the *diagonal*; the offset is 0 for `causal_align="top_left"` (torch's) and seq_k - seq_q
for "bottom_right" (FlashAttention's: the last query sees every key). Causality, windows and ALiBi
are relative to the diagonal. A query row that sees no key gives zeros, and -inf as its log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import CausalAlignmentWarning, InvalidCall, warn_caller
from ..spec.mistake import Mistake, Values
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import Wording, any_of, at_least, at_most, dtypes, equals, on, one_of
from .formulas.attention_forms import canonical, unwrap_bias
from .formulas.block_masks import is_block_mask
from .formulas.common import FLOATS, HEAD_WORDS, attend
from .formulas.mistakes import (
    LSE,
    SCORES,
    SOFTCAP,
    WINDOW,
    drop_argument,
    flip_alignment,
    replace_argument,
)


def reference(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = True, *, causal_align: Literal["top_left", "bottom_right"] | None = None,
    window_left: int = -1, window_right: int = -1,
    alibi_slopes: Tensor | None = None, softcap: float = 0.0, return_lse: bool = False,
    layout: Literal["bhsd", "bshd", "auto"] = "bhsd",
) -> Any:
    """Scaled dot-product attention.

    The first eight arguments are those of torch.nn.functional.scaled_dot_product_attention, with
    its broadcasting, its CausalBias and its nested tensors; is_causal hides keys beside a mask too.
    attn_mask may be a BlockMask of flex_attention: the call is then lz.block_sparse_attention's.
    window_left, window_right: number of keys left and right of the diagonal that are visible, -1
    for all.
    alibi_slopes: one slope per query head. softcap: cap * tanh(scores / cap), 0 for none.
    return_lse: also return the log-sum-exp of each query row, (batch, heads, seq_q), natural log.
    """
    if layout == "bshd":
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    out, lse = attend(query, key, value, attn_mask, dropout_p, is_causal, scale, causal_align,
                      window_left, window_right, alibi_slopes, softcap)
    out = out.transpose(1, 2) if layout == "bshd" else out
    return (out, lse) if return_lse else out


def meta(query: Tensor, key: Tensor, value: Tensor, *args: Any, return_lse: bool = False,
         layout: str = "bhsd", **kwargs: Any) -> Any:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    if not return_lse:
        return out
    heads, seq = (1, 2) if layout == "bhsd" else (2, 1)
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return out, query.new_empty((query.shape[0], query.shape[heads], query.shape[seq]),
                                dtype=lse_dtype)


def inputs(
    b: int = 2, hq: int = 4, hkv: int = 4, sq: int = 64, sk: int = 64, d: int = 64, dv: int = 0,
    mask: str = "", causal: bool = False, align: str | None = None,
    window: tuple[int, int] = (-1, -1), alibi: bool = False, softcap: float = 0.0,
    scale: float | None = None, lse: bool = False, layout: str = "bhsd", stride: str = "",
    extreme: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """Returns random arguments for one case. `stride`: "transposed", "padded", "sparse"
    or, of parts of one projection, "fused"."""
    gen = torch.Generator("cpu").manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(device=device, dtype=dtype)

    def tensor(heads: int, seq: int, dim: int) -> Tensor:
        shape = (b, heads, seq, dim) if layout == "bhsd" else (b, seq, heads, dim)
        if stride == "transposed":
            return rand(shape[0], shape[2], shape[1], dim).transpose(1, 2)
        if stride == "padded":
            return rand(*shape[:-1], dim + 8)[..., :dim]
        if stride == "sparse":
            return rand(*shape[:-1], dim * 2)[..., ::2]
        return rand(*shape)

    q, k, v = tensor(hq, sq, d), tensor(hkv, sk, d), tensor(hkv, sk, dv or d)
    if stride == "fused" and sq == sk and dv in (0, d):
        parts = rand(b, sq, hq + 2 * hkv, d).split((hq, hkv, hkv), 2)
        q, k, v = parts if layout == "bshd" else (x.transpose(1, 2) for x in parts)
    if extreme:
        q, k = q * 30, k * 3
    shape = {"bool": (b, 1, sq, sk), "bool2d": (sq, sk), "float": (b, 1, sq, sk),
             "float2d": (sq, sk), "full": (b, hq, sq, sk), "padding": (b, 1, 1, sk),
             "dead_rows": (b, 1, sq, sk), "minus_inf": (b, 1, sq, sk),
             "dead_minus_inf": (b, 1, sq, sk), "lowest": (b, 1, 1, sk),
             "dead_lowest": (b, 1, sq, sk),
             "left_padding": (b, 1, 1, sk), "each_side": (b, 1, 1, sk),
             "heads": (1, hq, sq, sk), "heads3d": (hq, sq, sk),
             "image": (b, 1, sq, sk), "head_padding": (b, hq, 1, sk), "keys": (sk,)}.get(mask)
    attn_mask = None
    if shape and mask in ("float", "float2d", "full", "heads", "heads3d"):
        attn_mask = rand(*shape)
    # as models write them: 0, or a value that hides the key
    elif shape and mask in ("minus_inf", "dead_minus_inf", "lowest", "dead_lowest"):
        hidden = torch.finfo(dtype).min if mask.endswith("lowest") else -math.inf
        attn_mask = torch.zeros(shape, dtype=dtype).masked_fill(
            torch.rand(shape, generator=gen) <= 0.3, hidden)
        attn_mask[..., 0] = 0.0
        if mask.startswith("dead"):
            attn_mask[..., 0, :] = hidden
        # where no other key is seen, half of it: a GPU's kernels multiply by log2(e)
        if mask.endswith("lowest") and torch.device(device).type != "cpu" and (
                mask.startswith("dead") or window[0] >= 0):
            attn_mask.mul_(0.5)
        attn_mask = attn_mask.to(device)
    elif mask == "left_padding":               # of each sample more
        hidden_keys = torch.arange(1, b + 1)[:, None, None, None] * sk // (b + 1)
        attn_mask = (torch.arange(sk) >= hidden_keys).to(device)
    elif mask == "each_side":                  # in turns: nothing, right, left, gaps
        places, parts = torch.arange(sk), torch.arange(b)[:, None, None, None] * sk // (b + 1)
        seen = places < sk - parts
        seen[2::4], seen[3::4] = places >= parts[2::4], places % 3 != 1
        attn_mask = seen.to(device)
    elif mask == "image":                      # its tokens see each other amid a causal text
        places = torch.arange(sk) * 3 // max(sk, 1) == 1
        seen = torch.ones((b, 1, sq, sk), dtype=torch.bool).tril()
        attn_mask = (seen | (places & places[:sq, None])).to(device)
    elif shape:
        attn_mask = (torch.rand(shape, generator=gen) > 0.3).to(device)
        if mask == "dead_rows":
            attn_mask[:, :, 0, :] = False
        else:
            attn_mask[..., 0] = True
    slopes = (torch.tensor([2.0 ** (-8.0 * (i + 1) / hq) for i in range(hq)], device=device)
              if alibi else None)
    return {"query": q, "key": k, "value": v, "attn_mask": attn_mask, "is_causal": causal,
            "scale": scale, "causal_align": align, "window_left": window[0],
            "window_right": window[1], "alibi_slopes": slopes,
            "softcap": softcap, "return_lse": lse, "layout": layout}


CASES: tuple[dict[str, Any], ...] = (
    {"b": 1, "hq": 8, "hkv": 2, "sq": 1, "sk": 70},
    {}, {"causal": True}, {"hkv": 2}, {"hkv": 1, "causal": True}, {"lse": True},
    {"lse": True, "hkv": 2}, {"sq": 1, "sk": 257, "hkv": 2}, {"sq": 1, "sk": 1},
    {"sq": 1, "sk": 300, "causal": True, "align": "bottom_right"},
    {"sq": 1, "sk": 129, "hq": 8, "hkv": 2, "causal": True, "align": "bottom_right", "lse": True},
    # verification of drafted tokens
    {"sq": 8, "sk": 90, "hkv": 2, "causal": True, "align": "bottom_right"},
    {"sq": 5, "sk": 9, "causal": True, "align": "top_left"},
    {"sq": 5, "sk": 9, "causal": True, "align": "bottom_right"},
    {"sq": 9, "sk": 5, "causal": True, "align": "bottom_right"},
    {"sq": 192, "sk": 192, "causal": True}, {"sq": 37, "sk": 141}, {"d": 72}, {"d": 84},
    {"d": 80, "dv": 48}, {"d": 320, "sq": 17, "sk": 33}, {"d": 8},
    {"d": 1},
    {"mask": "bool"}, {"mask": "bool2d"}, {"mask": "float"}, {"mask": "float2d", "hkv": 2},
    {"mask": "full"}, {"mask": "padding", "sq": 33, "sk": 65}, {"mask": "dead_rows"},
    {"mask": "image", "sq": 40, "sk": 40, "d": 8}, {"mask": "head_padding", "sq": 5, "d": 8},
    {"mask": "each_side", "b": 4, "sq": 5, "d": 8},
    {"mask": "left_padding", "sq": 7, "sk": 65}, {"mask": "keys", "sq": 9, "sk": 9, "d": 8},
    # a bias of relative positions; as many heads as samples
    {"mask": "heads", "hkv": 2, "sq": 7, "sk": 33, "d": 8},
    {"mask": "heads3d", "b": 4, "sq": 9, "sk": 17, "d": 8},
    {"mask": "bool", "lse": True}, {"window": (16, 0), "causal": True}, {"window": (8, 8)},
    {"window": (0, 0)}, {"window": (5, -1), "sq": 20, "sk": 50, "align": "bottom_right"},
    # windows that are longer than the keys
    {"window": (9, 12), "sq": 24, "sk": 8, "d": 16, "align": "bottom_right"},
    {"window": (-1, 9), "sq": 24, "sk": 8, "d": 8, "align": "bottom_right"},
    {"window": (9, -1), "sq": 24, "sk": 8, "d": 8, "align": "top_left"},
    {"window": (16, 0), "causal": True, "sq": 1, "sk": 100, "align": "bottom_right", "hkv": 2},
    {"alibi": True, "causal": True}, {"alibi": True, "sq": 3, "sk": 40, "align": "bottom_right",
                                      "hkv": 2},
    {"softcap": 20.0}, {"softcap": 5.0, "causal": True, "hkv": 2}, {"scale": 0.3},
    {"scale": 1.0, "causal": True}, {"layout": "bshd"},
    {"layout": "bshd", "causal": True, "hkv": 2}, {"layout": "bshd", "lse": True},
    {"layout": "bshd", "mask": "bool"}, {"stride": "transposed"},
    {"stride": "fused", "hkv": 2, "causal": True}, {"stride": "fused", "layout": "bshd"},
    {"stride": "padded", "causal": True}, {"stride": "sparse"},
    {"stride": "sparse", "mask": "float"}, {"extreme": True}, {"extreme": True, "causal": True},
    {"extreme": True, "scale": -0.3}, {"extreme": True, "scale": -0.3, "lse": True, "sq": 1},
    {"sq": 0, "sk": 8}, {"sq": 8, "sk": 0}, {"b": 0},
    {"b": 1, "hq": 1, "hkv": 1, "sq": 3, "sk": 3, "d": 16},
    # groups that are no power of two
    {"b": 1, "hq": 14, "hkv": 2, "sq": 5, "sk": 40},
    {"b": 1, "hq": 10, "hkv": 2, "sq": 1, "sk": 33},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    mask = facts["attn_mask.dtype"]
    if mask not in (None, "bool", facts["dtype"]):
        raise InvalidCall.of("attention", Reason(
            Code.MASK_TYPE_INVALID, f"bool, or {facts['dtype']} like the query", mask, "attn_mask"))
    # What kernels do not take, but `canonical` rewrites:
    if mask is not None and facts["is_causal"]:
        raise InvalidCall.of("attention", Reason(Code.MASK_WITH_CAUSAL, "no kernel takes both"))
    for name in ("head_dim", "head_dim_v"):
        if facts[name] == 0:
            raise InvalidCall.of("attention", Reason(Code.EMPTY_INPUT, ">= 1", 0, name))
    uses_diagonal = facts["is_causal"] or facts["window_left"] >= 0 or facts["window_right"] >= 0 \
        or facts["alibi_slopes.dtype"] is not None
    if uses_diagonal and facts["causal_align"] is None and facts["seq_q"] != facts["seq_k"]:
        warn_caller(
            f"lz.attention: query and key lengths differ ({facts['seq_q']} and {facts['seq_k']}) "
            "and causal_align is not given: torch's 'top_left' is used. Decoding with a KV cache "
            "wants causal_align='bottom_right'.",
            CausalAlignmentWarning)


STRESS: tuple[dict[str, Any], ...] = (
    # keys beyond 2^13 and 2^16, queries beyond 2^13
    {"b": 1, "hq": 2, "hkv": 1, "sq": 3, "sk": 8_269, "d": 16},
    {"b": 1, "hq": 2, "hkv": 2, "sq": 1, "sk": 66_013, "d": 8},
    {"b": 1, "hq": 1, "hkv": 1, "sq": 8_269, "sk": 3, "d": 8},
    {"b": 1, "hq": 2, "hkv": 1, "sq": 2, "sk": 8_269, "d": 16, "mask": "bool"},
    # whole splits of the keys of which some samples see nothing
    *({"b": 3, "hq": 2, "hkv": 1, "sq": sq, "sk": 2_117, "d": 8, "mask": "left_padding"}
      for sq in (1, 3)),
    {"b": 2, "hq": 1, "hkv": 1, "sq": 1, "sk": 8_501, "d": 8, "mask": "left_padding"},
    # one query over several splits of the keys, beside each argument
    *({"b": 1, "hq": 2, "hkv": 1, "sq": 1, "sk": 1_061, "d": 8, "align": "bottom_right", **argument}
      for argument in ({"alibi": True}, {"alibi": True, "softcap": 5.0}, {"softcap": 5.0},
                       {"window": (700, 0)}, {"mask": "float"}, {"scale": 0.5, "lse": True})),
    # a window beyond 2^10
    {"b": 1, "hq": 2, "hkv": 1, "sq": 2, "sk": 2_100, "d": 8, "window": (1_500, 0),
     "align": "bottom_right"},
    # a window that ends within a tile of keys, over several tiles
    {"b": 1, "hq": 2, "hkv": 1, "sq": 200, "sk": 200, "d": 8, "window": (8, 8)},
    {"b": 1, "hq": 1, "hkv": 1, "sq": 141, "sk": 270, "d": 8, "window": (16, 0), "causal": True,
     "align": "bottom_right"},
    # scale and softcap, with lse
    {"scale": 0.3, "softcap": 2.0, "lse": True, "sq": 5, "sk": 9},
    {"b": 8200, "hq": 8, "hkv": 8, "sq": 1, "sk": 2, "d": 8},
    {"b": 8200, "hq": 8, "hkv": 4, "sq": 1, "sk": 2, "d": 8},
    {"b": 1, "hq": 65540, "hkv": 1, "sq": 1, "sk": 2, "d": 8},
    {"sq": 192, "sk": 192, "mask": "bool"}, {"sq": 64, "sk": 192, "mask": "float", "hkv": 1},
    {"mask": "minus_inf", "hkv": 2}, {"mask": "dead_minus_inf", "sq": 9, "sk": 17},
    {"mask": "lowest", "sq": 33, "sk": 65}, {"mask": "dead_lowest", "sq": 9, "sk": 17},
    {"mask": "lowest", "sq": 1, "sk": 130}, {"mask": "heads", "sq": 1, "sk": 33, "hkv": 2},
    {"mask": "full", "sq": 1, "sk": 70, "hq": 8, "hkv": 1, "d": 8},
    {"sq": 320, "sk": 320, "mask": "padding", "b": 3},
    {"sq": 3, "sk": 70, "causal": True, "align": "bottom_right"},
    {"sq": 70, "sk": 3, "causal": True, "align": "top_left"},
    {"hq": 6, "hkv": 3, "b": 3, "sq": 17, "sk": 33},
    {"hq": 12, "hkv": 4, "causal": True, "sq": 1, "sk": 130, "align": "bottom_right", "b": 3},
    {"softcap": 3.0, "scale": 0.7}, {"softcap": 3.0, "scale": 0.7, "hkv": 2, "causal": True,
                                     "lse": True},
    {"alibi": True, "hkv": 2, "lse": True},
    {"alibi": True, "sq": 9, "sk": 30, "align": "bottom_right", "causal": True},
    {"window": (1, 0), "causal": True}, {"window": (0, 1)}, {"window": (3, 2), "sq": 9, "sk": 20},
    {"window": (64, -1), "sq": 130, "sk": 130},
    {"window": (-1, 3), "sq": 7, "sk": 40, "align": "bottom_right"},
    {"extreme": True, "mask": "bool"}, {"extreme": True, "lse": True, "hkv": 2},
    {"sq": 2, "sk": 4096, "b": 1},
    {"sq": 1, "sk": 8192, "b": 1, "hq": 2, "hkv": 1}, {"mask": "dead_rows", "lse": True, "hkv": 2},
    {"layout": "bshd", "sq": 9, "sk": 40, "causal": True, "align": "bottom_right", "hkv": 1},
    {"layout": "bshd", "window": (16, 0), "causal": True, "sq": 64, "sk": 64, "d": 64},
    {"b": 3, "sq": 0, "sk": 0}, {"sq": 4, "sk": 0, "lse": True},
    {"stride": "sparse", "hkv": 2, "causal": True})

GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"hkv": 2, "causal": True}, {"sq": 1, "sk": 257, "hkv": 2}, {"lse": True},
    {"sq": 1, "sk": 300, "causal": True, "align": "bottom_right"},
    {"sq": 5, "sk": 9, "causal": True, "align": "top_left"},
    {"sq": 5, "sk": 9, "causal": True, "align": "bottom_right"},
    {"sq": 9, "sk": 5, "causal": True, "align": "bottom_right"}, {"d": 72}, {"d": 80, "dv": 48},
    {"mask": "float"}, {"mask": "bool", "hkv": 2}, {"mask": "dead_rows"},
    {"mask": "dead_minus_inf"}, {"window": (16, 0), "causal": True},
    {"alibi": True, "causal": True}, {"softcap": 5.0}, {"scale": 0.3},
    {"layout": "bshd", "causal": True}, {"stride": "transposed"}, {"stride": "padded"},
    {"sq": 8, "sk": 0})


# Mistakes that a kernel for this op could make.

def _invert_mask(op: Any, v: Values) -> Values | None:
    mask = v["attn_mask"]
    return ({**v, "attn_mask": ~mask if mask.dtype == torch.bool else -mask} if mask is not None
            else None)


MISTAKES: tuple[Mistake, ...] = (
    Mistake("mask", "the mask ignored", drop_argument("attn_mask")),
    Mistake("mask", "the mask inverted", _invert_mask),
    Mistake("alignment", "the diagonal at the other corner", flip_alignment),
    Mistake("position bias", "ALiBi left out", drop_argument("alibi_slopes")),
    replace_argument("position bias", "ALiBi with the other sign", "alibi_slopes",
                     lambda v: -v["alibi_slopes"]),
    *SCORES, *SOFTCAP, *WINDOW, *LSE)

WORDS = {
    **HEAD_WORDS,
    "heads": Wording("heads", demands={"0": ""}),      # no alternative worth a word
    "causal_offset": Wording("seq_k - seq_q", "{seq_q} queries, {seq_k} keys", {
        "0": "there must be as many keys as queries",
        ">= 0": "there must be at least as many keys as queries",
        "other than 0": "there must be more or fewer keys than queries"}),
    "batch_heads": Wording("batch * heads", "batch {batch}, {heads} heads"),
}

OP = Op(
    name="attention", family="attention", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, gradient_cases=GRADIENT_CASES, stress=STRESS, mistakes=MISTAKES,
    # beside the lowest number the scores are rounded away, and so is what they sum to
    no_gradient={"mask": ("dead_lowest",)},
    dropout_case={"b": 2, "hq": 4, "hkv": 4, "sq": 32, "sk": 64, "d": 16, "dv": 64, "scale": 0.05},
    reference_kernel={"workspace": "3 * itemsize * elements"},
    batch_dims=("batch",), shard_dims=("heads", "kv_heads"),
    invariance_cases=({"b": 44, "hq": 4, "hkv": 2, "sq": 1, "sk": 2100, "d": 16},),
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-5),
                         "float64": (1e-8, 1e-8)}),
    variant="layout",
    shapes={
        "bhsd": {"query": "batch heads seq_q head_dim", "key": "batch kv_heads seq_k head_dim",
                 "value": "batch kv_heads seq_k head_dim_v",
                 "attn_mask": "~batch ~heads ~seq_q ~seq_k", "alibi_slopes": "heads"},
        "bshd": {"query": "batch seq_q heads head_dim", "key": "batch seq_k kv_heads head_dim",
                 "value": "batch seq_k kv_heads head_dim_v",
                 "attn_mask": "~batch ~heads ~seq_q ~seq_k", "alibi_slopes": "heads"},
    },
    returns={"bhsd": ("batch heads seq_q head_dim_v", "batch heads seq_q"),
             "bshd": ("batch seq_q heads head_dim_v", "batch heads seq_q")},
    same_dtype=("query", "key", "value"),
    derived={"causal_offset": "seq_k - seq_q", "batch_heads": "batch * heads",
             "group": "heads // kv_heads", "group_rest": "heads % kv_heads",
             "head_dim_gap": "head_dim - head_dim_v", "elements": "batch * heads * seq_q * seq_k"},
    words=WORDS,
    exact=("heads", "kv_heads", "head_dim", "head_dim_v"),
    ranges={"window_left": INT32, "window_right": INT32},
    requires=(
        dtypes(*FLOATS),
        equals("group_rest", 0, Code.HEADS_NOT_DIVISIBLE),
        any_of(on("enable_gqa"), equals("heads", 0), equals("kv_heads", 1),
               equals("group", 1, Code.GQA_UNSUPPORTED)),
        one_of("attn_mask.dtype", None, "bool", *FLOATS, code=Code.MASK_TYPE_INVALID),
        at_least("window_left", -1, Code.VALUE_OUT_OF_RANGE),
        at_least("window_right", -1, Code.VALUE_OUT_OF_RANGE),
        at_least("dropout_p", 0.0, Code.VALUE_OUT_OF_RANGE),
        at_most("dropout_p", 1.0, Code.VALUE_OUT_OF_RANGE),
        at_least("softcap", 0.0, Code.VALUE_OUT_OF_RANGE),
    ),
    flops="2 * batch * heads * seq_q * seq_k * (head_dim + head_dim_v)",
    bytes="itemsize * batch * (head_dim + head_dim_v) * (heads * seq_q + kv_heads * seq_k)",
    differentiable=("query", "key", "value"), also_differentiable=("attn_mask", "alibi_slopes"),
    autocast="lower", canonical=canonical,
    foreign={"attn_mask": is_block_mask}, unwrap=unwrap_bias, extra_check=extra_check,
    outputs="Tensor[]", nested=True, sdpa_switches=True,
)
