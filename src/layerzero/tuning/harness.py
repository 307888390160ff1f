"""Timing several contestants, which compute one thing, on a machine that is not quiet.

They take turns: every round times each of them once, in an order that is shuffled each time, so
that what the machine does in that moment falls on all of them. Two are compared by the ratio in
each round, and the confidence of the verdict comes from resampling the rounds (bootstrap).

A sample is as many calls as fill a watch's `seconds`, timed as one, so that the clock costs
nothing. The caches are warm, as they are for what the layer before has just written. An eager call
on a GPU is timed as a caller in a loop sees it: calls back to back, host and device at work at the
same time. Only the replay of a captured graph is timed with a cold L2, because between two calls of
a layer a captured model reads all its other weights.
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
# of eager calls on a device: the first and the last do not overlap
LOOP_SECONDS = 2e-3
MAX_CALLS, MAX_COLD_CALLS = 100_000, 20        # in one sample
# a sample with a smaller share of CPU time is taken again
ATTEMPTS, MIN_CPU_SHARE = 3, 0.9
# a sample this long is not taken again: its noise is small
LONG_NS = 200_000_000
# a smaller difference is a tie: two runs may differ by as much
MARGIN = 0.02
GRAPH_MARGIN = 0.01                            # replays of a graph differ less
SURE = 0.95
RESAMPLES = 1000
OUTLIER_REACH = 3.0                            # times the interquartile range beyond it: an outlier

Contestant = Callable[[], Any]


# the clock

class Watch(Protocol):
    max_calls: int
    seconds: float                             # the length of a sample
    margin: float                              # two runs of the same thing may differ by as much

    def sample(self, contestant: Contestant, calls: int) -> float:
        """Return microseconds per call, of this many calls in a row."""


class WallWatch:
    """Wall-clock time, for a CPU or a device that can only be waited for. `cpu_time` is that of
    this thread: a sample during which the CPU was taken away is taken again."""

    margin = MARGIN

    def __init__(self, flush: Callable[[], Any] | None = None,
                 wait: Callable[[], Any] = lambda: None,
                 now: Callable[[], int] = time.perf_counter_ns,
                 cpu_time: Callable[[], int] | None = None,
                 seconds: float = SAMPLE_SECONDS) -> None:
        self._flush, self._wait, self._now, self._cpu_time, self.seconds = (flush, wait, now,
                                                                            cpu_time, seconds)
        # only the first call after a flush is cold
        self.max_calls = MAX_CALLS if flush is None else 1

    def sample(self, contestant: Contestant, calls: int) -> float:
        if calls > 1:
            contestant()                       # refills the caches after the others' turns
        best = math.inf
        for _ in range(ATTEMPTS):
            if self._flush is not None:
                self._flush()
            self._wait()
            cpu_before = self._cpu_time() if self._cpu_time is not None else 0
            start = self._now()
            for _ in range(calls):
                contestant()
            self._wait()
            took = self._now() - start
            best = min(best, took)
            if (self._cpu_time is None or took >= LONG_NS
                or self._cpu_time() - cpu_before >= MIN_CPU_SHARE * took):
                break
        return best / calls / 1e3


class ColdWatch:
    """CUDA events around each call, with the L2 cache overwritten before it.

    The flush before a call hides its launch; since launching may take longest, the sample is the
    longer of the device's time and the host's.
    """

    margin = MARGIN
    seconds = SAMPLE_SECONDS
    max_calls = MAX_COLD_CALLS

    def __init__(self) -> None:
        self._buffer = torch.empty(2 * cache_bytes("cuda"), dtype=torch.uint8, device="cuda")

    def sample(self, contestant: Contestant, calls: int) -> float:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                  for _ in range(calls)]
        host = 0
        torch.cuda.synchronize()
        for begin, end in events:
            self._buffer.zero_()
            begin.record()
            start = time.perf_counter_ns()
            contestant()
            host += time.perf_counter_ns() - start
            end.record()
        torch.cuda.synchronize()
        device = sum(begin.elapsed_time(end) for begin, end in events) * 1e3
        return max(device, host / 1e3) / calls


class GraphWatch:
    """Replays of CUDA graphs, as in a captured decode step: each contestant is captured once, and
    its replay timed after a read of more than the L2 cache. The host's time is not in it. One that
    cannot be captured raises."""

    max_calls = MAX_COLD_CALLS
    margin = GRAPH_MARGIN
    seconds = SAMPLE_SECONDS

    def __init__(self, cold: bool = True) -> None:
        self._sweep = torch.zeros(2 * cache_bytes("cuda") if cold else 4, dtype=torch.uint8,
                                  device="cuda").view(torch.int32)
        self._side = torch.cuda.Stream()
        self._graphs: weakref.WeakKeyDictionary[Contestant,
                                                torch.cuda.CUDAGraph] = weakref.WeakKeyDictionary()

    def sample(self, contestant: Contestant, calls: int) -> float:
        graph = self._graphs.get(contestant)
        if graph is None:
            graph = self._graphs[contestant] = self._capture(contestant)
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                  for _ in range(calls)]
        for begin, end in events:
            self._sweep.sum()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in events) * 1e3 / calls

    def median(self, contestant: Contestant, runs: int) -> float:
        """Return the median of this many replays, in microseconds."""
        return statistics.median(self.sample(contestant, 1) for _ in range(runs))

    def _capture(self, contestant: Contestant) -> torch.cuda.CUDAGraph:
        # libraries make handles and plans now, some of them per stream
        warm_up(contestant, self._side)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream=self._side):
            contestant()
        return graph


def stopwatch(device: str, mode: str = EAGER, cold: bool = False) -> Watch:
    """Return the watch for calls in this mode; `cold`: the last cache is overwritten before."""
    if device == "cuda" and mode == CAPTURED:
        return GraphWatch()
    if device == "cuda" and cold:
        return ColdWatch()
    flush = (torch.empty(2 * cache_bytes(device), dtype=torch.uint8, device=device).zero_ if cold
             else None)
    if device == "cpu":
        return WallWatch(flush, cpu_time=time.thread_time_ns)
    wait = torch.cuda.synchronize if device == "cuda" else torch.accelerator.synchronize
    return WallWatch(flush, wait, seconds=LOOP_SECONDS)


def cache_bytes(device: str) -> int:
    """Return the size of the last cache before memory."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return int(getattr(properties, "L2_cache_size", 0)) or 64 << 20
    sizes = [_cache_size(file)
             for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=0) or 32 << 20


def _cache_size(file: Path) -> int:
    try:
        text = file.read_text().strip()
        return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    except (OSError, ValueError):
        return 0


# statistics

@dataclass(frozen=True)
class TimingSummary:
    """Statistics in microseconds; mean, variance, p10 and p90 leave outliers out."""

    median: float
    mean: float
    variance: float
    p10: float
    p90: float
    p95: float
    p99: float
    samples: int
    outliers: int = 0                          # samples far beyond the interquartile range

    @classmethod
    def of(cls, samples: Sequence[float]) -> TimingSummary:
        everything = sorted(samples)
        q1, q3 = quantile(everything, 0.25), quantile(everything, 0.75)
        reach = OUTLIER_REACH * (q3 - q1)
        usual = [s for s in everything if q1 - reach <= s <= q3 + reach]
        return cls(quantile(everything, 0.5), statistics.fmean(usual),
                   statistics.variance(usual) if len(usual) > 1 else 0.0, quantile(usual, 0.1),
                   quantile(usual, 0.9), quantile(everything, 0.95), quantile(everything, 0.99),
                   len(everything), len(everything) - len(usual))

    @property
    def spread(self) -> float:
        """Return (p90 - p10) / median."""
        return (self.p90 - self.p10) / self.median if self.median > 0 else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of ordered values, interpolated between the two nearest."""
    rank = share * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True)
class Ratio(Record, json="median low high verdict"):
    """The speedup over the rounds: its median over the rounds, and the quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ±{(self.high - self.low) / 2:.2f}"

    @property
    def verdict(self) -> str:
        """Return "faster" or "slower" if three quarters of the rounds agree, else "even"."""
        return "faster" if self.low > 1.0 else "slower" if self.high < 1.0 else "even"


@dataclass(frozen=True)
class Timings:
    """Microseconds per call of each contestant per round; a dropped one has its first rounds."""

    rounds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def summary(self, name: str) -> TimingSummary:
        return TimingSummary.of(self.rounds[name])

    def gain(self, over: str, of: str) -> Ratio:
        """Return how many times faster `of` is than `over`."""
        ratios = [a / b for a, b in zip(self.rounds[over], self.rounds[of])]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return Ratio(middle, low, high)

    def beats(self, one: str, other: str, margin: float = MARGIN) -> float:
        """Return the confidence, 0 to 1, that `one` beats `other` by more than the margin."""
        return float((self._gaps(one, other) > math.log1p(margin)).double().mean())

    def even(self, one: str, other: str, margin: float = MARGIN) -> float:
        """Return the confidence that they differ by less than the margin."""
        return float((self._gaps(one, other).abs() <= math.log1p(margin)).double().mean())

    def _gaps(self, one: str, other: str) -> torch.Tensor:
        """Return the median of log(other / one) over resampled rounds, with a fixed seed."""
        gaps = torch.tensor([math.log(b / a) for a, b in zip(self.rounds[one], self.rounds[other])],
                            dtype=torch.float64, device="cpu")
        draws = torch.randint(len(gaps), (RESAMPLES, len(gaps)), device="cpu",
                              generator=torch.Generator("cpu").manual_seed(0))
        return gaps[draws].quantile(0.5, dim=1)


# rounds

class Race:
    """Contestants that take turns. One that raises an error of `catch` is out, and its error kept.

    No sample begins that is expected to end after `deadline` (of time.perf_counter); a running one
    is not interrupted.
    """

    def __init__(self, watch: Watch, catch: tuple[type[BaseException], ...] = (), seed: int = 0,
                 deadline: float = math.inf) -> None:
        self.watch, self.catch, self.deadline = watch, catch, deadline
        self.rounds: dict[str, list[float]] = {}
        self.failed: dict[str, BaseException] = {}
        self._running: dict[str, tuple[Contestant, int]] = {}
        self._entry_us: dict[str, float] = {}
        self._random = random.Random(seed)

    @property
    def timings(self) -> Timings:
        """The timings of those that have run at least one round and have not failed."""
        return Timings({name: rounds for name, rounds in self.rounds.items() if rounds})

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    @property
    def out_of_time(self) -> bool:
        return time.perf_counter() >= self.deadline

    def has_time_for(self, us: float) -> bool:
        return time.perf_counter() + us * 1e-6 < self.deadline

    def enter(self, name: str, contestant: Contestant,
              compiles: bool = False) -> tuple[float, float] | None:
        """Return microseconds of the first call, which loads and compiles, and of the next.

        None if it failed, or if there was no time for a second call: the first says nothing of its
        speed. The second is expected to take as long as the first, unless that `compiles`.
        """
        start = time.perf_counter()
        if self._sample(name, contestant, 1) is None:
            return None
        # wall-clock: waiting for a compiler is not noise
        first = (time.perf_counter() - start) * 1e6
        if not self.has_time_for(0.0 if compiles else first):
            return None
        after = self._sample(name, contestant, 1)
        if after is None:
            return None
        calls = int(self.watch.seconds * 1e6 / max(after, 1e-3))
        self._running[name] = contestant, min(max(calls, 1), self.watch.max_calls)
        self.rounds[name] = []
        self._entry_us[name] = max(after, 1e-3)
        return first, after

    def replace(self, name: str, contestant: Contestant) -> float | None:
        """Call a contestant in another way from now on; return microseconds of one such call, None
        if it failed, or if there was no time for it: then it is out."""
        if not self.has_time_for(2 * self._entry_us[name]):
            self._leave(name)
            return None
        self._sample(name, contestant, 1)      # loads and compiles what it needs
        after = self._sample(name, contestant, 1) if name in self._running else None
        if after is not None:
            calls = int(self.watch.seconds * 1e6 / max(after, 1e-3))
            self._running[name] = contestant, min(max(calls, 1), self.watch.max_calls)
            self._entry_us[name] = max(after, 1e-3)
        return after

    def drop(self, name: str) -> None:
        """Leave it out of further rounds; what was measured stays."""
        self._running.pop(name, None)

    def run(self, rounds: int = 1, only: str = "") -> None:
        """Run this many rounds, or fewer if time is up; without a turn the entry time stays."""
        with no_collection():
            for _ in range(rounds):
                turn = [entry for entry in self._running.items() if entry[0] == (only or entry[0])]
                self._random.shuffle(turn)
                for name, (contestant, calls) in turn:
                    if not self.has_time_for(self._entry_us[name] * calls):
                        self.rounds[name] = self.rounds[name] or [self._entry_us[name]]
                        continue
                    us = self._sample(name, contestant, calls)
                    if us is not None:
                        self.rounds[name].append(max(us, 1e-3))

    def _sample(self, name: str, contestant: Contestant, calls: int) -> float | None:
        try:
            return self.watch.sample(contestant, calls)
        except self.catch as error:
            self.failed[name] = error
            self._leave(name)
            return None

    def _leave(self, name: str) -> None:
        self.rounds.pop(name, None)
        self.drop(name)


def in_turns(contestants: Mapping[str, Contestant], seconds: float, device: str,
             deadline: float = math.inf) -> Timings:
    """Run rounds for about `seconds`, caches warm, of contestants that fit twice in time."""
    race = Race(stopwatch(device), deadline=deadline)
    for name, contestant in contestants.items():
        race.enter(name, contestant)
    end = time.perf_counter() + seconds
    for turn in range(MAX_ROUNDS):
        if (turn and race.out_of_time) or (turn >= MIN_ROUNDS and time.perf_counter() > end):
            break
        race.run()
    return race.timings


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection while the clock runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
