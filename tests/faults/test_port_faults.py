"""Faults of ported and fused kernels: each mechanism that finds or names some of them;
benchmarks/planted_faults.py --set ports runs all.
"""

from __future__ import annotations

from typing import Any

import pytest
from edge_faults import EDGE_FAULTS
from fusion_faults import FUSION_FAULTS
from port_faults import PORTED_ATTENTION_FAULTS

from layerzero.verify.cases.covering import (
    cells_without_tensors,
    effective_cells,
    sized_combinations,
)
from layerzero.verify.cases.pairs import pair_cases
from layerzero.verify.certification.calls import check_sizes
from layerzero.verify.diagnosis.diagnose import CLASSES, diagnose
from layerzero.verify.kernel.contract import check_case
from layerzero.verify.kernel.gradients import check_gradients, has_plain_gradients
from layerzero.world import snapshot as worlds

PORTS = {f.name: f for f in (*PORTED_ATTENTION_FAULTS, *FUSION_FAULTS)}
ALL = {**PORTS, **{f.name: f for f in EDGE_FAULTS}}


def test_every_fault_is_another_and_has_a_class() -> None:
    assert len(PORTS) == len(PORTED_ATTENTION_FAULTS) + len(FUSION_FAULTS) >= 75
    assert {kind for f in PORTS.values() for kind in f.kinds} <= CLASSES.keys()


@pytest.mark.parametrize("name", ["kernel_for_head_dim_128_has_no_softcap_when_causal",
                                  "pages_of_32_forget_the_key_scale",
                                  "global_scale_twice_for_one_row"])
@pytest.mark.filterwarnings("ignore::layerzero.spec.errors.CausalAlignmentWarning")
def test_a_size_beside_arguments_is_met(name: str) -> None:
    """Not every seed meets each three of them: that of head dim 128 is met by three of ten."""
    kernel = ALL[name].kernel()
    met = (check_sizes(kernel, "tiles", sized_combinations(kernel, "cpu", "quick", seed),
                       "float32", "cpu", seed).status for seed in range(4))
    assert "failed" in met


def test_two_arguments_are_in_effect_together() -> None:
    """Of six seeds five meet these."""
    kernel = PORTS["right_window_dropped_with_chunks"].kernel()
    assert any(check_case(kernel, case, dtype).status == "failed" for seed in range(3)
               for case, dtype in (*pair_cases(kernel, "cpu", "quick", seed).cells,
                                   *effective_cells(kernel, "cpu", "quick", seed)))


@pytest.mark.parametrize("name", ["padding_to_a_multiple_adds_a_whole_one",
                                  "special_tokens_of_tensors_are_kept"])
def test_arguments_of_text_are_met_together(name: str) -> None:
    kernel = ALL[name].kernel()
    cells = [*((case, "int64") for case in kernel.op.cases),
             *cells_without_tensors(kernel, "cpu", "quick", 0)]
    assert any(check_case(kernel, case, dtype).status == "failed" for case, dtype in cells)


@pytest.mark.parametrize("name", ["ignored_rows_pull_to_class_zero",
                                  "bias_gradient_counts_ignored_rows"])
def test_gradients_of_pairs_of_arguments(name: str) -> None:
    kernel = PORTS[name].kernel()
    results = [check_gradients(kernel, case, "float32")
               for seed in range(3) for case, _ in pair_cases(kernel, "cpu", "quick", seed).cells
               if has_plain_gradients(kernel.op, case, "float32")]
    assert any(r.status == "failed" and "gradient" in r.kinds for r in results)


def test_where_the_formula_has_no_gradient_none_is_asked_for() -> None:
    op = PORTS["ignored_rows_pull_to_class_zero"].op
    assert has_plain_gradients(op, {}, "float32")
    assert not has_plain_gradients(op, {"ignored": "all"}, "float32")


@pytest.mark.parametrize(("name", "case", "dtype"), [
    ("distances_in_bfloat16", {"heads": 2, "sq": 300, "sk": 300}, "bfloat16"),
    ("keys_of_the_sequence_after_an_empty_one",
     {"lengths_q": (4, 0, 9), "lengths_k": (7, 5, 20), "hkv": 2}, "float32"),
    ("expert_minus_one_is_the_last", {"padding": True}, "float32")])
def test_a_case_shows_it(name: str, case: dict[str, Any], dtype: str) -> None:
    kernel = PORTS[name].kernel()
    assert case in kernel.op.cases
    assert check_case(kernel, case, dtype).status == "failed"


@pytest.mark.parametrize(("name", "cases", "kind"), [
    ("groups_of_heads_by_a_shift", [{"hq": 6, "hkv": 2}, {"hq": 14, "hkv": 2}, {"hkv": 2}],
     "head map"),
    ("state_of_chunks_in_bfloat16", [{"s": 130}, {"s": 20}], "precision"),
    ("scale_by_the_head_dim_of_values", [{"dv": 48}, {"dv": 80}, {}], "scale"),
    ("queries_before_the_first_key_see_all",
     [{"sq": 9, "sk": 5, "causal": True, "align": "bottom_right"}, {}], "unknown")])
def test_it_is_named(name: str, cases: list[dict[str, Any]], kind: str) -> None:
    kernel = PORTS[name].kernel()
    results = [check_case(kernel, case, "float32") for case in cases]
    diagnosis = diagnose(kernel, results)
    assert diagnosis is not None and diagnosis.kind == kind, diagnosis


@pytest.mark.parametrize("name", ["torch.cross_entropy", "torch.merge_attention", "torch.rms_norm",
                                  "torch.grouped_loop"])
def test_a_sound_kernel_passes_all_of_it(name: str) -> None:
    kernel = worlds.current().catalog.by_id[name]
    results = [check_sizes(kernel, "tiles", sized_combinations(kernel, "cpu", "quick", 0),
                           "float32")]
    results += [check_case(kernel, case, dtype)
                for case, dtype in effective_cells(kernel, "cpu", "quick", 0)]
    results += [check_gradients(kernel, case, "float32")
                for case, _ in pair_cases(kernel, "cpu", "quick", 0).cells
                if has_plain_gradients(kernel.op, case, "float32")]
    assert [str(r) for r in results if r.status == "failed"] == []
    assert any(r.passed for r in results)
