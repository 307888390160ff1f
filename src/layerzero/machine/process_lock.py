"""A lock between processes: a file in our cache folder, released when its holder ends."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..files.paths import cache_dir
from ..files.sealed import PRIVATE_FILE, trusted_folder
from ..spec.errors import DataError

log = logging.getLogger("layerzero")
_POLL_SECONDS = 0.02


def lock_path(name: str) -> Path:
    """Returns the lock's file. It stays: where it exists, the work was begun here once."""
    return cache_dir() / "locks" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"


@contextmanager
def process_lock(name: str, timeout: float, stop: Callable[[], bool] = lambda: False) -> Iterator[
        None]:
    """Holds the lock of this name, after waiting for other processes at most `timeout` seconds or
    until `stop()`.

    If it cannot be had, the block runs without it: this is for work that is wasteful to do twice,
    not wrong.
    """
    path = lock_path(name)
    try:
        trusted_folder(cache_dir(), "locks")
        file = os.fdopen(_open_private(path), "a")
    except (OSError, DataError) as e:
        log.warning("cannot lock %s (%s); other processes may do the same work", path, e)
        yield
        return
    with file:
        deadline = time.monotonic() + timeout
        while not _try_flock(file, True) and time.monotonic() < deadline and not stop():
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            # explicitly: a forked child may hold the file open too
            _try_flock(file, False)


def _open_private(path: Path) -> int:
    """Opens a file for this user alone, and never through a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW",
                                                             0) | getattr(os, "O_CLOEXEC", 0)
    return os.open(path, flags, PRIVATE_FILE)


def _try_flock(file: IO[str], lock: bool) -> bool:
    """Locks or unlocks without waiting; False where another process holds it."""
    try:
        import fcntl
    except ImportError:                        # no such locks on this system
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if lock else fcntl.LOCK_UN)
        return True
    except BlockingIOError:
        return False
    except OSError:                            # a file system without locks
        return True
