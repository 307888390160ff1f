"""Whose fault is it? From a comparison that failed to the first stage that diverges, the kernel, and its likely class.

1. Descend: of all stages, in the order of computing, the first that is further off than it may be.
2. Accuse: the kernel that served that stage, called again with the same arguments, against the contract's formula. If
   it keeps the contract, the kernel is right and the call is wrong: the model is described by another convention.
3. Swap: every kernel of the run is left out in turn. The one without which nothing diverges is the culprit.
4. Classify: what would the kernel have to get wrong to give just this? Each way is tried.
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
from ...models.decoder import Note, Trace
from ...spec.alteration import Alteration, Results
from ...spec.codec import Record
from ...spec.errors import LayerZeroError
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...world import snapshot as worlds
from ..kernel.contract import ROUNDINGS, call, formula, judge, results_of, upcast, worst_indices
from ..kernel.diagnosis import CLASSES
from ..kernel.guarded import poisoned_memory
from .route import TIMES_EAGER, Route, Row, difference, largest
from .served import Served, without

NARROW = (torch.bfloat16, torch.float16)
Given = dict[str, Any]


class Swap(NamedTuple):
    """What became of the comparison when `kernel` was left out."""

    kernel: str
    fixed: bool
    text: str


@dataclass(frozen=True)
class Culprit(Record):
    """Who, where and, most likely, why."""

    stage: str
    op: str
    kernel: str                                # "" where no single kernel is to blame
    kind: str                                  # one of diagnosis.CLASSES: convention, mask, alignment, precision, ...
    why: str
    error: float
    allowed: float
    worst: tuple[tuple[int, ...], ...] = ()
    swaps: tuple[Swap, ...] = ()
    keeps_contract: bool = False               # the kernel does what it should: it was asked for something else

    def __str__(self) -> str:
        who = f"lz.{self.op} by {self.kernel}" if self.op else self.kernel or "no kernel alone"
        if self.keeps_contract:
            who = f"the call of lz.{self.op}; {self.kernel} keeps the contract"
        lines = [f"  culprit: {who}", f"  first diverging stage: {self.stage}, off by {self.error:.3g} where "
                 f"{self.allowed:.3g} is allowed, worst at {', '.join(map(str, self.worst)) or 'no index'}",
                 f"  likely class: {self.kind}: {self.why}", f"  what to do: {CLASSES[self.kind]}"]
        by_text: dict[str, list[str]] = {}
        for swap in self.swaps:
            by_text.setdefault(swap.text, []).append(swap.kernel)
        return "\n".join(lines + [f"  without {' or '.join(kernels)}: {text}" for text, kernels in by_text.items()])


def find(route: Route, named: str = "") -> Culprit:
    """The culprit of a route whose comparison failed. `named`: the kernel or library that was asked for."""
    do = Served(named)
    runs = _runs(route, do)
    swaps = tuple(_swaps(route, [kernel for _, kernel in do.counts], named))
    order = list(route.truth)
    bad_rows = [(order.index(row.what), row, trace) for trace in runs for row in _bad(route, trace)]
    if not bad_rows:                           # only what is made of all stages, such as the likeliest token
        nearest = max((row for row in route.rows(runs[0])), key=lambda row: (not row.ok, row.ratio))
        return _by_swaps(nearest, swaps, "no stage alone is further off than it may be: small differences add up")
    _, bad, trace = min(bad_rows, key=lambda found: found[0])
    note = trace[bad.what]
    kernels = worlds.current().catalog.by_id
    if note.kernel not in kernels:             # a sum between calls, or a gradient
        return _by_swaps(bad, swaps, "no single kernel is to blame")
    stage, kernel = bad.what, kernels[note.kernel]
    alone = keeps_contract(kernel, note)
    if alone:                                  # then one before it may be off by just less than shows
        earlier = itertools.takewhile(lambda item: item[0] != bad.what, trace.items())
        found = next(((s, n) for s, n in earlier if n.kernel in kernels and s in route.truth
                      and not keeps_contract(kernels[n.kernel], n)), None)
        if found is not None:
            (stage, note), alone = found, False
            kernel = kernels[note.kernel]
    want = route.truth[stage].to(note.value.device)
    kind, why = classify(kernel, _values(kernel.op, note), note, want, asked_right=alone)
    row = route.row(trace, stage)
    return Culprit(stage, note.op, note.kernel, kind, why, row.error, row.allowed,
                   row.worst or tuple(worst_indices(note.value, want)), swaps, alone)


def _by_swaps(bad: Row, swaps: Sequence[Swap], otherwise: str) -> Culprit:
    """Where no call made the value, only swapping tells."""
    fixed = [s.kernel for s in swaps if s.fixed]
    if len(fixed) != 1:
        return Culprit(bad.what, "", "", "unknown", otherwise, bad.error, bad.allowed, bad.worst, tuple(swaps))
    backward = bad.what.startswith("grad")
    why = "its backward differs: the forward of every stage agrees" if backward else "leaving it out mends all"
    return Culprit(bad.what, worlds.current().catalog.by_id[fixed[0]].op.name, fixed[0],
                   "gradient" if backward else "unknown", why, bad.error, bad.allowed, bad.worst, tuple(swaps))


def _swaps(route: Route, kernels: Sequence[str], named: str) -> Iterator[Swap]:
    """Each kernel left out in turn. What diverges without it too was not its fault alone."""
    for kernel in kernels:
        if kernel not in worlds.current().catalog.by_id:
            continue
        try:
            with without([kernel]):
                runs = _runs(route, Served("" if named == kernel else named))
        except LayerZeroError as e:
            yield Swap(kernel, False, f"nothing else can serve: {str(e).splitlines()[0]}")
            continue
        still = next((row for trace in runs for row in (*_bad(route, trace), *route.rows(trace)) if not row.ok), None)
        yield Swap(kernel, still is None, "all stages agree" if still is None else f"still diverges at {still.what}")


def _runs(route: Route, do: Served) -> list[Trace]:
    """As it is, and over memory full of NaN: what is left unwritten may hold the right numbers by chance."""
    plain = route.run(do)
    with warnings.catch_warnings(), poisoned_memory():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
        return [plain, route.run(do)]


def _bad(route: Route, trace: Trace) -> Iterator[Row]:
    """What is further off than it may be, in the order of computing."""
    return (row for row in (route.row(trace, stage) for stage in route.truth if stage in trace) if not row.ok)


def _values(op: Op, note: Note) -> Given:
    given = note.given or {}
    return {p.name: given.get(p.name, p.default) for p in op.params}


@torch.no_grad()
def keeps_contract(kernel: Kernel, note: Note) -> bool:
    """Does it compute what its contract says of just these arguments, over poisoned memory too?"""
    values = _values(kernel.op, note)
    first = results_of(call(kernel, values))
    with poisoned_memory():
        second = results_of(call(kernel, values))
    dtype = str(note.value.dtype).removeprefix("torch.")
    parts = zip(first, second, formula(kernel.op, upcast(values)), formula(kernel.op, values))
    return not any(judge(kernel.op, dtype, "", *four).complaints for four in parts)


# What would it have to get wrong?

@torch.no_grad()
def classify(kernel: Kernel, values: Given, note: Note, want: Tensor, asked_right: bool = False) -> tuple[str, str]:
    """The class of an error (one of diagnosis.CLASSES), and the reason. With `asked_right` the kernel is right by its
    contract: then the call is altered until it gives what was wanted."""
    got, op = note.value, kernel.op
    if asked_right:
        for kind, words, made, off in _ways(op, values, note.result):
            if made.numel() == want.numel() and difference(made.reshape(want.shape), want) <= off:
                return kind, f"the call is not what the model wants: the result would be right with {words}"
        return "unknown", "the kernel keeps its contract, and no other reading of the call that was tried gives the " \
            "result; look at the weights and at the code of the model"
    if not got.isfinite().all() and want.isfinite().all():
        return "uninitialised output", f"{int((~got.isfinite()).sum())} of {got.numel()} are not finite"
    found = _unsteady(kernel, values, note.result) if want.isfinite().all() else None
    if found:
        return found
    for kind, words, made, off in _ways(op, values, note.result):
        if made.numel() == got.numel() and difference(made.reshape(got.shape), got) <= off:
            return kind, f"it gives what the reference gives with {words}"
    dense = {n: v.contiguous().clone() if isinstance(v, Tensor) else v for n, v in values.items()}
    again = results_of(call(kernel, dense))[note.result].reshape(want.shape)
    if difference(again, want) < 0.01 * difference(got, want):
        return "layout", "it is right for contiguous copies of its inputs, and wrong for their strides or offsets"
    return _precision(op, values, note, want) or ("unknown", "no altered reference gives this result")


def _unsteady(kernel: Kernel, values: Given, result: int) -> tuple[str, str] | None:
    """Called again: over memory full of NaN, and plainly. What is wanted has no NaN."""
    with poisoned_memory():
        poisoned = results_of(call(kernel, values))[result]
    first, second = (results_of(call(kernel, values))[result] for _ in range(2))
    holes = int((~poisoned.isfinite()).sum())
    if holes:
        return "uninitialised output", f"over memory full of NaN {holes} of {poisoned.numel()} are NaN: not every " \
            "element is written"
    if not torch.equal(first, second):
        return "non-determinism", f"two calls with the same arguments differ by {difference(first, second):.3g}"
    return None


def _precision(op: Op, values: Given, note: Note, want: Tensor) -> tuple[str, str] | None:
    """As far off as the formula is at a narrower dtype, or as many roundings of its own?"""
    error, own, size = difference(note.value, want), torch.finfo(note.value.dtype).eps, max(largest(want), 1e-30)
    for narrow in NARROW:
        if torch.finfo(narrow).eps <= own:
            continue
        rounded = {n: v.to(narrow) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in values.items()}
        made = _formula(op, rounded, note.result)
        if made is not None and error <= 4 * difference(made.reshape(want.shape), want):
            return "precision", f"it is as far off as the formula in {str(narrow)[6:]}: something is rounded or " \
                "accumulated too narrowly"
    if error <= 64 * own * size:
        return "precision", f"it is off by {error / own / size:.0f} roundings of {str(note.value.dtype)[6:]}"
    return None


def _ways(op: Op, values: Given, result: int) -> Iterator[tuple[str, str, Tensor, float]]:
    """Other things that could have been computed, and are not the same: class, in words, the result, and how far off
    it may be at the dtype of the call."""
    as_it_is = formula(op, upcast(values))[result]
    for row in (*op.alterations, *_MORE.get(op.name, ())):
        made, eager = (_altered(op, row, v, result) for v in (upcast(values), values))
        if made is not None and eager is not None:
            off = TIMES_EAGER * difference(eager, made) + 2 * ROUNDINGS * torch.finfo(eager.dtype).eps * largest(made)
            if difference(made, as_it_is) > 2 * off:
                yield row.kind, row.words, made, off


def _altered(op: Op, row: Alteration, values: Given, result: int) -> Tensor | None:
    try:
        made = row.alter(op, values)
    except FAULTS:                             # it makes no sense for this call
        return None
    if isinstance(made, Results):
        found = made.values[result]
        return found if isinstance(found, Tensor) else None
    return None if made is None else _formula(op, made, result)


def _formula(op: Op, values: Given, result: int) -> Tensor | None:
    try:
        return formula(op, values)[result]
    except FAULTS:
        return None


def _order(op: Any, v: Given) -> Results:
    """The rows of the query and key projections are in the order of the other convention, as in GGUF files: turned by
    that one, and then put in the order of this."""
    other = "interleaved" if v["style"] == "rotate_half" else "rotate_half"

    def reordered(t: Tensor) -> Tensor:
        if other == "interleaved":
            return torch.cat((t[..., 0::2], t[..., 1::2]), -1)
        return torch.stack(t.chunk(2, -1), -1).flatten(-2)

    return Results(tuple(map(reordered, results_of(op.reference(**{**v, "style": other})))))


def _shifted(by: int) -> Callable[[Any, Given], Given | None]:
    def alter(op: Any, v: Given) -> Given | None:
        ids = v["position_ids"]
        return None if ids is None else {**v, "position_ids": (ids + by).clamp(0, v["cos"].shape[-2] - 1)}

    return alter


# Mistakes that show in a model only.
_MORE: Mapping[str, tuple[Alteration, ...]] = {"rope": (
    Alteration("convention", "the other style, and the elements of a head in the order of that", _order),
    Alteration("alignment", "every position one less", _shifted(-1)),
    Alteration("alignment", "every position one more", _shifted(1)))}
