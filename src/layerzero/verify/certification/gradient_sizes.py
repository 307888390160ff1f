"""Gradients at many sizes: a backward pass has tiles, tails and sums over rows of its own, which
need not be wrong where those of the forward pass are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.generated import Case
from ..kernel.contract import CaseResult, call, case_refusals, case_values, formula, results_of
from ..kernel.gradients import check_gradients, has_plain_gradients, requiring_grad
from ..kernel.shared import compute_once

Gradients = dict[str, Tensor | None]


def check_gradient_sizes(kernel: Kernel, name: str, calls: Sequence[Sequence[Case]], dtype: str,
                         device: str = "cpu", seed: int = 0) -> CaseResult:
    """Compares the gradients of each call with the eager formula's; what looks wrong is judged as
    any other gradient is. A call comes with others that take its place where it is refused. The
    result is the first that fails, or says how many ran."""
    op, ran = kernel.op, 0
    for cases in calls:
        case = next((c for c in cases if not case_refusals(kernel, c, dtype, device, seed)
                     and _is_plain(op, c, dtype, device, seed)), None)
        if case is None:
            continue
        ran += 1
        if not _looks_right(kernel, case, dtype, device, seed):
            judged = check_gradients(kernel, case, dtype, device, seed)
            if judged.status == "failed":
                return judged
    return CaseResult(kernel.id, {}, dtype, "passed" if ran else "skipped", detail=f"{ran} calls",
                      circumstance=f"backward at {len(calls)} sizes of {name}", seed=seed)


def _is_plain(op: Op, case: Case, dtype: str, device: str, seed: int) -> bool:
    try:
        return has_plain_gradients(op, case, dtype, device, seed)
    except FAULTS:                             # not every size makes a call
        return False


def _looks_right(kernel: Kernel, case: Case, dtype: str, device: str, seed: int) -> bool:
    op = kernel.op
    rtol, atol = op.tolerance.of(dtype)
    values = requiring_grad(op, case_values(op, case, dtype, device, seed))
    want: Gradients = compute_once(op, ("gradients of a size", repr(case), dtype, device, seed),
                                   lambda: _gradients(partial(formula, op), values))
    try:
        got = _gradients(partial(call, kernel), values)
    except FAULTS:
        return False
    return all(_is_near(got[n], g, rtol, atol) for n, g in want.items())


def _gradients(function: Callable[[dict[str, Any]], Any], values: dict[str, Any]) -> Gradients:
    """Returns the gradients of a sum of the results in which no two weigh alike."""
    wanted = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
    with torch.enable_grad():
        results = [r for r in results_of(function(values))
                   if isinstance(r, Tensor) and r.requires_grad]
        weights = [torch.sin(torch.arange(r.numel(), device=r.device) * 1.7 + 0.5).view(
            r.shape).to(r) for r in results]
        return dict(zip(wanted, torch.autograd.grad(results, list(wanted.values()), weights,
                                                    allow_unused=True)))


def _is_near(got: Tensor | None, want: Tensor | None, rtol: float, atol: float) -> bool:
    if got is None or want is None or not want.numel():
        return (got is None or not got.any()) and (want is None or not want.any())
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return bool(((got - want).abs() <= atol + rtol * float(want.abs().max())).all())
