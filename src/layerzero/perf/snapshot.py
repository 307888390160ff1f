"""Reads the file of measurements without a trace: nothing is made, migrated or locked."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .interface import StoreError
from .schema import ALL_COLUMNS, VERSION, row_of
from .store import SqliteStore


class StoreSummary(NamedTuple):
    version: int
    rows: int
    damaged: int
    bytes: int


class Group(NamedTuple):
    """Measurements of one kernel in one build at one place."""

    kernel: str
    build: str
    place: str
    rows: int
    newest: float


@contextmanager
def open_copy(path: Path, timeout: float = 5.0) -> Iterator[sqlite3.Connection]:
    """Opens a consistent copy of the file in memory, migrated to the current schema."""
    if path.is_file() and not path.stat().st_size:
        raise StoreError(
            f"{path}: the file is empty; delete it, it is begun anew when something is measured")
    with SqliteStore(path, timeout, read_only=True) as store, store.reading() as copy:
        yield copy


def summary(path: Path, timeout: float = 5.0) -> StoreSummary:
    """Summarizes the file; every row is checked by its checksum."""
    with open_copy(path, timeout) as copy:
        rows = copy.execute(f"SELECT {ALL_COLUMNS}, crc FROM measurements").fetchall()
        return StoreSummary(VERSION, len(rows), sum(row_of(row) is None for row in rows),
                            path.stat().st_size)


def groups(path: Path, timeout: float = 5.0) -> list[Group]:
    """Counts the measurements of each kernel, build and place."""
    with open_copy(path, timeout) as copy:
        return [Group(*row) for row in copy.execute(
            "SELECT kernel, build, place, count(*), max(at) FROM measurements GROUP BY kernel, "
            "build, place")]


def write_copy(path: Path, target: Path, timeout: float = 5.0) -> None:
    """Writes a copy as a single file without side files; equal content gives an equal file."""
    with open_copy(path, timeout) as copy:
        file = sqlite3.connect(target, isolation_level=None)
        try:
            copy.backup(file)
            file.execute("PRAGMA journal_mode = DELETE").fetchone()
            file.execute("VACUUM")
        finally:
            file.close()
