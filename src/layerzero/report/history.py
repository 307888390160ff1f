"""The time of a workload over the dates of its measurements.

A store keeps the newest time of each kernel in each build. What the workload would have taken at
an earlier date is the sum over its kinds of the fastest kernel known then; a kind that was not
measured yet counts with torch's own kernel. Earlier reports add the times that were replaced since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .saved import SavedReport

SESSION_GAP = 3600.0                           # seconds without a measurement that end a session


class Timed(NamedTuple):
    """One kernel in one kind of call, at some date."""

    at: float
    kind: tuple[str, str]                      # op, bucket
    kernel: str
    us: float
    baseline: bool                             # what torch itself would run
    torch: str = ""                            # its version


@dataclass(frozen=True)
class Point:
    """The time that the workload took, as known when a session of measurements ended."""

    at: float                                  # seconds since 1970
    us: float
    torch_us: float                            # with torch's own kernels
    torch: str = ""


class Reference(NamedTuple):
    """A kind of call today: what the points before its first measurement take for it."""

    calls: int
    us: float
    torch_us: float


def trace(times: Iterable[Timed], today: Mapping[tuple[str, str], Reference]) -> tuple[Point, ...]:
    """Return one point for each session of measurements of these kinds, oldest first. The last
    point is today: it has the times of today, whatever the store knew before."""
    known: dict[tuple[str, str], dict[str, tuple[float, bool]]] = {}
    points: list[Point] = []
    for session in _sessions(t for t in times if t.kind in today):
        for t in session:
            known.setdefault(t.kind, {})[t.kernel] = t.us, t.baseline
        us = torch_us = 0.0
        for kind, reference in today.items():
            kernels = known.get(kind, {}).values()
            own = min((us for us, baseline in kernels if baseline), default=reference.torch_us)
            torch_us += reference.calls * own
            us += reference.calls * min([own, *(us for us, _ in kernels)])
        version = next((t.torch for t in reversed(session) if t.torch), "")
        points.append(Point(session[-1].at, us, torch_us, version))
    if points:
        now = today.values()
        points[-1] = Point(points[-1].at, sum(r.calls * r.us for r in now),
                           sum(r.calls * r.torch_us for r in now), points[-1].torch)
    return tuple(points)


def times_of(report: SavedReport, mode: str) -> Iterator[Timed]:
    """Yield the times of an earlier report."""
    for kind in report.kinds:
        if kind.mode == mode:
            times = {kind.kernel: kind.us}
            if kind.torch_us is not None:
                times.setdefault(kind.torch_kernel, kind.torch_us)
            for kernel, us in times.items():
                own = kernel == kind.torch_kernel
                yield Timed(report.at, (kind.op, kind.bucket), kernel, us, own, report.torch)


def _sessions(times: Iterable[Timed]) -> list[list[Timed]]:
    sessions: list[list[Timed]] = []
    for t in sorted(times, key=lambda t: t.at):
        if not sessions or t.at - sessions[-1][-1].at > SESSION_GAP:
            sessions.append([])
        sessions[-1].append(t)
    return sessions
