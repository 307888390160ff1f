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
from ..readings import Parts, constant, likely, readings, text_of
from .answer import Answer, Inputs, Outputs, lz, number, with_reading
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
    logits = p.maybe(r"(routing|router|gating)_?(logits|output)|logits", 2)
    ids = ("" if logits
           else p.take(r"topk_(ids|indices)|expert_(ids|indices)|(token_)?selected_experts",
                                    "how tokens are routed (routing_logits, or topk_ids)", 2))
    gate = (p.maybe(r"w1|w_gate|gate_(proj|weights?)", 3)
            if _has(definition, r"w3|w_up|up_(proj|weights?)") else "")
    roles = _Roles(
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
    count_inputs = {name: p.maybe(pattern) for name, pattern in (
        ("top_k", r"top_?k"), ("n_group", r"n_group"), ("topk_group", r"topk_group"))}
    for pattern in (r"num_experts", r"num_local_experts", r"routing_method_type"):
        p.maybe(pattern)                       # the axes and the reference say it
    p.done()
    (out,) = p.outputs((r"o|out|y|output|hidden_states_out", "the mixture"))
    top_k = 0 if count_inputs["top_k"] else _top_k(p, roles)
    groups = _groups(definition)
    transposed, x_transposed = _transposed(p, roles), scales_are_transposed(p, roles.x,
                                                                            roles.x_scale)

    def compute(x: Inputs, reading: Mapping[str, Any]) -> Outputs:
        counts = tuple(int(number(x, count_inputs[n], d))
                       for n, d in zip(count_inputs, (top_k, *groups)))
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
                    weight_on=reading["weight_on"])
        return {out: result}

    names = (roles.x, roles.first, roles.second, "experts of " + (roles.logits or roles.ids))
    ops = (*(("moe_gate",) if logits else ()), *(("dequantize",) if _quantized(p, roles) else ()),
           "moe")
    parts = {**vars(roles), "out": out, "top_k": top_k, "groups": groups, "transposed": transposed,
             "x_transposed": x_transposed, "count_inputs": count_inputs}
    text = f"lz.moe({', '.join(names)})"
    return [Answer(definition, ops, text, with_reading(compute, reading), reading, "moe", parts)
            for reading in _readings(definition, roles)]


def _has(definition: Definition, pattern: str) -> bool:
    return any(re.fullmatch(pattern, name.lower()) for name in definition.inputs)


def _quantized(p: Parts, roles: _Roles) -> bool:
    return any(p.spec(name).dtype.startswith("float8")
               for name in (roles.x, roles.first, roles.second))


def _top_k(p: Parts, roles: _Roles) -> int:
    if roles.ids:
        return 0
    count = constant(p.definition, r"(num_)?top_?k|num_experts_per_tok(en)?")
    if count is None:
        tag = re.search(r"top_?k_?(\d+)", " ".join((*p.definition.tags, p.definition.description,
                                                    p.definition.name)).lower())
        count = int(tag[1]) if tag else None
    if count is None:
        raise p.unmapped(
            "how many experts a token has is told neither by a const axis top_k nor by the "
            "reference")
    return count


def _groups(definition: Definition) -> tuple[int, int]:
    """(groups, groups that are kept): const axes, or constants of the reference."""
    groups = constant(definition, r"n(um)?_(expert_)?groups?")
    kept = constant(definition, r"(top_?k|num_limited|limited)_groups?")
    return (groups, kept) if groups and kept else (1, 1)


def _transposed(p: Parts, roles: _Roles) -> bool:
    """Are the weights stored as (experts, inputs, outputs)?"""
    hidden, first = p.shape(roles.x)[-1], p.shape(roles.first)
    if hidden == first[2] and hidden != first[1]:
        return False
    if hidden == first[1] and hidden != first[2]:
        return True
    raise p.unmapped(
        f"{roles.first} ({', '.join(first)}) must have the axis {hidden!r} of {roles.x} once")


def _readings(definition: Definition, roles: _Roles) -> list[dict[str, Any]]:
    text = text_of(definition)
    llama4 = re.search(r"llama.?4|routing_method_type=3", text) is not None
    on_input = (llama4
                or re.search(
                    r"scale[ds]? (at|the|on)? ?input|applied to (the )?input|scales_on_input=true",
                    text))
    deepseek = roles.factor and roles.bias
    sigmoid = deepseek or llama4 or re.search(r"sigmoid", text)
    separate = bool(roles.gate)
    gate_first = separate or re.search(r"gemm1|fc1", roles.first) is None
    raw = re.search(r"routing_method_type=0|softmax ?-> ?top|without renorm|no renorm",
                    text) is not None
    options: dict[str, tuple[Any, ...]] = {
        "weight_on": likely("input" if on_input else "output", "output", "input"),
        "gate_first": (True,) if separate else likely(bool(gate_first), True, False)}
    if roles.logits:
        options["scoring"] = likely("sigmoid" if sigmoid else "softmax", "softmax", "sigmoid")
        options["normalize"] = likely(not (raw or (llama4 and not deepseek)), True, False)
    if roles.bias:
        options["bias"] = likely("ignored" if llama4 else "choice", "choice", "ignored")
    if roles.ids and not roles.weights:
        return [{"packed": True, **r} for r in readings(options)]
    return readings(options)


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
