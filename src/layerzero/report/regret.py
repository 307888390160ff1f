"""What `lz regret --json` wrote, as the report shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files.reading import read_json
from ..spec.errors import DataError


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
        int(n["flips"]), int(n["flips_that_matter"]), str(data["place"]), tuple(calls),
        tuple((str(s["call"]["op"]), str(s["why"])) for s in data.get("skipped_calls", ())),
        tuple(map(str, data.get("problems", ()))))


def _regret_call(row: Mapping[str, Any]) -> RegretCall:
    us, chosen, best = row["microseconds"], str(row["chosen"]), str(row["best"])
    return RegretCall(
        str(row["label"]), chosen, best, _number(row["regret"]), int(_number(row["count"])),
        _number(us[chosen]), _number(us[best]),
        None if row["gain"] is None else _number(row["gain"]), tuple(map(str, row["flip"] or ())),
        {str(kernel): str(text) for kernel, text in row["failed"].items()})


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80} is no number")
    return float(value)
