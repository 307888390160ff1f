"""Backward of every kernel that claims one, against the autograd of the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
from catalog_kernels import KERNELS, case_id, cpu_facts, serves

from layerzero.spec.kernel import Kernel
from layerzero.verify.kernel.contract import case_values, refusals
from layerzero.verify.kernel.gradients import check_gradients, gradient_cases, requiring_grad


def rows() -> list[Any]:
    facts = {(op.name, dtype, repr(case)):
             cpu_facts(op, requiring_grad(op, case_values(op, case, dtype)))
             for op in {k.op.name: k.op for k in KERNELS if k.differentiable}.values()
             for dtype in ("float32", "float64") for case in gradient_cases(op)}
    return [pytest.param(kernel, case, dtype, id=f"{kernel.id}-{dtype}-{case_id(case)}")
            for kernel in KERNELS if kernel.differentiable
            for dtype in ("float32", "float64")
            for case in gradient_cases(kernel.op)
            if serves(kernel, facts[kernel.op.name, dtype, repr(case)])]


ROWS = rows()


@pytest.mark.parametrize(("kernel", "case", "dtype"), ROWS)
def test_backward(kernel: Kernel, case: dict[str, Any], dtype: str) -> None:
    result = check_gradients(kernel, case, dtype)
    if result.status == "skipped":
        pytest.skip(result.detail or "; ".join(map(str, result.reasons)))
    assert result.passed, str(result)


def test_every_kernel_that_claims_a_backward_and_runs_here_was_asked_for_it() -> None:
    asked = {p.values[0].id for p in ROWS}
    claims = {k.id for k in KERNELS
              if k.differentiable and k.op.differentiable and k.id not in asked
              and any(not refusals(k, requiring_grad(k.op, case_values(k.op, case, "float32")))
                      for case in k.op.cases)}
    assert not claims
