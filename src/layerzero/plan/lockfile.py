"""layerzero.lock: which kernel serves which calls, and of which build, for another machine to hold to.

A dispatch table holds on one machine only. A lockfile is what of it is portable: the first kernel of each
row, and of each kernel the package, the version, the build and, where there is one, the certificate.
`compare` says where two tables or lockfiles agree.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Union

from ..machine.builds import build_of
from ..machine.loading import installed_version
from ..spec.device import Device
from ..spec.errors import DataError, LayerZeroError
from ..spec.kernel import Kernel
from ..spec.reason import Code, Reason
from ..world import certificates
from ..world import snapshot as worlds
from ..world.snapshot import World
from .force import use_table
from .proof import proven
from .solver import known_of
from .table import SCHEMA as TABLE_SCHEMA
from .table import (
    Row,
    Span,
    Stamp,
    Table,
    above,
    below,
    check_hash,
    check_keys,
    check_schema,
    digest,
    distribution_of,
    read_json,
    text_of,
    write_json,
    wrong,
)

SCHEMA = "layerzero.lock/1"
DEFAULT_PATH = "layerzero.lock"


@dataclass(frozen=True)
class Pin:
    """What a kernel is: exactly this is wanted wherever the lockfile holds."""

    kernel: str
    package: str                               # "" for what torch brings
    version: str
    build: str
    certificate: str = ""

    @classmethod
    def of(cls, kernel: Kernel, device: Device) -> Pin:
        distribution = distribution_of(kernel)
        return cls(kernel.id, distribution, installed_version(distribution) or "unknown", build_of(kernel),
                   certificate_of(kernel, device))

    def to_json(self) -> dict[str, Any]:
        data = {"package": self.package, "version": self.version, "build": self.build}
        return {**data, "certificate": self.certificate} if self.certificate else data


def certificate_of(kernel: Kernel, device: Device) -> str:
    """What was proven of a kernel on this device, by name: its build, the contract, the cases; "" for nothing."""
    found = certificates.statuses([kernel], device)[kernel.id]
    if not isinstance(found, certificates.Certificate):
        return ""
    return digest({"build": found.build, "contract": found.contract, "grid": found.grid})[:16]


@dataclass(frozen=True)
class Lockfile:
    made_on: str                               # for the reader: the device it was solved on
    pins: tuple[Pin, ...]
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, table: Table, world: World) -> Lockfile:
        """Of each row the first kernel: a fallback is no promise."""
        rows = tuple(replace(row, choices=row.choices[:1]) for row in table.rows)
        known = world.catalog.by_id
        names = sorted({row.kernel for row in rows})
        gone = [n for n in names if n not in known]
        if gone:
            raise DataError(f"{table}: {', '.join(gone)} is not here any more; run lz solve again")
        return cls(table.stamp.device.name, tuple(Pin.of(known[n], table.stamp.device) for n in names), rows)

    @cached_property
    def id(self) -> str:
        return digest(self._content())[:16]

    def _content(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "made_on": self.made_on, "kernels": {p.kernel: p.to_json() for p in self.pins},
                "rows": [row.to_json() for row in self.rows]}

    def to_json(self) -> dict[str, Any]:
        content = self._content()
        return {"schema": SCHEMA, "hash": digest(content), **content}

    @classmethod
    def from_json(cls, data: Any, owner: str = "lockfile") -> Lockfile:
        check_schema(data, SCHEMA, owner)
        check_keys(data, ("schema", "hash", "made_on", "kernels", "rows"), owner)
        if not isinstance(data["kernels"], Mapping) or not isinstance(data["rows"], list):
            raise wrong(owner, "kernels as an object and rows as a list", data)
        pins = []
        for name, pin in data["kernels"].items():
            at = f"{owner}.kernels.{name}"
            check_keys(pin, ("package", "version", "build"), at, ("certificate",))
            if not all(type(v) is str for v in pin.values()):
                raise wrong(at, "text for each field", pin)
            pins.append(Pin(name, **pin))
        rows = tuple(Row.from_json(row, f"{owner}.rows[{i}]") for i, row in enumerate(data["rows"]))
        unpinned = sorted({row.kernel for row in rows} - {p.kernel for p in pins})
        if unpinned:
            raise wrong(f"{owner}.kernels", f"an entry for each kernel of the rows, also {', '.join(unpinned)}",
                        sorted(data["kernels"]))
        check_hash(data, owner)
        return cls(text_of(data["made_on"], f"{owner}.made_on"), tuple(pins), rows)


@dataclass(frozen=True)
class Violation:
    """One thing of a lockfile that this machine does not hold to."""

    kernel: str
    reason: Reason
    row: str = ""                              # the calls it is about; "" for all

    def __str__(self) -> str:
        return f"{self.kernel}{' for ' + self.row if self.row else ''}: {self.reason.message}"

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "row": self.row, "reason": self.reason.to_json(), "text": str(self)}


def write_lockfile(table: Table | str | os.PathLike[str], path: str | os.PathLike[str] = DEFAULT_PATH) -> Lockfile:
    """Write down what of a table another machine must hold to."""
    found = Lockfile.of(table if isinstance(table, Table) else Table.load(table), worlds.current())
    write_json(path, found.to_json())
    return found


def load_lockfile(path: str | os.PathLike[str]) -> Lockfile:
    return Lockfile.from_json(read_json(path, "a lockfile, such as lz lock writes"), str(path))


def check_lockfile(lock: Lockfile | str | os.PathLike[str] = DEFAULT_PATH) -> tuple[Violation, ...]:
    """Where this machine cannot do as the lockfile says; empty if it can everywhere."""
    found = lock if isinstance(lock, Lockfile) else load_lockfile(lock)
    return tuple(dict.fromkeys(_violations(found, worlds.current())))


def use_lockfile(lock: Lockfile | str | os.PathLike[str] = DEFAULT_PATH) -> Table:
    """Put the choices of a lockfile in force, as a table. One violation, and nothing of it is."""
    found = lock if isinstance(lock, Lockfile) else load_lockfile(lock)
    world = worlds.current()
    violations = tuple(dict.fromkeys(_violations(found, world)))
    if violations:
        lines = [f"  {v}" for v in violations]
        raise DataError(f"lockfile {found.id} is refused: this machine does not hold to it\n" + "\n".join(lines)
                        + "\nInstall what it names, or make it again: lz solve, then lz lock",
                        [v.reason for v in violations])
    kinds = set(map(_kind, found.rows)) or {"cpu"}
    if len(kinds) > 1:
        raise DataError(f"lockfile {found.id} is for {', '.join(sorted(kinds))}; one device at a time can be in force")
    table = Table(Stamp.of(world, kinds.pop(), [p.kernel for p in found.pins]), found.rows)
    use_table(table)
    return table


def _violations(lock: Lockfile, world: World) -> Iterator[Violation]:
    known, absent = world.catalog.by_id, world.availability()
    homes = {row.kernel: _kind(row) for row in lock.rows}
    devices = {kind: device for kind in set(homes.values()) if (device := _device(world, kind)) is not None}
    for pin in lock.pins:
        if pin.kernel not in known:
            yield Violation(pin.kernel, Reason(Code.PLAN_DRIFT, "such a kernel", "a catalog without it"))
            continue
        if (reason := absent.get(pin.kernel)) is not None:
            yield Violation(pin.kernel, reason)
        kind = homes.get(pin.kernel, "cpu")
        if kind not in devices:
            yield Violation(pin.kernel, Reason(Code.PLATFORM_MISMATCH, kind, "a machine without it"))
            continue
        here = Pin.of(known[pin.kernel], devices[kind])
        for name in ("version", "build"):
            want, got = getattr(pin, name), getattr(here, name)
            if want != got:
                label = f"{pin.package} {name}"
                yield Violation(pin.kernel, Reason(Code.PLAN_DRIFT, f"{label} {want or 'none'}",
                                                   f"{label} {got or 'absent'}"))
        if pin.certificate and not here.certificate and pin.kernel not in world.certified:
            yield Violation(pin.kernel, Reason(Code.UNCERTIFIED))
        elif here.certificate and pin.certificate not in ("", here.certificate):
            yield Violation(pin.kernel, Reason(Code.PLAN_DRIFT, f"certificate {pin.certificate}",
                                               f"certificate {here.certificate}"))
    for row in lock.rows:
        if row.kernel in known and row.kernel not in absent and _kind(row) in devices:
            yield from _cannot_serve(row, known[row.kernel], world)


def _kind(row: Row) -> str:
    return str(dict(row.when).get("device", "cpu"))


def _device(world: World, kind: str) -> Device | None:
    try:
        return world.device(kind)
    except LayerZeroError:                     # there is none of that kind here
        return None


def _cannot_serve(row: Row, kernel: Kernel, world: World) -> Iterator[Violation]:
    op, kind = world.catalog.ops.get(row.op), _kind(row)
    if op is None or kernel.op.name != row.op:
        drift = Reason(Code.PLAN_DRIFT, f"a kernel of {row.op}", f"one of {kernel.op.name}")
        yield Violation(kernel.id, drift, str(row))
        return
    around = world.surroundings(kind, None)
    refused = next((r.reasons for r in world.roster(op, kind, around).rejected if r.kernel == kernel.id), ())
    known = known_of(op, row, around.device)
    facts = {n: v.high if isinstance(v, Span) else v for n, v in known.items()}
    denied = around.policy.verdict(kernel.id, op.name, facts)
    for reason in (*refused, *([denied] if denied is not None else [])):
        yield Violation(kernel.id, reason, str(row))
    if not refused and not proven(op, kernel, row.choices[0], known):
        broken = [str(rule) for rule in kernel.requires
                  if not proven(op, kernel.constrained((rule,)), row.choices[0], known)]
        yield Violation(kernel.id, Reason(Code.PLAN_DRIFT, "rules that hold for these calls",
                                          "a rule that may not: " + "; ".join(broken)), str(row))


# comparing

Choices = Union[Table, Lockfile]
_MOST_PIECES = 5                               # that are left of a row, on average, when others are taken out


def load_choices(path: str | os.PathLike[str]) -> Choices:
    """A table or a lockfile, whichever the file is."""
    data = read_json(path, "a dispatch table or a lockfile")
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if schema == SCHEMA:
        return Lockfile.from_json(data, Path(path).name)
    if schema == TABLE_SCHEMA:
        return Table.from_json(data, Path(path).name)
    raise DataError(f"{path}: wanted schema {TABLE_SCHEMA} or {SCHEMA}, got {schema!r}",
                    [Reason(Code.SCHEMA_UNKNOWN, (TABLE_SCHEMA, SCHEMA), schema)])


@dataclass(frozen=True)
class Difference:
    """One range of calls, and who serves it here and there; "" where there is no row for it."""

    calls: str
    op: str
    a: str
    b: str

    @property
    def verdict(self) -> str:
        return "only in B" if not self.a else "only in A" if not self.b else "same" if self.a == self.b else "different"

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "calls": self.calls, "a": self.a, "b": self.b, "verdict": self.verdict}


def compare(a: Choices, b: Choices) -> tuple[Difference, ...]:
    """Every range of calls that either of them knows. Ranges that overlap in part are cut where they do."""
    found = []
    there, here, work = _Meeting(b.rows), _Meeting(a.rows), [-1000 - _MOST_PIECES * (len(a.rows) + len(b.rows))]
    for row in a.rows:
        rest = [row]
        for other in there.of(row):
            common = intersection(row, other)
            if common is not None:
                found.append(Difference(str(common), row.op, row.kernel, other.kernel))
                rest = _without(rest, other, work)
        found += [Difference(str(part), row.op, row.kernel, "") for part in rest]
    for row in b.rows:
        rest = [row]
        for other in here.of(row):
            rest = _without(rest, other, work)
        found += [Difference(str(part), row.op, "", row.kernel) for part in rest]
    return tuple(found)


def _without(rest: Sequence[Row], other: Row, work: list[int]) -> list[Row]:
    pieces = [piece for part in rest for piece in subtraction(part, other)]
    work[0] += len(pieces) + 1
    if work[0] > 0:                            # rows of a table that was solved do not overlap
        raise DataError(f"{other}: its rows overlap so often that they cannot be compared; make them again with "
                        "lz solve or lz lock")
    return pieces


class _Meeting:
    """The rows that may have calls in common with another row, found by one of their sizes."""

    def __init__(self, rows: Sequence[Row]) -> None:
        groups: dict[Any, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((row.op, row.when), []).append(i)
        self.rows = rows
        self.groups = {kind: self._sorted(members) for kind, members in groups.items()}

    def _sorted(self, members: Sequence[int]) -> tuple[str, list[int], list[float], list[float]]:
        """The size that tells most rows apart, the rows by where it begins, those places, the farthest end so far."""
        names = {name for i in members for name, _ in self.rows[i].sizes}
        name = max(sorted(names), key=lambda n: len({_ends(self.rows[i], n) for i in members}), default="")
        ordered = sorted(members, key=lambda i: _ends(self.rows[i], name))
        lows, highs = zip(*(_ends(self.rows[i], name) for i in ordered))
        return name, ordered, list(lows), list(accumulate(highs, max))

    def of(self, row: Row) -> list[Row]:
        found = self.groups.get((row.op, row.when))
        if found is None:
            return []
        name, ordered, lows, farthest = found
        low, high = _ends(row, name)
        near = ordered[bisect_left(farthest, low):bisect_right(lows, high)]
        return [self.rows[i] for i in sorted(near) if _ends(self.rows[i], name)[1] >= low]


def _ends(row: Row, name: str) -> tuple[float, float]:
    span = next((s for n, s in row.sizes if n == name), Span())
    return -math.inf if span.low is None else span.low, math.inf if span.high is None else span.high


def intersection(a: Row, b: Row) -> Row | None:
    """The calls that both cover. A size that one of them does not name may be any there."""
    spans, theirs = dict(a.sizes), dict(b.sizes)
    for name, span in theirs.items():
        met = _met(spans.get(name, Span()), span)
        if met is None:
            return None
        spans[name] = met
    return replace(a, sizes=tuple(spans.items()))


def subtraction(a: Row, b: Row) -> Iterator[Row]:
    """What `a` covers and `b` does not, as rows that do not overlap."""
    if intersection(a, b) is None:
        yield a
        return
    left = dict(a.sizes)
    for name, cut in b.sizes:
        span = left.get(name, Span())
        inside, outside = _split(span, cut)
        for piece in outside:
            yield replace(a, sizes=tuple({**left, name: piece}.items()))
        left[name] = inside


def _met(a: Span, b: Span) -> Span | None:
    lows, highs = [e for e in (a.low, b.low) if e is not None], [e for e in (a.high, b.high) if e is not None]
    low, high = max(lows, default=None), min(highs, default=None)
    yes, no = (tuple(sorted({*x, *y})) for x, y in ((a.multiples, b.multiples), (a.others, b.others)))
    if (low is not None and high is not None and low > high) or set(yes) & set(no):
        return None
    return Span(low, high, yes, no)


def _split(span: Span, cut: Span) -> tuple[Span, list[Span]]:
    """`span` within `cut`, and the pieces of it without. They have something in common."""
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
