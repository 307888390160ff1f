"""Deliberately wrong references: if a failing kernel gives what one of them gives, its mistake has a name.

A row is (class, what was altered, alteration). An alteration takes the values of a call and returns other values for
the op's own reference, or `Results` where the formula itself has to be altered; None where it does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.formulas.quant import pack_nibbles, unpack_nibbles
from ...ops.formulas.sampling import draw, filters, kept, random_numbers, scores_of, weights_of

Values = dict[str, Any]


class Results(NamedTuple):
    """What a kernel with this mistake returns."""

    given: tuple[Any, ...]


class Alteration(NamedTuple):
    kind: str
    words: str
    alter: Callable[[Any, Values], Values | Results | None]    # of (op, values)


def _set(kind: str, words: str, name: str, value: Any) -> Alteration:
    """One argument replaced, where it is not that already; `value` may be a function of the values."""
    def alter(op: Any, v: Values) -> Values | None:
        if name not in v or v[name] is None:
            return None
        new = value(v) if callable(value) else value
        same = torch.equal(new, v[name]) if isinstance(new, Tensor) and new.shape == v[name].shape else (
            not isinstance(v[name], Tensor) and new == v[name])
        return None if same else {**v, name: new}

    return Alteration(kind, words, alter)


def _results(kind: str, words: str, change: Callable[[Values, tuple[Any, ...]], Any]) -> Alteration:
    """The right results, changed."""
    def alter(op: Any, v: Values) -> Results | None:
        out = op.reference(**v)
        made = change(v, tuple(out) if isinstance(out, (tuple, list)) else (out,))
        return None if made is None else Results(tuple(made) if isinstance(made, (tuple, list)) else (made,))

    return Alteration(kind, words, alter)


def _scale_of(v: Values) -> float:
    given = v.get("scale")
    return float(v[next(iter(v))].shape[-1] ** -0.5 if given is None else given)


def _blockwise_heads(op: Any, v: Values) -> Values | None:
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


def _align(op: Any, v: Values) -> Values | None:
    other = "top_left" if v["causal_align"] == "bottom_right" else "bottom_right"
    return {**v, "causal_align": other}


def _lse_base_two(v: Values, out: tuple[Any, ...]) -> Any:
    return (out[0], out[1] / math.log(2)) if len(out) > 1 else None


def _window(name: str, by: int) -> Callable[[Any, Values], Values | None]:
    return lambda op, v: {**v, name: v[name] + by} if v.get(name, -1) >= 0 and v[name] + by >= 0 else None


def _softcap_first(op: Any, v: Values) -> Values | None:
    return {**v, "softcap": v["softcap"] * _scale_of(v)} if v["softcap"] > 0 else None


_SCORES = (
    Alteration("scale", "the scale left out", lambda op, v: None if _scale_of(v) == 1.0 else {**v, "scale": 1.0}),
    _set("scale", "the default scale whatever was given", "scale", lambda v: v["query"].shape[-1] ** -0.5
         if "query" in v else 1.0),
    Alteration("scale", "the scale applied twice", lambda op, v: {**v, "scale": _scale_of(v) ** 2}),
    _set("mask", "causality ignored", "is_causal", False),
)
_SOFTCAP = (
    Alteration("scale", "the softcap applied before the scale", _softcap_first),
    _set("scale", "the softcap left out", "softcap", 0.0),
    Alteration("head map", "query head h reading KV head h % kv_heads", _blockwise_heads),
)
_WINDOW = (
    *(Alteration("window", f"{name} off by one ({by:+d})", _window(name, by))
      for name in ("window_left", "window_right") for by in (1, -1)),
    *(_set("window", f"{name} ignored", name, -1) for name in ("window_left", "window_right")),
)
_LSE = (
    _results("convention", "the log-sum-exp in base 2", _lse_base_two),
    _results("convention", "the log-sum-exp without the largest score added",
             lambda v, out: (out[0], torch.zeros_like(out[1])) if len(out) > 1 else None),
)


def _mask_inverted(op: Any, v: Values) -> Values | None:
    mask = v["attn_mask"]
    return {**v, "attn_mask": ~mask if mask.dtype == torch.bool else -mask} if mask is not None else None


def _without(name: str) -> Callable[[Any, Values], Values | None]:
    return lambda op, v: {**v, name: None} if v.get(name) is not None else None


def _one_sequence(op: Any, v: Values) -> Values:
    ends = {f"cu_seqlens_{x}": v[f"cu_seqlens_{x}"][[0, -1]] for x in "qk"}
    return {**v, **ends, "max_seqlen_q": v["query"].shape[0], "max_seqlen_k": v["key"].shape[0]}


def _longer_context(by: int) -> Callable[[Any, Values], Values | None]:
    def alter(op: Any, v: Values) -> Values | None:
        lens, table = v["context_lens"], v["block_table"]
        size = v["key_cache" if "key_cache" in v else "ckv_cache"].shape[1 if v.get("kv_layout", "NHD") == "NHD" else 2]
        room = (table >= 0).sum(1) * size
        new = torch.minimum((lens + by).clamp(min=0), room.to(lens.dtype))
        return {**v, "context_lens": new} if not torch.equal(new, lens) else None

    return alter


def _pages(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Values], Values | None]:
    def alter(op: Any, v: Values) -> Values | None:
        table = v["block_table"].clone()
        for row in table:
            used = row >= 0
            row[used] = change(row[used])
        return None if torch.equal(table, v["block_table"]) else {**v, "block_table": table}

    return alter


_PAGES = (
    Alteration("out of bounds", "one token past context_lens read", _longer_context(1)),
    Alteration("out of bounds", "the whole last page read", _longer_context(10 ** 6)),
    Alteration("mask", "the last token left out", _longer_context(-1)),
    Alteration("stale page", "the pages of a sequence taken in the order of the pool", _pages(
        lambda row: row.sort().values)),
    Alteration("stale page", "the first page of a sequence read for all of them", _pages(
        lambda row: row[:1].expand_as(row))),
    Alteration("stale page", "the pages of a sequence taken backwards", _pages(lambda row: row.flip(0))),
)


def _other_style(op: Any, v: Values) -> Values:
    return {**v, "style": "interleaved" if v["style"] == "rotate_half" else "rotate_half"}


def _no_ids(op: Any, v: Values) -> Values | None:
    if v["position_ids"] is None:
        return None
    return {**v, "position_ids": torch.arange(v["position_ids"].shape[-1], device=v["q"].device).expand(
        v["position_ids"].shape)}


def _centred(op: Any, v: Values) -> Values:
    return {**v, "x": v["x"] - v["x"].mean(-1, keepdim=True)}


_NORM = (
    _set("convention", "eps ignored", "eps", 0.0), Alteration("scale", "the weight left out", _without("weight")),
    _set("convention", "eps squared", "eps", lambda v: v["eps"] ** 2),
    _set("scale", "the offset of the weight ignored", "offset", 0.0),
    Alteration("scale", "one added to the weight", lambda op, v: None if v.get("weight") is None else {
        **v, "weight": v["weight"] + 1.0}),
)


def _rms_eps_outside(v: Values, out: tuple[Any, ...]) -> Any:
    """x / (rms + eps) instead of x / sqrt(rms^2 + eps)."""
    h = v["x"] + v["residual"] if "residual" in v else v["x"]
    mean = h.square().mean(-1, keepdim=True)
    return (out[0] * torch.sqrt(mean + v["eps"]) / (mean.sqrt() + v["eps"]), *out[1:])


def _unbiased(v: Values, out: tuple[Any, ...]) -> Any:
    n = v["x"].shape[-1]
    if n < 2 or v["bias"] is not None:
        return None
    return out[0] * math.sqrt((n - 1) / n)


def _one_fewer(op: Any, v: Values) -> Results | None:
    """top-p without the token that reaches p."""
    if v["top_p"] >= 1.0 or v["top_p_rows"] is not None or v["token_counts"] is not None or v["history"] is not None:
        return None
    scores = scores_of(v["logits"], v["temperature"], v["temperature_rows"], v["from_probs"])
    by = filters(scores.shape[-1], v["temperature"], v["top_k"], v["top_p"], v["min_p"], None, None, None, None,
                          torch.float64)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranked = weights_of(scores, v["from_probs"]).gather(1, order)
    keep = kept(ranked, by)
    count = keep.sum(-1, keepdim=True)
    keep = keep & ((torch.arange(keep.shape[1]) < count - 1) | (torch.arange(keep.shape[1]) == 0))
    weights = torch.zeros_like(ranked).scatter(1, order, torch.where(keep, ranked, 0.0))
    uniform = random_numbers(scores.shape[0], 1, scores.device, v["uniforms"], v["seed"], v["seed_rows"], v["offset"],
                             v["generator"])
    column = draw(weights, uniform)
    chosen, total = weights.gather(1, column), weights.sum(-1, keepdim=True)
    tokens = torch.where(total > 0, column, -1)[:, 0]
    logs = torch.where(total > 0, chosen.log() - total.log(), -torch.inf)[:, 0].to(torch.float32)
    return Results((tokens, logs) if v["return_logprobs"] else (tokens,))


def _scales_transposed(op: Any, v: Values) -> Values | None:
    scales = v["scales"]
    if scales is None or scales.dim() < 2 or scales.shape[-1] == 1 or scales.shape[-2] == 1:
        return None
    return {**v, "scales": scales.mT.reshape(scales.shape)}


def _scales_per_column(op: Any, v: Values) -> Values | None:
    scales = v["scales"]
    return {**v, "scales": scales.flip(-1)} if scales is not None and scales.shape[-1] > 1 else None


def _nibbles(name: str) -> Callable[[Any, Values], Values | None]:
    def alter(op: Any, v: Values) -> Values | None:
        q = v[name]
        if q.dtype != torch.uint8:
            return None
        codes = unpack_nibbles(q, 2 * q.shape[-1]).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return {**v, name: pack_nibbles(codes)}

    return alter


_QUANTIZED = (
    Alteration("scale", "the scales read transposed", _scales_transposed),
    Alteration("scale", "the scales of a row read backwards", _scales_per_column),
    Alteration("convention", "the zeros left out", _without("zeros")),
    _set("scale", "the global scale left out", "global_scale", lambda v: torch.ones_like(v["global_scale"])),
)
_ROUTED = (
    _set("scale", "the weights not normalised", "normalize", False),
    _set("scale", "the weights normalised", "normalize", True),
    _set("scale", "the scaling factor left out", "routed_scaling_factor", 1.0),
    _set("convention", "the other scoring function", "scoring", lambda v: "sigmoid" if v["scoring"] == "softmax"
         else "softmax"),
)
_ACTIVATIONS = tuple(
    _set("convention", f"the activation {name}", "activation", name)
    for name in ("gelu", "gelu_tanh", "silu", "relu", "swiglu", "geglu", "geglu_tanh", "reglu"))


def _offsets(change: Callable[[str, tuple[int, int]], tuple[int, int]]) -> Callable[[Any, Values], Results | None]:
    def alter(op: Any, v: Values) -> Results | None:
        out = op.reference(**v)
        spans = getattr(out, "offsets", None)
        if spans is None:
            return None
        single = isinstance(v["text"], str)
        texts, rows = ([v["text"]], [spans]) if single else (v["text"], spans)
        moved = [[change(t, tuple(s)) for s in row] for t, row in zip(texts, rows)]
        return Results((replace(out, offsets=moved[0] if single else moved),))

    return alter


def _zeros(name: str) -> Callable[[Values], Tensor]:
    return lambda v: torch.zeros_like(v[name])


def _off_by(name: str, by: int) -> Callable[[Values], int]:
    """0 means none, and stays it."""
    return lambda v: max(v[name] + by, 1) if v[name] else 0


def _mean_of_all(v: Values, out: tuple[Any, ...]) -> Any:
    kept = (v["targets"] != v["ignore_index"]).sum() / max(v["targets"].numel(), 1)
    return out[0] * kept if v["reduction"] == "mean" else None


ALTERATIONS: Mapping[str, tuple[Alteration, ...]] = {
    "attention": (
        Alteration("mask", "the mask ignored", _without("attn_mask")), Alteration("mask", "the mask inverted",
                                                                                  _mask_inverted),
        Alteration("alignment", "the diagonal at the other corner", _align),
        Alteration("position bias", "ALiBi left out", _without("alibi_slopes")),
        _set("position bias", "ALiBi with the other sign", "alibi_slopes", lambda v: -v["alibi_slopes"]),
        *_SCORES, *_SOFTCAP, *_WINDOW, *_LSE),
    "varlen_attention": (
        Alteration("alignment", "the diagonal at the other corner", _align), *_SCORES, *_SOFTCAP, *_WINDOW,
        Alteration("mask", "all sequences taken for one", _one_sequence)),
    "paged_attention": (
        *_SCORES, *_SOFTCAP, *_WINDOW[:2], *_WINDOW[4:5], *_PAGES, *_LSE,
        _set("scale", "key_scale ignored", "key_scale", lambda v: torch.ones_like(v["key_scale"])),
        _set("scale", "value_scale ignored", "value_scale", lambda v: torch.ones_like(v["value_scale"]))),
    "mla_paged_attention": (
        *_SCORES[2:], _set("scale", "the scale of the absorbed size", "scale", lambda v: (
            v["q_nope"].shape[-1] + v["q_pe"].shape[-1]) ** -0.5), *_PAGES, *_LSE,
        _set("scale", "the scale left out", "scale", 1.0),
        _set("position bias", "the position part left out", "q_pe", _zeros("q_pe"))),
    "rope": (
        Alteration("convention", "the other convention of pairs (rotate_half or interleaved)", _other_style),
        _set("convention", "the rotation in the other direction", "sin", lambda v: -v["sin"]),
        Alteration("alignment", "position_ids ignored", _no_ids),
        _results("scale", "the keys left as they are", lambda v, out: (out[0], v["k"]) if len(out) > 1 else None)),
    "alibi": (
        Alteration("alignment", "the diagonal at the other corner", _align), _set("mask", "causality ignored",
                                                                                  "is_causal", False),
        _set("position bias", "the other sign", "slopes", lambda v: -v["slopes"])),
    "rms_norm": (Alteration("convention", "the mean subtracted, as layer norm does", _centred), *_NORM,
                 _results("convention", "eps outside the square root", _rms_eps_outside)),
    "add_rms_norm": (*_NORM, _results("convention", "eps outside the square root", _rms_eps_outside),
                     _set("convention", "the residual left out", "residual", _zeros("residual"))),
    "layer_norm": (*_NORM, Alteration("convention", "the bias left out", _without("bias")),
                   _results("convention", "the variance divided by n - 1", _unbiased)),
    "group_norm": (*_NORM, Alteration("convention", "the bias left out", _without("bias")),
                   _set("convention", "one group", "groups", 1)),
    "sample": (
        _set("distribution", "the temperature ignored", "temperature", 1.0),
        _set("distribution", "top_k ignored", "top_k", 0), _set("distribution", "top_p ignored", "top_p", 1.0),
        _set("distribution", "min_p ignored", "min_p", 0.0),
        _set("distribution", "one token more in top_k", "top_k", _off_by("top_k", 1)),
        _set("distribution", "one token fewer in top_k", "top_k", _off_by("top_k", -1)),
        Alteration("distribution", "top_p without the token that reaches it", _one_fewer),
        _set("distribution", "1 - u in place of u", "uniforms", lambda v: 1.0 - v["uniforms"]),
        _set("distribution", "the square of u in place of u", "uniforms", lambda v: v["uniforms"] ** 2),
        _set("distribution", "penalties ignored", "repetition_penalty", 1.0),
        _set("convention", "offset ignored", "offset", 0)),
    "dequantize": (*_QUANTIZED, Alteration("convention", "the two codes of a byte exchanged", _nibbles("q"))),
    "quantized_linear": (
        *_QUANTIZED, Alteration("convention", "the two codes of a byte exchanged", _nibbles("weight_q")),
        Alteration("convention", "the bias left out", _without("bias"))),
    "moe_gate": (
        *_ROUTED, Alteration("distribution", "the correction bias left out", _without("e_score_correction_bias")),
        _set("distribution", "groups ignored", "n_group", 1)),
    "moe": (
        _set("capacity", "the capacity ignored", "capacity", 0),
        _set("capacity", "one token more than the capacity", "capacity", _off_by("capacity", 1)),
        _set("capacity", "one token fewer than the capacity", "capacity", _off_by("capacity", -1)),
        _set("convention", "gate and up exchanged", "gate_first", lambda v: not v["gate_first"]),
        _set("head map", "expert_offset ignored", "expert_offset", 0), *_ROUTED[:2], *_ROUTED[3:], *_ACTIVATIONS[4:],
        _set("scale", "the weight on the other side of the expert", "weight_on", lambda v: "input"
             if v["weight_on"] == "output" else "output")),
    "linear": (Alteration("convention", "the bias left out", _without("bias")),
               _set("convention", "the activation left out", "activation", None), *_ACTIVATIONS[:4]),
    "mlp": (*_ACTIVATIONS, *(Alteration("convention", f"{n} left out", _without(n))
                             for n in ("bias_in", "bias_up", "bias_down"))),
    "cross_entropy": (
        _set("mask", "ignore_index ignored", "ignore_index", -12345),
        _set("scale", "no label smoothing", "label_smoothing", 0.0),
        _results("scale", "the mean over all rows, ignored ones too", _mean_of_all)),
    "embedding": (_set("scale", "the scale left out", "scale", 1.0),),
    "tokenize": (
        Alteration("convention", "offsets one too far", _offsets(lambda t, s: (s[0] + 1, s[1] + 1))),
        Alteration("convention", "offsets in bytes, not characters", _offsets(
            lambda t, s: (len(t[:s[0]].encode()), len(t[:s[1]].encode())))),
        _set("convention", "special tokens not added", "add_special_tokens", False),
        _set("convention", "truncated on the other side", "truncation_side", lambda v: "left"
             if v["truncation_side"] != "left" else "right"),
        _set("convention", "padded on the other side", "padding_side", lambda v: "left"
             if v["padding_side"] != "left" else "right")),
    "detokenize": (_set("convention", "special tokens kept", "skip_special_tokens", False),),
}
