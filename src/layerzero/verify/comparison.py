"""Compares two tensors: how far apart they are, where most, and whether that is close enough for
their dtype.

Values agree where |got - want| <= atol + rtol * |want|. The cosine similarity must be high as
well, since a tolerance says nothing about values that are all much smaller.

How much is allowed is one of two things. `tolerance_of` is a table by dtype, for kernels of
strangers: all values must agree, except at float8 and float4, where 85 % must. `error_budget` is
what the formats of a definition really cost. Codes of eight and four bits are inputs like any
other: both sides read the same numbers, so they cost nothing. What costs is the rounding of the
result, and of intermediate values where one side computes in 16 bits. Roundings have no direction,
so a result that is off by a factor, or that is off by little everywhere, is found far below the
error of one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..spec.codec import Record
from .kernel.judging import worst_indices

TINY = 1e-8                                    # added to |want| in relative errors


@dataclass(frozen=True)
class ElementTolerance:
    atol: float
    rtol: float
    hit_ratio: float = 1.0                     # share of values that must agree
    cosine: float = 0.999
    row: float = 0.0                           # added to atol: of the row's root mean square
    rms: float = math.inf                      # of a row's error, over the row's root mean square
    factor: float = math.inf                   # how far all or a row may be from 1 x the wanted


TOLERANCES: Mapping[str, ElementTolerance] = {
    "float32": ElementTolerance(1e-5, 1e-5),
    "float16": ElementTolerance(1e-3, 1e-3),
    "bfloat16": ElementTolerance(8e-3, 1e-2),
    "float8_e4m3fn": ElementTolerance(1e-1, 2e-1, 0.85, 0.95),
    "float8_e5m2": ElementTolerance(1e-1, 2e-1, 0.85, 0.95),
    "float4_e2m1": ElementTolerance(1e-1, 2e-1, 0.85, 0.95),
}
_COARSEST_FIRST = ("float4_e2m1", "float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32")


def tolerance_of(dtypes: Iterable[str], override: float | None = None) -> ElementTolerance:
    """Returns the tolerance of the coarsest float dtype; `override` replaces atol and rtol."""
    present = set(dtypes)
    tolerance = next((TOLERANCES[d] for d in _COARSEST_FIRST if d in present),
                     TOLERANCES["float32"])
    return (
        tolerance if override is None else ElementTolerance(override, override, tolerance.hit_ratio,
                                                            tolerance.cosine)
    )


# Half the distance of neighbouring numbers, relative to them.
UNITS = {"float32": 2.0 ** -24, "float16": 2.0 ** -11, "bfloat16": 2.0 ** -8}
# Of a product of many terms in float32, and of exp and log there.
_FLOAT32 = 64 * UNITS["float32"]
SHORT_ROW = 8                                  # below it the whole tensor is one row
LONG_ROW = 64                                  # from it on a row has a factor of its own


def error_budget(dtypes: Iterable[str], output: str, *, exact: bool) -> ElementTolerance:
    """Returns what two sound computations may differ by in an output. `exact`: both compute in
    float32 and round once at the end; else one of them may round every intermediate value to the
    coarsest of `dtypes` that has arithmetic."""
    rounding = UNITS.get(output, UNITS["bfloat16"])
    work = max((UNITS[d] for d in dtypes if d in UNITS), default=UNITS["float32"])
    if exact:
        # neighbours at most; which of them is half chance
        return ElementTolerance(1e-7, max(2.1 * rounding, _FLOAT32), row=_FLOAT32 + rounding / 8,
                                rms=2 * rounding + _FLOAT32, factor=rounding / 16 + _FLOAT32)
    unit = max(work, rounding)
    return ElementTolerance(1e-7, max(4 * rounding, _FLOAT32), row=16 * unit + _FLOAT32,
                            rms=6 * unit + _FLOAT32, factor=2 * unit + _FLOAT32)


@dataclass(frozen=True)
class ElementDifference:
    """One element where two tensors differ."""

    index: tuple[int, ...]
    got: float
    want: float

    @property
    def difference(self) -> float:
        return abs(self.got - self.want)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.index))}]: got {self.got:.6g}, want {self.want:.6g}"


@dataclass(frozen=True)
class Metrics(Record):
    """How far one tensor is from another, over the elements that are not NaN in the wanted one."""

    max_abs: float = 0.0
    mean_abs: float = 0.0
    max_rel: float = 0.0
    mean_rel: float = 0.0
    cosine: float = 1.0
    mse: float = 0.0
    hit_ratio: float = 1.0
    # elements that are NaN in the wanted tensor: not compared
    undefined: int = 0
    worst: tuple[ElementDifference, ...] = ()
    rms: float = 0.0                           # the worst row's error over its root mean square
    factor: float = 1.0                        # which multiple of the wanted one fits best
    row_factor: float = 1.0                    # in the worst row


HUGE = 1e300                                   # finite numbers of every dtype here are below
ABSURD = 1e4                                   # a ratio beyond says only that 0 was wanted


def _absolute(metrics: Metrics) -> str:
    if metrics.max_abs > HUGE:
        return "abs infinite"
    return f"abs {metrics.max_abs:.3g} (mean {metrics.mean_abs:.3g})"


def _relative(metrics: Metrics) -> str:
    if metrics.max_rel > ABSURD:
        return "rel without meaning where 0 is wanted"
    return f"rel {metrics.max_rel:.3g} (mean {metrics.mean_rel:.3g})"


@dataclass(frozen=True)
class ComparisonVerdict:
    """The comparison of one output."""

    output: str
    # passed | INCORRECT_SHAPE | INCORRECT_DTYPE | INCORRECT_NUMERICAL
    status: str
    metrics: Metrics = field(default_factory=Metrics)
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def __str__(self) -> str:
        m = self.metrics
        numbers = (
            f"{_absolute(m)}, {_relative(m)}, "
            f"cosine {m.cosine:.6f}, mse {m.mse:.3g}, hits {m.hit_ratio:.2%}")
        return f"{self.output}: {self.status}, {numbers}" + (f"; {self.detail}" if self.detail
                                                             else "")


def compare(output: str, got: Any, want: Any, tolerance: ElementTolerance,
            top: int = 5) -> ComparisonVerdict:
    """Compares `got` with the expected `want`. Integers must be equal."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        got, want = torch.as_tensor(got), torch.as_tensor(want)
    if got.shape != want.shape:
        return ComparisonVerdict(
            output, "INCORRECT_SHAPE",
            detail=f"shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
        )
    if got.dtype != want.dtype:
        return ComparisonVerdict(output, "INCORRECT_DTYPE",
                                 detail=f"{got.dtype}, wanted {want.dtype}")
    exact = not want.is_floating_point()
    a, b = got.detach().cpu().double(), want.detach().cpu().double()
    limits = ElementTolerance(0.0, 0.0) if exact else tolerance
    metrics = measure(a, b, limits, top)
    complaints = []
    if metrics.hit_ratio < limits.hit_ratio:
        complaints.append(
            f"{metrics.hit_ratio:.2%} agree within atol {limits.atol:g}, rtol {limits.rtol:g}, "
            f"wanted {limits.hit_ratio:.0%}")
    if not exact and metrics.cosine < limits.cosine:
        complaints.append(f"cosine {metrics.cosine:.5f}, wanted {limits.cosine}")
    if not exact and metrics.rms > limits.rms:
        complaints.append("a row is not 0 where 0 is wanted" if metrics.rms > ABSURD else
                          f"a row is off by {metrics.rms:.3g} of itself, allowed {limits.rms:.3g}")
    # roundings cancel, the fewer there are the less
    for name, factor, count in (("all", metrics.factor, want.numel()), (
            "a row", metrics.row_factor, want.shape[-1] if want.dim() else 1)):
        allowed = limits.factor + 4 * min(limits.rms, 1.0) / math.sqrt(max(count, 1))
        if not exact and abs(factor - 1) > allowed:
            times = f"{factor:.5g}" if abs(factor) < ABSURD else f"more than {ABSURD:g}"
            complaints.append(f"{name} is {times} times what is wanted, allowed 1 +- "
                              f"{allowed:.2g}")
    if complaints:
        places = "; ".join(map(str, metrics.worst))
        return ComparisonVerdict(output, "INCORRECT_NUMERICAL", metrics,
                                 f"{', '.join(complaints)}; worst at {places}")
    note = f"{metrics.undefined} values are NaN in the wanted one" if metrics.undefined else ""
    return ComparisonVerdict(output, "passed", metrics, note)


def measure(got: Tensor, want: Tensor, tolerance: ElementTolerance, top: int = 5) -> Metrics:
    """Measures two float64 tensors of one shape."""
    defined = ~want.isnan()
    undefined = int((~defined).sum())
    if not bool(defined.any()):
        return Metrics(undefined=undefined)
    same = (got == want) & defined             # equal infinities too
    gap = torch.where(same, 0.0, (got - want).abs()).nan_to_num(nan=math.inf)
    gap = torch.where(defined, gap, 0.0)
    size = want.abs()
    relative = torch.where(same, 0.0, gap / (size + TINY)).nan_to_num(nan=math.inf)
    finite = defined & want.isfinite() & got.isfinite()
    rows = _row_rms(torch.where(finite, want, 0.0))
    agree = (gap <= tolerance.atol + tolerance.row * rows + tolerance.rtol
             * torch.where(size.isfinite(), size, 0.0)) | ~defined
    row_errors = _row_rms(torch.where(finite, got - want, 0.0))
    rms = float(torch.where(row_errors <= TINY, 0.0, row_errors / rows).nan_to_num().max())
    x, y = got[finite], want[finite]
    norms = float(x.norm() * y.norm())
    both_zero = float(x.norm()) == float(y.norm()) == 0.0
    cosine = float(x @ y) / norms if norms else float(both_zero)
    factor = float(x @ y) / float(y @ y) if float(y @ y) > 0 else 1.0
    count, n = int(defined.sum()), min(top, want.numel())
    places = worst_indices(torch.where(defined, got, 0.0), torch.where(defined, want, 0.0), n)
    worst = [ElementDifference(i, float(got[i]), float(want[i])) for i in places]
    return Metrics(
        float(gap.max()), float(gap.sum()) / count, float(relative.max()),
        float(relative.sum()) / count, min(cosine, 1.0), float((x - y).square().mean()) if x.numel()
        else 0.0, float((agree & defined).sum()) / count, undefined,
        tuple(p for p in worst if p.got != p.want), rms, factor,
        _row_factor(torch.where(finite, got, 0.0), torch.where(finite, want, 0.0)))


def _row_rms(t: Tensor) -> Tensor:
    """Returns the root mean square of each row, as wide as the row; of all where rows are short."""
    if t.dim() < 2 or t.shape[-1] < SHORT_ROW:
        return t.square().mean().sqrt().expand_as(t)
    return t.square().mean(-1, keepdim=True).sqrt().expand_as(t)


def _row_factor(got: Tensor, want: Tensor) -> float:
    if got.dim() < 2 or got.shape[-1] < LONG_ROW:
        return 1.0
    size = want.square().sum(-1)
    factors = torch.where(size > 0, (got * want).sum(-1) / size, 1.0).reshape(-1)
    return float(factors[(factors - 1).abs().argmax()])


def overall(verdicts: Sequence[ComparisonVerdict]) -> str:
    """Returns the first status that is not passed, in the order of the schema's statuses."""
    statuses = {v.status for v in verdicts}
    return next((s for s in ("INCORRECT_SHAPE", "INCORRECT_DTYPE", "INCORRECT_NUMERICAL")
                 if s in statuses), "passed")
