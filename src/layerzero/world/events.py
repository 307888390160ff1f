"""Where events go: the log, the counters, and whoever subscribed. Never on the path of a hit.

A subscriber is called by the thread in which the event happened, after that thread has given back every lock of
ours. Whatever it raises ends here, with a line in the log; only the user's own Ctrl-C goes on. Events of our
background threads are handed to a thread of their own, so that a subscriber which blocks stops none of them. What
a subscriber's own calls cause is not told to it again.
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
    StoreTrouble,
)
from . import redaction

log = logging.getLogger("layerzero")
log.addFilter(redaction.LogFilter())
Sink = Callable[[Event], None]

# What a subscriber or a log handler may raise: SystemExit, a KeyboardInterrupt of its own, a panic of Rust.
ANYTHING: tuple[type[BaseException], ...] = (BaseException,)
PATIENCE = 1.0                                 # seconds that a background thread waits for its subscribers
MOST_WAITING = 1024                            # events of background threads; the oldest of more are dropped
LINES_PER_SECOND = 5                           # of one event, op and kernel; the others are only counted
MOST_KINDS = 4096                              # (event, op, kernel) that are counted one by one
OTHERS = "(others)"                            # in place of a kernel: those beyond

_sinks: tuple[Sink, ...] = ()
_wanting_reasons: tuple[Sink, ...] = ()        # those of them that want to know why the others were not chosen
_recent: deque[tuple[float, Event]] = deque(maxlen=512)        # (time, event), as they were redacted then
_counts: dict[tuple[str, str, str], itertools.count[int]] = {}
_lines: dict[tuple[str, str, str], list[float]] = {}   # when its second began, lines in it, left out since
_failures: itertools.count[int] = itertools.count(1)
_lock = locks.Lock()
_here = threading.local()          # .background: is this thread one of ours; .busy: subscribers that caused this
_LOUD = (BackendUnavailable, CertificateRefused, Fallback, FileRefused, HealthChanged, KernelRefused, PolicyRejected,
         StoreTrouble)


def emit(event: Event) -> None:
    event = redaction.event(event)
    _recent.append((time.time(), event))
    key = event.name, event.op, event.kernel
    ticks = _counts.get(key)
    if ticks is None:                          # kernels without end: the later ones are counted together
        kept = key if len(_counts) < MOST_KINDS else (event.name, event.op, OTHERS)
        ticks = _counts.setdefault(kept, itertools.count())
    next(ticks)
    loud = isinstance(event, _LOUD)
    if _sinks or log.isEnabledFor(logging.WARNING if loud else logging.DEBUG):
        busy = getattr(_here, "busy", ())
        locks.when_free(lambda: _tell(event, key, loud, busy))


def _tell(event: Event, key: tuple[str, str, str], loud: bool, busy: tuple[Sink, ...]) -> None:
    _guarded(_write, event, key, loud)
    sinks = tuple(sink for sink in _sinks if sink not in busy)
    if not sinks:
        return
    if getattr(_here, "background", False):
        _behind.add(lambda: _deliver(event, sinks, busy))
        if not locks.more_wait():              # of what happened at once, the first need not be told before the last
            _behind.settle()
    else:
        _behind.settle()                       # what happened before is told before
        _deliver(event, sinks, busy)


def _deliver(event: Event, sinks: tuple[Sink, ...], busy: tuple[Sink, ...]) -> None:
    for sink in sinks:
        before = getattr(_here, "busy", ())
        _here.busy = (*busy, sink)
        try:
            _guarded(sink, event)
        finally:
            _here.busy = before


def _guarded(sink: Callable[..., None], *given: Any) -> None:
    try:
        sink(*given)
    except ANYTHING as e:
        if is_users_interrupt(e):
            raise
        times = next(_failures)
        if times & (times - 1) == 0:           # the 1st, 2nd, 4th, 8th ...: it may fail with every event
            warn("event sink %r failed: %s: %s (%d failures so far)", sink, type(e).__name__, e, times)


def warn(text: str, *given: object) -> None:
    """A line in the log, from where nothing may be raised."""
    try:
        log.warning(text, *given)
    except ANYTHING as e:                      # a log handler, or no stack is left: there is nobody to tell
        if is_users_interrupt(e):
            raise


def is_users_interrupt(error: BaseException) -> bool:
    """Is it Ctrl-C, and not a KeyboardInterrupt that the subscriber raised itself?

    Python's own handler raises between two instructions; a `raise` is an instruction, and counts where it stands in
    a handler for SIGINT.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
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
            return not _raised(trace.tb_frame, trace.tb_lasti)
        trace = trace.tb_next
    return True


def _raised(frame: FrameType, at: int) -> bool:
    return dis.opname[frame.f_code.co_code[at]] in ("RAISE_VARARGS", "RERAISE")


# the log

def _write(event: Event, key: tuple[str, str, str], loud: bool) -> None:
    level = logging.WARNING if loud else logging.DEBUG
    if log.isEnabledFor(level):
        left_out = _left_out(key)
        if left_out is not None:
            more = f" ({left_out} more like it were not logged)" if left_out else ""
            log.log(level, "%s%s", describe(event), more)


def _left_out(key: tuple[str, str, str]) -> int | None:
    """How many lines like this were left out before it; None: this one is left out too. Need not be exact."""
    now = time.monotonic()
    line = _lines.get(key)
    if line is None:
        if len(_lines) >= MOST_KINDS:
            _lines.clear()
        line = _lines[key] = [now, 0, 0]
    if now - line[0] >= 1.0:
        line[0], line[1] = now, 0
    line[1] += 1
    if line[1] > LINES_PER_SECOND:
        line[2] += 1
        return None
    left_out, line[2] = int(line[2]), 0
    return left_out


def describe(event: Event) -> str:
    parts = [f"{k}={v}" for k, v in event.log_fields().items() if v not in ("", None, ())]
    return f"{event.name} " + " ".join(parts)


# the subscribers

def wants_reasons() -> bool:
    """Would anyone see why the kernels that were not chosen were not? To find it out takes a while."""
    return bool(_wanting_reasons) or log.isEnabledFor(logging.DEBUG)


def subscribe(sink: Sink, reasons: bool = True) -> Callable[[], None]:
    """Call `sink` with every event from now on; returns a function that stops it.

    Without `reasons`, a choice does not say why the others were rejected, and takes less time.
    """
    global _sinks, _wanting_reasons

    def forward(event: Event) -> None:         # one of its own per subscription, so that each stops alone
        sink(event)

    with _lock:
        _sinks = (*_sinks, forward)
        _wanting_reasons = (*_wanting_reasons, forward) if reasons else _wanting_reasons

    def stop() -> None:
        global _sinks, _wanting_reasons
        with _lock:
            _sinks, _wanting_reasons = (tuple(s for s in sinks if s is not forward)
                                        for sinks in (_sinks, _wanting_reasons))

    return stop


def recent() -> list[tuple[float, Event]]:
    """The last events of this process with their times, oldest first."""
    return list(_recent)


class _Behind:
    """The thread that tells subscribers of what happened in our background threads."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._wake = locks.condition()
        self._todo: deque[Callable[[], None]] = deque(maxlen=MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._done = threading.Event()         # is everything told?
        self._late = False                     # a subscriber has taken longer than anyone waits

    def add(self, deliver: Callable[[], None]) -> None:
        with self._wake:
            if len(self._todo) == MOST_WAITING:
                warn("a subscriber blocks: an event of %d that wait for it is dropped", MOST_WAITING)
            self._todo.append(deliver)
            self._done.clear()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="layerzero-events", daemon=True)
                self._thread.start()
            self._wake.notify()

    def settle(self) -> None:
        """Wait a moment until all are told: events are seen in order, unless a subscriber blocks."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not self._late:
            self._late = not self._done.wait(PATIENCE) and thread.is_alive()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._wake:
                if not self._todo:
                    self._done.set()
                    self._late = False
                    self._wake.wait(PATIENCE)
                if self._thread is not me:
                    return
                if not self._todo:
                    self._thread = None
                    return
                deliver = self._todo.popleft()
            deliver()


_behind = _Behind()


def in_background() -> None:
    """This thread is one of ours: it never waits long for a subscriber."""
    _here.background = True


# the counters

def counts() -> dict[tuple[str, str, str], int]:
    """(event, op, kernel) -> how often."""
    return {key: int(repr(ticks)[6:-1]) for key, ticks in list(_counts.items())}


def reset() -> None:
    global _failures
    _failures = itertools.count(1)
    _recent.clear()
    _counts.clear()
    _lines.clear()


def _after_fork() -> None:
    _behind.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
