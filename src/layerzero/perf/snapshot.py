"""A look at the file of measurements that leaves no trace: nothing is made, migrated, set aside or locked."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .interface import StoreError
from .schema import ALL, VERSION, row_of
from .store import SqliteStore


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
    """A consistent copy of the file in memory, brought up to the schema of today."""
    if path.is_file() and not path.stat().st_size:
        raise StoreError(f"{path}: the file is empty; delete it, it is begun anew when something is measured")
    with SqliteStore(path, timeout, read_only=True) as store, store.reading() as copy:
        yield copy


def summary(path: Path, timeout: float = 5.0) -> Summary:
    """What is in the file, every row checked by its checksum."""
    with copied(path, timeout) as copy:
        rows = copy.execute(f"SELECT {ALL}, crc FROM measurements").fetchall()
        return Summary(VERSION, len(rows), sum(row_of(row) is None for row in rows), path.stat().st_size)


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
