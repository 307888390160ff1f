"""One process at a time: a lock file in our cache folder. It is given back when its holder ends, however that ends."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..spec.errors import DataError
from ..spec.paths import cache_dir
from ..spec.sealed import PRIVATE_FILE, trusted_folder

log = logging.getLogger("layerzero")
_BETWEEN_TRIES = 0.02


def lock_path(name: str) -> Path:
    """It stays after the work is done: where it is, the work was begun on this machine once."""
    return cache_dir() / "locks" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"


@contextmanager
def process_lock(name: str, timeout: float, stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Wait until no other process holds the lock of this name, for `timeout` seconds at most or until `stop()`.

    Where no lock can be had, it goes on without one: this is for work that is wasteful to do twice, not wrong.
    """
    path = lock_path(name)
    try:
        trusted_folder(cache_dir(), "locks")
        file = os.fdopen(_open_own(path), "a")
    except (OSError, DataError) as e:
        log.warning("cannot lock %s (%s); other processes may do the same work", path, e)
        yield
        return
    with file:
        end = time.monotonic() + timeout
        while not _try(file, True) and time.monotonic() < end and not stop():
            time.sleep(_BETWEEN_TRIES)
        try:
            yield
        finally:
            _try(file, False)                  # said aloud: a forked child may hold the file open as well


def _open_own(path: Path) -> int:
    """For this user alone, and never through a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    return os.open(path, flags, PRIVATE_FILE)


def _try(file: IO[str], wanted: bool) -> bool:
    try:
        import fcntl
    except ImportError:                        # no such locks on this system
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if wanted else fcntl.LOCK_UN)
        return True
    except BlockingIOError:
        return False
    except OSError:                            # a file system without locks
        return True
