"""Ends of splits, numbers that are off by default, lengths that numpy writes, caches by the number
of tokens, another default dtype, and what such kernels are told."""

from __future__ import annotations

import pytest
import torch
from split_faults import SPLIT_FAULTS

import layerzero as lz
from layerzero.spec.kernel import Kernel
from layerzero.verify.cases.chosen_cells import most_tensors_first, with_a_size_of_one
from layerzero.verify.cases.generated import small_stress
from layerzero.verify.cases.pairs import model_sizes, ones_beside_arguments
from layerzero.verify.cases.span_sizes import optional_size_calls, span_calls
from layerzero.verify.certification.calls import check_sizes
from layerzero.verify.certification.certify import certify
from layerzero.verify.certification.checks import size_checks
from layerzero.verify.certification.circumstances.argument_circumstances import ChangedInPart
from layerzero.verify.certification.circumstances.call_circumstances import Expanded
from layerzero.verify.certification.circumstances.content_circumstances import (
    RowWrittenUnseen,
    WrittenUnseen,
    content_checks,
    tensor_checks,
)
from layerzero.verify.certification.circumstances.grad_circumstances import check_long_sums
from layerzero.verify.certification.circumstances.mode_checks import (
    CHANGED,
    check_changes,
    mode_checks,
)
from layerzero.verify.certification.circumstances.row_circumstances import OtherLayout
from layerzero.verify.certification.circumstances.use_circumstances import after_inference_checks
from layerzero.verify.certification.growth import (
    TOKENS,
    check_leaks_of_cases,
    check_other_contents,
)
from layerzero.verify.certification.interrupted import interrupted_by_calls
from layerzero.verify.certification.non_finite import check_non_finite, non_finite_cells
from layerzero.verify.diagnosis.doubts import doubt_about
from layerzero.verify.diagnosis.reruns.boundary_reruns import explain_by_boundaries
from layerzero.verify.diagnosis.reruns.kept_reruns import keeps_all_results
from layerzero.verify.diagnosis.reruns.size_reruns import explain_by_bits
from layerzero.verify.kernel.contract import (
    CaseResult,
    case_tensors,
    case_values,
    check_case,
    formula,
    load_once,
)
from layerzero.verify.kernel.gradients import check_gradients
from layerzero.verify.kernel.judging import same
from layerzero.world import snapshot as worlds

PLANTED = {fault.name: fault for fault in SPLIT_FAULTS}
CATALOG = worlds.current().catalog.by_id


def planted(name: str) -> Kernel:
    return PLANTED[name].kernel()


@pytest.mark.parametrize(("name", "calls"), [
    ("single_queries_take_causal_for_no_mask", ones_beside_arguments),
    ("a_split_hidden_from_a_query_is_divided_by_zero", span_calls)])
def test_sizes_that_meet_are_called(name: str, calls) -> None:
    kernel = planted(name)
    results = [check_sizes(kernel, "these", calls(kernel.op, "quick", seed), "float32")
               for seed in range(3)]
    assert "failed" in [r.status for r in results]


@pytest.mark.parametrize("name", ["chunks_are_found_by_a_reciprocal",
                                  "places_are_counted_in_16_bits"])
def test_a_case_of_the_op_meets_it(name: str) -> None:
    kernel = planted(name)
    assert "failed" in [check_case(kernel, case, "bfloat16").status for case in kernel.op.stress
                        if case.keys() & {"chunks", "capacity"}]


@pytest.mark.parametrize(("name", "sizes"), [
    ("torch.grouped_separate", {"chunk", "dv"}), ("torch.moe_experts", {"capacity", "offset"}),
    ("torch.sample_sort", {"top_k"}), ("torch.rope", {"rotary"})])
def test_numbers_that_are_off_by_default_are_sizes_too(name: str, sizes: set[str]) -> None:
    kernel = CATALOG[name]
    calls = optional_size_calls(kernel.op, "quick", 0)
    given = {n: {call[n] for calls in calls for call in calls if n in call} for n in sizes}
    assert all(len(numbers) >= 6 for numbers in given.values()), given
    result = check_sizes(kernel, "these", calls, "float32")
    assert result.passed, str(result)


def test_lengths_are_written_as_numpy_writes_them() -> None:
    kernel = planted("planofthesamelengths")
    assert check_case(kernel, {}, "float32").passed
    changed = ChangedInPart("context_lens")
    assert check_case(kernel, {}, "float32", circumstance=changed).status == "failed"
    assert check_case(CATALOG["torch.mla_paged_matmul"], {}, "float32",
                      circumstance=changed).passed


def test_another_default_dtype_beside_a_few_hundred() -> None:
    kernel = planted("sums_of_many_parts_in_the_default_dtype")
    results = [check() for check in mode_checks(kernel, "float32", "cpu", "quick", 0)]
    assert [r for r in results if r.status == "failed"
            and "set_default_dtype" in r.circumstance]
    assert torch.get_default_dtype() == torch.float32


def test_a_workspace_for_every_number_of_rows_is_a_leak() -> None:
    kernel = planted("workspaceforeverynumberofrows")
    for rows in range(1, 260):                 # as many as other checks have called by then
        load_once(kernel)(torch.ones(rows, 64), torch.ones(48, 64))
    found = check_other_contents(kernel, {}, "float32", other=TOKENS, limit_s=5.0)
    assert found.kinds == ("leak",), str(found)


def test_every_other_part_of_a_stack() -> None:
    kernel = planted("groups_follow_each_other_in_memory")
    assert check_case(kernel, {}, "float32").passed
    spaced = OtherLayout("weights", "spaced")
    assert check_case(kernel, {}, "float32", circumstance=spaced).status == "failed"


def test_ties_of_16_bits_are_named() -> None:
    kernel = planted("equal_scores_go_to_the_lower_lane")
    failed = [r for seed in range(8)
              if (r := check_case(kernel, {"experts": 64}, "bfloat16", seed=seed)).status
              == "failed"]
    kind, _ = explain_by_boundaries(kernel, failed, "cpu") or ("", "")
    assert kind == "ties"


def test_a_context_that_is_cut_is_no_overflow() -> None:
    kernel = planted("at_most_64_parts_of_512")
    case = {"context": (33_000,), "page_size": 64, "hq": 1, "hkv": 1, "d": 8}
    failed = check_case(kernel, case, "float32")
    assert failed.status == "failed"
    kind, says = explain_by_bits(kernel, [failed], "cpu") or ("", "")
    assert kind == "sizes" and "nothing beyond 32768 is read" in says


def test_of_a_tensor_that_few_cases_give_more_than_one_element_is_strided() -> None:
    kernel = planted("sizes_are_read_without_their_stride")
    cells = iter([({"sizes": (7,)}, "float32"), ({"sizes": (3, 4)}, "float32")])
    assert most_tensors_first(kernel.op, cells, "cpu", 0)[0][1][0] == {"sizes": (3, 4)}
    strided = OtherLayout("group_sizes", "sparse")
    assert check_case(kernel, {}, "float32", circumstance=strided).status == "failed"


def test_an_output_that_its_own_node_keeps() -> None:
    kernel, case = planted("its_node_keeps_an_output"), {"activation": "relu", "bias": False}
    assert "leak" in check_gradients(kernel, case, "float32").kinds
    assert check_gradients(CATALOG["torch.linear"], case, "float32").passed


def test_equal_texts_have_lists_of_their_own() -> None:
    kernel, case = planted("equal_texts_share_a_list"), {"text": (1, 2, 1)}
    assert check_case(kernel, case, "float32").kinds == ("aliasing",)
    assert check_case(CATALOG["reference.tokenize"], case, "float32").passed


def test_what_16_bit_weights_become_in_inference_mode() -> None:
    failed = [r for check in after_inference_checks(planted("wideweightsofinferencemode"), "cpu",
                                                    "quick", 0) if (r := check()).kinds]
    assert {r.dtype for r in failed} == {"bfloat16"} and {r.kinds for r in failed} == {("mode",)}


def test_long_calls_are_such_as_the_contract_allows() -> None:
    kernel = CATALOG["torch.dequantize"]       # a width that is no multiple of a format's block
    results = [check() for check in mode_checks(kernel, "float32", "cpu", "full", 0)]
    assert not [str(r) for r in results if r.status == "failed"]


def test_grouped_mm_takes_expanded_weights() -> None:
    kernel = CATALOG["torch.grouped_mm"]
    results = [check_case(kernel, {"transposed": True}, "bfloat16",
                          circumstance=Expanded("weights", dim)) for dim in (0, 1)]
    if all(r.reasons for r in results):
        pytest.skip(str(results[0]))           # torch before 2.9 has none
    assert [r.status for r in results] == ["passed", "passed"]


def test_sizes_are_called_in_16_bits_too() -> None:
    kernel = planted("wide_rows_of_16_bits_lose_their_tail")
    results = [check() for check in size_checks(kernel, "float32", "bfloat16", "cpu", "quick", 0)]
    assert {r.dtype for r in results if r.status == "failed"} == {"bfloat16"}


def test_what_one_argument_leaves_behind() -> None:
    kernel = planted("keepsnarrowedtables")
    # what other threads of the process free meanwhile may hide a leak of a few objects
    tries = (check_leaks_of_cases(kernel, kernel.op.cases[:8], "float32") for _ in range(4))
    found = next((result for result in tries if not result.passed), None)
    assert found is not None and found.kinds == ("leak",) and found.case == {"heads": 1, "table": "int64"}, str(found)
    sound = CATALOG["torch.mla_paged_matmul"]
    assert check_leaks_of_cases(sound, sound.op.cases[:8], "float32").passed


def test_no_call_of_many_sizes_returns_its_input() -> None:
    kernel = planted("long_rows_are_scaled_where_they_are")
    found = check_sizes(kernel, "these", [[{"hidden": 100}], [{"hidden": 101}]], "float32")
    assert {"in-place change"} <= set(found.kinds), str(found)


@pytest.mark.parametrize("name", ["one_query_reads_the_mask_of_the_first_head",
                                  "rows_of_a_decode_batch_are_its_sequences",
                                  "lists_of_blocks_end_at_the_first_that_falls"])
def test_one_case_of_the_op_is_wrong(name: str) -> None:
    kernel = planted(name)
    cases = [case for case in (*kernel.op.cases, *small_stress(kernel.op))
             if case.get("sq") == 1 or case.get("mask") == "unsorted"
             or set(case.get("lengths_q", (2,))) <= {0, 1}]
    results = [check_case(kernel, case, "float32") for case in cases]
    assert 0 < [r.status for r in results].count("failed") < len(results)


def test_infinities_in_two_parts() -> None:
    kernel = planted("of_two_parts_one_with_inf_has_no_keys")
    cells = [(case, "float32") for case in kernel.op.cases]
    results = [check_non_finite(kernel, *cell, "cpu", 0)
               for cell in non_finite_cells(kernel, cells, "cpu", 0)]
    assert "failed" in [r.status for r in results]


def test_one_row_of_a_weight_is_no_sample() -> None:
    kernel, sound = planted("packedbysample"), CATALOG["torch.linear"]
    case = {"k": 576, "n": 1536, "rows": (4,)}
    assert check_case(kernel, case, "float32", circumstance=WrittenUnseen()).passed
    failed = check_case(kernel, case, "float32", circumstance=RowWrittenUnseen(0))
    assert failed.status == "failed"
    assert check_case(sound, case, "float32", circumstance=RowWrittenUnseen(0)).passed
    assert any(isinstance(c.args[-1], RowWrittenUnseen) for c in content_checks(sound, "cpu", 0))


def test_each_case_is_called_again_with_other_contents() -> None:
    kernel, sound = planted("foldedoffsetofinferencetensors"), CATALOG["torch.rms_norm"]
    cases = [*kernel.op.cases, *small_stress(kernel.op)]
    found = [check_changes(kernel, cases, "float32", how) for how in CHANGED]
    assert [r.status for r in found] == ["passed", "failed"]
    assert "offset" in found[1].case and "inference mode" in found[1].circumstance
    assert all(check_changes(sound, cases, "float32", how).passed for how in CHANGED)


def test_what_is_looked_up_by_one_of_two_tensors_is_no_matter_of_threads() -> None:
    kernel = planted("fusedbythegate")
    failed = [CaseResult(kernel.id, {"separate": True}, "float32", "failed",
                         circumstance="in turn")]
    assert "one tensor is another" in doubt_about("threads", kernel, failed, "cpu")
    assert not doubt_about("threads", CATALOG["torch.mlp"], failed, "cpu")


def test_sizes_of_models_are_multiples_as_well() -> None:
    op = CATALOG["torch.rms_norm"].op
    widths = [group[0]["hidden"] for seed in range(6) for group in model_sizes(op, seed, "quick")
              if group[0].get("hidden", 0) > 2048]
    multiples = [n % 64 == 0 for n in widths]
    assert len(widths) > 12 and 0.2 < sum(multiples) / len(multiples) < 0.8


def test_zeros_are_fractions() -> None:
    kernel, sound = planted("zeros_are_whole_numbers"), CATALOG["torch.dequantized_linear"]
    cases = [case for case in kernel.op.cases if "zero_dtype" in case]
    assert {check_case(kernel, case, "float32").status for case in cases} == {"failed"}
    assert all(check_case(sound, case, "float32").passed for case in cases)


def test_texts_longer_than_a_part() -> None:
    kernel = planted("long_texts_are_cut_at_a_space")
    assert check_case(kernel, {"text": (20,)}, "float32").passed
    case = {"text": (23, 24), "variant": "spaces"}
    assert check_case(kernel, case, "float32").status == "failed"


def test_a_step_is_interrupted_too() -> None:
    kernel = planted("workspaceofastep")
    cells = [(case, "float32") for case in kernel.op.cases]
    assert with_a_size_of_one(kernel.op, cells, 0)[1][0]["s"] == 1
    found = interrupted_by_calls(kernel, cells, "cpu", "full", 0, {"b": 64})()
    assert found.kinds == ("threads",) and found.case["s"] == 1, str(found)


def test_as_many_tokens_as_sequences_are_no_step() -> None:
    kernel, sound = planted("a_token_for_each_sequence_is_a_step"), CATALOG["torch.mla_paged_matmul"]
    calls = span_calls(kernel.op, "quick", 0)
    assert check_sizes(kernel, "these", calls, "float32").status == "failed"
    assert check_sizes(sound, "these", calls, "float32").passed


def test_buffers_that_are_used_in_turn_are_no_leak() -> None:
    failed = CaseResult("", {}, "float32", "failed")
    assert not keeps_all_results(planted("twobuffersinturn"), [failed], "cpu")


def test_what_is_written_where_gradients_are_recorded() -> None:
    found = certify(planted("its_gradient_is_written_over_the_logits"), stop_early=True).diagnosis
    assert found is not None and found.kind == "in-place change", str(found)


@pytest.mark.parametrize("name", ["items_of_the_same_keys_are_one", "blocks_between_are_visited"])
def test_a_case_alone_is_wrong(name: str) -> None:
    kernel = planted(name)
    results = [check_case(kernel, case, "float32") for case in kernel.op.cases]
    assert 0 < [r.status for r in results].count("failed") < 5


def test_gradients_where_masks_of_heads_differ() -> None:
    kernel, sound = planted("keys_have_gradients_of_the_first_head"), CATALOG["torch.block_sparse_rows"]
    case = next(c for c in kernel.op.gradient_cases if c.get("mask") == "chosen")
    assert "gradient" in check_gradients(kernel, case, "float32").kinds
    assert check_gradients(sound, case, "float32").passed


def test_a_mask_hides_whole_splits() -> None:
    kernel, sound = planted("a_split_that_a_mask_hides_is_divided_by_zero"), CATALOG["torch.sdpa"]
    cases = [case for case in kernel.op.stress if case.get("mask") == "left_padding"]
    assert {check_case(kernel, case, "float32").status for case in cases} == {"failed"}
    assert all(check_case(sound, case, "float32").passed for case in cases)


def test_hundreds_of_items_over_the_same_keys() -> None:
    kernel, sound = planted("keys_are_added_in_half"), CATALOG["reference.grouped_attention"]
    case = max(kernel.op.stress, key=lambda case: len(case.get("items", ())))
    failed = check_long_sums(kernel, case, "bfloat16")
    assert failed.kinds == ("gradient",) and "of key" in failed.detail, str(failed)
    assert check_long_sums(sound, case, "bfloat16").passed


def test_ties_of_the_largest_far_from_each_other() -> None:
    kernel, sound = planted("the_last_tile_wins"), CATALOG["torch.sample_sort"]
    case = next(c for c in kernel.op.stress if c.get("special") == "ties" and not c.get(
        "temperature", 1.0))
    failed = check_case(kernel, case, "float32")
    assert failed.status == "failed" and check_case(sound, case, "float32").passed
    kind, _ = explain_by_boundaries(kernel, [failed], "cpu") or ("", "")
    assert kind == "ties"
    assert "two numbers are equal" in doubt_about("distribution", kernel, [failed], "cpu")


@pytest.mark.parametrize("op", sorted({k.op.name for k in CATALOG.values()}))
def test_every_stress_case_is_a_call(op: str) -> None:
    contract = lz.op(op)
    for case in contract.stress:
        if sum(t.numel() for t in case_tensors(contract, case, contract.dtypes[0]).values()
               ) < 1 << 18:
            assert len(formula(contract, case_values(contract, case, contract.dtypes[0])))


def test_matrices_that_are_others_by_columns() -> None:
    kernel, sound = planted("scales_are_read_as_they_lie"), CATALOG["torch.quantize"]
    cells = [(case, "float32") for case in kernel.op.cases]
    results = [check() for check in tensor_checks(kernel, cells, "cpu", 0)]
    assert {r.circumstance for r in results if r.status == "failed"} == {"scales transposed"}
    assert not [str(r) for check in tensor_checks(sound, cells, "cpu", 0)
                if (r := check()).status == "failed"]


@pytest.mark.parametrize("op", sorted({k.op.name for k in CATALOG.values()}))
def test_formulas_do_not_depend_on_the_default_dtype(op: str) -> None:
    contract = lz.op(op)
    halves = {"quantize": ({"format": "nf4", "special": "halves", "rows": (70,)},)}
    for case in (*contract.cases[::3], *halves.get(op, ())):
        values = case_values(contract, case, contract.dtypes[0])
        with torch.no_grad():
            want = formula(contract, values)
            torch.set_default_dtype(torch.bfloat16)
            try:
                got = formula(contract, values)
            finally:
                torch.set_default_dtype(torch.float32)
        assert all(map(same, got, want)) if contract.tensors else got == want, case
