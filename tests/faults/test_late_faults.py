"""Sums of float16 that cancel, results beyond it, gradients over many rows, second derivatives, rows
alone, plans for every division, masks that hid nothing, targets that begin within a tensor."""

from __future__ import annotations

import pytest
from late_faults import LATE_FAULTS

from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.circumstances.backward_circumstances import backward_checks
from layerzero.verify.certification.circumstances.call_circumstances import ReusedPlainMemory
from layerzero.verify.certification.circumstances.half_range import half_range_checks
from layerzero.verify.certification.circumstances.row_circumstances import OtherLayout
from layerzero.verify.certification.growth import LENGTHS, check_other_contents
from layerzero.verify.certification.invariance import check_invariance
from layerzero.verify.kernel.contract import check_case
from layerzero.world import snapshot as worlds

PLANTED = {fault.name: fault for fault in LATE_FAULTS}


def planted(name: str) -> Kernel:
    return PLANTED[name].kernel()


@pytest.mark.parametrize("name", ["halves_of_a_sum_meet_in_16_bits", "infinities_are_clamped"])
def test_numbers_at_the_end_of_float16_meet_it(name: str) -> None:
    assert [r for check in half_range_checks(planted(name), "cpu", 0)
            if (r := check()).status == "failed"]


@pytest.mark.parametrize("name", ["torch.linear", "torch.mlp", "torch.rms_norm", "torch.sdpa"])
def test_sound_kernels_reach_the_end_of_float16(name: str) -> None:
    results = [check() for check in half_range_checks(worlds.current().catalog.by_id[name],
                                                      "cpu", 0)]
    assert results and not [str(r) for r in results if r.status == "failed"]


@pytest.mark.parametrize("name", ["weight_gradient_added_in_its_dtype",
                                  "second_derivative_of_a_constant_scale"])
def test_a_backward_meets_it(name: str) -> None:
    failed = [r for check in backward_checks(planted(name), "cpu", "quick", 0)
              if (r := check()).status == "failed"]
    assert {r.kinds for r in failed} == {("gradient",)}


def test_layer_norm_adds_gradients_of_weights_in_float32() -> None:
    kernel = worlds.current().catalog.by_id["torch.layer_norm"]
    failed = [str(r) for check in backward_checks(kernel, "cpu", "quick", 0)
              if (r := check()).status == "failed"]
    assert not failed


def test_a_row_alone_meets_another_order_of_summing() -> None:
    kernel = planted("few_rows_are_summed_in_another_order")
    results = [check_invariance(kernel, case, "float32", "batch")
               for case in kernel.op.invariance_cases]
    assert "failed" in [r.status for r in results]


@pytest.mark.parametrize(("name", "case"), [
    ("planofeverydivision", {"lengths_q": (3, 4, 5), "lengths_k": (6, 4, 5)}),
    ("planofeverylist", {})])
def test_a_plan_for_every_division_is_a_leak(name: str, case: dict) -> None:
    found = check_other_contents(planted(name), case, "float32", other=LENGTHS, limit_s=5.0)
    assert found.kinds == ("leak",), str(found)


def test_a_mask_that_hid_nothing_is_looked_at_again() -> None:
    kernel = planted("masksthathidenothing")
    case = {"mask": "bool", "sq": 9, "sk": 9}
    assert check_case(kernel, case, "float32").passed
    assert check_case(kernel, case, "float32",
                      circumstance=ReusedPlainMemory()).status == "failed"


def test_before_an_index_that_begins_within_a_tensor_is_another() -> None:
    kernel = planted("targets_read_from_the_aligned_address")
    assert check_case(kernel, {}, "float32").passed
    assert check_case(kernel, {}, "float32",
                      circumstance=OtherLayout("targets", "offset")).status == "failed"
