"""Locks that an interrupt cannot leave held for good, and work that waits until this thread holds none.

Ctrl-C may come between any two instructions, also between taking a lock and entering the block that gives it
back. Such a lock would be held for ever. So a lock here knows the frame that took it: whoever waits for it looks
now and then whether that frame still runs in the thread that owns the lock. If not, nobody will give it back, and
the waiting thread goes on with a new one. The owner itself is never held up, because every lock is re-entrant.

Events are told when no lock is held and no choice is being made that other threads wait for: a subscriber may
call anything, for as long as it likes, and costs nobody but its own caller.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

LOOK_SECONDS = 0.05                            # how often a waiting thread looks whether the owner is still there

_OWNER = re.compile(r"owner=(\d+)")
_all: weakref.WeakSet[Lock] = weakref.WeakSet()
_THREADING = vars(threading)


class _Here(threading.local):
    """Of this thread."""

    def __init__(self) -> None:
        self.held: list[FrameType] = []        # frames that hold a lock or are in a section
        self.waiting: list[Callable[[], None]] = []            # what to do when there is none
        self.doing: FrameType | None = None    # the frame that does it


_here = _Here()


def is_running(frame: FrameType, thread: int) -> bool:
    """Is this frame among those that the thread executes?"""
    top = sys._getframe() if thread == threading.get_ident() else sys._current_frames().get(thread)
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False


class _State:
    """One lock and who took it; it is replaced as a whole when it was abandoned."""

    __slots__ = ("condemned", "holders", "lock", "looked", "successor")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holders: list[FrameType] = []
        self.condemned = False                 # a waiting thread believes that nobody will give it back
        self.looked = 0.0
        self.successor: dict[int, _State] = {}


class Lock:
    """A re-entrant lock, to be used like threading.RLock, also in a threading.Condition."""

    def __init__(self) -> None:
        self._state = _State()
        _all.add(self)

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
        return self._acquire(_taker(), blocking, timeout)

    def _acquire(self, frame: FrameType, blocking: bool = True, timeout: float = -1.0) -> bool:
        end = time.monotonic() + timeout if timeout >= 0 else None
        while True:
            state = self._state
            if blocking:
                left = LOOK_SECONDS if end is None else min(LOOK_SECONDS, max(end - time.monotonic(), 0.0))
                taken = state.lock.acquire(timeout=left)
            else:
                taken = state.lock.acquire(blocking=False)
            if taken:
                state.holders.append(frame)
                if state is self._state and not (state.condemned and self._is_mine_no_more(state, frame)):
                    _here.held.append(frame)
                    return True
                state.holders.remove(frame)
                state.lock.release()
                continue
            if self._heal(state):
                continue
            if not blocking or (end is not None and time.monotonic() >= end):
                return False

    def _is_mine_no_more(self, state: _State, frame: FrameType) -> bool:
        """This thread owns a lock that another believes abandoned: it is, unless a frame under this one holds it."""
        own = threading.get_ident()
        if any(holder is not frame and is_running(holder, own) for holder in list(state.holders)):
            return False
        self._state = state.successor.setdefault(0, _State())
        return True

    def _heal(self, state: _State) -> bool:
        """Replace the lock if whoever took it cannot give it back any more. Looked at rarely."""
        now = time.monotonic()
        if now - state.looked < LOOK_SECONDS / 2:
            return False
        state.looked = now
        if not self._is_abandoned(state):
            return False
        state.condemned = True                 # from here on its owner does not take it again ...
        if not self._is_abandoned(state):      # ... but it may have done so just before
            state.condemned = False
            return False
        if self._state is state:
            self._state = state.successor.setdefault(0, _State())
        return True

    def _is_abandoned(self, state: _State) -> bool:
        owner = _OWNER.search(repr(state.lock))
        if owner is None or int(owner[1]) == 0:
            return False
        frame = sys._current_frames().get(int(owner[1]))
        holders = list(state.holders)
        while frame is not None:
            if any(frame is holder for holder in holders):
                return False
            if frame.f_code in _CRITICAL and frame.f_locals.get("self") is self:
                return False                   # it is about to take it or to give it back
            frame = frame.f_back
        return _OWNER.search(repr(state.lock)) is not None and holders == state.holders

    def release(self) -> None:
        state = self._state
        if state.holders:
            state.holders.pop()                # before another thread can take it
        if _here.held:
            _here.held.pop()
        state.lock.release()
        if _here.waiting:
            _do_what_waits()

    def __enter__(self) -> bool:
        frame, state = sys._getframe(1), self._state
        if frame.f_globals is _THREADING:
            return self._acquire(_taker())
        if not state.lock.acquire(False):
            return self._acquire(frame)
        state.holders.append(frame)
        if state is not self._state or state.condemned:        # rare: look closer
            state.holders.remove(frame)
            state.lock.release()
            return self._acquire(frame)
        _here.held.append(frame)
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()

    def renew(self) -> None:
        """In a forked child: a thread that held it is gone, unless it is the one that forked."""
        if not self._is_owned():
            self._state = _State()

    # for threading.Condition, which gives the lock back while it waits

    def _release_save(self) -> tuple[Any, list[FrameType], list[FrameType]]:
        state, held = self._state, _here.held
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
        _here.held = frames

    def _is_owned(self) -> bool:
        return bool(self._state.lock._is_owned())  # type: ignore[attr-defined]


def condition() -> threading.Condition:
    """One whose lock is of this kind."""
    return threading.Condition(Lock())  # type: ignore[arg-type]


_CRITICAL = {Lock.acquire.__code__, Lock._acquire.__code__, Lock.release.__code__, Lock.__enter__.__code__,
             Lock.__exit__.__code__, Lock._release_save.__code__, Lock._acquire_restore.__code__}


def _taker() -> FrameType:
    """The frame that asked for the lock, not those of threading.Condition in between."""
    frame = sys._getframe(2)
    while frame.f_globals is _THREADING and frame.f_back is not None:
        frame = frame.f_back
    return frame


# what waits until no lock is held

class Section:
    """A stretch of work that other threads wait for, without a lock: what happens in it is told afterwards."""

    def __enter__(self) -> None:
        _here.held.append(sys._getframe(1))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if _here.held:
            _here.held.pop()
        if _here.waiting:
            _do_what_waits()


def is_free() -> bool:
    """Does this thread hold no lock of ours? What an interrupt has left behind does not count."""
    held = _here.held
    if held:
        own = threading.get_ident()
        held[:] = [frame for frame in held if is_running(frame, own)]
    return not held


def when_free(do: Callable[[], None]) -> None:
    """Do it now, or as soon as this thread holds no lock."""
    _here.waiting.append(do)
    _do_what_waits()


def more_wait() -> bool:
    return bool(_here.waiting)


def _do_what_waits() -> None:
    waiting, outer = _here.waiting, _here.doing
    # What is being done may itself take locks and give cause for more.
    if outer is not None and is_running(outer, threading.get_ident()):
        return
    _here.doing = sys._getframe()
    try:
        while waiting and is_free():
            waiting.pop(0)()
    finally:
        _here.doing = None


def _after_fork() -> None:
    for lock in list(_all):
        lock.renew()
    _here.waiting.clear()                      # the parent does that


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
