"""The interface of every store of measurements.

One row per (kernel, bucket, place, mode, build): the bucket names dtype, switches and sizes; the
place names device, driver and toolkits; the mode is how it was called; the build is that of the
measured library. A newer measurement of a row replaces an older one, but a noisy one never replaces
a quiet one (`Measurement.supersedes`), so stores may be merged in any order and repeatedly.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ..spec.errors import CacheCorruptionError, DataError
from ..spec.names import names_kernel
from .exchange import export_lines, read_lines
from .record import EAGER, Measurement, PerfView, Rates, environment_id

COLUMNS = Measurement._fields
KEY = ("kernel", "bucket", "place", "mode", "build")


__all__ = ["COLUMNS", "KEY", "CorruptStore", "ForeignFile", "NewerStore", "Store", "StoreError",
           "environment_id", "normalized"]


class StoreError(DataError):
    """The store cannot be opened, read or written now."""


class NewerStore(StoreError):
    """The store was written by a later release. It is left as it is."""


class ForeignFile(StoreError):
    """The path holds something that is not ours: another file, another database, a device."""

    def __init__(self, path: Path, what: str,
                 remedy: str = "set perfdb to a file of its own") -> None:
        super().__init__(f"{path}: wanted a store of measurements, or no file yet; got {what}. "
                         f"Nothing of it was touched: {remedy}")
        self.path = path


class CorruptStore(StoreError, CacheCorruptionError):
    """A store of ours is damaged. `file` (device and inode) identifies it even after a rename."""

    def __init__(self, path: Path, what: str, file: tuple[int, int] | None) -> None:
        super().__init__(f"{path}: {what}")
        self.path, self.what, self.file = path, what, file


S = TypeVar("S", bound="Store")


class Store(ABC):
    """A store of measurements. Use it from one thread, and close it, or use it in a `with`."""

    name: str                                  # for messages

    @abstractmethod
    def write(self, rows: Iterable[Measurement], environments: Mapping[str, Mapping[str, Any]],
              rates: Mapping[str, tuple[Rates, float]]) -> None:
        """Writes everything in one transaction. Each rate comes with the time it was measured."""

    @abstractmethod
    def get(self, kernel: str, bucket: str, place: str, build: str | None = None,
            mode: str = EAGER) -> Measurement | None:
        """Returns the measurement of this build, or of any build the newest."""

    @abstractmethod
    def _rows(self) -> Iterator[Measurement]: ...

    @abstractmethod
    def environments(self) -> dict[str, dict[str, Any]]: ...

    @abstractmethod
    def timed_rates(self) -> dict[str, tuple[Rates, float]]: ...

    @abstractmethod
    def view(self, builds: Mapping[str, str], since: float = 0.0,
             on_damage: Callable[[str], None] = lambda what: None) -> PerfView:
        """Returns the measurements of these builds (kernel -> build) that are not older than
        `since`.

        A view reads lazily. If it meets damage then, it skips the row and calls `on_damage`.
        """

    def verify(self) -> None:
        """Reads everything; raises CorruptStore, or another StoreError, if something is damaged."""
        for _ in self._rows():
            pass
        self.environments()
        self.timed_rates()

    @abstractmethod
    def delete(self, rows: Iterable[Measurement]) -> None:
        """Deletes these rows, then environments that no row refers to any more."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def put(self, rows: Iterable[Measurement],
            environment: Mapping[str, Any] | None = None) -> None:
        """Adds measurements; `environment` is for those that name none."""
        environments = {environment_id(environment): environment} if environment is not None else {}
        default = next(iter(environments), "")
        self.write((m if m.environment else m._replace(environment=default) for m in rows),
                   environments, {})

    def rates(self) -> dict[str, Rates]:
        return {place: rates for place, (rates, _) in self.timed_rates().items()}

    def rows(self, *, kernel: str = "*", op: str = "*", place: str = "*") -> Iterator[Measurement]:
        """Yields the rows whose kernel, op and place match these patterns."""
        for m in self._rows():
            if (names_kernel(kernel, m.kernel) and fnmatchcase(m.op, op)
                and fnmatchcase(m.place, place)):
                yield m

    def prune(self, unwanted: Callable[[Measurement], bool] = lambda m: True, *,
              before: float | None = None) -> int:
        """Removes the `unwanted` rows, optionally only those `before` a time; returns how many."""
        rows = [m for m in self._rows() if (before is None or m.at < before) and unwanted(m)]
        self.delete(rows)
        return len(rows)

    def merge(self, other: Store) -> int:
        """Adds another store's rows; `supersedes` decides between equals; returns how many."""
        rows = list(other.rows())
        self.write(rows, other.environments(), other.timed_rates())
        return len(rows)

    def export(self, path: str | os.PathLike[str]) -> int:
        """Writes everything as JSON lines (perf/exchange.py). Returns how many rows."""
        return export_lines(self, Path(path))

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Adds all rows of such a file, or none. Returns how many."""
        rows, environments, rates = read_lines(Path(path))
        self.write(rows, environments, rates)
        return len(rows)


def normalized(rows: Iterable[Measurement]) -> list[Measurement]:
    """Returns checked rows, none from the future, since such a row would be the newest for ever.

    A clock that was set back leaves rows from the future in a store. Their age is unknown, so any
    other row replaces them: stores count their time as 0 in comparisons.
    """
    now = time.time()
    checked = (m.checked() for m in rows)
    return [m._replace(at=min(m.at, now) if m.at else now) for m in checked]
