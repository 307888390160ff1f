"""Timing calls of a microsecond on a machine that is not quiet.

Contestants run in rounds. In each round every contestant has its turn, a short batch of calls, in an
order that is shuffled each time; so whatever else the machine does in that moment falls on all of them.
What is reported is the median over the rounds, and of a difference the median of the rounds' own
differences: noise that lasts longer than a round cancels.

What one call is, is written as text and compiled into a loop of its own, with all names as locals. So no
contestant pays for a closure, an argument tuple or a global lookup that another does not pay for.
"""

from __future__ import annotations

import gc
import random
import statistics
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

Loop = Callable[[int], tuple[int, int, Any]]   # calls -> began, ended (ns), the last result
EMPTY = "(empty loop)"
FEWEST_CALLS = 20
BATCH_NS = 2e6                                 # a batch of slow calls is cut to about this


@dataclass(frozen=True)
class Contestant:
    """One way to do something. `call` is a statement or two that leave the result in `out`."""

    name: str
    call: str
    scope: Mapping[str, Any]                   # the names `call` reads
    target: str = ""                           # the contestant it adds to; "" for one that stands alone
    expect: torch.Tensor | None = None         # what `out` must be
    around: Callable[[], AbstractContextManager[Any]] = nullcontext      # entered once per batch, not timed
    note: str = ""


@dataclass(frozen=True)
class Spread:
    """Nanoseconds: the median, and the tenth and ninetieth percentile."""

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
        return {"median": round(self.median, 1), "p10": round(self.p10, 1), "p90": round(self.p90, 1)}


@dataclass(frozen=True)
class Race:
    """Nanoseconds per call of each contestant, one number per round, the loop's own cost taken off."""

    samples: Mapping[str, Sequence[float]]
    calls: Mapping[str, int] = field(default_factory=dict)
    empty_ns: float = 0.0

    def of(self, name: str) -> Spread:
        return Spread.of(self.samples[name])

    def over(self, name: str, target: str) -> Spread:
        return Spread.of([a - b for a, b in zip(self.samples[name], self.samples[target])])


def compiled(call: str, scope: Mapping[str, Any]) -> Loop:
    """A loop over `call` with every name of `scope` a local."""
    text = (f"def loop({', '.join(('calls', 'now', *scope))}):\n"
            "    out = None\n"
            "    turns = range(calls)\n"
            "    began = now()\n"
            "    for _ in turns:\n" + textwrap.indent(call, " " * 8) + "\n"
            "    return began, now(), out\n")
    made: dict[str, Any] = {}
    exec(text, made)
    loop = made["loop"]
    return lambda calls: loop(calls, time.perf_counter_ns, **scope)


def race(contestants: Sequence[Contestant], rounds: int, calls: int, wait: Callable[[], None] = lambda: None,
         seed: int = 0) -> Race:
    """Let them run. `wait` is called before each batch, outside the clock: a device must be idle by then."""
    everyone = [Contestant(EMPTY, "pass", {}), *contestants]
    loops = {c.name: compiled(c.call, c.scope) for c in everyone}
    turns = {c.name: _turns(c, loops[c.name], calls) for c in everyone}
    samples: dict[str, list[float]] = {c.name: [] for c in everyone}
    order = random.Random(seed)
    with _quiet():
        for _ in range(rounds):
            order.shuffle(everyone)
            for c in everyone:
                with c.around():
                    wait()
                    began, ended, _out = loops[c.name](turns[c.name])
                samples[c.name].append((ended - began) / turns[c.name])
    wait()
    empty = statistics.median(samples.pop(EMPTY))
    return Race({name: [s - empty for s in taken] for name, taken in samples.items()}, turns, empty)


def race_in_threads(contestants: Sequence[Contestant], threads: int, rounds: int, calls: int, seed: int = 0) -> Race:
    """The same with `threads` threads at once: wall time over the calls of all of them."""
    loops = {c.name: compiled(c.call, c.scope) for c in contestants}
    samples: dict[str, list[float]] = {c.name: [] for c in contestants}
    order, everyone = random.Random(seed), list(contestants)
    with _quiet():
        for turn in range(rounds + 1):
            order.shuffle(everyone)
            for c in everyone:
                ns = _together(c, loops[c.name], threads, calls)
                if turn:                       # the first round is the warm-up
                    samples[c.name].append(ns)
    return Race(samples, {c.name: calls for c in contestants})


def _turns(c: Contestant, loop: Loop, calls: int) -> int:
    """Warm up, see that the result is right, and find how many calls make a batch."""
    with c.around():
        began, ended, out = loop(FEWEST_CALLS)
        if c.expect is not None:
            torch.testing.assert_close(out, c.expect, msg=lambda text: f"{c.name} computes something else: {text}")
        began, ended, _ = loop(FEWEST_CALLS)
    return min(calls, max(FEWEST_CALLS, int(BATCH_NS / max(1.0, (ended - began) / FEWEST_CALLS))))


def _together(c: Contestant, loop: Loop, threads: int, calls: int) -> float:
    spans: list[tuple[int, int]] = []
    gate = threading.Barrier(threads)

    def work() -> None:
        with torch.no_grad(), c.around():      # the grad mode belongs to the thread
            gate.wait()
            began, ended, _ = loop(calls)
        spans.append((began, ended))

    crew = [threading.Thread(target=work) for _ in range(threads)]
    for t in crew:
        t.start()
    for t in crew:
        t.join()
    if len(spans) != threads:
        raise RuntimeError(f"{c.name}: {threads - len(spans)} of {threads} threads failed; see above")
    return (max(e for _, e in spans) - min(b for b, _ in spans)) / (threads * calls)


class _quiet(AbstractContextManager[None]):
    """No garbage collection while the clock runs."""

    def __enter__(self) -> None:
        self.was = gc.isenabled()
        gc.collect()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self.was:
            gc.enable()
