"""Whose file is it? Asked of the bytes, before SQLite is given a path.

SQLite would make, change or delete files beside a database that it is merely asked about. So a path
is looked at first, by its kind and its header
(https://sqlite.org/fileformat.html#the_database_header), and what is not ours is refused.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .interface import CorruptStore, ForeignFile, StoreError

APPLICATION_ID = 0x4C5A5046                    # "LZPF": tells our file from another program's
SQLITE = b"SQLite format 3\0"
BESIDE = ("-wal", "-shm", "-journal")          # what SQLite keeps beside a database

_HEADER = 100
_UTF8 = (b"\0\0\0\0", b"\0\0\0\1")         # at offset 56; 0 as long as there is no table
_FRACTIONS = bytes((64, 32, 32))               # at offset 21 of every SQLite database
_WAL = (0x377F0682, 0x377F0683)
_JOURNAL = (bytes.fromhex("d9d505f920a163d7"), bytes(8))  # zeros until its pages are on the disk
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
          stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

File = tuple[int, int]                         # device and inode


@dataclass(frozen=True)
class Look:
    """What is at a path: a database of ours, an empty file (which becomes one), or nothing."""

    kind: str                                  # "ours" | "empty" | "missing"
    file: File | None = None


# To close a file that the process also has open as a database drops SQLite's locks on it (POSIX).
# So a database that is open is not looked at again: it was ours when it was opened.
_looking = threading.Lock()
_open: Counter[File] = Counter()


def look(path: Path) -> Look:
    """What is at `path`; ForeignFile for what is not ours, CorruptStore for ours with a damaged
    header."""
    with _looking:
        return _look(path)


def take(path: Path, create: bool) -> Look:
    """Look at `path`, which is about to be opened as a database: `release` its file once it is
    closed."""
    with _looking:
        found = _look(path)
        if found.kind == "missing" and create:
            _make(path)
            found = _look(path)
        if found.file is not None:
            _open[found.file] += 1
        return found


def release(file: File | None) -> None:
    with _looking:
        if file is not None:
            _open[file] -= 1
            if _open[file] <= 0:
                del _open[file]


def _make(path: Path) -> None:
    """Make an empty file where there is none: no link is followed, and what another process made
    stays."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        path.parent.mkdir(0o755, parents=True, exist_ok=True)  # compiled code may be kept beside it
        try:
            os.close(os.open(path, flags, 0o644))
        except FileExistsError:                # another process was quicker
            return
    except (OSError, ValueError) as e:
        raise StoreError(f"{path}: cannot make the file for measurements: {e}; set perfdb to "
                         "a file that can be written, or to off") from e


def _look(path: Path) -> Look:
    try:
        found = _at(path)
        _beside(path, found)
        return found
    except StoreError:                         # also a ValueError, and says all there is to say
        raise
    except FileNotFoundError:                  # it was taken away meanwhile
        return Look("missing")
    except (OSError, ValueError) as e:
        raise StoreError(f"{path}: cannot look at the measurements: {_why(e)}; set perfdb to a "
                         "file that can be read, or to off") from e


def _at(path: Path) -> Look:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise ForeignFile(path, "a symbolic link to nothing") from None
        return Look("missing")
    if not stat.S_ISREG(status.st_mode):
        raise ForeignFile(path, _KINDS.get(stat.S_IFMT(status.st_mode), "no plain file"))
    file = status.st_dev, status.st_ino
    if file in _open:
        return Look("ours", file)
    if status.st_size == 0:
        return Look("empty", file)
    head = _first(path, _HEADER)
    if not head:
        return Look("empty", file)
    sqlite = head.startswith(SQLITE) or head[21:24] == _FRACTIONS
    if not sqlite or head[68:72] != struct.pack(">I", APPLICATION_ID):
        theirs = "a database of another program"
        raise ForeignFile(path, theirs if head.startswith(SQLITE) else "another kind of file")
    # SQLite would take it for one that may only be read, or whose texts are in another encoding.
    if not head.startswith(SQLITE) or not {*head[18:20]} <= {1, 2} or head[56:60] not in _UTF8:
        raise CorruptStore(path, "its header is damaged", file)
    return Look("ours", file)


def _beside(path: Path, found: Look) -> None:
    """SQLite would read, replace or delete what has these names, so they must be what it thinks."""
    for end in BESIDE:
        other = Path(f"{path}{end}")
        try:
            status = os.lstat(other)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFile(other, _KINDS.get(stat.S_IFMT(status.st_mode), "a symbolic link"))
        if not status.st_size or end == "-shm":
            continue
        try:
            head = _first(other, 32)
        except FileNotFoundError:              # another process is done with it
            continue
        if end == "-journal" and head and not head.startswith(_JOURNAL):
            raise ForeignFile(other, "another kind of file")
        if end == "-wal" and found.kind != "ours" and _at(path).kind != "ours":    # nor made by now
            raise ForeignFile(other, "the log of a database that is not there",
                              "move it away, or delete it")
        if end == "-wal" and len(head) == 32 and struct.unpack(">I", head[:4])[0] not in _WAL:
            raise CorruptStore(path, f"the header of {other.name} is damaged", found.file)


def _first(path: Path, count: int) -> bytes:
    """The first bytes of a plain file; no device and no FIFO is waited for, should one have taken
    its place."""
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        return os.read(opened, count)
    finally:
        os.close(opened)


def _why(e: OSError | ValueError) -> str:
    return (e.strerror if isinstance(e, OSError) else None) or str(e)


def _after_fork() -> None:
    global _looking
    _looking = threading.Lock()
    _open.clear()  # locks are not inherited: what the parent has open is not open here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
