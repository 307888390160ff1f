"""Checks whether a file is our store by its bytes, before SQLite gets the path.

SQLite creates, changes or deletes files beside a database even when it only opens it. So a path is
checked first, by its type and its header
(https://sqlite.org/fileformat.html#the_database_header), and what is not ours is refused.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

from .interface import CorruptStore, ForeignFile, StoreError

APPLICATION_ID = 0x4C5A5046                    # "LZPF": marks a file as ours
SQLITE = b"SQLite format 3\0"
SIDE_FILES = ("-wal", "-shm", "-journal")      # what SQLite keeps beside a database

_HEADER = 100
_UTF8 = (b"\0\0\0\0", b"\0\0\0\1")         # at offset 56; 0 as long as there is no table
_PAYLOAD_FRACTIONS = bytes((64, 32, 32))       # at offset 21 of every SQLite database
_WAL = (0x377F0682, 0x377F0683)
_JOURNAL = (bytes.fromhex("d9d505f920a163d7"), bytes(8))  # zeros until its pages are synced
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
          stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

File = tuple[int, int]                         # device and inode


@dataclass(frozen=True)
class FileInfo:
    """Describes what is at a path: our database, an empty file (to become one), or nothing."""

    kind: str                                  # "ours" | "empty" | "missing"
    file: File | None = None


# Closing a file that the process also has open as a database drops SQLite's locks on it (POSIX).
# So an open database is not inspected again: it was ours when it was opened.
# Re-entrant: a finalizer that runs in here may itself measure.
_lock = threading.RLock()
_open: list[File] = []                         # once for each database that is open


def inspect(path: Path) -> FileInfo:
    """Returns what is at `path`; ForeignFile if not ours, CorruptStore if ours is damaged."""
    with _lock:
        return _inspect(path)


def claim(path: Path, create: bool) -> FileInfo:
    """Inspects `path` before it is opened as a database; call `release` once it is closed."""
    with _lock:
        info = _inspect(path)
        if info.kind == "missing" and create:
            _create(path)
            info = _inspect(path)
        if info.file is not None:
            _open.append(info.file)
        return info


def release(file: File | None) -> None:
    with _lock:
        if file in _open:                      # not in a forked child
            _open.remove(file)


def _create(path: Path) -> None:
    """Creates an empty file if there is none: no link is followed, another process's file stays."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)  # compiled code may be kept beside it
        try:
            os.close(os.open(path, flags, 0o600))
        except FileExistsError:                # another process was quicker
            return
    except (OSError, ValueError) as e:
        raise StoreError(f"{path}: cannot make the file for measurements: {e}; set perfdb to "
                         "a file that can be written, or to off") from e


def _inspect(path: Path) -> FileInfo:
    try:
        info = _inspect_file(path)
        _check_side_files(path, info)
        return info
    except StoreError:                         # also a ValueError, and complete as it is
        raise
    except FileNotFoundError:                  # removed meanwhile
        return FileInfo("missing")
    except (OSError, ValueError) as e:
        raise StoreError(
            f"{path}: cannot look at the measurements: {_error_text(e)}; set perfdb to a "
            "file that can be read, or to off") from e


def _inspect_file(path: Path) -> FileInfo:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise ForeignFile(path, "a symbolic link to nothing") from None
        return FileInfo("missing")
    if not stat.S_ISREG(status.st_mode):
        raise ForeignFile(path, _KINDS.get(stat.S_IFMT(status.st_mode), "no plain file"))
    file = status.st_dev, status.st_ino
    if file in _open:
        return FileInfo("ours", file)
    if status.st_size == 0:
        return FileInfo("empty", file)
    head = _read_head(path, _HEADER)
    if not head:
        return FileInfo("empty", file)
    sqlite = head.startswith(SQLITE) or head[21:24] == _PAYLOAD_FRACTIONS
    if not sqlite or head[68:72] != struct.pack(">I", APPLICATION_ID):
        foreign = "a database of another program"
        raise ForeignFile(path, foreign if head.startswith(SQLITE) else "another kind of file")
    # SQLite would open it as read-only, or with another text encoding.
    if not head.startswith(SQLITE) or not {*head[18:20]} <= {1, 2} or head[56:60] not in _UTF8:
        raise CorruptStore(path, "its header is damaged", file)
    return FileInfo("ours", file)


def _check_side_files(path: Path, info: FileInfo) -> None:
    """Refuses foreign files named like SQLite's side files: it would replace or delete them."""
    for suffix in SIDE_FILES:
        side_file = Path(f"{path}{suffix}")
        try:
            status = os.lstat(side_file)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFile(side_file, _KINDS.get(stat.S_IFMT(status.st_mode), "a symbolic link"))
        if not status.st_size or suffix == "-shm":
            continue
        try:
            head = _read_head(side_file, 32)
        except FileNotFoundError:              # another process removed it
            continue
        if suffix == "-journal" and head and not head.startswith(_JOURNAL):
            raise ForeignFile(side_file, "another kind of file")
        # nor made by now
        if suffix == "-wal" and info.kind != "ours" and _inspect_file(path).kind != "ours":
            raise ForeignFile(side_file, "the log of a database that is not there",
                              "move it away, or delete it")
        if suffix == "-wal" and len(head) == 32 and struct.unpack(">I", head[:4])[0] not in _WAL:
            raise CorruptStore(path, f"the header of {side_file.name} is damaged", info.file)


def _read_head(path: Path, count: int) -> bytes:
    """Returns the first bytes of a file; never blocks on a device or FIFO in its place."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
                         | getattr(os, "O_BINARY", 0))
    try:
        return os.read(descriptor, count)
    finally:
        os.close(descriptor)


def _error_text(e: OSError | ValueError) -> str:
    return (e.strerror if isinstance(e, OSError) else None) or str(e)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _open.clear()  # locks are not inherited: what the parent has open is not open here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
