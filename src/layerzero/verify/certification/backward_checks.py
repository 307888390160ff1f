"""Backward passes as callers make them: of inputs that lie otherwise in memory or of which some are
left out, after an input changed in place, and differentiated once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.generated import Case
from ..kernel.circumstance import Circumstance
from ..kernel.contract import (
    CaseResult,
    call,
    case_tensors,
    case_values,
    formula,
    refusals,
    results_of,
    upcast,
)
from ..kernel.gradients import check_gradients, requiring_grad
from ..kernel.shared import compute_once
from .circumstances.argument_circumstances import WithoutOthers, optional_tensors
from .circumstances.call_circumstances import Expanded
from .circumstances.row_circumstances import OtherLayout
from .non_finite import is_of_others

Values = dict[str, Any]
Gradients = dict[str, Tensor | None]
FAR = 0.02                                     # of the largest: another gradient, no rounding


def backward_checks(kernel: Kernel, cases: Sequence[Case], device: str,
                    seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields each kind once: of an optional tensor that comes alone, of one that lies otherwise, of
    each input that changes in place, and of a second derivative."""
    op = kernel.op
    dtype = next((d for d in op.dtypes if not refusals(kernel, requiring_grad(
        op, case_values(op, cases[0], d, device, seed)))), "") if cases else ""
    if not dtype:
        return
    yield from (partial(check_gradients, kernel, case, dtype, device, seed, beside=circumstance)
                for case, circumstance in _circumstances(op, cases, dtype, device, seed))
    first = cases[0]
    yield from (partial(check_changed_before, kernel, first, dtype, device, seed, name)
                for name, t in case_tensors(op, first, dtype, device, seed).items()
                if t.is_floating_point() or t.dtype.itemsize == 1)
    if not is_of_others(kernel):
        yield partial(check_second_order, kernel, first, dtype, device, seed)


def _circumstances(op: Op, cases: Sequence[Case], dtype: str, device: str,
                   seed: int) -> Iterator[tuple[Case, Circumstance]]:
    """Yields the first case that can have each, where others are left out that with most of them;
    of how a tensor lies one of two, by the seed."""
    with_most = sorted(cases, key=lambda case: -len(case_tensors(op, case, dtype, device, seed)))
    kinds: list[Circumstance] = [WithoutOthers(name, alone) for name in optional_tensors(op)
                                 if name in op.differentiable for alone in (True, False)]
    kinds += [Expanded(name, 0) if (i + seed) % 2 else OtherLayout(name, "transposed")
              for i, name in enumerate(op.differentiable)]
    for kind in kinds:
        ordered = with_most if isinstance(kind, WithoutOthers) else cases
        able = (case for case in ordered if compute_once(
            op, ("has", kind.name, repr(case), dtype, device, seed),
            partial(_has, op, case, dtype, device, seed, kind), nbytes=0))
        yield from ((case, kind) for case in islice(able, 1))


def _has(op: Op, case: Case, dtype: str, device: str, seed: int, kind: Circumstance) -> bool:
    """May a case have the circumstance, of numbers that a gradient is wanted of?"""
    values = case_values(op, case, dtype, device, seed)
    altered = kind.alter(op, values)
    return altered is not None and all(
        v.numel() > 0 for n, v in altered.items() if n in op.differentiable
        and isinstance(v, Tensor))


def check_changed_before(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                         seed: int = 0, name: str = "") -> CaseResult:
    """Changes an input in place between the forward and the backward pass, as an optimizer does
    that steps too early: the backward raises, as that of torch does, or it is as it was."""
    def gradients(change: bool) -> Gradients:
        values = _wanting(kernel, case, dtype, device, seed)
        results = [r for r in results_of(call(kernel, values)) if r.requires_grad]
        if change:
            with torch.no_grad():
                t = values[name]
                (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).copy_(
                    t.view(torch.uint8).flip(0) if t.dtype.itemsize == 1 else t.flip(0) * 0.5)
        return _first_order(values, results, keep=False)

    def result(status: str, detail: str = "") -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, detail=detail, seed=seed,
                          circumstance=f"backward after {name} changed in place",
                          kinds=("gradient",) if status == "failed" else ())

    try:
        before = gradients(change=False)
    except FAULTS:                             # the gradients have checks of their own
        return result("skipped")
    try:
        after = gradients(change=True)
    except FAULTS:
        return result("passed", "it raises")
    wrong = next((n for n in before if _differs(before[n], after[n])), "")
    return result("failed", f"the gradient of {wrong} is that of numbers which {name} got after "
                            "the forward pass") if wrong else result("passed")


def check_second_order(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                       seed: int = 0) -> CaseResult:
    """Differentiates each gradient once more, as a penalty on it does: the kernel raises, as one
    does that is once differentiable, or nothing is missing from what it gives."""
    op = kernel.op

    def result(status: str, detail: str = "") -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, detail=detail, seed=seed,
                          circumstance="backward of a gradient",
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
        wrong = next((n for n in want if _differs(want[n], got.get(n))), "") if got else ""
        if wrong:
            return result("failed", f"what {wrong} adds to the gradient of {name} is missing from "
                                    "its derivative, and nothing is raised")
    return result("passed")


def _wanting(kernel: Kernel, case: Case, dtype: str, device: str, seed: int) -> Values:
    """Returns the values of a case, each tensor of which has memory of its own."""
    drawn = case_values(kernel.op, case, dtype, device, seed)
    return requiring_grad(kernel.op, {n: v.clone() if isinstance(v, Tensor) else v
                                      for n, v in drawn.items()})


def _first_order(values: Mapping[str, Any], results: Sequence[Tensor], keep: bool) -> Gradients:
    wanted = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
    gen = torch.Generator().manual_seed(4321)
    weights = [torch.randn(r.shape, generator=gen).to(r) for r in results]
    grads = torch.autograd.grad(results, [*wanted.values()], weights, allow_unused=True,
                                create_graph=keep)
    return dict(zip(wanted, grads))


def _second_order(function: Callable[[Values], Any], values: Values, name: str) -> Gradients:
    """Returns the derivatives of a sum of squares of one gradient; none where it records none."""
    with torch.enable_grad():
        used = [r for r in results_of(function(values)) if r.requires_grad]
        # of squares: then the gradient of the result depends on the inputs too
        grad = _first_order(values, [r.square().sum() for r in used], keep=True)[name]
        if grad is None or not grad.requires_grad:
            return {}
        return _first_order(values, [grad.square().sum()], keep=False)


def _differs(want: Tensor | None, got: Tensor | None) -> bool:
    """Is it another gradient? None is zeros."""
    if want is None or not want.numel():
        return False
    other = torch.zeros_like(want) if got is None else got.to(want.dtype)
    largest = float(want.abs().max())
    return bool(((other - want).abs() > FAR * max(largest, 1e-6)).any())
