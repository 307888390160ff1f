"""NaN where the formula reads nothing: hidden keys, ignored rows, tokens behind the last sequence,
slots behind a length. And NaN in the gradient of one result, which reaches what that was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.generated import Case, given_arguments
from ..kernel.case_sizes import relative_size
from ..kernel.contract import (
    SMALL,
    CaseResult,
    call,
    case_contents,
    case_refusals,
    case_values,
    case_values_to_read,
    formula,
    refusals,
    results_of,
)
from ..kernel.gradients import requiring_grad
from ..kernel.judging import same
from ..kernel.shared import compute_once
from .non_finite import is_of_others

Values = dict[str, Any]
MOST_CASES = 4


def unused_place_checks(kernel: Kernel, device: str,
                        seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields a few of the op's own cases: for each tensor the first with places that are not read,
    and the first beside each argument."""
    op, dtype = kernel.op, kernel.op.dtypes[0]
    if not op.differentiable or is_of_others(kernel):
        return
    seen: set[tuple[str, str]] = set()
    yielded = 0
    for case in op.cases:
        if (yielded == MOST_CASES or relative_size(op, case) > SMALL
                or case_refusals(kernel, case, dtype, device, seed)):
            continue
        given = sorted(given_arguments(op, case_values_to_read(op, case, dtype, device, seed)))
        names = unused_places(op, case, dtype, device, seed)
        new = {(name, argument) for name in names for argument in ("", *given)} - seen
        if new:
            seen |= new
            yielded += 1
            yield partial(check_unused_places, kernel, case, dtype, device, seed)
    if kernel.differentiable and not case_refusals(kernel, op.cases[0], dtype, device, seed):
        yield partial(check_gradient_of_nan, kernel, op.cases[0], dtype, device, seed)


def unused_places(op: Op, case: Case, dtype: str, device: str = "cpu",
                  seed: int = 0) -> Mapping[str, Tensor]:
    """Returns of each tensor where a NaN changes nothing of what the formula gives."""
    def compute() -> dict[str, Tensor]:
        values = case_values(op, case, dtype, device, seed)
        try:
            places = _without_gradient(op, values)
        except FAULTS:
            return {}
        with torch.no_grad():
            plain = formula(op, values)
            return {name: places[name] for name in places if all(map(
                same, plain, formula(op, _with_nan(values, {name: places[name]}))))}

    found: Mapping[str, Tensor] = compute_once(
        op, ("unused places", *case_contents(case, dtype, device, seed)), compute)
    return found


def _without_gradient(op: Op, values: Values) -> dict[str, Tensor]:
    """Returns where a tensor has no gradient, though others may; not where it is all of it, as of
    what is multiplied by nothing."""
    wanting = requiring_grad(op, values)
    wanted = {n: v for n, v in wanting.items() if isinstance(v, Tensor) and v.requires_grad
              and v.numel() and 0 not in v.stride()}
    with torch.enable_grad():
        results = [r for r in formula(op, wanting) if r.requires_grad]
        if not results or not wanted:
            return {}
        grads = torch.autograd.grad(
            results, list(wanted.values()),
            [torch.linspace(1, 2, r.numel(), device=r.device).view(r.shape).to(r) for r in results],
            allow_unused=True)
    return {n: g == 0 for (n, v), g in zip(wanted.items(), grads)
            if g is not None and bool((g == 0).any()) and bool((g != 0).any())}


def _with_nan(values: Values, places: Mapping[str, Tensor]) -> Values:
    return {**values, **{n: values[n].masked_fill(p, torch.nan) for n, p in places.items()}}


def check_unused_places(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                        seed: int = 0) -> CaseResult:
    """Checks that what is not read may be anything: the results are numbers, and so are the
    gradients where the formula's are."""
    op = kernel.op
    result = partial(_result, kernel, case, dtype, seed, "with NaN and infinity where none is read")
    plain = case_values(op, case, dtype, device, seed)
    for name, place in unused_places(op, case, dtype, device, seed).items():
        values = _with_nan(plain, {name: place})
        if refusals(kernel, values):
            continue
        try:
            with torch.no_grad():
                want, got = formula(op, values), results_of(call(kernel, values))
            spread = _spread(want, got)
            if not spread and kernel.differentiable and not refusals(
                    kernel, requiring_grad(op, values)):
                spread = _spread(*(_gradients(f, op, values) for f in (
                    partial(formula, op), lambda v: results_of(call(kernel, v)))))
                spread = spread and f"gradient: {spread}"
        except FAULTS as e:
            return result("failed", "fault", str(reason_of(e, classify(e))))
        if spread:
            kind = "gradient" if spread.startswith("gradient") else "not finite"
            return result("failed", kind, f"NaN in {name} where it is not read: {spread}")
    return result("passed")


def check_gradient_of_nan(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                          seed: int = 0) -> CaseResult:
    """Checks that a NaN in the gradient of one number reaches no more than it does in the
    formula."""
    op = kernel.op
    result = partial(_result, kernel, case, dtype, seed, "backward with one NaN")
    values = case_values(op, case, dtype, device, seed)
    if refusals(kernel, requiring_grad(op, values)):
        return result("skipped")
    try:
        spread = _spread(*(_gradients(f, op, values, one_nan=True) for f in (
            partial(formula, op), lambda v: results_of(call(kernel, v)))))
    except FAULTS:                             # the gradients have checks of their own
        return result("skipped")
    if spread:
        return result("failed", "not finite", f"one NaN in it: {spread}")
    return result("passed")


def _result(kernel: Kernel, case: Case, dtype: str, seed: int, circumstance: str, status: str,
            kind: str = "", detail: str = "") -> CaseResult:
    return CaseResult(kernel.id, case, dtype, status, detail=detail, circumstance=circumstance,
                      seed=seed, kinds=(kind,) if kind else ())


def _gradients(function: Callable[[Values], Sequence[Tensor]], op: Op, values: Values,
               one_nan: bool = False) -> list[Tensor]:
    wanting = requiring_grad(op, values)
    wanted = [v for v in wanting.values() if isinstance(v, Tensor) and v.requires_grad]
    with torch.enable_grad():
        results = [r for r in function(wanting) if r.requires_grad]
        weights = [torch.ones_like(r) for r in results]
        if one_nan and weights[0].numel():
            weights[0].view(-1)[-1] = torch.nan
        grads = torch.autograd.grad(results, wanted, weights, allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for v, g in zip(wanted, grads)]


def _spread(want: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    """Returns how many numbers are NaN where the formula's are none."""
    for i, (w, g) in enumerate(zip(want, got)):
        if w.is_floating_point() and w.shape == g.shape and w.dtype.itemsize > 1:
            wrong = g.isnan() & ~w.isnan()
            if bool(wrong.any()):
                return f"{int(wrong.sum())} of {wrong.numel()} numbers of {i} are NaN"
    return ""
