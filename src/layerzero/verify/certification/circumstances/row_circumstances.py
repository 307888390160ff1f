"""Circumstances of rows: how they lie in memory, the last number of each tensor loud, rows of
zeros, rows that are alike in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.chosen_cells import Cell
from ...cases.generated import if_allowed, is_allowed, is_costly
from ...kernel.contract import (
    CaseResult,
    Circumstance,
    case_refusals,
    case_tensors,
    case_values_to_read,
    check_case,
    eager_results,
)
from ...kernel.guarded import with_layout
from ...kernel.shared import compute_once, fingerprint

BOUND = "max_seqlen"                           # may be larger than the longest
ALIKE_TRIES, ALIKE_CASES = 16, 4               # cases looked at, and those that a kernel may accept


def if_finite(op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the values if the contract allows the call and its results are numbers."""
    contents = fingerprint(values)

    def compute() -> bool:
        try:
            results = eager_results(op, values, contents)
        except FAULTS:
            return False
        floats = [t for t in results if isinstance(t, Tensor) and t.is_floating_point()
                  and t.dtype.itemsize > 1]
        return all(bool(t.isfinite().all()) for t in floats)

    finite = is_allowed(op, values, contents) and compute_once(
        op, contents and ("finite", contents), compute, nbytes=0)
    return values if finite else None


def _main_tensors(op: Op, values: dict[str, Any]) -> dict[str, Tensor]:
    names = op.same_dtype or op.differentiable or (op.main_tensor,)
    return {n: t for n in names if isinstance(t := values[n], Tensor) and t.numel() and t.dim()
            and t.is_floating_point() and t.dtype.itemsize > 1}


class OtherLayout(Circumstance):
    """One tensor in another memory layout."""

    def __init__(self, tensor: str, layout: str) -> None:
        self.tensor, self.layout = tensor, layout
        self.name = f"{tensor} {layout}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        other = with_layout(t, self.layout) if isinstance(t, Tensor) else None
        return None if other is None else {**values, self.tensor: other}


class LoudElement(Circumstance):
    """One number of a tensor beside the main one is so large that its exponential is infinite."""

    even = False

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"filled with one loud number in {tensor}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if not isinstance(t, Tensor) or t.dtype != torch.float32 or not t.numel():
            return None
        loud = t.clone()
        loud.view(-1)[0] = 100.0
        return if_finite(op, {**values, self.tensor: loud})


class LoudEnds(Circumstance):
    """The last number of every main tensor is large: the last tile holds the largest score."""

    name, even = "filled with one loud number at each end", False

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        ends = {n: t.clone() for n, t in _main_tensors(op, values).items()}
        for t in ends.values():
            t[(-1,) * t.dim()] = 100.0
        return if_finite(op, {**values, **ends}) if ends else None


class ZeroRows(Circumstance):
    """The first and the last row of every main tensor are zeros, as padding is: nothing is divided
    by their norm, sum or maximum."""

    name = "filled with rows of zeros"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        rows = {n: t.clone() for n, t in _main_tensors(op, values).items() if t.dim() > 1}
        for t in rows.values():
            t[(0,) * (t.dim() - 1)] = t[(-1,) * (t.dim() - 1)] = 0.0
        return if_finite(op, {**values, **rows}) if rows else None


class MemoryOrder(Circumstance):
    """One tensor whose rows lie in another order in memory, as of heads that were transposed."""

    any_dtype = True

    def __init__(self, tensor: str, a: int, b: int) -> None:
        self.tensor, self.dims = tensor, (a, b)
        self.name = f"{tensor} with dimensions {a} and {b} exchanged in memory"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t, (a, b) = values[self.tensor], self.dims
        if not isinstance(t, Tensor) or t.dim() <= b + 1 or min(t.shape[a], t.shape[b]) < 2:
            return None
        moved = t.transpose(a, b).contiguous().transpose(a, b)
        return {**values, self.tensor: moved}


class Narrowed(Circumstance):
    """One part of a tensor that may be broadcast, as of a mask of one column for all keys."""

    any_dtype = True

    def __init__(self, tensor: str, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.name = f"one part of {tensor} for all along dimension {dim}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        tokens = op.patterns[values[op.variant] if op.variant else ""].get(self.tensor, ())
        if (not isinstance(t, Tensor) or t.dim() <= self.dim or t.shape[self.dim] < 2
                or not "".join(tokens[self.dim - t.dim():][:1]).startswith("~")):
            return None
        return if_allowed(op, {**values, self.tensor: t.narrow(self.dim, 0, 1).contiguous()})


class OtherSigns(Circumstance):
    """A tensor of which every number has one sign, with every other number of the other sign."""

    any_dtype = True

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"{tensor} of both signs"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if (not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype.itemsize == 1
                or not t.numel() or bool((t > 0).any()) == bool((t < 0).any())):
            return None
        signs = 2 * (torch.arange(t.numel(), device=t.device) % 2).view(t.shape) - 1
        allowed = if_allowed(op, {**values, self.tensor: t * signs.to(t.dtype)})
        if allowed is None:
            return None
        with torch.no_grad():                  # what is hidden may be infinite
            results = eager_results(op, allowed, fingerprint(allowed))
        return None if any(bool(r.isnan().any()) for r in results) else allowed


class Shifted(Circumstance):
    """One tensor without the first or the last column of a wider one, as the inputs and the targets
    of training are: its rows are one number apart."""

    any_dtype = True

    def __init__(self, tensor: str, first: bool) -> None:
        self.tensor, self.first = tensor, first
        self.name = f"{tensor} without the {'first' if first else 'last'} column of another"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if not isinstance(t, Tensor) or t.dim() < 2 or not t.numel():
            return None
        codes = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        # integers that are allowed, but not there
        column = (torch.full_like(t[..., :1], torch.nan) if codes.is_floating_point()
                  else codes.flip(0)[..., :1])
        wide = torch.cat((column, codes) if self.first else (codes, column), -1)
        rows = wide[..., 1:] if self.first else wide[..., :-1]
        return {**values, self.tensor: rows if codes is t else rows.view(t.dtype)}


def _begin_alike(t: Tensor) -> Tensor | None:
    return torch.cat((t[:1, ..., :t.shape[-1] // 2].expand(len(t), *t.shape[1:-1], -1),
                      t[..., t.shape[-1] // 2:]), -1) if t.dim() > 1 else None


def _end_alike(t: Tensor) -> Tensor | None:
    return torch.cat((t[..., :t.shape[-1] // 2],
                      t[:1, ..., t.shape[-1] // 2:].expand(len(t), *t.shape[1:-1], -1)),
                     -1) if t.dim() > 1 else None


def _alike_but_last(t: Tensor) -> Tensor | None:
    return torch.cat((t[:1].expand(len(t) - 1, *t.shape[1:]), t[-1:]))


def _ends_alike(t: Tensor) -> Tensor | None:
    return torch.cat((t[:-1], t[:1]))


def _consecutive_but_two(t: Tensor) -> Tensor | None:
    if t.shape[-1] < 4 or t.is_floating_point():
        return None
    last = max(int(t.max()) - t.shape[-1] + 1, 0)
    rows = (t[..., :1].clamp(0, last) + torch.arange(t.shape[-1], device=t.device)).to(t.dtype)
    rows[..., 1:3] = rows[..., 1:3].flip(-1)   # early: tables end where rows are still in use
    return torch.where(t < 0, t, rows)


def _first_in_order(t: Tensor) -> Tensor | None:
    if t.dim() < 2 or t.is_floating_point() or t.shape[-1] < 3:
        return None
    changed = t.flip(-1).clone()
    changed[:1] = torch.arange(t.shape[-1], device=t.device, dtype=t.dtype)
    return torch.where(t < 0, t, changed) if bool((changed <= t.max()).all()) else None


# Of a tensor of integers; the others keep the sums of rows.
ALIKE: Mapping[str, tuple[Callable[[Tensor], Tensor | None], bool]] = {
    "rows that begin alike": (_begin_alike, True),
    "rows that end alike": (_end_alike, True),
    "all rows alike but the last": (_alike_but_last, False),
    "the last row as the first": (_ends_alike, False),
    "the first row in order alone": (_first_in_order, True),
    "consecutive numbers but for two": (_consecutive_but_two, True)}


class RowsAlike(Circumstance):
    """Rows that are alike where a kernel may look to tell whether all of them are, and differ
    elsewhere. Of boundaries these are the lengths between them."""

    any_dtype = alike = True

    def __init__(self, tensor: str, how: str) -> None:
        self.tensor, self.how, self.name = tensor, how, f"{how} in {tensor}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t, (change, of_integers) = values[self.tensor], ALIKE[self.how]
        if (not isinstance(t, Tensor) or not t.dim() or not t.numel()
                or len(t) < (2 if of_integers else 3)
                or (t.dtype.itemsize == 1 and t.dtype != torch.bool)
                or (of_integers and (t.is_floating_point() or t.dtype == torch.bool))):
            return None
        if t.dim() == 1 and not t.is_floating_point() and int(t[0]) == 0 and bool(
                (t.diff() >= 0).all()):
            changed = _with_lengths(t, change)
            values = {n: max(v, int(t[-1])) if n.startswith(BOUND) and type(v) is int else v
                      for n, v in values.items()}
        else:
            changed = change(t)
        if changed is None or torch.equal(changed, t) or (
                of_integers and _are_distinct(t) and not _are_distinct(changed)):
            return None                        # as the experts of a token are
        return if_finite(op, {**values, self.tensor: changed}) or if_finite(
            op, {**values, **_without_poison(values), self.tensor: changed})


def _are_distinct(t: Tensor) -> bool:
    """Are the numbers of each row distinct, but for negative ones?"""
    rows = t.sort(-1).values
    return not bool(((rows[..., 1:] == rows[..., :-1]) & (rows[..., 1:] >= 0)).any())


def _without_poison(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns tensors that hold what no index of the call named, as the ends of pages do, with
    numbers there: other indices may name them."""
    cleaned = {}
    for name, t in values.items():
        if isinstance(t, Tensor) and t.is_floating_point() and t.numel():
            loud = t.float().abs() >= torch.finfo(t.dtype).max
            wrong = loud | t.float().isnan()
            if bool(wrong.any()):
                cleaned[name] = torch.where(wrong, t.float().masked_fill(wrong, 0.0).flip(-1),
                                            t.float()).to(t.dtype)
    return cleaned


def _with_lengths(bounds: Tensor, change: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """Returns boundaries whose lengths are alike in part, and as many together."""
    lengths, total = bounds.diff(), int(bounds[-1])
    each = (total - 1) // max(len(lengths), 1)
    if len(lengths) < 3 or each < 1 or change not in (_alike_but_last, _ends_alike):
        return None
    lengths = torch.full_like(lengths, each)
    lengths[-1 if change is _alike_but_last else 1] += total - each * len(lengths)
    return torch.cat((bounds[:1], lengths.cumsum(0).to(bounds.dtype)))


def alike_checks(kernel: Kernel, cells: Sequence[Cell], device: str,
                 seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields rows that are alike in part in each tensor beside the main one, in one of the op's own
    cases."""
    op = kernel.op
    able: dict[str, list[tuple[Cell, Circumstance]]] = {}
    for cell, circumstance in _alike_cells(op, device, seed):
        if cell in cells and not case_refusals(kernel, *cell, device, seed):
            able.setdefault(circumstance.name, []).append((cell, circumstance))
    for i, found in enumerate(able.values()):
        cell, circumstance = found[(i + seed) % min(len(found), 2)]
        yield partial(check_case, kernel, *cell, device, seed, circumstance)


@lru_cache(maxsize=64)
def _alike_cells(op: Op, device: str, seed: int) -> tuple[tuple[Cell, Circumstance], ...]:
    """Returns the plainest cases that may have each kind of rows."""
    dtype, found = op.dtypes[0], []            # type: str, list[tuple[Cell, Circumstance]]
    plain = sorted((c for c in op.cases if "stride" not in c and not is_costly(op, c)),
                   key=lambda case: len(case_tensors(op, case, dtype, device, seed)))
    for name in op.tensors:
        given = [c for c in plain if name in case_tensors(op, c, dtype, device, seed)]
        longest_first = sorted(given, key=lambda case: -_length(case_tensors(
            op, case, dtype, device, seed)[name]))
        for how, (_, of_integers) in ALIKE.items() if name != op.main_tensor else ():
            circumstance, count = RowsAlike(name, how), 0
            for case in (longest_first if of_integers else given)[:ALIKE_TRIES]:
                if circumstance.alter(op, case_values_to_read(
                        op, case, dtype, device, seed)) is not None:
                    found.append(((case, dtype), circumstance))
                    count += 1
                    if count == ALIKE_CASES:
                        break
    return tuple(found)


def _length(t: Tensor) -> int:
    return t.shape[-1] if t.dim() else 0
