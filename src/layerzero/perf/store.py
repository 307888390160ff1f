"""The store of one machine: an SQLite file.

It is in WAL mode where the file system can: readers and writers of several processes do not wait
for each other. What is read is checked: whose file it is (ownership.py), its structure when a view
is loaded, every row by its checksum. A store that is only read is a copy in memory, so that reading
changes nothing on the disk; so is a view, from which a kernel's rows are read when they are first
asked for.
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
from .interface import KEY, CorruptStore, ForeignFile, NewerStore, Store, StoreError, settled
from .ownership import APPLICATION_ID
from .record import EAGER, Measurement, PerfView, Rates, environment_id
from .schema import ALL, PUT, PUT_RATES, STEPS, VERSION, checksum, row_of

# What SQLite says of the file's surroundings. Any other operational error ("no such column",
# "table exists already") means that the file is not what it says it is.
_ELSEWHERE = ("locked", "is full", "readonly", "disk I/O", "unable to open", "out of memory",
              "busy", "locking protocol", "interrupted", "permission denied", "not authorized",
              "file support is disabled")

_reading = threading.Lock()                    # a view may be asked by several threads; none is, while a process forks


def _pause() -> None:
    _reading.acquire()


def _resume() -> None:
    _reading.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause, after_in_parent=_resume, after_in_child=_resume)


class Snapshot:
    """A copy of the file in memory, as the source of a PerfView."""

    def __init__(self, connection: sqlite3.Connection, builds: Mapping[str, str], since: float,
                 on_damage: Callable[[str], None]) -> None:
        self._connection, self._since, self._now = connection, since, time.time()
        self._count, self._on_damage = -1, on_damage
        self._builds = {kernel: build for kernel, build in builds.items() if connection.execute(
            "SELECT 1 FROM measurements WHERE kernel = ? AND build = ? LIMIT 1", (kernel, build)).fetchone()}
        self.kernels: Collection[str] = self._builds.keys()

    def rows_of(self, kernel: str) -> list[Measurement]:
        """The sound rows of a kernel; one from the future (the clock was set back) is as new as one
        of today."""
        rows = self._ask(f"{ALL}, crc", kernel, self._builds[kernel])
        sound = (m for values in rows if (m := row_of(values)) is not None)
        return [m if m.at <= self._now else m._replace(at=self._now) for m in sound]

    def count(self) -> int:
        if self._count < 0:
            counts = [self._ask("count(*)", *one) for one in self._builds.items()]
            self._count = sum(rows[0][0] for rows in counts if rows)
        return self._count

    def _ask(self, what: str, kernel: str, build: str) -> list[tuple[Any, ...]]:
        """This happens inside a call, which no damage may fail."""
        query = f"SELECT {what} FROM measurements WHERE kernel = ? AND build = ? AND at >= ?"
        with _reading:
            try:
                return self._connection.execute(query, (kernel, build, self._since)).fetchall()
            except (sqlite3.Error, UnicodeDecodeError) as e:
                problem = str(e)
        self._on_damage(problem)
        return []


class SqliteStore(Store):
    """A file that several processes read and write at once. It is made where there is none.

    `timeout` is how long to wait for another process that is writing, in seconds. A file that cannot be written is
    read; with `read_only` that is all that is done to it.
    """

    def __init__(self, path: str | os.PathLike[str], timeout: float = 10.0, read_only: bool = False) -> None:
        self.path = Path(path)
        self.name = str(path)
        self.timeout = timeout
        self.read_only = read_only
        self._closed = False
        self._lent = False  # to a view, which goes on reading when this store is closed
        with self._told():
            self._real = real_path(self.path)
            self._look = ownership.take(self._real, create=not read_only)
            try:
                self._connection = self._open()
                try:
                    self._prepare()
                # nothing is handled: whatever it was, the file is not left open
                except BaseException:
                    self._connection.close()
                    raise
            except BaseException:              # as above
                ownership.release(self._look.file)
                raise

    @property
    def file(self) -> ownership.File | None:
        return self._look.file

    def _open(self) -> sqlite3.Connection:
        if self._look.kind == "missing":       # and may not be made
            return _memory()
        if not os.access(self._real, os.W_OK):
            self.read_only = True
        return self._copy() if self.read_only else self._connect("mode=rw")

    def _connect(self, how: str) -> sqlite3.Connection:
        target = f"{self._real.as_uri()}?{how}"  # no name is special, not even :memory:
        found = sqlite3.connect(target, timeout=self.timeout, isolation_level=None, uri=True)
        found.text_factory = _text
        try:
            found.execute("PRAGMA schema_version").fetchall()      # the first look at the file
            found.execute("PRAGMA cell_size_check = ON")           # damage is noticed, not followed
            found.execute("PRAGMA synchronous = NORMAL")           # in WAL mode no crash can tear the file
            return found
        except BaseException:                  # as above
            found.close()
            raise

    def _copy(self) -> sqlite3.Connection:
        """The file in memory. Where it has no log, SQLite need not make one to read it; should
        another process write meanwhile, or has it a log, it is read with SQLite's locks."""
        before = self._stamp()
        if not before[-1]:
            try:
                found = self._copied("immutable=1")
                if self._stamp() == before:
                    return found
                found.close()
            except (sqlite3.Error, UnicodeDecodeError):
                if self._stamp() == before:
                    raise
        try:
            return self._copied("mode=ro")
        # a folder that cannot be written has no place for the files beside it
        except sqlite3.OperationalError as e:
            if "unable to open" not in str(e):
                raise
            return self._copied("immutable=1")

    def _copied(self, how: str) -> sqlite3.Connection:
        end = time.monotonic() + self.timeout

        def check(status: int, remaining: int, total: int) -> None:
            if remaining and time.monotonic() > end:  # Python would wait for a lock for ever
                raise sqlite3.OperationalError("database is locked")

        source = self._connect(how)
        try:
            copy = _memory()
            try:
                source.backup(copy, progress=check)
                return copy
            except BaseException:              # as above
                copy.close()
                raise
        finally:
            source.close()

    def _stamp(self) -> tuple[int, int, int]:
        """Size and time of the file, and the size of its logs."""
        try:
            status = os.stat(self._real)
        except OSError as e:
            raise StoreError(f"{self.path}: cannot look at the measurements: {e.strerror}") from e
        log = 0
        for end in ("-wal", "-journal"):
            with suppress(OSError):            # there is none
                log += os.stat(f"{self._real}{end}").st_size
        return status.st_size, status.st_mtime_ns, log

    def _prepare(self) -> None:
        """The schema of today. Whose a file is can be read from its header as soon as there is one:
        a new file gets its application id in the same step as its tables, and not by way of a
        log."""
        if self._version() != VERSION:
            with self._transaction():
                self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                for i in range(self._version(), VERSION):  # another process may have been quicker
                    for step in STEPS[i]:
                        if isinstance(step, str):
                            self._connection.execute(step)
                        else:
                            step(self._connection)
                self._connection.execute(f"PRAGMA user_version = {VERSION}")
        if not self.read_only:
            self._use_wal()

    def _version(self) -> int:
        """The schema of the file; refuses another program's, and one of a later release."""
        def number(pragma: str) -> int:
            return int(self._connection.execute(f"PRAGMA {pragma}").fetchone()[0])

        version, owner = number("user_version"), number("application_id")
        if owner != APPLICATION_ID and (owner or version or self._connection.execute(
                "SELECT count(*) FROM sqlite_master").fetchone()[0]):
            raise ForeignFile(self.path, "a database of another program")
        if version < 0:
            raise self._corrupt(f"it has schema {version}")
        if version > VERSION:
            raise NewerStore(f"{self.path} has schema {version}; this release knows schemas up to {VERSION}. Nothing "
                             "of it was touched: upgrade layerzero, or set perfdb to another file")
        return version

    def _use_wal(self) -> None:
        """Many processes may want this at once for a new file; SQLite does not wait here by itself.

        A file system without shared memory keeps the journal it has: readers wait for writers
        there.
        """
        if self._connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
            return
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
            if any(words in str(e) for words in _ELSEWHERE):
                raise StoreError(
                    f"{self.path}: {e}; measurements cannot be read or kept there now") from e
            raise self._corrupt(str(e)) from e
        except (sqlite3.Error, UnicodeDecodeError) as e:  # a message may quote damaged text
            raise self._corrupt(str(e)) from e
        except CorruptStore as e:              # by its real path: named as the setting names it
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
        except BaseException:                  # nothing is handled: an interrupt, too, leaves all or none of it written
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _sound(self, values: tuple[Any, ...]) -> Measurement:
        found = row_of(values)
        if found is None:
            raise self._corrupt(f"the row of {values[0]!r} for {values[2]!r} is damaged")
        return found

    def write(self, rows: Iterable[Measurement], environments: Mapping[str, Mapping[str, Any]],
              rates: Mapping[str, tuple[Rates, float]]) -> None:
        self._check_writable()
        kept = [(*m, checksum(tuple(m)), time.time()) for m in settled(rows)]
        told = [(i, json.dumps(data, sort_keys=True)) for i, data in environments.items()]
        now = time.time()
        roofs = [(place, *map(float, r), min(at, now), now) for place, (r, at) in rates.items()]
        with self._told(), self._transaction():
            self._connection.executemany("INSERT OR IGNORE INTO environments VALUES (?, ?)", told)
            self._connection.executemany(PUT, kept)
            self._connection.executemany(PUT_RATES, roofs)

    def get(self, kernel: str, bucket: str, place: str, build: str | None = None,
            mode: str = EAGER) -> Measurement | None:
        one, values = ("", ()) if build is None else (" AND build = ?", (build,))
        with self._told():
            found = self._connection.execute(
                f"SELECT {ALL}, crc FROM measurements WHERE kernel = ? AND bucket = ? AND place = ? AND mode = ?{one} "
                "ORDER BY at DESC LIMIT 1", (kernel, bucket, place, mode, *values)).fetchone()
            return None if found is None else self._sound(found)

    def _rows(self) -> Iterator[Measurement]:
        with self._told():
            for values in self._connection.execute(f"SELECT {ALL}, crc FROM measurements"):
                yield self._sound(values)

    def environments(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        with self._told():
            for i, text in self._connection.execute("SELECT id, data FROM environments"):
                try:
                    found[i] = json.loads(text)
                    sound = environment_id(found[i]) == i
                except (TypeError, ValueError, RecursionError):
                    sound = False
                if not sound:
                    raise self._corrupt(f"environment {i} is damaged")
        return found

    def timed_rates(self) -> dict[str, tuple[Rates, float]]:
        found: dict[str, tuple[Rates, float]] = {}
        with self._told():
            for place, *numbers in self._connection.execute("SELECT place, flops_per_us, bytes_per_us, at FROM rates"):
                if not isinstance(place, str) or not all(
                        isinstance(n, float) and 0 < n < math.inf for n in numbers):
                    raise self._corrupt(f"the rates of {place!r} are damaged")
                found[place] = Rates(*numbers[:2]), numbers[2]
        return found

    def view(self, builds: Mapping[str, str], since: float = 0.0,
             on_damage: Callable[[str], None] = lambda what: None) -> PerfView:
        with self._told():
            copy = self._connection
            if self.read_only:
                self._lent = True
            else:
                copy = _memory()
                self._connection.backup(copy)
            self._check(copy)
            return PerfView((), self.rates(), Snapshot(copy, builds, since, on_damage))

    def verify(self) -> None:
        with self._told():
            self._check(self._connection)
            super().verify()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for questions of one's own, after the structure of the file was checked."""
        with self._told():
            self._check(self._connection)
            yield self._connection

    def _check(self, connection: sqlite3.Connection) -> None:
        found = [line for (line,) in connection.execute("PRAGMA quick_check(1)")]
        if found != ["ok"]:
            raise self._corrupt(str(found[0]) if found else "it cannot be checked")

    def delete(self, rows: Iterable[Measurement]) -> None:
        self._check_writable()
        keys = [(*(getattr(m, name) for name in KEY), m.at) for m in rows]
        with self._told(), self._transaction():
            self._connection.executemany(
                f"DELETE FROM measurements WHERE {' AND '.join(f'{c} = ?' for c in (*KEY, 'at'))}", keys)
            self._connection.execute(
                "DELETE FROM environments WHERE id NOT IN (SELECT environment FROM measurements)")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._told():
            try:
                if not self._lent:
                    self._connection.close()
            finally:
                ownership.release(self.file)


def _text(data: bytes) -> str:
    """Damaged text is still text: its row is found out by its checksum."""
    return data.decode("utf-8", "replace")


def _memory() -> sqlite3.Connection:
    found = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    found.text_factory = _text
    return found


def real_path(path: Path) -> Path:
    """Where SQLite finds a file, and what it keeps beside it. A link to nothing stays what it is,
    and is refused."""
    try:
        return path.resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return path.absolute()
    except (OSError, RuntimeError, ValueError) as e:  # a link in a circle, a name no system takes
        raise StoreError(
            f"{path}: cannot look at the measurements: {e}; set perfdb to another file") from e


def set_aside(path: Path, file: ownership.File | None) -> Path | None:
    """Rename a damaged file of ours and those beside it; None if another process has done so
    already."""
    path = real_path(path)
    with _alone(path):
        stat = os.stat(path)
        if file is not None and (stat.st_dev, stat.st_ino) != file:
            return None
        with suppress(CorruptStore):           # ForeignFile: what is not ours is not renamed
            ownership.look(path)
        stem = f"{path}.corrupt-{time.strftime('%Y%m%d-%H%M%S')}"
        target, n = stem, 1
        while any(os.path.lexists(f"{target}{end}") for end in (*ownership.BESIDE, "")):
            target, n = f"{stem}-{n}", n + 1
        # the file itself last: a new one must not find the old log
        for end in (*ownership.BESIDE, ""):
            if os.path.lexists(f"{path}{end}"):
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
    # whatever it is, it stays
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(f"{path}.lock", flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
