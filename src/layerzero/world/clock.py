"""One sleeping thread for everything that happens by itself, so that the hot path never reads a clock.

It sleeps until the world's next deadline (a time-boxed policy, a cooling breaker, the cache's time to
live, the next look at the policy file) and starts only when there is one.
"""

from __future__ import annotations

import os
import threading
import time

from ..machine import locks
from . import events
from . import snapshot as worlds
from .snapshot import World

AFTER_TROUBLE = 1.0                            # seconds until it looks again at what could not be done

_wake = locks.condition()
_thread: threading.Thread | None = None
_deadline: float | None = None


def follow(world: World) -> None:
    """Called with every new world: sleep no longer than it wants."""
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
    events.in_background()
    me = threading.current_thread()
    while True:
        with _wake:
            if _thread is not me:              # an interrupt came while it was started, and there is another
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
            worlds.pass_time(time.monotonic())
            worlds.consult(follow)
        except events.ANYTHING as e:           # whatever it is, time goes on
            events.warn("the clock: %s: %s; it goes on in %g s", type(e).__name__, e, AFTER_TROUBLE)
            with _wake:
                if _deadline is None:
                    _deadline = time.monotonic() + AFTER_TROUBLE


def due(now: float) -> bool:
    deadline = _deadline                       # another thread may change it meanwhile
    return deadline is not None and now >= deadline


def _after_fork() -> None:
    global _wake, _thread
    _wake = locks.condition()
    _thread = None                              # threads do not survive a fork; the next world starts it anew
    if worlds.exists():
        worlds.consult(follow)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
