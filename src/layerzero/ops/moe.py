"""A mixture of gated feed-forward experts: the weighted sum of the results of each token's experts.

out[t] = sum over slots k of weight[t, k] * down_e(act(gate_e(x[t])) * up_e(x[t])), e = topk_ids[t,
k].

`w_gate_up` is (experts, 2 * inner, hidden), the rows of the gate first, then those of up
(gate_first=False: the other way round); `w_down` is (experts, hidden, inner). The routing is given
as topk_ids and topk_weights (from lz.moe_gate), or as `logits` and `top_k`, which are routed by
softmax or sigmoid without groups. Ids outside [expert_offset, expert_offset + experts) belong to
another device and contribute nothing here; nor does an id below zero. capacity > 0: an expert
serves at most `capacity` (token, slot) pairs, the first in token order, those of weight zero too;
dropped pairs contribute nothing, and the other weights are unchanged. weight_on="input" (Llama 4):
the weight scales the expert's input instead of its result. The ids of a token are distinct. Results
are summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.mistake import Mistake, Values
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import at_least, dtypes, one_of
from .formulas.common import FLOATS, READS_ON_HOST
from .formulas.mistakes import ACTIVATIONS, ROUTED, off_by, replace_argument
from .formulas.moe import activate_gated, assign_experts, check_routing, route

Activation = Literal["swiglu", "geglu", "geglu_tanh", "reglu"]


def reference(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None, *, logits: Tensor | None = None, top_k: int = 0,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True, activation: Activation = "swiglu", gate_first: bool = True,
    expert_offset: int = 0, capacity: int = 0, weight_on: Literal["output", "input"] = "output",
) -> Tensor:
    """Runs each token through its experts and sums the results by weight."""
    if logits is not None:
        topk_ids, topk_weights = route(logits, top_k, scoring, normalize, 1, 1, None, 1.0)
    assert topk_ids is not None and topk_weights is not None
    experts, slots = w_gate_up.shape[0], topk_ids.shape[-1]
    experts_of_slots = assign_experts(topk_ids, experts, expert_offset,
                                      capacity).reshape(-1, slots).tolist()
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    tokens, weights = x.reshape(-1, x.shape[-1]), topk_weights.reshape(-1, slots)
    rows, zeros = [], torch.zeros(x.shape[-1], dtype=acc_dtype, device=x.device)
    for t, slots_of_token in enumerate(experts_of_slots):
        row = zeros
        for slot, e in enumerate(slots_of_token):
            if e == experts:
                continue
            weight = weights[t, slot].to(acc_dtype)
            token = (tokens[t] if weight_on == "output"
                     else (tokens[t].to(acc_dtype) * weight).to(x.dtype))
            inner = activate_gated(w_gate_up[e] @ token, activation, gate_first)
            out = (w_down[e] @ inner).to(acc_dtype)
            row = row + (out * weight if weight_on == "output" else out)
        rows.append(row)
    return torch.stack(rows).to(x.dtype).reshape(x.shape) if rows else torch.zeros_like(x)


def meta(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.new_empty(x.shape)


def inputs(
    rows: tuple[int, ...] = (6,), experts: int = 4, hidden: int = 32, inner: int = 24,
    top_k: int = 2, activation: str = "swiglu", gate_first: bool = True, by: str = "ids",
    scoring: str = "softmax", normalize: bool = True, offset: int = 0, others: int = 0,
    capacity: int = 0, weight_on: str = "output",
    favourite: bool = False, padding: bool = False, silent: bool = False, index: str = "int64",
    weight_dtype: str = "", stride: str = "",
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """`others`: experts on other devices; `favourite`: every token chooses expert 1 first;
    `padding`: tokens of no expert, and slots of none, whose id is -1, or below; `silent`: slots of
    weight zero. Of thousands of tokens one in 64 has experts, and the last four: the formula takes
    one pair at a time."""
    gen = torch.Generator("cpu").manual_seed(seed)

    def rand(*shape: int, by: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=gen) * by).to(device=device, dtype=dtype)

    x = rand(*rows, 2 * hidden)[..., ::2] if stride == "sparse" else rand(*rows, hidden)
    logits = torch.randn((*rows, experts + others), generator=gen)
    if favourite:
        logits[..., 1] += 20.0
    arguments: dict[str, Any] = {
        "x": x, "w_gate_up": rand(experts, 2 * inner, hidden, by=1 / math.sqrt(hidden)),
        "w_down": rand(experts, hidden, inner, by=1 / math.sqrt(inner)), "activation": activation,
        "gate_first": gate_first, "expert_offset": offset, "capacity": capacity,
        "weight_on": weight_on}
    if by == "logits":
        return {**arguments, "logits": logits.to(device), "top_k": top_k, "scoring": scoring,
                "normalize": normalize}
    ids, weights = route(logits, top_k, scoring, normalize, 1, 1, None, 1.0)
    weights = weights.to(getattr(torch, weight_dtype)) if weight_dtype else weights
    if silent:
        weights.view(-1)[::3] = 0.0
    if padding:
        ids[..., -1:][::2], ids[-1:] = -1, -1
        ids[..., -1:][:1] = -2
    if math.prod(rows) > 4_096 and not capacity:
        idle = torch.arange(math.prod(rows)) % 64 != 0
        idle[-4:] = False
        ids = ids.masked_fill(idle.view(*rows, 1), -1)
    return {**arguments, "topk_ids": ids.to(device=device, dtype=getattr(torch, index)),
            "topk_weights": weights.to(device)}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"top_k": 1}, {"top_k": 4}, {"experts": 1, "top_k": 1}, {"experts": 16, "rows": (3,)},
    {"rows": (1,)}, {"rows": ()}, {"rows": (0,)}, {"rows": (2, 5)},
    {"rows": (40,), "experts": 8, "top_k": 3}, {"by": "logits"},
    {"by": "logits", "scoring": "sigmoid", "normalize": False}, {"favourite": True},
    {"activation": "geglu"}, {"activation": "geglu_tanh"}, {"activation": "reglu"},
    {"gate_first": False}, {"index": "int32"}, {"padding": True}, {"silent": True},
    {"silent": True, "capacity": 2},
    {"padding": True, "offset": 1, "others": 3, "rows": (9,)}, {"offset": 2, "others": 4},
    {"offset": 4, "others": 4, "rows": (9,)}, {"capacity": 1}, {"capacity": 3, "rows": (12,)},
    {"capacity": 2, "favourite": True}, {"capacity": 2, "others": 4, "offset": 1, "top_k": 3},
    {"weight_on": "input", "top_k": 1},
    {"weight_on": "input", "scoring": "sigmoid", "normalize": False},
    {"weight_on": "input", "offset": 2, "others": 4}, {"weight_dtype": "bfloat16"},
    {"stride": "sparse"}, {"hidden": 17, "inner": 9}, {"hidden": 64, "inner": 128},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    check_routing("moe", values["topk_ids"], values["topk_weights"], values["logits"])
    if values["logits"] is not None and not 1 <= values["top_k"] <= facts["routed"]:
        raise InvalidCall.of("moe", Reason(
            Code.VALUE_OUT_OF_RANGE,
            f"between 1 and {facts['routed']}, the experts that logits speak of",
            values["top_k"], "top_k"))
    if facts["wide"] != 2 * facts["inner"]:
        raise InvalidCall.of("moe", Reason(
            Code.DIM_MISMATCH, f"{2 * facts['inner']} (the rows of gate and up)", facts["wide"],
            "w_gate_up.shape[1]"))


def _negative_ids(last: bool) -> Callable[[Any, Values], Values | None]:
    """An id that means no expert taken for one."""
    def apply(op: Any, v: Values) -> Values | None:
        ids = v["topk_ids"]
        if ids is None or not bool((ids < 0).any()) or not len(v["w_gate_up"]):
            return None
        expert = v["expert_offset"] + (len(v["w_gate_up"]) - 1 if last else 0)
        return {**v, "topk_ids": ids.masked_fill(ids < 0, expert)}

    return apply


MISTAKES: tuple[Mistake, ...] = (
    replace_argument("capacity", "the capacity ignored", "capacity", 0),
    replace_argument("capacity", "one token more than the capacity", "capacity",
                     off_by("capacity", 1)),
    replace_argument("capacity", "one token fewer than the capacity", "capacity",
                     off_by("capacity", -1)),
    replace_argument("convention", "gate and up exchanged", "gate_first",
                     lambda v: not v["gate_first"]),
    replace_argument("convention", "expert_offset ignored", "expert_offset", 0), *ROUTED[:2],
    *ROUTED[3:], *ACTIVATIONS[4:],
    Mistake("convention", "-1 taken for the last expert", _negative_ids(last=True)),
    Mistake("convention", "-1 taken for the first expert", _negative_ids(last=False)),
    replace_argument("scale", "the weight on the other side of the expert", "weight_on",
                     lambda v: "input" if v["weight_on"] == "output" else "output"))

STRESS: tuple[dict[str, Any], ...] = (
    *({"by": "logits", "top_k": 1, "scoring": scoring, "normalize": normalize}
      for scoring in ("softmax", "sigmoid") for normalize in (True, False)),
    {"experts": 300, "hidden": 4, "inner": 3, "rows": (9,)},
    # places within an expert that no 16-bit float counts
    {"rows": (2_200,), "experts": 1, "top_k": 1, "hidden": 2, "inner": 2, "capacity": 2_100},
    # places of pairs beyond 2^16, among all and within one expert
    {"rows": (8_320,), "experts": 16, "top_k": 8, "hidden": 8, "inner": 8},
    {"rows": (66_001,), "top_k": 1, "hidden": 2, "inner": 2, "favourite": True, "capacity": 3})

OP = Op(
    name="moe", family="moe", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS,
    mistakes=MISTAKES,
    reference_kernel=READS_ON_HOST,
    tolerance=Tolerance({"float16": (2e-3, 2e-3), "bfloat16": (2e-2, 2e-2), "float32": (2e-5, 2e-5),
                         "float64": (1e-6, 1e-6)}),       # routing weights are float32
    shapes={"x": "*rows hidden", "w_gate_up": "experts wide hidden",
            "w_down": "experts hidden inner", "topk_ids": "*rows slots",
            "topk_weights": "*rows slots", "logits": "*rows routed"},
    returns=("*rows hidden",), same_dtype=("x", "w_gate_up", "w_down"),
    exact=("hidden", "wide", "inner", "experts", "slots", "routed", "top_k"),
    ranges={"top_k": INT32, "expert_offset": INT32, "capacity": INT32},
    requires=(
        dtypes(*FLOATS), at_least("experts", 1, Code.EMPTY_INPUT),
        at_least("inner", 1, Code.EMPTY_INPUT),
        one_of("topk_ids.dtype", None, "int32", "int64", code=Code.DTYPE_UNSUPPORTED),
        one_of("topk_weights.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
        one_of("logits.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
        at_least("capacity", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("top_k", 0, Code.VALUE_OUT_OF_RANGE),
    ),
    derived={"pairs": "rows * max(top_k, 1)"},
    flops="6 * pairs * hidden * inner",
    bytes="itemsize * (3 * experts * hidden * inner + 2 * rows * hidden)",
    differentiable=("x", "w_gate_up", "w_down", "topk_weights", "logits"), extra_check=extra_check,
    autocast="lower",
)
