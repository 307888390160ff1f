"""layerzero.lock: which kernel serves which calls, in which version and build, to be checked on
other machines.

A dispatch table is valid on one machine only. A lockfile is its portable part: the first kernel of
each row, and for each kernel its package, version, build and, where there is one, certificate.
`compare` shows where two tables or lockfiles agree.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Union

from ..files import reading
from ..machine.builds import build_of
from ..machine.loading import installed_version
from ..spec.codec import At, Record, Text, read, read_fields
from ..spec.device import Device
from ..spec.errors import DataError, LayerZeroError
from ..spec.kernel import Kernel
from ..spec.reason import Code, Reason
from ..spec.rules.predicate import above, below
from ..world import snapshot as worlds
from ..world.registry import certificates
from ..world.snapshot import World
from .force import use_table
from .proof import proven
from .solver import facts_of_row
from .table import SCHEMA as TABLE_SCHEMA
from .table import Hashed, Row, Span, Stamp, Table, digest, distribution_of, write_json

SCHEMA = "layerzero.lock/1"
DEFAULT_PATH = "layerzero.lock"


@dataclass(frozen=True)
class Pin(Record, json="package version build certificate", omit="certificate"):
    """The package, version and build of a kernel that a machine must have."""

    kernel: str
    package: str                               # "" for torch's own kernels
    version: str
    build: str
    certificate: str = ""

    @classmethod
    def of(cls, kernel: Kernel, device: Device) -> Pin:
        distribution = distribution_of(kernel)
        return cls(kernel.id, distribution, installed_version(distribution) or "unknown",
                   build_of(kernel), certificate_of(kernel, device))


def certificate_of(kernel: Kernel, device: Device) -> str:
    """Return a digest of the kernel's certificate on this device; "" if it has none."""
    certificate = certificates.statuses([kernel], device)[kernel.id]
    if not isinstance(certificate, certificates.Certificate):
        return ""
    return digest({"build": certificate.build, "contract": certificate.contract,
                   "grid": certificate.grid})[:16]


@dataclass(frozen=True)
class Lockfile(Hashed, json="made_on kernels rows", header={"schema": SCHEMA}):
    made_on: Text                              # for the reader: the device it was solved on
    pins: tuple[Pin, ...]
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, table: Table, world: World) -> Lockfile:
        """Make a lockfile of the first kernel of each row; fallbacks are not pinned."""
        rows = tuple(replace(row, choices=row.choices[:1]) for row in table.rows)
        known = world.catalog.by_id
        names = sorted({row.kernel for row in rows})
        gone = [n for n in names if n not in known]
        if gone:
            raise DataError(f"{table}: {', '.join(gone)} is not here any more; run lz solve again")
        return cls(table.stamp.device.name,
                   tuple(Pin.of(known[n], table.stamp.device) for n in names), rows)

    @property
    def kernels(self) -> dict[str, Pin]:
        return {pin.kernel: pin for pin in self.pins}

    @classmethod
    def read_others(cls, content: Mapping[str, Any], at: At) -> dict[str, Any]:
        kernels = read(Mapping[str, Any], content.get("kernels"), at / "kernels") or {}
        pins = [read_fields(Pin, pin, at / "kernels" / name, kernel=name)
                for name, pin in kernels.items()]
        return {"pins": tuple(pin for pin in pins if pin is not None)}

    def check_json(self, at: At) -> None:
        unpinned = sorted({row.kernel for row in self.rows} - self.kernels.keys())
        if unpinned:
            (at
             / "kernels").wrong(f"an entry for each kernel of the rows, also {', '.join(unpinned)}",
                                   sorted(self.kernels))


@dataclass(frozen=True)
class Violation(Record, json="kernel row reason text"):
    """One way in which this machine differs from a lockfile."""

    kernel: str
    reason: Reason
    row: str = ""                              # the calls it is about; "" for all

    @property
    def text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"{self.kernel}{' for ' + self.row if self.row else ''}: {self.reason.message}"


def write_lockfile(table: Table | str | os.PathLike[str],
                   path: str | os.PathLike[str] = DEFAULT_PATH) -> Lockfile:
    """Write the lockfile of a table."""
    lock = Lockfile.of(table if isinstance(table, Table) else Table.load(table), worlds.current())
    write_json(path, lock.to_json())
    return lock


def load_lockfile(path: str | os.PathLike[str]) -> Lockfile:
    return Lockfile.from_json(reading.read_json(path, "a lockfile, such as lz lock writes"),
                              str(path))


def check_lockfile(lock: Lockfile | str | os.PathLike[str] = DEFAULT_PATH) -> tuple[Violation, ...]:
    """Return where this machine differs from the lockfile; empty if it can serve all of it."""
    loaded = lock if isinstance(lock, Lockfile) else load_lockfile(lock)
    return tuple(dict.fromkeys(_violations(loaded, worlds.current())))


def use_lockfile(lock: Lockfile | str | os.PathLike[str] = DEFAULT_PATH) -> Table:
    """Put the choices of a lockfile in force, as a table.

    DataError, and no change, on any violation.
    """
    loaded = lock if isinstance(lock, Lockfile) else load_lockfile(lock)
    world = worlds.current()
    violations = tuple(dict.fromkeys(_violations(loaded, world)))
    if violations:
        lines = [f"  {v}" for v in violations]
        raise DataError(f"lockfile {loaded.id} is refused: this machine does not hold to it\n"
                        + "\n".join(lines)
                        + "\nInstall what it names, or make it again: lz solve, then lz lock",
                        [v.reason for v in violations])
    kinds = set(map(_device_type, loaded.rows)) or {"cpu"}
    if len(kinds) > 1:
        raise DataError(
            f"lockfile {loaded.id} is for {', '.join(sorted(kinds))}; one device at a time can be "
            "in force")
    table = Table(Stamp.of(world, kinds.pop(), [p.kernel for p in loaded.pins]), loaded.rows)
    use_table(table)
    return table


def _violations(lock: Lockfile, world: World) -> Iterator[Violation]:
    known, absent = world.catalog.by_id, world.availability()
    homes = {row.kernel: _device_type(row) for row in lock.rows}
    devices = {kind: device for kind in set(homes.values())
               if (device := _device(world, kind)) is not None}
    for pin in lock.pins:
        if pin.kernel not in known:
            yield Violation(pin.kernel,
                            Reason(Code.PLAN_DRIFT, "such a kernel", "a catalog without it"))
            continue
        if (reason := absent.get(pin.kernel)) is not None:
            yield Violation(pin.kernel, reason)
        kind = homes.get(pin.kernel, "cpu")
        if kind not in devices:
            yield Violation(pin.kernel,
                            Reason(Code.PLATFORM_MISMATCH, kind, "a machine without it"))
            continue
        present = Pin.of(known[pin.kernel], devices[kind])
        for name in ("version", "build"):
            want, got = getattr(pin, name), getattr(present, name)
            if want != got:
                label = f"{pin.package} {name}"
                yield Violation(pin.kernel, Reason(Code.PLAN_DRIFT, f"{label} {want or 'none'}",
                                                   f"{label} {got or 'absent'}"))
        if pin.certificate and not present.certificate and pin.kernel not in world.certified:
            yield Violation(pin.kernel, Reason(Code.UNCERTIFIED))
        elif present.certificate and pin.certificate not in ("", present.certificate):
            yield Violation(pin.kernel, Reason(Code.PLAN_DRIFT, f"certificate {pin.certificate}",
                                               f"certificate {present.certificate}"))
    for row in lock.rows:
        if row.kernel in known and row.kernel not in absent and _device_type(row) in devices:
            yield from _row_violations(row, known[row.kernel], world)


def _device_type(row: Row) -> str:
    return str(dict(row.when).get("device", "cpu"))


def _device(world: World, kind: str) -> Device | None:
    try:
        return world.device(kind)
    except LayerZeroError:                     # there is none of that kind here
        return None


def _row_violations(row: Row, kernel: Kernel, world: World) -> Iterator[Violation]:
    op, kind = world.catalog.ops.get(row.op), _device_type(row)
    if op is None or kernel.op.name != row.op:
        drift = Reason(Code.PLAN_DRIFT, f"a kernel of {row.op}", f"one of {kernel.op.name}")
        yield Violation(kernel.id, drift, str(row))
        return
    context = world.selection_context(kind, None)
    refused = next((r.reasons for r in world.roster(op, kind, context).rejected
                    if r.kernel == kernel.id), ())
    known = facts_of_row(op, row, context.device)
    facts = {n: v.high if isinstance(v, Span) else v for n, v in known.items()}
    denied = context.policy.verdict(kernel.id, op.name, facts)
    for reason in (*refused, *([denied] if denied is not None else [])):
        yield Violation(kernel.id, reason, str(row))
    if not refused and not proven(op, kernel, row.choices[0], known):
        broken = [str(rule) for rule in kernel.requires
                  if not proven(op, kernel.constrained((rule,)), row.choices[0], known)]
        yield Violation(kernel.id, Reason(Code.PLAN_DRIFT, "rules that hold for these calls",
                                          "a rule that may not: " + "; ".join(broken)), str(row))


# comparing

Choices = Union[Table, Lockfile]
# that are left of a row, on average, when others are taken out
_MAX_PIECES = 5


def load_choices(path: str | os.PathLike[str]) -> Choices:
    """Read a dispatch table or a lockfile, by its schema."""
    data = reading.read_json(path, "a dispatch table or a lockfile")
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if schema == SCHEMA:
        return Lockfile.from_json(data, Path(path).name)
    if schema == TABLE_SCHEMA:
        return Table.from_json(data, Path(path).name)
    raise DataError(f"{path}: wanted schema {TABLE_SCHEMA} or {SCHEMA}, got {schema!r}",
                    [Reason(Code.SCHEMA_UNKNOWN, (TABLE_SCHEMA, SCHEMA), schema)])


@dataclass(frozen=True)
class Difference(Record, json="op calls a b verdict"):
    """One range of calls and the kernels of A and B for it; "" where there is no row."""

    calls: str
    op: str
    a: str
    b: str

    @property
    def verdict(self) -> str:
        return ("only in B" if not self.a else "only in A" if not self.b else "same"
                if self.a == self.b else "different")


def compare(a: Choices, b: Choices) -> tuple[Difference, ...]:
    """Compare every range of calls that either has; ranges that overlap in part are split."""
    differences = []
    index_b, index_a, work = _RowIndex(b.rows), _RowIndex(a.rows), [-1000 - _MAX_PIECES
                                                                    * (len(a.rows) + len(b.rows))]
    for row in a.rows:
        rest = [row]
        for other in index_b.of(row):
            common = intersection(row, other)
            if common is not None:
                differences.append(Difference(str(common), row.op, row.kernel, other.kernel))
                rest = _subtract(rest, other, work)
        differences += [Difference(str(part), row.op, row.kernel, "") for part in rest]
    for row in b.rows:
        rest = [row]
        for other in index_a.of(row):
            rest = _subtract(rest, other, work)
        differences += [Difference(str(part), row.op, "", row.kernel) for part in rest]
    return tuple(differences)


def _subtract(rest: Sequence[Row], other: Row, work: list[int]) -> list[Row]:
    pieces = [piece for part in rest for piece in subtraction(part, other)]
    work[0] += len(pieces) + 1
    if work[0] > 0:                            # rows of a table that was solved do not overlap
        raise DataError(
            f"{other}: its rows overlap so often that they cannot be compared; make them again "
            "with lz solve or lz lock")
    return pieces


class _RowIndex:
    """Rows indexed by one of their sizes, to find those that may overlap a given row."""

    def __init__(self, rows: Sequence[Row]) -> None:
        groups: dict[Any, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((row.op, row.when), []).append(i)
        self.rows = rows
        self.groups = {kind: self._sort_rows(members) for kind, members in groups.items()}

    def _sort_rows(self, members: Sequence[int]) -> tuple[str, list[int], list[float], list[float]]:
        """Return the size with most distinct ranges, the rows sorted by its low end, those low
        ends, and the largest high end up to each row."""
        names = {name for i in members for name, _ in self.rows[i].sizes}
        name = max(sorted(names), key=lambda n: len({_ends(self.rows[i], n) for i in members}),
                   default="")
        ordered = sorted(members, key=lambda i: _ends(self.rows[i], name))
        lows, highs = zip(*(_ends(self.rows[i], name) for i in ordered))
        return name, ordered, list(lows), list(accumulate(highs, max))

    def of(self, row: Row) -> list[Row]:
        group = self.groups.get((row.op, row.when))
        if group is None:
            return []
        name, ordered, lows, farthest = group
        low, high = _ends(row, name)
        near = ordered[bisect_left(farthest, low):bisect_right(lows, high)]
        return [self.rows[i] for i in sorted(near) if _ends(self.rows[i], name)[1] >= low]


def _ends(row: Row, name: str) -> tuple[float, float]:
    span = next((s for n, s in row.sizes if n == name), Span())
    return -math.inf if span.low is None else span.low, math.inf if span.high is None else span.high


def intersection(a: Row, b: Row) -> Row | None:
    """Return the row of calls that both cover, or None; a size not named may be any."""
    spans, spans_of_b = dict(a.sizes), dict(b.sizes)
    for name, span in spans_of_b.items():
        met = _intersect(spans.get(name, Span()), span)
        if met is None:
            return None
        spans[name] = met
    return replace(a, sizes=tuple(spans.items()))


def subtraction(a: Row, b: Row) -> Iterator[Row]:
    """Yield rows, without overlap, of the calls that `a` covers and `b` does not."""
    if intersection(a, b) is None:
        yield a
        return
    rest = dict(a.sizes)
    for name, cut in b.sizes:
        span = rest.get(name, Span())
        inside, outside = _split(span, cut)
        for piece in outside:
            yield replace(a, sizes=tuple({**rest, name: piece}.items()))
        rest[name] = inside


def _intersect(a: Span, b: Span) -> Span | None:
    lows, highs = [e for e in (a.low, b.low) if e is not None], [e for e in (a.high, b.high)
                                                                 if e is not None]
    low, high = max(lows, default=None), min(highs, default=None)
    yes, no = (tuple(sorted({*x, *y}))
               for x, y in ((a.multiples, b.multiples), (a.others, b.others)))
    if (low is not None and high is not None and low > high) or set(yes) & set(no):
        return None
    return Span(low, high, yes, no)


def _split(span: Span, cut: Span) -> tuple[Span, list[Span]]:
    """Return the part of `span` inside `cut` and the pieces outside. The two spans overlap."""
    outside, inside = [], span
    if cut.low is not None and (inside.low is None or inside.low < cut.low):
        outside.append(inside._replace(high=below(cut.low)))
        inside = inside._replace(low=cut.low)
    if cut.high is not None and (inside.high is None or inside.high > cut.high):
        outside.append(inside._replace(low=above(cut.high)))
        inside = inside._replace(high=cut.high)
    for m in cut.multiples:
        if m not in inside.multiples:
            outside.append(inside._replace(others=(*inside.others, m)))
            inside = inside._replace(multiples=(*inside.multiples, m))
    for m in cut.others:
        if m not in inside.others:
            outside.append(inside._replace(multiples=(*inside.multiples, m)))
            inside = inside._replace(others=(*inside.others, m))
    return inside, outside
