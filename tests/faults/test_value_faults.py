"""Broken kernels that are wrong for numbers that are not finite alone, in floats and in codes, or
keep what they were given where gradients are recorded.
"""

from __future__ import annotations

import pytest
import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor

from layerzero.verify.certification.certify import certify
from layerzero.verify.certification.non_finite import (
    check_non_finite,
    non_finite_cells,
    non_finite_codes,
)

_BEFORE = len(FAULTS)
KEPT: list[Tensor] = []


def _without_codes(t: Tensor) -> Tensor:
    """Returns stored numbers with the largest finite ones in place of NaN and infinities."""
    codes = t.view(torch.uint8)
    for code in non_finite_codes(t.dtype).view(torch.uint8).tolist():
        codes = torch.where(codes == code, (code & 0x80) | (0x7B if t.dtype == torch.float8_e5m2
                                                            else 0x7E), codes)
    return codes.view(t.dtype)


@fault("dequantize", "non-finite values")
def codes_of_e4m3_that_are_nan_as_480(right, **v):
    return right(**{**v, "q": _without_codes(v["q"]) if v["format"] == "fp8_e4m3" else v["q"]})


@fault("dequantize", "non-finite values")
def codes_of_e5m2_that_are_infinite_as_numbers(right, **v):
    return right(**{**v, "q": _without_codes(v["q"]) if v["format"] == "fp8_e5m2" else v["q"]})


@fault("dequantize", "non-finite values")
def a_scale_of_e8m0_is_always_a_power_of_two(right, **v):
    scales = v["scales"]
    if scales is not None and scales.dtype == torch.float8_e8m0fnu:
        codes = scales.view(torch.uint8)
        v["scales"] = torch.where(codes == 255, 254, codes).view(scales.dtype)
    return right(**v)


@fault("paged_attention", "non-finite values")
def a_cache_of_fp8_without_nan(right, **v):
    if v["key_cache"].dtype == torch.float8_e4m3fn:
        v["key_cache"], v["value_cache"] = map(_without_codes, (v["key_cache"], v["value_cache"]))
    return right(**v)


@fault("quantized_linear", "non-finite values")
def weights_of_fp8_without_nan(right, **v):
    if v["weight_q"].dtype == torch.float8_e4m3fn:
        v["weight_q"] = _without_codes(v["weight_q"])
    return right(**v)


@fault("speculative_verify", "non-finite values")
def a_probability_that_is_nan_is_certain(right, **v):
    probs = v["target_probs"]
    return right(**{**v, "target_probs": torch.where(probs.isnan(), 1.0, probs)})


@fault("sample", "non-finite values")
def greedy_prefers_nan(right, **v):
    out, nan = right(**v), v["logits"].isnan()
    if v["temperature"] != 0.0 or v["temperature_rows"] is not None or not bool(nan.any()):
        return out
    tokens, *rest = out if isinstance(out, tuple) else (out,)
    tokens = torch.where(nan.any(-1), nan.float().argmax(-1), tokens)
    return (tokens, *rest) if rest else tokens


@fault("layer_norm", "leak")
def keeps_every_input_for_a_backward(right, **v):
    if torch.is_grad_enabled() and v["x"].requires_grad:
        KEPT.append(v["x"])
    return right(**v)


@fault("rms_norm", "leak")
def keeps_what_no_backward_asked_for(right, **v):
    """A list of saved inputs that the backward empties, and a call without one does not."""
    out = right(**v)
    if torch.is_grad_enabled() and out.requires_grad:
        KEPT.append(v["x"])
        out.register_hook(lambda _: KEPT.clear())
    return out


VALUES = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # the others have tests of their own


@pytest.mark.parametrize("broken", [f for f in VALUES if "leak" not in f.kinds],
                         ids=lambda f: f.name)
def test_a_call_of_its_own_shows_it(broken: Fault) -> None:
    def sound(right, **v):
        return right(**v)

    fault(broken.op.name)(sound)
    kernel, right = broken.kernel(), FAULTS.pop().kernel()
    cells = list(non_finite_cells(kernel, [(c, "float32") for c in broken.op.cases], "cpu", 0))
    kinds = [[kind for cell in cells for kind in check_non_finite(k, *cell).kinds]
             for k in (kernel, right)]
    assert kinds[0] and set(kinds[0]) <= {"not finite", "error"} and not kinds[1]


@pytest.mark.parametrize("broken", [VALUES[0], *VALUES[-3:]], ids=lambda f: f.name)
def test_it_is_found_and_named(broken: Fault) -> None:
    verdict = certify(broken.kernel(), stop_early=True)
    KEPT.clear()
    assert verdict.status == "failed" and verdict.diagnosis is not None
    assert verdict.diagnosis.kind in broken.kinds, str(verdict.diagnosis)


def test_which_nan_is_routed_to_is_nobodys_rule() -> None:
    """An expert whose score is NaN comes first or last; rows without one are the formula's."""
    def last(right, **v):
        return right(**{**v, "logits": v["logits"].nan_to_num(nan=-torch.inf)})

    def first_expert_beside_infinity(right, **v):
        ids, weights = right(**v)
        finite = ~weights.isnan().any(-1, keepdim=True)
        return torch.where(v["logits"].isinf().any(-1, keepdim=True) & finite, 0, ids), weights

    case = {"scoring": "sigmoid"}
    kinds = []
    for wrong in (last, first_expert_beside_infinity):
        fault("moe_gate")(wrong)
        kinds.append(check_non_finite(FAULTS.pop().kernel(), case, "float32").kinds)
    assert kinds == [(), ("error",)]
