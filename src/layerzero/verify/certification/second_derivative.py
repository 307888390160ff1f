"""The derivative of a gradient, as a penalty on it needs: is something missing from it in silence?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ..cases.generated import Case
from ..kernel.contract import CaseResult, call, case_values, formula, results_of, upcast
from ..kernel.gradients import requiring_grad

Values = dict[str, Any]
Gradients = dict[str, Tensor | None]
SECOND_ORDER = "backward of a gradient"
FAR = 0.02                                     # of the largest: another gradient, no rounding
LEAST = 0.01                                   # what is smaller may be roundings of what cancels


def check_second_order(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                       seed: int = 0) -> CaseResult:
    """Differentiates each gradient once more, as a penalty on it does: the kernel raises, as one
    does that is once differentiable, or nothing is missing from what it gives."""
    op = kernel.op

    def result(status: str, detail: str = "") -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, detail=detail, seed=seed,
                          circumstance=SECOND_ORDER,
                          kinds=("gradient",) if status == "failed" else ())

    values = _wanting(kernel, case, dtype, device, seed)
    wide = {n: v.detach().requires_grad_(values[n].requires_grad)
            if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in upcast(values).items()}
    for name in (n for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad):
        try:
            got = _second_order(partial(call, kernel), values, name)
        except FAULTS:
            continue
        want = _second_order(partial(formula, op), wide, name)
        # terms that cancel leave roundings
        least = 1e-3 * max((float(g.abs().max()) for g in want.values()
                            if g is not None and g.numel()), default=0.0)
        wrong = next((n for n in want if _differs(want[n], got.get(n), least)), "") if got else ""
        if wrong:
            return result("failed", f"what {wrong} adds to the gradient of {name} is missing from "
                                    "its derivative, and nothing is raised")
    return result("passed")


def is_right_or_raises(results: Sequence[CaseResult]) -> bool | None:
    """Returns what the check has shown; None where it was not made."""
    shown = [r for r in results if r.circumstance == SECOND_ORDER]
    return all(r.passed for r in shown) if shown else None


def _wanting(kernel: Kernel, case: Case, dtype: str, device: str, seed: int) -> Values:
    """Returns the values of a case, each tensor of which has memory of its own."""
    drawn = case_values(kernel.op, case, dtype, device, seed)
    return requiring_grad(kernel.op, {n: v.clone() if isinstance(v, Tensor) else v
                                      for n, v in drawn.items()})


def _second_order(function: Callable[[Values], Any], values: Values, name: str) -> Gradients:
    """Returns the derivatives of a sum of squares of one gradient; none where it records none."""
    with torch.enable_grad():
        used = [r for r in results_of(function(values)) if r.requires_grad]
        # of squares: then the gradient of the result depends on the inputs too
        loss = torch.stack([r.square().sum() * (1.0 + i / 8) for i, r in enumerate(used)]).sum()
        (grad,) = torch.autograd.grad(loss, [values[name]], allow_unused=True, create_graph=True)
        if grad is None or not grad.requires_grad:
            return {}
        wanted = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
        for v in wanted.values():
            v.grad = None
        # unlike autograd.grad it comes past what raises: a backward that is once differentiable
        grad.square().sum().backward()         # type: ignore[no-untyped-call]
        return {n: v.grad for n, v in wanted.items()}


def _differs(want: Tensor | None, got: Tensor | None, least: float) -> bool:
    """Is it another gradient? None is zeros."""
    if want is None or not want.numel():
        return False
    other = torch.zeros_like(want) if got is None else got.to(want.dtype)
    largest = float(want.abs().max())
    return bool(((other - want).abs() > FAR * max(largest, least, LEAST)).any())
