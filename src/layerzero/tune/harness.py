"""Timing several ways to do one thing on a machine that is not quiet: in turns, and by the ratio of each turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MIN_ROUNDS, MAX_ROUNDS = 7, 400
SAMPLE_SECONDS = 5e-4                          # one sample is as many calls as fill this, so the clock costs nothing


@dataclass(frozen=True)
class Ratio:
    """How many times faster: the median over the rounds, and the middle half of them."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ±{(self.high - self.low) / 2:.2f}"

    @property
    def verdict(self) -> str:
        """"faster" and "slower" only where three quarters of the rounds say so."""
        return "faster" if self.low > 1.0 else "slower" if self.high < 1.0 else "even"

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "low": self.low, "high": self.high, "verdict": self.verdict}


@dataclass(frozen=True)
class Timings:
    """Microseconds per call of each way, one number per round."""

    rounds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def gain(self, over: str, of: str) -> Ratio:
        ratios = [a / b for a, b in zip(self.rounds[over], self.rounds[of])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return Ratio(middle, low, high)


def in_turns(ways: Mapping[str, Callable[[], Any]], seconds: float, device: str) -> Timings:
    """Rounds for about `seconds`; in each round every way has its turn, and another one begins each time."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def sample(fn: Callable[[], Any], calls: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        wait()
        return (time.perf_counter() - start) / calls

    counts = {}
    for name, fn in ways.items():
        sample(fn, 2)                          # choices are made, code is loaded, caches are filled
        counts[name] = max(1, int(SAMPLE_SECONDS / sample(fn, 1)))
    names, rounds = list(ways), {name: [] for name in ways}    # type: tuple[list[str], dict[str, list[float]]]
    end = time.perf_counter() + seconds
    for turn in range(MAX_ROUNDS):
        if turn >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            rounds[name].append(sample(ways[name], counts[name]) * 1e6)
    return Timings(rounds)
