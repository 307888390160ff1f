"""Faults of backwards alone: the check that meets each, and the name that a verdict gives."""

from __future__ import annotations

from typing import Any

import pytest
from gradient_faults import GRADIENT_FAULTS

from layerzero.verify.certification.circumstances.backward_circumstances import (
    SomeZeros,
    altered_gradient_checks,
    check_added,
    check_between,
)
from layerzero.verify.certification.circumstances.call_circumstances import (
    OtherDefaultDtype,
    OtherThreadCount,
)
from layerzero.verify.certification.gradient_calls import (
    check_gradient_calls,
    gradient_call_checks,
)
from layerzero.verify.diagnosis.diagnose import CLASSES, diagnose
from layerzero.verify.kernel.gradients import check_gradients
from layerzero.verify.kernel.output_grads import HALF_LOSSES, LEFT_OUT, SMALL_LOSS
from layerzero.world import snapshot as worlds

PLANTED = {f.name: f for f in GRADIENT_FAULTS}
# the call that meets it, and how it is asked for
ASKED: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "columns_behind_the_last_tile_have_no_gradient": ({"hidden": 1100}, "float32", {}),
    "sixteen_groups_have_a_gradient": ({"sizes": (1, 2) * 9, "k": 4, "n": 3}, "float32", {}),
    "frozen_inputs_leave_the_bias_without_a_gradient": ({}, "float32", {"only": "weight and bias"}),
    "first_row_of_no_weight_ends_the_backward": ({"reduction": "none"}, "float32",
                                                 {"of": LEFT_OUT}),
    "leaves_out_small_gradients": ({}, "float32", {"of": SMALL_LOSS}),
    "sum_alone_has_no_residual_without_a_weight": ({"affine": False}, "float32", {"source": 1}),
    "softcap_beside_a_window_has_another_derivative": (
        {"softcap": 5.0, "window": (3, 0), "causal": True}, "float32", {}),
    "has_the_input_back_from_the_result": ({}, "float32", {"altered": SomeZeros()}),
    "sums_scaled_gradients_in_half": ({"hidden": 1024}, "float16", {"of": HALF_LOSSES[1]}),
    "each_thread_adds_up_as_many_rows": ({}, "float32", {"altered": OtherThreadCount(3)}),
    "adds_up_in_the_default_dtype": ({}, "float32", {"altered": OtherDefaultDtype()}),
    "one_part_is_the_result_where_gradients_are_recorded": ({"parts": 1}, "float32", {})}
ADDED, GONE = "adds_to_the_gradient_by_itself", "holds_its_input_weakly"


def test_every_fault_has_a_class_and_a_test() -> None:
    assert {kind for f in GRADIENT_FAULTS for kind in f.kinds} <= CLASSES.keys()
    assert PLANTED.keys() == {*ASKED, ADDED, GONE}


@pytest.mark.parametrize("name", ASKED)
def test_the_call_meets_it(name: str) -> None:
    kernel, (case, dtype, asked) = PLANTED[name].kernel(), ASKED[name]
    failed = check_gradients(kernel, case, dtype, **asked)
    assert failed.status == "failed"
    diagnosis = diagnose(kernel, [failed])
    assert diagnosis is not None
    assert diagnosis.kind in (*PLANTED[name].kinds, "unknown"), diagnosis.says


@pytest.mark.parametrize("name", ["frozen_inputs_leave_the_bias_without_a_gradient",
                                  "first_row_of_no_weight_ends_the_backward",
                                  "leaves_out_small_gradients",
                                  "sum_alone_has_no_residual_without_a_weight",
                                  "columns_behind_the_last_tile_have_no_gradient"])
def test_many_calls_meet_it(name: str) -> None:
    kernel = PLANTED[name].kernel()
    assert any(check().status == "failed" for check in gradient_call_checks(kernel, "cpu", 0))


def test_gradients_are_added_once() -> None:
    kernel = PLANTED[ADDED].kernel()
    assert check_gradients(kernel, {}, "float32").kinds == ("in-place change",)
    assert check_added(kernel, {}, "float32").status == "failed"


def test_a_backward_holds_what_it_needs() -> None:
    kernel = PLANTED[GONE].kernel()
    assert check_gradients(kernel, {}, "float32").passed
    assert check_between(kernel, {}, "float32").status == "failed"


@pytest.mark.parametrize("name", ["torch.rms_norm", "torch.linear", "torch.cross_entropy"])
def test_sound_backwards_pass(name: str) -> None:
    kernel = next(k for k in worlds.current().catalog.kernels if k.id == name)
    results = [check() for check in altered_gradient_checks(kernel, "cpu", 0)]
    assert not [str(r) for r in results if r.status == "failed"]
    assert any(r.passed for r in results)
    cases = [[case] for case in kernel.op.cases]
    assert check_gradient_calls(kernel, "each case", cases, "float32").passed
