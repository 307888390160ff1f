"""What is known of one place, ready to be shown: kinds of call with their candidates, ceilings, regret, refusals.

Plain data. `lz report` fills it from the world; `page.render` makes HTML of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..perf.record import QUIET_SPREAD, Measurement, Rates
from ..spec.errors import DataError
from ..spec.reading import read_json
from ..tune.harness import MARGIN

FIRST_LOOK = 3                                 # samples

@dataclass(frozen=True)
class Candidate:
    """One kernel in one kind of call."""

    kernel: str
    us: float                                  # median
    spread: float                              # relative
    trust: float                               # 0 to 1
    samples: int
    sizes: str                                 # those that were timed
    baseline: bool = False                     # what torch itself would run
    compile_us: float = 0.0

    @property
    def first_look(self) -> bool:
        """It was so far behind that tuning went on without it."""
        return self.samples <= FIRST_LOOK

    @property
    def noisy(self) -> bool:
        return self.spread > QUIET_SPREAD


@dataclass(frozen=True)
class Kind:
    """One kind of call and everyone who was timed for it, fastest first."""

    op: str
    family: str                                # dtype and switches
    candidates: tuple[Candidate, ...]
    flops: float = 0.0                         # of the winner's timed call, by the contract
    bytes: float = 0.0
    roofline_us: float | None = None           # None where no ceiling was measured, or none can be told

    @property
    def winner(self) -> Candidate:
        return self.candidates[0]

    @property
    def sizes(self) -> str:
        return self.winner.sizes

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.op, self.family, self.sizes)))

    @property
    def tied(self) -> tuple[Candidate, ...]:
        """Others that are as fast, as far as tuning tells kernels apart."""
        return tuple(c for c in self.candidates[1:] if c.us <= self.winner.us * (1.0 + MARGIN))

    @property
    def baseline(self) -> Candidate | None:
        """The fastest of torch's own."""
        return next((c for c in self.candidates if c.baseline), None)

    @property
    def gain(self) -> float | None:
        """How many times faster than torch's own the winner is."""
        return self.baseline.us / self.winner.us if self.baseline else None

    @property
    def roofline(self) -> float | None:
        """Share of the best this device can do that the winner reaches."""
        return self.roofline_us / self.winner.us if self.roofline_us is not None else None

    def ratio(self, kernel: str) -> float | None:
        """How many times as long as the winner it takes; None where it was not timed."""
        return next((c.us / self.winner.us for c in self.candidates if c.kernel == kernel), None)


@dataclass(frozen=True)
class Gain:
    """Over torch's own kernels, for several kinds of call."""

    mean: float                                # geometric
    low: float
    high: float
    kinds: int                                 # those where torch's own was timed too


@dataclass(frozen=True)
class Why:
    code: str
    message: str
    advice: str = ""


@dataclass(frozen=True)
class Refused:
    """A kernel that serves no call on this device, or none unasked."""

    kernel: str
    op: str
    why: tuple[Why, ...]
    note: str = ""


@dataclass(frozen=True)
class Replayed:
    """One call of `lz regret`."""

    label: str
    chosen: str
    best: str
    regret: float
    count: int
    chosen_us: float
    best_us: float
    gain: float | None = None
    flip: tuple[str, ...] = ()                 # the winners of the two halves of the rounds, where they differ
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Regret:
    """What `lz regret --json` says."""

    median: float
    p95: float
    lost: float
    worse: float                               # share of the calls that torch serves faster
    gain: float
    flips: int
    flips_that_matter: int
    place: str
    rows: tuple[Replayed, ...] = ()            # greatest regret first
    skipped: tuple[tuple[str, str], ...] = ()  # operation, why
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Overview:
    device: str
    place: str
    made_at: str                               # date and time, as text
    facts: Mapping[str, str] = field(default_factory=dict)             # of the header: name -> text
    kinds: tuple[Kind, ...] = ()
    rates: Rates | None = None
    refused: tuple[Refused, ...] = ()
    regret: Regret | None = None
    ops: int = 0                               # operations there are
    measured: str = ""                         # from when to when
    elsewhere: int = 0                         # measurements of other devices and numbers of threads, not shown

    @property
    def measurements(self) -> int:
        return sum(len(kind.candidates) for kind in self.kinds)

    def by_op(self) -> dict[str, tuple[Kind, ...]]:
        found: dict[str, list[Kind]] = {}
        for kind in self.kinds:
            found.setdefault(kind.op, []).append(kind)
        return {op: tuple(kinds) for op, kinds in found.items()}


def gain_of(kinds: Iterable[Kind]) -> Gain | None:
    found = [kind.gain for kind in kinds if kind.gain is not None]
    if not found:
        return None
    return Gain(math.exp(math.fsum(map(math.log, found)) / len(found)), min(found), max(found), len(found))


def kinds_of(measurements: Iterable[Measurement], rates: Rates | None, baselines: frozenset[str]) -> tuple[Kind, ...]:
    """The measurements of one place by kind of call."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.op, m.bucket), []).append(m)
    kinds = []
    for (op, _), rows in groups.items():
        rows.sort(key=lambda m: (m.median_us, m.kernel))
        first = rows[0]
        known = rates is not None and (first.flops or first.bytes) and "grad" not in first.family.split()
        kinds.append(Kind(
            op, first.family, tuple(Candidate(m.kernel, m.median_us, m.spread, m.trust, m.samples, m.sizes,
                                              m.kernel in baselines, m.compile_us) for m in rows),
            first.flops, first.bytes,          # the contract counts the way forward only: none for gradients
            rates.roofline_us(first.flops, first.bytes) if rates is not None and known else None))
    return tuple(sorted(kinds, key=lambda k: (k.op, k.family, _numbers(k.sizes))))


def sizes_of(text: str) -> dict[str, str]:
    """"batch=1 seq_k=4096" by name."""
    return {name: value for name, _, value in (part.partition("=") for part in text.split())}


def _numbers(text: str) -> list[tuple[str, int, str]]:
    return [(n, int(v) if v.lstrip("-").isdecimal() else 0, v) for n, v in sizes_of(text).items()]


# a file of lz regret

def read_regret(path: Path) -> Regret:
    """What `lz regret --json` wrote; DataError for anything else."""
    data: Any = read_json(path, "what lz regret --json prints", nan=True)
    try:
        return _regret(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        said = f"no {e}" if isinstance(e, KeyError) else str(e)
        raise DataError(f"{path}: wanted what lz regret --json prints, got something else: {said}") from e


def _regret(data: Mapping[str, Any]) -> Regret:
    rows = sorted(map(_replayed, data["rows"]), key=lambda row: row.regret, reverse=True)
    n = {name: _number(data[name]) for name in (
        "median_regret", "p95_regret", "lost", "worse_than_torch", "gain_over_torch", "flips", "flips_that_matter")}
    return Regret(
        n["median_regret"], n["p95_regret"], n["lost"], n["worse_than_torch"], n["gain_over_torch"], int(n["flips"]),
        int(n["flips_that_matter"]), str(data["place"]),
        tuple(rows), tuple((str(s["call"]["op"]), str(s["why"])) for s in data.get("skipped_calls", ())),
        tuple(map(str, data.get("problems", ()))))


def _replayed(row: Mapping[str, Any]) -> Replayed:
    us, chosen, best = row["microseconds"], str(row["chosen"]), str(row["best"])
    return Replayed(
        str(row["label"]), chosen, best, _number(row["regret"]), int(_number(row["count"])), _number(us[chosen]),
        _number(us[best]), None if row["gain"] is None else _number(row["gain"]), tuple(map(str, row["flip"] or ())),
        {str(kernel): str(text) for kernel, text in row["failed"].items()})


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80} is no number")
    return float(value)
