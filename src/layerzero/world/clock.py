"""One sleeping thread for everything that depends on time, so that the hot path never reads a
clock.

It sleeps until the world's next deadline (a time-boxed policy, a cooling breaker, the cache's time
to live, the next check of the policy file) and starts only when there is one.
"""

from __future__ import annotations

import os
import threading
import time

from ..machine import locks
from . import events
from . import snapshot as worlds
from .snapshot import World

RETRY_SECONDS = 1.0                            # after an error

_wake = locks.condition()
_thread: threading.Thread | None = None
_deadline: float | None = None


def schedule(world: World) -> None:
    """Wakes the thread at the next deadline of `world`. Called with every new world."""
    global _deadline, _thread
    deadline = world.next_deadline
    with _wake:
        _deadline = deadline
        if deadline is None:
            return
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="layerzero-clock", daemon=True)
            _thread.start()
        else:
            _wake.notify()


def _run() -> None:
    global _deadline, _thread
    events.mark_background_thread()
    self_thread = threading.current_thread()
    while True:
        with _wake:
            # an interrupt hit its start, and another thread took over
            if _thread is not self_thread:
                return
            if _deadline is None:
                _thread = None
                return
            wait = _deadline - time.monotonic()
            if wait > 0:
                _wake.wait(min(wait, threading.TIMEOUT_MAX))
                continue
            _deadline = None
        try:
            worlds.apply_deadlines(time.monotonic())
            worlds.call_with_current(schedule)
        except events.ANY_ERROR as e:          # the clock must survive any error
            events.warn("the clock: %s: %s; it goes on in %g s", type(e).__name__, e, RETRY_SECONDS)
            with _wake:
                if _deadline is None:
                    _deadline = time.monotonic() + RETRY_SECONDS


def due(now: float) -> bool:
    deadline = _deadline                       # read once: another thread may change it
    return deadline is not None and now >= deadline


def _after_fork() -> None:
    global _wake, _thread
    _wake = locks.condition()
    # threads do not survive a fork; schedule() starts it again
    _thread = None
    if worlds.exists():
        worlds.call_with_current(schedule)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
