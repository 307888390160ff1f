"""The results of tuning: the fastest kernel per kind of call, how surely, what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..perf.record import EAGER, Measurement, Rates
from ..spec.call import Call
from ..spec.codec import Record
from ..spec.display import Cells, Displayed, plural
from ..spec.plan import Rejected
from ..spec.reason import Reason
from .harness import Ratio, TimingSummary


@dataclass(frozen=True)
class TimedKernel:
    """One kernel in one kind of call, as it was timed."""

    kernel: str
    summary: TimingSummary
    cost_us: float                             # as selection counts it: with transforms of inputs
    compile_us: float = 0.0                    # of the first call
    dropped: bool = False                      # after the first rounds

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, **self.summary.__dict__, "spread": self.summary.spread,
                "cost_us": self.cost_us,
                "compile_us": self.compile_us, "dropped": self.dropped}


@dataclass(frozen=True)
class Tuned(Record,
            json="call label sizes family mode best chosen before sure tied baseline gain roofline "
                         "kernels no_time_for failed rejected"):
    """The result for one kind of call; `best` is the fastest, or of ties the preferred."""

    call: Call
    sizes: str
    family: str
    best: str
    chosen: str                                # by selection, from now on
    before: str                                # what selection chose before; "" for none
    # confidence that none but the ties is as fast, 0 to 1
    sure: float
    tied: tuple[str, ...]                      # others that cannot be told from the best
    kernels: tuple[TimedKernel, ...]                 # fastest first
    baseline: str = ""                         # torch's own kernel, if it could serve
    gain: Ratio | None = None                  # of the best over the baseline
    flops: float = 0.0
    bytes: float = 0.0
    roofline: float | None = None              # share of the device's peak
    failed: Mapping[str, Reason] = field(default_factory=dict)
    no_time_for: tuple[str, ...] = ()          # kernels left out for lack of time
    rejected: tuple[Rejected, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    mode: str = EAGER

    @property
    def label(self) -> str:
        mode = "" if self.mode == EAGER else f" ({self.mode})"
        return label(self.call, self.family, self.sizes) + mode

    @property
    def winner(self) -> TimedKernel:
        return next(timed for timed in self.kernels if timed.kernel == self.best)

    @property
    def certainty(self) -> str:
        """The confidence, in words."""
        if self.tied:
            return f"tie with {', '.join(self.tied)}"
        if len(self.kernels) == 1:
            return "no other"
        rounds = self.winner.summary.samples
        return f"{self.sure:.0%} sure" if rounds > 1 else "one round only"

    def to_json(self) -> dict[str, Any]:
        us = self.winner.summary.median
        return {**super().to_json(), "median_us": us, "flops_per_s": self.flops / us * 1e6,
                "bytes_per_s": self.bytes / us * 1e6}


@dataclass(frozen=True)
class Skipped(Record):
    call: Call
    reason: str


@dataclass(frozen=True, repr=False)
class TuneReport(Displayed, Record):
    tuned: tuple[Tuned, ...] = ()
    already: tuple[Call, ...] = ()             # measured before, every kernel in its current build
    skipped: tuple[Skipped, ...] = ()
    left: tuple[Call, ...] = ()                # not reached; tuning again goes on there
    # why it was not reached: "interrupted" or "out of time"
    stopped: str = ""
    rates: Mapping[str, Rates] = field(default_factory=dict)           # by place
    seconds: float = 0.0

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return tuple(m for tuned in self.tuned for m in tuned.measurements)

    def _headline(self) -> str:
        return self.closing

    def _cells(self) -> Cells:
        return ("call", "fastest", "us", "over torch", "before"), [
            (t.label, t.best, f"{t.winner.summary.median:.2f}", t.gain or "", t.before or "")
            for t in self.tuned]

    def __str__(self) -> str:
        lines = []
        for t in self.tuned:
            gain = f", {t.gain} over {t.baseline}" if t.gain and t.baseline != t.best else ""
            before = f", before: {t.before or 'none'}" if t.before != t.chosen else ""
            lines.append(
                f"{t.label}: {t.best} {t.winner.summary.median:.2f} us "
                f"({t.certainty}){gain}{before}")
        lines += [f"{label(s.call)}: skipped: {s.reason}" for s in self.skipped]
        lines.append(self.closing)
        return "\n".join(lines)

    @property
    def closing(self) -> str:
        """The last line of the text: how much was done, and what is left."""
        parts = [f"{plural(len(self.tuned), 'kind')} of call tuned in {self.seconds:.1f} s"]
        if self.already:
            parts.append(f"{len(self.already)} were measured before")
        if self.skipped:
            parts.append(f"{len(self.skipped)} skipped")
        if self.left:
            parts.append(f"{len(self.left)} left ({self.stopped}): tune again to go on")
        return ", ".join(parts)


def label(call: Call, family: str = "", sizes: str = "") -> str:
    """Return a call in a few words."""
    text = " ".join(part for part in (family, sizes) if part)
    if not text:
        arguments = call.case if call.case is not None else call.arguments
        text = " ".join(f"{name}={'x'.join(map(str, shape)) if shape is not None else value}"
                        for name, value in arguments.items()
                        for shape in (getattr(value, "shape", None),))
    return f"{call.op} {text}" + (f" [{call.name}]" if call.name else "")
