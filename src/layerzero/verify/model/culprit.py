"""Finds the culprit of a failed comparison: the first stage that diverges, the kernel, and the
likely class of error.

1. Descend: the first stage, in the order of computing, that exceeds its limit.
2. Check: the kernel that served that stage is called again with the same arguments, against the
   contract's formula. If it keeps the contract, the kernel is right and the call is wrong: the
   model uses another convention.
3. Swap: every kernel of the run is left out in turn. The one without which nothing diverges is
   the culprit.
4. Classify: which altered reference gives the same wrong result?
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...models.decoder import StageValue, Trace
from ...spec.codec import Record
from ...spec.errors import LayerZeroError
from ...spec.kernel import Kernel
from ...spec.mistake import Mistake, Results
from ...spec.op import Op
from ...world import snapshot as worlds
from ..diagnosis.diagnose import CLASSES
from ..kernel.contract import call, formula, results_of, upcast
from ..kernel.guarded import poisoned_memory
from ..kernel.judging import ROUNDINGS, judge_result, worst_indices
from .route import TIMES_EAGER, LadderRow, Route, difference, max_abs
from .served import LzCaller, without_kernels

NARROW_DTYPES = (torch.bfloat16, torch.float16)
Arguments = dict[str, Any]


class Swap(NamedTuple):
    """The comparison without `kernel`."""

    kernel: str
    fixed: bool
    text: str


@dataclass(frozen=True)
class Culprit(Record):
    """The kernel, the stage, and the likely class of error."""

    stage: str
    op: str
    kernel: str                                # "" if no single kernel is to blame
    # one of diagnosis.CLASSES: convention, mask, alignment, precision, ...
    kind: str
    why: str
    error: float
    allowed: float
    worst: tuple[tuple[int, ...], ...] = ()
    swaps: tuple[Swap, ...] = ()
    keeps_contract: bool = False               # the kernel is right: the call is wrong

    def __str__(self) -> str:
        who = f"lz.{self.op} by {self.kernel}" if self.op else self.kernel or "no kernel alone"
        if self.keeps_contract:
            who = f"the call of lz.{self.op}; {self.kernel} keeps the contract"
        lines = [f"  culprit: {who}",
                 f"  first diverging stage: {self.stage}, off by {self.error:.3g} where "
                 f"{self.allowed:.3g} is allowed, worst at "
                 f"{', '.join(map(str, self.worst)) or 'no index'}",
                 f"  likely class: {self.kind}: {self.why}", f"  what to do: {CLASSES[self.kind]}"]
        by_text: dict[str, list[str]] = {}
        for swap in self.swaps:
            by_text.setdefault(swap.text, []).append(swap.kernel)
        return "\n".join(lines + [f"  without {' or '.join(kernels)}: {text}"
                                  for text, kernels in by_text.items()])


def find(route: Route, named: str = "") -> Culprit:
    """Finds the culprit of a failed route. `named`: the kernel or library that was to serve."""
    caller = LzCaller(named)
    runs = _runs(route, caller)
    swaps = tuple(_swaps(route, [kernel for _, kernel in caller.counts], named))
    order = list(route.truth)
    failing = [(order.index(row.what), row, trace) for trace in runs
               for row in _failing_rows(route, trace)]
    # only a row over all stages failed, such as the top-1
    if not failing:
        nearest = max((row for row in route.rows(runs[0])), key=lambda row: (not row.ok, row.ratio))
        return _culprit_by_swaps(nearest, swaps,
                                 "no stage alone is further off than it may be: small differences "
                                 "add up")
    _, first, trace = min(failing, key=lambda item: item[0])
    stage_value = trace[first.what]
    kernels = worlds.current().catalog.by_id
    if stage_value.kernel not in kernels:      # plain torch between calls, or a gradient
        return _culprit_by_swaps(first, swaps, "no single kernel is to blame")
    stage, kernel = first.what, kernels[stage_value.kernel]
    kernel_is_right = keeps_contract(kernel, stage_value)
    # an earlier stage may be off by just less than its limit
    if kernel_is_right:
        earlier = itertools.takewhile(lambda item: item[0] != first.what, trace.items())
        earlier_culprit = next(((s, n) for s, n in earlier if n.kernel in kernels
                                and s in route.truth
                                and not keeps_contract(kernels[n.kernel], n)), None)
        if earlier_culprit is not None:
            (stage, stage_value), kernel_is_right = earlier_culprit, False
            kernel = kernels[stage_value.kernel]
    want = route.truth[stage].to(stage_value.value.device)
    kind, why = classify(kernel, _values(kernel.op, stage_value), stage_value, want,
                         kernel_is_right)
    row = route.row(trace, stage)
    return Culprit(stage, stage_value.op, stage_value.kernel, kind, why, row.error, row.allowed,
                   row.worst or tuple(worst_indices(stage_value.value, want)), swaps,
                   kernel_is_right)


def _culprit_by_swaps(row: LadderRow, swaps: Sequence[Swap], otherwise: str) -> Culprit:
    """Returns the culprit by swaps alone, where no call computed the value."""
    fixed = [s.kernel for s in swaps if s.fixed]
    if len(fixed) != 1:
        return Culprit(row.what, "", "", "unknown", otherwise, row.error, row.allowed, row.worst,
                       tuple(swaps))
    backward = row.what.startswith("grad")
    why = ("its backward differs: the forward of every stage agrees" if backward
           else "leaving it out mends all")
    return Culprit(row.what, worlds.current().catalog.by_id[fixed[0]].op.name, fixed[0],
                   "gradient" if backward else "unknown", why, row.error, row.allowed, row.worst,
                   tuple(swaps))


def _swaps(route: Route, kernels: Sequence[str], named: str) -> Iterator[Swap]:
    """Reruns the route without each kernel in turn."""
    for kernel in kernels:
        if kernel not in worlds.current().catalog.by_id:
            continue
        try:
            with without_kernels([kernel]):
                runs = _runs(route, LzCaller("" if named == kernel else named))
        except LayerZeroError as e:
            yield Swap(kernel, False, f"nothing else can serve: {str(e).splitlines()[0]}")
            continue
        diverging = next((row for trace in runs
                          for row in (*_failing_rows(route, trace), *route.rows(trace))
                          if not row.ok), None)
        yield Swap(kernel, diverging is None, "all stages agree" if diverging is None
                   else f"still diverges at {diverging.what}")


def _runs(route: Route, caller: LzCaller) -> list[Trace]:
    """Runs the route plainly and over poisoned memory: unwritten may be right by chance."""
    plain = route.run(caller)
    with warnings.catch_warnings(), poisoned_memory():
        warnings.filterwarnings("ignore",
                                message=".*does not have a deterministic implementation.*")
        return [plain, route.run(caller)]


def _failing_rows(route: Route, trace: Trace) -> Iterator[LadderRow]:
    """Yields the stages that exceed their limit, in the order of computing."""
    return (row for row in (route.row(trace, stage) for stage in route.truth if stage in trace)
            if not row.ok)


def _values(op: Op, stage_value: StageValue) -> Arguments:
    arguments = stage_value.arguments or {}
    return {p.name: arguments.get(p.name, p.default) for p in op.params}


@torch.no_grad()
def keeps_contract(kernel: Kernel, stage_value: StageValue) -> bool:
    """Does the kernel keep its contract for these arguments, over poisoned memory too?"""
    values = _values(kernel.op, stage_value)
    first = results_of(call(kernel, values))
    with poisoned_memory():
        second = results_of(call(kernel, values))
    dtype = str(stage_value.value.dtype).removeprefix("torch.")
    parts = zip(first, second, formula(kernel.op, upcast(values)), formula(kernel.op, values))
    return not any(judge_result(kernel.op, dtype, "", *four).complaints for four in parts)


# Classification.

@torch.no_grad()
def classify(kernel: Kernel, values: Arguments, stage_value: StageValue, want: Tensor,
             kernel_is_right: bool = False) -> tuple[str, str]:
    """Returns the class of an error (one of diagnosis.CLASSES) and the evidence. With
    `kernel_is_right` the call is altered instead until the reference gives what was wanted."""
    got, op = stage_value.value, kernel.op
    if kernel_is_right:
        for kind, words, result, tolerance in _alternatives(op, values, stage_value.result):
            if (result.numel() == want.numel() and difference(result.reshape(want.shape), want)
                <= tolerance):
                return (kind,
                        "the call is not what the model wants: the result would be right with "
                        f"{words}")
        return ("unknown",
                "the kernel keeps its contract, and no other reading of the call that was tried "
                "gives the " \
             "result; look at the weights and at the code of the model")
    if not got.isfinite().all() and want.isfinite().all():
        return ("uninitialised output",
                f"{int((~got.isfinite()).sum())} of {got.numel()} are not finite")
    instability = (_instability(kernel, values, stage_value.result) if want.isfinite().all()
                   else None)
    if instability:
        return instability
    for kind, words, result, tolerance in _alternatives(op, values, stage_value.result):
        if (result.numel() == got.numel() and difference(result.reshape(got.shape), got)
            <= tolerance):
            return kind, f"it gives what the reference gives with {words}"
    dense = {n: v.contiguous().clone() if isinstance(v, Tensor) else v for n, v in values.items()}
    dense_result = results_of(call(kernel, dense))[stage_value.result].reshape(want.shape)
    if difference(dense_result, want) < 0.01 * difference(got, want):
        return ("layout",
                "it is right for contiguous copies of its inputs, and wrong for their strides or "
                "offsets")
    return (_precision(op, values, stage_value, want)
            or ("unknown", "no altered reference gives this result"))


def _instability(kernel: Kernel, values: Arguments, result: int) -> tuple[str, str] | None:
    """Calls the kernel again, over poisoned memory and twice plainly; nothing may be NaN."""
    with poisoned_memory():
        poisoned = results_of(call(kernel, values))[result]
    first, second = (results_of(call(kernel, values))[result] for _ in range(2))
    holes = int((~poisoned.isfinite()).sum())
    if holes:
        return ("uninitialised output",
                f"over memory full of NaN {holes} of {poisoned.numel()} are NaN: not every " \
             "element is written")
    if not torch.equal(first, second):
        return ("non-determinism",
                f"two calls with the same arguments differ by {difference(first, second):.3g}")
    return None


def _precision(op: Op, values: Arguments, stage_value: StageValue,
               want: Tensor) -> tuple[str, str] | None:
    """Is the error that of the formula at a narrower dtype, or roundings at this one?"""
    error, size = difference(stage_value.value, want), max(max_abs(want), 1e-30)
    eps = torch.finfo(stage_value.value.dtype).eps
    for narrow in NARROW_DTYPES:
        if torch.finfo(narrow).eps <= eps:
            continue
        rounded = {n: v.to(narrow) if isinstance(v, Tensor) and v.is_floating_point() else v
                   for n, v in values.items()}
        narrow_result = _try_formula(op, rounded, stage_value.result)
        if (narrow_result is not None
            and error <= 4 * difference(narrow_result.reshape(want.shape), want)):
            return ("precision",
                    f"it is as far off as the formula in {str(narrow)[6:]}: something is rounded "
                    "or " \
                 "accumulated too narrowly")
    if error <= 64 * eps * size:
        return ("precision",
                f"it is off by {error / eps / size:.0f} roundings of "
                f"{str(stage_value.value.dtype)[6:]}")
    return None


def _alternatives(op: Op, values: Arguments,
                  result: int) -> Iterator[tuple[str, str, Tensor, float]]:
    """Yields altered references that differ from the reference: class, text, result, and its
    tolerance at the dtype of the call."""
    unaltered = formula(op, upcast(values))[result]
    for mistake in (*op.mistakes, *_MODEL_MISTAKES.get(op.name, ())):
        wide, eager = (_altered_result(op, mistake, v, result) for v in (upcast(values), values))
        if wide is not None and eager is not None:
            rounding = torch.finfo(eager.dtype).eps * max_abs(wide)
            tolerance = TIMES_EAGER * difference(eager, wide) + 2 * ROUNDINGS * rounding
            if difference(wide, unaltered) > 2 * tolerance:
                yield mistake.kind, mistake.words, wide, tolerance


def _altered_result(op: Op, mistake: Mistake, values: Arguments,
                    result: int) -> Tensor | None:
    try:
        altered = mistake.apply(op, values)
    except FAULTS:                             # the mistake does not apply to this call
        return None
    if isinstance(altered, Results):
        tensor = altered.values[result]
        return tensor if isinstance(tensor, Tensor) else None
    return None if altered is None else _try_formula(op, altered, result)


def _try_formula(op: Op, values: Arguments, result: int) -> Tensor | None:
    try:
        return formula(op, values)[result]
    except FAULTS:
        return None


def _reordered_rope(op: Any, v: Arguments) -> Results:
    """Rotates by the other convention and reorders to this one: the rows of the query and key
    projections are in the other order, as in GGUF files."""
    other = "interleaved" if v["style"] == "rotate_half" else "rotate_half"

    def reordered(t: Tensor) -> Tensor:
        if other == "interleaved":
            return torch.cat((t[..., 0::2], t[..., 1::2]), -1)
        return torch.stack(t.chunk(2, -1), -1).flatten(-2)

    return Results(tuple(map(reordered, results_of(op.reference(**{**v, "style": other})))))


def _shift_positions(by: int) -> Callable[[Any, Arguments], Arguments | None]:
    def apply(op: Any, v: Arguments) -> Arguments | None:
        ids = v["position_ids"]
        return (None if ids is None
                else {**v, "position_ids": (ids + by).clamp(0, v["cos"].shape[-2] - 1)})

    return apply


# Mistakes that only show in a model.
_MODEL_MISTAKES: Mapping[str, tuple[Mistake, ...]] = {"rope": (
    Mistake("convention", "the other style, and the elements of a head in the order of that",
               _reordered_rope),
    Mistake("alignment", "every position one less", _shift_positions(-1)),
    Mistake("alignment", "every position one more", _shift_positions(1)))}
