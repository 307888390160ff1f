"""Locks that an interrupt cannot leave held for good, and actions deferred until this thread holds
none.

Ctrl-C may come between any two instructions, also between acquiring a lock and entering the block
that releases it. Such a lock would be held for ever. So a lock here records the frame that acquired
it: a waiting thread checks now and then whether that frame still runs in the thread that owns the
lock. If not, nobody will release it, and the waiting thread replaces it by a new one. The owner
itself never blocks, because every lock is re-entrant.

Events are delivered when no lock is held and no selection is under way that other threads wait for:
a subscriber may call anything, for as long as it likes, and delays nobody but its own caller.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from operator import methodcaller
from types import FrameType, TracebackType
from typing import Any

POLL_SECONDS = 0.05                            # how often a waiting thread checks on the owner

_OWNER = re.compile(r"owner=(\d+)")
_all_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_THREADING = vars(threading)


class _ThreadState(threading.local):
    """Per thread: what it holds, and what it runs once it holds nothing."""

    def __init__(self) -> None:
        self.held: list[FrameType] = []        # frames that hold a lock or are in DeferEvents
        self.deferred: list[Callable[[], None]] = []           # run when `held` is empty
        self.runner: FrameType | None = None   # the frame that runs them


_thread = _ThreadState()


_CALL = methodcaller("__call__")


def current_frame(thread: int) -> FrameType | None:
    """Returns the innermost frame of a thread."""
    if sys.version_info >= (3, 12):
        return sys._current_frames().get(thread)
    # Before 3.11.9 a collection inside _current_frames() deadlocks the interpreter (gh-106883), so
    # it is called without the collector. `map` runs all three in C: no signal and no other thread
    # comes between them.
    restore = gc.enable if gc.isenabled() else gc.disable
    frames = tuple(map(_CALL, (gc.disable, sys._current_frames, restore)))[1]
    return frames.get(thread)


def is_running(frame: FrameType, thread: int) -> bool:
    """Is this frame on the thread's stack?"""
    top = sys._getframe() if thread == threading.get_ident() else current_frame(thread)
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False


class _State:
    """One lock and its holders; it is replaced as a whole once it is abandoned."""

    __slots__ = ("checked_at", "holders", "lock", "successor", "suspect")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holders: list[FrameType] = []
        # a waiting thread believes that nobody will release it
        self.suspect = False
        self.checked_at = 0.0
        self.successor: dict[int, _State] = {}  # key 0: setdefault is atomic


class Lock:
    """A re-entrant lock, to be used like threading.RLock, also in a threading.Condition."""

    def __init__(self) -> None:
        self._state = _State()
        _all_locks.add(self)

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
        return self._acquire(_calling_frame(), blocking, timeout)

    def _acquire(self, frame: FrameType, blocking: bool = True, timeout: float = -1.0) -> bool:
        end = time.monotonic() + timeout if timeout >= 0 else None
        while True:
            state = self._state
            if blocking:
                wait = (POLL_SECONDS if end is None
                        else min(POLL_SECONDS, max(end - time.monotonic(), 0.0)))
                acquired = state.lock.acquire(timeout=wait)
            else:
                acquired = state.lock.acquire(blocking=False)
            if acquired:
                state.holders.append(frame)
                if (state is self._state
                    and not (state.suspect and self._is_abandoned_by_self(state, frame))):
                    _thread.held.append(frame)
                    return True
                state.holders.remove(frame)
                state.lock.release()
                continue
            if self._replace_if_abandoned(state):
                continue
            if not blocking or (end is not None and time.monotonic() >= end):
                return False

    def _is_abandoned_by_self(self, state: _State, frame: FrameType) -> bool:
        """Was a suspect lock that this thread owns abandoned? Not if a frame below this one holds
        it."""
        thread = threading.get_ident()
        if any(holder is not frame and is_running(holder, thread)
               for holder in list(state.holders)):
            return False
        self._state = state.successor.setdefault(0, _State())
        return True

    def _replace_if_abandoned(self, state: _State) -> bool:
        """Replaces the lock if its holder can no longer release it. Checked at most every
        POLL_SECONDS / 2."""
        now = time.monotonic()
        if now - state.checked_at < POLL_SECONDS / 2:
            return False
        state.checked_at = now
        if not self._is_abandoned(state):
            return False
        # from here on its owner does not acquire it again ...
        state.suspect = True
        if not self._is_abandoned(state):      # ... but it may have done so just before
            state.suspect = False
            return False
        if self._state is state:
            self._state = state.successor.setdefault(0, _State())
        return True

    def _is_abandoned(self, state: _State) -> bool:
        owner = _OWNER.search(repr(state.lock))
        if owner is None or int(owner[1]) == 0:
            return False
        frame = current_frame(int(owner[1]))
        holders = list(state.holders)
        while frame is not None:
            if any(frame is holder for holder in holders):
                return False
            if frame.f_code in _CRITICAL and frame.f_locals.get("self") is self:
                return False                   # it is about to acquire or release it
            frame = frame.f_back
        return _OWNER.search(repr(state.lock)) is not None and holders == state.holders

    def release(self) -> None:
        state = self._state
        if state.holders:
            state.holders.pop()                # before another thread can acquire it
        if _thread.held:
            _thread.held.pop()
        state.lock.release()
        if _thread.deferred:
            _run_deferred()

    def __enter__(self) -> bool:
        frame, state = sys._getframe(1), self._state
        if frame.f_globals is _THREADING:
            return self._acquire(_calling_frame())
        if not state.lock.acquire(False):
            return self._acquire(frame)
        state.holders.append(frame)
        if state is not self._state or state.suspect:          # rare: take the slow path
            state.holders.remove(frame)
            state.lock.release()
            return self._acquire(frame)
        _thread.held.append(frame)
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()

    def reset(self) -> None:
        """Frees the lock in a forked child, unless the thread that forked holds it: the others are
        gone."""
        if not self._is_owned():
            self._state = _State()

    # for threading.Condition, which releases the lock while it waits

    def _release_save(self) -> tuple[Any, list[FrameType], list[FrameType]]:
        state, held = self._state, _thread.held
        holders, frames = list(state.holders), list(held)
        state.holders.clear()
        held.clear()
        return state.lock._release_save(), holders, frames  # type: ignore[attr-defined]

    def _acquire_restore(self, saved: tuple[Any, list[FrameType], list[FrameType]]) -> None:
        count, holders, frames = saved
        self._acquire(holders[-1] if holders else sys._getframe(1))
        state = self._state
        state.lock._release_save()  # type: ignore[attr-defined]
        state.lock._acquire_restore(count)  # type: ignore[attr-defined]
        state.holders[:] = holders
        _thread.held = frames

    def _is_owned(self) -> bool:
        return bool(self._state.lock._is_owned())  # type: ignore[attr-defined]


def condition() -> threading.Condition:
    """Returns a Condition over such a lock."""
    return threading.Condition(Lock())  # type: ignore[arg-type]


_CRITICAL = {Lock.acquire.__code__, Lock._acquire.__code__, Lock.release.__code__,
             Lock.__enter__.__code__, Lock.__exit__.__code__, Lock._release_save.__code__,
             Lock._acquire_restore.__code__}


def _calling_frame() -> FrameType:
    """Returns the frame that acquires the lock, past those of threading.Condition."""
    frame = sys._getframe(2)
    while frame.f_globals is _THREADING and frame.f_back is not None:
        frame = frame.f_back
    return frame


# deferred actions

class DeferEvents:
    """A block without a lock that other threads wait for: events inside it are delivered when it
    ends."""

    def __enter__(self) -> None:
        _thread.held.append(sys._getframe(1))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if _thread.held:
            _thread.held.pop()
        if _thread.deferred:
            _run_deferred()


def holds_no_lock() -> bool:
    """Does this thread hold none of our locks? Frames that an interrupt has ended do not count."""
    held = _thread.held
    if held:
        thread = threading.get_ident()
        held[:] = [frame for frame in held if is_running(frame, thread)]
    return not held


def run_when_unlocked(action: Callable[[], None]) -> None:
    """Runs `action` now, or as soon as this thread holds no lock."""
    _thread.deferred.append(action)
    _run_deferred()


def has_deferred() -> bool:
    return bool(_thread.deferred)


def _run_deferred() -> None:
    deferred, runner = _thread.deferred, _thread.runner
    # An action may itself take locks and defer more actions.
    if runner is not None and is_running(runner, threading.get_ident()):
        return
    _thread.runner = sys._getframe()
    try:
        while deferred and holds_no_lock():
            deferred.pop(0)()
    finally:
        _thread.runner = None


def _after_fork() -> None:
    for lock in list(_all_locks):
        lock.reset()
    _thread.deferred.clear()                   # the parent runs those


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
