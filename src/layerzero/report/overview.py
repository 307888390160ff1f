"""What the report shows of one place: kinds of call with their candidates, ceilings, regret,
rejected kernels.

Plain data. `lz report` fills it from the world; `page.render` turns it into HTML.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..perf.record import QUIET_SPREAD, Measurement, Rates
from ..spec.errors import DataError
from ..spec.reading import read_json
from ..tuning.harness import MARGIN

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
        """Whether the kernel was so far behind that tuning stopped timing it."""
        return self.samples <= FIRST_LOOK

    @property
    def noisy(self) -> bool:
        return self.spread > QUIET_SPREAD


@dataclass(frozen=True)
class CallKind:
    """One kind of call and the kernels timed for it, fastest first."""

    op: str
    family: str                                # dtype and switches
    candidates: tuple[KernelTiming, ...]
    flops: float = 0.0                         # of the winner's timed call, by the op's cost
    bytes: float = 0.0
    # None without measured ceilings, or without a known cost
    roofline_us: float | None = None

    @property
    def winner(self) -> KernelTiming:
        return self.candidates[0]

    @property
    def sizes(self) -> str:
        return self.winner.sizes

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.op, self.family, self.sizes)))

    @property
    def tied(self) -> tuple[KernelTiming, ...]:
        """Other candidates that tuning cannot tell from the winner."""
        return tuple(c for c in self.candidates[1:] if c.us <= self.winner.us * (1.0 + MARGIN))

    @property
    def baseline(self) -> KernelTiming | None:
        """The fastest of torch's own kernels."""
        return next((c for c in self.candidates if c.baseline), None)

    @property
    def gain(self) -> float | None:
        """How many times faster the winner is than torch's own kernel."""
        return self.baseline.us / self.winner.us if self.baseline else None

    @property
    def roofline(self) -> float | None:
        """The share of the device's ceiling that the winner reaches."""
        return self.roofline_us / self.winner.us if self.roofline_us is not None else None

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.winner.us * 1e6

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.winner.us * 1e6

    def candidate(self, kernel: str) -> KernelTiming | None:
        """Return the timing of one kernel; None if it was not timed."""
        return next((c for c in self.candidates if c.kernel == kernel), None)

    def ratio(self, kernel: str) -> float | None:
        """Return how many times as long as the winner a kernel takes; None if it was not timed."""
        candidate = self.candidate(kernel)
        return None if candidate is None else candidate.us / self.winner.us

    def sizes_besides(self, shared: Iterable[str]) -> dict[str, str]:
        return {name: size for name, size in parse_sizes(self.sizes).items() if name not in shared}


@dataclass(frozen=True)
class GainSummary:
    """The gain over torch's own kernels, for several kinds of call."""

    mean: float                                # geometric
    low: float
    high: float
    kinds: int                                 # those for which torch's own kernel was timed too


@dataclass(frozen=True)
class MeasuredOp:
    """The measured kinds of call of one operation."""

    name: str
    kinds: tuple[CallKind, ...]

    @property
    def gain(self) -> GainSummary | None:
        return summarize_gain(self.kinds)

    @property
    def wins(self) -> list[tuple[str, int]]:
        """Each winner with the number of kinds it wins, most wins first."""
        return Counter(kind.winner.kernel for kind in self.kinds).most_common()

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


@dataclass(frozen=True)
class RejectedKernel:
    """A kernel that serves no call on this device, or none unless it is named."""

    kernel: str
    op: str
    reasons: tuple[RejectReason, ...]
    note: str = ""

    @property
    def advice(self) -> list[str]:
        return list(dict.fromkeys(reason.advice for reason in self.reasons if reason.advice))


@dataclass(frozen=True)
class RegretCall:
    """One replayed call of `lz regret`."""

    label: str
    chosen: str
    best: str
    regret: float
    count: int
    chosen_us: float
    best_us: float
    gain: float | None = None
    # winners of the two halves of the rounds, if they differ
    flip: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)            # kernel -> error


@dataclass(frozen=True)
class RegretSummary:
    """The content of `lz regret --json`."""

    median: float
    p95: float
    lost: float
    worse: float                               # share of the calls that torch serves faster
    gain: float
    flips: int
    flips_that_matter: int
    place: str
    calls: tuple[RegretCall, ...] = ()         # greatest regret first
    skipped: tuple[tuple[str, str], ...] = ()  # operation, reason
    problems: tuple[str, ...] = ()

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Kernel and error, once each."""
        return sorted({failure for call in self.calls for failure in call.failed.items()})


@dataclass(frozen=True)
class Overview:
    device: str
    place: str
    created_at: str                            # date and time, as text
    facts: Mapping[str, str] = field(default_factory=dict)             # of the header: name -> text
    kinds: tuple[CallKind, ...] = ()
    rates: Rates | None = None
    rejected: tuple[RejectedKernel, ...] = ()
    regret: RegretSummary | None = None
    ops: int = 0                               # number of operations the library has
    measured_at: str = ""                      # the time span of the measurements, as text
    hidden: int = 0                            # measurements of other devices or numbers of threads

    @property
    def measurements(self) -> int:
        return sum(len(kind.candidates) for kind in self.kinds)

    @property
    def gain(self) -> GainSummary | None:
        return summarize_gain(self.kinds)

    @property
    def measured_ops(self) -> list[MeasuredOp]:
        groups: dict[str, list[CallKind]] = {}
        for kind in self.kinds:
            groups.setdefault(kind.op, []).append(kind)
        return [MeasuredOp(op, tuple(kinds)) for op, kinds in groups.items()]

    @property
    def rejected_by_code(self) -> list[tuple[str, list[RejectedKernel]]]:
        """Rejected kernels by the code of their first reason, the largest group first."""
        groups: dict[str, list[RejectedKernel]] = {}
        for kernel in self.rejected:
            groups.setdefault(kernel.reasons[0].code, []).append(kernel)
        return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def summarize_gain(kinds: Iterable[CallKind]) -> GainSummary | None:
    """Summarize the kinds for which torch's own kernel was timed; None if there are none."""
    gains = [kind.gain for kind in kinds if kind.gain is not None]
    if not gains:
        return None
    mean = math.exp(math.fsum(map(math.log, gains)) / len(gains))
    return GainSummary(mean, min(gains), max(gains), len(gains))


def group_by_kind(measurements: Iterable[Measurement], rates: Rates | None,
                  baselines: frozenset[str]) -> tuple[CallKind, ...]:
    """Group the measurements of one place by kind of call; `baselines` are torch's own kernels."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.op, m.bucket), []).append(m)
    kinds = []
    for (op, _), rows in groups.items():
        rows.sort(key=lambda m: (m.median_us, m.kernel))
        candidates = tuple(KernelTiming(m.kernel, m.median_us, m.spread, m.trust, m.samples,
                                        m.sizes,
                                     m.kernel in baselines, m.compile_us) for m in rows)
        fastest = rows[0]
        roofline_us = None
        # The op's cost counts the forward pass only: gradients have no roofline.
        if (rates is not None and (fastest.flops or fastest.bytes)
            and "grad" not in fastest.family.split()):
            roofline_us = rates.roofline_us(fastest.flops, fastest.bytes)
        kinds.append(CallKind(op, fastest.family, candidates, fastest.flops, fastest.bytes,
                              roofline_us))
    return tuple(sorted(kinds, key=lambda k: (k.op, k.family, _size_order(k.sizes))))


def parse_sizes(text: str) -> dict[str, str]:
    """Parse "batch=1 seq_k=4096" into sizes by name."""
    return {name: value for name, _, value in (part.partition("=") for part in text.split())}


def _size_order(text: str) -> list[tuple[str, int, str]]:
    """Return a sort key that orders sizes as numbers."""
    return [(n, int(v) if v.lstrip("-").isdecimal() else 0, v)
            for n, v in parse_sizes(text).items()]


def read_regret(path: Path) -> RegretSummary:
    """Read a file written by `lz regret --json`; DataError for anything else."""
    data: Any = read_json(path, "what lz regret --json prints", nan=True)
    try:
        return _regret(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        problem = f"no {e}" if isinstance(e, KeyError) else str(e)
        raise DataError(
            f"{path}: wanted what lz regret --json prints, got something else: {problem}") from e


def _regret(data: Mapping[str, Any]) -> RegretSummary:
    calls = sorted(map(_regret_call, data["rows"]), key=lambda call: call.regret, reverse=True)
    n = {name: _number(data[name]) for name in (
        "median_regret", "p95_regret", "lost", "worse_than_torch", "gain_over_torch", "flips",
        "flips_that_matter")}
    return RegretSummary(
        n["median_regret"], n["p95_regret"], n["lost"], n["worse_than_torch"], n["gain_over_torch"],
        int(n["flips"]), int(n["flips_that_matter"]), str(data["place"]),
        tuple(calls),
        tuple((str(s["call"]["op"]), str(s["why"])) for s in data.get("skipped_calls", ())),
        tuple(map(str, data.get("problems", ()))))


def _regret_call(row: Mapping[str, Any]) -> RegretCall:
    us, chosen, best = row["microseconds"], str(row["chosen"]), str(row["best"])
    return RegretCall(
        str(row["label"]), chosen, best, _number(row["regret"]), int(_number(row["count"])),
        _number(us[chosen]), _number(us[best]), None if row["gain"] is None
        else _number(row["gain"]), tuple(map(str, row["flip"] or ())),
        {str(kernel): str(text) for kernel, text in row["failed"].items()})


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80} is no number")
    return float(value)
