"""The store of one machine: an SQLite file.

It is in WAL mode: readers and writers of several processes do not wait for each other. What is read is
checked: the structure of the file when a view is loaded, every row by its checksum. A view is a copy of the file
in memory, from which a kernel's rows are read when they are first asked for.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .interface import COLUMNS, KEY, CorruptStore, NewerStore, Store, StoreError, environment_id, settled
from .record import EAGER, QUIET, Measurement, PerfView, Rates, is_cpu_place

APPLICATION_ID = 0x4C5A5046                    # "LZPF": tells our file from another program's

_NUMBERS = struct.Struct("<9d").pack


def _crc(m: tuple[Any, ...]) -> int:
    """The checksum of a row: its texts and its numbers, in the order of COLUMNS."""
    texts = "\0".join((*m[:4], m[7], m[8], m[14], *m[16:]))
    return zlib.crc32(texts.encode(), zlib.crc32(_NUMBERS(*m[4:7], *m[9:14], m[15])))


def _row(values: tuple[Any, ...]) -> Measurement | None:
    """None for a damaged row."""
    try:
        return Measurement._make(values[:-1]) if _crc(values[:-1]) == values[-1] else None
    except (TypeError, ValueError, struct.error):
        return None


def _take_over_eager_rows(connection: sqlite3.Connection) -> None:
    """Rows had no mode before schema 3. Those of a CPU were eager calls in a loop, as they are today. On a GPU a
    sample was one call behind a flush, or a replay of a graph, and nobody can tell which: they are left behind."""
    columns = ", ".join(c for c in COLUMNS if c != "mode")
    for values in connection.execute(f"SELECT {columns}, crc FROM measurements_2").fetchall():
        row, crc = values[:-1], values[-1]
        if _crc(row) == crc and is_cpu_place(row[3]):
            now = (*row, EAGER)
            connection.execute(_PUT, (*now, _crc(now)))


# Each step takes a file from one schema version to the next; a new file goes through all of them.
STEPS: tuple[tuple[str | Callable[[sqlite3.Connection], None], ...], ...] = (
    ("CREATE TABLE environments (id TEXT PRIMARY KEY, data TEXT NOT NULL) WITHOUT ROWID",
     """CREATE TABLE measurements (
         kernel TEXT NOT NULL, op TEXT NOT NULL, bucket TEXT NOT NULL, place TEXT NOT NULL, median_us REAL NOT NULL,
         spread REAL NOT NULL, samples INTEGER NOT NULL, family TEXT NOT NULL, sizes TEXT NOT NULL,
         flops REAL NOT NULL, bytes REAL NOT NULL, p95_us REAL NOT NULL, p99_us REAL NOT NULL,
         compile_us REAL NOT NULL, build TEXT NOT NULL, at REAL NOT NULL, environment TEXT NOT NULL,
         crc INTEGER NOT NULL, PRIMARY KEY (kernel, bucket, place, build)) WITHOUT ROWID"""),
    ("CREATE TABLE rates (place TEXT PRIMARY KEY, flops_per_us REAL NOT NULL, bytes_per_us REAL NOT NULL, "
     "at REAL NOT NULL) WITHOUT ROWID",),
    ("ALTER TABLE measurements RENAME TO measurements_2",
     """CREATE TABLE measurements (
         kernel TEXT NOT NULL, op TEXT NOT NULL, bucket TEXT NOT NULL, place TEXT NOT NULL, median_us REAL NOT NULL,
         spread REAL NOT NULL, samples INTEGER NOT NULL, family TEXT NOT NULL, sizes TEXT NOT NULL,
         flops REAL NOT NULL, bytes REAL NOT NULL, p95_us REAL NOT NULL, p99_us REAL NOT NULL,
         compile_us REAL NOT NULL, build TEXT NOT NULL, at REAL NOT NULL, environment TEXT NOT NULL,
         mode TEXT NOT NULL, crc INTEGER NOT NULL,
         PRIMARY KEY (kernel, bucket, place, mode, build)) WITHOUT ROWID""",
     _take_over_eager_rows, "DROP TABLE measurements_2"),
)
VERSION = len(STEPS)

_ALL = ", ".join(COLUMNS)
_PUT = (f"INSERT INTO measurements ({_ALL}, crc) VALUES ({', '.join('?' * (len(COLUMNS) + 1))}) "
        f"ON CONFLICT ({', '.join(KEY)}) DO UPDATE SET "
        + ", ".join(f"{c} = excluded.{c}" for c in (*COLUMNS, "crc") if c not in KEY)
        + f" WHERE (excluded.spread <= {QUIET}, excluded.at) >= (measurements.spread <= {QUIET}, measurements.at)")
_PUT_RATES = ("INSERT INTO rates VALUES (?, ?, ?, ?) ON CONFLICT (place) DO UPDATE SET flops_per_us = "
              "excluded.flops_per_us, bytes_per_us = excluded.bytes_per_us, at = excluded.at "
              "WHERE excluded.at >= rates.at")


# What SQLite says of a damaged file where Python makes another class of it than elsewhere.
_DAMAGED = ("no such table", "no such column", "Could not decode", "malformed", "not a database")


_reading = threading.Lock()                    # a view may be asked by several threads; none is, while a process forks


def _pause() -> None:
    _reading.acquire()


def _resume() -> None:
    _reading.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause, after_in_parent=_resume, after_in_child=_resume)


class Snapshot:
    """A copy of the file in memory, as the source of a PerfView."""

    def __init__(self, connection: sqlite3.Connection, builds: Mapping[str, str], since: float) -> None:
        self._connection, self._since, self._count = connection, since, -1
        self._builds = {kernel: build for kernel, build in builds.items() if connection.execute(
            "SELECT 1 FROM measurements WHERE kernel = ? AND build = ? LIMIT 1", (kernel, build)).fetchone()}
        self.kernels: Collection[str] = self._builds.keys()

    def rows_of(self, kernel: str) -> list[Measurement]:
        query = f"SELECT {_ALL}, crc FROM measurements WHERE kernel = ? AND build = ? AND at >= ?"
        asked = kernel, self._builds[kernel], self._since
        with _reading:
            try:
                rows = self._connection.execute(query, asked).fetchall()
            except sqlite3.OperationalError:   # a damaged text is no text; the row will be found out by its checksum
                self._connection.text_factory = lambda data: data.decode("utf-8", "replace")
                rows = self._connection.execute(query, asked).fetchall()
        return [m for values in rows if (m := _row(values)) is not None]

    def count(self) -> int:
        if self._count < 0:
            with _reading:
                self._count = sum(self._connection.execute(
                    "SELECT count(*) FROM measurements WHERE kernel = ? AND build = ? AND at >= ?",
                    (kernel, build, self._since)).fetchone()[0] for kernel, build in self._builds.items())
        return self._count


class SqliteStore(Store):
    """A file that several processes read and write at once. It is made where there is none.

    `timeout` is how long to wait for another process that is writing, in seconds. A file that cannot be written is
    read; with `read_only` that is all that is done to it.
    """

    def __init__(self, path: str | os.PathLike[str], timeout: float = 10.0, read_only: bool = False) -> None:
        self.path = Path(path)
        self.name = str(path)
        self.timeout = timeout
        self.file: tuple[int, int] | None = None
        self.read_only = read_only
        with self._told():
            self._connection = self._open()
            try:
                self._prepare()
            except BaseException:              # nothing is handled: whatever it was, the file is not left open
                self._connection.close()
                raise

    def _open(self) -> sqlite3.Connection:
        self._identify()
        if self.file is not None and not os.access(self.path, os.W_OK):
            self.read_only = True
        if self.read_only:
            uri = self.path.absolute().as_uri()
            try:
                return self._connect(f"{uri}?mode=ro")
            except sqlite3.OperationalError:   # a folder that cannot be written has no place for the files beside it
                return self._connect(f"{uri}?immutable=1")
        try:
            self.path.parent.mkdir(0o755, parents=True, exist_ok=True)     # compiled code may be kept beside it
        except OSError as e:
            raise StoreError(f"{self.path}: cannot make the folder for measurements: {e.strerror}; set perfdb to a "
                             "file that can be written, or to off") from e
        found = self._connect(str(self.path))
        self._identify()
        return found

    def _connect(self, target: str) -> sqlite3.Connection:
        found = sqlite3.connect(target, timeout=self.timeout, isolation_level=None, uri=target.startswith("file:"))
        try:
            found.execute("PRAGMA schema_version").fetchall()      # the first look at the file
            found.execute("PRAGMA synchronous = NORMAL")           # in WAL mode no crash can tear the file
            return found
        except BaseException:                  # as above
            found.close()
            raise

    def _identify(self) -> None:
        try:
            stat = os.stat(self.path)
        except OSError:
            return
        self.file = stat.st_dev, stat.st_ino

    def _prepare(self) -> None:
        version = self._version()
        if version == VERSION:
            return
        if self.read_only:                     # the file stays as it is; a copy of it is brought up to date
            copy = sqlite3.connect(":memory:", isolation_level=None)
            self._connection.backup(copy)
            self._connection.close()
            self._connection = copy
        else:
            self._use_wal()
        with self._transaction():
            for i in range(self._version(), VERSION):      # another process may have been quicker
                for step in STEPS[i]:
                    self._connection.execute(step) if isinstance(step, str) else step(self._connection)
            self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._connection.execute(f"PRAGMA user_version = {VERSION}")

    def _version(self) -> int:
        """The schema of the file; refuses another program's, and one of a later release."""
        def number(pragma: str) -> int:
            return int(self._connection.execute(f"PRAGMA {pragma}").fetchone()[0])

        version, owner = number("user_version"), number("application_id")
        if owner != APPLICATION_ID and (owner or version or self._connection.execute(
                "SELECT count(*) FROM sqlite_master").fetchone()[0]):
            raise StoreError(f"{self.path} is a database of another program; nothing of it was touched. "
                             "Set perfdb to a file of its own")
        if version > VERSION:
            raise NewerStore(f"{self.path} has schema {version}; this release knows schemas up to {VERSION}. Nothing "
                             "of it was touched: upgrade layerzero, or set perfdb to another file")
        return version

    def _use_wal(self) -> None:
        """Many processes may want this at once for a new file; SQLite does not wait here by itself."""
        end = time.monotonic() + self.timeout
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
                return
            except sqlite3.OperationalError as e:
                if "locked" not in str(e) or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """SQLite's errors as ours."""
        try:
            yield
        except sqlite3.OperationalError as e:
            if any(words in str(e) for words in _DAMAGED):
                raise self._corrupt(str(e)) from e
            raise StoreError(f"{self.path}: {e}; measurements cannot be read or kept there now") from e
        except sqlite3.DatabaseError as e:     # of this very class: the file is damaged, or no database at all
            raise self._corrupt(str(e)) from e

    def _corrupt(self, what: str) -> CorruptStore:
        return CorruptStore(self.path, what, self.file)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:                  # nothing is handled: an interrupt, too, leaves all or none of it written
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _sound(self, values: tuple[Any, ...]) -> Measurement:
        found = _row(values)
        if found is None:
            raise self._corrupt(f"the row of {values[0]!r} for {values[2]!r} is damaged")
        return found

    def write(self, rows: Iterable[Measurement], environments: Mapping[str, Mapping[str, Any]],
              rates: Mapping[str, tuple[Rates, float]]) -> None:
        kept = [(*m, _crc(tuple(m))) for m in settled(rows)]
        told = [(i, json.dumps(data, sort_keys=True)) for i, data in environments.items()]
        roofs = [(place, *map(float, r), min(at, time.time())) for place, (r, at) in rates.items()]
        with self._told(), self._transaction():
            self._connection.executemany("INSERT OR IGNORE INTO environments VALUES (?, ?)", told)
            self._connection.executemany(_PUT, kept)
            self._connection.executemany(_PUT_RATES, roofs)

    def get(self, kernel: str, bucket: str, place: str, build: str | None = None,
            mode: str = EAGER) -> Measurement | None:
        one, values = ("", ()) if build is None else (" AND build = ?", (build,))
        with self._told():
            found = self._connection.execute(
                f"SELECT {_ALL}, crc FROM measurements WHERE kernel = ? AND bucket = ? AND place = ? AND mode = ?{one} "
                "ORDER BY at DESC LIMIT 1", (kernel, bucket, place, mode, *values)).fetchone()
            return None if found is None else self._sound(found)

    def _rows(self) -> Iterator[Measurement]:
        with self._told():
            for values in self._connection.execute(f"SELECT {_ALL}, crc FROM measurements"):
                yield self._sound(values)

    def environments(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        with self._told():
            for i, text in self._connection.execute("SELECT id, data FROM environments"):
                try:
                    found[i] = json.loads(text)
                except ValueError:
                    found[i] = {}
                if environment_id(found[i]) != i:
                    raise self._corrupt(f"environment {i} is damaged")
        return found

    def timed_rates(self) -> dict[str, tuple[Rates, float]]:
        found: dict[str, tuple[Rates, float]] = {}
        with self._told():
            for place, *numbers in self._connection.execute("SELECT place, flops_per_us, bytes_per_us, at FROM rates"):
                if not all(isinstance(n, float) and 0 < n < math.inf for n in numbers):
                    raise self._corrupt(f"the rates of {place!r} are damaged")
                found[place] = Rates(*numbers[:2]), numbers[2]
        return found

    def view(self, builds: Mapping[str, str], since: float = 0.0) -> PerfView:
        with self._told():
            copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._connection.backup(copy)
            said = [line for (line,) in copy.execute("PRAGMA quick_check(1)")]
            if said != ["ok"]:
                copy.close()
                raise self._corrupt(said[0])
            return PerfView((), self.rates(), Snapshot(copy, builds, since))

    def delete(self, rows: Iterable[Measurement]) -> None:
        keys = [(*(getattr(m, name) for name in KEY), m.at) for m in rows]
        with self._told(), self._transaction():
            self._connection.executemany(
                f"DELETE FROM measurements WHERE {' AND '.join(f'{c} = ?' for c in (*KEY, 'at'))}", keys)
            self._connection.execute(
                "DELETE FROM environments WHERE id NOT IN (SELECT environment FROM measurements)")

    def close(self) -> None:
        with self._told():
            self._connection.close()


def set_aside(path: Path, file: tuple[int, int] | None) -> Path | None:
    """Rename a damaged file and those beside it; None if another process has done so already."""
    with _alone(path):
        stat = os.stat(path)
        if file is not None and (stat.st_dev, stat.st_ino) != file:
            return None
        stem = f"{path}.corrupt-{time.strftime('%Y%m%d-%H%M%S')}"
        target, n = stem, 1
        while os.path.exists(target):
            target, n = f"{stem}-{n}", n + 1
        for end in ("-wal", "-shm", ""):       # the file itself last: a new one must not find the old log
            if os.path.exists(f"{path}{end}"):
                os.replace(f"{path}{end}", f"{target}{end}")
        return Path(target)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Only one process at a time, where the system has file locks."""
    try:
        import fcntl
    except ImportError:                        # Windows: a file that is in use cannot be renamed there anyway
        yield
        return
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
