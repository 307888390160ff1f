"""The tables of the SQLite store, the migrations to the current schema, a row's checksum."""

from __future__ import annotations

import sqlite3
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

from ..spec.errors import DataError
from .interface import COLUMNS, KEY
from .record import EAGER, QUIET_SPREAD, Measurement, is_cpu_place

_pack_numbers = struct.Struct("<9d").pack


def checksum(m: tuple[Any, ...]) -> int:
    """Returns the checksum of a row's texts and numbers, in the order of COLUMNS."""
    texts = "\0".join((*m[:4], m[7], m[8], m[14], *m[16:]))
    return zlib.crc32(texts.encode(), zlib.crc32(_pack_numbers(*m[4:7], *m[9:14], m[15])))


def row_of(values: tuple[Any, ...]) -> Measurement | None:
    """Returns the measurement in a row; None if it is damaged, or was never possible: a checksum is
    no seal, and a time of -1 would win for ever."""
    if not is_intact(values):
        return None
    try:
        return Measurement._make(values[:-1]).checked()
    except DataError:
        return None


def is_intact(values: tuple[Any, ...]) -> bool:
    """Does the checksum at the end match the values before it? Damaged values may have any type."""
    try:
        return bool(checksum(values[:-1]) == values[-1])
    except (TypeError, ValueError, OverflowError, struct.error):
        return False


def _migrate_eager_rows(connection: sqlite3.Connection) -> None:
    """Copies the rows of schema 2, which had no mode.

    CPU rows were eager calls in a loop, as today. A GPU sample was one call behind a flush or a
    replay of a graph, and nothing tells which: those rows are dropped.
    """
    columns = ", ".join(c for c in COLUMNS if c != "mode")
    for values in connection.execute(f"SELECT {columns}, crc FROM measurements_2").fetchall():
        # a damaged file is not migrated: nothing of it is lost
        if not is_intact(values):
            raise sqlite3.DatabaseError(f"the row of {values[0]!r} for {values[2]!r} is damaged")
        row = values[:-1]
        if is_cpu_place(row[3]):
            migrated = (*row, EAGER)
            connection.execute(UPSERT, (*migrated, checksum(migrated), time.time()))


# Each migrates a file from one schema version to the next; a new file goes through all of them.
MIGRATIONS: tuple[tuple[str | Callable[[sqlite3.Connection], None], ...], ...] = (
    ("CREATE TABLE environments (id TEXT PRIMARY KEY, data TEXT NOT NULL) WITHOUT ROWID",
     """CREATE TABLE measurements (
         kernel TEXT NOT NULL, op TEXT NOT NULL, bucket TEXT NOT NULL, place TEXT NOT NULL,
         median_us REAL NOT NULL, spread REAL NOT NULL, samples INTEGER NOT NULL,
         family TEXT NOT NULL, sizes TEXT NOT NULL, flops REAL NOT NULL, bytes REAL NOT NULL,
         p95_us REAL NOT NULL, p99_us REAL NOT NULL,
         compile_us REAL NOT NULL, build TEXT NOT NULL, at REAL NOT NULL, environment TEXT NOT NULL,
         crc INTEGER NOT NULL, PRIMARY KEY (kernel, bucket, place, build)) WITHOUT ROWID"""),
    (
        "CREATE TABLE rates (place TEXT PRIMARY KEY, flops_per_us REAL NOT NULL, bytes_per_us REAL "
        "NOT NULL, at REAL NOT NULL) WITHOUT ROWID",),
    ("ALTER TABLE measurements RENAME TO measurements_2",
     """CREATE TABLE measurements (
         kernel TEXT NOT NULL, op TEXT NOT NULL, bucket TEXT NOT NULL, place TEXT NOT NULL,
         median_us REAL NOT NULL, spread REAL NOT NULL, samples INTEGER NOT NULL,
         family TEXT NOT NULL, sizes TEXT NOT NULL, flops REAL NOT NULL, bytes REAL NOT NULL,
         p95_us REAL NOT NULL, p99_us REAL NOT NULL,
         compile_us REAL NOT NULL, build TEXT NOT NULL, at REAL NOT NULL, environment TEXT NOT NULL,
         mode TEXT NOT NULL, crc INTEGER NOT NULL,
         PRIMARY KEY (kernel, bucket, place, mode, build)) WITHOUT ROWID""",
     _migrate_eager_rows, "DROP TABLE measurements_2"),
)
VERSION = len(MIGRATIONS)

ALL_COLUMNS = ", ".join(COLUMNS)
UPSERT = (
    f"INSERT INTO measurements ({ALL_COLUMNS}, crc) VALUES ({', '.join('?' * (len(COLUMNS) + 1))}) "
        f"ON CONFLICT ({', '.join(KEY)}) DO UPDATE SET "
        + ", ".join(f"{c} = excluded.{c}" for c in (*COLUMNS, "crc") if c not in KEY)
        + f" WHERE (excluded.spread <= {QUIET_SPREAD}, excluded.at) >= "
        # the last parameter is now: see `normalized`
        f"(measurements.spread <= {QUIET_SPREAD}, measurements.at * (measurements.at <= ?))")
UPSERT_RATES = (
    "INSERT INTO rates VALUES (?, ?, ?, ?) ON CONFLICT (place) DO UPDATE SET flops_per_us = "
              "excluded.flops_per_us, bytes_per_us = excluded.bytes_per_us, at = excluded.at "
              "WHERE excluded.at >= rates.at * (rates.at <= ?)")
