"""Faults as the author of a new kernel makes them: each mechanism that finds or names some of them;
benchmarks/planted_faults.py --set authors runs all.
"""

from __future__ import annotations

from typing import Any

import pytest
from attention_author_faults import ATTENTION_AUTHOR_FAULTS
from broken_kernels import Fault
from layer_author_faults import LAYER_AUTHOR_FAULTS
from optional_author_faults import OPTIONAL_AUTHOR_FAULTS
from state_author_faults import STATE_AUTHOR_FAULTS

from layerzero.verify.certification.circumstances.argument_circumstances import (
    OtherDtype,
    UnusedPages,
    WithoutOthers,
)
from layerzero.verify.certification.circumstances.call_circumstances import UnusualValues
from layerzero.verify.diagnosis.diagnose import CLASSES, diagnose
from layerzero.verify.kernel.contract import Circumstance, check_case

AUTHOR_FAULTS = {f.name: f for f in (*ATTENTION_AUTHOR_FAULTS, *LAYER_AUTHOR_FAULTS,
                                     *STATE_AUTHOR_FAULTS, *OPTIONAL_AUTHOR_FAULTS)}


def test_every_fault_is_another_and_has_a_class() -> None:
    total = sum(map(len, (ATTENTION_AUTHOR_FAULTS, LAYER_AUTHOR_FAULTS, STATE_AUTHOR_FAULTS,
                          OPTIONAL_AUTHOR_FAULTS)))
    assert len(AUTHOR_FAULTS) == total >= 140
    assert {kind for f in AUTHOR_FAULTS.values() for kind in f.kinds} <= CLASSES.keys()


@pytest.mark.parametrize(("name", "case", "dtype", "circumstance"), [
    ("weight_counts_with_a_bias_only", {}, "float32", WithoutOthers("weight", True)),
    ("key_scale_alone_serves_the_values", {"scales": "head"}, "float32",
     WithoutOthers("value_scale", False)),
    ("first_state_of_16_bits_is_ignored", {"state": True}, "float32", OtherDtype("initial_state")),
    ("every_entry_of_the_table_is_a_page", {}, "float32", UnusedPages()),
    ("negative_zero_loses_its_sign", {"format": "fp8_e4m3"}, "float32", UnusualValues("zeros")),
    ("float64_computed_in_float32", {}, "float64", Circumstance()),
    # an error that is slight everywhere; a result beside one with a larger error
    ("partial_sums_rounded_every_64", {"k": 16_411, "n": 9, "rows": (2,)}, "bfloat16",
     Circumstance()),
    ("wide_state_rounded_to_the_dtype_of_x",
     {"wide_state": True, "softplus": False, "bias": False, "slow": True}, "bfloat16",
     Circumstance())])
def test_it_is_found(name: str, case: dict[str, Any], dtype: str,
                     circumstance: Circumstance) -> None:
    kernel = AUTHOR_FAULTS[name].kernel()
    plain = check_case(kernel, case, dtype)
    assert circumstance.name == "" or plain.status == "passed"
    assert check_case(kernel, case, dtype, circumstance=circumstance).status == "failed"


def diagnosed(fault: Fault, *cells: tuple[dict[str, Any], str]) -> str:
    kernel = fault.kernel()
    found = diagnose(kernel, [check_case(kernel, case, dtype) for case, dtype in cells])
    assert found is not None
    return found.kind


@pytest.mark.parametrize(("name", "cells", "kind"), [
    # right where it is loaded anew
    ("weightbyitsshape", [({}, "float32"), ({"rows": (2, 7)}, "float32")], "state"),
    # only calls without rows pass
    ("output_of_the_old_state", [({}, "float32"), ({"b": 0}, "float32")], "unknown"),
    # wrong with full pages too
    ("wide_table_read_as_32_bits", [({"table": "int64"}, "float32")], "stale page"),
    # of many rows three are enough
    ("number_counts_the_next_token_too", [({}, "float32"), ({"batch": 16}, "float32"),
                                          ({"drafted": 0, "batch": 3}, "float32")],
     "distribution")])
def test_it_is_named_by_what_mends_it(name: str, cells: list[tuple[dict[str, Any], str]],
                                      kind: str) -> None:
    assert diagnosed(AUTHOR_FAULTS[name], *cells) == kind
