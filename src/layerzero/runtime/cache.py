"""What is remembered: for each key, what to run. A hit takes no lock and reads no clock.

One plain dict per op and world: reading it is atomic. Publishing a world gives every op a new dict,
which is the invalidation. Writers share a lock; a key that several threads miss at once is selected
once (single flight). When the dict is full, a sweep drops what was not used since the last sweep
(second chance: LRU without bookkeeping on a hit).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from typing import Any

from ..spec.plan import Plan
from .binding import Binding


class Entry:
    """One remembered choice. `tick` counts a hit without a lock."""

    __slots__ = ("_counter", "binding", "fallbacks", "native_hits", "plan", "run", "seen", "tick")

    def __init__(self, plan: Plan, binding: Binding, run: Callable[..., Any]) -> None:
        self.plan = plan
        self.binding = binding
        self.run = run
        self._counter = itertools.count()
        self.tick = self._counter.__next__
        self.native_hits = 0
        self.seen = 0
        self.fallbacks: dict[str, int] = {}    # kernel that served instead -> how often

    @property
    def hits(self) -> int:
        return int(self._counter.__reduce__()[1][0]) + self.native_hits


class _Flight:
    __slots__ = ("done", "entry", "error", "owner")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.owner = threading.get_ident()
        self.entry: Entry | None = None
        self.error: BaseException | None = None


class OpCache:
    """The remembered choices of one op in one world."""

    def __init__(self, size: int, on_evict: Callable[[int], None] = lambda n: None) -> None:
        self.size = size
        self.table: dict[Hashable, Entry] = {}
        self.retired: dict[str, int] = {}      # hits of entries that were dropped, by kernel
        self._flights: dict[Hashable, _Flight] = {}
        self._lock = threading.Lock()
        self._on_evict = on_evict

    def obtain(self, key: Hashable, make: Callable[[], Entry]) -> Entry:
        """The entry for `key`; made by one thread while the others wait for it."""
        with self._lock:
            entry = self.table.get(key)
            if entry is not None:
                return entry
            flight = self._flights.get(key)
            leading = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
        if not leading:
            if flight.owner == threading.get_ident():
                return make()                  # a kernel that calls its own op while it loads
            flight.done.wait()
            if flight.error is not None:
                raise flight.error
            assert flight.entry is not None
            return flight.entry
        try:
            entry = flight.entry = make()
            self._insert(key, entry)
            return entry
        except BaseException as e:             # not handled here: handed to the waiting threads as well
            flight.error = e
            raise
        finally:
            with self._lock:
                del self._flights[key]
            flight.done.set()

    def _insert(self, key: Hashable, entry: Entry) -> None:
        evicted = 0
        with self._lock:
            if len(self.table) >= self.size:
                evicted = self._sweep()
            self.table[key] = entry
        if evicted:
            self._on_evict(evicted)

    def _sweep(self) -> int:
        """Drop the entries unused since the last sweep; if all were used, the oldest half."""
        idle = [k for k, e in self.table.items() if e.hits == e.seen]
        if len(idle) < len(self.table) // 4:
            idle = list(self.table)[:max(len(self.table) // 2, 1)]
        for k in idle:
            gone = self.table.pop(k)
            kernel = gone.plan.kernel or ""
            self.retired[kernel] = self.retired.get(kernel, 0) + gone.hits
        for e in self.table.values():
            e.seen = e.hits
        return len(idle)

    def hits(self) -> dict[str, int]:
        """How often each kernel was called from this cache."""
        with self._lock:
            total = dict(self.retired)
            for entry in self.table.values():
                kernel = entry.plan.kernel or ""
                total[kernel] = total.get(kernel, 0) + entry.hits
        return total
