"""The workers of one library: started once, lent to one call at a time, started again with a
growing delay after each death.

A worker starts in seconds, as a library does when it is imported, so a call never waits for one
that died: it is told WorkerStarting, the next kernel of its plan serves, and a thread brings the
worker back.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..faults import WorkerFault, WorkerLost, WorkerStarting, WorkerTimeout
from ..loading import LoadFailed
from .process import START_SECONDS, Limits, Worker

FIRST_DELAY, MAX_DELAY = 0.05, 60.0            # seconds until a dead worker is started again


class Pool:
    """Workers of one interpreter for one library; `limits` and `size` ask the policy in force."""

    def __init__(self, name: str, python: str, limits: Callable[[], Limits],
                 size: Callable[[], int]) -> None:
        self.name, self.python, self.limits, self.size = name, python, limits, size
        self.kernels: dict[str, dict[str, Any]] = {}       # loaded again by every new worker
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.workers: list[Worker] = []
        self.starting = 0
        self.deaths, self.not_before, self.why = 0, 0.0, ""
        self.closed = False

    def load(self, declared: dict[str, Any]) -> tuple[str, ...]:
        """Loads a kernel in every worker, after starting the first; returns its parameters."""
        worker = self._take(start=True)
        try:
            accepted = worker.load(declared)
            with self.lock:
                self.kernels[declared["id"]] = declared
        except LoadFailed:
            raise
        except WorkerFault as e:
            self._lost(worker, e)
            raise
        finally:
            if worker.alive:
                self.idle.put(worker)
        return accepted

    def call(self, kernel: str, values: Sequence[Any], in_place: Sequence[int]) -> Any:
        try:
            worker = self.idle.get_nowait()
        except queue.Empty:
            worker = self._take(start=not self.workers and not self.deaths)
        try:
            result = worker.call(kernel, values, in_place, self.limits().seconds)
        except (WorkerLost, WorkerTimeout) as e:
            self._lost(worker, e)
            raise
        except BaseException as e:             # answered, or an interrupt that killed it
            if worker.alive:
                self.idle.put(worker)
            else:
                self._lost(worker, e)
            raise
        self.idle.put(worker)
        self.deaths = 0
        return result

    def _take(self, start: bool) -> Worker:
        """Returns a worker that is not busy, after starting one if there may be more."""
        seconds = START_SECONDS if start else self.limits().seconds
        try:
            return self.idle.get_nowait()
        except queue.Empty:
            pass
        with self.lock:
            more = len(self.workers) + self.starting < self.size()
            none = not self.workers
            self.starting += more
        if more and (start and none):
            return self._start()
        if more:
            self._start_later()
        if none and not start:
            raise WorkerStarting(self.name, self.why, self.wait)
        try:
            return self.idle.get(timeout=seconds)
        except queue.Empty:
            raise WorkerTimeout(self.name, seconds) from None

    def wait(self) -> None:
        """Waits until a worker serves."""
        self.idle.put(self._take(start=True))

    def _start(self) -> Worker:
        """Starts a worker that was counted in `starting`, and has it load what the others have."""
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
            self._note(str(e))
            if worker is not None:
                worker.kill()
            raise
        finally:
            with self.lock:
                self.starting -= 1

    def _start_later(self) -> None:
        def bring_back() -> None:
            time.sleep(max(self.not_before - time.monotonic(), 0.0))
            # a failure is noted; the next call tries again after the delay
            with suppress(WorkerFault, LoadFailed, MemoryError, OSError):
                self.idle.put(self._start())

        threading.Thread(target=bring_back, name="layerzero-worker", daemon=True).start()

    def _note(self, why: str) -> None:
        self.deaths += 1
        self.why = why
        self.not_before = time.monotonic() + min(FIRST_DELAY * 2 ** (self.deaths - 1), MAX_DELAY)

    def _lost(self, worker: Worker, why: BaseException) -> None:
        with self.lock:
            if worker in self.workers:
                self.workers.remove(worker)
            self._note(str(why))
            more = not self.closed and len(self.workers) + self.starting < self.size()
            self.starting += more
        worker.kill()
        if more:
            self._start_later()

    def close(self) -> None:
        with self.lock:
            self.closed, workers, self.workers = True, self.workers, []
        for worker in workers:
            worker.stop()

    def abandon(self) -> None:
        """Runs in a forked child: it starts workers of its own."""
        for worker in self.workers:
            worker.abandon()
        self.lock = threading.Lock()
        self.reset()


_pools: dict[tuple[str, str], Pool] = {}


def pool_of(name: str, python: str, limits: Callable[[], Limits],
            size: Callable[[], int]) -> Pool:
    """Returns the pool of a library and an interpreter; there is one of each pair."""
    pool = _pools.get((name, python))
    if pool is None or pool.closed:
        pool = _pools[name, python] = Pool(name, python, limits, size)
    return pool


def close_others(used: set[tuple[str, str]]) -> None:
    """Ends the workers of all pools but these."""
    for key in [key for key in _pools if key not in used]:
        _pools.pop(key).close()


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
