"""Mixtures of experts as lz calls: route with lz.moe_gate, dequantize what the tokens chose,
compute with lz.moe.

The schema says neither how a token is routed nor which half of the first weight is the gate.
FlashInfer's names mean its conventions: `gemm1_weights` holds up first and the gate second,
`routing_bias` beside `routed_scaling_factor` is DeepSeek's routing (sigmoid, groups, a bias for the
choice only), and Llama 4 scales the input of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..definition import Definition
from ..readings import Parts, constant, readings, text_of
from ..statements import (
    ACTIVATION,
    BIAS,
    GATE,
    NORMALIZED,
    NORMALIZING,
    SCORES,
    SCORING,
    WEIGHT_ON,
    Statement,
    first_choice,
    identifiers,
    mentions,
    number_said,
    plain,
    said,
)
from .answer import Answer, Inputs, Outputs, call_text, lz, number, with_reading
from .layers import dequantized, scales_are_transposed


@dataclass(frozen=True)
class _Roles:
    """The names of the inputs; "" for those that are not there."""

    x: str
    first: str                                 # gate and up
    second: str                                # down
    logits: str = ""
    ids: str = ""
    weights: str = ""
    bias: str = ""
    x_scale: str = ""
    first_scale: str = ""
    second_scale: str = ""
    # one for each expert: of up, of the gate, of the result
    up_scale: str = ""
    gate_scale: str = ""
    out_scale: str = ""
    offset: str = ""
    factor: str = ""
    gate: str = ""                             # where gate and up are two tensors, `first` is up


def moe(definition: Definition) -> list[Answer]:
    p = Parts(definition, "moe")
    roles = _take_roles(p)
    logits = roles.logits
    count_inputs = {name: p.maybe(pattern) for name, pattern in (
        ("top_k", r"top_?k"), ("n_group", r"n_group"), ("topk_group", r"topk_group"))}
    for pattern in (r"num_experts", r"num_local_experts", r"routing_method_type"):
        p.maybe(pattern)                       # the axes and the reference say it
    p.done()
    (out,) = p.outputs((r"o|out|y|output|hidden_states_out", "the mixture"))
    options, statements = _options(p, roles)
    if logits and not count_inputs["top_k"]:
        _add(options, statements, "top_k", *_top_k(p))
    if logits and not count_inputs["n_group"]:
        groups = _groups(p)
        if groups != (None, ((1, 1),)):
            _add(options, statements, "groups", *groups)
    transposed, x_transposed = _transposed(p, roles), scales_are_transposed(p, roles.x,
                                                                            roles.x_scale)

    def compute(x: Inputs, reading: Mapping[str, Any]) -> Outputs:
        defaults = reading.get("top_k", 0), *reading.get("groups", (1, 1))
        counts = tuple(int(number(x, count_inputs[n], d)) for n, d in zip(count_inputs, defaults))
        picked, weights = _routed(x, roles, reading, counts[0], (counts[1] or 1, counts[2] or 1))
        offset = int(number(x, roles.offset, 0))
        used, local = _used(picked, offset, x[roles.second].shape[0])
        tokens = _plain(x, roles.x, roles.x_scale, x_transposed)
        up_and_gate, down = (_of(x, name, scale, used, transposed) for name, scale in (
            (roles.first, roles.first_scale), (roles.second, roles.second_scale)))
        if roles.gate:
            up_and_gate = torch.cat((_of(x, roles.gate, "", used, transposed), up_and_gate), 1)
        up_and_gate, down = _scaled_results(x, roles, used, up_and_gate, down,
                                            reading["gate_first"])
        wide = tokens.dtype if tokens.dtype == up_and_gate.dtype == down.dtype else torch.float32
        result = lz("moe", x=tokens.to(wide), w_gate_up=up_and_gate.to(wide), w_down=down.to(wide),
                    topk_ids=local, topk_weights=weights.float(), gate_first=reading["gate_first"],
                    activation=reading.get("activation", "swiglu"),
                    weight_on=reading["weight_on"])
        return {out: result}

    names = (roles.x, roles.gate, roles.first, roles.second,
             "experts of " + (roles.logits or roles.ids))
    scales = (roles.x_scale, roles.first_scale, roles.second_scale, roles.up_scale,
              roles.gate_scale, roles.out_scale)
    ops = (*(("moe_gate",) if logits else ()), *(("dequantize",) if _quantized(p, roles) else ()),
           "moe")
    parts = {**vars(roles), "out": out, "transposed": transposed, "x_transposed": x_transposed,
             "count_inputs": count_inputs}
    text = call_text("moe", *names, topk_weights=roles.weights, bias=roles.bias,
                     scales=" ".join(filter(None, scales)), expert_offset=roles.offset,
                     routed_scaling_factor=roles.factor, **count_inputs)
    packed = {"packed": True} if roles.ids and not roles.weights else {}
    return [Answer(definition, ops, text, with_reading(compute, {**packed, **reading}),
                   {**packed, **reading}, "moe", parts, statements=statements)
            for reading in readings(options)]


def _take_roles(p: Parts) -> _Roles:
    """The inputs by the part that they play."""
    logits = p.maybe(r"(routing|router|gating)_?(logits|output)|logits", 2)
    ids = ("" if logits
           else p.take(r"topk_(ids|indices)|expert_(ids|indices)|(token_)?selected_experts",
                                    "how tokens are routed (routing_logits, or topk_ids)", 2))
    gate = (p.maybe(r"w1|w_gate|gate_(proj|weights?)", 3)
            if _has(p.definition, r"w3|w_up|up_(proj|weights?)") else "")
    return _Roles(
        p.take(r"hidden_states|x|inputs?", "hidden states (hidden_states)", 2),
        p.take(r"w3|w_up|up_(proj|weights?)" if gate
               else r"gemm1_weights?|w13?(_weights?)?|fc1(_expert)?_weights?|"
               r"gate_up(_proj|_weights?)?|w_gate_up", "the weights of gate and up (gemm1_weights)",
               3),
        p.take(
            r"gemm2_weights?|w2(_weights?)?|fc2(_expert)?_weights?|down(_proj|_weights?)?|w_down",
            "the weights of down (gemm2_weights)", 3),
        logits, ids, p.maybe(r"topk_weights|routing_weights|expert_weights|token_final_scales", 2),
        p.maybe(r"(routing|correction|e_score_correction)_?bias"),
        p.maybe(r"hidden_states_scales?|x_scales?|input_scales?"),
        p.maybe(r"(gemm1_weights?|w13|w1|fc1|gate_up)_scales?(_inv)?"),
        p.maybe(r"(gemm2_weights?|w2|fc2|down)_scales?(_inv)?"), p.maybe(r"output1_scales_scalar"),
        p.maybe(r"output1_scales_gate_scalar"), p.maybe(r"output2_scales_scalar"),
        p.maybe(r"(local_)?expert_(offset|start)|local_expert_offset"),
        p.maybe(r"routed_scaling_factor"), gate)


def _has(definition: Definition, pattern: str) -> bool:
    return any(re.fullmatch(pattern, name.lower()) for name in definition.inputs)


def _quantized(p: Parts, roles: _Roles) -> bool:
    return any(p.spec(name).dtype.startswith("float8")
               for name in (roles.x, roles.first, roles.second))


_Options = dict[str, tuple[Any, ...]]
_GROUPS = r"n(um)?_(expert_)?groups?"


def _add(options: _Options, statements: dict[str, Statement], name: str,
         statement: Statement | None, values: tuple[Any, ...]) -> None:
    options[name] = values
    if statement is not None:
        statements[name] = statement


def _top_k(p: Parts) -> tuple[Statement | None, tuple[int, ...]]:
    """How many experts a token has: an axis, else the text; then what the reference names."""
    pattern = r"(num_)?top_?k|num_experts_per_tok(en)?"
    axis = next((n for a, n in p.definition.const_axes.items() if re.fullmatch(pattern, a)), None)
    statement = (Statement(axis, "its axes say") if axis is not None
                 else number_said(p.definition, r"top[ -]?k[ =]?(\d+)"))
    count = constant(p.definition, pattern)
    values = first_choice(statement, *(() if count is None else (count,)))
    if not values:
        raise p.unmapped(
            "how many experts a token has is told neither by a const axis top_k nor by the "
            "reference")
    return statement, values


def _groups(p: Parts) -> tuple[Statement | None, tuple[tuple[int, int], ...]]:
    """(groups, groups that are kept): the text, const axes, or constants of the reference."""
    d = p.definition
    counts = (number_said(d, r"\bng(\d+)\b") or number_said(d, r"n group ?=? ?(\d+)")
              or number_said(d, r"\b(\d+) groups"))
    kept = (number_said(d, r"\bkg(\d+)\b") or number_said(d, r"top ?k group ?=? ?(\d+)")
            or number_said(d, r"groups, (\d+) of them"))
    statement = (Statement((counts.value, kept.value), counts.source) if counts and kept else None)
    named = (constant(d, _GROUPS),
             constant(d, r"(top_?k|num_limited|limited)_groups?"))
    if statement is None and all(named) and any(re.fullmatch(_GROUPS, a.lower())
                                                for a in d.const_axes):
        statement = Statement(named, "its axes say")
    values = first_choice(statement, *((named,) if all(named) else ()))
    if not values and any(re.search(r"(^| )groups?\b", plain(n)) for n in identifiers(d)):
        raise p.unmapped("its reference chooses among groups of experts, and neither its text nor "
                         "an axis or constant says how many (n_group, topk_group)")
    # one that forgets the groups is told apart from one that is wrong otherwise
    return statement, first_choice(statement, *values, (1, 1)) if statement else (values
                                                                                  or ((1, 1),))


def _transposed(p: Parts, roles: _Roles) -> bool:
    """Are the weights stored as (experts, inputs, outputs)?"""
    hidden, first = p.shape(roles.x)[-1], p.shape(roles.first)
    if hidden == first[2] and hidden != first[1]:
        return False
    if hidden == first[1] and hidden != first[2]:
        return True
    raise p.unmapped(
        f"{roles.first} ({', '.join(first)}) must have the axis {hidden!r} of {roles.x} once")


def _options(p: Parts, roles: _Roles) -> tuple[_Options, dict[str, Statement]]:
    """What the schema leaves open, and what the text says of it. The weights of a mixture are on
    the results of its experts, unless the text says otherwise."""
    definition, text = p.definition, text_of(p.definition)
    deepseek = bool(roles.factor and roles.bias)
    fused = re.search(r"gemm1|fc1", roles.first) is not None
    options: _Options = {}
    statements: dict[str, Statement] = {}
    on = said(definition, WEIGHT_ON, convention="output")
    _add(options, statements, "weight_on", on, first_choice(on, "output", "input"))
    act = said(definition, ACTIVATION, convention="swiglu")
    if re.search("gelu|relu|geglu", text):
        _add(options, statements, "activation", act, first_choice(act, "swiglu"))
    who = mentions(definition, r"\bcapacity")
    if who:
        raise p.unmapped(f"{who} speaks of a capacity of experts, which lz.moe is not given here")
    if roles.gate:
        options["gate_first"] = (True,)
        statements["gate_first"] = Statement(True, "its inputs say")
    else:
        named = ("gate" in roles.first and "up" in roles.first) or None
        order = said(definition, GATE, roles.first, convention=False if fused else named)
        _add(options, statements, "gate_first", order, first_choice(order, True, False))
    if roles.logits:
        # FlashInfer's "renormalize" is a softmax of the chosen logits
        scoring = (said(definition, SCORING)
                   or said(definition, ((r"renorm", "softmax"),))
                   or said(definition, SCORES, convention="sigmoid" if deepseek else None))
        likely = ("sigmoid", "softmax") if "sigmoid" in text else ("softmax", "sigmoid")
        _add(options, statements, "scoring", scoring, first_choice(scoring, *likely))
        summed = (said(definition, NORMALIZED)
                  or said(definition, NORMALIZING, convention=True if deepseek else None))
        _add(options, statements, "normalize", summed, first_choice(summed, True, False))
    if roles.bias:
        bias = said(definition, BIAS, convention="choice" if deepseek else None)
        _add(options, statements, "bias", bias, first_choice(bias, "choice", "ignored"))
    return options, statements


def _routed(x: Inputs, roles: _Roles, reading: Mapping[str, Any], top_k: int,
            groups: tuple[int, int]
            ) -> tuple[Tensor, Tensor]:
    """The experts of each token, and their weights."""
    if not roles.ids:
        bias = x[roles.bias].float().reshape(-1) if reading.get("bias") == "choice" else None
        routed = lz("moe_gate", logits=x[roles.logits].float(), top_k=top_k,
                    scoring=reading["scoring"], normalize=reading["normalize"], n_group=groups[0],
                    topk_group=groups[1], e_score_correction_bias=bias,
                    routed_scaling_factor=float(number(x, roles.factor, 1.0)))
        return routed[0], routed[1]
    if roles.weights:
        return x[roles.ids].long(), x[roles.weights]
    # the expert in the high half, its weight as bfloat16 in the low one
    packed = x[roles.ids]
    weights = (packed & 0xFFFF).to(torch.int32)
    bits = torch.where(weights >= 1 << 15, weights - (1 << 16), weights).to(torch.int16)
    return (packed >> 16).long(), bits.view(torch.bfloat16)


def _used(ids: Tensor, offset: int, experts: int) -> tuple[Tensor, Tensor]:
    """Which of our experts serve a token, and the ids as places among these; -1 for another
    device's. So only weights that are needed are dequantized."""
    local = ids - offset
    mine = (local >= 0) & (local < experts)
    used = local[mine].unique()
    if not used.numel():
        used = torch.zeros(1, dtype=torch.int64, device=ids.device)
    return used, torch.where(mine, torch.searchsorted(used, local.contiguous()), -1)


def _plain(x: Inputs, name: str, scale: str, transposed: bool) -> Tensor:
    return (dequantized(x, name, scale, transposed) if scale or x[name].dtype.itemsize == 1
            else x[name])


def _of(x: Inputs, name: str, scale: str, used: Tensor, transposed: bool) -> Tensor:
    """The weights of some experts, (experts, outputs, inputs), as numbers."""
    stored = x[name]
    weights = (stored.view(torch.uint8)[used].view(stored.dtype) if stored.dtype.itemsize == 1
               else stored[used])
    if scale:
        scales = x[scale][used] if x[scale].dim() else x[scale]
        weights = dequantized({"w": weights, "s": scales}, "w", "s")
    elif weights.dtype.itemsize == 1:
        weights = weights.float()
    return weights.transpose(1, 2).contiguous() if transposed else weights


def _scaled_results(x: Inputs, roles: _Roles, used: Tensor, first: Tensor, second: Tensor,
                    gate_first: bool
                    ) -> tuple[Tensor, Tensor]:
    """One factor for an expert's up, its gate and its result: the weights carry them."""
    if roles.up_scale or roles.gate_scale:
        up, gate = (x[n][used].float() if n else torch.ones(len(used), device=first.device)
                    for n in (roles.up_scale, roles.gate_scale or roles.up_scale))
        halves = (gate, up) if gate_first else (up, gate)
        factors = torch.stack(halves, 1).repeat_interleave(first.shape[1] // 2, 1)
        first = first.float() * factors[..., None]
    if roles.out_scale:
        second = second.float() * x[roles.out_scale][used].float()[:, None, None]
    return first, second
