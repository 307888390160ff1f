"""A report as JSON (`lz report --json`), and the changes since an earlier one (`--against`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..files.reading import read_json
from ..perf.record import EAGER
from ..spec.codec import Check, Record, Text
from ..tuning.harness import MARGIN

SCHEMA = "layerzero-report-1"
Microseconds = Annotated[float, Check("microseconds, 1e-6 to 1e15", lambda n: 1e-6 <= n <= 1e15)]
Seconds = Annotated[float, Check("seconds since 1970", lambda n: 0 < n < 2.5e11)]
Share = Annotated[float, Check("a number >= 0 and < 1e6", lambda n: 0 <= n < 1e6)]
Calls = Annotated[int, Check("a whole number >= 0 and < 1e15", lambda n: 0 <= n < 10**15)]


@dataclass(frozen=True)
class SavedKind(Record, lenient=True):
    """One kind of call: the kernel that serves it, and how long one call takes."""

    op: Text
    bucket: str
    label: str
    kernel: Text
    us: Microseconds                           # median of one call
    spread: Share = 0.0                        # relative
    calls: Calls = 1                           # of the workload
    torch_kernel: str = ""                     # torch's own, where it was timed
    torch_us: Microseconds | None = None
    mode: str = EAGER

    @property
    def bounds(self) -> tuple[float, float]:
        """The range of nearly all samples, taken as symmetric about the median."""
        return self.us * max(1.0 - self.spread / 2, 0.0), self.us * (1.0 + self.spread / 2)


@dataclass(frozen=True)
class SavedReport(Record, header={"schema": SCHEMA}, lenient=True):
    device: str
    place: str
    created_at: str
    at: Seconds                                # seconds since 1970
    workload: str
    kinds: tuple[SavedKind, ...]
    torch: str = ""                            # its version


def read_report(path: Path) -> SavedReport:
    """Read a file written by `lz report --json`; DataError for anything else."""
    what = "what lz report --json prints"
    return SavedReport.from_json(read_json(path, what), f"{path}: wanted {what}")


@dataclass(frozen=True)
class Change:
    """One kind of call in two reports; at least one of them has it."""

    before: SavedKind | None
    after: SavedKind | None

    @property
    def kind(self) -> SavedKind:
        kind = self.after or self.before
        assert kind is not None
        return kind

    @property
    def gain(self) -> float | None:
        """Returns how many times faster it became."""
        return self.before.us / self.after.us if self.before and self.after else None

    @property
    def saved_us(self) -> float:
        """The time that all its calls save now; negative where they take longer."""
        if self.before is None or self.after is None:
            return 0.0
        return self.after.calls * (self.before.us - self.after.us)

    @property
    def verdict(self) -> str:
        """faster | slower | same | new | gone. What overlaps within its spread is the same."""
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        (low, high), (old_low, old_high) = self.after.bounds, self.before.bounds
        ratio = self.before.us / self.after.us
        if high < old_low and ratio > 1.0 + MARGIN:
            return "faster"
        return "slower" if low > old_high and ratio < 1.0 - MARGIN else "same"


@dataclass(frozen=True)
class Comparison:
    """Two reports; the kinds that both have are compared by the calls of the later one."""

    before: SavedReport
    after: SavedReport
    changes: tuple[Change, ...]                # those that move most time first

    @property
    def shared(self) -> list[Change]:
        return [change for change in self.changes if change.before and change.after]

    @property
    def before_us(self) -> float:
        return sum(c.after.calls * c.before.us for c in self.changes if c.before and c.after)

    @property
    def after_us(self) -> float:
        return sum(c.after.calls * c.after.us for c in self.changes if c.before and c.after)

    @property
    def gain(self) -> float | None:
        return self.before_us / self.after_us if self.after_us else None

    def with_verdict(self, *verdicts: str) -> list[Change]:
        return [change for change in self.changes if change.verdict in verdicts]


def compare(before: SavedReport, after: SavedReport) -> Comparison:
    """Compare the kinds of call of the two workloads, without those that are made no time."""
    old = {(k.op, k.bucket, k.mode): k for k in before.kinds}
    new = {(k.op, k.bucket, k.mode): k for k in after.kinds}
    changes = (Change(old.get(key), new.get(key)) for key in {**new, **old})
    counted = [change for change in changes if change.kind.calls]
    return Comparison(before, after, tuple(sorted(counted, key=lambda c: -abs(c.saved_us))))
