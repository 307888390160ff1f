"""Delivers events to the log, the counters and subscribers. Never runs on a cache hit.

A subscriber is called on the thread in which the event happened, after that thread has released all
our locks. Whatever it raises is logged and dropped; only the user's own Ctrl-C propagates. Events
of our background threads are delivered by a separate thread, so that a blocking subscriber stops
none of them. A subscriber does not receive events that its own calls cause.
"""

from __future__ import annotations

import dis
import itertools
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, FunctionType, MethodType
from typing import Any

from ..machine import locks
from ..spec.event import (
    BackendUnavailable,
    CertificateRefused,
    Event,
    Fallback,
    FileRefused,
    HealthChanged,
    KernelRefused,
    PolicyRejected,
    RanksDiffer,
    StoreTrouble,
)
from ..spec.reason import Code
from . import redaction

log = logging.getLogger("layerzero")
log.addFilter(redaction.LogFilter())
if log.level == logging.NOTSET:                # not set by the program before
    log.setLevel(logging.WARNING)
_chosen_level = ("", log.level)                # the policy's log_level, and the level without it
Sink = Callable[[Event], None]

# What a subscriber or log handler may raise: SystemExit, KeyboardInterrupt, a Rust panic.
ANY_ERROR: tuple[type[BaseException], ...] = (BaseException,)
FLUSH_SECONDS = 1.0                            # that a background thread waits for subscribers
# events of background threads; beyond it the oldest is dropped
MAX_QUEUED = 1024
# per (event, op, kernel); the others are only counted
LINES_PER_SECOND = 5
MAX_COUNTERS = 4096                            # (event, op, kernel) that are counted separately
OVERFLOW = "(others)"                          # the kernel of counters beyond MAX_COUNTERS

# Changed by append and remove only, so that no lock is needed, not even against a finalizer.
_sinks: list[Sink] = []
_wanting_reasons: list[Sink] = []              # those that want the reasons of rejected kernels
_recent: deque[tuple[float, Event]] = deque(maxlen=512)        # (time, redacted event)
_counts: dict[tuple[str, str, str], itertools.count[int]] = {}
# [start of the second, lines in it, suppressed since]
_lines: dict[tuple[str, str, str], list[float]] = {}
_failures: itertools.count[int] = itertools.count(1)
# .background: is it our thread; .callers: subscribers that are running
_local = threading.local()
_WARNINGS = (BackendUnavailable, CertificateRefused, Fallback, FileRefused, HealthChanged,
             KernelRefused, PolicyRejected, RanksDiffer, StoreTrouble)


def use_log_level(name: str) -> None:
    """Applies the policy's log_level ("" for none) where it changed, else the program's stays."""
    global _chosen_level
    chosen, before = _chosen_level
    if name != chosen:
        _chosen_level = name, before if chosen else log.level
        log.setLevel(name.upper() if name else before)


def emit(event: Event) -> None:
    event = redaction.event(event)
    _recent.append((time.time(), event))
    key = event.name, event.op, event.kernel
    counter = _counts.get(key)
    if counter is None:                        # bounded, should kernel names never end
        counted_as = key if len(_counts) < MAX_COUNTERS else (event.name, event.op, OVERFLOW)
        counter = _counts.setdefault(counted_as, itertools.count())
    next(counter)
    level = _level(event)
    if _sinks or log.isEnabledFor(level):
        callers = getattr(_local, "callers", ())
        locks.run_when_unlocked(lambda: _route(event, key, level, callers))


def _level(event: Event) -> int:
    # A kernel that is still being compiled is no trouble: it will serve in a moment.
    if isinstance(event, Fallback) and event.reason and event.reason.code is Code.JIT_NOT_WARMED:
        return logging.INFO
    return logging.WARNING if isinstance(event, _WARNINGS) else logging.DEBUG


def _route(event: Event, key: tuple[str, str, str], level: int, callers: tuple[Sink, ...]) -> None:
    _call_safely(_write_log, event, key, level)
    sinks = tuple(sink for sink in list(_sinks) if sink not in callers)
    if not sinks:
        return
    if getattr(_local, "background", False):
        _delivery.add(lambda: _deliver(event, sinks, callers))
        if not locks.has_deferred():           # flush once per batch
            _delivery.flush()
    else:
        _delivery.flush()                      # keeps the order of events
        _deliver(event, sinks, callers)


def _deliver(event: Event, sinks: tuple[Sink, ...], callers: tuple[Sink, ...]) -> None:
    for sink in sinks:
        outer = getattr(_local, "callers", ())
        _local.callers = (*callers, sink)
        try:
            _call_safely(sink, event)
        finally:
            _local.callers = outer


def _call_safely(sink: Callable[..., None], *args: Any) -> None:
    try:
        sink(*args)
    except ANY_ERROR as e:
        if is_users_interrupt(e):
            raise
        failures = next(_failures)
        # the 1st, 2nd, 4th, 8th ...: it may fail at every event
        if failures & (failures - 1) == 0:
            warn("event sink %r failed: %s: %s (%d failures so far)", sink, type(e).__name__, e,
                 failures)


def warn(text: str, *args: object) -> None:
    """Logs a warning where nothing may be raised."""
    try:
        log.warning(text, *args)
    except ANY_ERROR as e:                     # a broken log handler, or no stack left
        if is_users_interrupt(e):
            raise


def is_users_interrupt(error: BaseException) -> bool:
    """Is it Ctrl-C, and not a KeyboardInterrupt that the subscriber raised itself?

    Python's own handler raises between two instructions. A `raise` statement is the user's only if
    it is inside the handler for SIGINT.
    """
    if (not isinstance(error, KeyboardInterrupt)
        or threading.current_thread() is not threading.main_thread()):
        return False
    handler: Any = signal.getsignal(signal.SIGINT)
    while isinstance(handler, MethodType):
        handler = handler.__func__
    code = handler.__code__ if isinstance(handler, FunctionType) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return True
        if trace.tb_next is None:
            return not _is_raise(trace.tb_frame, trace.tb_lasti)
        trace = trace.tb_next
    return True


def _is_raise(frame: FrameType, at: int) -> bool:
    return dis.opname[frame.f_code.co_code[at]] in ("RAISE_VARARGS", "RERAISE")


# the log

def _write_log(event: Event, key: tuple[str, str, str], level: int) -> None:
    if log.isEnabledFor(level):
        suppressed = _count_suppressed(key)
        if suppressed is not None:
            more = f" ({suppressed} more like it were not logged)" if suppressed else ""
            log.log(level, "%s%s", describe(event), more)


def _count_suppressed(key: tuple[str, str, str]) -> int | None:
    """Returns how many such lines were suppressed before, about; None if this one is too."""
    now = time.monotonic()
    line = _lines.get(key)
    if line is None:
        if len(_lines) >= MAX_COUNTERS:
            _lines.clear()
        line = _lines[key] = [now, 0, 0]
    if now - line[0] >= 1.0:
        line[0], line[1] = now, 0
    line[1] += 1
    if line[1] > LINES_PER_SECOND:
        line[2] += 1
        return None
    suppressed, line[2] = int(line[2]), 0
    return suppressed


def describe(event: Event) -> str:
    parts = [f"{k}={v}" for k, v in event.log_fields().items() if v not in ("", None, ())]
    return f"{event.name} " + " ".join(parts)


# the subscribers

def wants_reasons() -> bool:
    """Does anyone want the reasons why kernels were rejected? Collecting them takes time."""
    return bool(_wanting_reasons) or log.isEnabledFor(logging.DEBUG)


def subscribe(sink: Sink, reasons: bool = True) -> Callable[[], None]:
    """Calls `sink` with every event from now on; returns a function that stops it.

    Without `reasons`, a selection does not report why the others were rejected, and takes less
    time.
    """
    def forward(event: Event) -> None:         # one per subscription: a sink may subscribe twice
        sink(event)

    subscribed = [_sinks, _wanting_reasons] if reasons else [_sinks]
    for sinks in subscribed:
        sinks.append(forward)

    def stop() -> None:
        for sinks in subscribed:
            with suppress(ValueError):         # stopped before
                sinks.remove(forward)

    return stop


def recent() -> list[tuple[float, Event]]:
    """Returns the last events of this process with their times, oldest first."""
    return list(_recent)


class _DeliveryThread:
    """The thread that delivers the events of our background threads."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._wake = locks.condition()
        self._queue: deque[Callable[[], None]] = deque(maxlen=MAX_QUEUED)
        self._thread: threading.Thread | None = None
        self._drained = threading.Event()      # is the queue empty?
        self._blocked = False                  # a subscriber took longer than FLUSH_SECONDS

    def add(self, deliver: Callable[[], None]) -> None:
        with self._wake:
            if len(self._queue) == MAX_QUEUED:
                warn("a subscriber blocks: an event of %d that wait for it is dropped", MAX_QUEUED)
            self._queue.append(deliver)
            self._drained.clear()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="layerzero-events",
                                                daemon=True)
                self._thread.start()
            self._wake.notify()

    def flush(self) -> None:
        """Waits up to FLUSH_SECONDS for delivery in order, unless a subscriber blocks."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not self._blocked:
            self._blocked = not self._drained.wait(FLUSH_SECONDS) and thread.is_alive()

    def _run(self) -> None:
        self_thread = threading.current_thread()
        while True:
            with self._wake:
                if not self._queue:
                    self._drained.set()
                    self._blocked = False
                    self._wake.wait(FLUSH_SECONDS)
                if self._thread is not self_thread:
                    return
                if not self._queue:
                    self._thread = None
                    return
                deliver = self._queue.popleft()
            deliver()


_delivery = _DeliveryThread()


def mark_background_thread() -> None:
    """Marks this thread as ours: it never waits long for a subscriber."""
    _local.background = True


# the counters

def counts() -> dict[tuple[str, str, str], int]:
    """Returns (event, op, kernel) -> count."""
    return {key: int(repr(counter)[6:-1]) for key, counter in _counts.copy().items()}


def reset() -> None:
    global _failures
    _failures = itertools.count(1)
    _recent.clear()
    _counts.clear()
    _lines.clear()


def _after_fork() -> None:
    _delivery.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
