"""The store of one machine: an SQLite file.

It uses WAL mode where the file system supports it: readers and writers of several processes do not
wait for each other. What is read is checked: whose file it is (ownership.py), its structure when a
view is loaded, every row by its checksum. A read-only store is a copy in memory, so that reading
changes nothing on the disk; so is a view, which reads a kernel's rows when they are first needed.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import ownership
from .interface import KEY, CorruptStore, ForeignFile, NewerStore, Store, StoreError, normalized
from .ownership import APPLICATION_ID
from .record import EAGER, Measurement, PerfView, Rates, environment_id
from .schema import ALL_COLUMNS, MIGRATIONS, UPSERT, UPSERT_RATES, VERSION, checksum, row_of

# SQLite's errors about the file's environment. Any other operational error ("no such column",
# "table exists already") means that the file is damaged.
_ENVIRONMENT_ERRORS = ("locked", "is full", "readonly", "disk I/O", "unable to open",
                       "out of memory", "busy", "locking protocol", "interrupted",
                       "permission denied", "not authorized", "file support is disabled")

LOCK_SECONDS = 10.0                            # to wait for a process that sets a file aside

# serializes threads that read a view; held during a fork; re-entrant, as a finalizer may read one
_reading = threading.RLock()


def _before_fork() -> None:
    _reading.acquire()


def _after_fork() -> None:
    _reading.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork,
                        after_in_child=_after_fork)


class CopySource:
    """A copy of the file in memory, as the source of a PerfView."""

    def __init__(self, connection: sqlite3.Connection, builds: Mapping[str, str], since: float,
                 on_damage: Callable[[str], None]) -> None:
        self._connection, self._since, self._now = connection, since, time.time()
        self._count, self._on_damage = -1, on_damage
        self._builds = {kernel: build for kernel, build in builds.items() if connection.execute(
            "SELECT 1 FROM measurements WHERE kernel = ? AND build = ? LIMIT 1",
            (kernel, build)).fetchone()}
        self.kernels: Collection[str] = self._builds.keys()

    def rows_of(self, kernel: str) -> list[Measurement]:
        """Returns the intact rows of a kernel; one from the future counts as measured now."""
        rows = self._query(f"{ALL_COLUMNS}, crc", kernel, self._builds[kernel])
        sound = (m for values in rows if (m := row_of(values)) is not None)
        return [m if m.at <= self._now else m._replace(at=self._now) for m in sound]

    def count(self) -> int:
        if self._count < 0:
            counts = [self._query("count(*)", *build) for build in self._builds.items()]
            self._count = sum(rows[0][0] for rows in counts if rows)
        return self._count

    def _query(self, columns: str, kernel: str, build: str) -> list[tuple[Any, ...]]:
        """Queries the copy, inside a call: if it is damaged there are no rows."""
        query = f"SELECT {columns} FROM measurements WHERE kernel = ? AND build = ? AND at >= ?"
        with _reading:
            try:
                return self._connection.execute(query, (kernel, build, self._since)).fetchall()
            except (sqlite3.Error, UnicodeDecodeError) as e:
                problem = str(e)
        self._on_damage(problem)
        return []


class SqliteStore(Store):
    """A file that several processes read and write at once. It is created if missing.

    `timeout` is how many seconds to wait for another process that is writing. A file without write
    permission is opened as with `read_only`.
    """

    def __init__(self, path: str | os.PathLike[str], timeout: float = 10.0,
                 read_only: bool = False) -> None:
        self.path = Path(path)
        self.name = str(path)
        self.timeout = timeout
        self.read_only = read_only
        self._closed = False
        self._shared = False  # with a view, which goes on reading after close
        with self._store_errors():
            self._real = real_path(self.path)
            self._file = ownership.claim(self._real, create=not read_only)
            try:
                self._connection = self._open()
                try:
                    self._prepare()
                except BaseException:          # re-raised: only the file is closed
                    self._connection.close()
                    raise
            except BaseException:              # as above
                ownership.release(self._file.file)
                raise

    @property
    def file(self) -> ownership.File | None:
        return self._file.file

    def _open(self) -> sqlite3.Connection:
        if self._file.kind == "missing":       # and must not be created
            return _memory_database()
        if not os.access(self._real, os.W_OK):
            self.read_only = True
        return self._copy() if self.read_only else self._connect("mode=rw")

    def _connect(self, mode: str) -> sqlite3.Connection:
        target = f"{self._real.as_uri()}?{mode}"  # as a URI: no name is special, not even :memory:
        connection = sqlite3.connect(target, timeout=self.timeout, isolation_level=None, uri=True)
        connection.text_factory = _decode_text
        try:
            connection.execute("PRAGMA schema_version").fetchall()  # opens the file
            connection.execute("PRAGMA cell_size_check = ON")      # damage is noticed, not followed
            # in WAL mode no crash can tear the file
            connection.execute("PRAGMA synchronous = NORMAL")
            return connection
        except BaseException:                  # as above
            connection.close()
            raise

    def _copy(self) -> sqlite3.Connection:
        """Copies the file to memory.

        Without a log it is read as immutable, so that SQLite creates no side files. If it has a
        log, or another process writes meanwhile, it is read with SQLite's locks.
        """
        before = self._stamp()
        if not before[-1]:
            try:
                copy = self._backup("immutable=1")
                if self._stamp() == before:
                    return copy
                copy.close()
            except (sqlite3.Error, UnicodeDecodeError):
                if self._stamp() == before:
                    raise
        try:
            return self._backup("mode=ro")
        # a read-only folder has no place for the side files
        except sqlite3.OperationalError as e:
            if "unable to open" not in str(e):
                raise
            return self._backup("immutable=1")

    def _backup(self, mode: str) -> sqlite3.Connection:
        deadline = time.monotonic() + self.timeout

        def check(status: int, remaining: int, total: int) -> None:
            if remaining and time.monotonic() > deadline:  # Python would wait for a lock for ever
                raise sqlite3.OperationalError("database is locked")

        source = self._connect(mode)
        try:
            copy = _memory_database()
            try:
                source.backup(copy, progress=check)
                return copy
            except BaseException:              # as above
                copy.close()
                raise
        finally:
            source.close()

    def _stamp(self) -> tuple[int, int, int]:
        """Returns size and time of the file, and the size of its logs."""
        try:
            status = os.stat(self._real)
        except OSError as e:
            raise StoreError(f"{self.path}: cannot look at the measurements: {e.strerror}") from e
        log = 0
        for suffix in ("-wal", "-journal"):
            with suppress(OSError):            # there is none
                log += os.stat(f"{self._real}{suffix}").st_size
        return status.st_size, status.st_mtime_ns, log

    def _prepare(self) -> None:
        """Migrates to the current schema.

        A new file gets its application id in the same transaction as its tables, and before WAL
        mode, so that its header shows whose it is as soon as there is one.
        """
        if self._version() != VERSION:
            with self._transaction():
                self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                for i in range(self._version(), VERSION):  # another process may have been quicker
                    for step in MIGRATIONS[i]:
                        if isinstance(step, str):
                            self._connection.execute(step)
                        else:
                            step(self._connection)
                self._connection.execute(f"PRAGMA user_version = {VERSION}")
        if not self.read_only:
            self._use_wal()

    def _version(self) -> int:
        """Returns the schema version; refuses another program's file and one of a later release."""
        def number(pragma: str) -> int:
            return int(self._connection.execute(f"PRAGMA {pragma}").fetchone()[0])

        version, owner = number("user_version"), number("application_id")
        if owner != APPLICATION_ID and (owner or version or self._connection.execute(
                "SELECT count(*) FROM sqlite_master").fetchone()[0]):
            raise ForeignFile(self.path, "a database of another program")
        if version < 0:
            raise self._corrupt(f"it has schema {version}")
        if version > VERSION:
            raise NewerStore(
                f"{self.path} has schema {version}; this release knows schemas up to {VERSION}. "
                "Nothing of it was touched: upgrade layerzero, or set perfdb to another file")
        return version

    def _use_wal(self) -> None:
        """Switches to WAL mode. Several processes may try at once, and SQLite does not wait here by
        itself.

        A file system without shared memory keeps its journal: readers wait for writers there.
        """
        if self._connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
            return
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
                return
            except sqlite3.OperationalError as e:
                if "locked" not in str(e) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Turns SQLite's errors into ours."""
        try:
            yield
        except sqlite3.OperationalError as e:
            if any(words in str(e) for words in _ENVIRONMENT_ERRORS):
                raise StoreError(
                    f"{self.path}: {e}; measurements cannot be read or kept there now") from e
            raise self._corrupt(str(e)) from e
        except (sqlite3.Error, UnicodeDecodeError) as e:  # a message may quote damaged text
            raise self._corrupt(str(e)) from e
        except CorruptStore as e:              # names the real path: use the path of the setting
            raise e if e.path == self.path else self._corrupt(e.what, e.file) from e

    def _corrupt(self, what: str, file: ownership.File | None = None) -> CorruptStore:
        return CorruptStore(self.path, what, file or self.file)

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError(f"{self.path}: the file is readonly, or was opened to be read; "
                             "nothing was written")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:                  # re-raised: an interrupt too writes all or nothing
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _checked_row(self, values: tuple[Any, ...]) -> Measurement:
        measurement = row_of(values)
        if measurement is None:
            raise self._corrupt(f"the row of {values[0]!r} for {values[2]!r} is damaged")
        return measurement

    def write(self, rows: Iterable[Measurement], environments: Mapping[str, Mapping[str, Any]],
              rates: Mapping[str, tuple[Rates, float]]) -> None:
        self._check_writable()
        values = [(*m, checksum(tuple(m)), time.time()) for m in normalized(rows)]
        env_values = [(i, json.dumps(data, sort_keys=True)) for i, data in environments.items()]
        now = time.time()
        rate_values = [(place, *map(float, r), min(at, now), now)
                       for place, (r, at) in rates.items()]
        with self._store_errors(), self._transaction():
            self._connection.executemany("INSERT OR IGNORE INTO environments VALUES (?, ?)",
                                         env_values)
            self._connection.executemany(UPSERT, values)
            self._connection.executemany(UPSERT_RATES, rate_values)

    def get(self, kernel: str, bucket: str, place: str, build: str | None = None,
            mode: str = EAGER) -> Measurement | None:
        condition, build_values = ("", ()) if build is None else (" AND build = ?", (build,))
        with self._store_errors():
            row = self._connection.execute(
                f"SELECT {ALL_COLUMNS}, crc FROM measurements "
                f"WHERE kernel = ? AND bucket = ? AND place = ? AND mode = ?{condition} "
                "ORDER BY at DESC LIMIT 1", (kernel, bucket, place, mode, *build_values)).fetchone()
            return None if row is None else self._checked_row(row)

    def _rows(self) -> Iterator[Measurement]:
        with self._store_errors():
            for values in self._connection.execute(f"SELECT {ALL_COLUMNS}, crc FROM measurements"):
                yield self._checked_row(values)

    def environments(self) -> dict[str, dict[str, Any]]:
        by_id: dict[str, dict[str, Any]] = {}
        with self._store_errors():
            for i, text in self._connection.execute("SELECT id, data FROM environments"):
                try:
                    by_id[i] = json.loads(text)
                    sound = environment_id(by_id[i]) == i
                except (TypeError, ValueError, RecursionError):
                    sound = False
                if not sound:
                    raise self._corrupt(f"environment {i} is damaged")
        return by_id

    def timed_rates(self) -> dict[str, tuple[Rates, float]]:
        by_place: dict[str, tuple[Rates, float]] = {}
        with self._store_errors():
            for place, *numbers in self._connection.execute(
                    "SELECT place, flops_per_us, bytes_per_us, at FROM rates"):
                if not isinstance(place, str) or not all(
                        isinstance(n, float) and 0 < n < math.inf for n in numbers):
                    raise self._corrupt(f"the rates of {place!r} are damaged")
                by_place[place] = Rates(*numbers[:2]), numbers[2]
        return by_place

    def view(self, builds: Mapping[str, str], since: float = 0.0,
             on_damage: Callable[[str], None] = lambda what: None) -> PerfView:
        with self._store_errors():
            copy = self._connection
            if self.read_only:
                self._shared = True
            else:
                copy = _memory_database()
                self._connection.backup(copy)
            self._check_structure(copy)
            return PerfView((), self.rates(), CopySource(copy, builds, since, on_damage))

    def verify(self) -> None:
        with self._store_errors():
            self._check_structure(self._connection)
            super().verify()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yields the connection for other queries, after checking the structure of the file."""
        with self._store_errors():
            self._check_structure(self._connection)
            yield self._connection

    def _check_structure(self, connection: sqlite3.Connection) -> None:
        problems = [line for (line,) in connection.execute("PRAGMA quick_check(1)")]
        if problems != ["ok"]:
            raise self._corrupt(str(problems[0]) if problems else "it cannot be checked")

    def delete(self, rows: Iterable[Measurement]) -> None:
        self._check_writable()
        keys = [(*(getattr(m, name) for name in KEY), m.at) for m in rows]
        with self._store_errors(), self._transaction():
            self._connection.executemany(
                f"DELETE FROM measurements WHERE {' AND '.join(f'{c} = ?' for c in (*KEY, 'at'))}",
                keys)
            self._connection.execute(
                "DELETE FROM environments WHERE id NOT IN (SELECT environment FROM measurements)")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._store_errors():
            try:
                if not self._shared:
                    self._connection.close()
            finally:
                ownership.release(self.file)


def _decode_text(data: bytes) -> str:
    """Decodes damaged text too: the checksum finds the row."""
    return data.decode("utf-8", "replace")


def _memory_database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.text_factory = _decode_text
    return connection


def real_path(path: Path) -> Path:
    """Returns the path SQLite uses for the file; a dangling link stays, and is refused later."""
    try:
        if path.is_symlink() and hasattr(os, "geteuid") and (
                owner := path.lstat().st_uid) not in (0, os.geteuid()):
            raise StoreError(f"{path} is a link of user {owner}; nothing is read or written where "
                             "it leads: remove it, or set perfdb to another file")
        return path.resolve(strict=True)
    except StoreError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        return path.absolute()
    except (OSError, RuntimeError, ValueError) as e:  # a link in a circle, a name no system takes
        raise StoreError(
            f"{path}: cannot look at the measurements: {e}; set perfdb to another file") from e


def set_aside(path: Path, file: ownership.File | None) -> Path | None:
    """Renames a damaged file of ours and its side files; None if another process did so already."""
    path = real_path(path)
    with _file_lock(path):
        stat = os.stat(path)
        if file is not None and (stat.st_dev, stat.st_ino) != file:
            return None
        with suppress(CorruptStore):           # ForeignFile: what is not ours is not renamed
            ownership.inspect(path)
        stem = f"{path}.corrupt-{time.strftime('%Y%m%d-%H%M%S')}"
        target, n = stem, 1
        while any(os.path.lexists(f"{target}{suffix}") for suffix in (*ownership.SIDE_FILES, "")):
            target, n = f"{stem}-{n}", n + 1
        # the file itself last: a new file must not find the old log
        for suffix in (*ownership.SIDE_FILES, ""):
            if os.path.lexists(f"{path}{suffix}"):
                os.replace(f"{path}{suffix}", f"{target}{suffix}")
        return Path(target)


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Holds a lock file, where the system has file locks: one process at a time."""
    try:
        import fcntl
    # Windows: a file that is in use cannot be renamed there anyway
    except ImportError:
        yield
        return
    # the lock file is never truncated or followed
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(f"{path}.lock", flags, 0o600)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as e:       # another process, which may be stopped
                if time.monotonic() > deadline:
                    raise StoreError(f"{path}.lock is held by another process for more than "
                                     f"{LOCK_SECONDS:g} s; nothing was renamed") from e
                time.sleep(0.01)
        yield
    finally:
        os.close(lock)
