"""Measurements that ship with the package: one JSON file per device model.

They apply until something is measured on the machine itself, and only where device, torch, driver
and libraries are within the ranges in the file. A row holds one kind of call in one mode, with the
microseconds of the useful kernels: torch's own, the fastest, and those near it, without the
reference. benchmarks/ship.py writes these files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..files.reading import read_json
from ..spec.device import Device
from ..spec.display import plural
from ..spec.errors import DataError
from ..spec.grid import bucket_label
from ..spec.op import Op
from .record import MAX_TRUSTED_SAMPLES, Measurement, PerfView, Rates

SCHEMA = "layerzero.shipped/1"
FOLDER = Path(__file__).parent / "tables"
MAX_SLOWDOWN = 1.5     # times the fastest: slower kernels are left out
_HEAD = ("schema", "device", "versions", "date", "command", "rates", "kernels", "rows")

Satisfies = Callable[[str, str], bool]         # (version, range) -> is it inside?


@dataclass(frozen=True)
class ShippedTable:
    """One file."""

    name: str
    device: Mapping[str, Any]                  # type, name; for a CPU also threads and required isa
    versions: Mapping[str, str]                # torch, driver or library -> range of versions
    date: str
    command: str                               # that measured it
    rates: Rates
    rows: tuple[Measurement, ...]              # without a place

    @property
    def title(self) -> str:
        threads = self.device.get("threads")
        measured_on = f", {plural(threads, 'thread')}" if threads else ""
        return f"{self.device['name']}{measured_on}, {self.date}"

    @property
    def kinds(self) -> int:
        return len({(m.op, m.bucket, m.mode) for m in self.rows})

    def is_for(self, device: Device) -> bool:
        return bool((device.type, device.name) == (self.device["type"], self.device["name"])
                    and set(self.device.get("isa", ())) <= set(device.isa))

    def refusal(self, device: Device, threads: int, satisfies: Satisfies) -> str:
        """Returns why the table does not apply here; "" if it does."""
        measured_threads = self.device.get("threads", threads)
        if measured_threads != threads:
            return f"measured on {plural(measured_threads, 'thread')}, torch has {threads} here"
        installed = {"torch": device.torch_version, "driver": device.driver_version}
        return "; ".join(
            f"measured with {name} {self.versions[name]}, here is {version or 'an unknown one'}"
            for name, version in installed.items()
            if name in self.versions and not satisfies(version, self.versions[name]))

    def view(self, place: str, kernels: Collection[str]) -> PerfView:
        """Returns the rows of these kernels as measurements at this place."""
        return PerfView((m._replace(place=place) for m in self.rows if m.kernel in kernels),
                        {place: self.rates})

    def libraries(self) -> Mapping[str, str]:
        return {name: versions for name, versions in self.versions.items()
                if name not in ("torch", "driver")}


def read(path: Path, ops: Mapping[str, Op], wanted_for: Device | None = None) -> ShippedTable:
    """Reads such a file; DataError says what is wrong. Rows of unknown ops are skipped, and so are
    all rows if it is for another device model than the one it is wanted for."""
    data = read_json(path, "a table of measurements that comes with the package")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or sorted(data) != sorted(_HEAD):
        raise DataError(
            f"{path.name}: wanted an object of {', '.join(_HEAD)} with the schema {SCHEMA!r}")
    device, versions, kernels = data["device"], data["versions"], data["kernels"]
    if not isinstance(device, dict) or not all(
            isinstance(device.get(name), str) for name in ("type", "name")):
        raise DataError(f"{path.name}: device must have a type and a name, got {device!r}")
    isa, threads = device.get("isa", []), device.get("threads", 1)
    if not isinstance(isa, list) or not all(isinstance(name, str) for name in isa):
        raise DataError(f"{path.name}: isa must be a list of texts, got {isa!r}")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise DataError(f"{path.name}: threads must be a whole number >= 1, got {threads!r}")
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise DataError(f"{path.name}: versions must be texts like '>=2.9,<2.14', got {versions!r}")
    try:
        rates = Rates(*map(float, data["rates"]))
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"rates must be numbers > 0, got {data['rates']!r}")
        table = ShippedTable(path.stem, device, versions, str(data["date"]), str(data["command"]),
                             rates, rows=())
        if wanted_for is not None and not table.is_for(wanted_for):
            return table
        rows = tuple(m.checked() for row in data["rows"] for m in _measurements(row, kernels, ops))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as e:
        raise DataError(
            f"{path.name}: a row is not as it should be: {type(e).__name__}: {e}") from e
    return replace(table, rows=rows)


def _measurements(row: list[Any], kernels: list[str],
                  ops: Mapping[str, Op]) -> Iterable[Measurement]:
    op, mode, family, sizes, flops, moved, times = row
    if op not in ops:
        return
    labels = []
    for part in sizes.split():
        dim, _, n = part.partition("=")
        labels.append(f"{dim}={n if dim in ops[op].exact else bucket_label(int(n))}")
    bucket = " ".join([family, *labels])
    for index, us in times.items():
        if not index.isdecimal():
            raise ValueError(f"wanted the number of a kernel, got {index!r}")
        yield Measurement(kernels[int(index)], op, bucket, "shipped", float(us), 0.0,
                          MAX_TRUSTED_SAMPLES, family, sizes, float(flops), float(moved), mode=mode)


def text_of(device: Mapping[str, Any], versions: Mapping[str, str], date: str, command: str,
            rates: Rates, measurements: Iterable[Measurement], baselines: Collection[str]) -> str:
    """Returns the text of a file, equal for equal measurements, one row per line."""
    kinds: dict[tuple[str, str, str, str], dict[str, Measurement]] = {}
    for m in measurements:
        kinds.setdefault((m.op, m.mode, m.family, m.sizes), {})[m.kernel] = m
    by_kind: dict[tuple[str, str, str, str], dict[str, Measurement]] = {}
    for kind, by_kernel in sorted(kinds.items()):
        best = min(m.median_us for m in by_kernel.values())
        useful = {k: m for k, m in by_kernel.items() if k in baselines
                  or (m.median_us <= MAX_SLOWDOWN * best and not k.startswith("reference."))}
        if useful:
            by_kind[kind] = useful
    names = sorted({kernel for by_kernel in by_kind.values() for kernel in by_kernel})
    head = {"schema": SCHEMA, "device": dict(device), "versions": dict(versions), "date": date,
            "command": command,
            "rates": [_round_digits(r) for r in rates], "kernels": names}
    lines = []
    for (op, mode, family, sizes), by_kernel in by_kind.items():
        any_row = next(iter(by_kernel.values()))
        times = {str(names.index(k)): _round_digits(m.median_us)
                 for k, m in sorted(by_kernel.items())}
        lines.append(json.dumps([op, mode, family, sizes, _round_digits(any_row.flops),
                                 _round_digits(any_row.bytes), times],
                                separators=(",", ":")))
    return json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n"


def _round_digits(number: float) -> float:
    """Rounds to four digits: more are noise."""
    return float(f"{number:.4g}")
