"""One sleeping thread for everything that happens by itself, so that the hot path never reads a clock.

It sleeps until the world's next deadline (a time-boxed policy, a cooling breaker, the cache's time to
live, the next look at the policy file) and starts only when there is one.
"""

from __future__ import annotations

import os
import threading
import time

from . import world as worlds
from .world import World

_wake = threading.Condition()
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
    while True:
        with _wake:
            if _deadline is None:
                _thread = None
                return
            wait = _deadline - time.monotonic()
            if wait > 0:
                _wake.wait(min(wait, threading.TIMEOUT_MAX))
                continue
            _deadline = None
        worlds.pass_time(time.monotonic())
        worlds.consult(follow)


def due(now: float) -> bool:
    return _deadline is not None and now >= _deadline


def _after_fork() -> None:
    global _wake, _thread
    _wake = threading.Condition()
    _thread = None                              # threads do not survive a fork; the next world starts it anew
    if worlds.exists():
        worlds.consult(follow)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
