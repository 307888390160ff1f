"""Makes failing calls again with one size changed, all arguments the same: a kernel that is wrong
for some remainders of a size, or from a size on, is right between them or before it.

What is wrong by an argument is wrong in all sizes in which the argument matters; what is wrong
where two sizes are equal, or where one exceeds another, does not come back with a period, and
another size mends it or makes it wrong too.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.drawn_sizes import allowed_facts, lists_of_lengths, shares
from ...cases.generated import Case, affects_result, given_arguments, if_allowed
from ...kernel.case_sizes import numbers_of, relative_size
from ...kernel.contract import (
    CaseResult,
    call,
    case_refusals,
    case_values,
    formula,
    results_of,
    upcast,
)
from .calls_again import are_close, is_right, is_wrong_in_few_rows, sample_failures

PERIODS = (2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
LIMIT_S = 4.0                                  # of CPU time for reruns
MAX_SIZE = 4096.0                              # of a call, in those of the default one
COUNTED_IN_16_BITS, CONTEXTS = (1 << 16, 1 << 15), "context_lens"
SEEDS = (0, 1001, 1002)                        # added to that of the case
SEQUENCES = "the number of sequences"
BYTES = (torch.int8, torch.uint8)


class Reruns:
    """Remembers which calls of a kernel are right, and stops asking after LIMIT_S."""

    def __init__(self, kernel: Kernel, device: str, limit_s: float = LIMIT_S) -> None:
        self.kernel, self.device, self.end = kernel, device, time.process_time() + limit_s
        self.known: dict[tuple[str, str, int], bool | None] = {}

    def verdict(self, case: Case, dtype: str, seed: int) -> bool | None:
        """Is such a call right? None where the contract or the kernel does not allow it."""
        key = repr(sorted(case.items())), dtype, seed
        if key not in self.known:
            self.known[key] = None if self.is_late else self._ask(case, dtype, seed)
        return self.known[key]

    @property
    def is_late(self) -> bool:
        return time.process_time() > self.end

    def _ask(self, case: Case, dtype: str, seed: int) -> bool | None:
        try:
            if (relative_size(self.kernel.op, case) > MAX_SIZE
                    or allowed_facts(self.kernel.op, case, dtype, seed) is None
                    or case_refusals(self.kernel, case, dtype, self.device, seed)):
                return None
            return is_right(self.kernel, case_values(self.kernel.op, case, dtype, self.device,
                                                     seed), dtype)
        except FAULTS:                         # not every size makes a call
            return None

    def all_are(self, right: bool, cases: Sequence[Case], dtype: str, seed: int,
                seeds: Sequence[int] = SEEDS) -> bool:
        return all(self.verdict(case, dtype, seed + by) is right for case in cases for by in seeds)


Sized = Callable[[int], dict[str, Any]]


def sizes_of(op: Op, case: Case) -> Iterator[tuple[str, int, Sized]]:
    """Yields the sizes of a case that may change by themselves: its name, how large it is, and the
    case with another one. Of lists, all lengths are the same."""
    shared = {name for pair in shares(op) for name in pair}
    sizes = {**numbers_of(op), **{n: case[n] for n in lists_of_lengths(op) if n in case}}
    for name in sizes:
        size = case.get(name, sizes[name])
        if name in shared or name in op.by_name:
            continue
        if type(size) is int and size > 0:
            yield name, size, lambda n, name=name: {**case, name: n}  # type: ignore[misc]
        elif type(size) is tuple and size and all(type(i) is int for i in size):
            for n in sorted(set(size), reverse=True)[:4]:
                yield name, n, lambda m, name=name, size=size: {  # type: ignore[misc]
                    **case, name: (m,) * len(size)}
            if len(size) > 1 and name not in lists_of_lengths(op):
                yield name, size[-1], lambda m, name=name, first=size[:-1]: {  # type: ignore[misc]
                    **case, name: (*first, m)}
    lengths = {n: sizes[n] for n in lists_of_lengths(op) if n in sizes}
    if lengths:
        yield SEQUENCES, min(map(len, lengths.values())), lambda m: {
            **case, **{n: (*islice(cycle(size), m),) for n, size in lengths.items()}}


def explain_by_remainder(kernel: Kernel, failed: Sequence[CaseResult], device: str,
                         of_any_size: bool = False) -> tuple[str, str] | None:
    """Explains calls that are wrong at a size, and at that size and one or two periods more, and
    right at a size between them, and as many periods after it; `of_any_size`: and wrong at the
    smallest such sizes too, at which numbers that count them do not round."""
    reruns = Reruns(kernel, device)
    periods = [_period(reruns, kernel.op, r, of_any_size) for r in _steady(reruns, failed)]
    known = [found for found in periods if found]
    if not known or 3 * len(known) < 2 * len(periods):
        return None
    kinds = {kind for kind, _ in known}
    if kinds == {"last rows"} and all(_is_mostly_wrong(kernel, r, device)
                                      for r in _steady(reruns, failed)[:1]):
        kinds = {"sizes"}                      # not what is left over alone
    return kinds.pop() if len(kinds) == 1 else "sizes", f"{known[0][1]}: {failed[0].detail}"


def _is_mostly_wrong(kernel: Kernel, r: CaseResult, device: str) -> bool:
    """Is more than half of a result wrong?"""
    return any(2 * int(wrong.sum()) > wrong.numel()
               for wrong in _wrong_places(kernel, r.case, r, device))


def _is_wrong_elsewhere(kernel: Kernel, case: Case, r: CaseResult, device: str, size: int,
                        period: int) -> bool:
    """Has the result of a call axes of this size, along none of which what is wrong is what whole
    tiles of `period` leave over?"""
    tail = size - size % period
    confined = [int(wrong.nonzero()[:, axis].min()) >= tail
                for wrong in _wrong_places(kernel, case, r, device)
                for axis, n in enumerate(wrong.shape) if n == size and bool(wrong.any())]
    return bool(confined) and not any(confined)


def _wrong_places(kernel: Kernel, case: Case, r: CaseResult, device: str) -> Iterator[Tensor]:
    """Yields for each result where it is not close to the formula's."""
    values = case_values(kernel.op, case, r.dtype, device, r.seed)
    rtol, atol = (4 * t for t in kernel.op.tolerance.of(r.dtype))
    with torch.no_grad():
        pairs = zip(results_of(call(kernel, values)), formula(kernel.op, upcast(values)))
        yield from (~got.double().isclose(want.double(), rtol, atol, True) for got, want in pairs
                    if isinstance(got, Tensor) and got.shape == want.shape)


def _steady(reruns: Reruns, failed: Sequence[CaseResult]) -> list[CaseResult]:
    """Samples failing calls that fail with other numbers too."""
    plain = [r for r in failed if not r.circumstance]
    sample = sample_failures(plain, 3)
    return [r for r in (sample if len(sample) > 1 else plain[:3])
            if reruns.all_are(False, [r.case], r.dtype, r.seed)]


def _period(reruns: Reruns, op: Op, r: CaseResult,
            of_any_size: bool) -> tuple[str, str] | None:
    """Returns with which period a size of this call makes it wrong: the class, and in words."""
    for name, n, sized in sizes_of(op, r.case):
        def at(m: int, sized: Sized = sized) -> bool | None:
            return reruns.verdict(sized(m), r.dtype, r.seed)

        # repeated lengths are no other ones: as many sequences that are longer must be wrong too
        if at(n) is not False or (name == SEQUENCES and reruns.verdict(
                _longer(op, r.case), r.dtype, r.seed)):
            continue
        near = {*range(n + 1, n + 9), *(n + -n % period for period in PERIODS)} - {n}
        right = [u for u in sorted(near) if u <= 2 * n + 64 and at(u)]
        for period in PERIODS:
            if n + 2 * period > 4 * n + 256 or at(n + period) is not False:
                continue
            # between the wrong ones: what is right from a size on has no period
            for u in dict.fromkeys(n + (u - n) % period for u in right if (u - n) % period):
                wrong, others = ([sized(m + k * period) for k in range(3)] for m in (n, u))
                wrong += [sized(n % period + period)] if of_any_size else []
                if (reruns.all_are(False, wrong, r.dtype, r.seed)
                        and reruns.all_are(True, others, r.dtype, r.seed)):
                    # what is left over by whole tiles is wrong at every other remainder
                    between = [k for k in (1, period // 2, period - 1) if k % period]
                    is_rest = (period > 2 and u % period == 0
                               and all(at(u + k) is False for k in between)
                               and not _is_wrong_elsewhere(reruns.kernel, sized(n + period), r,
                                                           reruns.device, n + period, period))
                    return ("last rows" if is_rest else "sizes",
                            f"wrong where {name} is {n}, {n + period} and {n + 2 * period}, right "
                            f"where it is {u}, {u + period} and {u + 2 * period}")
    return None


def explain_by_bits(kernel: Kernel, failed: Sequence[CaseResult],
                    device: str) -> tuple[str, str] | None:
    """Explains calls that are right up to a size that 15 or 16 bits count, and wrong beyond it."""
    reruns = Reruns(kernel, device)
    for r in sample_failures([r for r in failed if not r.circumstance], 2):
        for name, n, sized in sizes_of(kernel.op, r.case):
            for bound in (b for b in COUNTED_IN_16_BITS if n > b):
                beyond = next((m for m in (bound + 9, bound + bound // 4) if n >= m
                               and reruns.all_are(False, [sized(n), sized(m)], r.dtype, r.seed,
                                                  SEEDS[:2])), 0)
                if beyond and reruns.all_are(True, [sized(bound)], r.dtype, r.seed, SEEDS[:2]):
                    about = f"where {name} is {bound}, wrong where it is {beyond}"
                    if _is_cut(kernel, sized(beyond), r, device, bound):
                        return "sizes", (f"nothing beyond {bound} is read: right {about}: "
                                         f"{failed[0].detail}")
                    return "index overflow", f"right {about}: {failed[0].detail}"
    return None


def _is_cut(kernel: Kernel, case: Case, r: CaseResult, device: str, bound: int) -> bool:
    """Is the result that of contexts of `bound` tokens at most? An index that overflows is of
    another place."""
    op, values = kernel.op, case_values(kernel.op, case, r.dtype, device, r.seed)
    lengths = values.get(CONTEXTS)
    if not isinstance(lengths, Tensor):
        return False
    with torch.no_grad():
        cut = formula(op, upcast({**values, CONTEXTS: lengths.clamp(max=bound)}))
        return are_close(op, r.dtype, results_of(call(kernel, values)), cut)


def _longer(op: Op, case: Case) -> dict[str, Any]:
    """Returns the case with every sequence one longer."""
    sizes = {**numbers_of(op), **case}
    return {**case, **{n: tuple(length + 1 for length in size) for n in lists_of_lengths(op)
                       if isinstance(size := sizes.get(n), tuple) and size}}


def explain_by_growth(kernel: Kernel, failed: Sequence[CaseResult],
                      device: str) -> tuple[str, str] | None:
    """Explains calls that are right where a size is several times smaller, though every argument
    they are given matters there too."""
    return _by_side(kernel, failed, device, _growth)


def explain_by_shortness(kernel: Kernel, failed: Sequence[CaseResult],
                         device: str) -> tuple[str, str] | None:
    """Explains calls of which a size is so small that they are wrong, with arguments that matter
    where it is larger, and that are right there."""
    return _by_side(kernel, failed, device, _shortness)


def _by_side(kernel: Kernel, failed: Sequence[CaseResult], device: str,
             side: Callable[[Reruns, Op, CaseResult, str], str]) -> tuple[str, str] | None:
    reruns = Reruns(kernel, device)
    sample = _steady(reruns, failed)
    growths = [side(reruns, kernel.op, r, device) for r in sample]
    if not sample or not all(growths):
        return None
    return "sizes", f"{growths[0]}: {failed[0].detail}"


def _growth(reruns: Reruns, op: Op, r: CaseResult, device: str) -> str:
    for name, n, sized in sizes_of(op, r.case):
        smaller = [m for m in (n >> by for by in range(1, 8)) if m >= _least_size(op, r.case)]
        if len(smaller) < 2 or not reruns.all_are(False, [sized(n), sized(n + 1)], r.dtype, r.seed,
                                                 SEEDS[:2]):
            continue
        right = [m for m in smaller if reruns.all_are(True, [sized(m)], r.dtype, r.seed)]
        if right == smaller[-len(right):] and len(right) > 1 and all(
                _all_matter(op, sized(m), r, device) for m in right) and not any(
                reruns.verdict(other(max(right[0] // 3, 1)), r.dtype, r.seed) is False
                for others, _, other in sizes_of(op, sized(right[0])) if others != name):
            if _adds_rows(op, r, sized(right[0]), device) and is_wrong_in_few_rows(
                    reruns.kernel, [r], device):
                continue                       # many rows only make a rare number likelier
            return f"wrong where {name} is {n}, right where it is {', '.join(map(str, right))}"
    return ""


def _least_size(op: Op, case: Case) -> int:
    """Returns a size in which masks of blocks still have two blocks, so that they differ."""
    default = inspect.signature(op.inputs).parameters.get("blocks")
    blocks = case.get("blocks", default.default if default else "")
    return max((2 * int(size) for size in blocks.split("x") if size), default=4)


def _adds_rows(op: Op, r: CaseResult, smaller: Case, device: str) -> bool:
    """Has the call more rows than the smaller one, and nothing else?"""
    many, few = (case_values(op, case, r.dtype, device, r.seed)[op.main_tensor].shape
                 for case in (r.case, smaller))
    return many[1:] == few[1:] and many != few


def _shortness(reruns: Reruns, op: Op, r: CaseResult, device: str) -> str:
    for name, n, sized in sizes_of(op, r.case):
        larger = [m for m in (8, 16, 33, 64) if m > 2 * n]
        if len(larger) < 3 or not reruns.all_are(False, [sized(n)], r.dtype, r.seed):
            continue
        if (reruns.all_are(True, [sized(m) for m in larger], r.dtype, r.seed)
                and all(_all_matter(op, sized(m), r, device) for m in larger)
                and not any(reruns.verdict(other(max(n // 2, 1)), r.dtype, r.seed)
                            for others, size, other in sizes_of(op, r.case)
                            if others != name and size > n)):
            return f"wrong where {name} is {n}, right where it is {', '.join(map(str, larger))}"
    return ""


def _all_matter(op: Op, case: Case, r: CaseResult, device: str) -> bool:
    """Does every argument of the call change its result, and is it a result?"""
    values = case_values(op, case, r.dtype, device, r.seed)
    if not any(isinstance(t, Tensor) and t.numel() and bool(t.double().nan_to_num().any())
               for t in formula(op, values)):
        return False                           # nothing is easily right
    return all(affects_result(op, values, name) for name in given_arguments(op, values)
               if name != op.variant)


def is_wrong_whenever_given(kernel: Kernel, failed: Sequence[CaseResult], names: Sequence[str],
                            device: str) -> bool:
    """Is a call wrong in all sizes and with all numbers in which these arguments matter, and right
    without them? Tried in the sizes of the op, in small ones and in larger ones."""
    op, some = kernel.op, 0
    for r in sample_failures([r for r in failed if not r.circumstance], 2):
        for case in (dict(r.case), *_other_sizes(op, r.case)):
            for seed in (r.seed, r.seed + 1001):
                meant = _is_wrong_by(kernel, case, r.dtype, seed, names, device)
                if meant is False:
                    return False
                some += meant is True and case != r.case
    return some > 1


def _other_sizes(op: Op, case: Case) -> Iterator[dict[str, Any]]:
    """Yields the case in the sizes that the op has by default, and in larger ones."""
    sizes = numbers_of(op).keys() - op.by_name.keys()
    plain = {n: v for n, v in case.items() if n not in sizes}
    yield from (other for other in (plain, _longer(op, case)) if other != case)
    shared = {name for pair in shares(op) for name in pair}
    for name, default in numbers_of(op).items():
        size = case.get(name, default)
        if name in sizes and name not in shared and type(size) is int and size >= 0:
            yield {**case, name: 2 * size + 5}
        elif name in sizes and type(size) is tuple and size:
            yield {**case, name: (*size[:-1], 2 * size[-1] + 5)}


def _is_wrong_by(kernel: Kernel, case: Case, dtype: str, seed: int, names: Sequence[str],
                 device: str) -> bool | None:
    """Is this call wrong with the arguments, and right without? None where they do not matter or
    there is no such call."""
    op = kernel.op
    try:
        if (allowed_facts(op, case, dtype, seed) is None
                or case_refusals(kernel, case, dtype, device, seed)):
            return None
        values = case_values(op, case, dtype, device, seed)
        if not any(affects_result(op, values, name) for name in names):
            return None
        without = {**values, **{name: op.by_name[name].default for name in names}}
        return (is_right(kernel, without, dtype)
                and not any(is_right(kernel, v, dtype) for v in _with_other_numbers(
                    op, values, names)))
    except FAULTS:
        return None


def _with_other_numbers(op: Op, values: Mapping[str, Any],
                        names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the call as it is, with the numbers of the arguments of one sign where some are below
    zero, with one number for all where they are lengths, and with codes of a byte a quarter as
    large: a meaning stays what it is."""
    yield dict(values)
    tensors = {n: t for n in names if isinstance(t := values.get(n), Tensor)}
    signed = {n: t for n, t in tensors.items() if t.is_floating_point() and t.dtype.itemsize > 1
              and bool((t < 0).any()) and bool(t.isfinite().all())}
    others = [{n: sign * t.abs() for n, t in signed.items()} for sign in (1, -1) if signed]
    if any(isinstance(t, Tensor) and t.dtype in BYTES for t in values.values()):
        others.append({n: torch.div(t, 4, rounding_mode="floor") for n, t in values.items()
                       if isinstance(t, Tensor) and t.dtype in BYTES})
    others += [{n: t[:1].expand_as(t).contiguous()} for n, t in tensors.items()
               if t.dtype in (torch.int32, torch.int64) and t.dim() == 1 and len(t) > 1]
    for changed in others:
        allowed = if_allowed(op, {**values, **changed})
        if allowed is not None and any(affects_result(op, allowed, name) for name in names):
            yield allowed
