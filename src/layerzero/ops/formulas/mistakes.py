"""Mistakes that kernels of several operations could make.

Verification applies each to a call: if a failing kernel's result equals that of the reference with
the mistake, the kernel made that mistake. Mistakes of one operation alone are in its own file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...spec.mistake import Mistake, Results, Values
from .ggml import GGML_FORMATS
from .quant import pack_nibbles, unpack_nibbles


def replace_argument(kind: str, words: str, name: str, value: Any) -> Mistake:
    """Returns the mistake that replaces one argument by `value`, or by value(arguments) if it is
    a function. It does not apply where the argument is absent or has that value already."""
    def apply(op: Any, v: Values) -> Values | None:
        if name not in v or v[name] is None:
            return None
        new = value(v) if callable(value) else value
        same = (torch.equal(new, v[name]) if isinstance(new, Tensor) and new.shape == v[name].shape
                else not isinstance(v[name], Tensor) and new == v[name])
        return None if same else {**v, name: new}

    return Mistake(kind, words, apply)


def change_results(kind: str, words: str,
                   change: Callable[[Values, tuple[Any, ...]], Any]) -> Mistake:
    """Returns the mistake that applies `change` to the reference's results."""
    def apply(op: Any, v: Values) -> Results | None:
        out = op.reference(**v)
        changed = change(v, tuple(out) if isinstance(out, (tuple, list)) else (out,))
        if changed is None:
            return None
        return Results(tuple(changed) if isinstance(changed, (tuple, list)) else (changed,))

    return Mistake(kind, words, apply)


def scale_of(v: Values) -> float:
    scale = v.get("scale")
    return float(v[next(iter(v))].shape[-1] ** -0.5 if scale is None else scale)


def interleave_heads(op: Any, v: Values) -> Values | None:
    """Query head h reads KV head h % kv_heads instead of h // group."""
    axis = {"bhsd": 1, "bshd": 2}.get(v.get("layout", ""), 1)
    names = ("key", "value") if "key" in v else ("key_cache", "value_cache")
    if names[0] == "key_cache":
        axis = 2 if v["kv_layout"] == "NHD" else 1
    heads, kv_heads = v["query"].shape[axis if "key" in v else 1], v[names[0]].shape[axis]
    if kv_heads in (0, heads) or heads % kv_heads:
        return None
    order = torch.arange(heads, device=v["query"].device) % kv_heads
    changed = {n: v[n].index_select(axis, order) for n in names}
    for name in ("key_scale", "value_scale"):
        if isinstance(v.get(name), Tensor) and v[name].numel() > 1:
            changed[name] = v[name][order]
    return {**v, **changed}


def interleave_groups(names: tuple[str, ...], heads: str,
                      axis: int) -> Callable[[Any, Values], Values | None]:
    """Head h of `heads` reads head h % count of the tensors `names`, not h // group."""
    def apply(op: Any, v: Values) -> Values | None:
        count, own = v[names[0]].shape[axis], v[heads].shape[axis]
        if count in (0, 1, own):
            return None
        order = torch.arange(own, device=v[heads].device) % count
        return {**v, **{n: v[n].index_select(axis, order) for n in names}}

    return apply


def flip_alignment(op: Any, v: Values) -> Values | None:
    other = "top_left" if v["causal_align"] == "bottom_right" else "bottom_right"
    return {**v, "causal_align": other}


def lse_in_base_two(v: Values, out: tuple[Any, ...]) -> Any:
    return (out[0], out[1] / math.log(2)) if len(out) > 1 else None


def lse_without_keys(number: float) -> Callable[[Values, tuple[Any, ...]], Any]:
    return lambda v, out: ((out[0], out[1].masked_fill(out[1] == -math.inf, number))
                           if len(out) > 1 else None)


def shift_window(name: str, by: int) -> Callable[[Any, Values], Values | None]:
    return lambda op, v: {**v, name: v[name] + by} if v.get(name,
                                                            -1) >= 0 and v[name] + by >= 0 else None


def softcap_before_scale(op: Any, v: Values) -> Values | None:
    return {**v, "softcap": v["softcap"] * scale_of(v)} if v["softcap"] > 0 else None


def scale_by_value_dim(op: Any, v: Values) -> Values | None:
    values = v["value"] if "value" in v else v.get("value_cache")
    if v.get("scale") is not None or values is None or values.shape[-1] == v["query"].shape[-1]:
        return None
    return {**v, "scale": values.shape[-1] ** -0.5}


SCORES = (
    Mistake("scale", "the scale left out", lambda op, v: None if scale_of(v) == 1.0
               else {**v, "scale": 1.0}),
    replace_argument("scale", "the default scale whatever was given", "scale",
                     lambda v: v["query"].shape[-1] ** -0.5 if "query" in v else 1.0),
    Mistake("scale", "the scale applied twice", lambda op, v: {**v, "scale": scale_of(v) ** 2}),
    Mistake("scale", "the scale of the head size of the values", scale_by_value_dim),
    replace_argument("mask", "causality ignored", "is_causal", False),
)

SOFTCAP = (
    Mistake("scale", "the softcap applied before the scale", softcap_before_scale),
    replace_argument("scale", "the softcap left out", "softcap", 0.0),
    Mistake("head map", "query head h reading KV head h % kv_heads", interleave_heads),
)

WINDOW = (
    *(Mistake("window", f"{name} off by one ({by:+d})", shift_window(name, by))
      for name in ("window_left", "window_right") for by in (1, -1)),
    *(replace_argument("window", f"{name} ignored", name, -1)
      for name in ("window_left", "window_right")),
)

def lse_of(kind: str, words: str, apply: Callable[[Any, Values], Values | None]) -> Mistake:
    """Returns the mistake of the log-sum-exp alone; the output is right."""
    def change(op: Any, v: Values) -> Results | None:
        altered = apply(op, v) if v.get("return_lse") else None
        return None if altered is None else Results((op.reference(**v)[0],
                                                     op.reference(**altered)[1]))

    return Mistake(kind, words, change)


LSE = (
    change_results("convention", "the log-sum-exp in base 2", lse_in_base_two),
    change_results("convention", "the log-sum-exp without the largest score added",
             lambda v, out: (out[0], torch.zeros_like(out[1])) if len(out) > 1 else None),
    *(change_results("non-finite values", f"{n:g} as the log-sum-exp of a row without keys",
                     lse_without_keys(n)) for n in (0.0, math.inf)),
    lse_of("scale", "the log-sum-exp of other scores: no softcap",
           lambda op, v: {**v, "softcap": 0.0} if v.get("softcap") else None),
    lse_of("scale", "the log-sum-exp of other scores: no scale",
           lambda op, v: {**v, "scale": 1.0}),
    lse_of("scale", "the log-sum-exp of other scores: the default scale",
           lambda op, v: {**v, "scale": None} if "query" in v else None),
)


def drop_argument(name: str) -> Callable[[Any, Values], Values | None]:
    return lambda op, v: {**v, name: None} if v.get(name) is not None else None


def lengthen_context(by: int) -> Callable[[Any, Values], Values | None]:
    def apply(op: Any, v: Values) -> Values | None:
        lens, table = v["context_lens"], v["block_table"]
        size = v["key_cache" if "key_cache" in v
                 else "ckv_cache"].shape[1 if v.get("kv_layout", "NHD") == "NHD" else 2]
        capacity = (table >= 0).sum(1) * size
        new = torch.minimum((lens + by).clamp(min=0), capacity.to(lens.dtype))
        return {**v, "context_lens": new} if not torch.equal(new, lens) else None

    return apply


def rearrange_pages(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Values], Values | None]:
    def apply(op: Any, v: Values) -> Values | None:
        table = v["block_table"].clone()
        for row in table:
            used = row >= 0
            row[used] = change(row[used])
        return None if torch.equal(table, v["block_table"]) else {**v, "block_table": table}

    return apply


PAGES = (
    Mistake("out of bounds", "one token past context_lens read", lengthen_context(1)),
    Mistake("out of bounds", "the whole last page read", lengthen_context(10 ** 6)),
    Mistake("mask", "the last token left out", lengthen_context(-1)),
    Mistake("stale page", "the pages of a sequence taken in the order of the pool",
               rearrange_pages(lambda row: row.sort().values)),
    Mistake("stale page", "the first page of a sequence read for all of them", rearrange_pages(
        lambda row: row[:1].expand_as(row))),
    Mistake("stale page", "the pages of a sequence taken backwards",
               rearrange_pages(lambda row: row.flip(0))),
)

NORM = (
    replace_argument("convention", "eps ignored", "eps", 0.0),
    Mistake("scale", "the weight left out", drop_argument("weight")),
    replace_argument("convention", "eps squared", "eps", lambda v: v["eps"] ** 2),
    replace_argument("scale", "the offset of the weight ignored", "offset", 0.0),
    Mistake("scale", "one added to the weight", lambda op, v: None if v.get("weight") is None
               else {**v, "weight": v["weight"] + 1.0}),
)


def eps_outside_sqrt(v: Values, out: tuple[Any, ...]) -> Any:
    """Computes x / (rms + eps) instead of x / sqrt(rms^2 + eps)."""
    h = v["x"] + v["residual"] if "residual" in v else v["x"]
    mean = h.square().mean(-1, keepdim=True)
    return (out[0] * torch.sqrt(mean + v["eps"]) / (mean.sqrt() + v["eps"]), *out[1:])


def transpose_scales(op: Any, v: Values) -> Values | None:
    scales = v["scales"]
    if scales is None or scales.dim() < 2 or scales.shape[-1] == 1 or scales.shape[-2] == 1:
        return None
    return {**v, "scales": scales.mT.reshape(scales.shape)}


def reverse_scales(op: Any, v: Values) -> Values | None:
    scales = v["scales"]
    return {**v, "scales": scales.flip(-1)} if scales is not None and scales.shape[-1] > 1 else None


def swap_nibbles(name: str) -> Callable[[Any, Values], Values | None]:
    def apply(op: Any, v: Values) -> Values | None:
        q, fmt = v[name], GGML_FORMATS.get(v["format"])
        if q.dtype != torch.uint8 or (fmt is not None and not fmt.nibbles):
            return None
        if fmt is not None:                    # in a block other bytes come first
            blocks = q.unflatten(-1, (-1, fmt.block_bytes)).clone()
            codes = blocks[..., fmt.nibbles:]
            codes.copy_((codes >> 4) | (codes << 4))
            return {**v, name: blocks.flatten(-2)}
        codes = unpack_nibbles(q, 2 * q.shape[-1]).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return {**v, name: pack_nibbles(codes)}

    return apply


QUANTIZED = (
    Mistake("scale", "the scales read transposed", transpose_scales),
    Mistake("scale", "the scales of a row read backwards", reverse_scales),
    Mistake("convention", "the zeros left out", drop_argument("zeros")),
    replace_argument("scale", "the global scale left out", "global_scale",
                     lambda v: torch.ones_like(v["global_scale"])),
)

ROUTED = (
    replace_argument("scale", "the weights not normalised", "normalize", False),
    replace_argument("scale", "the weights normalised", "normalize", True),
    replace_argument("scale", "the scaling factor left out", "routed_scaling_factor", 1.0),
    replace_argument("convention", "the other scoring function", "scoring",
                     lambda v: "sigmoid" if v["scoring"] == "softmax" else "softmax"),
)

ACTIVATIONS = tuple(
    replace_argument("convention", f"the activation {name}", "activation", name)
    for name in ("gelu", "gelu_tanh", "silu", "relu", "swiglu", "geglu", "geglu_tanh", "reglu"))


def zeros_like(name: str) -> Callable[[Values], Tensor]:
    return lambda v: torch.zeros_like(v[name])


def off_by(name: str, by: int) -> Callable[[Values], int]:
    """Returns the argument plus `by`, at least 1; 0 means off and stays 0."""
    return lambda v: max(v[name] + by, 1) if v[name] else 0
