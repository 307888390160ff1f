"""The workers of one library: started once, lent to one call at a time, started again with a
growing delay after each death.

Ctrl-C may come between any two instructions, also between taking a worker and the block that gives
it back. So the pool knows which frame has which worker, and which frame or thread starts one: what
nobody runs any more is lost, and whoever waits for a worker replaces it.

A worker starts in seconds, as a library does when it is imported, so a call never waits for one
that died: it is told WorkerStarting, the next kernel of its plan serves, and a thread brings the
worker back.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

from .. import locks
from ..faults import WorkerFault, WorkerLost, WorkerStarting, WorkerTimeout
from ..loading import LoadFailed
from .process import START_SECONDS, Limits, Worker

FIRST_DELAY, MAX_DELAY = 0.05, 60.0            # seconds until a dead worker is started again
POLL_SECONDS = 0.25                            # how often who waits looks for lost workers


class Holder(NamedTuple):
    """The frame of a thread that has a worker, or starts one."""

    frame: FrameType
    thread: int

    def is_alive(self) -> bool:
        return locks.is_running(self.frame, self.thread)


class Pool:
    """Workers of one interpreter for one library; `limits` and `size` ask the policy in force."""

    def __init__(self, name: str, python: str, limits: Callable[[], Limits],
                 size: Callable[[], int]) -> None:
        self.name, self.python, self.limits, self.size = name, python, limits, size
        self.kernels: dict[str, dict[str, Any]] = {}       # loaded again by every new worker
        self.lock = locks.Lock()
        self.reset()

    def reset(self) -> None:
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.workers: list[Worker] = []
        self.holders: dict[Worker, Holder] = {}            # of those that are not idle
        self.starters: list[Holder | threading.Thread] = []
        self.deaths, self.not_before, self.why = 0, 0.0, ""
        self.closed = False

    @property
    def starting(self) -> int:
        """How many workers are being started."""
        self.starters = [starter for starter in self.starters if starter.is_alive()]
        return len(self.starters)

    def load(self, declared: dict[str, Any]) -> tuple[str, ...]:
        """Loads a kernel in every worker, after starting the first; returns its parameters."""
        worker = self._take(start=True)
        self._hold(worker)
        try:
            accepted = worker.load(declared)
            with self.lock:
                self.kernels[declared["id"]] = declared
        except LoadFailed:
            self._put_back(worker)
            raise
        except BaseException as e:             # an interrupt too
            self._lost(worker, e)
            raise
        self._put_back(worker)
        return accepted

    def call(self, kernel: str, values: Sequence[Any], in_place: Sequence[int]) -> Any:
        try:
            worker = self.idle.get_nowait()
        except queue.Empty:
            worker = self._take(start=not self.workers and not self.deaths)
        self._hold(worker)
        try:
            result = worker.call(kernel, values, in_place, self.limits().seconds)
        except BaseException as e:
            # answered; an interrupt may have left half a message or a block of memory there
            if isinstance(e, Exception) and worker.alive and not isinstance(
                    e, (WorkerLost, WorkerTimeout)):
                self._put_back(worker)
            else:
                self._lost(worker, e)
            raise
        self._put_back(worker)
        self.deaths = 0
        return result

    def _hold(self, worker: Worker) -> None:
        self.holders[worker] = Holder(sys._getframe(1), threading.get_ident())

    def _put_back(self, worker: Worker) -> None:
        self.holders.pop(worker, None)
        self.idle.put(worker)

    def _take(self, start: bool) -> Worker:
        """Returns a worker that is not busy, after starting one if there may be more."""
        end = time.monotonic() + (START_SECONDS if start else self.limits().seconds)
        suspects: list[Worker] = []
        while True:
            try:
                return self.idle.get_nowait()
            except queue.Empty:
                pass
            with self.lock:
                more = len(self.workers) + self.starting < self.size()
                none = not self.workers
                if more and start and none:
                    self.starters.append(Holder(sys._getframe(), threading.get_ident()))
                elif more:
                    self._start_later()
            if more and start and none:
                return self._start()
            if none and not start:
                raise WorkerStarting(self.name, self.why, self.wait)
            try:
                return self.idle.get(timeout=min(POLL_SECONDS, max(end - time.monotonic(), 0.0)))
            except queue.Empty:
                if time.monotonic() >= end:
                    raise WorkerTimeout(self.name,
                                        START_SECONDS if start else self.limits().seconds) from None
            suspects = self._drop_lost(suspects)

    def _drop_lost(self, suspects: list[Worker]) -> list[Worker]:
        """Replaces the suspects that still nobody has, and returns those that nobody has now: one
        that was just taken or put back is none the next time."""
        held = {w for w, holder in self.holders.copy().items() if holder.is_alive()}
        lost = [w for w in list(self.workers) if w not in held] if self.idle.empty() else []
        for worker in lost:
            if worker in suspects:
                self._lost(worker, WorkerLost(self.name, "its call was interrupted"))
        return lost

    def wait(self) -> None:
        """Waits until a worker serves."""
        self._put_back(self._take(start=True))

    def _start(self) -> Worker:
        """Starts a worker and has it load what the others have; the caller is a starter."""
        worker = None
        try:
            worker = Worker(self.name, self.python, self.limits())
            for declared in list(self.kernels.values()):
                worker.load(declared)
            with self.lock:
                if self.closed:
                    raise WorkerLost(self.name, "it is no longer needed")
                self.workers.append(worker)
            return worker
        except BaseException as e:             # an interrupt too must leave no process behind
            self._note(e)
            if worker is not None:
                self._remove(worker)
            raise

    def _start_later(self) -> None:
        """Starts a worker on another thread; the caller holds the lock."""
        def bring_back() -> None:
            time.sleep(max(self.not_before - time.monotonic(), 0.0))
            # a failure is noted; the next call tries again after the delay
            with suppress(WorkerFault, LoadFailed, MemoryError, OSError):
                self.idle.put(self._start())

        thread = threading.Thread(target=bring_back, name="layerzero-worker", daemon=True)
        thread.start()
        self.starters.append(thread)

    def _note(self, fault: BaseException) -> None:
        self.deaths += 1
        self.why = fault.why if isinstance(fault, WorkerFault) else str(fault)
        self.not_before = time.monotonic() + min(FIRST_DELAY * 2 ** (self.deaths - 1), MAX_DELAY)

    def _lost(self, worker: Worker, why: BaseException) -> None:
        self._note(why)
        self._remove(worker)
        with self.lock:
            if not self.closed and len(self.workers) + self.starting < self.size():
                self._start_later()

    def _remove(self, worker: Worker) -> None:
        worker.kill()                          # before it is forgotten
        self.holders.pop(worker, None)
        with self.lock:
            if worker in self.workers:
                self.workers.remove(worker)

    def close(self) -> None:
        with self.lock:
            self.closed, workers, self.workers = True, self.workers, []
        for worker in workers:
            worker.stop()

    def abandon(self) -> None:
        """Runs in a forked child: it starts workers of its own."""
        for worker in self.workers:
            worker.abandon()
        self.lock = locks.Lock()
        self.reset()


_pools: dict[tuple[str, str], Pool] = {}


def pool_of(name: str, python: str, limits: Callable[[], Limits], size: Callable[[], int]) -> Pool:
    """Returns the pool of a library and an interpreter; there is one of each pair."""
    pool = _pools.get((name, python))
    if pool is None or pool.closed:
        pool = _pools[name, python] = Pool(name, python, limits, size)
    return pool


def close_others(used: set[tuple[str, str]]) -> None:
    """Ends the workers of all pools but these."""
    for key in [key for key in list(_pools) if key not in used]:
        if (pool := _pools.pop(key, None)) is not None:
            pool.close()


def pools() -> tuple[Pool, ...]:
    return tuple(_pools.values())


def _shut_down() -> None:
    for pool in pools():
        pool.close()


def _abandon() -> None:
    for pool in pools():
        pool.abandon()


atexit.register(_shut_down)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon)
