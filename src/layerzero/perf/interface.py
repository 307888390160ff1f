"""What every store of measurements can do.

One row per (kernel, bucket, place, mode, build): the bucket names dtype, switches and sizes, the place device, driver
and toolkits, the mode how it was called, the build the library that was measured. A second measurement of the same row
replaces the first if it is the newer one, but a noisy one never replaces a quiet one (`Measurement.supersedes`); so
stores may be merged in any order and as often as one likes.
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
from .exchange import export_lines, read_lines
from .record import EAGER, Measurement, PerfView, Rates, environment_id

COLUMNS = Measurement._fields
KEY = ("kernel", "bucket", "place", "mode", "build")


__all__ = ["COLUMNS", "KEY", "CorruptStore", "ForeignFile", "NewerStore", "Store", "StoreError",
           "environment_id", "settled"]


class StoreError(DataError):
    """A store that cannot be opened, read or written now."""


class NewerStore(StoreError):
    """Written by a later release. It is left as it is."""


class ForeignFile(StoreError):
    """A path where something is that is not ours: another kind of file, another program's database,
    a device."""

    def __init__(self, path: Path, what: str,
                 remedy: str = "set perfdb to a file of its own") -> None:
        super().__init__(f"{path}: wanted a store of measurements, or no file yet; got {what}. "
                         f"Nothing of it was touched: {remedy}")
        self.path = path


class CorruptStore(StoreError, CacheCorruptionError):
    """A store of ours that is damaged. `file` (device and inode) tells which one it was, even after
    it was renamed."""

    def __init__(self, path: Path, what: str, file: tuple[int, int] | None) -> None:
        super().__init__(f"{path}: {what}")
        self.path, self.what, self.file = path, what, file


S = TypeVar("S", bound="Store")


class Store(ABC):
    """What was measured, kept. Use it from one thread, and close it, or use it in a `with`."""

    name: str                                  # for messages

    @abstractmethod
    def write(self, rows: Iterable[Measurement], environments: Mapping[str, Mapping[str, Any]],
              rates: Mapping[str, tuple[Rates, float]]) -> None:
        """All of it in one transaction. The time beside a rate says when it was measured."""

    @abstractmethod
    def get(self, kernel: str, bucket: str, place: str, build: str | None = None,
            mode: str = EAGER) -> Measurement | None:
        """Of this build, or the newest."""

    @abstractmethod
    def _rows(self) -> Iterator[Measurement]: ...

    @abstractmethod
    def environments(self) -> dict[str, dict[str, Any]]: ...

    @abstractmethod
    def timed_rates(self) -> dict[str, tuple[Rates, float]]: ...

    @abstractmethod
    def view(self, builds: Mapping[str, str], since: float = 0.0,
             on_damage: Callable[[str], None] = lambda what: None) -> PerfView:
        """The measurements of these builds (kernel -> build) that are not older than `since`.

        A view reads when it is asked. Should it meet damage then, it has no row there and calls
        `on_damage`.
        """

    def verify(self) -> None:
        """Read all of it; CorruptStore, or another StoreError, where something is damaged."""
        for _ in self._rows():
            pass
        self.environments()
        self.timed_rates()

    @abstractmethod
    def delete(self, rows: Iterable[Measurement]) -> None:
        """These rows, then environments that no row refers to any more."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def put(self, rows: Iterable[Measurement], environment: Mapping[str, Any] | None = None) -> None:
        """Add measurements; `environment` is that of those that name none."""
        found = {environment_id(environment): environment} if environment is not None else {}
        own = next(iter(found), "")
        self.write((m if m.environment else m._replace(environment=own) for m in rows), found, {})

    def put_rates(self, rates: Mapping[str, Rates], at: float | None = None) -> None:
        when = time.time() if at is None else at
        self.write((), {}, {place: (r, when) for place, r in rates.items()})

    def rates(self) -> dict[str, Rates]:
        return {place: rates for place, (rates, _) in self.timed_rates().items()}

    def rows(self, *, kernel: str = "*", op: str = "*", place: str = "*") -> Iterator[Measurement]:
        """Those whose kernel, op and place match these patterns."""
        for m in self._rows():
            if fnmatchcase(m.kernel, kernel) and fnmatchcase(m.op, op) and fnmatchcase(m.place, place):
                yield m

    def prune(self, unwanted: Callable[[Measurement], bool] = lambda m: True, *, before: float | None = None) -> int:
        """Remove the rows that are `unwanted`, or of those only the ones measured before a time. How many it was."""
        rows = [m for m in self._rows() if (before is None or m.at < before) and unwanted(m)]
        self.delete(rows)
        return len(rows)

    def merge(self, other: Store) -> int:
        """Take over what another store has; of two measurements of the same row one is left. How many were offered."""
        rows = list(other.rows())
        self.write(rows, other.environments(), other.timed_rates())
        return len(rows)

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write everything as JSON lines; see perf/exchange.py."""
        return export_lines(self, Path(path))

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Take over such a file, all of it or nothing."""
        rows, environments, rates = read_lines(Path(path))
        self.write(rows, environments, rates)
        return len(rows)


def settled(rows: Iterable[Measurement]) -> list[Measurement]:
    """As they may be kept: checked, and none from the future, which would be the newest for ever.

    A clock that was set back leaves rows of the future in a store. Nobody knows how old they are,
    so they give way to any other: stores take the time of such a row for 0 when they compare.
    """
    now = time.time()
    checked = (m.checked() for m in rows)
    return [m._replace(at=min(m.at, now) if m.at else now) for m in checked]
