"""Faults that look like others: found, and named rightly or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from broken_kernels import Fault
from symptom_faults import SYMPTOM_FAULTS

from layerzero.verify.certification.certify import certify
from layerzero.verify.certification.circumstances.use_circumstances import (
    after_inference_checks,
    check_after_inference,
    rows_in_order_checks,
)
from layerzero.verify.diagnosis.diagnose import CLASSES, diagnose
from layerzero.verify.diagnosis.reruns.rounding_reruns import explain_by_rounded_argument
from layerzero.verify.kernel.contract import check_case
from layerzero.world import snapshot as worlds

SYMPTOMS = {f.name: f for f in SYMPTOM_FAULTS}
# Those for which a rerun tells the cause from what it looks like.
NAMED = {"bias_of_16_bits", "first_state_of_16_bits", "sigmoid_of_16_bits",
         "one_tree_for_all_rows_read_flat", "rows_in_order_are_a_part_of_the_table",
         "weightkeptofanymode", "gradients_in_any_order", "pages_as_if_dense", "anglesbyid"}


def test_every_fault_is_another_and_has_a_class() -> None:
    assert len(SYMPTOMS) == len(SYMPTOM_FAULTS) >= 15
    assert {kind for f in SYMPTOM_FAULTS for kind in f.kinds} <= CLASSES.keys()
    assert SYMPTOMS.keys() >= NAMED


@pytest.mark.parametrize("fault", SYMPTOM_FAULTS, ids=lambda f: f.name)
def test_it_is_named_rightly_or_not_at_all(fault: Fault) -> None:
    verdict = certify(fault.kernel(), seeds=(0,), stop_early=True)
    assert verdict.status == "failed" and verdict.diagnosis is not None
    accepted = {*fault.kinds} if fault.name in NAMED else {*fault.kinds, "unknown"}
    assert verdict.diagnosis.kind in accepted, str(verdict.diagnosis)


@pytest.mark.parametrize(("name", "cases"), [
    ("bias_of_16_bits", [{"bias": True}, {"bias": True, "rows": (7,)}]),
    ("first_state_of_16_bits", [{"state": True}, {"state": True, "s": 33}])])
def test_a_rounded_argument_is_told_from_one_that_is_left_out(name: str,
                                                              cases: list[dict[str, Any]]) -> None:
    kernel = SYMPTOMS[name].kernel()
    results = [check_case(kernel, case, "float32") for case in (*cases, {})]
    assert [r.status for r in results] == ["failed", "failed", "passed"]
    found = explain_by_rounded_argument(kernel, results[:2], "cpu")
    assert found is not None and found[0] == "precision"


def test_what_is_left_out_is_not_taken_for_rounded() -> None:
    kernel = SYMPTOMS["single_key_head_is_left"].kernel()
    results = [check_case(kernel, case, "float32") for case in ({"hkv": 1}, {"hkv": 1, "s": 20})]
    assert all(r.status == "failed" for r in results)
    assert explain_by_rounded_argument(kernel, results, "cpu") is None


def test_a_row_that_reads_on_is_no_matter_of_all_rows() -> None:
    kernel = SYMPTOMS["last_block_reads_on_in_the_next_row"].kernel()
    results = [check_case(kernel, {"format": "int4", "width": 37, "rows": (n,)}, "float32")
               for n in (5, 8)]
    found = diagnose(kernel, results)
    assert found is not None and found.kind != "invariance", str(found)


@pytest.mark.parametrize("name", ["torch.embedding", "torch.paged_gather", "torch.rope",
                                  "torch.grouped_separate", "torch.linear"])
def test_a_sound_kernel_passes(name: str) -> None:
    kernel = worlds.current().catalog.by_id[name]
    cells = [(case, kernel.op.dtypes[0]) for case in kernel.op.cases]
    results = [check() for check in (*rows_in_order_checks(kernel, cells, "cpu", 0),
                                     *after_inference_checks(kernel, "cpu", "quick", 0))]
    assert [str(r) for r in results if r.status == "failed"] == []
    assert any(r.passed for r in results)


def test_what_inference_mode_leaves_is_found_after_it_alone() -> None:
    kernel = SYMPTOMS["weightkeptofanymode"].kernel()
    assert check_case(kernel, {}, "float32").passed
    found = check_after_inference(kernel, {}, "float32")
    assert found.status == "failed" and found.kinds == ("mode",)
