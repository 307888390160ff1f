"""Faults as the field has them: a few of each mechanism; benchmarks/planted_faults.py runs all."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings

import pytest
import torch
from field_faults import FIELD_FAULTS
from helpers import world
from model_size_faults import SIZE_FAULTS
from number_faults import NUMBER_FAULTS
from shape_faults import SHAPE_FAULTS

from layerzero.ops.grouped_attention import OP as GROUPED
from layerzero.ops.paged_attention import OP as PAGED
from layerzero.ops.rms_norm import OP as RMS_NORM
from layerzero.spec.kernel import Kernel
from layerzero.verify.cases.pairs import long_sums, model_sizes, pair_cases
from layerzero.verify.certification.calls import check_sizes
from layerzero.verify.certification.circumstances.argument_circumstances import (
    ChangedInPart,
    EveryCode,
    LooseBound,
    OtherNumber,
)
from layerzero.verify.certification.circumstances.call_circumstances import Circumstance, Expanded
from layerzero.verify.certification.threads import check_threads
from layerzero.verify.diagnosis.diagnose import CLASSES
from layerzero.verify.kernel.contract import CaseResult, check_case
from layerzero.verify.kernel.gradients import check_gradients, gradient_cases
from layerzero.verify.kernel.process_state import find_leak, memory_in_use, process_state, put_back
from layerzero.world import snapshot as worlds

__all__ = ["world"]


def broken(name: str) -> Kernel:
    return next(f for f in FIELD_FAULTS if f.name == name).kernel()


def test_every_fault_is_another_and_has_a_class() -> None:
    faults = (*FIELD_FAULTS, *SIZE_FAULTS, *SHAPE_FAULTS, *NUMBER_FAULTS)
    assert len({f.name for f in faults}) == len(faults) >= 180
    assert {kind for f in faults for kind in f.kinds} <= CLASSES.keys()


@pytest.mark.parametrize("name", ["groups_past_512", "logits_past_two_to_the_twenty"])
def test_sizes_that_are_large_together(name: str) -> None:
    kernel = next(f for f in SHAPE_FAULTS if f.name == name).kernel()
    result = check_sizes(kernel, "a model", model_sizes(kernel.op, 0), "float32")
    assert result.status == "failed"


def test_a_pair_counts_where_no_other_argument_masks_it() -> None:
    kernel = next(f for f in SHAPE_FAULTS if f.name == "bias_left_out_of_a_sum").kernel()
    cells = pair_cases(kernel, "cpu", "quick", 0).cells
    assert any(check_case(kernel, case, dtype).status == "failed" for case, dtype in cells)


def test_what_is_wrong_alone_is_no_matter_of_threads() -> None:
    kernel = next(f for f in SHAPE_FAULTS if f.name == "parts_past_64").kernel()
    result = check_threads(kernel, {}, "float32", other={"parts": 70})
    assert result.status == "failed" and result.kinds == ("error",)


def test_every_differentiable_tensor_has_a_gradient_case() -> None:
    kernel = next(f for f in NUMBER_FAULTS if f.name == "down_gradient_without_its_bias").kernel()
    results = [check_gradients(kernel, case, "float32") for case in gradient_cases(kernel.op)]
    assert any(r.status == "failed" for r in results)


@pytest.mark.parametrize(("name", "case", "circumstance"), [
    ("max_seqlen_k_is_the_length", {"items": ((0, 3, 2, 9),)}, LooseBound("max_seqlen_k")),
    ("negative_scale_is_taken_for_none", {}, OtherNumber("scale", -0.7)),
    ("lowest_int8_code_is_clamped", {}, EveryCode("q")),
    ("packedbyasampleofitscontents", {}, ChangedInPart("weight")),
    ("lengthsofthefirststep", {}, ChangedInPart("context_lens")),
    ("positions_of_one_row_read_with_a_stride", {"ids": "int64"},
     Expanded("position_ids", 0))])
def test_an_argument_that_no_case_has(name: str, case: dict[str, object],
                                      circumstance: Circumstance) -> None:
    kernel = broken(name)
    assert check_case(kernel, case, "float32").passed
    result = check_case(kernel, case, "float32", circumstance=circumstance)
    assert result.status == "failed", str(result)
    right = worlds.current().catalog.by_id[f"reference.{kernel.op.name}"]
    assert check_case(right, case, "float32", circumstance=circumstance).passed


def test_sizes_of_a_model() -> None:
    kernel = broken("quantized_rows_past_4096")
    result = check_sizes(kernel, "a model", model_sizes(kernel.op, 0), "float32")
    assert result.status == "failed"


def test_a_tuple_of_lengths_grows_and_a_shape_does_not() -> None:
    def longest(op) -> int:
        return max(len(n) for group in model_sizes(op, 0) for case in group
                   for n in case.values() if isinstance(n, tuple))

    assert longest(PAGED) == 300 and longest(RMS_NORM) < 9
    assert max(len(case.get("items", ())) for case in GROUPED.stress) > 256


@pytest.mark.parametrize(("name", "check"), [
    ("gradient_wrong_where_it_is_expanded", lambda k: check_gradients(k, {}, "float32",
                                                                      summed=True)),
    ("gradient_wrong_in_another_thread", lambda k: check_gradients(k, {}, "float32", summed=True)),
    ("weight_gradient_of_the_first_4096_rows",
     lambda k: next(r for case in long_sums(k.op, "quick", 0)
                    if (r := check_gradients(k, case, "float32")).status == "failed")),
    ("sharedscratchoflongrows", lambda k: check_threads(k, {}, "float32", other={"rows": (70,)})),
    ("sizeofanotherthread", lambda k: check_threads(k, {}, "float32", other={"rows": (70,)}))])
def test_a_check_of_its_own(name: str, check) -> None:
    result: CaseResult = check(broken(name))
    assert result.status == "failed", str(result)


def test_what_a_call_leaves_in_the_process_is_named() -> None:
    before, counted = process_state("cpu"), memory_in_use("cpu")
    cores = os.sched_getaffinity(0)
    warnings.simplefilter("ignore")
    descriptor = os.open(os.devnull, os.O_RDONLY)
    thread = threading.Thread(target=time.sleep, args=(0.2,))
    thread.start()
    try:
        changed = put_back(before, "cpu")
        assert {"the warnings that are shown", "the number of open files",
                "the number of Python threads"} <= set(changed)
        after = memory_in_use("cpu")
        assert find_leak([counted, after, {**after, **{n: after[n] + 1 for n in (
            "open files", "Python threads")}}], 1)
    finally:
        os.close(descriptor)
        thread.join()
    assert os.sched_getaffinity(0) == cores


def test_a_first_call_may_import_what_filters_warnings(monkeypatch) -> None:
    """With a module that is new it is an import, without one the kernel."""
    def make():
        calls = []

        def run(x, weight=None, eps=1e-6, *, offset=0.0):
            if not calls:
                monkeypatch.setitem(sys.modules, "what_filters_warnings", sys)
                warnings.filterwarnings("ignore", message="of an import")
            calls.append(1)
            return RMS_NORM.reference(x, weight, eps, offset=offset)

        return run

    assert check_case(Kernel("ours.importing", RMS_NORM, make), {}, "float32").passed
    assert "global state" in check_case(broken("changes_numpys_errors"), {}, "float32").kinds
    assert torch.get_default_dtype() is torch.float32
