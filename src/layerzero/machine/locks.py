"""Locks that an interrupt cannot leave held for good, and actions deferred until this thread holds
none.

Ctrl-C may come between any two instructions, also between acquiring a lock and entering the block
that releases it. Such a lock would be held for ever. So a lock here records the frame that acquired
it: a waiting thread checks now and then whether that frame still runs in the thread that owns the
lock. If not, nobody will release it, and the waiting thread replaces it by a new one. The owner
itself never blocks, because every lock is re-entrant.

A finalizer or a signal handler runs between any two instructions too, whatever its thread holds,
and may call anything of ours. So locks are taken in any order, and threads may come to wait for
each other in a circle. Then one of them borrows the lock that it waits for. That is no more than if
it ran as a finalizer of the owner, which cannot go on before the borrower has returned the lock.

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
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

POLL_SECONDS = 0.05                            # how often a waiting thread checks on the owner
RETURN_SECONDS = 5.0                           # that a thread which gave up waits for its own locks

T = TypeVar("T")
_OWNER = re.compile(r"owner=(\d+)")
_all_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_waiting: dict[int, Lock] = {}                 # thread -> the lock that it waits for
Loan = tuple[FrameType, int]                   # the frame that borrows a lock, and its thread
_loans: dict[int, list[Loan]] = {}             # thread -> those that borrow locks of it
_THREADING = vars(threading)


class _ThreadState(threading.local):
    """Per thread: what it holds, and what it runs once it holds nothing."""

    def __init__(self) -> None:
        self.held: list[FrameType] = []        # frames that hold a lock or are in DeferEvents
        self.deferred: list[Callable[[], None]] = []           # run when `held` is empty
        self.runner: FrameType | None = None   # the frame that runs them


_thread = _ThreadState()


def members(weak: weakref.WeakSet[T]) -> list[T]:
    """Returns the members of a WeakSet. Its own iterator is Python code, in which a finalizer or
    another thread may add one; that would end it with an error."""
    references = weak.data.copy()  # type: ignore[attr-defined]
    return [member for reference in references if (member := reference()) is not None]


_walking = threading.RLock()


class Stack(NamedTuple):
    """The frames of a thread, innermost first. `others` keeps those of other threads until nobody
    waits for `_walking` here: what their variables own may have finalizers."""

    frames: tuple[FrameType, ...]
    acquires: bool                             # or releases, the lock that was asked for
    others: object


def stack_of(thread: int, lock: Lock | None = None) -> Stack:
    """Returns the frames of another thread.

    Before Python 3.12 any allocation may start a collection, in which other threads run. In
    sys._current_frames() that deadlocks the interpreter (gh-106883), and while the object of a
    frame is made the frame may end, and its memory be another's. So the collector waits.
    """
    with _walking:
        collects = sys.version_info < (3, 12) and gc.isenabled()
        try:
            if collects:
                gc.disable()
            others = sys._current_frames()
            frame, frames, acquires = others.get(thread), [], False
            while frame is not None:
                frames.append(frame)
                if lock is not None and frame.f_code in _CRITICAL:
                    acquires = acquires or frame.f_locals.get("self") is lock
                frame = frame.f_back
            return Stack(tuple(frames), acquires, others)
        finally:
            if collects:
                gc.enable()


def is_running(frame: FrameType, thread: int) -> bool:
    """Is this frame on the thread's stack?"""
    if thread != threading.get_ident():
        return any(running is frame for running in stack_of(thread).frames)
    top: FrameType | None = sys._getframe()
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False


class _State:
    """One lock and its holders; it is replaced as a whole once it is abandoned."""

    __slots__ = ("borrowed", "checked_at", "holders", "lock", "successor", "suspect")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holders: list[FrameType] = []
        self.borrowed: list[tuple[Loan, int]] = []  # with the thread it is borrowed from
        # a waiting thread believes that nobody will release it
        self.suspect = False
        self.checked_at = 0.0
        self.successor: dict[int, _State] = {}  # key 0: setdefault is atomic

    @property
    def owner(self) -> int:
        """The thread that owns the lock; 0 if none does."""
        owner = _OWNER.search(repr(self.lock))
        return int(owner[1]) if owner is not None else 0


class Lock:
    """A re-entrant lock, to be used like threading.RLock, also in a threading.Condition."""

    def __init__(self) -> None:
        self._state = _State()
        _all_locks.add(self)

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
        return self._acquire(_calling_frame(), blocking, timeout)

    def _acquire(self, frame: FrameType, blocking: bool = True, timeout: float = -1.0) -> bool:
        if not blocking:
            return self._acquire_or_wait(frame, False, timeout)
        thread = threading.get_ident()
        outer = _waiting.get(thread)           # a finalizer may run inside this very function
        try:
            _waiting[thread] = self
            return self._acquire_or_wait(frame, True, timeout)
        finally:
            if outer is None:
                _waiting.pop(thread, None)
            else:
                _waiting[thread] = outer
            if thread in _loans:               # it waited in vain, and may not go on yet
                _await_return(thread)

    def _acquire_or_wait(self, frame: FrameType, blocking: bool, timeout: float) -> bool:
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
            if self._borrow(state, frame):
                return True

    def _borrow(self, state: _State, frame: FrameType) -> bool:
        """Takes the lock although another thread owns it, if that one waits for this one."""
        lender, loan = state.owner, (frame, threading.get_ident())
        if not self._is_next_to_go_on(state):
            return False
        _loans.setdefault(lender, []).append(loan)
        # again, now that the owner would wait for this loan if it went on
        if not self._is_next_to_go_on(state) or state.owner != lender:
            _return_loan(lender, loan)
            return False
        state.borrowed.append((loan, lender))
        state.holders.append(frame)
        _thread.held.append(frame)
        return True

    def _is_next_to_go_on(self, state: _State) -> bool:
        """Do threads wait for each other in a circle, this one among them? One of them goes on: of
        those that lend nothing, the one with the lowest number."""
        thread = threading.get_ident()
        circle, owner = [thread], state.owner
        while owner != thread:
            lock = _waiting.get(owner)
            if owner in circle or lock is None:
                return False
            circle.append(owner)
            owner = lock._state.owner
        return self._state is state and thread == min(
            (t for t in circle if t not in _loans), default=0)

    def _is_abandoned_by_self(self, state: _State, frame: FrameType) -> bool:
        """Was a lock that this thread owns abandoned? Not if a frame below holds it."""
        thread = threading.get_ident()
        if any(holder is not frame and is_running(holder, thread)
               for holder in list(state.holders)):
            return False
        self._state = state.successor.setdefault(0, _State())
        return True

    def _replace_if_abandoned(self, state: _State) -> bool:
        """Replaces the lock if its holder cannot release it; checked twice per POLL_SECONDS."""
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
        owner = state.owner
        if not owner:
            return False
        stack = stack_of(owner, self)
        holders = list(state.holders)
        if stack.acquires or any(frame is holder for frame in stack.frames for holder in holders):
            return False
        return state.owner != 0 and holders == state.holders

    def release(self) -> None:
        state = self._state
        if state.holders:
            state.holders.pop()                # before another thread can acquire it
        if _thread.held:
            _thread.held.pop()
        if state.borrowed and not state.lock._is_owned():  # type: ignore[attr-defined]
            loan, lender = state.borrowed.pop()
            _return_loan(lender, loan)
        else:
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
        # an interrupt may end Condition.wait while the lock is released
        if error is None or self._is_owned():
            self.release()

    def is_held_here(self) -> bool:
        """Does a frame below this one hold it? Then this code is nested in what the lock guards:
        it runs in a finalizer or in a signal handler."""
        thread = threading.get_ident()
        return self._is_owned() and any(is_running(holder, thread)
                                        for holder in list(self._state.holders))

    def reset(self) -> None:
        """Frees the lock in a forked child, unless the forking thread holds it."""
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
        state, thread = self._state, threading.get_ident()
        return (state.lock._is_owned()  # type: ignore[attr-defined]
                or any(loan[1] == thread for loan, _ in state.borrowed))


def condition() -> threading.Condition:
    """Returns a Condition over such a lock."""
    return threading.Condition(Lock())  # type: ignore[arg-type]


_CRITICAL = {Lock.acquire.__code__, Lock._acquire.__code__, Lock._acquire_or_wait.__code__,
             Lock.release.__code__, Lock.__enter__.__code__, Lock.__exit__.__code__,
             Lock._release_save.__code__, Lock._acquire_restore.__code__}


def _return_loan(lender: int, loan: Loan) -> None:
    loans = _loans.get(lender, [])
    if loan in loans:
        loans.remove(loan)
    if not loans:
        _loans.pop(lender, None)


def _await_return(lender: int) -> None:
    """Waits for those that borrow a lock of this thread, unless an interrupt has ended them."""
    end = time.monotonic() + RETURN_SECONDS
    while time.monotonic() < end and any(
            is_running(frame, thread) for frame, thread in list(_loans.get(lender, ()))):
        time.sleep(POLL_SECONDS / 50)
    _loans.pop(lender, None)


def _calling_frame() -> FrameType:
    """Returns the frame that acquires the lock, past those of threading.Condition."""
    frame = sys._getframe(2)
    while frame.f_globals is _THREADING and frame.f_back is not None:
        frame = frame.f_back
    return frame


# deferred actions

class DeferEvents:
    """A block without a lock that others wait for: events are delivered when it ends."""

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
    global _walking
    _walking = threading.RLock()
    _waiting.clear()
    _loans.clear()
    for lock in members(_all_locks):
        lock.reset()
    _thread.deferred.clear()                   # the parent runs those


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
