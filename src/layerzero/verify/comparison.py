"""Compares two tensors: how far apart they are, where most, and whether that is close enough for
their dtype.

Values agree where |got - want| <= atol + rtol * |want|. All must agree, except at float8 and
float4, where 85 % must. The cosine similarity must be high as well, since a tolerance says nothing
about values that are all much smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..spec.codec import Record
from .kernel.contract import worst_indices

TINY = 1e-8                                    # added to |want| in relative errors


@dataclass(frozen=True)
class ElementTolerance:
    atol: float
    rtol: float
    hit_ratio: float = 1.0                     # share of values that must agree
    cosine: float = 0.999


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
    """Returns the tolerance of the coarsest floating dtype; `override` replaces its atol and
    rtol."""
    present = set(dtypes)
    tolerance = next((TOLERANCES[d] for d in _COARSEST_FIRST if d in present),
                     TOLERANCES["float32"])
    return (
        tolerance if override is None else ElementTolerance(override, override, tolerance.hit_ratio,
                                                            tolerance.cosine)
    )


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
            f"abs {m.max_abs:.3g} (mean {m.mean_abs:.3g}), rel {m.max_rel:.3g} (mean "
            f"{m.mean_rel:.3g}), cosine {m.cosine:.6f}, mse {m.mse:.3g}, hits {m.hit_ratio:.2%}")
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
    agree = (gap <= tolerance.atol + tolerance.rtol
             * torch.where(size.isfinite(), size, 0.0)) | ~defined
    finite = defined & want.isfinite() & got.isfinite()
    x, y = got[finite], want[finite]
    norms = float(x.norm() * y.norm())
    both_zero = float(x.norm()) == float(y.norm()) == 0.0
    cosine = float(x @ y) / norms if norms else float(both_zero)
    count, n = int(defined.sum()), min(top, want.numel())
    places = worst_indices(torch.where(defined, got, 0.0), torch.where(defined, want, 0.0), n)
    worst = [ElementDifference(i, float(got[i]), float(want[i])) for i in places]
    return Metrics(
        float(gap.max()), float(gap.sum()) / count, float(relative.max()),
        float(relative.sum()) / count, min(cosine, 1.0), float((x - y).square().mean()) if x.numel()
        else 0.0, float((agree & defined).sum()) / count, undefined,
        tuple(p for p in worst if p.got != p.want))


def overall(verdicts: Sequence[ComparisonVerdict]) -> str:
    """Returns the first status that is not passed, in the order of the schema's statuses."""
    statuses = {v.status for v in verdicts}
    return next((s for s in ("INCORRECT_SHAPE", "INCORRECT_DTYPE", "INCORRECT_NUMERICAL")
                 if s in statuses), "passed")
