"""Measurements as a text file: one JSON object per line, to be carried from one machine to another.

The first line says what follows and how many lines, so that a file that was cut off is noticed.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.reading import FileLimits, read_json_lines
from ..spec.errors import DataError
from .record import Measurement, Rates, environment_id, is_cpu_place, is_text

if TYPE_CHECKING:
    from .interface import Store

SCHEMA = "layerzero.perf/2"
SCHEMA_WITHOUT_MODE = "layerzero.perf/1"       # only its CPU rows are usable: see schema.py
LIMITS = FileLimits(size=1 << 30)                  # of a file
FileContent = tuple[list[Measurement], dict[str, dict[str, Any]], dict[str, tuple[Rates, float]]]


def export_lines(store: Store, path: Path) -> int:
    """Writes the store as JSON lines and returns the number of rows. The file is replaced
    atomically, and only if it is missing, empty or such an export itself."""
    path = Path(os.path.realpath(path))
    _check_replaceable(path)
    rows, environments, rates = list(store.rows()), store.environments(), store.timed_rates()
    lines: list[dict[str, Any]] = [{"environment": i, "data": data}
                                   for i, data in environments.items()]
    lines += [{"rates": place, "flops_per_us": r.flops_per_us, "bytes_per_us": r.bytes_per_us,
               "at": at}
              for place, (r, at) in rates.items()]
    lines += [{"measurement": m._asdict()} for m in rows]
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False,
                                         encoding="utf-8") as out:
            try:
                for line in ({"schema": SCHEMA, "lines": len(lines)}, *lines):
                    out.write(json.dumps(line, sort_keys=True) + "\n")
                out.close()
                os.replace(out.name, path)
            except BaseException:              # re-raised: only the half-written file is removed
                os.unlink(out.name)
                raise
    except OSError as e:
        raise DataError(f"{path}: cannot write the measurements: {e.strerror}") from e
    return len(rows)


def _check_replaceable(path: Path) -> None:
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            if not status.st_size:
                return
            with path.open("rb") as file:
                if b'"layerzero.perf/' in file.readline(200):
                    return
    except FileNotFoundError:
        return
    except OSError as e:
        raise DataError(f"{path}: cannot write the measurements: {e.strerror}") from e
    raise DataError(f"{path}: wanted no file, or one of lz perf export, got something else; "
                    "nothing of it was touched. Name another file")


def read_lines(path: Path) -> FileContent:
    """Reads all of a file; DataError names the line that is wrong."""
    rows: list[Measurement] = []
    environments: dict[str, dict[str, Any]] = {}
    rates: dict[str, tuple[Rates, float]] = {}
    lines = _lines(path)
    _, head = next(lines, (0, {}))
    if head.get("schema") not in (SCHEMA, SCHEMA_WITHOUT_MODE):
        raise DataError(
            f"{path}: wanted a file of lz perf export, which begins with the schema {SCHEMA!r}; "
            f"got {head.get('schema')!r}")
    number = 1
    for number, line in lines:
        try:
            if "measurement" in line:
                measurement = Measurement.from_json(line["measurement"])
                if head["schema"] == SCHEMA or is_cpu_place(measurement.place):
                    rows.append(measurement)
            elif "environment" in line:
                environments[_checked_id(line)] = line["data"]
            elif "rates" in line:
                rates[_checked_place(line)] = _rates(line)
            else:
                raise DataError(
                    "wanted a measurement, an environment or rates, got "
                    f"{', '.join(line) or 'nothing'}")
        except (DataError, KeyError, OverflowError, RecursionError) as e:
            why = f"{e} is missing" if isinstance(e, KeyError) else e
            raise DataError(f"{path}:{number}: {why}; nothing of this file was taken over") from e
    if number - 1 != head.get("lines"):
        raise DataError(
            f"{path}: wanted {head.get('lines')} lines after the first, got {number - 1}; the file "
            "was cut off, nothing of it was taken over")
    return rows, environments, rates


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in read_json_lines(path, "a file of lz perf export", limits=LIMITS, nan=True):
        if not isinstance(line, dict):
            raise DataError(f"{path}:{number}: wanted a JSON object, got {type(line).__name__}")
        yield number, line


def _checked_id(line: Mapping[str, Any]) -> str:
    name = line["environment"]
    if not isinstance(line["data"], dict) or environment_id(line["data"]) != name:
        raise DataError(f"environment {name!r} does not have the content its id says")
    return str(name)


def _checked_place(line: Mapping[str, Any]) -> str:
    place = line["rates"]
    if not is_text(place) or not place:
        raise DataError(f"rates must name a place, got {place!r}")
    return str(place)


def _rates(line: Mapping[str, Any]) -> tuple[Rates, float]:
    numbers = [line[name] for name in ("flops_per_us", "bytes_per_us", "at")]
    for n in numbers:
        if isinstance(n, bool) or not isinstance(n, (int, float)) or not 0 < n < 1e300:
            raise DataError(f"rates of {line['rates']!r} must be numbers > 0, got {n!r}")
    return Rates(float(numbers[0]), float(numbers[1])), float(numbers[2])
