"""Mistakes that kernels of several operations could make: if a failing kernel gives what one of them gives, its mistake
has a name. Those of one operation alone are in its file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...spec.alteration import Alteration, Results, Values
from .quant import pack_nibbles, unpack_nibbles


def replaced(kind: str, words: str, name: str, value: Any) -> Alteration:
    """One argument replaced, where it is not that already; `value` may be a function of the values."""
    def alter(op: Any, v: Values) -> Values | None:
        if name not in v or v[name] is None:
            return None
        new = value(v) if callable(value) else value
        same = torch.equal(new, v[name]) if isinstance(new, Tensor) and new.shape == v[name].shape else (
            not isinstance(v[name], Tensor) and new == v[name])
        return None if same else {**v, name: new}

    return Alteration(kind, words, alter)


def changed_results(kind: str, words: str, change: Callable[[Values, tuple[Any, ...]], Any]) -> Alteration:
    """The right results, changed."""
    def alter(op: Any, v: Values) -> Results | None:
        out = op.reference(**v)
        made = change(v, tuple(out) if isinstance(out, (tuple, list)) else (out,))
        return None if made is None else Results(tuple(made) if isinstance(made, (tuple, list)) else (made,))

    return Alteration(kind, words, alter)


def scale_of(v: Values) -> float:
    given = v.get("scale")
    return float(v[next(iter(v))].shape[-1] ** -0.5 if given is None else given)


def blockwise_heads(op: Any, v: Values) -> Values | None:
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


def align(op: Any, v: Values) -> Values | None:
    other = "top_left" if v["causal_align"] == "bottom_right" else "bottom_right"
    return {**v, "causal_align": other}


def lse_base_two(v: Values, out: tuple[Any, ...]) -> Any:
    return (out[0], out[1] / math.log(2)) if len(out) > 1 else None


def window(name: str, by: int) -> Callable[[Any, Values], Values | None]:
    return lambda op, v: {**v, name: v[name] + by} if v.get(name, -1) >= 0 and v[name] + by >= 0 else None


def softcap_first(op: Any, v: Values) -> Values | None:
    return {**v, "softcap": v["softcap"] * scale_of(v)} if v["softcap"] > 0 else None


SCORES = (
    Alteration("scale", "the scale left out", lambda op, v: None if scale_of(v) == 1.0 else {**v, "scale": 1.0}),
    replaced("scale", "the default scale whatever was given", "scale", lambda v: v["query"].shape[-1] ** -0.5
         if "query" in v else 1.0),
    Alteration("scale", "the scale applied twice", lambda op, v: {**v, "scale": scale_of(v) ** 2}),
    replaced("mask", "causality ignored", "is_causal", False),
)

SOFTCAP = (
    Alteration("scale", "the softcap applied before the scale", softcap_first),
    replaced("scale", "the softcap left out", "softcap", 0.0),
    Alteration("head map", "query head h reading KV head h % kv_heads", blockwise_heads),
)

WINDOW = (
    *(Alteration("window", f"{name} off by one ({by:+d})", window(name, by))
      for name in ("window_left", "window_right") for by in (1, -1)),
    *(replaced("window", f"{name} ignored", name, -1) for name in ("window_left", "window_right")),
)

LSE = (
    changed_results("convention", "the log-sum-exp in base 2", lse_base_two),
    changed_results("convention", "the log-sum-exp without the largest score added",
             lambda v, out: (out[0], torch.zeros_like(out[1])) if len(out) > 1 else None),
)


def without(name: str) -> Callable[[Any, Values], Values | None]:
    return lambda op, v: {**v, name: None} if v.get(name) is not None else None


def longer_context(by: int) -> Callable[[Any, Values], Values | None]:
    def alter(op: Any, v: Values) -> Values | None:
        lens, table = v["context_lens"], v["block_table"]
        size = v["key_cache" if "key_cache" in v else "ckv_cache"].shape[1 if v.get("kv_layout", "NHD") == "NHD" else 2]
        room = (table >= 0).sum(1) * size
        new = torch.minimum((lens + by).clamp(min=0), room.to(lens.dtype))
        return {**v, "context_lens": new} if not torch.equal(new, lens) else None

    return alter


def pages(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Values], Values | None]:
    def alter(op: Any, v: Values) -> Values | None:
        table = v["block_table"].clone()
        for row in table:
            used = row >= 0
            row[used] = change(row[used])
        return None if torch.equal(table, v["block_table"]) else {**v, "block_table": table}

    return alter


PAGES = (
    Alteration("out of bounds", "one token past context_lens read", longer_context(1)),
    Alteration("out of bounds", "the whole last page read", longer_context(10 ** 6)),
    Alteration("mask", "the last token left out", longer_context(-1)),
    Alteration("stale page", "the pages of a sequence taken in the order of the pool", pages(
        lambda row: row.sort().values)),
    Alteration("stale page", "the first page of a sequence read for all of them", pages(
        lambda row: row[:1].expand_as(row))),
    Alteration("stale page", "the pages of a sequence taken backwards", pages(lambda row: row.flip(0))),
)

NORM = (
    replaced("convention", "eps ignored", "eps", 0.0), Alteration("scale", "the weight left out", without("weight")),
    replaced("convention", "eps squared", "eps", lambda v: v["eps"] ** 2),
    replaced("scale", "the offset of the weight ignored", "offset", 0.0),
    Alteration("scale", "one added to the weight", lambda op, v: None if v.get("weight") is None else {
        **v, "weight": v["weight"] + 1.0}),
)


def rms_eps_outside(v: Values, out: tuple[Any, ...]) -> Any:
    """x / (rms + eps) instead of x / sqrt(rms^2 + eps)."""
    h = v["x"] + v["residual"] if "residual" in v else v["x"]
    mean = h.square().mean(-1, keepdim=True)
    return (out[0] * torch.sqrt(mean + v["eps"]) / (mean.sqrt() + v["eps"]), *out[1:])


def scales_transposed(op: Any, v: Values) -> Values | None:
    scales = v["scales"]
    if scales is None or scales.dim() < 2 or scales.shape[-1] == 1 or scales.shape[-2] == 1:
        return None
    return {**v, "scales": scales.mT.reshape(scales.shape)}


def scales_per_column(op: Any, v: Values) -> Values | None:
    scales = v["scales"]
    return {**v, "scales": scales.flip(-1)} if scales is not None and scales.shape[-1] > 1 else None


def nibbles(name: str) -> Callable[[Any, Values], Values | None]:
    def alter(op: Any, v: Values) -> Values | None:
        q = v[name]
        if q.dtype != torch.uint8:
            return None
        codes = unpack_nibbles(q, 2 * q.shape[-1]).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return {**v, name: pack_nibbles(codes)}

    return alter


QUANTIZED = (
    Alteration("scale", "the scales read transposed", scales_transposed),
    Alteration("scale", "the scales of a row read backwards", scales_per_column),
    Alteration("convention", "the zeros left out", without("zeros")),
    replaced("scale", "the global scale left out", "global_scale", lambda v: torch.ones_like(v["global_scale"])),
)

ROUTED = (
    replaced("scale", "the weights not normalised", "normalize", False),
    replaced("scale", "the weights normalised", "normalize", True),
    replaced("scale", "the scaling factor left out", "routed_scaling_factor", 1.0),
    replaced("convention", "the other scoring function", "scoring", lambda v: "sigmoid" if v["scoring"] == "softmax"
         else "softmax"),
)

ACTIVATIONS = tuple(
    replaced("convention", f"the activation {name}", "activation", name)
    for name in ("gelu", "gelu_tanh", "silu", "relu", "swiglu", "geglu", "geglu_tanh", "reglu"))


def zeros(name: str) -> Callable[[Values], Tensor]:
    return lambda v: torch.zeros_like(v[name])


def off_by(name: str, by: int) -> Callable[[Values], int]:
    """0 means none, and stays it."""
    return lambda v: max(v[name] + by, 1) if v[name] else 0
