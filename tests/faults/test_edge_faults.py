"""Faults at the edges of numbers and sizes, and in how a kernel is used: each mechanism that finds
or names some of them; benchmarks/planted_faults.py --set edges runs all.
"""

from __future__ import annotations

from typing import Any

import pytest
from edge_faults import EDGE_FAULTS
from use_faults import USE_FAULTS

from layerzero.verify.cases.pairs import case_by_case_sizes
from layerzero.verify.certification.calls import check_sizes
from layerzero.verify.certification.circumstances.argument_circumstances import (
    AllStrided,
    ChangedInPart,
    OneBuffer,
)
from layerzero.verify.certification.circumstances.call_circumstances import (
    ChangedParameters,
    OtherDefaultDtype,
    OtherThreadCount,
    UnusualValues,
)
from layerzero.verify.certification.circumstances.row_circumstances import LoudElement
from layerzero.verify.certification.dropout import check_dropout
from layerzero.verify.certification.non_finite import check_non_finite
from layerzero.verify.diagnosis.diagnose import CLASSES
from layerzero.verify.kernel.contract import Circumstance, check_case
from layerzero.verify.kernel.gradients import check_gradients

EDGES = {f.name: f for f in (*USE_FAULTS, *EDGE_FAULTS)}


def test_every_fault_is_another_and_has_a_class() -> None:
    assert len(EDGES) == len(USE_FAULTS) + len(EDGE_FAULTS) >= 90
    assert {kind for f in EDGES.values() for kind in f.kinds} <= CLASSES.keys()


@pytest.mark.parametrize(("name", "case", "dtype", "circumstance"), [
    ("values_of_a_packed_kv_are_its_keys", {"sq": 9, "sk": 9}, "float32", OneBuffer()),
    ("strided_cache_beside_a_plain_query", {"sq": 9, "sk": 9}, "float32",
     AllStrided("sparse", "query")),
    ("packedparameter", {}, "float32", ChangedParameters()),
    ("scalesofafrozenweight", {}, "float32", ChangedInPart("scales")),
    ("groupsbythenumberofrows", {}, "float32", ChangedInPart("group_sizes")),
    ("itemsbytheiraddress", {}, "float32", ChangedInPart("items")),
    ("planbythenumberoftokens", {}, "float32", ChangedInPart("cu_seqlens_q")),
    ("wrong_with_more_than_eight_threads", {}, "float32", OtherThreadCount(12)),
    ("losses_in_the_default_dtype", {}, "float32", OtherDefaultDtype()),
    ("maximum_of_a_row_starts_at_zero", {}, "float32", UnusualValues("numbers far below zero")),
    ("softplus_overflows", {}, "float32", LoudElement("dt")),
    ("weight_is_moved_to_other_memory", {}, "float32", Circumstance()),
    ("returns_a_tuple_of_one", {}, "float32", Circumstance()),
    ("patches_softmax", {"sq": 9, "sk": 9}, "float32", Circumstance()),
    ("uniform_of_zero_takes_the_first_token", {"special": "masked", "random": "edges"}, "float32",
     Circumstance()),
    ("seeds_in_32_bits", {"random": "seed_rows"}, "float32", Circumstance()),
    ("closed_groups_get_zero", {"n_group": 4, "topk_group": 2, "bias": True, "special": "below"},
     "float32", Circumstance()),
    ("halves_round_away_from_zero", {"special": "halves"}, "float32", Circumstance()),
    ("first_tile_hidden_by_the_mask_is_nan", {"mask": "left_padding", "sq": 7, "sk": 65},
     "float32", Circumstance()),
    ("first_chunk_of_minus_infinity_is_nan", {"masked": "first", "vocab": 400}, "float32",
     Circumstance())])
def test_it_is_found(name: str, case: dict[str, Any], dtype: str,
                     circumstance: Circumstance) -> None:
    assert check_case(EDGES[name].kernel(), case, dtype, circumstance=circumstance).status == (
        "failed")
    if circumstance.name:
        assert check_case(EDGES[name].kernel(), case, dtype).status == "passed"


@pytest.mark.parametrize(("name", "options", "kind"), [
    ("backward_needs_both_gradients", {"source": 1}, "gradient"),
    ("backward_seeds_torch", {}, "global state"),
    ("onebufferforallgradients", {}, "aliasing"),
    ("gradient_is_written_over_the_logits", {}, "in-place change")])
def test_its_backward_is_found(name: str, options: dict[str, Any], kind: str) -> None:
    result = check_gradients(EDGES[name].kernel(), {}, "float32", **options)
    assert result.status == "failed" and kind in result.kinds


@pytest.mark.parametrize("name", ["backward_drops_other_weights", "packed_backward_drops_nothing"])
def test_the_mask_of_a_backward_is_that_of_its_forward(name: str) -> None:
    result = check_dropout(kernel := EDGES[name].kernel(), kernel.op.dropout_case, "float32")
    assert result.status == "failed" and result.kinds == ("distribution",)


@pytest.mark.parametrize("name", ["one_row_path_forgets_the_activation",
                                  "one_row_path_forgets_the_last_bias"])
def test_a_path_for_one_row_has_its_arguments(name: str) -> None:
    kernel = EDGES[name].kernel()
    sizes = case_by_case_sizes(kernel.op, "quick", 0)
    assert check_sizes(kernel, "each case", sizes, "float32").status == "failed"


@pytest.mark.parametrize(("name", "case"), [
    ("minus_infinity_becomes_zero", {}), ("nan_weights_count_as_one", {}),
    ("nan_in_the_first_state_is_zero", {"state": True})])
def test_numbers_that_are_not_finite_are_seen(name: str, case: dict[str, Any]) -> None:
    assert check_non_finite(EDGES[name].kernel(), case, "float32").kinds == ("not finite",)
