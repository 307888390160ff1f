"""What happens around the calls of a soak: policy changes, forks, memory pressure, kernels that
fail. Each is done by the one thread that also takes the samples.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..machine.faults import FAULTS
from ..machine.memory import free_bytes
from ..operate.inspection import dispatcher_of
from ..selection.policy import PolicyRule
from ..world import snapshot as worlds
from ..world.settings import configure, lock, unlock
from .soak_load import Case, Flaky, Tally, call_and_check

# one kernel of each of these operations fails now and then
FLAKY_OPS = ("rms_norm", "attention", "linear", "add_rms_norm")
# times the share asked for: below and above what opens a breaker
RATES = (0.5, 2.5, 15.0)
# its planted kernel must be compiled first, in the background
COMPILING_OP = "add_rms_norm"
FORK_OPS = ("rms_norm", "layer_norm", "rope")
PRESSURE_BYTES = 256 << 20
FORK_SECONDS = 60.0


class Disturbances:
    """Everything that is not a call: `do(i)` does the i-th, `quiet()` restores the policy."""

    def __init__(self, cases: Sequence[Case], tally: Tally, device: str, rate: float = 0.02,
                 forks: bool = True, seed: int = 0) -> None:
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
        """Restores the policy in force before the soak, with the soak's own kernels registered."""
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
        """Unregisters the flaky kernels and registers others under their names."""
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
        """Kinds of call are learned until the end of the cycle, in the soak's own store."""
        configure(learn=True)
        self._changed()

    def _little_memory(self, i: int) -> None:
        # less than some kernels of an operation take, never less than all of them
        configure(memory_headroom=1 << 18)
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
        """Takes a quarter of the free memory for a moment, of a CPU at most PRESSURE_BYTES."""
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
    """Allocates a quarter of a device's free memory; None where another process was faster."""
    try:
        return torch.ones(max(free_bytes(device) // 4, 1), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


def may_not_fork() -> str:
    """Returns why this process must not be forked; "" if it may."""
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
