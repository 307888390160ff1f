"""Timing calls of a microsecond on a machine that is not quiet.

Contestants run in rounds. In each round every contestant has its turn, a short batch of calls, in
an order that is shuffled each time, so that whatever the machine does in that moment falls on all
of them. One that has a target runs right beside it, before or after; what it adds is the median
over the rounds of these differences: noise that lasts longer than two batches cancels. A batch
during which the CPU was taken away (its wall time is longer than its CPU time) is run again.

What one call is, is written as text and compiled into a loop of its own, with all names as locals.
So no contestant pays for a closure, an argument tuple or a global lookup that another does not pay
for.
"""

from __future__ import annotations

import gc
import random
import statistics
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

Loop = Callable[[int], tuple[int, int, Any]]   # calls -> start, end (ns), the last result
EMPTY = "(empty loop)"
# calls before each batch: its code and data come back to the caches
WARM_UP = 5
ATTEMPTS = 5


@dataclass(frozen=True)
class Contestant:
    """One way to do something. `call` is a statement or two that leave the result in `out`."""

    name: str
    call: str
    scope: Mapping[str, Any]                   # the names `call` reads
    # the contestant it adds to; "" for one that stands alone
    target: str = ""
    expect: torch.Tensor | None = None         # what `out` must be
    # entered once per batch, not timed
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Spread:
    """The median, and the tenth and ninetieth percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0])
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), tenths[0], tenths[-1])

    def to_json(self) -> dict[str, float]:
        return {"median": round(self.median, 1), "p10": round(self.p10, 1),
                "p90": round(self.p90, 1)}


@dataclass
class Race:
    """Nanoseconds per call, one number per round: of each contestant, and what it adds to its
    target."""

    samples: dict[str, list[float]]
    added: dict[str, list[float]] = field(default_factory=dict)
    empty_ns: float = 0.0                      # what the loop itself costs; taken off the samples
    # share of batches that lost the CPU and were run again
    repeated: float = 0.0

    def of(self, name: str) -> Spread:
        return Spread.of(self.samples[name])

    def over(self, name: str) -> Spread | None:
        return Spread.of(self.added[name]) if name in self.added else None


def compiled(call: str, scope: Mapping[str, Any]) -> Loop:
    """A loop over `call` with every name of `scope` a local."""
    text = (f"def loop({', '.join(('calls', 'now', *scope))}):\n"
            "    out = None\n"
            "    turns = range(calls)\n"
            "    start = now()\n"
            "    for _ in turns:\n" + textwrap.indent(call, " " * 8) + "\n"
            "    return start, now(), out\n")
    made: dict[str, Any] = {}
    exec(text, made)
    loop = made["loop"]
    return lambda calls: loop(calls, time.perf_counter_ns, **scope)


def race(contestants: Sequence[Contestant], rounds: int, calls: int,
         wait: Callable[[], None] = lambda: None,
         seed: int = 0) -> Race:
    """Let them run.

    `wait` is called before each batch, outside the clock: a device must be idle by then.
    """
    runners = {c.name: _Runner(c, calls, wait)
               for c in (Contestant(EMPTY, "pass", {}), *contestants)}
    found = Race({name: [] for name in runners}, {c.name: [] for c in contestants if c.target})
    order, chance = list(runners.values()), random.Random(seed)
    for runner in order:
        runner.check()
    with _no_collection():
        for _ in range(rounds):
            chance.shuffle(order)
            for runner in order:
                c = runner.contestant
                if not c.target:
                    found.samples[c.name].append(runner())
                    continue
                pair = [runner, runners[c.target]]
                chance.shuffle(pair)
                ns = {r.contestant.name: r() for r in pair}
                found.samples[c.name].append(ns[c.name])
                found.added[c.name].append(ns[c.name] - ns[c.target])
    wait()
    found.empty_ns = statistics.median(found.samples.pop(EMPTY))
    found.samples = {name: [ns - found.empty_ns for ns in samples]
                     for name, samples in found.samples.items()}
    batches = sum(r.batches for r in order)
    found.repeated = sum(r.repeated for r in order) / batches if batches else 0.0
    return found


def race_in_threads(contestants: Sequence[Contestant], threads: int, rounds: int, calls: int,
                    seed: int = 0) -> Race:
    """The same with `threads` threads at once: wall time over the calls of all of them."""
    loops = {c.name: compiled(c.call, c.scope) for c in contestants}
    found = Race({c.name: [] for c in contestants}, {c.name: [] for c in contestants if c.target})
    order, chance = list(contestants), random.Random(seed)
    with _no_collection():
        for turn in range(rounds + 1):
            chance.shuffle(order)
            ns = {c.name: _together(c, loops[c.name], threads, calls) for c in order}
            if not turn:                       # the warm-up
                continue
            for c in order:
                found.samples[c.name].append(ns[c.name])
                if c.target:
                    found.added[c.name].append(ns[c.name] - ns[c.target])
    return found


class _Runner:
    """One contestant on its track: calling it runs a batch and gives the nanoseconds per call."""

    def __init__(self, contestant: Contestant, calls: int, wait: Callable[[], None]) -> None:
        self.contestant = contestant
        self.loop = compiled(contestant.call, contestant.scope)
        self.calls, self.wait = calls, wait
        self.batches = self.repeated = 0

    def check(self) -> None:
        """A fast wrong answer is no answer. It also warms up what only the first calls pay for."""
        c = self.contestant
        with c.around():
            _, _, out = self.loop(4 * WARM_UP)
        if c.expect is not None:
            torch.testing.assert_close(out, c.expect,
                                       msg=lambda text: f"{c.name} computes something else: {text}")

    def __call__(self) -> float:
        self.batches += 1
        with self.contestant.around():
            for attempt in range(ATTEMPTS):
                self.repeated += attempt == 1
                self.loop(WARM_UP)
                self.wait()
                on_cpu = time.thread_time_ns()
                start, ended, _ = self.loop(self.calls)
                if ended - start <= time.thread_time_ns() - on_cpu:
                    break
        return (ended - start) / self.calls


def _together(c: Contestant, loop: Loop, threads: int, calls: int) -> float:
    spans: list[tuple[int, int]] = []
    gate = threading.Barrier(threads)

    def work() -> None:
        with torch.no_grad(), c.around():      # the grad mode belongs to the thread
            gate.wait()
            start, ended, _ = loop(calls)
        spans.append((start, ended))

    crew = [threading.Thread(target=work) for _ in range(threads)]
    for t in crew:
        t.start()
    for t in crew:
        t.join()
    if len(spans) != threads:
        raise RuntimeError(
            f"{c.name}: {threads - len(spans)} of {threads} threads failed; see above")
    return (max(e for _, e in spans) - min(b for b, _ in spans)) / (threads * calls)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection while the clock runs."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
