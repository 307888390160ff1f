"""Faults of layers in uses that are rare: the check that meets each, and names of a few."""

from __future__ import annotations

from typing import Any

import pytest
from layer_use_faults import LAYER_USE_FAULTS

from layerzero.verify.certification.certify import certify
from layerzero.verify.certification.circumstances.backward_circumstances import (
    backward_checks,
    check_between,
)
from layerzero.verify.certification.circumstances.dtype_circumstances import OtherDtype
from layerzero.verify.certification.second_derivative import check_second_order, is_right_or_raises
from layerzero.verify.certification.unused_places import unused_place_checks
from layerzero.verify.diagnosis.diagnose import CLASSES, diagnose
from layerzero.verify.kernel.contract import check_case
from layerzero.verify.kernel.gradients import check_gradients, gradient_cases
from layerzero.world import snapshot as worlds

PLANTED = {f.name: f for f in LAYER_USE_FAULTS}
CASES: dict[str, dict[str, Any]] = {
    "pairs_of_no_weight_take_no_place": {"silent": True, "capacity": 2},
    "only_minus_one_is_no_expert": {"padding": True},
    "adds_a_small_number_to_the_sum": {"special": "faint", "scoring": "sigmoid"},
    "no_inputs_have_no_bias": {"k": 0},
    "a_length_that_is_given_is_odd": {"format": "int4", "sized": True},
    "halfway_is_the_code_above": {"format": "nf4", "special": "halves", "given": False},
    "a_scale_of_zero_gives_zeros": {"format": "int8", "special": "dead", "given": True},
    "blocks_of_zeros_have_code_128": {"format": "q8_0", "rows": (2,), "width": 512,
                                      "special": "idle"}}
GRADIENTS: dict[str, dict[str, Any]] = {
    "views_the_gradient_as_rows": {"rows": (2, 7)},
    "masks_the_gradient_of_a_relu_in_place": {"activation": "relu", "bias": False},
    "weights_of_zero_have_no_gradient": {"silent": True}}
BACKWARDS = ("keeps_its_inputs_without_their_version",
             "gradient_of_the_second_bias_needs_the_first")
SECOND = "loses_the_weight_in_a_second_derivative"
UNUSED = ("tokens_of_no_expert_are_multiplied_by_zero",
          "rows_past_the_last_group_are_multiplied_by_zero")
DTYPES: dict[str, tuple[dict[str, Any], str]] = {
    "zero_points_are_integers": ({"format": "int4", "symmetric": False, "group": 32}, "zeros"),
    "half_scales_are_returned_wider": ({"format": "int8", "given": True}, "scales")}


def test_every_fault_has_a_class_and_a_test() -> None:
    assert {kind for f in LAYER_USE_FAULTS for kind in f.kinds} <= CLASSES.keys()
    assert PLANTED.keys() == {*CASES, *GRADIENTS, *BACKWARDS, *UNUSED, *DTYPES, SECOND}


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_the_op_meets_it(name: str) -> None:
    kernel, case = PLANTED[name].kernel(), CASES[name]
    assert case in kernel.op.cases
    failed = check_case(kernel, case, "float32")
    assert failed.status == "failed"
    diagnosis = diagnose(kernel, [failed])
    assert diagnosis is not None
    assert diagnosis.kind in (*PLANTED[name].kinds, "unknown"), diagnosis.says


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_meets_it(name: str) -> None:
    kernel, case = PLANTED[name].kernel(), GRADIENTS[name]
    assert case in gradient_cases(kernel.op)
    failed = check_gradients(kernel, case, "float32")
    assert failed.status == "failed"
    assert {*failed.kinds} <= {*PLANTED[name].kinds}


@pytest.mark.parametrize("name", BACKWARDS)
def test_another_backward_meets_it(name: str) -> None:
    kernel = PLANTED[name].kernel()
    results = [check() for check in backward_checks(kernel, "cpu", "full", 0)]
    assert [r for r in results if r.status == "failed"]
    assert all(r.kinds == ("gradient",) for r in results if r.status == "failed")


def test_a_second_derivative_is_not_wrong_in_silence() -> None:
    kernel = PLANTED[SECOND].kernel()
    results = [check() for check in backward_checks(kernel, "cpu", "full", 0)]
    assert [r.kinds for r in results if r.status == "failed"] == [("gradient",)]
    assert is_right_or_raises(results) is False


@pytest.mark.parametrize("name", UNUSED)
def test_rows_that_nothing_needs_may_be_nan(name: str) -> None:
    kernel = PLANTED[name].kernel()
    failed = [r for check in unused_place_checks(kernel, "cpu", 0)
              if (r := check()).status == "failed"]
    assert {r.kinds for r in failed} == {("not finite",)}


@pytest.mark.parametrize("name", DTYPES)
def test_another_dtype_meets_it(name: str) -> None:
    kernel, (case, tensor) = PLANTED[name].kernel(), DTYPES[name]
    assert check_case(kernel, case, "float32").passed
    other = OtherDtype(tensor, "float16")
    assert check_case(kernel, case, "float32", circumstance=other).status == "failed"


@pytest.mark.parametrize("name", ["masks_the_gradient_of_a_relu_in_place",
                                  "keeps_its_inputs_without_their_version"])
def test_a_verdict_names_it(name: str) -> None:
    verdict = certify(PLANTED[name].kernel(), seeds=(0,), stop_early=True)
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.kind in PLANTED[name].kinds


@pytest.mark.parametrize("name", ["torch.linear", "torch.mlp", "torch.moe_experts",
                                  "torch.grouped_loop", "torch.dequantized_linear"])
def test_sound_backwards_pass(name: str) -> None:
    kernel = next(k for k in worlds.current().catalog.kernels if k.id == name)
    case = gradient_cases(kernel.op)[0]
    assert check_gradients(kernel, case, "float32").passed
    second = check_second_order(kernel, case, "float32")
    assert second.passed and is_right_or_raises([second]) is True
    assert check_between(kernel, case, "float32").passed


def test_gradients_are_asked_for_with_every_word() -> None:
    op = PLANTED["no_inputs_have_no_bias"].op
    words = {case["activation"] for case in op.cases if "activation" in case}
    assert words <= {case.get("activation") for case in gradient_cases(op)}
