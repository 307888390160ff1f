"""Backward of every kernel that claims one, against the autograd of the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
from catalog_kernels import KERNELS, cpu_facts, serves

from layerzero.spec.kernel import Kernel
from layerzero.verify.kernel.contract import case_values, refusals
from layerzero.verify.kernel.gradients import check_gradients, gradient_cases, requiring_grad


def rows() -> list[Any]:
    facts = {(op.name, dtype, repr(case)):
             cpu_facts(op, requiring_grad(op, case_values(op, case, dtype)))
             for op in {k.op.name: k.op for k in KERNELS if k.differentiable}.values()
             for dtype in ("float32", "float64") for case in gradient_cases(op)}
    cells = ((kernel, dtype, [case for case in gradient_cases(kernel.op)
                              if serves(kernel, facts[kernel.op.name, dtype, repr(case)])])
             for kernel in KERNELS if kernel.differentiable for dtype in ("float32", "float64"))
    return [pytest.param(kernel, dtype, cases, id=f"{kernel.id}-{dtype}")
            for kernel, dtype, cases in cells if cases]


ROWS = rows()


@pytest.mark.parametrize(("kernel", "dtype", "cases"), ROWS)
def test_backward(kernel: Kernel, dtype: str, cases: list[dict[str, Any]]) -> None:
    """Of every case, and each that fails is named."""
    results = [check_gradients(kernel, case, dtype) for case in cases]
    if all(result.status == "skipped" for result in results):
        pytest.skip(results[0].detail or "; ".join(map(str, results[0].reasons)))
    wrong = [str(result) for result in results if not (result.passed or result.status == "skipped")]
    assert not wrong, f"{len(wrong)} of {len(results)} cases:\n" + "\n".join(wrong)


def test_every_kernel_that_claims_a_backward_and_runs_here_was_asked_for_it() -> None:
    asked = {p.values[0].id for p in ROWS}
    claims = {k.id for k in KERNELS
              if k.differentiable and k.op.differentiable and k.id not in asked
              and any(not refusals(k, requiring_grad(k.op, case_values(k.op, case, "float32")))
                      for case in k.op.cases)}
    assert not claims
