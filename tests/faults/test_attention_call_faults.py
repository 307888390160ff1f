"""Each fault of attention_call_faults.py is found by the check that is there for it;
benchmarks/planted_faults.py --set calls certifies all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attention_call_faults import ATTENTION_CALL_FAULTS

from layerzero.backends.reference import KERNELS
from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.dropout import dropout_checks
from layerzero.verify.kernel.contract import CaseResult, check_case
from layerzero.verify.kernel.gradients import also_gradient_cases, check_gradients

CALLS = {f.name: f for f in ATTENTION_CALL_FAULTS}
ATTENTION = next(k for k in KERNELS if k.op.name == "attention")


def also_gradients(kernel: Kernel) -> Iterator[CaseResult]:
    for case, name in also_gradient_cases(kernel.op):
        yield check_gradients(kernel, case, "float32", only=name)
        yield check_gradients(kernel, case, "float32", also=name)


def mask_ranks(kernel: Kernel) -> Iterator[CaseResult]:
    yield from (check_case(kernel, case, "float32") for case in kernel.op.cases
                if case.get("mask") in ("keys", "heads", "heads3d"))


def dropout(kernel: Kernel) -> Iterator[CaseResult]:
    yield from (check() for check in dropout_checks(kernel, "float32", "cpu", "full", 0))


@pytest.mark.parametrize(("checks", "names"), [
    (also_gradients, ("bias_of_all_samples_has_the_gradient_of_the_first",
                      "slopes_have_no_gradient")),
    (mask_ranks, ("mask_of_three_dimensions_is_one_for_each_sample",
                  "mask_of_one_dimension_is_of_the_queries")),
    (dropout, ("causal_calls_drop_nothing", "dropping_everything_divides_by_zero",
               "gradient_of_the_scores_drops_nothing", "seedofitsown"))])
def test_it_is_found_and_the_formula_passes(checks, names) -> None:
    sound = list(checks(ATTENTION))
    assert {r.status for r in sound} <= {"passed", "skipped"}
    assert any(r.passed for r in sound)
    for name in names:
        failed = next((r for r in checks(CALLS[name].kernel()) if r.status == "failed"), None)
        assert failed is not None, name
        assert set(failed.kinds) & {*CALLS[name].kinds, "error"}, name
