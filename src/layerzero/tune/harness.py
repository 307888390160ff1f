"""Timing several ways to do one thing on a machine that is not quiet.

In turns: every round gives each way its turn, in an order that is shuffled each time, so that what the
machine does in that moment falls on all of them. Two ways are compared by the ratio in each round, and
how sure the verdict is comes from drawing the rounds again and again (bootstrap).

A sample is as many calls as fill a watch's `seconds`, timed as one, so that the clock costs nothing. The caches are
warm, as they are for what the layer before has just written. An eager call on a GPU is timed as a caller in a loop
sees it: calls back to back, host and device at work at the same time. Only the replay of a captured graph is timed
with a cold L2, because between two calls of a layer a captured model reads all its other weights.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..operate.graphs import capturing, warm_up
from ..perf.record import CAPTURED, EAGER
from ..spec.codec import Record

MIN_ROUNDS, MAX_ROUNDS = 7, 400
SAMPLE_SECONDS = 5e-4
LOOP_SECONDS = 2e-3                            # of eager calls on a device: the first and the last are not overlapped
MOST_CALLS, MOST_COLD_CALLS = 100_000, 20      # in one sample
ATTEMPTS, KEPT = 3, 0.9                        # a sample is taken again if less than this share of it was on the CPU
LONG_NS = 200_000_000                          # a sample as long as this is not taken again: the noise in it is small
MARGIN = 0.02                                  # nearer than this is even, however sure: two runs may differ by as much
GRAPH_MARGIN = 0.01                            # replays of a graph differ less
SURE = 0.95
RESAMPLES = 1000
FAR = 3.0                                      # so many times the middle half outside of it: an outlier

Way = Callable[[], Any]


# the clock

class Watch(Protocol):
    most_calls: int
    seconds: float                             # that a sample should fill
    margin: float                              # two runs of the same thing may differ by as much

    def sample(self, way: Way, calls: int) -> float:
        """Microseconds per call, of so many calls in a row."""


class WallWatch:
    """The clock on the wall, of a CPU or of a device that can only be waited for.

    `busy` is the CPU time of this thread: a sample during which the CPU was taken away is taken again.
    """

    margin = MARGIN

    def __init__(self, flush: Callable[[], Any] | None = None, wait: Callable[[], Any] = lambda: None,
                 now: Callable[[], int] = time.perf_counter_ns, busy: Callable[[], int] | None = None,
                 seconds: float = SAMPLE_SECONDS) -> None:
        self._flush, self._wait, self._now, self._busy, self.seconds = flush, wait, now, busy, seconds
        self.most_calls = MOST_CALLS if flush is None else 1           # only the first call after a flush is cold

    def sample(self, way: Way, calls: int) -> float:
        if calls > 1:
            way()                              # brings back what the others pushed out of the caches
        best = math.inf
        for _ in range(ATTEMPTS):
            if self._flush is not None:
                self._flush()
            self._wait()
            worked = self._busy() if self._busy is not None else 0
            began = self._now()
            for _ in range(calls):
                way()
            self._wait()
            took = self._now() - began
            best = min(best, took)
            if self._busy is None or took >= LONG_NS or self._busy() - worked >= KEPT * took:
                break
        return best / calls / 1e3


class ColdWatch:
    """CUDA's own events, which tell how long the device worked, with the L2 cache overwritten before each call.

    Calls are timed one by one behind a flush that hides the launch; since launching may be what takes longest, the
    sample is the longer of the device's time and the host's.
    """

    margin = MARGIN
    seconds = SAMPLE_SECONDS
    most_calls = MOST_COLD_CALLS

    def __init__(self) -> None:
        self._buffer = torch.empty(2 * cache_bytes("cuda"), dtype=torch.uint8, device="cuda")

    def sample(self, way: Way, calls: int) -> float:
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        host = 0
        torch.cuda.synchronize()
        for begin, end in marks:
            self._buffer.zero_()
            begin.record()
            began = time.perf_counter_ns()
            way()
            host += time.perf_counter_ns() - began
            end.record()
        torch.cuda.synchronize()
        device = sum(begin.elapsed_time(end) for begin, end in marks) * 1e3
        return max(device, host / 1e3) / calls


class GraphWatch:
    """As a captured decode step runs it: each way is captured once in a CUDA graph of its own, and its replay timed
    behind a read of more than the L2 cache. What the host does is not in it. A way that cannot be captured raises."""

    most_calls = MOST_COLD_CALLS
    margin = GRAPH_MARGIN
    seconds = SAMPLE_SECONDS

    def __init__(self, cold: bool = True) -> None:
        self._sweep = torch.zeros(2 * cache_bytes("cuda") if cold else 4, dtype=torch.uint8, device="cuda").view(
            torch.int32)
        self._side = torch.cuda.Stream()
        self._graphs: weakref.WeakKeyDictionary[Way, torch.cuda.CUDAGraph] = weakref.WeakKeyDictionary()

    def sample(self, way: Way, calls: int) -> float:
        graph = self._graphs.get(way)
        if graph is None:
            graph = self._graphs[way] = self._captured(way)
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        for begin, end in marks:
            self._sweep.sum()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in marks) * 1e3 / calls

    def median(self, way: Way, runs: int) -> float:
        """The median of so many replays, in microseconds."""
        return statistics.median(self.sample(way, 1) for _ in range(runs))

    def _captured(self, way: Way) -> torch.cuda.CUDAGraph:
        warm_up(way, self._side)               # what is made on first use is made now, and some of it for this stream
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream=self._side):
            way()
        return graph


def stopwatch(device: str, mode: str = EAGER, cold: bool = False) -> Watch:
    """The watch for calls in this mode. `cold`: of eager calls, each after its last cache was overwritten."""
    if device == "cuda" and mode == CAPTURED:
        return GraphWatch()
    if device == "cuda" and cold:
        return ColdWatch()
    empty = torch.empty(2 * cache_bytes(device), dtype=torch.uint8, device=device).zero_ if cold else None
    if device == "cpu":
        return WallWatch(empty, busy=time.thread_time_ns)
    wait = torch.cuda.synchronize if device == "cuda" else torch.accelerator.synchronize
    return WallWatch(empty, wait, seconds=LOOP_SECONDS)


def cache_bytes(device: str) -> int:
    """The size of the last cache before memory."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return int(getattr(properties, "L2_cache_size", 0)) or 64 << 20
    found = [_cache_size(file) for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(found, default=0) or 32 << 20


def _cache_size(file: Path) -> int:
    try:
        text = file.read_text().strip()
        return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    except (OSError, ValueError):
        return 0


# what the samples say

@dataclass(frozen=True)
class Summary:
    """Microseconds. Mean, variance, p10 and p90 leave outliers out; the median and the tail know them all."""

    median: float
    mean: float
    variance: float
    p10: float
    p90: float
    p95: float
    p99: float
    samples: int
    outliers: int = 0                          # samples far outside the middle half, as when the CPU was taken away

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        everything = sorted(samples)
        q1, q3 = quantile(everything, 0.25), quantile(everything, 0.75)
        reach = FAR * (q3 - q1)
        usual = [s for s in everything if q1 - reach <= s <= q3 + reach]
        return cls(quantile(everything, 0.5), statistics.fmean(usual),
                   statistics.variance(usual) if len(usual) > 1 else 0.0, quantile(usual, 0.1), quantile(usual, 0.9),
                   quantile(everything, 0.95), quantile(everything, 0.99), len(everything),
                   len(everything) - len(usual))

    @property
    def spread(self) -> float:
        """Relative: how far apart nine and one in ten are."""
        return (self.p90 - self.p10) / self.median if self.median > 0 else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest of the ordered values, as far as the share says."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Ratio(Record, json="median low high verdict"):
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


@dataclass(frozen=True)
class Timings:
    """Microseconds per call of each way, one number per round; a way that was dropped has the first rounds only."""

    rounds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def summary(self, name: str) -> Summary:
        return Summary.of(self.rounds[name])

    def gain(self, over: str, of: str) -> Ratio:
        ratios = [a / b for a, b in zip(self.rounds[over], self.rounds[of])]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return Ratio(middle, low, high)

    def beats(self, one: str, other: str, margin: float = MARGIN) -> float:
        """How sure it is, from 0 to 1, that `one` is faster than `other` by more than the margin."""
        return float((self._gaps(one, other) > math.log1p(margin)).double().mean())

    def even(self, one: str, other: str, margin: float = MARGIN) -> float:
        """How sure it is that they are nearer to each other than the margin."""
        return float((self._gaps(one, other).abs() <= math.log1p(margin)).double().mean())

    def _gaps(self, one: str, other: str) -> torch.Tensor:
        """The median of log(other / one) over rounds that are drawn again and again, the same draws every time."""
        gaps = torch.tensor([math.log(b / a) for a, b in zip(self.rounds[one], self.rounds[other])],
                            dtype=torch.float64, device="cpu")
        draws = torch.randint(len(gaps), (RESAMPLES, len(gaps)), device="cpu",
                              generator=torch.Generator("cpu").manual_seed(0))
        return gaps[draws].quantile(0.5, dim=1)


# rounds

class Race:
    """Ways that take turns. One that throws what `catch` names is out, and its error kept.

    After `deadline` (of time.perf_counter) no sample begins; one that runs is not interrupted.
    """

    def __init__(self, watch: Watch, catch: tuple[type[BaseException], ...] = (), seed: int = 0,
                 deadline: float = math.inf) -> None:
        self.watch, self.catch, self.deadline = watch, catch, deadline
        self.rounds: dict[str, list[float]] = {}
        self.failed: dict[str, BaseException] = {}
        self._running: dict[str, tuple[Way, int]] = {}
        self._on_entry: dict[str, float] = {}
        self._chance = random.Random(seed)

    @property
    def timings(self) -> Timings:
        """Of those that have run at least one round and have not failed."""
        return Timings({name: found for name, found in self.rounds.items() if found})

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    @property
    def out_of_time(self) -> bool:
        return time.perf_counter() >= self.deadline

    def enter(self, name: str, way: Way) -> tuple[float, float] | None:
        """Microseconds of the first call, which loads and compiles, and of the next; None if it failed, or if
        after the first call there was no time for another: by its first call nobody is judged."""
        began = time.perf_counter()
        if self._sample(name, way, 1) is None:
            return None
        first = (time.perf_counter() - began) * 1e6            # all of it: a compiler's wait is no noise
        if self.out_of_time:
            return None
        after = self._sample(name, way, 1)
        if after is None:
            return None
        calls = int(self.watch.seconds * 1e6 / max(after, 1e-3))
        self._running[name] = way, min(max(calls, 1), self.watch.most_calls)
        self.rounds[name] = []
        self._on_entry[name] = max(after, 1e-3)
        return first, after

    def replace(self, name: str, way: Way) -> float | None:
        """From now on it is called in this way; microseconds of one such call, None if it failed."""
        self._sample(name, way, 1)             # what is made on first use is made now
        after = self._sample(name, way, 1) if name in self._running else None
        if after is not None:
            calls = int(self.watch.seconds * 1e6 / max(after, 1e-3))
            self._running[name] = way, min(max(calls, 1), self.watch.most_calls)
            self._on_entry[name] = max(after, 1e-3)
        return after

    def drop(self, name: str) -> None:
        """It takes part in no further round; what was measured stays."""
        self._running.pop(name, None)

    def run(self, rounds: int = 1, only: str = "") -> None:
        """So many rounds, or fewer if the time is up: then a way that had no turn yet keeps its time on entry."""
        with no_collection():
            for _ in range(rounds):
                turn = [entry for entry in self._running.items() if entry[0] == (only or entry[0])]
                self._chance.shuffle(turn)
                for name, (way, calls) in turn:
                    if self.out_of_time:
                        self.rounds[name] = self.rounds[name] or [self._on_entry[name]]
                        continue
                    us = self._sample(name, way, calls)
                    if us is not None:
                        self.rounds[name].append(max(us, 1e-3))

    def _sample(self, name: str, way: Way, calls: int) -> float | None:
        try:
            return self.watch.sample(way, calls)
        except self.catch as error:
            self.failed[name] = error
            self.rounds.pop(name, None)
            self.drop(name)
            return None


def in_turns(ways: Mapping[str, Way], seconds: float, device: str, deadline: float = math.inf) -> Timings:
    """Rounds for about `seconds`, with warm caches; of those ways that were called twice before the deadline."""
    race = Race(stopwatch(device), deadline=deadline)
    for name, way in ways.items():
        race.enter(name, way)
    end = time.perf_counter() + seconds
    for turn in range(MAX_ROUNDS):
        if (turn and race.out_of_time) or (turn >= MIN_ROUNDS and time.perf_counter() > end):
            break
        race.run()
    return race.timings


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection while the clock runs."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
