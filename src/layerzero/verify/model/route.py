"""A route: one run of a decoder by lz, compared stage by stage with the expected values.

How far a value may be off. In float32: the limit of its kind (below). Inside a layer the limits of
stages and gradients scale with their largest value: they are stated for values near one, the
spacing of float32 grows with the values, and the residual of a real model reaches thousands.
Logits, losses and trained parameters are not scaled. In 16 bits: twice the error of plain torch at
the same dtype, plus a few roundings, as in FlashAttention's own tests. Where a gradient is
discontinuous, as that of ReLU at zero, rounding puts a few elements on the other side, in plain
torch as in lz: there the root mean square is compared instead of the largest difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...models.decoder import Trace
from ...spec.codec import Record
from ..kernel.judging import ROUNDINGS, worst_indices
from .served import LzCaller

LAYER, LOGITS, GRADIENT = 1e-4, 1e-3, 1e-5       # largest differences in float32
TIMES_EAGER = 2.0


@dataclass(frozen=True)
class LadderRow(Record, json="what error allowed mean eager kernel worst text ok"):
    """One line of a table: a difference and the allowed one."""

    what: str
    error: float
    allowed: float
    mean: float = 0.0
    eager: float | None = None                 # error of plain torch at the same dtype
    kernel: str = ""
    worst: tuple[tuple[int, ...], ...] = ()
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed      # False for NaN too

    @property
    def ratio(self) -> float:
        """The difference over the allowed one."""
        return self.error / self.allowed if self.allowed else math.inf if self.error else 0.0

    def __str__(self) -> str:
        return (f"{self.what}: {self.error:.3g}, allowed {self.allowed:.3g}"
                + (f" ({self.text})" if self.text else "")
                + (f" by {self.kernel}" if self.kernel else "")
                + (f", worst at {', '.join(map(str, self.worst))}" if not self.ok and self.worst
                   else ""))


def max_abs(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def difference(got: Tensor, want: Tensor) -> float:
    """Returns the largest absolute difference; infinite if shapes differ or one is NaN."""
    if got.shape != want.shape:
        return math.inf
    deviation = (got.double() - want.to(got.device).double()).abs()
    return math.inf if deviation.isnan().any() else max_abs(deviation)


def rms(t: Tensor) -> float:
    """Returns the root mean square."""
    return float(t.double().square().mean().sqrt()) if t.numel() else 0.0


def rms_difference(got: Tensor, want: Tensor) -> float:
    return (difference(got, want) if got.shape != want.shape
            else rms(got.double() - want.to(got.device).double()))


def allowed(dtype: torch.dtype, want: Tensor, eager: Tensor | None, limit: float,
            scaled: bool = True, jumps: bool = False) -> float:
    if dtype == torch.float32 or eager is None:
        return limit * max(1.0, max_abs(want)) if scaled else limit
    if jumps:
        return TIMES_EAGER * rms_difference(eager,
                                            want) + ROUNDINGS * torch.finfo(dtype).eps * rms(want)
    return TIMES_EAGER * difference(eager,
                                    want) + ROUNDINGS * torch.finfo(dtype).eps * max_abs(want)


@dataclass
class Route:
    """`run` computes with lz and returns a trace; `truth` has the expected stages, in the order of
    computing.

    All of `truth` serves to find a culprit; `shown` are the stages that are judged, by default all.
    """

    name: str
    dtype: torch.dtype
    run: Callable[[LzCaller], Trace]
    truth: Mapping[str, Tensor]
    limit: Callable[[str], float]
    eager: Mapping[str, Tensor] = field(default_factory=dict)
    shown: Sequence[str] | None = None
    # rows other than differences of stages
    extra: Callable[[Trace], list[LadderRow]] | None = None
    scaled: Callable[[str], bool] = lambda stage: not stage.endswith("logits")
    # does it depend on a discontinuous gradient?
    jumps: Callable[[str], bool] = lambda stage: False

    def measure(self, stage: str) -> Callable[[Tensor, Tensor], float]:
        """Returns the measure of a stage; float32 has too few flips to need the rms."""
        return rms_difference if self.jumps(stage) and self.dtype != torch.float32 else difference

    def allowed(self, stage: str) -> float:
        return allowed(self.dtype, self.truth[stage], self.eager.get(stage), self.limit(stage),
                       self.scaled(stage), self.jumps(stage))

    def row(self, trace: Trace, stage: str) -> LadderRow:
        value = trace[stage].value
        want = self.truth[stage].to(value.device)
        differ = self.measure(stage)
        error, bound = differ(value, want), self.allowed(stage)
        same_shape = value.shape == want.shape
        eager = differ(self.eager[stage], want) if stage in self.eager else None
        mean = float((value.double() - want.double()).abs().mean()) if same_shape else math.inf
        worst = tuple(worst_indices(value, want)) if error > bound and same_shape else ()
        return LadderRow(stage, error, bound, mean, eager, trace[stage].kernel, worst)

    def rows(self, trace: Trace) -> list[LadderRow]:
        stages = self.truth if self.shown is None else self.shown
        rows = [self.row(trace, stage) for stage in stages if stage in trace
                and stage in self.truth]
        return rows + (self.extra(trace) if self.extra is not None else [])
