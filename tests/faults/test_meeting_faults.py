"""What is wrong where two things meet, which are right by themselves."""

from __future__ import annotations

import pytest
from meeting_faults import MEETING_FAULTS

from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.certify import certify
from layerzero.verify.certification.circumstances.half_range import check_beyond_range
from layerzero.verify.kernel.contract import check_case
from layerzero.verify.kernel.gradients import check_gradients
from layerzero.world import snapshot as worlds

PLANTED = {fault.name: fault for fault in MEETING_FAULTS}


def planted(name: str) -> Kernel:
    return PLANTED[name].kernel()


@pytest.mark.parametrize("name", [
    "shared_pages_are_seen_whole", "values_have_the_dtype_of_keys",
    "chosen_in_the_dtype_of_the_bias", "every_negative_parent_is_the_root",
    "added_tokens_are_text", "the_maximum_is_that_before_a_negative_scale",
    "pixels_are_taken_for_dense", "parts_of_a_projection_are_rotated_in_place",
    "the_second_best_is_smaller", "the_draft_has_the_dtype_of_the_target",
    "parts_far_below_are_empty", "the_slope_times_infinity", "the_next_token_has_17_bits",
    "the_first_chunk_is_smoothed", "a_mark_at_the_beginning_vanishes",
    "the_first_chunk_tells_the_sequence", "halves_of_one_tensor_begin_with_the_gate",
    "what_nobody_expects_is_accepted", "tried_tokens_stay_tried"])
def test_a_case_of_the_op_meets_it(name: str) -> None:
    kernel = planted(name)
    dtype = "int64" if not kernel.op.tensors else "float32"
    results = [check_case(kernel, case, dtype) for case in (*kernel.op.cases, *kernel.op.stress)]
    assert "failed" in [r.status for r in results]
    assert [r.status for r in results].count("passed") > len(results) // 2


def test_a_sum_of_two_loud_numbers_is_not_clamped() -> None:
    kernel = planted("sums_saturate")
    assert check_beyond_range(kernel, {}, "float16", all_loud=True).status == "failed"
    sound = worlds.current().catalog.by_id["reference.add_rms_norm"]
    assert check_beyond_range(sound, {}, "float16", all_loud=True).status == "passed"


def test_a_gradient_of_roundings_is_not_asked_for() -> None:
    kernel = worlds.current().catalog.by_id["torch.sdpa"]
    lowest = {"mask": "dead_lowest", "sq": 9, "sk": 17}
    assert check_gradients(kernel, lowest, "float32").status == "skipped"
    assert check_gradients(kernel, {**lowest, "mask": "lowest"}, "float32").status == "passed"


def test_padding_meets_a_small_eps_in_half() -> None:
    kernel = planted("eps_has_the_dtype_of_the_input")
    results = {repr(case): check_case(kernel, case, "float16").status for case in kernel.op.cases}
    assert [case for case, status in results.items() if status == "failed"] == [
        repr({"padding": True, "eps": 1e-12})]


def test_nothing_is_lost_where_all_gradients_are_empty() -> None:
    kernel = planted("one_group_after_the_other")
    assert check_gradients(kernel, {"k": 0}, "float32").status == "passed"
    assert check_gradients(kernel, {}, "float32").status == "passed"


@pytest.mark.parametrize("name", ["equal_bounds_are_self_attention",
                                  "every_negative_parent_is_the_root",
                                  "values_are_found_among_scaled_keys",
                                  "the_residual_is_written_over_the_target",
                                  "distances_have_16_bits", "preparedforallglobalscales",
                                  "foundbybeginningandend", "keptuntilthebackward",
                                  "all_is_scaled_by_infinity"])
def test_it_is_named_rightly(name: str) -> None:
    verdict = certify(planted(name), lane="quick", seeds=(0,), stop_early=True)
    assert verdict.status == "failed" and verdict.diagnosis
    assert verdict.diagnosis.kind in (*PLANTED[name].kinds, "unknown")
