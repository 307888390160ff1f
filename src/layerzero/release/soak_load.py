"""What a soak does to the library: calls that are checked, and everything that may happen around
them.

Worker threads make calls of every operation, each judged like a case of the contract. Meanwhile a
kernel fails now and then, policy changes, processes are forked, memory is taken and given back,
kinds of call are learned and compiled in the background. None of it may change an answer, raise at
a caller or put another kernel out of service.
"""

from __future__ import annotations

import inspect
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..machine.faults import FAULTS
from ..operate.inspection import dispatcher_of
from ..spec.errors import InvalidCall, NoKernelFoundError
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.reason import Code
from ..verify.kernel.contract import (
    case_values,
    formula,
    may_be_chance,
    results_of,
    upcast,
    with_own_generators,
)
from ..verify.kernel.judging import judge_result
from ..world import snapshot as worlds
from ..world.settings import prefer

CASES, DTYPES = 4, 2                           # of each operation, at most
MAX_FAILURES = 50                              # messages kept; later ones are only counted
FLAKY = "soak.flaky"                           # kernels that fail now and then
# A burst repeats one call often enough for learning to settle on a kernel.
BURST_SECONDS, BURST_CALLS = 0.05, 400


@dataclass
class Tally:
    """Counts what happened; of what went wrong, the first few in words."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def add(self, what: str, n: int = 1) -> None:
        with self.lock:
            self.counts[what] += n

    def fail(self, kind: str, text: str) -> None:
        with self.lock:
            self.counts[kind] += 1
            if len(self.failures) < MAX_FAILURES:
                self.failures.append(f"{kind}: {text}")


CALLS = ("calls", "calls of new sizes", "calls in bursts")
WRONG = ("wrong results", "calls that raised", "children that failed", "breakers of other kernels",
         "mistakes not refused", "disturbances that raised")   # the kinds of failure


@dataclass(frozen=True)
class Case:
    """A call and what is known of its right answer."""

    op: Op
    dtype: str
    device: str
    values: Mapping[str, Any]
    truth: tuple[Any, ...]
    eager: tuple[Any, ...]

    @classmethod
    def of(cls, op: Op, case: Mapping[str, Any], dtype: str, device: str) -> Case:
        values = case_values(op, case, dtype, device)
        eager = formula(op, values)
        return cls(op, dtype, device, values, eager if not op.tensors
                   else formula(op, upcast(values)), eager)

    def complaint(self, result: Any) -> str:
        """Returns what is wrong with a result; "" if it is right."""
        results = results_of(result)
        if not self.op.tensors:
            return ("" if results == self.eager
                    else f"{results!r:.200} instead of {self.eager!r:.200}")
        if len(results) != len(self.eager):
            return f"{len(results)} results instead of {len(self.eager)}"
        for i, (g, truth, eager) in enumerate(zip(results, self.truth, self.eager)):
            if not isinstance(g, Tensor) or g.shape != eager.shape or g.dtype != eager.dtype:
                return (f"result {i} is "
                        f"{g if not isinstance(g, Tensor) else (tuple(g.shape), g.dtype)}")
            verdict = judge_result(self.op, self.dtype, f"result {i}", g, g, truth, eager)
            if verdict.complaints and not (all(c.kind == "error" for c in verdict.complaints)
                                           and g.is_floating_point()
                                           and may_be_chance(results, verdict.ratio)):
                return verdict.complaints[0].text
        return ""

    def __str__(self) -> str:
        return f"lz.{self.op.name} {self.dtype} on {self.device}"


def cases_of(devices: Sequence[str], ops: Sequence[str] = ()) -> list[Case]:
    """Returns a few cases of every operation of the catalog, or of these."""
    cases = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for op in worlds.current().catalog.ops.values():
            if ops and op.name not in ops:
                continue
            for device in devices:
                if not op.tensors and device != "cpu":    # text is on no device
                    continue
                cases += [Case.of(op, case, dtype, device) for dtype in op.dtypes[:DTYPES]
                          for case in op.cases[:CASES]]
    return cases


# Calls.

def call_and_check(case: Case, tally: Tally, how: str = "") -> None:
    """Makes one call and judges the result. how: "reference" prefers that kernel in a block,
    "strict" passes a policy, "" does neither."""
    public = dispatcher_of(case.op.name).public
    try:
        if how == "reference":
            with prefer("reference.*", op=case.op.name):
                result = public(**with_own_generators(case.values))
        else:
            extra = {"policy": {"strict_mode": True}} if how == "strict" else {}
            result = public(**with_own_generators(case.values), **extra)
        wrong = case.complaint(result)
    except FAULTS as e:                        # nothing that happens here may reach a caller
        _count_raised(case, tally, e)
        return
    tally.add("calls")
    if wrong:
        tally.fail("wrong results", f"{case}: {wrong}")


def _count_raised(case: Case, tally: Tally, error: BaseException) -> None:
    """Counts a call that raised. One is right to raise if every kernel needs more memory than a
    disturbance leaves."""
    if isinstance(error, NoKernelFoundError) and Code.MEMORY_HEADROOM_EXCEEDED in error.codes:
        tally.add("calls refused for want of memory")
        return
    tally.fail("calls that raised", f"{case}: {type(error).__name__}: {str(error)[:500]}")


def call_new_size(rng: random.Random, tally: Tally) -> None:
    """Calls of rare sizes, so that choices are made, remembered and forgotten all the time."""
    x = torch.randn(rng.randrange(1, 9), rng.randrange(8, 1024))
    public = dispatcher_of("rms_norm").public
    try:
        result, expected = public(x), dispatcher_of("rms_norm").op.reference(x)
    except FAULTS as e:
        tally.fail("calls that raised", f"lz.rms_norm {tuple(x.shape)}: {type(e).__name__}: {e}")
        return
    tally.add("calls of new sizes")
    if not torch.allclose(result, expected, rtol=1e-4, atol=1e-5):
        tally.fail("wrong results", f"lz.rms_norm {tuple(x.shape)}")


def call_wrongly(tally: Tally) -> None:
    """Makes a call that the contract forbids, which must be refused."""
    try:
        dispatcher_of("rms_norm").public(torch.ones(2, 8), torch.ones(7))
    except InvalidCall:
        tally.add("mistakes refused")
    except FAULTS as e:
        tally.fail("mistakes not refused", f"wanted InvalidCall, got {type(e).__name__}: {e}")
    else:
        tally.fail("mistakes not refused", "a weight of 7 for rows of 8 was accepted")


def call_in_burst(case: Case, tally: Tally) -> None:
    """Makes the same call over and over, as decoding does, and checks the first and last."""
    call_and_check(case, tally)
    public, end, n = dispatcher_of(case.op.name).public, time.monotonic() + BURST_SECONDS, 0
    try:
        while n < BURST_CALLS and time.monotonic() < end:
            public(**with_own_generators(case.values))
            n += 1
    except FAULTS as e:
        _count_raised(case, tally, e)
    tally.add("calls in bursts", n)
    call_and_check(case, tally)


class Workers:
    """Threads that call. They can be paused, so that a sample is taken of a quiet process."""

    def __init__(self, cases: Sequence[Case], tally: Tally, threads: int, seed: int) -> None:
        self.cases, self.tally, self.stop = cases, tally, threading.Event()
        self._go, self._seed = threading.Event(), seed
        self._idle = [threading.Event() for _ in range(threads)]
        self._threads = [threading.Thread(target=self._run, args=(i,), name=f"soak-{i}",
                                          daemon=True)
                         for i in range(threads)]

    def start(self) -> None:
        self._go.set()
        for thread in self._threads:
            thread.start()

    def pause(self, seconds: float = 60.0) -> None:
        """Return once every call under way has ended."""
        self._go.clear()
        end = time.monotonic() + seconds
        for idle, thread in zip(self._idle, self._threads):
            while not idle.wait(0.2) and thread.is_alive() and time.monotonic() < end:
                pass
            if not idle.is_set():
                self.tally.fail("calls that raised", f"{thread.name}: " + (
                    f"a call did not end within {seconds:g} s" if thread.is_alive()
                    else "the thread died"))

    def resume(self) -> None:
        self._go.set()

    def end(self, seconds: float = 60.0) -> None:
        self.stop.set()
        self._go.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(seconds)

    def _run(self, i: int) -> None:
        rng, idle = random.Random(self._seed * 1000 + i), self._idle[i]
        with warnings.catch_warnings(), torch.no_grad():
            while not self.stop.is_set():
                if not self._go.is_set():
                    idle.set()
                    self._go.wait()
                    idle.clear()
                    continue
                kind = rng.random()
                if kind < 0.05:
                    call_wrongly(self.tally)
                elif kind < 0.25:
                    call_new_size(rng, self.tally)
                elif kind < 0.30:
                    call_in_burst(rng.choice(self.cases), self.tally)
                else:
                    call_and_check(rng.choice(self.cases), self.tally,
                                   rng.choice(("", "", "", "reference", "strict")))
        idle.set()


# Faults.

class Flaky:
    """A right kernel that fails in a share of its calls: a fault of its own, or out of memory."""

    def __init__(self, op: Op, rate: float, seed: int = 0, jit: bool = False) -> None:
        self.op, self.rate, self.failed, self._rng = op, rate, 0, random.Random(seed)
        # compiled once under a name
        name = f"{FLAKY}_{op.name}_{seed % 64}" if jit else f"{FLAKY}_{op.name}"
        self.kernel = Kernel(name, op, self._load, prior=1e6, less_work="it fails now and then",
                             # of a library: else it is not compiled unasked
                             jit=jit, package="torch" if jit else "")

    def _load(self) -> Callable[..., Any]:
        reference = self.op.reference

        def run(*args: Any, **kwargs: Any) -> Any:
            drawn = self._rng.random()
            if drawn < self.rate:
                self.failed += 1
                raise torch.OutOfMemoryError("soak") if drawn < self.rate / 4 else RuntimeError(
                    "soak: a planted fault")
            return reference(*args, **kwargs)

        run.__signature__ = inspect.signature(reference)  # type: ignore[attr-defined]
        return run


def other_breakers() -> list[str]:
    """Returns the kernels out of service that no fault was planted in."""
    return sorted(name for name in worlds.current().health if not name.startswith("soak"))


