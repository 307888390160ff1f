"""What tuning found: for each kind of call who is fastest, how sure that is, and what was left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..perf.record import EAGER, Measurement, Rates
from ..spec.call import Call
from ..spec.codec import Record
from ..spec.plan import Rejected
from ..spec.reason import Reason
from .harness import Ratio, Summary


@dataclass(frozen=True)
class Timed:
    """One kernel in one kind of call, as it was timed."""

    kernel: str
    summary: Summary
    cost_us: float                             # with what selection adds: copies of inputs
    compile_us: float = 0.0                    # before the first call
    dropped: bool = False                      # after a first look

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, **self.summary.__dict__, "spread": self.summary.spread, "cost_us": self.cost_us,
                "compile_us": self.compile_us, "dropped": self.dropped}


@dataclass(frozen=True)
class Tuned(Record, json="call label sizes family mode best chosen before sure tied baseline gain roofline kernels "
                         "no_time_for failed rejected"):
    """One kind of call. `best` was the fastest, and of those that cannot be told apart the one selection prefers."""

    call: Call
    sizes: str
    family: str
    best: str
    chosen: str                                # what selection takes now
    before: str                                # what it would have taken; "" for none
    sure: float                                # that nobody but those it is tied with is as fast, 0 to 1
    tied: tuple[str, ...]                      # others that are as fast, as far as can be told
    kernels: tuple[Timed, ...]                 # fastest first
    baseline: str = ""                         # torch's own kernel, if it could serve
    gain: Ratio | None = None                  # of the best over the baseline
    flops: float = 0.0
    bytes: float = 0.0
    roofline: float | None = None              # share of the best this device can do
    failed: Mapping[str, Reason] = field(default_factory=dict)
    no_time_for: tuple[str, ...] = ()          # kernels that the limit of time left out
    rejected: tuple[Rejected, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    mode: str = EAGER

    @property
    def label(self) -> str:
        mode = "" if self.mode == EAGER else f" ({self.mode})"
        return label(self.call, self.family, self.sizes) + mode

    @property
    def winner(self) -> Timed:
        return next(timed for timed in self.kernels if timed.kernel == self.best)

    @property
    def certainty(self) -> str:
        """How sure, in words."""
        if self.tied:
            return f"tie with {', '.join(self.tied)}"
        return "no other" if len(self.kernels) == 1 else f"{self.sure:.0%} sure"

    def to_json(self) -> dict[str, Any]:
        us = self.winner.summary.median
        return {**super().to_json(), "median_us": us, "flops_per_s": self.flops / us * 1e6,
                "bytes_per_s": self.bytes / us * 1e6}


@dataclass(frozen=True)
class Skipped(Record):
    call: Call
    reason: str


@dataclass(frozen=True)
class TuneReport(Record):
    tuned: tuple[Tuned, ...] = ()
    already: tuple[Call, ...] = ()             # every kernel that may serve was measured before, as it is now
    skipped: tuple[Skipped, ...] = ()
    left: tuple[Call, ...] = ()                # not reached; tuning again goes on there
    stopped: str = ""                          # why it was not reached: "interrupted" or "out of time"
    rates: Mapping[str, Rates] = field(default_factory=dict)           # by place
    seconds: float = 0.0

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return tuple(m for tuned in self.tuned for m in tuned.measurements)

    def __str__(self) -> str:
        lines = []
        for t in self.tuned:
            gain = f", {t.gain} over {t.baseline}" if t.gain and t.baseline != t.best else ""
            was = f", before: {t.before or 'none'}" if t.before != t.chosen else ""
            lines.append(f"{t.label}: {t.best} {t.winner.summary.median:.2f} us ({t.certainty}){gain}{was}")
        lines += [f"{label(s.call)}: skipped: {s.reason}" for s in self.skipped]
        lines.append(self.closing)
        return "\n".join(lines)

    @property
    def closing(self) -> str:
        """The last line: how much was done, and what is left."""
        parts = [f"{len(self.tuned)} kinds of call tuned in {self.seconds:.1f} s"]
        if self.already:
            parts.append(f"{len(self.already)} were measured before")
        if self.skipped:
            parts.append(f"{len(self.skipped)} skipped")
        if self.left:
            parts.append(f"{len(self.left)} left ({self.stopped}): tune again to go on")
        return ", ".join(parts)


def label(call: Call, family: str = "", sizes: str = "") -> str:
    """A call in a few words."""
    what = " ".join(part for part in (family, sizes) if part)
    if not what:
        given = call.case if call.case is not None else call.arguments
        what = " ".join(f"{name}={'x'.join(map(str, shape)) if shape is not None else value}"
                        for name, value in given.items() for shape in (getattr(value, "shape", None),))
    return f"{call.op} {what}" + (f" [{call.name}]" if call.name else "")
