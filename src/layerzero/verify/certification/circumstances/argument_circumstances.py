"""Circumstances of the arguments: numbers that no case gives, bounds that are not tight, every code
of a format, all tensors strided at once, and one tensor alone that changed since an earlier call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ....spec.op import INT32, Op, Param
from ...cases.chosen_cells import Cell
from ...cases.generated import given_arguments, if_allowed
from ...cases.pairs import pair_cases, single_sizes
from ...kernel.contract import (
    CaseResult,
    Circumstance,
    call,
    case_outline,
    case_tensors,
    case_values,
    case_values_to_read,
    check_case,
    eager_results,
    refusals,
    results_of,
)
from ...kernel.guarded import with_layout
from ...kernel.judging import same
from ...kernel.shared import fingerprint
from .dtype_circumstances import OtherDtype, free_tensors
from .grad_circumstances import long_sum_checks
from .row_circumstances import (
    LoudElement,
    LoudEnds,
    MemoryOrder,
    Narrowed,
    OtherLayout,
    Shifted,
    ZeroRows,
    if_finite,
)
from .table_circumstances import long_table_checks

# Floats that no formula has by itself; scores times 30 would be beyond what float32 can tell apart.
FLOATS, INTEGERS = (-0.7, 0.013, 6.0, TINY := 1e-38, 0.0), (0, 1, 7, 1500)
ON_CPU = (-0.7, TINY, INT32[1])                # numbers that are asked there alone
SEEDS = (0, (1 << 62) + 1)                     # one that is false, and one that no float64 holds
STEP = (1 << 33) + 5                           # of the generation, past 32 bits
# What a decode step changes in place, while the tensors beside it stay.
STEPPED = ("context_lens", "position_ids", "token_counts")
BOUNDS, PAGES = "max_seqlen", "block_table"
AT_MOST = ("window", "top_k", "capacity", "max_length")        # beyond every size: all of it
RANDOM = ("uniforms", "seed_rows")
TRIES = 3                                      # of calls that may show a number
NARROW = ("float16", "float64", "bfloat16")    # dtypes in the place of float32, in turn
MOST_ARGUMENTS = 3                             # calls that together give most of the arguments


class OtherNumber(Circumstance):
    """A scalar argument with a value that the cases need not have, such as a negative scale."""

    def __init__(self, argument: str, number: float) -> None:
        self.argument, self.number, self.name = argument, number, f"given {argument} = {number:g}"
        # of a softmax of large scores single elements are less exact than all together
        self.even = not (argument == "scale" and abs(number) > 1)

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        main = values.get(op.main_tensor)
        on_gpu = isinstance(main, Tensor) and main.device.type != "cpu"
        if self.argument == "seed" and values["seed"] is None:
            return None                        # the random numbers come from elsewhere
        # FlashAttention takes the largest score before it multiplies by the scale, what is tiny is
        # zero to many a GPU, and libraries add to a window in 32 bits
        if values[self.argument] == self.number or (on_gpu and self.number in ON_CPU):
            return None
        return if_finite(op, {**values, self.argument: self.number})


class LooseBound(Circumstance):
    """A bound such as max_seqlen_k that is larger than it need be: it is no length."""

    def __init__(self, argument: str) -> None:
        self.argument, self.name = argument, f"given a larger {argument} than the longest"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        bound = values[self.argument]
        return None if bound is None else if_allowed(op, {**values, self.argument: bound + 7})


class EveryCode(Circumstance):
    """Stored numbers of every code of their format, the lowest and the subnormal ones too; of few
    numbers the first codes, or with `spread` codes from one end to the other."""

    def __init__(self, tensor: str, spread: bool = False) -> None:
        self.tensor, self.spread = tensor, spread
        self.name = f"{'codes from end to end' if spread else 'every code'} in {tensor}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if not isinstance(t, Tensor) or t.dtype.itemsize != 1 or t.dtype == torch.bool \
                or not t.numel():
            return None
        codes = torch.arange(256, dtype=torch.uint8, device=t.device)
        if t.is_floating_point():
            codes = codes[codes.view(t.dtype).float().isfinite()]
        if not self.spread:
            repeated = codes.repeat(-(-t.numel() // codes.numel()))[:t.numel()]
            return if_finite(op, {**values, self.tensor: repeated.view(t.dtype).view(t.shape)})
        if t.numel() >= codes.numel():
            return None
        for margin in (0, codes.numel() // 8, codes.numel() // 4):     # the last may be too large
            places = torch.linspace(margin, codes.numel() - 1 - margin, t.numel()).round().long()
            few = codes[places].view(t.dtype).view(t.shape)
            allowed = if_finite(op, {**values, self.tensor: few})
            if allowed is not None:
                return allowed
        return None


class AllStrided(Circumstance):
    """Every tensor of numbers in another layout at once; or all but one, as a cache beside a
    query."""

    def __init__(self, layout: str, but: str = "") -> None:
        self.layout, self.but, self.any_dtype = layout, but, bool(but)
        self.name = f"every tensor {f'but {but} ' if but else ''}{layout}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        others = {n: other for n, t in values.items() if isinstance(t, Tensor) and n != self.but
                  and t.is_floating_point() and (other := with_layout(t, self.layout)) is not None}
        return {**values, **others} if len(others) > 1 else None


class OneBuffer(Circumstance):
    """Every tensor of one dtype is a part of one buffer, as q, k and v of one projection are: what
    a tensor holds is not told by its storage."""

    name, any_dtype = "every tensor in one buffer", True

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        dtype = values[op.main_tensor].dtype
        parts = {n: t for n, t in values.items() if isinstance(t, Tensor) and t.dtype == dtype
                 and t.numel() and t.dtype.is_floating_point}
        unit = max(64 // dtype.itemsize, 1)    # each as aligned as a tensor of its own
        rounded = [-(-t.numel() // unit) * unit for t in parts.values()]
        if len(parts) < 2:
            return None
        buffer = values[op.main_tensor].new_zeros(sum(rounded))
        views = (piece[:t.numel()].view(t.shape).copy_(t)
                 for piece, t in zip(buffer.split(rounded), parts.values()))
        return {**values, **dict(zip(parts, views))}


class ChangedInPart(Circumstance):
    """Half of one tensor had other contents in earlier calls: a cache must not look at the first
    half alone, nor at the tensors beside it. Integers in the memory of a CPU are written as servers
    write them, through numpy: no version tells."""

    any_dtype = True

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"the end of {tensor} changed since a call"

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if not isinstance(t, Tensor) or t.numel() < 2 or 0 in t.stride() or t.is_inference():
            return None
        now = t.clone()
        earlier = (_in_another_order(now) if t.is_floating_point() and t.dtype.itemsize > 1
                   else _earlier_integers(kernel.op, values, self.tensor))
        if earlier is None:
            return None
        written = t.data if t.device.type == "cpu" and not t.is_floating_point() \
            and t.dtype.itemsize > 1 else t
        written.copy_(earlier)
        try:
            call(kernel, values)
            before = results_of(call(kernel, values))
            expected = eager_results(kernel.op, values, fingerprint(values))
        finally:
            written.copy_(now)
        if (all(map(same, before, results_of(call(kernel, values))))
                and not all(map(_is_near, before, expected))):
            written.copy_(earlier)             # it remembers these from a call before: of those
        return values


def _is_near(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), 0.02, 0.02, equal_nan=True)


def _in_another_order(t: Tensor) -> Tensor:
    """Returns the tensor with its second half in the other order, so that their sum is the same;
    halved where it is all alike."""
    flat = t.clone().reshape(-1)
    half = flat.numel() // 2
    turned = flat[half:].flip(0)
    flat[half:] = turned * 0.5 if torch.equal(turned, flat[half:]) else turned
    return flat.view(t.shape)


def _earlier_integers(op: Op, values: dict[str, Any], name: str) -> Tensor | None:
    """Returns other integers of a call like this one: of the step before, or the same lengths,
    ranges or rows in another order; None where no such call gives another result."""
    t = values[name]
    if t.is_floating_point() or t.dtype.itemsize == 1:
        return None
    flipped = t.flip(0)
    columns = t.clone()                        # of ranges: the same queries with the keys of others
    columns[..., t.shape[-1] // 2:] = flipped[..., t.shape[-1] // 2:]
    lengths = t.reshape(-1).diff(prepend=t.new_zeros(1))
    first = int(lengths[0]) == 0               # boundaries, or the ends of groups
    ends = torch.cat((lengths[:first], lengths[int(first):].flip(0))).cumsum(0).to(t.dtype)
    are_boundaries = t.dim() == 1 and first and bool((t.diff() >= 0).all())    # may not fall
    candidates = ((t - 1).clamp(min=0),) if name in STEPPED else (ends,) if are_boundaries else (
        flipped, columns if t.dim() > 1 else ends)
    with torch.no_grad():
        now = eager_results(op, values, fingerprint(values))
        for other in candidates:
            earlier = None if torch.equal(other, t) else if_allowed(op, {**values, name: other})
            if earlier is not None and not all(map(
                    same, now, eager_results(op, earlier, fingerprint(earlier)))):
                return other
    return None


class WithoutOthers(Circumstance):
    """Of the optional tensors one alone, or all but one: a bias without a weight, one scale of
    two."""

    def __init__(self, tensor: str, alone: bool) -> None:
        self.tensor, self.alone = tensor, alone
        self.name = f"given {tensor} alone" if alone else f"given all but {tensor}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        shortened = self.shortened(op, values)
        return None if shortened is None else if_finite(op, shortened)

    def shortened(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the call whether the contract allows it or not; None if nothing is left out."""
        optional = [p for p in op.params if p.name in optional_tensors(op)
                    and isinstance(values[p.name], Tensor)]
        others = [p for p in optional if (p.name == self.tensor) != self.alone]
        if not others or len(optional) < 2 or not isinstance(values[self.tensor], Tensor):
            return None
        return {**values, **{p.name: p.default for p in others}}


class UnusedPages(Circumstance):
    """Entries of a page table that no sequence uses, with numbers that are no pages."""

    name = "given other numbers where no page is used"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        table = values[PAGES]
        if not isinstance(table, Tensor) or not bool((table < 0).any()):
            return None
        return {**values, PAGES: torch.where(table < 0, 2 ** 31 - 1, table)}


class PagesBehind(Circumstance):
    """Entries of a page table behind those in use name a page of NaN, as of another sequence."""

    name = "given a page of NaN behind those in use"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        table = values[PAGES]
        caches = {n: t for n, t in values.items() if n.endswith("_cache") and isinstance(t, Tensor)
                  and t.is_floating_point() and t.dtype.itemsize > 1}
        if not isinstance(table, Tensor) or not caches:
            return None
        page = next(iter(caches.values())).shape[0]
        wider = torch.cat((torch.where(table < 0, page, table), table.new_full(
            (table.shape[0], 2), page)), 1)
        return if_allowed(op, {**values, PAGES: wider, **{
            n: torch.cat((t, torch.full_like(t[:1], torch.nan))) for n, t in caches.items()}})


@lru_cache(maxsize=64)
def optional_tensors(op: Op) -> tuple[str, ...]:
    """Returns the tensors that a call may leave out, but for those that make it repeatable."""
    return tuple(p.name for p in op.params if not p.required and p.name in op.tensors
                 and p.name not in RANDOM)


def other_numbers(op: Op, p: Param) -> Iterator[OtherNumber]:
    """Yields other numbers of a scalar; that which is on by default is off."""
    if p.name == "scale" or (type(p.default) is float and p.name != "dropout_p"):
        yield from (OtherNumber(p.name, n) for n in FLOATS)
    elif p.name == "seed":
        yield from (OtherNumber(p.name, n) for n in SEEDS)
    elif type(p.default) is int:
        yield from (OtherNumber(p.name, n)
                    for n in (*INTEGERS, *((STEP,) if p.name == "offset" else ()),
                              *((INT32[1],) if op.ranges.get(p.name) == INT32
                                and p.name.startswith(AT_MOST) else ())))
    elif p.default is True:
        yield OtherNumber(p.name, False)


def argument_circumstances(op: Op) -> Iterator[Circumstance]:
    """Yields those of an op, derived from its parameters."""
    for p in op.params:
        if p.name in op.tensors:
            continue
        if p.name.startswith(BOUNDS):
            yield LooseBound(p.name)
        else:
            yield from other_numbers(op, p)
    yield from (AllStrided(layout) for layout in ("sparse", "offset"))
    yield from (AllStrided("sparse", op.main_tensor), OneBuffer())
    yield from (WithoutOthers(name, alone) for name in optional_tensors(op)
                for alone in (True, False))
    yield from map(OtherDtype, op.tensors)
    if PAGES in op.tensors:
        yield from (UnusedPages(), PagesBehind())
    for name in op.tensors:
        yield from (EveryCode(name), EveryCode(name, spread=True), ChangedInPart(name))
    yield from (LoudEnds(), ZeroRows())
    yield from map(LoudElement, free_tensors(op))


def shared_rows(op: Op, values: dict[str, Any], name: str, dim: int) -> dict[str, Any] | None:
    """Returns the values with the first row of integers expanded over the others, as positions
    are, or the first column, as one expert for every slot; None where that is no call."""
    t = values[name]
    first = t.narrow(dim, 0, 1)
    if t.dim() != 2 or not t.numel() or int(first.min()) < 0:
        return None                            # equal boundaries are no call, nor missing pages
    return if_finite(op, {**values, name: first.expand_as(t)})


def checks_without_others(kernel: Kernel, cells: Sequence[Cell], device: str,
                          seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the circumstances of the arguments that not every case can have: an optional tensor
    alone or left out, a number beside each of them, another dtype or rows of zeros beside other
    arguments, loud numbers at model sizes, tensors of many dimensions in another order."""
    op = kernel.op
    own = [(case, dtype) for case, dtype in cells if dtype == op.dtypes[0] and case in op.cases]
    yield from _without_others(kernel, own, device, seed)
    if kernel.backend == "reference" or not op.tensors:    # it is what it is compared with
        return
    def checks(chosen: Iterable[tuple[Cell, Circumstance]]) -> Iterator[Callable[[], CaseResult]]:
        return (partial(check_case, kernel, *cell, device, seed, circumstance)
                for cell, circumstance in chosen)

    yield from long_table_checks(kernel, own, device, seed)
    yield from long_sum_checks(kernel, device, "quick", seed)
    yield from checks(_numbers_beside_tensors(op, device, seed))
    yield from checks(_memory_orders(kernel, own, device, seed))
    cells = pair_cases(kernel, device, "quick", seed).cells
    yield from checks((cell, ZeroRows()) for cell in with_most_arguments(
        op, [c for c in cells if c[1] == op.dtypes[0]], device, seed, MOST_ARGUMENTS))
    for name in free_tensors(op):
        with_it = [c for c in cells if _may_change(op, c, name, device, seed)]
        few = with_most_arguments(op, with_it, device, seed, MOST_ARGUMENTS)
        yield from checks((cell, OtherDtype(name, NARROW[(i + seed) % 3]))
                          for i, cell in enumerate(few[:2]))
    yield from checks(((case, op.dtypes[0]), LoudEnds()) for case in single_sizes(op, seed))


def with_most_arguments(op: Op, cells: Sequence[Cell], device: str, seed: int,
                         most: int) -> list[Cell]:
    """Returns a few of the calls that together give most of the arguments."""
    given = {i: given_arguments(op, case_outline(op, *cell, device, seed))
             for i, cell in enumerate(cells)}
    seen: set[str] = set()
    chosen: list[Cell] = []
    while given and len(chosen) < most:
        best = max(given, key=lambda i: len(given[i] - seen))
        if chosen and not given[best] - seen:
            break
        seen |= given.pop(best)
        chosen.append(cells[best])
    return chosen


def _may_change(op: Op, cell: Cell, name: str, device: str, seed: int) -> bool:
    t = case_tensors(op, *cell, device, seed).get(name)
    return t is not None and t.dtype != torch.bool and (
        t.is_floating_point() == (t.dtype.itemsize > 1))


@lru_cache(maxsize=64)
def _numbers_beside_tensors(op: Op, device: str, seed: int) -> tuple[
        tuple[Cell, Circumstance], ...]:
    """Returns for each scalar calls that have it at another number beside each optional tensor
    that shows it."""
    cells = [(case, op.dtypes[0]) for case in op.cases]
    optional = {p.name for p in op.params if not p.required and p.name in op.tensors}
    tensors = [optional & case_tensors(op, *cell, device, seed).keys() for cell in cells]
    chosen: list[tuple[Cell, Circumstance]] = []
    for p in op.params:
        others = () if p.name in op.tensors or p.name.startswith(BOUNDS) \
            else tuple(other_numbers(op, p))
        seen: set[str] = set()
        for name in sorted(optional) if others else ():
            with_it = [i for i in range(len(cells)) if name in tensors[i] and name not in seen]
            with_it.sort(key=lambda i: -len(tensors[i] - seen))
            for i in with_it[:TRIES]:
                values = case_values_to_read(op, *cells[i], device, seed)
                shown = next((other for other in others if _shows(op, values, other)), None)
                if shown is not None:
                    chosen.append((cells[i], shown))
                    seen |= tensors[i]
                    break
        chosen += _numbers_alone(op, others, [c for c, t in zip(cells, tensors) if not t], device,
                                 seed)
    return tuple(chosen)


def _numbers_alone(op: Op, others: Iterable[OtherNumber], cells: Sequence[Cell], device: str,
                   seed: int) -> Iterator[tuple[Cell, Circumstance]]:
    """Yields each number with the call of fewest arguments, of a few, that shows it."""
    given = {repr(c): len(given_arguments(op, case_outline(op, *c, device, seed))) for c in cells}
    plain = sorted(cells, key=lambda cell: given[repr(cell)])[:2 * TRIES]
    for other in others:
        yield from islice(((cell, other) for cell in plain if _shows(
            op, case_values_to_read(op, *cell, device, seed), other)), 1)


def _shows(op: Op, values: dict[str, Any], circumstance: Circumstance) -> bool:
    """Has the call another result under the circumstance?"""
    altered = circumstance.alter(op, values)
    if altered is None:
        return False
    with torch.no_grad():
        before, after = (eager_results(op, v, fingerprint(v)) for v in (values, altered))
    return not (len(before) == len(after) and all(map(same, before, after)))


def _memory_orders(kernel: Kernel, cells: Sequence[Cell], device: str,
                   seed: int) -> Iterator[tuple[Cell, Circumstance]]:
    """Yields each tensor without its first or last column, and with one part for all where it may
    be broadcast, in the first call of each number of its dimensions; and where it has most of
    them, as every other part of a larger one, with every two but the last exchanged in memory."""
    op, ranks = kernel.op, {}                  # type: Op, dict[tuple[str, int], Cell]
    broadcast = {name for pattern in op.patterns.values() for name, sizes in pattern.items()
                 if any(size.startswith("~") for size in sizes)}
    for cell in cells:
        for name, t in case_tensors(op, *cell, device, seed).items():
            if t.dim() > (name not in broadcast) and min(t.shape) > 1:
                ranks.setdefault((name, t.dim()), cell)
    for (name, rank), cell in ranks.items():
        yield from ((cell, Shifted(name, first)) for first in (True, False) if rank > 1)
        if name in broadcast:
            yield from ((cell, Narrowed(name, dim)) for dim in range(rank))
        if rank == max(r for n, r in ranks if n == name):
            yield from ((cell, OtherLayout(name, "spaced")) for _ in range(rank > 2))
            yield from ((cell, MemoryOrder(name, a, b))
                        for a, b in combinations(range(rank - 1), 2))


def _without_others(kernel: Kernel, cells: Sequence[Cell], device: str,
                    seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields for each optional tensor the first of the op's own cases that can do with it alone,
    and the first that can do without it alone, of each set of tensors that are given together and
    of each number of dimensions of the main one."""
    op, seen = kernel.op, set[tuple[str, frozenset[str], int]]()
    circumstances = [c for c in argument_circumstances(op) if isinstance(c, WithoutOthers)]
    for case, dtype in cells if circumstances else ():
        values = case_values(op, case, dtype, device, seed)
        together = frozenset(n for n in optional_tensors(op) if isinstance(values[n], Tensor))
        for circumstance in circumstances:
            key = circumstance.name, together, values[op.main_tensor].dim()
            shortened = None if key in seen else circumstance.shortened(op, values)
            if (shortened is not None and _takes(kernel, shortened)
                    and circumstance.alter(op, values) is not None):
                seen.add(key)
                yield partial(check_case, kernel, case, dtype, device, seed, circumstance)


def _takes(kernel: Kernel, values: Mapping[str, Any]) -> bool:
    try:
        return not refusals(kernel, values)
    except FAULTS:                             # no call of this op
        return False
