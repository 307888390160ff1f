"""A look at the file of measurements that leaves no trace: nothing is made, migrated, set aside or locked."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .interface import CorruptStore, NewerStore, StoreError
from .record import PerfView
from .store import _ALL, _DAMAGED, APPLICATION_ID, VERSION, SqliteStore, _row


class Summary(NamedTuple):
    version: int
    rows: int
    damaged: int
    bytes: int


class Group(NamedTuple):
    """Measurements of one kernel, as it was built once, in one place."""

    kernel: str
    build: str
    place: str
    rows: int
    newest: float


@contextmanager
def copied(path: Path, timeout: float = 5.0) -> Iterator[sqlite3.Connection]:
    """A consistent copy of the file in memory, by SQLite's own backup.

    A file in WAL mode cannot be read without files beside it unless it is said not to change. That is said only where
    there are none, hence no process that has it open; if one came meanwhile, it is read again.
    """
    copy = sqlite3.connect(":memory:", isolation_level=None)
    try:
        before = _state(path)
        quiet = not Path(f"{path}-wal").exists()
        _back_up(path, copy, "immutable=1" if quiet else "mode=ro", timeout)
        if quiet and (_state(path) != before or Path(f"{path}-wal").exists()):
            _back_up(path, copy, "mode=ro", timeout)
        _check(copy, path)
        yield copy
    except sqlite3.OperationalError as e:
        if any(words in str(e) for words in _DAMAGED):
            raise CorruptStore(path, f"damaged: {e}", None) from e
        raise StoreError(f"{path}: {e}; it cannot be read now") from e
    except (sqlite3.DatabaseError, UnicodeDecodeError) as e:
        raise CorruptStore(path, f"damaged, or not a database: {e}", None) from e
    finally:
        copy.close()


def summary(path: Path, timeout: float = 5.0) -> Summary:
    """What is in the file, every row checked by its checksum."""
    with copied(path, timeout) as copy:
        copy.text_factory = lambda data: data.decode("utf-8", "replace")
        rows = copy.execute(f"SELECT {_ALL}, crc FROM measurements").fetchall() if _version(copy) == VERSION else []
        damaged = sum(_row(row) is None for row in rows)
        count = len(rows) or int(copy.execute("SELECT count(*) FROM measurements").fetchone()[0])
        return Summary(_version(copy), count, damaged, path.stat().st_size)


def groups(path: Path, timeout: float = 5.0) -> list[Group]:
    """How many measurements there are of each kernel, build and place."""
    with copied(path, timeout) as copy:
        return [Group(*row) for row in copy.execute(
            "SELECT kernel, build, place, count(*), max(at) FROM measurements GROUP BY kernel, build, place")]


def write_copy(path: Path, target: Path, timeout: float = 5.0) -> None:
    """A copy of the file as one file without others beside it; the same content gives the same file."""
    with copied(path, timeout) as copy:
        made = sqlite3.connect(target, isolation_level=None)
        try:
            copy.backup(made)
            made.execute("PRAGMA journal_mode = DELETE").fetchone()
            made.execute("VACUUM")
        finally:
            made.close()


def view(path: Path, builds: Mapping[str, str], since: float, timeout: float = 5.0) -> PerfView:
    """As Store.view, of a copy: the file itself is neither brought up to date nor opened to be written."""
    with tempfile.TemporaryDirectory(prefix="layerzero-perf-") as folder:
        copy = Path(folder, path.name)
        write_copy(path, copy, timeout)
        with SqliteStore(copy, timeout) as store:
            return store.view(builds, since)


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as e:
        raise StoreError(f"{path}: cannot read it: {e.strerror}") from e
    if not found.st_size:
        raise StoreError(f"{path}: the file is empty; delete it, it is begun anew when something is measured")
    return found.st_size, found.st_mtime_ns


def _back_up(path: Path, copy: sqlite3.Connection, how: str, timeout: float) -> None:
    source = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", timeout=timeout, uri=True, isolation_level=None)
    try:
        source.backup(copy)
    finally:
        source.close()


def _version(copy: sqlite3.Connection) -> int:
    return int(copy.execute("PRAGMA user_version").fetchone()[0])


def _check(copy: sqlite3.Connection, path: Path) -> None:
    if int(copy.execute("PRAGMA application_id").fetchone()[0]) != APPLICATION_ID:
        raise StoreError(f"{path} is a database of another program; set perfdb to a file of its own")
    if _version(copy) > VERSION:
        raise NewerStore(f"{path} has schema {_version(copy)}; this release knows schemas up to {VERSION}; upgrade "
                         "layerzero, or set perfdb to another file")
    said = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
    if said != "ok":
        raise CorruptStore(path, f"damaged: {said}", None)
