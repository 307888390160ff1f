"""Measurements that come with the package: one JSON file for each model of device they were made on.

They count until something was measured on the machine itself, and only where device, torch, driver and libraries are
within the ranges that the file names. A row holds one kind of call in one mode, with the microseconds of the kernels
worth knowing: torch's own, the fastest, and those near it; not the reference, which is there to compare with.
benchmarks/ship.py writes these files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec.device import Device
from ..spec.errors import DataError
from ..spec.grid import bucket_label
from ..spec.op import Op
from ..spec.reading import read_json
from .record import TELLING, Measurement, PerfView, Rates

SCHEMA = "layerzero.shipped/1"
FOLDER = Path(__file__).parent / "tables"
NEAR = 1.5             # times the fastest: what is slower is of no use to anybody
_HEAD = ("schema", "device", "versions", "date", "command", "rates", "kernels", "rows")

Satisfies = Callable[[str, str], bool]         # (version, range) -> is it inside?


@dataclass(frozen=True)
class Table:
    """One file."""

    name: str
    device: Mapping[str, Any]                  # type, name; of a CPU also threads and the isa that must be there
    versions: Mapping[str, str]                # what must be within which range: torch, driver, a library
    date: str
    command: str                               # with which it was measured
    rates: Rates
    rows: tuple[Measurement, ...]              # without a place

    @property
    def title(self) -> str:
        threads = f", {self.device['threads']} threads" if "threads" in self.device else ""
        return f"{self.device['name']}{threads}, {self.date}"

    @property
    def kinds(self) -> int:
        return len({(m.op, m.bucket, m.mode) for m in self.rows})

    def is_for(self, device: Device) -> bool:
        return bool((device.type, device.name) == (self.device["type"], self.device["name"])
                    and set(self.device.get("isa", ())) <= set(device.isa))

    def refusal(self, device: Device, threads: int, satisfies: Satisfies) -> str:
        """Why the table of this device does not count here; "" where it does."""
        wanted = self.device.get("threads", threads)
        if wanted != threads:
            return f"measured on {wanted} threads, here are {threads}"
        here = {"torch": device.torch_version, "driver": device.driver_version}
        return "; ".join(f"measured with {name} {self.versions[name]}, here is {version or 'an unknown one'}"
                         for name, version in here.items()
                         if name in self.versions and not satisfies(version, self.versions[name]))

    def view(self, place: str, kernels: Collection[str]) -> PerfView:
        """As if these kernels had been measured at this place."""
        return PerfView((m._replace(place=place) for m in self.rows if m.kernel in kernels), {place: self.rates})

    def libraries(self) -> Mapping[str, str]:
        return {name: wanted for name, wanted in self.versions.items() if name not in ("torch", "driver")}


def read(path: Path, ops: Mapping[str, Op]) -> Table:
    """A file of this format, or DataError with what is wrong. Rows of ops that are not here are left out."""
    data = read_json(path, "a table of measurements that comes with the package")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or sorted(data) != sorted(_HEAD):
        raise DataError(f"{path.name}: wanted an object of {', '.join(_HEAD)} with the schema {SCHEMA!r}")
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
        rows = tuple(m.checked() for row in data["rows"] for m in _measurements(row, kernels, ops))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as e:
        raise DataError(f"{path.name}: a row is not as it should be: {type(e).__name__}: {e}") from e
    return Table(path.stem, device, versions, str(data["date"]), str(data["command"]), rates, rows)


def _measurements(row: list[Any], kernels: list[str], ops: Mapping[str, Op]) -> Iterable[Measurement]:
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
        yield Measurement(kernels[int(index)], op, bucket, "shipped", float(us), 0.0, TELLING, family, sizes,
                          float(flops), float(moved), mode=mode)


def text_of(device: Mapping[str, Any], versions: Mapping[str, str], date: str, command: str, rates: Rates,
            measured: Iterable[Measurement], baselines: Collection[str]) -> str:
    """The text of a file; the same for the same measurements. One row a line, so that changes can be read."""
    kinds: dict[tuple[str, str, str, str], dict[str, Measurement]] = {}
    for m in measured:
        kinds.setdefault((m.op, m.mode, m.family, m.sizes), {})[m.kernel] = m
    kept: dict[tuple[str, str, str, str], dict[str, Measurement]] = {}
    for kind, of in sorted(kinds.items()):
        best = min(m.median_us for m in of.values())
        useful = {k: m for k, m in of.items() if k in baselines
                  or (m.median_us <= NEAR * best and not k.startswith("reference."))}
        if len(useful) > 1:                    # a choice of one needs no evidence
            kept[kind] = useful
    names = sorted({kernel for of in kept.values() for kernel in of})
    head = {"schema": SCHEMA, "device": dict(device), "versions": dict(versions), "date": date, "command": command,
            "rates": [_short(r) for r in rates], "kernels": names}
    lines = []
    for (op, mode, family, sizes), of in kept.items():
        one = next(iter(of.values()))
        times = {str(names.index(k)): _short(m.median_us) for k, m in sorted(of.items())}
        lines.append(json.dumps([op, mode, family, sizes, _short(one.flops), _short(one.bytes), times],
                                separators=(",", ":")))
    return json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n"


def _short(number: float) -> float:
    """Four digits: more are noise."""
    return float(f"{number:.4g}")
