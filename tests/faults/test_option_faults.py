"""Faults that show for few values of one argument: each mechanism that finds them, and that it does
not accuse what is sound."""

from __future__ import annotations

import resource
from typing import Any

import pytest
from broken_kernels import Fault
from option_faults import OPTION_FAULTS

import layerzero as lz
from layerzero.backends.torch_norm import KERNELS as TORCH_NORMS
from layerzero.spec.kernel import Kernel
from layerzero.verify.cases.chosen_cells import most_tensors_first
from layerzero.verify.certification.circumstances import table_circumstances
from layerzero.verify.certification.circumstances.argument_circumstances import (
    STEP,
    TINY,
    OtherNumber,
    WithoutOthers,
)
from layerzero.verify.certification.circumstances.call_circumstances import Expanded
from layerzero.verify.certification.circumstances.grad_circumstances import (
    check_long_sums,
    long_sum_checks,
)
from layerzero.verify.certification.circumstances.row_circumstances import (
    Narrowed,
    OtherLayout,
    OtherSigns,
)
from layerzero.verify.certification.circumstances.table_circumstances import (
    Table,
    check_long_table,
    long_table_checks,
    tables_in,
)
from layerzero.verify.certification.non_finite import check_non_finite, non_finite_cells
from layerzero.verify.diagnosis.diagnose import CLASSES
from layerzero.verify.kernel.contract import Circumstance, check_case

FAULTS: dict[str, Fault] = {f.name: f for f in OPTION_FAULTS}
SEEDED: dict[str, Any] = {"logprobs": False, "random": "seed"}


def sound(op: str) -> Kernel:
    """Returns the formula as a kernel of no library."""
    contract = lz.op(op)
    return Kernel(f"sound.{op}", contract, lambda: contract.reference,
                  variants=tuple(contract.patterns) if contract.variant else ())


def test_every_fault_is_another_and_has_a_class() -> None:
    assert len(FAULTS) == len(OPTION_FAULTS) >= 30
    assert {kind for f in FAULTS.values() for kind in f.kinds} <= CLASSES.keys()


@pytest.mark.parametrize(("name", "case", "circumstance"), [
    ("scale_of_zero_is_the_default", {"sq": 9, "sk": 9}, OtherNumber("scale", 0.0)),
    ("reading_scale_of_zero_is_the_default", {}, OtherNumber("scale", 0.0)),
    ("factor_of_zero_is_one", {}, OtherNumber("routed_scaling_factor", 0.0)),
    ("eps_of_zero_is_the_default", {}, OtherNumber("eps", 0.0)),
    ("seed_of_zero_is_another", SEEDED, OtherNumber("seed", 0)),
    ("seed_by_way_of_a_float", SEEDED, OtherNumber("seed", (1 << 62) + 1)),
    ("step_in_32_bits", SEEDED, OtherNumber("offset", STEP)),
    ("divided_before_the_maximum", {}, OtherNumber("temperature", TINY)),
    ("slopes_lose_their_sign", {}, OtherSigns("slopes")),
    ("decay_never_grows", {"state": True, "final": True}, OtherSigns("g")),
    ("negative_weights_count_nothing", {}, OtherSigns("topk_weights")),
    ("expert_named_twice_counts_once", {}, Expanded("topk_ids", 1)),
    ("page_named_twice_is_the_first_one", {"context": (40, 40)}, Expanded("block_table", 1)),
    ("single_scale_is_of_the_first_head", {"stored": "int8", "scales": "head"},
     Narrowed("key_scale", 0)),
    ("row_of_a_mask_is_of_the_first_head", {"mask": "full", "sq": 9, "sk": 9},
     Narrowed("attn_mask", 2)),
    ("bias_alone_is_scaled_in_three_dimensions", {"rows": (2, 7)}, WithoutOthers("weight", False)),
    ("seeds_of_rows_read_as_contiguous", {"random": "seed_rows", "batch": 9},
     OtherLayout("seed_rows", "sparse"))])
def test_a_circumstance_finds_it(name: str, case: dict[str, Any],
                                 circumstance: Circumstance) -> None:
    kernel = FAULTS[name].kernel()
    assert check_case(kernel, case, "float32").status == "passed"
    assert check_case(kernel, case, "float32", circumstance=circumstance).status == "failed"
    right = sound(kernel.op.name)
    assert check_case(right, case, "float32", circumstance=circumstance).status == "passed"


@pytest.mark.parametrize("name", [
    "weights_summed_in_float32", "right_window_no_longer_than_the_keys",
    "path_ends_after_eight_nodes", "variance_of_one_number_is_of_a_sample"])
def test_a_case_of_the_op_finds_it(name: str) -> None:
    kernel = FAULTS[name].kernel()
    cases = [c for c in kernel.op.cases if {"window", "tree", "special", "size"} & c.keys()]
    assert any(check_case(kernel, case, "float32").status == "failed" for case in cases)


@pytest.mark.parametrize("name", [
    "row_offset_in_32_bits", "page_offset_in_32_bits", "latent_page_offset_in_32_bits",
    "position_offset_in_32_bits", "key_offset_in_32_bits", "keys_begin_at_the_first_row"])
def test_a_long_table_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_circumstances, "WHOLE_S", 60.0)      # no matter how busy the machine
    kernel = FAULTS[name].kernel()
    cells = [(case, "float32") for case in kernel.op.cases]
    wrong = [check() for check in long_table_checks(kernel, cells, "cpu", 0)]
    assert "failed" in {result.status for result in wrong}
    right = [check() for check in long_table_checks(sound(kernel.op.name), cells, "cpu", 0)]
    assert {result.status for result in right} == {"passed"}


def test_a_long_table_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_circumstances, "WHOLE_S", 60.0)
    kernel = sound("embedding")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert check_long_table(kernel, {}, "float32").status == "passed"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10     # KiB


def test_what_reads_its_whole_table_is_not_asked() -> None:
    contract = lz.op("embedding")

    def run(ids: Any, weight: Any, padding_idx: Any = None, scale: Any = 1.0) -> Any:
        return contract.reference(ids, weight * 1.0, padding_idx, scale)

    result = check_long_table(Kernel("sound.copies", contract, lambda: run), {}, "float32")
    assert result.status == "skipped" and "whole" in result.detail


@pytest.mark.parametrize(("op", "case", "table"), [
    ("embedding", {}, Table(("weight",), "ids", None)),
    ("paged_attention", {}, Table(("key_cache", "value_cache"), "block_table", None)),
    ("grouped_attention", {}, Table(("key", "value"), "items", 2)),
    ("moe", {}, Table(("w_gate_up", "w_down"), "topk_ids", None)),
    ("linear", {}, None), ("cross_entropy", {}, None)])
def test_the_formula_tells_which_tensors_are_tables(op: str, case: dict[str, Any],
                                                    table: Table | None) -> None:
    assert tables_in(lz.op(op), case, "float32") == table


@pytest.mark.parametrize(("name", "argument", "word"), [
    ("relu_of_nan_is_zero", "activation", "relu"),
    ("inner_relu_of_nan_is_zero", "activation", "relu")])
def test_nan_beside_every_word_finds_it(name: str, argument: str, word: str) -> None:
    kernel = FAULTS[name].kernel()
    own = [(case, "float32") for case in kernel.op.cases]
    cells = list(non_finite_cells(kernel, own, "cpu", 0))
    with_it = [cell for cell in cells if cell[0].get(argument) == word]
    assert with_it and len(cells) <= 8
    assert "failed" in {check_non_finite(kernel, *cell).status for cell in with_it}
    assert {check_non_finite(sound(kernel.op.name), *cell).status for cell in cells} == {"passed"}


def test_a_long_sum_in_a_half_dtype_is_found() -> None:
    kernel = FAULTS["gradient_of_the_weight_summed_in_its_dtype"].kernel()
    case = {"rows": (4096,), "hidden": 4}
    wrong = check_long_sums(kernel, case, "bfloat16")
    assert wrong.status == "failed" and "weight" in wrong.detail
    assert check_long_sums(sound("rms_norm"), case, "bfloat16").status == "passed"
    assert [*long_sum_checks(kernel, "cpu", "quick", 0)]


def test_torch_is_not_held_to_sums_that_it_does_not_make() -> None:
    kernel = next(k for k in TORCH_NORMS if k.id == "torch.layer_norm")
    assert not [*long_sum_checks(kernel, "cpu", "quick", 0)]
    assert not [*long_sum_checks(sound("layer_norm"), "cpu", "quick", 0)]  # nor what is made of it


def test_a_cell_has_results_where_its_tensors_say_little_of_them() -> None:
    op = lz.op("alibi")
    cells = iter([(case, "float32") for case in ({"sq": 1, "sk": 1}, {})])
    assert most_tensors_first(op, cells, "cpu", 0)[0][1][0] == {}
