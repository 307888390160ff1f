"""Circumstances of the numbers themselves, in every case of an op: all of one sign, about a large
common number, whole, equal, in order, mostly zero, large, small, one of each row loud.

Which way a kernel takes is told by formats and options; whether that way rounds too early, cancels,
or holds too little by the numbers. So each case has them, in turns by the seed and the case.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.chosen_cells import Cell
from ...cases.generated import Case, case_key, is_costly, is_degenerate
from ...kernel.contract import (
    CaseResult,
    Circumstance,
    case_facts,
    case_refusals,
    case_tensors,
    check_case,
)
from ...kernel.gradients import check_gradients
from .content_circumstances import holds_results
from .row_circumstances import if_finite

# What a common offset may be: its sums of a few hundred are within float16, and what bfloat16
# tells apart about it is less than the numbers differ by.
OFFSET = 24.0
LOUD, QUIET, TINY = 48.0, 2.0 ** -9, 2.0 ** -16
SPARSE = 7                                     # one number of so many is not zero


def _one_sign(t: Tensor) -> Tensor:
    return t.abs() + 2.0


def _rows_alike(t: Tensor) -> Tensor:
    return t[..., :1].expand_as(t).clone(memory_format=torch.contiguous_format)


def _mostly_zeros(t: Tensor) -> Tensor:
    places = torch.arange(t.numel(), device=t.device).view(t.shape)
    return torch.where(places % SPARSE == 0, t, 0.0)


def _loud_in_each_row(t: Tensor) -> Tensor:
    rows = t.clone(memory_format=torch.contiguous_format)
    places = torch.arange(max(rows.numel() // t.shape[-1], 1), device=t.device) * 5 % t.shape[-1]
    rows.view(-1, t.shape[-1]).scatter_(1, places[:, None], LOUD)
    return rows


# What becomes of the numbers, and are the results of similar size?
REGIMES: Mapping[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "zeros": (torch.zeros_like, True),
    "positive numbers": (_one_sign, True),
    "negative numbers": (lambda t: -_one_sign(t), True),
    "numbers about a large one": (lambda t: t + OFFSET, False),
    "numbers about a large negative one": (lambda t: t - OFFSET, False),
    "whole numbers": (lambda t: (t * 2).round(), True),
    "rows of one number": (_rows_alike, False),    # what is left of a norm are roundings
    "rising rows": (lambda t: t.sort(-1).values, True),
    "falling rows": (lambda t: t.sort(-1, descending=True).values, True),
    "mostly zeros": (_mostly_zeros, True),
    "large numbers": (lambda t: t * LOUD, False),
    "little numbers": (lambda t: t * QUIET, True),
    "tiny numbers": (lambda t: t * TINY, True),
    "a loud number in each row": (_loud_in_each_row, False),
}
ELEMENTS = 1 << 17                             # of all tensors of a case that has them
POWERS = (15, 13, 11, 9)                       # of two, for the largest number of float16
GRADIENT_CASES, RARE = 24, 7                   # at most; of the kinds one of so many
LARGE = 200.0                                  # its exponential is infinite
SHARES = ("dropout_p", "label_smoothing", "top_p", "min_p")     # which are at most 1
SPREAD = 4                                     # of the tensors beside the main one: each so often


class Numbers(Circumstance):
    """One tensor with numbers of another kind."""

    def __init__(self, tensor: str, how: str) -> None:
        self.tensor, self.how, self.name = tensor, how, f"filled with {how} in {tensor}"
        self.change, self.even = REGIMES[how]

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values.get(self.tensor)
        # of NaN the sign is no matter, and where they go has a check of its own
        if not is_free(t) or bool(t.isnan().any()):
            return None
        changed = self.change(t).to(t.dtype)
        if torch.equal(changed, t):            # rows of one number are in order
            return None
        # probabilities, steps and scales keep their sign
        if not bool((t < 0).any()) and bool((changed < 0).any()):
            return None
        if not bool((t > 0).any()) and bool((changed > 0).any()):
            return None
        return if_finite(op, {**values, self.tensor: changed})


def is_free(t: Any) -> TypeGuard[Tensor]:
    """Is it a tensor of numbers, other than stored codes?"""
    return (isinstance(t, Tensor) and t.is_floating_point() and t.dtype.itemsize > 1
            and t.dim() > 0 and t.numel() > 1)


class LargeBeside(Numbers):
    """A scalar that is large beside large numbers: what it bounds may still be beyond the range of
    an exponential."""

    def __init__(self, op: Op, argument: str) -> None:
        super().__init__(op.main_tensor, "large numbers")
        self.argument = argument
        self.name = f"given {argument} = {LARGE:g} beside large numbers"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        return super().alter(op, {**values, self.argument: LARGE})


class NearTheEnd(Circumstance):
    """One tensor of float16 has numbers so large that float16 just holds them and the results: not
    their sums before they are divided, nor their products."""

    even = False

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"filled with loud numbers of float16 in {tensor}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values.get(self.tensor)
        if not is_free(t) or t.dtype != torch.float16 or not bool(t.isfinite().all()):
            return None
        size = float(t.abs().max())
        for power in POWERS if size else ():
            factor = 2.0 ** (power - math.ceil(math.log2(size)))
            loud = if_finite(op, {**values, self.tensor: t * factor})
            if loud is not None and holds_results(op, loud):
                return loud
        return None


def value_circumstances(op: Op) -> Iterator[Circumstance]:
    """Yields every kind of numbers in every tensor."""
    yield from (Numbers(name, how) for name in op.tensors for how in REGIMES)
    yield from map(NearTheEnd, op.tensors)
    yield from (LargeBeside(op, name) for name in _bounds(op))


def _bounds(op: Op) -> list[str]:
    """Returns the scalars that may be large; scores times as much are beyond float32."""
    return [p.name for p in op.params if type(p.default) is float and p.name != "scale"
            and p.name not in SHARES]


def _is_due(regime: int, turn: int, dtype: str) -> bool:
    """Is it asked at this dtype? Of a half dtype every one in one of the two, else every other."""
    return (regime + turn + (dtype == "bfloat16")) % 2 == 0


def gradient_value_checks(kernel: Kernel, cases: Sequence[Case], device: str, lane: str,
                          seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields gradients of numbers of every kind, of each tensor some in one case and some in
    another: a backward may divide by what the forward multiplied with. Zeros are for every case:
    an activation has an edge there; the quick lane has these alone. What is left of gradients
    about a large number are roundings."""
    op = kernel.op
    kinds = [how for how, (_, even) in REGIMES.items() if even]
    if kernel.backend == "reference":
        return
    yield from (partial(check_gradients, kernel, case, op.dtypes[0], device, seed,
                        altered=Numbers(name, how))
                for i, case in enumerate(cases[:GRADIENT_CASES])
                for j, name in enumerate(op.differentiable)
                for k, how in enumerate(kinds)
                if (name == op.main_tensor and how == "zeros")
                or (lane != "quick" and (i + j + k + seed) % RARE == 0))


def value_checks(kernel: Kernel, cells: Sequence[Cell], device: str,
                 seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the kinds of numbers in the main tensor of each of the op's own cases, in turns by the
    dtype; and in the tensors beside it, where some of them are for one case and some for another.
    """
    op = kernel.op
    if kernel.backend == "reference" or not op.tensors:    # it is what it is compared with
        return
    for case, dtype in cells:
        tensors = case_tensors(op, case, dtype, device, seed) if case in op.cases else {}
        if (sum(t.numel() for t in tensors.values()) > ELEMENTS or is_costly(op, case)
                or case_refusals(kernel, case, dtype, device, seed)
                or is_degenerate(op, case_facts(op, case, dtype, device, seed))):
            continue
        turn = zlib.crc32(case_key(case).encode()) + seed
        yield from (partial(check_case, kernel, case, dtype, device, seed, Numbers(name, how))
                    for i, name in enumerate(n for n, t in tensors.items() if is_free(t))
                    for j, how in enumerate(REGIMES)
                    if _is_due(j, turn, dtype)
                    and (name == op.main_tensor or (i + j // 2 + turn // 2) % SPREAD == 0))
        if dtype == "float16":
            yield from (partial(check_case, kernel, case, dtype, device, seed, NearTheEnd(name))
                        for i, name in enumerate(tensors) if (i + turn) % SPREAD == 0)
        elif dtype == op.dtypes[0]:
            yield from (partial(check_case, kernel, case, dtype, device, seed,
                                LargeBeside(op, name))
                        for i, name in enumerate(_bounds(op)) if (i + turn) % SPREAD == 0)
