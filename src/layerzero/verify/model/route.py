"""One comparison: something that lz computes along the way of a decoder, and what it should have been.

How far a value may be off. In float32: the limit of its kind (below). Stages and gradients inside a layer may be off by
so much for each unit of their largest number: the limits are written for values near one, the spacing of float32 grows
with the numbers, and the residual of a real model reaches thousands. Logits, losses and trained parameters are not
widened so. In 16 bits: twice what plain torch is off by at the same dtype, plus a few roundings, as FlashAttention's
own tests have it. Where a gradient has jumps, as that of ReLU has at zero, rounding puts a few elements on the other
side, in plain torch as in lz: there the root of the mean square is compared instead of the largest difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...models.decoder import Trace
from ...spec.codec import Record
from ..kernel.contract import ROUNDINGS, worst_indices
from .served import Served

LAYER, LOGITS, GRADIENT = 1e-4, 1e-3, 1e-5       # largest differences in float32
TIMES_EAGER = 2.0


@dataclass(frozen=True)
class Row(Record, json="what error allowed mean eager kernel worst text ok"):
    """One line of a table: a difference and what was allowed."""

    what: str
    error: float
    allowed: float
    mean: float = 0.0
    eager: float | None = None                 # what plain torch is off by at the same dtype
    kernel: str = ""
    worst: tuple[tuple[int, ...], ...] = ()
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed      # False for NaN too

    @property
    def ratio(self) -> float:
        """Of the difference to what was allowed."""
        return self.error / self.allowed if self.allowed else math.inf if self.error else 0.0

    def __str__(self) -> str:
        return (f"{self.what}: {self.error:.3g}, allowed {self.allowed:.3g}" + (f" ({self.text})" if self.text else "")
                + (f" by {self.kernel}" if self.kernel else "")
                + (f", worst at {', '.join(map(str, self.worst))}" if not self.ok and self.worst else ""))


def largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def difference(got: Tensor, want: Tensor) -> float:
    """The largest; infinite where one is not a number."""
    if got.shape != want.shape:
        return math.inf
    gap = (got.double() - want.to(got.device).double()).abs()
    return math.inf if gap.isnan().any() else largest(gap)


def typical(t: Tensor) -> float:
    """The root of the mean square."""
    return float(t.double().square().mean().sqrt()) if t.numel() else 0.0


def typical_difference(got: Tensor, want: Tensor) -> float:
    return difference(got, want) if got.shape != want.shape else typical(got.double() - want.to(got.device).double())


def allowed(dtype: torch.dtype, want: Tensor, eager: Tensor | None, limit: float, scaled: bool = True,
            jumps: bool = False) -> float:
    if dtype == torch.float32 or eager is None:
        return limit * max(1.0, largest(want)) if scaled else limit
    if jumps:
        return TIMES_EAGER * typical_difference(eager, want) + ROUNDINGS * torch.finfo(dtype).eps * typical(want)
    return TIMES_EAGER * difference(eager, want) + ROUNDINGS * torch.finfo(dtype).eps * largest(want)


@dataclass
class Route:
    """`run` computes with lz and gives a trace; `truth` is what each stage should be, in the order of computing.

    All of the truth serves to find a culprit; `shown` are the stages that are judged, all of them if not said.
    """

    name: str
    dtype: torch.dtype
    run: Callable[[Served], Trace]
    truth: Mapping[str, Tensor]
    limit: Callable[[str], float]
    eager: Mapping[str, Tensor] = field(default_factory=dict)
    shown: Sequence[str] | None = None
    extra: Callable[[Trace], list[Row]] | None = None          # rows that are no plain difference
    scaled: Callable[[str], bool] = lambda stage: not stage.endswith("logits")
    jumps: Callable[[str], bool] = lambda stage: False         # is it a gradient with jumps, or what follows from one?

    def measure(self, stage: str) -> Callable[[Tensor, Tensor], float]:
        """In float32 so few elements change sides that none does."""
        return typical_difference if self.jumps(stage) and self.dtype != torch.float32 else difference

    def allowed(self, stage: str) -> float:
        return allowed(self.dtype, self.truth[stage], self.eager.get(stage), self.limit(stage), self.scaled(stage),
                       self.jumps(stage))

    def row(self, trace: Trace, stage: str) -> Row:
        note = trace[stage]
        want = self.truth[stage].to(note.value.device)
        differ = self.measure(stage)
        error, bound = differ(note.value, want), self.allowed(stage)
        same = note.value.shape == want.shape
        eager = differ(self.eager[stage], want) if stage in self.eager else None
        return Row(stage, error, bound, float((note.value.double() - want.double()).abs().mean()) if same else math.inf,
                   eager, note.kernel, tuple(worst_indices(note.value, want)) if error > bound and same else ())

    def rows(self, trace: Trace) -> list[Row]:
        stages = self.truth if self.shown is None else self.shown
        found = [self.row(trace, stage) for stage in stages if stage in trace and stage in self.truth]
        return found + (self.extra(trace) if self.extra is not None else [])
