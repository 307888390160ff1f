"""Judges one result of a kernel beside the exact one and that of the eager formula; what is
allowed is told in contract.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...spec.op import Op
from .error_budget import ROUNDINGS as ROUNDINGS
from .error_budget import UNITS
from .results import Complaint

# ROUNDINGS of the largest result are always allowed, however exact eager was.
# Root mean square over that of the eager formula, in 16 bits. On a GPU torch itself may add the
# parts of a split sum in 16 bits.
JUST_OUTSIDE = 2.0         # times the allowed error: repeated with other numbers
FEW_ELEMENTS, FAR_OUTSIDE = 64, 32.0           # errors of few elements vary more
TIMES_TYPICAL, TIMES_TYPICAL_GPU, TYPICAL_ELEMENTS = 3.0, 8.0, 16
TIMES_OF_MANY, MANY_ELEMENTS = 2.0, 256


def worst_indices(out: Tensor, truth: Tensor, n: int = 3) -> list[tuple[int, ...]]:
    """Returns where `out` is furthest from `truth`, worst first; NaN is worst of all."""
    if not out.numel():
        return []
    differences = (out.double() - truth.double()).abs().reshape(-1)
    differences = torch.where(out.reshape(-1) == truth.reshape(-1), 0.0,
                              differences.nan_to_num(nan=math.inf))
    flat_indices = differences.topk(min(n, differences.numel())).indices.tolist()
    return [tuple(int(i) for i in _unravel(flat, out.shape)) for flat in flat_indices]


@dataclass(frozen=True)
class Judgement:
    error: float
    eager_error: float
    ratio: float
    complaints: tuple[Complaint, ...] = ()
    notes: tuple[str, ...] = ()


class Expected:
    """What judging asks of the exact result and of the eager one: the same for every kernel."""

    def __init__(self, truth: Tensor, eager: Tensor) -> None:
        self.truth, self.eager = truth, _as_codes(eager)
        self.limits: dict[tuple[float, float], Tensor] = {}

    @cached_property
    def chosen(self) -> Tensor | None:
        """Where the exact result is finite. None: everywhere; a mask costs more than all else."""
        finite = self.truth.isfinite()
        return None if bool(finite.all()) else finite

    @cached_property
    def want(self) -> Tensor:
        return _masked(self.truth, self.chosen)

    @cached_property
    def gap(self) -> Tensor:
        return _gap(self.eager, self.truth, self.chosen)

    @cached_property
    def error(self) -> float:
        return _largest_or_inf(self.gap)

    @cached_property
    def size(self) -> float:
        return largest(self.want.abs())

    def limit(self, rtol: float, atol: float) -> Tensor:
        """Returns the op's tolerance of each element."""
        if (rtol, atol) not in self.limits:
            self.limits[rtol, atol] = atol + rtol * self.want.abs()
        return self.limits[rtol, atol]


def _judged_as(op: Op, dtype: str, result: Tensor, eager_error: float, size: float) -> str:
    """Returns the dtype of the case, or that of a result that an argument asks for coarser, or
    wider where the formula is as exact."""
    name, given = str(result.dtype).removeprefix("torch."), getattr(torch, dtype)
    if name == dtype or name not in op.tolerance.by_dtype or not given.is_floating_point:
        return dtype
    rtol, atol = op.tolerance.of(name)
    is_exact = result.dtype == torch.float64 and eager_error <= atol + rtol * size
    return name if is_exact or torch.finfo(result.dtype).eps > torch.finfo(given).eps else dtype


def judge_result(op: Op, dtype: str, name: str, first: Tensor, second: Tensor, truth: Tensor,
                 eager: Tensor, even: bool = True, budget: Tensor | None = None,
                 alike: bool = False, expected: Expected | None = None) -> Judgement:
    """Judges one result. `even`: its elements have similar size, so each is held to the op's
    tolerance. `budget`: how far a rounding of the inputs to the dtype moves each element. `alike`:
    rows of an input are equal, so that a sum over them has one error as often. `expected`: of
    `truth` and `eager`, where others ask for it too."""
    if not first.numel():
        return Judgement(0.0, 0.0, 0.0)
    expected = Expected(truth, eager) if expected is None else expected
    first, second, eager = _as_codes(first), _as_codes(second), expected.eager
    # tokens, codes and counts must equal the formula at this dtype
    if not first.is_floating_point():
        wrong = [when for out, when in ((first, ""), (second, " over poisoned memory"))
                 if not torch.equal(out, eager)]
        return Judgement(float(bool(wrong)), 0.0, math.inf if wrong else 0.0,
                         tuple(Complaint("error",
            f"{name}{when}: differs from the formula at {worst_indices(first, eager)}")
                               for when in wrong))
    chosen, want, eager_gap = expected.chosen, expected.want, expected.gap
    eager_error, size = expected.error, expected.size
    judged_as = _judged_as(op, dtype, first, eager_error, size)
    rtol, atol = op.tolerance.of(judged_as)
    if judged_as == "float64" != dtype:        # no rounding to the narrower dtype is in it
        budget = None
    gaps = [eager_gap if _equal(first, eager) else _gap(first, truth, chosen)]
    gaps += [] if torch.equal(first, second) else [_gap(second, truth, chosen)]
    bound = op.tolerance.times_eager * eager_error + ROUNDINGS * torch.finfo(first.dtype).eps * size
    wider = first.dtype.itemsize > getattr(torch, dtype).itemsize
    if dtype == "float32" or wider:            # another order of a long sum is no mistake
        bound = max(bound, (atol + rtol * size) / (16 if wider and not alike else 4))
    if dtype == "float64":
        bound = atol + rtol * size
    if budget is not None:                     # of all together: as kernels compute, in float32
        roundings = 2 * ROUNDINGS if alike else ROUNDINGS
        bound += roundings * largest(_masked(budget, chosen)) * UNITS["float32"] / UNITS[dtype]
    error = max(eager_error if gap is eager_gap else _largest_or_inf(gap) for gap in gaps)
    complaints, notes = [], []
    for out, when in (((first, ""), (second, " over poisoned memory"))
                      if chosen is not None or not math.isfinite(error) else ()):
        finite = truth.isfinite()
        bad = (out.double() != truth) & ~finite | ~out.isfinite() & finite
        bad &= ~(truth.isnan() & out.isnan())
        if bad.any():
            complaints.append(Complaint(
                "not finite",
                f"{name}{when}: {int(bad.sum())} of {out.numel()} not finite where the reference "
                f"is, or finite where it is not, first at {tuple(bad.nonzero()[0].tolist())}"))
    if not complaints and error > bound:
        complaints.append(Complaint(
            "error",
            f"{name}: error {error:.3g} exceeds {op.tolerance.times_eager:g} x eager "
            f"{eager_error:.3g} + rounding = {bound:.3g}, worst at {worst_indices(first, truth)}"))
    ratio = error / bound if bound else float(error > 0)
    spare = 0.0 if budget is None else budget * (ROUNDINGS if dtype == "float32" else 1.0)
    limit = expected.limit(rtol, atol)
    if isinstance(spare, Tensor):
        limit = limit + _masked(spare, chosen)
    # dividing takes longer, and is only needed for what is outside
    outside = 0.0 if bool((gaps[0] <= limit).all()) else _outside(gaps[0], limit)
    if not complaints and even and outside > 1:
        eager_outside = _outside(eager_gap, limit)
        if eager_outside > 1 and first.device.type == "cpu" and first.dtype.itemsize == 2:
            # a tolerance finer than the dtype: with one rounding of each element
            limit = limit + torch.finfo(first.dtype).eps * want.abs()
            outside, eager_outside = _outside(gaps[0], limit), _outside(eager_gap, limit)
        if outside <= 1 or eager_outside > 1 or outside <= op.tolerance.times_eager * eager_outside:
            notes.append(
                f"{name}: outside rtol {rtol:g}, atol {atol:g}, as is or nearly is the eager "
                f"formula ({eager_error:.3g})")
        else:
            ratio = max(ratio, outside)
            complaints.append(Complaint(
                "error", f"{name}: {outside:.2g} times rtol {rtol:g}, atol {atol:g}, worst at "
                f"{worst_indices(first, truth)}; the eager formula {eager_outside:.2g} times"))
    typical = (_typical_ratio(op, first, gaps[0], want, eager_gap)
               if even and gaps[0] is not eager_gap
               and not any(c.kind == "not finite" for c in complaints) else 0.0)
    if typical > 1:
        # an average of many is none by chance
        ratio = max(ratio, typical, FAR_OUTSIDE if want.numel() >= MANY_ELEMENTS else 0.0)
        times = _times_typical(op, first, want)
        complaints.append(Complaint(
            "error", f"{name}: errors are on average {typical * times:.2g} times those of the "
            f"eager formula, allowed {times:g}; worst at {worst_indices(first, truth)}"))
    return Judgement(error, eager_error, ratio, tuple(complaints), tuple(notes))


def may_be_chance(results: Sequence[Any], ratio: float) -> bool:
    """May an error of `ratio` times the allowed one be chance?"""
    few = any(isinstance(t, Tensor) and t.is_floating_point() and t.numel() < FEW_ELEMENTS
              for t in results)
    return ratio <= JUST_OUTSIDE or (few and ratio <= FAR_OUTSIDE)


def was_chance(op: Op, errors: tuple[float, float, float], retries: Sequence[Any]) -> bool:
    """Was it outside for these numbers only, or is it within what is allowed over all runs?
    `retries`: the results of the same case with other numbers."""
    if any(retry.status == "failed" and set(retry.kinds) != {"error"} for retry in retries):
        return False
    runs = [errors, *((retry.error, retry.eager_error, retry.ratio) for retry in retries)]
    typical = sum(e for e, *_ in runs) <= op.tolerance.times_eager * sum(e for _, e, _ in runs)
    if errors[2] <= JUST_OUTSIDE and (typical or sum(r.status == "failed" for r in retries) < 2):
        return True
    rounding = max(e / r - op.tolerance.times_eager * eager for e, eager, r in runs if r > 0)
    allowed = op.tolerance.times_eager * max(eager for _, eager, _ in runs) + max(rounding, 0.0)
    return max(e for e, _, _ in runs) <= allowed


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _typical_ratio(op: Op, out: Tensor, gap: Tensor, want: Tensor, eager_gap: Tensor) -> float:
    """Returns the root mean square of the errors over what is allowed; 0 where it says nothing."""
    if out.dtype.itemsize != 2 or want.numel() < TYPICAL_ELEMENTS:
        return 0.0
    info = torch.finfo(out.dtype)

    def spread(t: Tensor) -> float:
        return float(t.double().square().mean().sqrt())

    # a result that is rounded once is off by 0.2 of eps or so
    least = max(0.2 * info.eps * spread(want), info.smallest_normal)
    times = _times_typical(op, out, want)
    return spread(gap) / (times * max(spread(eager_gap), least))


def _times_typical(op: Op, out: Tensor, want: Tensor) -> float:
    """Of many errors of a plain product more is known: others round in between too."""
    if out.device.type != "cpu":
        return TIMES_TYPICAL_GPU
    return (TIMES_OF_MANY if want.numel() >= MANY_ELEMENTS and op.family == "linear"
            else TIMES_TYPICAL)


def _masked(t: Tensor, chosen: Tensor | None) -> Tensor:
    return t if chosen is None else t[chosen]


def _gap(out: Tensor, truth: Tensor, chosen: Tensor | None) -> Tensor:
    return _masked((out.double() - truth).abs(), chosen)


def _largest_or_inf(gap: Tensor) -> float:
    error = largest(gap)
    return math.inf if math.isnan(error) else error


def _outside(gap: Tensor, limit: Tensor) -> float:
    """Returns the worst element's error over what is allowed."""
    return largest(torch.where(gap == 0, 0.0, gap / limit))


def largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0


def _as_codes(t: Tensor) -> Tensor:
    """Returns one-byte floats as their codes: torch compares few of those dtypes, and they must be
    equal."""
    return t.view(torch.uint8) if t.is_floating_point() and t.dtype.itemsize == 1 else t


def without_nan(t: Tensor) -> Tensor:
    """Replaces NaN, which differs from itself, so that equal garbage compares equal."""
    t = _as_codes(t)
    return t.nan_to_num(nan=math.inf) if t.is_floating_point() else t


def same(a: Any, b: Any) -> bool:
    """Are two results equal, with NaN where the other has it?"""
    if not isinstance(a, Tensor):              # a text
        return bool(a == b)
    return torch.equal(_as_codes(a), _as_codes(b)) or torch.equal(without_nan(a), without_nan(b))


def find_nondeterminism(results: Sequence[tuple[Tensor, ...]], jit: bool) -> Iterator[Complaint]:
    """Compares the runs of a kernel. Of what is compiled not the one over poisoned memory, which is
    made in torch's deterministic mode: for it torch compiles another variant."""
    first, poisoned, *others = results
    for other in others if jit else (poisoned, *others):
        if not all(map(same, first, other)):
            worst = max(largest((a.double() - b.double()).abs()) if a.shape == b.shape
                        else math.inf for a, b in zip(first, other))
            yield Complaint("non-determinism", f"two runs differ, by up to {worst:.3g}" + (
                ", the second over poisoned memory" if other is poisoned else ""))
            return


def _unravel(flat: int, shape: Sequence[int]) -> Iterator[int]:
    rest = flat
    for size in (math.prod(shape[i + 1:]) for i in range(len(shape))):
        yield rest // size
        rest %= size
