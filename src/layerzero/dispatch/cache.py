"""The remembered choices: for each key the entry to run. A hit takes no lock and reads no clock.

One plain dict per op and world: reading it is atomic. Publishing a world gives every op a new dict,
which is the invalidation. Writers share a lock; a key that several threads miss at once is selected
once (single flight). When the dict is full, a sweep drops what was not used since the last sweep
(second chance: LRU without bookkeeping on a hit).
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Hashable
from types import FrameType
from typing import Any

from ..machine import locks
from ..spec.plan import Plan
from .binding import Binding


class Count:
    """Counts the hits of one entry. `tick` counts a hit without a lock; `native` holds the hits of
    the native path, as of when they were last read. After `final` there are no more."""

    __slots__ = ("_ticks", "final", "native", "tick")

    def __init__(self) -> None:
        self._ticks = itertools.count()
        self.tick = self._ticks.__next__
        self.native = 0
        self.final = False

    @property
    def total(self) -> int:
        # "count(7)": reading it any other way advances it
        return int(repr(self._ticks)[6:-1]) + self.native


class Entry:
    """One remembered choice: the plan, its first step bound, and what a hit runs."""

    __slots__ = ("__weakref__", "binding", "count", "has_addresses", "native_hits", "plan",
                 "reads_memory", "recordings", "run", "swept_hits", "tick")

    def __init__(self, plan: Plan, binding: Binding, run: Callable[..., Any],
                 recordings: Any = None, reads_memory: bool = True,
                 has_addresses: bool = True) -> None:
        # set by the native path: a plain slot, so that setting it runs no Python
        self.native_hits = 0
        self.count = Count()
        self.tick = self.count.tick
        self.plan = plan
        self.binding = binding
        self.run = run
        self.has_addresses = has_addresses     # False on xla: its tensors have none
        self.reads_memory = reads_memory       # directly, so that a negated view has no sign there
        self.recordings = recordings           # launches that the native path replays, or None
        # hits at the last sweep; the call that made the entry is not a use of it
        self.swept_hits = 1

    @property
    def hits(self) -> int:
        native = self.native_hits
        if native > self.count.native:
            self.count.native = native
        return self.count.total

    def __del__(self) -> None:
        count = getattr(self, "count", None)   # None if an interrupt came inside __init__
        if count is not None:
            count.native = self.native_hits    # the ledger keeps the count
            count.final = True


class Ledger:
    """Counts the calls of each kernel of an op, over all worlds, exactly.

    A call that found an entry may hit it after its world is gone. So counts live apart from the
    caches, and the count of an entry is final only when the entry itself is gone.
    """

    def __init__(self) -> None:
        self.fallbacks: dict[str, int] = {}    # kernel -> how often it served in another's place
        self._final: dict[str, int] = {}
        self._attempts: dict[str, Count] = {}  # kernel -> how often it was tried in another's place
        self._open: list[tuple[weakref.ref[Entry], str, Count]] = []
        self._limit = 64
        self._lock = locks.Lock()

    def add(self, entry: Entry) -> Entry:
        """Count the hits of this entry from now on."""
        with self._lock:
            self._open.append((weakref.ref(entry), entry.plan.kernel or "", entry.count))
            if len(self._open) > self._limit:
                self._finalize_dead()
                self._limit = 2 * len(self._open) + 64
        return entry

    def _finalize_dead(self) -> None:
        while True:
            records, before = self._open, self._final
            alive, final = [], dict(before)
            for record in records:
                _, kernel, count = record
                # the garbage collector clears the reference before it ends the entry
                if not count.final:
                    alive.append(record)
                else:
                    final[kernel] = final.get(kernel, 0) + count.total
            if self._open is records and self._final is before:
                self._final, self._open = final, alive
                return
            # a finalizer did the same meanwhile: each record counts once

    def count_fallback(self, kernel: str) -> None:
        with self._lock:
            self.fallbacks[kernel] = self.fallbacks.get(kernel, 0) + 1

    def count_attempt(self, kernel: str) -> None:
        count = self._attempts.get(kernel) or self._attempts.setdefault(kernel, Count())
        count.tick()

    def calls(self, kernel: str) -> int:
        """Returns how often a kernel was called so far, chosen or in another's place."""
        total, attempts = self._final.get(kernel, 0), self._attempts.get(kernel)
        # safe without the lock: replaced, never shortened
        for reference, name, count in self._open:
            if name == kernel:
                entry = reference()
                total += count.total if entry is None else entry.hits
        return total if attempts is None else total + attempts.total

    def reassign(self, kernel: str, to: str) -> None:
        """Count a call for `to`, no longer for `kernel`; "": for nobody, it counts by itself."""
        with self._lock:
            self._final[kernel] = self._final.get(kernel, 0) - 1
            if to:
                self._final[to] = self._final.get(to, 0) + 1

    def keep_only(self, kernels: Collection[str]) -> None:
        """Forget the counts of kernels that were unregistered."""
        with self._lock:
            for counted in (self.fallbacks, self._final, self._attempts):
                for kernel in [k for k in list(counted) if k not in kernels]:
                    del counted[kernel]  # type: ignore[attr-defined]
            self._open = [record for record in self._open if record[1] in kernels]

    def totals(self) -> dict[str, int]:
        with self._lock:
            self._finalize_dead()
            total = dict(self._final)
            for reference, kernel, count in self._open:
                entry = reference()
                total[kernel] = total.get(kernel, 0) + (count.total if entry is None
                                                        else entry.hits)
        return total


class _Flight:
    """An entry that one thread makes and others wait for; an interrupt may end that thread."""

    __slots__ = ("_frame", "_latch", "entry", "error", "owner")

    def __init__(self, frame: FrameType) -> None:
        self._frame: FrameType | None = frame
        # Locked until the flight ends. Unlike an Event it is held in no bytecode, so that a signal
        # handler that runs while this thread waits may itself wait for it.
        self._latch = threading.Lock()
        self._latch.acquire()
        self.owner = threading.get_ident()
        self.entry: Entry | None = None
        self.error: BaseException | None = None

    @property
    def is_under_way(self) -> bool:
        frame = self._frame
        return frame is not None and locks.is_running(frame, self.owner)

    def wait(self, seconds: float) -> bool:
        ended = self._latch.acquire(timeout=seconds)
        if ended:
            self._latch.release()
        return ended

    def end(self) -> None:
        self._frame = None
        self._latch.release()


class OpCache:
    """The remembered choices of one op in one world."""

    def __init__(self, size: int, on_evict: Callable[[int], None] = lambda n: None) -> None:
        self.size = size
        self.table: dict[Hashable, Entry] = {}
        self._flights: dict[Hashable, _Flight] = {}
        self._lock = locks.Lock()
        self._on_evict = on_evict

    def obtain(self, key: Hashable, make: Callable[[], Entry]) -> Entry:
        """Return the entry for `key`; one thread makes it while the others wait."""
        while True:
            new = _Flight(sys._getframe())
            with self._lock:
                entry = self.table.get(key)
                if entry is not None:
                    return entry
                flight = self._flights.setdefault(key, new)
            if flight is new:
                return self._make(key, flight, make)
            if flight.owner == new.owner and flight.is_under_way:
                return make()                  # a kernel that calls its own op while it loads
            if not locks.holds_no_lock():
                return make()                  # that flight may wait for what this thread holds
            while not flight.wait(locks.POLL_SECONDS) and flight.is_under_way:
                pass
            self._remove(key, flight)          # also a flight that an interrupt left behind
            if flight.entry is not None:
                return flight.entry
            if isinstance(flight.error, Exception):
                # not an interrupt, which is for the thread that got it
                raise flight.error

    def _make(self, key: Hashable, flight: _Flight, make: Callable[[], Entry]) -> Entry:
        evicted = 0
        with locks.DeferEvents():              # events are emitted once nobody waits
            try:
                entry = make()
                evicted = self._insert(key, entry)
                flight.entry = entry
            # not handled here: handed to the waiting threads as well
            except BaseException as e:
                flight.error = e
                raise
            finally:
                self._remove(key, flight)
                flight.end()
        if evicted:
            self._on_evict(evicted)
        return entry

    def _remove(self, key: Hashable, flight: _Flight) -> None:
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]

    def _insert(self, key: Hashable, entry: Entry) -> int:
        """Add an entry; return how many others were evicted."""
        evicted = 0
        with self._lock:
            if len(self.table) >= self.size:
                evicted = self._sweep()
            self.table[key] = entry
        return evicted

    def _sweep(self) -> int:
        """Drop the entries unused since the last sweep; if all were used, the oldest half."""
        idle = [k for k, e in self.table.items() if e.hits == e.swept_hits]
        if len(idle) < max(len(self.table) // 4, 1):
            idle = list(self.table)[:max(len(self.table) // 2, 1)]
        for k in idle:
            del self.table[k]
        for e in self.table.values():
            e.swept_hits = e.hits
        return len(idle)

    def after_fork(self) -> None:
        """Runs in a forked child: the threads that were making entries are gone."""
        self._flights = {}
