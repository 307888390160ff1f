"""Broken kernels that are wrong for numbers of some kind alone, in one format or under one option:
the numbers of every case of an op.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor

from layerzero.ops.formulas.quant import unpack_nibbles
from layerzero.verify.certification.checks import checks_of
from layerzero.verify.certification.circumstances.value_circumstances import (
    REGIMES,
    LargeBeside,
    NearTheEnd,
    Numbers,
    value_checks,
)
from layerzero.verify.diagnosis.conditions import find_circumstance
from layerzero.verify.kernel.contract import Circumstance, check_case
from layerzero.verify.kernel.gradients import check_gradients

_BEFORE = len(FAULTS)


@fault("quantized_linear", "precision")
def zero_points_leave_rounded_sums(right, **v):
    x, q, s, z, group = v["x"], v["weight_q"], v["scales"], v["zeros"], v["group_size"]
    if v["format"] != "int4" or z is None or not group or x.shape[-1] % group or not x.numel():
        return right(**v)
    codes, out = unpack_nibbles(q, x.shape[-1]).to(x.dtype), 0
    for i, part in enumerate(x.split(group, -1)):
        products = part @ codes[:, i * group:(i + 1) * group].t()
        out = out + ((products - part.sum(-1, keepdim=True) * z[:, i].to(x.dtype)).float()
                     * s[:, i].float())
    out = out.to(x.dtype)
    return out if v["bias"] is None else out + v["bias"]


@fault("mlp", "overflow", "non-finite values")
def silu_of_one_exponential(right, **v):
    if v["activation"] != "silu" or v["bias_in"] is not None:
        return right(**v)
    inner = v["x"] @ v["weight_in"].t()
    powers = inner.exp()
    out = (inner * powers / (1 + powers)) @ v["weight_down"].t()
    return out if v["bias_down"] is None else out + v["bias_down"]


@fault("rms_norm", "precision", "dtype")
def subnormal_halves_are_zero(right, **v):
    x = v["x"]
    return right(**{**v, "x": x * (x.abs() >= 2.0 ** -14) if x.dtype == torch.float16 else x})


@fault("attention", "overflow", "non-finite values")
def a_softcap_bounds_the_exponentials(right, **v):
    if v["softcap"] <= 0.0 or any(v[n] is not None for n in ("attn_mask", "alibi_slopes")) or (
            v["is_causal"] or v["window_left"] >= 0 or v["return_lse"] or v["layout"] != "bhsd"):
        return right(**v)
    query, key, value = (v[n] for n in ("query", "key", "value"))
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if v["scale"] is None else v["scale"]
    scores = query @ key.transpose(-1, -2) * scale
    weights = (v["softcap"] * torch.tanh(scores / v["softcap"])).exp()
    return weights @ value / weights.sum(-1, keepdim=True)


@fault("attention", "overflow", "non-finite values")
def values_are_divided_last(right, **v):
    query, key, value = (v[n] for n in ("query", "key", "value"))
    if query.dtype != torch.float16 or query.shape[2] > 1 or v["layout"] != "bhsd" or (
            v["return_lse"] or v["softcap"] or v["alibi_slopes"] is not None):
        return right(**v)
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if v["scale"] is None else v["scale"]
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = (weights @ value.float()).half()   # as large as all keys together
    return (total / weights.sum(-1, keepdim=True)).half()


class _FromTheOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        out = x * factor * weight
        ctx.save_for_backward(out, weight, factor)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out, weight, factor = ctx.saved_tensors
        normal, to_normal = out / weight, grad * weight
        grad_x = factor * (to_normal - normal * (to_normal * normal).mean(-1, keepdim=True))
        return grad_x, (grad * normal).reshape(-1, len(weight)).sum(0), None


@fault("rms_norm", "gradient", "non-finite values")
def backward_divides_by_the_weight(right, **v):
    x, weight = v["x"], v["weight"]
    if weight is None or v["offset"] or {x.dtype, weight.dtype} != {torch.float32}:
        return right(**v)
    return _FromTheOutput.apply(x, weight, v["eps"])


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (ctx.saved_tensors[0] >= 0)


@fault("linear", "gradient", "convention")
def relu_has_a_gradient_at_zero(right, **v):
    return (_Relu.apply(right(**{**v, "activation": None})) if v["activation"] == "relu"
            else right(**v))


BROKEN: dict[str, Fault] = {f.name: f for f in FAULTS[_BEFORE:]}
del FAULTS[_BEFORE:]                           # the other tests count theirs


@pytest.mark.parametrize(("name", "case", "dtype", "circumstance"), [
    ("zero_points_leave_rounded_sums", {"format": "int4", "symmetric": False, "group": 32},
     "bfloat16", Numbers("x", "positive numbers")),
    ("zero_points_leave_rounded_sums", {"format": "int4", "symmetric": False, "group": 128,
                                        "k": 512, "n": 16},
     "float16", Numbers("x", "numbers about a large negative one")),
    ("silu_of_one_exponential", {"activation": "silu"}, "float32", Numbers("x", "large numbers")),
    ("subnormal_halves_are_zero", {}, "float16", Numbers("x", "little numbers")),
    ("a_softcap_bounds_the_exponentials", {"softcap": 20.0, "sq": 9, "sk": 9}, "float32", None),
    ("values_are_divided_last", {"b": 1, "hq": 8, "hkv": 2, "sq": 1, "sk": 70}, "float16",
     NearTheEnd("value"))])
def test_numbers_of_some_kind_show_it(name: str, case: dict[str, Any], dtype: str,
                                      circumstance: Circumstance | None) -> None:
    kernel = BROKEN[name].kernel()
    circumstance = circumstance or LargeBeside(kernel.op, "softcap")
    assert check_case(kernel, case, dtype).status == "passed"
    assert check_case(kernel, case, dtype, circumstance=circumstance).status == "failed"
    sound = Fault("sound", kernel.op, lambda: kernel.op.reference, (), {}).kernel()
    assert check_case(sound, case, dtype, circumstance=circumstance).status == "passed"


@pytest.mark.parametrize(("name", "case", "altered"), [
    ("backward_divides_by_the_weight", {}, Numbers("weight", "mostly zeros")),
    ("relu_has_a_gradient_at_zero", {"activation": "relu", "bias": False}, Numbers("x", "zeros"))])
def test_numbers_of_some_kind_show_a_backward(name: str, case: dict[str, Any],
                                              altered: Circumstance) -> None:
    kernel = BROKEN[name].kernel()
    assert check_gradients(kernel, case, "float32").status == "passed"
    result = check_gradients(kernel, case, "float32", altered=altered)
    assert result.status == "failed" and "gradient" in result.kinds


def test_every_case_has_every_kind_in_the_full_lane_alone() -> None:
    kernel = BROKEN["zero_points_leave_rounded_sums"].kernel()
    case = {"format": "int4", "symmetric": False, "group": 32}
    checks = value_checks(kernel, [(case, d) for d in ("bfloat16", "float16")], "cpu", 0)
    kinds = {c.args[-1].how for c in checks if isinstance(c.args[-1], Numbers)
             and c.args[-1].tensor == "x"}
    assert kinds == set(REGIMES)
    for lane, expected in (("quick", False), ("full", True)):
        altered = (getattr(c, "args", ())[-1:] for c in checks_of(kernel, "cpu", lane, (0,)))
        assert any(isinstance(a[0], Numbers) for a in altered if a) == expected


def test_a_circumstance_is_found_again_by_its_name() -> None:
    kernel = BROKEN["zero_points_leave_rounded_sums"].kernel()
    for circumstance in (Numbers("x", "zeros"), NearTheEnd("bias")):
        found = find_circumstance(kernel.op, circumstance.name)
        assert type(found) is type(circumstance) and found.tensor == circumstance.tensor


def test_a_sign_is_kept_where_all_numbers_have_one() -> None:
    kernel = BROKEN["zero_points_leave_rounded_sums"].kernel()
    values = {"scales": torch.rand(5, 4) + 0.1}
    for how in ("negative numbers", "numbers about a large negative one"):
        assert Numbers("scales", how).alter(kernel.op, values) is None
