"""Numbers of float16 whose parts of a sum are beyond it where the sum is not, and numbers whose
result is beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS, classify, reason_of
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.generated import Case, if_allowed, is_costly
from ...kernel.circumstance import Circumstance
from ...kernel.contract import (
    CaseResult,
    call,
    case_refusals,
    case_tensors,
    case_values,
    check_case,
    formula,
    results_of,
    upcast,
)
from ..non_finite import is_of_others
from .row_circumstances import if_finite

LARGEST = torch.finfo(torch.float16).max
POWERS = (15, 13, 11, 9)                       # of two, that the largest number of the tensor gets
LOUD, BEYOND = 60_000.0, 1.75                  # a sum of two such numbers is beyond float16
ROOM = 0.5                                     # of the largest number, that results may have
ELEMENTS = 1 << 18                             # of the main tensor


def _loud(t: Tensor, power: int) -> Tensor:
    size = float(t.abs().max())
    return t * 2.0 ** (power - math.ceil(math.log2(size))) if size else t


def _main(op: Op, values: dict[str, Any]) -> Tensor | None:
    t = values.get(op.main_tensor)
    usable = (isinstance(t, Tensor) and t.dtype == torch.float16 and t.dim() > 0
              and t.shape[-1] > 1 and t.numel() > 0 and bool(t.isfinite().all()))
    return t if usable else None


class CancelsInHalf(Circumstance):
    """The first half of each row is positive and loud, the second negative, beside positive
    weights: sums of a part are beyond float16, those of all are not."""

    name, even = "filled with halves of float16 that cancel", False

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = _main(op, values)
        if t is None:
            return None
        signs = torch.ones(t.shape[-1], dtype=t.dtype, device=t.device)
        signs[t.shape[-1] // 2:] = -1.0
        others = {n: v.abs() for n in op.same_dtype if n != op.main_tensor
                  and isinstance(v := values.get(n), Tensor)}
        for power in POWERS:
            main = _loud(t.abs(), power) * signs
            loud = if_finite(op, {**values, **others, op.main_tensor: main})
            if loud is not None and _largest(op, loud) < ROOM * LARGEST:
                return loud
        return None


def _largest(op: Op, values: dict[str, Any]) -> float:
    with torch.no_grad():
        results = formula(op, upcast(values))
    return max((float(r.abs().max()) for r in results
                if isinstance(r, Tensor) and r.is_floating_point() and r.numel()), default=0.0)


def _all_loud(op: Op, values: dict[str, Any]) -> dict[str, Any]:
    """Returns values of which every number of the main tensor, and of those with its shape and
    dtype, is loud with the sign that it has there: a sum of two is beyond float16."""
    main = values[op.main_tensor]
    loud = torch.full_like(main, LOUD).copysign(main)
    return {**values, **{n: loud.clone() for n in op.same_dtype
                         if isinstance(values.get(n), Tensor) and values[n].shape == main.shape}}


def check_beyond_range(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                       seed: int = 0, all_loud: bool = False) -> CaseResult:
    """Checks that results which are far beyond float16 are not finite: a clamp hides them from
    whoever looks for infinities, as the scaler of a loss does."""
    op = kernel.op

    def result(status: str, kind: str = "", detail: str = "") -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, detail=detail, seed=seed,
                          circumstance="with results beyond float16", kinds=(kind,) if kind else ())

    values = dict(case_values(op, case, dtype, device, seed))
    t = _main(op, values)
    loud = None if t is None else if_allowed(op, _all_loud(op, values) if all_loud else {
        **values, op.main_tensor: _loud(t, POWERS[0])})
    if loud is None:
        return result("skipped")
    try:
        with torch.no_grad():
            want, got = formula(op, upcast(loud)), results_of(call(kernel, loud))
            eager = formula(op, loud)
    except FAULTS as e:
        return result("failed", "fault", str(reason_of(e, classify(e))))
    for w, narrow, g in zip(want, eager, got):
        if isinstance(g, Tensor) and g.dtype == torch.float16 and g.shape == w.shape:
            clamped = (w.abs() > BEYOND * LARGEST) & ~narrow.isfinite() & g.isfinite()
            if bool(clamped.any()):
                return result("skipped" if is_of_others(kernel) else "failed", "not finite",
                              f"{int(clamped.sum())} results are finite where the formula's are "
                              "beyond float16")
    return result("passed")


def half_range_checks(kernel: Kernel, device: str, seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields both for the plainest case of the op, and for that with the longest rows."""
    op = kernel.op
    if "float16" not in op.dtypes or not op.tensors or kernel.backend == "reference":
        return

    def row(case: Case) -> int:
        main = case_tensors(op, case, "float16", device, seed).get(op.main_tensor)
        return 0 if main is None or not main.dim() or main.numel() > ELEMENTS else main.shape[-1]

    accepted = [case for case in (*op.cases, *op.stress) if not is_costly(op, case)
                and not case_refusals(kernel, case, "float16", device, seed)]
    for case in ([accepted[0], max(accepted, key=row)] if accepted else ()):
        yield partial(check_case, kernel, case, "float16", device, seed, CancelsInHalf())
        for all_loud in (False, True)[:1 + (len(op.same_dtype) > 1)]:
            yield partial(check_beyond_range, kernel, case, "float16", device, seed, all_loud)
