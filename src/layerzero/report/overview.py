"""What the report shows of one place: kinds of call, their kernels and totals, refused kernels.

Plain data. `gathering.gather` fills it from the world; `page.render` turns it into HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ..perf.record import EAGER, QUIET_SPREAD, Measurement, Rates
from ..tuning.harness import MARGIN
from .history import Point
from .regret import RegretSummary
from .roofs import Cost, Roofs
from .saved import Comparison, SavedKind, SavedReport

FIRST_LOOK = 3                                 # samples


@dataclass(frozen=True)
class KernelTiming:
    """One kernel in one kind of call."""

    kernel: str
    us: float                                  # median
    spread: float                              # relative
    trust: float                               # 0 to 1
    samples: int
    sizes: str                                 # of the timed call
    baseline: bool = False                     # what torch itself would run
    compile_us: float = 0.0

    @property
    def first_look(self) -> bool:
        """Returns whether the kernel was so far behind that tuning stopped timing it."""
        return self.samples <= FIRST_LOOK

    @property
    def noisy(self) -> bool:
        return self.spread > QUIET_SPREAD


class Usage(NamedTuple):
    """The use that a workload makes of one kind of call."""

    calls: int
    chosen: str                                # the kernel that selection takes
    words: str = ""                            # the call, as lz explain takes it


ONCE, NEVER = Usage(1, ""), Usage(0, "")


@dataclass(frozen=True)
class CallKind:
    """One kind of call and the kernels timed for it, fastest first."""

    op: str
    family: str                                # dtype and switches
    candidates: tuple[KernelTiming, ...]
    flops: float = 0.0                         # of the timed call, by the op's cost
    bytes: float = 0.0
    roofline_us: float | None = None           # None without measured rates or a known cost
    bucket: str = ""
    mode: str = EAGER
    usage: Usage = ONCE

    @property
    def calls(self) -> int:
        """Returns how often the workload makes it; 0: it is no part of the workload."""
        return self.usage.calls

    @property
    def fastest(self) -> KernelTiming:
        return self.candidates[0]

    @property
    def used(self) -> KernelTiming:
        """The kernel that selection takes, if that was asked and timed; else the fastest."""
        return self.candidate(self.usage.chosen) or self.fastest

    @property
    def sizes(self) -> str:
        return self.fastest.sizes

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.op, self.family, self.sizes, self.mode_note)))

    @property
    def mode_note(self) -> str:
        return "" if self.mode == EAGER else f"({self.mode})"

    @property
    def tied(self) -> tuple[KernelTiming, ...]:
        """Other candidates that tuning cannot tell from the fastest."""
        return tuple(c for c in self.candidates[1:] if c.us <= self.fastest.us * (1.0 + MARGIN))

    @property
    def baseline(self) -> KernelTiming | None:
        """The fastest of torch's own kernels."""
        return next((c for c in self.candidates if c.baseline), None)

    @property
    def us(self) -> float:
        """The time of all its calls, with the kernel that is used."""
        return self.calls * self.used.us

    @property
    def gain(self) -> float | None:
        """Returns how many times faster the kernel that is used is than torch's own."""
        return self.baseline.us / self.used.us if self.baseline else None

    @property
    def lost_us(self) -> float:
        """The time that its calls would save with the fastest kernel; ties lose nothing."""
        lost = 0.0 if self.used in self.tied else self.used.us - self.fastest.us
        return self.calls * lost

    @property
    def roofline(self) -> float | None:
        """The share of the device's rates that the kernel in use reaches."""
        return self.roofline_us / self.used.us if self.roofline_us is not None else None

    @property
    def headroom_us(self) -> float:
        """The time of its calls beyond what the device's rates allow."""
        return 0.0 if self.roofline_us is None else self.calls * (self.used.us - self.roofline_us)

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.used.us * 1e6

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.used.us * 1e6

    def candidate(self, kernel: str) -> KernelTiming | None:
        """Return the timing of one kernel; None if it was not timed."""
        return next((c for c in self.candidates if c.kernel == kernel), None)

    def ratio(self, kernel: str) -> float | None:
        """Return how many times as long as the fastest a kernel takes; None if it was not timed."""
        candidate = self.candidate(kernel)
        return None if candidate is None else candidate.us / self.fastest.us

    def sizes_besides(self, shared: Iterable[str]) -> dict[str, str]:
        return {name: size for name, size in parse_sizes(self.sizes).items() if name not in shared}


@dataclass(frozen=True)
class Total:
    """Several kinds of call, each as often as the workload makes it."""

    kinds: tuple[CallKind, ...]

    @property
    def calls(self) -> int:
        return sum(kind.calls for kind in self.kinds)

    @property
    def us(self) -> float:
        return sum(kind.us for kind in self.kinds)

    @property
    def lost_us(self) -> float:
        return sum(kind.lost_us for kind in self.kinds)

    @property
    def headroom_us(self) -> float:
        return sum(kind.headroom_us for kind in self.kinds)

    @property
    def compared(self) -> Total:
        """The kinds for which torch's own kernel was timed too."""
        return Total(tuple(kind for kind in self.kinds if kind.baseline is not None))

    @property
    def torch_us(self) -> float:
        """The time of the compared kinds with torch's own kernels."""
        return sum(kind.calls * kind.baseline.us for kind in self.kinds if kind.baseline)

    @property
    def saved_us(self) -> float:
        """torch's time less ours, for the compared kinds."""
        return self.torch_us - self.compared.us

    @property
    def gain(self) -> float | None:
        """torch's time over ours, for the compared kinds; None if there are none."""
        us = self.compared.us
        return self.torch_us / us if us else None

    @property
    def range(self) -> tuple[float, float] | None:
        """The lowest and the highest gain of a single kind."""
        gains = [kind.gain for kind in self.kinds if kind.gain is not None]
        return (min(gains), max(gains)) if gains else None


@dataclass(frozen=True)
class MeasuredOp:
    """The measured kinds of call of one operation."""

    name: str
    kinds: tuple[CallKind, ...]

    @property
    def wins(self) -> list[tuple[str, int]]:
        """Each fastest kernel with the number of kinds it wins, most wins first."""
        return Counter(kind.fastest.kernel for kind in self.kinds).most_common()

    @property
    def kernels(self) -> list[str]:
        """Every kernel timed, most wins first."""
        wins = dict(self.wins)
        names = {c.kernel for kind in self.kinds for c in kind.candidates}
        return sorted(names, key=lambda name: (-wins.get(name, 0), name))

    @property
    def shared_sizes(self) -> dict[str, str]:
        """Sizes that every kind has in common; none for a single kind."""
        if len(self.kinds) < 2:
            return {}
        rows = [parse_sizes(kind.sizes) for kind in self.kinds]
        return {n: v for n, v in rows[0].items() if all(row.get(n) == v for row in rows)}


@dataclass(frozen=True)
class RejectReason:
    code: str
    message: str
    advice: str = ""
    hardware: bool = False                     # nothing but another device helps
    command: str = ""                          # that removes the obstacle


@dataclass(frozen=True)
class RejectedKernel:
    """A kernel that serves no call on this device, or none unless it is named."""

    kernel: str
    op: str
    reasons: tuple[RejectReason, ...]
    note: str = ""

    @property
    def other_hardware(self) -> bool:
        return any(reason.hardware for reason in self.reasons)

    @property
    def advice(self) -> list[str]:
        return list(dict.fromkeys(reason.advice for reason in self.reasons if reason.advice))


@dataclass(frozen=True)
class UnmeasuredKind:
    """A kind of call of the workload for which no kernel was timed here."""

    label: str
    calls: int
    kernel: str                                # that selection takes; "": none can serve it
    expected_us: float                         # of all its calls, by an estimate


@dataclass(frozen=True)
class Workload:
    name: str                                  # for people
    words: str                                 # for commands: "--model smollm2-135m"
    unmeasured: tuple[UnmeasuredKind, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()  # operation, why its call cannot be decided


@dataclass(frozen=True)
class Overview:
    device: str
    place: str
    created_at: str                            # date and time, as text
    facts: Mapping[str, str] = field(default_factory=dict)             # of the page: name -> text
    kinds: tuple[CallKind, ...] = ()
    rates: Rates | None = None
    rejected: tuple[RejectedKernel, ...] = ()
    regret: RegretSummary | None = None
    ops: int = 0                               # number of operations the library has
    measured_at: str = ""                      # the time span of the measurements, as text
    hidden: int = 0                            # measurements of other devices or numbers of threads
    at: float = 0.0                            # seconds since 1970
    mode: str = EAGER                          # of the calls that the totals count
    workload: Workload | None = None           # None: every measured kind counts once
    cache_bytes: int = 0
    torch: str = ""                            # its version
    history: tuple[Point, ...] = ()            # oldest first
    against: Comparison | None = None          # with an earlier report

    @property
    def measurements(self) -> int:
        return sum(len(kind.candidates) for kind in self.kinds)

    @cached_property
    def total(self) -> Total:
        """The kinds of the workload in the mode that counts, those that take most time first."""
        counted = [kind for kind in self.kinds if kind.calls and kind.mode == self.mode]
        return Total(tuple(sorted(counted, key=lambda kind: -kind.us)))

    @cached_property
    def roofs(self) -> Roofs | None:
        return find_roofs(self.rates, self.kinds, self.cache_bytes)

    @property
    def saved(self) -> SavedReport:
        """Returns what a later report is compared with."""
        return SavedReport(
            self.device, self.place, self.created_at, self.at,
            self.workload.name if self.workload else "", tuple(SavedKind(
                kind.op, kind.bucket, kind.label, kind.used.kernel, kind.used.us, kind.used.spread,
                kind.calls, kind.baseline.kernel if kind.baseline else "",
                kind.baseline.us if kind.baseline else None, kind.mode) for kind in self.kinds),
            self.torch)

    @property
    def totals_by_op(self) -> list[tuple[str, Total]]:
        """The counted kinds of each operation, the one that takes most time first."""
        groups: dict[str, list[CallKind]] = {}
        for kind in self.total.kinds:
            groups.setdefault(kind.op, []).append(kind)
        totals = [(op, Total(tuple(kinds))) for op, kinds in groups.items()]
        return sorted(totals, key=lambda pair: -pair[1].us)

    @property
    def measured_ops(self) -> list[MeasuredOp]:
        """Every measured operation, in the order of its time."""
        groups: dict[str, list[CallKind]] = {op: [] for op, _ in self.totals_by_op}
        for kind in self.kinds:
            groups.setdefault(kind.op, []).append(kind)
        return [MeasuredOp(op, tuple(kinds)) for op, kinds in groups.items()]

    @property
    def other_hardware(self) -> list[RejectedKernel]:
        return [kernel for kernel in self.rejected if kernel.other_hardware]

    @property
    def rejected_by_code(self) -> list[tuple[str, list[RejectedKernel]]]:
        """Kernels made for this hardware by the code of their first reason, largest group first."""
        groups: dict[str, list[RejectedKernel]] = {}
        for kernel in self.rejected:
            if not kernel.other_hardware:
                groups.setdefault(kernel.reasons[0].code, []).append(kernel)
        return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def group_by_kind(measurements: Iterable[Measurement], rates: Rates | None,
                  baselines: frozenset[str], usages: Mapping[tuple[str, str], Usage] | None = None,
                  cache_bytes: int = 0) -> tuple[CallKind, ...]:
    """Group the measurements of one place by kind of call and mode. `baselines` are torch's own
    kernels. `usages` is a workload by (op, bucket); without one, every kind counts once."""
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.op, m.bucket, m.mode), []).append(m)
    kinds = []
    for (op, bucket, mode), rows in groups.items():
        rows.sort(key=lambda m: (m.median_us, m.kernel))
        candidates = tuple(KernelTiming(
            m.kernel, m.median_us, m.spread, m.trust, m.samples, m.sizes, m.kernel in baselines,
            m.compile_us) for m in rows)
        usage = ONCE if usages is None else usages.get((op, bucket), NEVER)
        kinds.append(CallKind(op, rows[0].family, candidates, rows[0].flops, rows[0].bytes, None,
                              bucket, mode, usage))
    roofs = find_roofs(rates, kinds, cache_bytes)
    if roofs is not None:
        kinds = [replace(kind, roofline_us=roofs.least_us(kind.flops, kind.bytes))
                 if _has_cost(kind) else kind for kind in kinds]
    return tuple(sorted(kinds, key=lambda k: (k.op, k.family, _size_order(k.sizes), k.mode)))


def find_roofs(rates: Rates | None, kinds: Iterable[CallKind], cache_bytes: int) -> Roofs | None:
    """Return the rates of a device, never below what the fastest kernel of a kind reached."""
    if rates is None:
        return None
    costs = (Cost(kind.flops, kind.bytes, kind.fastest.us) for kind in kinds if _has_cost(kind))
    return Roofs.known(rates, costs, cache_bytes)


def _has_cost(kind: CallKind) -> bool:
    """Returns whether a call has a roofline: the op's cost counts the forward pass only."""
    return bool(kind.flops or kind.bytes) and "grad" not in kind.family.split()


def parse_sizes(text: str) -> dict[str, str]:
    """Parse "batch=1 seq_k=4096" into sizes by name."""
    return {name: value for name, _, value in (part.partition("=") for part in text.split())}


def _size_order(text: str) -> list[tuple[str, int, str]]:
    """Return a sort key that orders sizes as numbers."""
    return [(n, int(v) if v.lstrip("-").isdecimal() else 0, v)
            for n, v in parse_sizes(text).items()]
