"""Faults in a legal form of a call that few callers use: the case or circumstance that finds each,
and that the plain call does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from broken_kernels import Fault
from form_faults import FORM_FAULTS

import layerzero as lz
from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.checks import _gradient_checks
from layerzero.verify.certification.circumstances.argument_circumstances import AllStrided
from layerzero.verify.certification.circumstances.call_circumstances import circumstances
from layerzero.verify.certification.circumstances.dtype_circumstances import OtherDtype
from layerzero.verify.diagnosis.circumstance_names import kind_of
from layerzero.verify.diagnosis.diagnose import CLASSES
from layerzero.verify.kernel.contract import Circumstance, case_values, check_case
from layerzero.verify.kernel.gradients import check_gradients, gradient_cases

FAULTS: dict[str, Fault] = {f.name: f for f in FORM_FAULTS}
PLAIN = Circumstance()


def test_every_fault_is_another_and_has_a_class() -> None:
    assert len(FAULTS) == len(FORM_FAULTS) >= 16
    assert {kind for f in FAULTS.values() for kind in f.kinds} <= CLASSES.keys()


@pytest.mark.parametrize(("name", "case", "circumstance"), [
    ("boundaries_of_64_bits_read_as_32", {}, OtherDtype("cu_seqlens_k")),
    ("boundaries_of_64_bits_read_as_32", {"lengths_q": (9, 4), "lengths_k": (5, 12),
                                          "starts": "int64"}, PLAIN),
    ("narrow_parents_are_the_root", {}, OtherDtype("parents")),
    ("uniforms_of_64_bits_read_as_32", {"random": "wide"}, PLAIN),
    ("nodes_in_a_mask_of_64_bits",
     {"tree": "ninety", "alike": 1.0, "random": "wide", "batch": 3}, PLAIN),
    ("state_of_no_tokens_is_not_written", {"s": 0, "final": True}, PLAIN),
    ("no_bound_means_one_query", {"lengths_q": (3, 1, 5), "bound": False}, PLAIN),
    ("rest_of_a_whole_head_is_the_head", {"stated": True}, PLAIN),
    ("largest_step_alone_bounds_nothing_below",
     {"softplus": False, "at_most": True, "final": True}, PLAIN),
    ("angles_of_one_row_are_of_the_first_sequence", {"one_row": True, "b": 3}, PLAIN),
    ("flat_positions_go_on_from_row_to_row", {"ids": "flat", "b": 3}, PLAIN),
    ("heads_of_all_rows_in_a_grid_of_16_bits", {"b": 604, "h": 112, "g": 1, "d": 2, "n": 2}, PLAIN),
    ("longest_of_no_sequences", {"lengths_q": ()}, PLAIN)])
def test_it_is_found(name: str, case: dict[str, Any], circumstance: Circumstance) -> None:
    kernel = FAULTS[name].kernel()
    if circumstance is PLAIN:
        assert case in (*kernel.op.cases, *kernel.op.stress)
    assert check_case(kernel, {}, "float32").status == "passed"
    assert check_case(kernel, case, "float32", circumstance=circumstance).status == "failed"


@pytest.mark.parametrize(("name", "how"), [
    ("gradient_of_the_state_alone_is_lost", {"only": "initial_states"}),
    ("backward_reads_saved_tensors_as_contiguous", {"altered": "every tensor sparse"}),
    ("gradient_of_a_shared_page_is_that_of_one_sequence", {}),
    ("gradient_of_a_query_without_keys_is_nan", {})])
def test_its_gradient_is_found(name: str, how: dict[str, Any]) -> None:
    kernel = FAULTS[name].kernel()
    assert check_gradients(kernel, gradient_cases(kernel.op)[0], "float32").passed
    checks = (c for c in _gradient_checks(kernel, "cpu", "quick", 0) if isinstance(c, partial)
              and all(value in (*c.args[5:], *(getattr(v, "name", v) for v in c.keywords.values()))
                      for value in how.values()))
    assert any(c().status == "failed" for c in checks)


@pytest.mark.parametrize("op", ["varlen_attention", "mamba_chunk_scan"])
def test_other_layouts_of_a_sound_backward(op: str) -> None:
    contract = lz.op(op)
    sound = Kernel(f"sound.{op}", contract, lambda: contract.reference)
    for case, layout in zip(gradient_cases(contract), ("sparse", "transposed")):
        result = check_gradients(sound, case, "float32", altered=AllStrided(layout))
        assert result.passed and layout in result.circumstance


def test_integers_of_another_width() -> None:
    op = lz.op("speculative_verify")
    values = case_values(op, {"random": "seed_rows", "batch": 9}, "float32")
    narrow = OtherDtype("draft_tokens").alter(op, values)
    assert narrow is not None and str(narrow["draft_tokens"].dtype) == "torch.int32"
    # seeds of 64 bits are others in 32
    assert OtherDtype("seed_rows").alter(op, values) is None
    names = {c.name for c in circumstances(op, "quick")}
    assert OtherDtype("draft_tokens").name in names
    assert kind_of([OtherDtype("draft_tokens").name]) == "dtype"
