"""What a soak does to the library: calls that are checked, and everything that may happen around
them.

Worker threads make calls of every operation, each judged like a case of the contract. Meanwhile a
kernel fails now and then, policy changes, processes are forked, memory is taken and given back,
kinds of call are learned and compiled in the background. None of it may change an answer, raise at
a caller or put another kernel out of service.
"""

from __future__ import annotations

import inspect
import mmap
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..machine.faults import FAULTS
from ..machine.memory import free_bytes
from ..operate.inspection import dispatcher_of
from ..selection.policy import PolicyRule
from ..spec.errors import InvalidCall
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..verify.kernel.contract import (
    case_values,
    formula,
    judge_result,
    may_be_chance,
    results_of,
    upcast,
    with_own_generators,
)
from ..world import snapshot as worlds
from ..world.settings import configure, lock, prefer, unlock

CASES, DTYPES = 4, 2                           # of an operation
MOST_FAILURES = 50                             # that are kept in words
# one kernel of each of these operations fails now and then
FLAKY = "soak.flaky"
FLAKY_OPS = ("rms_norm", "attention", "linear", "add_rms_norm")
# times the share asked for: below and above what opens a breaker
RATES = (0.5, 2.5, 15.0)
# its planted kernel must be compiled first, in the background
COMPILING_OP = "add_rms_norm"
# of one call over and over: enough of a kind for it to be learned
BURST_SECONDS, BURST_CALLS = 0.05, 400
FORK_OPS = ("rms_norm", "layer_norm", "rope")
PRESSURE_BYTES = 256 << 20
FORK_SECONDS = 60.0


@dataclass
class Tally:
    """What happened, counted; of what went wrong, the first few in words."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def add(self, what: str, n: int = 1) -> None:
        with self.lock:
            self.counts[what] += n

    def fail(self, kind: str, text: str) -> None:
        with self.lock:
            self.counts[kind] += 1
            if len(self.failures) < MOST_FAILURES:
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
        return cls(op, dtype, device, values, eager if op.read is not None
                   else formula(op, upcast(values)), eager)

    def complaint(self, result: Any) -> str:
        """What is wrong with a result; "" if it is right."""
        results = results_of(result)
        if self.op.read is not None:
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
    """Calls of every operation of the catalog, or of these."""
    cases = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for op in worlds.current().catalog.ops.values():
            if ops and op.name not in ops:
                continue
            for device in devices:
                if op.read is not None and device != "cpu":    # text is on no device
                    continue
                cases += [Case.of(op, case, dtype, device) for dtype in op.dtypes[:DTYPES]
                          for case in op.cases[:CASES]]
    return cases


# Calls.

def call_and_check(case: Case, tally: Tally, how: str = "") -> None:
    """One call in some way (a named kernel, a block with a preference), judged."""
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
        tally.fail("calls that raised",
                   f"{case}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
        return
    tally.add("calls")
    if wrong:
        tally.fail("wrong results", f"{case}: {wrong}")


def new_size(chance: random.Random, tally: Tally) -> None:
    """A call of a size that hardly came before: choices are made, remembered and forgotten all the
    time."""
    x = torch.randn(chance.randrange(1, 9), chance.randrange(8, 1024))
    public = dispatcher_of("rms_norm").public
    try:
        result, expected = public(x), dispatcher_of("rms_norm").op.reference(x)
    except FAULTS as e:
        tally.fail("calls that raised", f"lz.rms_norm {tuple(x.shape)}: {type(e).__name__}: {e}")
        return
    tally.add("calls of new sizes")
    if not torch.allclose(result, expected, rtol=1e-4, atol=1e-5):
        tally.fail("wrong results", f"lz.rms_norm {tuple(x.shape)}")


def mistake(tally: Tally) -> None:
    """A call that the contract forbids: it is refused, and costs nobody else anything."""
    try:
        dispatcher_of("rms_norm").public(torch.ones(2, 8), torch.ones(7))
    except InvalidCall:
        tally.add("mistakes refused")
    except FAULTS as e:
        tally.fail("mistakes not refused", f"wanted InvalidCall, got {type(e).__name__}: {e}")
    else:
        tally.fail("mistakes not refused", "a weight of 7 for rows of 8 was accepted")


def burst(case: Case, tally: Tally) -> None:
    """The same call over and over, as a decode loop makes it; the first and the last are checked.
    """
    call_and_check(case, tally)
    public, end, n = dispatcher_of(case.op.name).public, time.monotonic() + BURST_SECONDS, 0
    try:
        while n < BURST_CALLS and time.monotonic() < end:
            public(**with_own_generators(case.values))
            n += 1
    except FAULTS as e:
        tally.fail("calls that raised", f"{case}: {type(e).__name__}: {e}")
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
        chance, idle = random.Random(self._seed * 1000 + i), self._idle[i]
        with warnings.catch_warnings(), torch.no_grad():
            while not self.stop.is_set():
                if not self._go.is_set():
                    idle.set()
                    self._go.wait()
                    idle.clear()
                    continue
                kind = chance.random()
                if kind < 0.05:
                    mistake(self.tally)
                elif kind < 0.25:
                    new_size(chance, self.tally)
                elif kind < 0.30:
                    burst(chance.choice(self.cases), self.tally)
                else:
                    call_and_check(chance.choice(self.cases), self.tally,
                                   chance.choice(("", "", "", "reference",
                                                                                         "strict")))
        idle.set()


# Faults.

class Flaky:
    """A right kernel that fails in a share of its calls: a fault of its own, or out of memory."""

    def __init__(self, op: Op, rate: float, seed: int = 0, jit: bool = False) -> None:
        self.op, self.rate, self.failed, self._chance = op, rate, 0, random.Random(seed)
        # compiled once under a name
        name = f"{FLAKY}_{op.name}_{seed % 64}" if jit else f"{FLAKY}_{op.name}"
        self.kernel = Kernel(name, op, self._load, prior=1e6, less_work="it fails now and then",
                             # of a library: else it is not compiled unasked
                             jit=jit, package="torch" if jit else "")

    def _load(self) -> Callable[..., Any]:
        reference = self.op.reference

        def run(*args: Any, **kwargs: Any) -> Any:
            drawn = self._chance.random()
            if drawn < self.rate:
                self.failed += 1
                raise torch.OutOfMemoryError("soak") if drawn < self.rate / 4 else RuntimeError(
                    "soak: a planted fault")
            return reference(*args, **kwargs)

        run.__signature__ = inspect.signature(reference)  # type: ignore[attr-defined]
        return run


# What happens around the calls: each is done by the one thread that also takes the samples.

class Disturbances:
    """Everything that is not a call.

    `do(i)` does the i-th of a cycle; `quiet()` takes policy back to what it was.
    """

    def __init__(self, cases: Sequence[Case], tally: Tally, device: str, rate: float = 0.02,
                 forks: bool = True,
                 seed: int = 0) -> None:
        self.tally, self.device, self.rate, self.seed = tally, device, rate, seed
        self.cases = cases
        self._policy = worlds.current().policy
        self._flaky: list[Flaky] = []
        self._children = [c for c in cases if c.op.name in FORK_OPS and c.device == "cpu"]
        self.no_forks = "" if forks else "not asked for"
        self._steps: tuple[Callable[[int], None], ...] = (
            self._strict, self._fork, self._locked, self._pressure, self._denied, self._kernels,
            self._learning, self._threads, self._little_memory, self._forgotten)

    def __len__(self) -> int:
        return len(self._steps)

    def do(self, i: int) -> None:
        try:
            self._steps[i % len(self._steps)](i)
        # what a program may do at any time must work at any time
        except FAULTS as e:
            self.tally.fail("disturbances that raised", f"{type(e).__name__}: {e}")

    def start(self) -> None:
        self._kernels(0)

    def quiet(self) -> None:
        """The policy that was in force before the soak, with this soak's own kernels still
        registered."""
        worlds.publish(lambda world: world.replace(policy=self._policy), "soak")

    def end(self) -> None:
        self.quiet()
        self._unregister()

    def _unregister(self) -> None:
        for flaky in self._flaky:
            self.tally.add("planted faults", flaky.failed)
            worlds.unregister(flaky.kernel.id)
        self._flaky.clear()

    def _kernels(self, i: int) -> None:
        """The flaky kernels are taken away and others registered under their names."""
        self._unregister()
        for n, name in enumerate(FLAKY_OPS):
            rate = min(self.rate * RATES[(i // len(self) + n) % len(RATES)], 0.9)
            flaky = Flaky(dispatcher_of(name).op, rate, seed=self.seed + 31 * i + n,
                          jit=name == COMPILING_OP)
            worlds.register(flaky.kernel)
            self._flaky.append(flaky)
        self.tally.add("registrations", len(FLAKY_OPS))

    def _changed(self) -> None:
        self.tally.add("policy changes")

    def _strict(self, i: int) -> None:
        configure(strict_mode=i % 20 < 10, breaker_cooldown=0.2)
        self._changed()

    def _locked(self, i: int) -> None:
        lock("rms_norm", "reference.rms_norm")
        self._changed()

    def _denied(self, i: int) -> None:
        unlock()
        configure(rules=(PolicyRule.of("deny", "torch.*", "layer_norm", {"hidden": "> 40"}),))
        self._changed()

    def _learning(self, i: int) -> None:
        """Kinds of call are learned from here to the end of the cycle, in a store of the soak's
        own."""
        configure(learn=True)
        self._changed()

    def _little_memory(self, i: int) -> None:
        configure(memory_headroom=1 << 16)
        self._changed()

    def _forgotten(self, i: int) -> None:
        worlds.forget()
        self._changed()

    def _threads(self, i: int) -> None:
        """Threads that live for a few calls only."""
        chance = random.Random(i)

        def work() -> None:
            with torch.no_grad():
                for case in chance.sample(self._children, min(3, len(self._children))):
                    call_and_check(case, self.tally)

        short = [threading.Thread(target=work, name="soak-short", daemon=True) for _ in range(4)]
        for thread in short:
            thread.start()
        for thread in short:
            thread.join(60)
        self.tally.add("short threads", len(short))

    def _pressure(self, i: int) -> None:
        """A quarter of what is free, at most PRESSURE_BYTES of a CPU, is taken for a moment."""
        with mmap.mmap(-1, max(min(free_bytes("cpu") // 4, PRESSURE_BYTES),
                               mmap.PAGESIZE)) as taken:
            # it goes back to the system at once, past any allocator
            for at in range(0, len(taken), mmap.PAGESIZE):
                taken[at] = 1
            block = _on_device(self.device) if self.device != "cpu" else None
            time.sleep(0.05)
            del block
        self.tally.add("times of memory pressure")

    def _fork(self, i: int) -> None:
        if self.no_forks:
            return
        self.no_forks = may_not_fork()
        if self.no_forks:
            return
        self.tally.add("forks")
        problem = in_child(lambda: self._child(i), FORK_SECONDS, self.tally.lock)
        if problem:
            self.tally.fail("children that failed", problem)

    def _child(self, i: int) -> None:
        own, chance = Tally(), random.Random(i)
        with torch.no_grad():
            for case in chance.sample(self._children, min(6, len(self._children))):
                call_and_check(case, own)
            configure(strict_mode=True)
            call_and_check(self._children[0], own)
        if own.failures:
            raise AssertionError(own.failures[0])


def _on_device(device: str) -> Tensor | None:
    """A quarter of a device's free memory; None where somebody else was faster."""
    try:
        return torch.ones(max(free_bytes(device) // 4, 1), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


def may_not_fork() -> str:
    """Why this process must not be forked; "" if it may."""
    if not hasattr(os, "fork"):
        return "this system does not fork"
    used = [kind for kind in ("cuda", "xpu") if hasattr(torch, kind)
            and getattr(torch, kind).is_initialized()]
    return f"{used[0]} is in use: a forked process could not use it" if used else ""


def in_child(work: Callable[[], None], seconds: float, lock: AbstractContextManager[Any]
             | None = None) -> str:
    """Run `work` in a forked child; what went wrong there, "" if nothing. A child that hangs is
    killed.

    `held` is a lock that the child needs: taken around the fork, no thread that is gone holds it
    there.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings(), lock or nullcontext():
        # a fork of a process with threads is the point here
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)       # the parent ends in its own time
            torch.set_num_threads(1)           # torch's own thread pool does not survive a fork
            work()
            status = 0
        except BaseException:                  # told to the parent, whatever it is
            os.write(writer, traceback.format_exc(limit=-3).encode()[-4000:])
        finally:
            os._exit(status)
    os.close(writer)
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return ("" if code == 0
                        else f"exit {code}: "
                             f"{os.read(reader, 4000).decode(errors='replace').strip()}")
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"the child did not end within {seconds:g} s"
    finally:
        os.close(reader)


def other_breakers() -> list[str]:
    """Kernels out of service that no fault was planted in."""
    return sorted(name for name in worlds.current().health if not name.startswith("soak"))


