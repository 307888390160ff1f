"""What is wrong where two things meet, which are right by themselves."""

from __future__ import annotations

import pytest
import torch
from meeting_faults import MEETING_FAULTS

from layerzero.spec.kernel import Kernel
from layerzero.verify.cases.octaves import bulk_calls
from layerzero.verify.cases.pairs import long_sums
from layerzero.verify.certification.calls import check_sizes
from layerzero.verify.certification.certify import certify
from layerzero.verify.certification.circumstances.content_circumstances import tensor_checks
from layerzero.verify.certification.circumstances.grad_circumstances import long_sum_checks
from layerzero.verify.certification.circumstances.half_range import check_beyond_range
from layerzero.verify.certification.circumstances.row_circumstances import alike_checks
from layerzero.verify.kernel.contract import case_tensors, check_case
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
    "what_nobody_expects_is_accepted", "tried_tokens_stay_tried",
    "a_window_beyond_the_keys_is_none", "the_target_has_the_dtype_of_the_draft",
    "values_have_no_more_bits_than_keys", "chunks_begin_within_the_buffer", "splits_count_distances_anew",
    "a_mask_is_causal_by_its_ends", "words_are_known_by_their_beginning"])
def test_a_case_of_the_op_meets_it(name: str) -> None:
    kernel = planted(name)
    dtype = "int64" if not kernel.op.tensors else "float32"
    results = [check_case(kernel, case, dtype) for case in (*kernel.op.cases, *kernel.op.stress)]
    assert "failed" in [r.status for r in results]
    assert [r.status for r in results].count("passed") > len(results) // 2


@pytest.mark.parametrize("name", [
    "pages_in_a_row_by_their_ends", "lengths_alike_by_the_first_and_last",
    "routes_by_the_first_half"])
def test_rows_that_are_alike_in_part_meet_it(name: str) -> None:
    kernel = planted(name)
    cells = [(case, kernel.op.dtypes[0]) for case in kernel.op.cases]
    for seed in (0, 1):
        results = [check() for check in alike_checks(kernel, cells, "cpu", seed)]
        assert "failed" in [r.status for r in results]
        assert [r.status for r in results].count("passed") > len(results) // 2


def test_a_sum_of_two_loud_numbers_is_not_clamped() -> None:
    kernel = planted("sums_saturate")
    assert check_beyond_range(kernel, {}, "float16", all_loud=True).status == "failed"
    sound = worlds.current().catalog.by_id["reference.add_rms_norm"]
    assert check_beyond_range(sound, {}, "float16", all_loud=True).status == "passed"


def test_vectors_begin_anywhere() -> None:
    kernel = planted("a_bias_is_loaded_aligned")
    results = [check() for check in tensor_checks(
        kernel, [(case, "float32") for case in kernel.op.cases], "cpu", 0)]
    assert {r.circumstance for r in results if r.status == "failed"} == {"bias offset"}


def test_far_from_zero_the_weights_of_parts_keep_their_digits() -> None:
    op = worlds.current().catalog.by_id["reference.merge_attention"].op
    values = op.inputs(level=-1e9, spread=200.0, dtype=torch.float64)
    shifted = {**values, "lses": values["lses"] + 1e9}     # exactly: both are near -1e9
    assert torch.allclose(op.reference(**values)[0], op.reference(**shifted)[0], 0.0, 1e-12)


def test_gradients_of_before_are_the_callers() -> None:
    kernel = planted("padding_is_cleared_in_the_sum_of_gradients")
    result = check_gradients(kernel, {"padding": 1}, "float32")
    assert result.status == "failed" and result.kinds == ("in-place change",)
    assert check_gradients(kernel, {}, "float32").status == "passed"


def test_long_sums_are_asked_of_every_tensor() -> None:
    by_id = worlds.current().catalog.by_id
    for name, tensor in (("linear_cross_entropy", "bias"), ("mlp", "bias_in"), ("moe", "logits")):
        op = by_id[f"reference.{name}"].op
        long = [values for case in long_sums(op, "quick", 0)
                if (values := case_tensors(op, case, "float32")).get(tensor) is not None]
        assert long and all(values[op.main_tensor].shape[0] > 256 for values in long)


def test_weights_of_float32_have_gradients_of_float32() -> None:
    kernel = planted("rows_are_added_in_their_own_dtype")
    sound = worlds.current().catalog.by_id["reference.rms_norm"]
    checks = [*long_sum_checks(kernel, "cpu", "quick", 0)]
    assert all(c.func(sound, *c.args[1:], **c.keywords).status == "passed" for c in checks)
    wide = [c for c in checks if c.keywords.get("wide_weights")]
    assert wide and "failed" in [c().status for c in wide]


def test_arguments_meet_millions_of_numbers() -> None:
    kernel = planted("the_largest_of_the_first_65536")
    calls = [c for c in bulk_calls(kernel.op, 0) if c[0].get("granularity") == "tensor"][:4]
    result = check_sizes(kernel, "millions", calls, "float32")
    assert result.status == "failed" and result.case["granularity"] == "tensor"
    sound = worlds.current().catalog.by_id["reference.quantize"]
    assert check_sizes(sound, "millions", calls, "float32").status == "passed"


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
