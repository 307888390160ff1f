"""Gradients of calls that are given otherwise, and of calls with something between the forward pass
and its backward: another forward pass, or a tensor that is written to; gradients that are added to
those of an earlier step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS, classify, reason_of
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.generated import Case
from ...kernel.case_sizes import relative_size
from ...kernel.circumstance import Circumstance
from ...kernel.contract import (
    SMALL,
    CaseResult,
    call,
    case_refusals,
    case_tensors,
    case_values,
    case_values_to_read,
    check_case,
    refusals,
    results_of,
)
from ...kernel.gradients import check_gradients, gradient_cases, requiring_grad
from ...kernel.output_grads import HALF_LOSSES
from ..non_finite import is_of_others
from ..second_derivative import check_second_order
from .argument_circumstances import WithoutOthers, optional_tensors
from .call_circumstances import (
    Expanded,
    OtherDefaultDtype,
    OtherThreadCount,
    SharedTensor,
    UnusualValues,
)
from .dtype_circumstances import OtherDtype
from .row_circumstances import OtherLayout, Shifted, ZeroRows, if_finite

Values = dict[str, Any]
ANOTHER_CALL, RESULT = "another forward pass", "a write to the result"
GONE = "its inputs are gone"
LAYOUTS = ("sparse", "transposed", "offset")
# More of it, for the longer lanes: a network has many layers, which may share weights, and what a
# caller made for a call alone is gone before its backward.
MANY, MANY_CALLS = "many other forward passes", 40
SAME_WEIGHTS, OTHERS_GONE = "a forward pass of the same weights", "the end of its other inputs"
EVALUATION = "calls that record nothing"
MANY_ROWS, OF_ROWS = 3000, ("norm", "linear", "mlp", "loss")


class SomeZeros(Circumstance):
    """Every third number of each tensor beside the main one is zero, as of a weight that begins so
    or was pruned: a backward that divides by it, to have the input back from the result, has none.
    """

    name = "every third number of the other tensors zero"

    def alter(self, op: Op, values: Values) -> Values | None:
        others: Values = {}
        for name in op.differentiable:
            t = values[name]
            if (name != op.main_tensor and isinstance(t, Tensor) and t.numel() > 2
                    and t.dtype.itemsize > 1):     # codes have no gradient
                third = (torch.arange(t.numel(), device=t.device) % 3 == 1).view(t.shape)
                others[name] = t.masked_fill(third, 0.0)
        return if_finite(op, {**values, **others}) if others else None


def altered_gradient_checks(kernel: Kernel, device: str,
                            seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields gradients under process-wide settings, of unusual contents and of each tensor in
    another layout or dtype, indices too; and such as are added to those of an earlier step."""
    op, dtype = kernel.op, kernel.op.dtypes[0]
    accepted = [c for c in gradient_cases(op) if not case_refusals(kernel, c, dtype, device, seed)]
    if not accepted:
        return
    given = [(case, case_tensors(op, case, dtype, device, seed).keys()) for case in accepted]
    fullest = max(given, key=lambda c: len(c[1]))[0]
    plain = [accepted[0], fullest] if fullest != accepted[0] else accepted[:1]
    everywhere = (OtherDefaultDtype(), OtherThreadCount(3), OtherThreadCount(7), ZeroRows(),
                  SomeZeros(), *(UnusualValues(how) for how in ("zeros", "one sign",
                                                                "small numbers")))
    yield from (partial(check_added, kernel, case, dtype, device, seed) for case in plain)
    yield from (partial(check_gradients, kernel, case, dtype, device, seed, altered=c)
                for case in plain for c in everywhere)
    if "float16" in op.dtypes:
        yield from (partial(check_gradients, kernel, case, "float16", device, seed, of=of)
                    for case in plain for of in HALF_LOSSES)
    for name in op.tensors:
        with_it = next((case for case, tensors in given if name in tensors), None)
        if with_it is not None:
            each = (*(OtherLayout(name, layout) for layout in LAYOUTS), Shifted(name, True),
                    *(Expanded(name, dim) for dim in range(3)), OtherDtype(name))
            yield from (partial(check_gradients, kernel, with_it, dtype, device, seed, altered=c)
                        for c in each)


def backward_checks(kernel: Kernel, device: str, lane: str,
                    seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the checks of the plainest and of the fullest gradient case; in the quick lane every
    other one of what is left out or shared, by the seed."""
    op, dtype = kernel.op, kernel.op.dtypes[0]
    accepted = [c for c in gradient_cases(op) if not case_refusals(kernel, c, dtype, device, seed)]
    if not accepted:
        return
    fullest = max(accepted, key=lambda c: len(case_tensors(op, c, dtype, device, seed)))
    yield from (partial(check_between, kernel, case, dtype, device, seed)
                for case in ((accepted[0], fullest) if fullest != accepted[0] else accepted[:1]))
    due = [(True, False)[(i + seed) % 2] if lane == "quick" else None
           for i in range(len(optional_tensors(op)))]
    yield from (partial(check_gradients, kernel, fullest, dtype, device, seed,
                        altered=WithoutOthers(name, alone))
                for i, name in enumerate(optional_tensors(op)) if name in op.differentiable
                for alone in (True, False) if due[i] in (None, alone))
    if not is_of_others(kernel):
        yield partial(check_second_order, kernel, accepted[0], dtype, device, seed)
    for i, (a, b) in enumerate(combinations(op.same_dtype or op.differentiable, 2)):
        if lane == "quick" and (i + seed) % 2:
            continue
        given = SharedTensor(a, b)
        for case in _able(kernel, given, dtype, device, seed):
            yield partial(check_case, kernel, case, dtype, device, seed, given)
            yield partial(check_gradients, kernel, case, dtype, device, seed, altered=given)
    yield from (partial(check_gradients, kernel, case, "bfloat16", device, seed)
                for case in _of_many_rows(kernel, accepted[0], device, seed))


def _of_many_rows(kernel: Kernel, plain: Case, device: str, seed: int) -> list[Case]:
    """Returns a case of as many rows as a batch has tokens, over which the gradients of weights of
    16 bits are added."""
    op = kernel.op
    if ("bfloat16" not in op.dtypes or len(op.differentiable) < 2 or op.family not in OF_ROWS
            or "rows" not in inspect.signature(op.inputs).parameters):
        return []
    case = {**plain, "rows": (MANY_ROWS,)}
    if op.family == "loss":                    # of a mean each is a thousandth as large
        case["reduction"] = "sum"
    return [] if case_refusals(kernel, case, "bfloat16", device, seed) else [case]


def _able(kernel: Kernel, given: Circumstance, dtype: str, device: str,
          seed: int) -> Iterator[Case]:
    """Yields the first of the op's own cases that can be given so."""
    op = kernel.op
    return islice((case for case in op.cases if relative_size(op, case) <= SMALL
                   and not case_refusals(kernel, case, dtype, device, seed)
                   and given.alter(op, case_values_to_read(op, case, dtype, device, seed))), 1)


def kept_checks(kernel: Kernel, device: str, seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the checks of what a forward pass keeps for its backward, for the longer lanes."""
    op, dtype = kernel.op, kernel.op.dtypes[0]
    if not kernel.differentiable or not op.differentiable:
        return
    accepted = [c for c in gradient_cases(op) if not case_refusals(kernel, c, dtype, device, seed)]
    yield from (partial(check_between, kernel, case, dtype, device, seed,
                        (MANY, SAME_WEIGHTS, OTHERS_GONE)) for case in accepted[:4])
    yield from (partial(check_after_evaluation, kernel, case, dtype, device, seed)
                for case in accepted[:4])


def check_after_evaluation(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                           seed: int = 0) -> CaseResult:
    """Checks that every gradient is the same after calls with the same tensors that record nothing:
    a copy that was kept of a weight has no gradient."""
    op = kernel.op

    def result(status: str, detail: str = "", reasons: Any = ()) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail,
                          circumstance=f"backward after {EVALUATION}", seed=seed,
                          kinds=("gradient",) if status == "failed" else ())

    first, values = (requiring_grad(op, case_values(op, case, dtype, device, seed))
                     for _ in range(2))
    reasons = refusals(kernel, values)
    if reasons:
        return result("skipped", reasons=reasons)
    try:
        alone = _gradients(kernel, first)
    except FAULTS:                             # the gradients have checks of their own
        return result("skipped", "has no gradient")
    try:
        with torch.no_grad():
            for _ in range(2):
                call(kernel, values)
        after = _gradients(kernel, values)
    except FAULTS as e:
        return result("failed", str(reason_of(e, classify(e))))
    rtol, atol = (8 * t for t in op.tolerance.of(dtype))
    wrong = next((n for n, g in alone.items() if not _alike(g, after[n], rtol, atol)), None)
    return (result("passed") if wrong is None else
            result("failed", f"another gradient of {wrong} after {EVALUATION}"))


def check_between(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                  seed: int = 0, betweens: Sequence[str] = ()) -> CaseResult:
    """Checks that a backward gives what it gives at once, or raises, where something is between:
    what the forward pass has saved is its own, or has a version that autograd looks at."""
    op = kernel.op

    def result(status: str, between: str = "", detail: str = "", reasons: Any = ()) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail,
                          circumstance=f"backward after {between or 'other work'}", seed=seed,
                          kinds=("gradient",) if status == "failed" else ())

    def values_of(seed: int) -> Values:
        return requiring_grad(op, case_values(op, case, dtype, device, seed))

    reasons = refusals(kernel, values_of(seed))
    if reasons:
        return result("skipped", reasons=reasons)
    try:
        alone = _gradients(kernel, values_of(seed))
    except FAULTS:                             # the gradients have checks of their own
        return result("skipped", detail="has no gradient")
    rtol, atol = (8 * t for t in op.tolerance.of(dtype))
    tensors = case_tensors(op, case, dtype, device, seed)
    for between in betweens or (ANOTHER_CALL, *(f"a write to {name}" for name in tensors), RESULT):
        try:
            after = _gradients(kernel, values_of(seed), partial(
                _interfere, kernel, between, values_of(seed + 1)))
        except FAULTS as e:                    # autograd has seen it
            if betweens:                       # nothing that a backward needs was written to
                return result("failed", between, str(reason_of(e, classify(e))))
            continue
        wrong = next((n for n, g in alone.items() if not _alike(g, after[n], rtol, atol)), None)
        if wrong is not None:
            return result("failed", between, f"another gradient of {wrong} after {between}, and no "
                                             "error")
    try:
        after = _gradients_of_copies(kernel, values_of(seed))
    except FAULTS as e:
        return result("failed", GONE, str(reason_of(e, classify(e))))
    wrong = next((n for n, g in alone.items() if not _alike(g, after[n], rtol, atol)), None)
    return result("passed") if wrong is None else result(
        "failed", GONE, f"another gradient of {wrong} where {GONE}")


def check_added(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                seed: int = 0) -> CaseResult:
    """Checks that `backward` adds to the gradients that are there, as of an earlier micro-batch,
    what it gives by itself: a kernel that adds up by itself adds once, where it is asked to."""
    op = kernel.op

    def result(status: str, detail: str = "", reasons: Any = ()) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail, seed=seed,
                          circumstance="backward added to an earlier one",
                          kinds=("gradient",) if status == "failed" else ())

    values = requiring_grad(op, case_values(op, case, dtype, device, seed))
    reasons = refusals(kernel, values)
    if reasons:
        return result("skipped", reasons=reasons)
    wanted = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
    try:
        alone = _gradients(kernel, values)
        for v in wanted.values():
            v.grad = torch.ones_like(v)
        with torch.enable_grad():
            for _ in range(2):
                results = [r for r in results_of(call(kernel, values)) if r.requires_grad]
                torch.autograd.backward(results, _weights(results))
    except FAULTS:                             # the gradients have checks of their own
        return result("skipped", detail="has no gradient")
    rtol, atol = (8 * t for t in op.tolerance.of(dtype))
    for name, v in wanted.items():
        one = alone[name]
        if v.grad is None or not _alike(torch.zeros_like(v) if one is None else one,
                                        (v.grad - 1) / 2, rtol, atol):
            return result("failed", f"two backward passes do not add twice the gradient of {name} "
                                    "to the one that is there")
    return result("passed")


def _weights(results: Sequence[Tensor]) -> list[Tensor]:
    return [torch.linspace(-1, 2, r.numel(), device=r.device).view(r.shape).to(r) for r in results]


def _gradients(kernel: Kernel, values: Values,
               between: Callable[[Values, Sequence[Tensor]], None] | None = None
               ) -> dict[str, Tensor | None]:
    with torch.enable_grad():
        results = [r for r in results_of(call(kernel, values)) if r.requires_grad]
        weights = _weights(results)
        if between is not None:
            between(values, results)
        wanted = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
        return dict(zip(wanted, torch.autograd.grad(results, list(wanted.values()), weights,
                                                    allow_unused=True)))


def _gradients_of_copies(kernel: Kernel, values: Values) -> dict[str, Tensor | None]:
    """Returns the gradients of a call whose tensors nobody else holds, as activations: what the
    backward needs of them it has saved."""
    wanted = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
    by_id: dict[int, Tensor] = {}              # one tensor may be given twice
    with torch.enable_grad():
        copies = {n: by_id.setdefault(id(v), v.clone(memory_format=torch.preserve_format))
                  if isinstance(v, Tensor) and 0 not in v.stride() else v
                  for n, v in values.items()}
        results = [r for r in results_of(call(kernel, copies)) if r.requires_grad]
        del copies, by_id
        return dict(zip(wanted, torch.autograd.grad(results, list(wanted.values()),
                                                    _weights(results), allow_unused=True)))


def _interfere(kernel: Kernel, between: str, others: Values, values: Values,
               results: Sequence[Tensor]) -> None:
    if between in (ANOTHER_CALL, MANY, SAME_WEIGHTS):
        if between == SAME_WEIGHTS:            # and other indices beside them
            others = {**others, **{n: values[n] for n in kernel.op.differentiable
                                   if n != kernel.op.main_tensor}}
        if not refusals(kernel, others):
            kept = [call(kernel, others) for _ in range(MANY_CALLS if between == MANY else 1)]
            del kept                           # till now their graphs are alive
        return
    if between == OTHERS_GONE:
        names = [n for n, t in values.items() if isinstance(t, Tensor) and not t.requires_grad]
        sizes = [values.pop(n).nbytes for n in names]
        for size in sizes:                     # where they were is something else
            torch.full((size,), 1, dtype=torch.uint8)
        return
    written = results if between == RESULT else [values[between.removeprefix("a write to ")]]
    with torch.no_grad():
        for t in written:
            if t.numel() and 0 not in t.stride() and (t.dtype.itemsize > 1
                                                      or t.dtype == torch.bool):
                t.copy_(t * -0.5 + 0.25 if t.is_floating_point() else t.flip(0))


def _alike(a: Tensor | None, b: Tensor | None, rtol: float, atol: float) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(b.double(), a.double(), rtol=rtol, atol=atol, equal_nan=True)
