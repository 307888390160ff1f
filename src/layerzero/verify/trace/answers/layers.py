"""Definitions of norms, products, rotary positions and sampling as lz calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..definition import Definition
from ..readings import Parts, readings, small_numbers, text_of
from ..statements import OFFSET, ROPE, Statement, first_choice, number_said, said
from .answer import QUERY, Answer, Inputs, Outputs, call_text, lz, number, with_reading


def rms_norm(definition: Definition) -> list[Answer]:
    p = Parts(definition, "rms_norm")
    x_name = p.take(r"hidden_states?|x|inputs?", "hidden states (hidden_states)")
    weight = p.maybe(r"weights?|gamma|w|scale", 1)
    residual = p.maybe(r"residual(_in)?")
    eps_name = p.maybe(r"eps(ilon)?|variance_epsilon|rms_norm_eps")
    p.done()
    out, total = p.outputs((r"o|out|y|output|normed|norm_out(put)?", "the norm"),
                           (r".*residual.*|h|sum|.*updated.*", "the sum"))
    if total and not residual:
        raise p.unmapped(f"the output {total} is a sum, but no input is a residual")
    beside = re.search(r"\b(silu|gelu|sigmoid|tanh)\b", definition.reference)
    if beside:
        raise p.unmapped(f"its reference also applies {beside[1]}, which lz.rms_norm does not")
    shifted = (bool(weight) and re.search(r"1(\.0)?\s*\+\s*\w*weight|weight[\w.()]*\s*\+\s*1",
                                          text_of(definition)))
    found: dict[str, tuple[Statement | None, tuple[Any, ...]]] = {"eps": (None, (None,)),
                                                                  "offset": (None, (0.0,))}
    if not eps_name:
        eps = number_said(definition, r"eps(?:ilon)?[^\d.;]{0,20}(\d(?:\.\d+)?e-\d+|0\.0\d+)",
                          kind=float)
        found["eps"] = eps, first_choice(eps, *(small_numbers(definition) or (1e-6, 1e-5)))
    if weight:
        offset = said(definition, OFFSET, weight, convention=0.0)
        found["offset"] = offset, first_choice(offset, 1.0 if shifted else 0.0, 0.0, 1.0)
    options = readings({option: values for option, (_, values) in found.items()})
    statements = {option: s for option, (s, _) in found.items() if s is not None}

    def compute(x: Inputs, reading: Mapping[str, Any]) -> Outputs:
        eps = float(number(x, eps_name, reading["eps"]))
        scale = x[weight] if weight else None
        if residual and not reading["offset"]:
            results = lz("add_rms_norm", x=x[x_name], residual=x[residual], weight=scale, eps=eps)
            return {out: results[0], total: results[1]}
        summed = x[x_name] + x[residual] if residual else x[x_name]
        return {out: lz("rms_norm", x=summed, weight=scale, eps=eps, offset=reading["offset"]),
                total: summed}

    answers = []
    for reading in options:
        op = "add_rms_norm" if residual and not reading["offset"] else "rms_norm"
        params = {"x": x_name, "residual": residual, "weight": weight, "eps": eps_name}
        fixed = {} if eps_name else {"eps": reading["eps"]}
        fixed |= {"offset": reading["offset"]} if op == "rms_norm" else {}
        direct = op == "add_rms_norm" or not residual
        answers.append(Answer(
            definition, (op,), call_text(op, x_name, residual, weight, eps=eps_name),
            with_reading(compute, reading), {k: v for k, v in reading.items() if v is not None},
            "rms_norm", {**params, "out": out, "total": total},
            {k: v for k, v in params.items() if v} if direct else {}, fixed,
            statements=statements))
    return answers


def gemm(definition: Definition) -> list[Answer]:
    p = Parts(definition, "linear")
    bias = p.maybe(r"bias|c_bias", 1)
    a_scale, b_scale = p.maybe(r"(a|x|input|lhs)_?scales?(_inv)?"), p.maybe(
        r"(b|w|weight|rhs)_?scales?(_inv)?")
    a = p.take(r"(mat_)?a|x|input|hidden_states|lhs", "a left matrix (A)")
    b = p.take(r"(mat_)?b|w|weights?|rhs", "a right matrix (B)")
    for pattern in (r"(out_)?dtype", r"use_pdl"):
        p.maybe(pattern)
    p.done()
    (out,) = p.outputs((r"c|d|y|out|output", "the product"))
    left, right = p.shape(a), p.shape(b)
    if len(right) not in (2, 3) or len(left) < 2:
        raise p.unmapped(
            f"{a} ({', '.join(left)}) and {b} ({', '.join(right)}) are no matrices that lz.linear "
            "takes")
    batched = len(right) == 3
    if batched and (len(left) != 3 or left[0] != right[0]):
        raise p.unmapped(f"{b} has a batch ({right[0]}) that {a} ({', '.join(left)}) has not")
    last = definition.outputs[out].shape or ()
    if left[-1] == right[-1] and (left[-1] != right[-2] or last[-1:] == right[-2:-1]):
        transposed = False
    elif left[-1] == right[-2]:
        transposed = True
    else:
        raise p.unmapped(
            f"{a} ({', '.join(left)}) and {b} ({', '.join(right)}) share no axis to sum over")

    a_transposed = scales_are_transposed(p, a, a_scale)

    def compute(x: Inputs) -> Outputs:
        rows, weight = dequantized(x, a, a_scale, a_transposed), dequantized(x, b, b_scale)
        weight = weight.transpose(-1, -2) if transposed else weight
        if rows.dtype != weight.dtype:
            rows, weight = rows.float(), weight.float()
        if batched:
            return {out: torch.stack([lz("linear", x=r, weight=w) for r, w in zip(rows, weight)])}
        return {out: lz("linear", x=rows, weight=weight, bias=x[bias].to(rows.dtype) if bias
                        else None)}

    plain = not (transposed or batched or a_scale or b_scale)
    roles = {"a": a, "b": b, "bias": bias, "transposed": transposed, "out": out,
             "a_scale": a_scale, "b_scale": b_scale, "a_transposed": a_transposed}
    text = call_text("linear", a, b + (".T" if transposed else ""), bias=bias, a_scale=a_scale,
                     b_scale=b_scale)
    return [Answer(definition, ("linear",), text, compute, kind="gemm",
                   roles=roles,
                   params={"x": a, "weight": b, **({"bias": bias} if bias else {})} if plain
                   else {})]


def dequantized(x: Inputs, name: str, scale: str, transposed: bool = False) -> Tensor:
    """The values of a tensor whose scales are one, one for each row, or one for each block.

    `transposed`: the scales are stored as (blocks, rows), as FlashInfer stores those of
    activations.
    """
    stored: Tensor = x[name]
    scales = torch.as_tensor(x[scale] if scale else 1.0, dtype=torch.float32, device=stored.device)
    scales = scales.transpose(-1, -2) if transposed else scales
    if stored.dtype.itemsize > 1:
        return stored * scales if scale else stored
    if scales.numel() == 1:
        scales = scales.reshape((1,) * stored.dim())
    elif scales.dim() < stored.dim():
        scales = scales.reshape(*scales.shape, *(1,) * (stored.dim() - scales.dim()))
    width = rows = 1
    if scales.numel() > 1 and scales.shape[-1] == 1:
        rows = _block(stored.shape[-2], scales.shape[-2])
        scales = (scales.repeat_interleave(rows, -2)[..., :stored.shape[-2], :]
                  if scales.shape[-2] > 1 else scales)
        scales, rows = scales.expand(*stored.shape[:-1], 1), 1
    elif scales.numel() > 1:
        width = _block(stored.shape[-1], scales.shape[-1])
        rows = _block(stored.shape[-2], scales.shape[-2]) if stored.dim() > 1 else 1
    kind = "fp8_e4m3" if stored.dtype is torch.float8_e4m3fn else "fp8_e5m2"
    return lz("dequantize", q=stored, scales=scales.contiguous(), format=kind, block_size=width,
              block_rows=rows)


def _block(size: int, count: int) -> int:
    """How many elements share a scale: the usual number that makes so many blocks."""
    return next((n for n in (128, 1, 64, 32, 16, 256, 512, size) if -(-size // n) == count),
                -(-size // max(count, 1)))


def scales_are_transposed(p: Parts, name: str, scale: str) -> bool:
    """Told by the axes: the last one of the scales is the first one of the tensor."""
    return bool(scale) and len(p.shape(scale)) == 2 and p.shape(scale)[-1] == p.shape(name)[0]


def rope(definition: Definition) -> list[Answer]:
    p = Parts(definition, "rope")
    q = p.take(QUERY, "queries (q)")
    k = p.maybe(r"k|keys?")
    joint = p.maybe(r"cos_sin(_cache)?|cos_sin_table|freqs?_cis", 2)
    theta = "" if joint else p.maybe(r"rope_theta|theta|base")
    cos = "" if joint or theta else p.take(r"cos(_cache|_table)?",
                                           "cosines and sines (cos_sin_cache, cos and sin, or "
                                           "rope_theta)")
    sin = "" if joint or theta else p.take(r"sin(_cache|_table)?", "sines (sin)")
    stretch = p.maybe(r"rope_scale") if theta else ""
    positions = (p.take(r"positions?|pos(ition)?_ids", "positions") if theta
                 else p.maybe(r"positions?|pos(ition)?_ids"))
    neox, part = p.maybe(r"is_neox(_style)?|interleaved?"), p.maybe(r"rotary_dim")
    p.done()
    q_out, k_out = p.outputs((r"q.*|out|output", "rotated queries"), (r"k.*", "rotated keys"))
    if k_out and not k:
        raise p.unmapped(f"the output {k_out} is rotated keys, but no input is keys")
    size = definition.const_axes.get("head_size", definition.const_axes.get("head_dim", 0))
    flat = len(p.shape(q)) == 2
    if flat and not size:
        raise p.unmapped(
            f"{q} ({', '.join(p.shape(q))}) has no axis of heads, and no const axis head_size "
            "divides it")
    style, halves = _rope_styles(definition)

    def compute(x: Inputs, reading: Mapping[str, Any]) -> Outputs:
        style = reading["style"]
        if neox:
            style = ("interleaved" if bool(number(x, neox)) == neox.startswith("interleav")
                     else "rotate_half")
        if theta:
            width = int(number(x, part,
                               definition.const_axes.get("rotary_dim", size or x[q].shape[-1])))
            speeds = float(x[theta]) ** (-torch.arange(0, width, 2, device=x[q].device,
                                                       dtype=torch.float32) / width)
            angles = (x[positions].float() / float(number(x, stretch, 1.0)))[..., None] * speeds
            c, s = angles.cos(), angles.sin()
        else:
            c, s = x[joint].chunk(2, -1) if joint else (x[cos], x[sin])
        # both halves hold the same angles
        if not joint and c.shape[-1] * 2 > x[q].shape[-1]:
            c, s = ((c[..., ::2], s[..., ::2]) if style == "interleaved" else
                    (c[..., :c.shape[-1] // 2], s[..., :s.shape[-1] // 2]))
        heads = [x[n].unflatten(-1, (-1, size)) if flat else x[n] for n in (q, k) if n]
        results = lz("rope", q=heads[0], k=heads[1] if k else None, cos=c, sin=s,
                     rotary_dim=2 * c.shape[-1], position_ids=x[positions] if positions
                     and not theta else None, style=style, layout="bshd")
        rotated = results if isinstance(results, (tuple, list)) else (results,)
        return {n: t.flatten(-2) if flat else t for n, t in zip((q_out, k_out), rotated)}

    text = call_text("rope", q, k or "None", joint or theta or f"{cos}, {sin}", positions or "None",
                     style=neox, rotary_dim=part, scale=stretch)
    roles = {"q": q, "k": k, "joint": joint, "positions": positions, "q_out": q_out, "k_out": k_out,
             "plain": bool(joint) and not (flat or neox)}
    return [Answer(definition, ("rope",), text, with_reading(compute, r), {} if neox else r, "rope",
                   roles, statements={"style": style} if style else {})
            for r in readings({"style": ("rotate_half",) if neox else halves})]


def _rope_styles(definition: Definition) -> tuple[Statement | None, tuple[str, ...]]:
    """What the text says of the pairs, and both styles, the likelier first."""
    style, text = said(definition, ROPE), text_of(definition)
    pairs = not re.search("neox|rotate_half", text) and re.search("interleav|gpt-?j", text)
    return style, first_choice(style, *(("interleaved", "rotate_half") if pairs
                                        else ("rotate_half", "interleaved")))


_FILTERS = {"top_k": r"top_?ks?|top_k_arr", "top_p": r"top_?ps?|top_p_arr",
            "min_p": r"min_?ps?|min_p_arr",
            "temperature": r"temperatures?"}


def sampling(definition: Definition) -> list[Answer]:
    p = Parts(definition, "sample")
    probs = p.maybe(r"(target_|input_)?prob(s|abilities)?", 2)
    logits = probs or p.take(r"logits", "rows of probabilities (probs) or logits", 2)
    by = {name: source for name, pattern in _FILTERS.items() if (source := p.maybe(pattern))}
    uniforms, seed = p.maybe(r"uniforms?(_samples)?"), p.maybe(r"(philox_)?seed")
    picked = p.maybe(r"indices", 1)            # which row each token is drawn from
    p.done()
    (out,) = p.outputs((r"samples?|tokens?|out(put)?|token_ids|next_tokens?",
                        "a token for each row"))
    token_spec = definition.outputs[out]
    if token_spec.floating or len(token_spec.shape or ()) != 1:
        raise p.unmapped(
            f"lz.sample gives one token for each row; the output {out} is {token_spec.dtype} with "
            f"the axes {', '.join(token_spec.shape or ())}")

    def compute(x: Inputs) -> Outputs:
        arguments: dict[str, Any] = {}
        for name, source in by.items():
            value = x[source]
            rows = isinstance(value, Tensor) and value.dim() == 1
            arguments[f"{name}_rows" if rows else name] = value if rows else number(x, source)
        if uniforms:
            # (rounds, rows)
            arguments["uniforms"] = x[uniforms] if x[uniforms].dim() == 1 else x[uniforms][0]
        rows_of = x[logits][x[picked].long()] if picked else x[logits]
        return {out: lz("sample", logits=rows_of, from_probs=bool(probs), **arguments,
                        seed=number(x, seed, None if uniforms else 0))}

    text = f"lz.sample({', '.join([logits, *by.values()])}, from_probs={bool(probs)})"
    roles = {"rows": logits, "picked": picked, "probs": bool(probs), "out": out, **by}
    return [Answer(definition, ("sample",), text, compute, kind="sampling", roles=roles,
                   random=not uniforms)]
