"""A dispatch table: which kernel serves which calls, decided ahead of time and written to a file.

A row holds, for one op: the facts that a call must have (dtype, switches, which tensors are given
and their strides), the range of each of its sizes, and the kernels to try, best first. The stamp
says where the table is valid: device and driver, builds of the kernels, their capabilities, policy.
`dispatch_table.json` is documented in docs/tables.md. plan/solver.py makes tables, plan/lower.py
turns one into plain Python.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union

from ..files import reading
from ..files.sealed import replace_output
from ..machine.builds import build_of
from ..machine.loading import installed_version
from ..spec.call import Call
from ..spec.codec import At, Check, Count, Record, Text, encode, encode_fields, one_of, read_fields
from ..spec.device import Device
from ..spec.display import plural
from ..spec.errors import DataError
from ..spec.kernel import Kernel
from ..spec.plan import Score, Step, Transform
from ..spec.reason import Code, Reason
from ..spec.rules import Rule
from ..spec.rules.predicate import above, below
from ..world import capabilities
from ..world.snapshot import World

SCHEMA = "layerzero.dispatch_table/1"
DEFAULT_PATH = "dispatch_table.json"
MAX_ROWS = 20_000
TRANSFORMS = ("contiguous", "cast", "layout")
# of a device: as in its signature, these do not count
_SAME_MACHINE = ("index", "total_memory")

Number = Union[int, float]
Scalar = Union[str, int, float, bool, None]
Facts = Mapping[str, Any]
T = TypeVar("T", bound="Hashed")


def _in_order(ends: Sequence[Any]) -> bool:
    # as floats hold them
    numbers = [end for end in ends if type(end) in (int, float) and abs(end) < 1e300]
    return len(ends) == 2 == len(numbers) + list(ends).count(None) and numbers == sorted(numbers)


Ends = Annotated[tuple[Union[Number, None], Union[Number, None]],
                 Check("a range [from, to] of numbers or null, the smaller one first", _in_order)]
Divisor = Annotated[int, Check("a whole number > 0", lambda n: n > 0)]
ROW_LIMIT = Check(f"a list of at most {MAX_ROWS}", lambda rows: len(rows) <= MAX_ROWS)


class Span(NamedTuple):
    """The numbers from `low` to `high`, both included (None: no end), that are multiples of all
    `multiples` and of none of `others`."""

    low: Number | None = None
    high: Number | None = None
    multiples: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def covers(self, n: Any) -> bool:
        return (n is not None and (self.low is None or n >= self.low)
                and (self.high is None or n <= self.high)
                and all(n % m == 0 for m in self.multiples)
                and all(n % m != 0 for m in self.others))

    @property
    def point(self) -> bool:
        return self.low is not None and self.low == self.high

    def __str__(self) -> str:
        text = (str(self.low) if self.point
                else f"{_shown(self.low, below)}-{_shown(self.high, above)}")
        return text + "".join(f" x{m}" for m in self.multiples) + "".join(f" not x{m}"
                                                                          for m in self.others)

    def to_json(self) -> Any:
        ends = [self.low, self.high]
        if not self.multiples and not self.others:
            return ends
        return {"range": ends, "multiple_of": list(self.multiples),
                "not_multiple_of": list(self.others)}

    @classmethod
    def read_json(cls, data: Any, at: At) -> Span | None:
        ranged = read_fields(_Range, data if isinstance(data, Mapping) else {"range": data}, at)
        return (ranged and cls(ranged.range[0], ranged.range[1], ranged.multiple_of,
                               ranged.not_multiple_of))


class Choice(NamedTuple):
    """One kernel of a row, the transforms of its inputs, and the most workspace that it needs."""

    kernel: Text
    transforms: tuple[tuple[Annotated[str, one_of(TRANSFORMS)], str], ...] = ()
    workspace: Count = 0                       # bytes

    def to_json(self) -> dict[str, Any]:
        return {name: encode(value) for name, value in self._asdict().items() if value
                or name == "kernel"}


class _Range(NamedTuple):
    """The JSON of a span that is not only a range."""

    range: Ends
    multiple_of: tuple[Divisor, ...] = ()
    not_multiple_of: tuple[Divisor, ...] = ()


class _RowMembers(NamedTuple):
    """The JSON of a row."""

    op: Text
    when: Mapping[str, Scalar]
    sizes: Mapping[str, Span]
    choices: Annotated[tuple[Choice, ...], Check("a list of at least one kernel", bool)]


@dataclass(frozen=True)
class Row(Record):
    """`when` must be equal (None: absent) and `sizes` within."""

    op: str
    when: tuple[tuple[str, Scalar], ...]
    sizes: tuple[tuple[str, Span], ...]
    choices: tuple[Choice, ...]

    @property
    def kernel(self) -> str:
        return self.choices[0].kernel

    def covers(self, facts: Facts) -> bool:
        return (all(name in facts and facts[name] == value for name, value in self.when)
                and all(span.covers(facts.get(name)) for name, span in self.sizes))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        score = Score(0.0, 0.0, source="table")
        return tuple(Step(c.kernel, score, tuple(Transform(*t) for t in c.transforms), c.workspace)
                     for c in self.choices)

    def __str__(self) -> str:
        facts = [str(v) if n == "dtype" else f"{n}={v}" for n, v in self.when
                 if v not in (None, False, "plain") and "." not in n and n != "device"]
        return " ".join([self.op, *facts, *(f"{n}={s}" for n, s in self.sizes)])

    def to_json(self) -> dict[str, Any]:
        return encode({"op": self.op, "when": dict(self.when), "sizes": dict(self.sizes),
                       "choices": self.choices})  # type: ignore[no-any-return]

    @classmethod
    def read_json(cls, data: Any, at: At) -> Row | None:
        row = read_fields(_RowMembers, data, at)
        return row and cls(row.op, tuple(row.when.items()), tuple(row.sizes.items()), row.choices)


@dataclass(frozen=True)
class Stamp(Record, json="device signature place policy capabilities builds library",
            names={"library": "layerzero"}):
    """The machine and settings for which a table is valid."""

    device: Device
    # as measurements have it: the device's signature and threads
    place: Text
    policy: Text
    capabilities: Text
    builds: Mapping[str, str]                  # kernel -> version of what it was built from
    library: Text

    @property
    def signature(self) -> str:
        return self.device.signature

    @classmethod
    def of(cls, world: World, kind: str, kernels: Iterator[str] | Sequence[str]) -> Stamp:
        known = world.catalog.by_id
        return cls(world.device(kind), world.place(kind), world.policy.hash,
                   capabilities.hash_of(world.catalog),
                   {k: build_of(known[k]) for k in sorted(set(kernels)) if k in known},
                   installed_version("layerzero") or "unknown")

    def drift(self, now: Stamp) -> list[Reason]:
        """Return what has changed since; empty if the table is valid in the world of `now`."""
        then, current = ({k: v for k, v in asdict(s.device).items() if k not in _SAME_MACHINE}
                         for s in (self, now))
        changed = [(f"device.{name}", then[name], current[name]) for name in then
                   if then[name] != current[name]]
        if not changed and self.place != now.place:
            changed.append(("threads", self.place, now.place))
        changed += [(name, getattr(self, name), getattr(now, name))
                    for name in ("policy", "capabilities")
                    if getattr(self, name) != getattr(now, name)]
        changed += [(f"build of {k}", v, now.builds.get(k, "absent"))
                    for k, v in self.builds.items()
                    if now.builds.get(k) != v]
        return [Reason(Code.PLAN_DRIFT, f"{name} {old}", f"{name} {new}", name)
                for name, old, new in changed]

    @classmethod
    def read_json(cls, data: Any, at: At) -> Stamp | None:
        stamp: Stamp | None = read_fields(cls, data, at)
        if stamp is not None and data.get("signature") != stamp.signature:
            (at / "signature").wrong(f"{stamp.signature}, that of the device beside it",
                                     data.get("signature"))
        return stamp


class Artefact(NamedTuple):
    """A kernel that compiles on first use, and a call to compile it for."""

    kernel: Text
    call: Call


class Hashed(Record):
    """Base of files that hold the hash of their content, so that one that was edited is refused."""

    @cached_property
    def id(self) -> str:
        return digest(encode_fields(self))[:16]

    def to_json(self) -> dict[str, Any]:
        content = encode_fields(self)
        return {"schema": content["schema"], "hash": digest(content), **content}

    @classmethod
    def read_json(cls: type[T], data: Any, at: At) -> T | None:
        content = ({key: value for key, value in data.items() if key != "hash"}
                   if isinstance(data, Mapping) else {})
        value: T | None = read_fields(cls, content, at, **cls.read_others(content, at))
        if value is not None and data.get("hash") != digest(content):
            (at / "hash").wrong(
                f"{digest(content)[:16]}..., that of the content: the file was changed after it "
                "was made", data.get("hash"))
        return value

    @classmethod
    def read_others(cls, content: Mapping[str, Any], at: At) -> dict[str, Any]:
        """Fields that the JSON holds in another form."""
        return {}


@dataclass(frozen=True)
class Table(Hashed, json="stamp rows jit", header={"schema": SCHEMA}):
    miss_code: ClassVar[Code] = Code.PLAN_BUCKET_MISS
    stamp: Stamp
    rows: Annotated[tuple[Row, ...], ROW_LIMIT]
    jit: Annotated[tuple[Artefact, ...], ROW_LIMIT] = ()
    # the lowered form
    finder: Callable[[str, Facts], int] | None = field(default=None, compare=False, repr=False)

    @property
    def policy(self) -> str:
        return self.stamp.policy

    @cached_property
    def by_op(self) -> Mapping[str, tuple[tuple[int, Row], ...]]:
        rows_of: dict[str, list[tuple[int, Row]]] = {}
        for i, row in enumerate(self.rows):
            rows_of.setdefault(row.op, []).append((i, row))
        return {op: tuple(rows) for op, rows in rows_of.items()}

    def find(self, op: str, facts: Facts) -> Row | None:
        """Return the row for the facts of a call, or None. Rows do not overlap."""
        return next((row for _, row in self.by_op.get(op, ()) if row.covers(facts)), None)

    def steps(self, op: str, facts: Facts) -> tuple[Step, ...] | None:
        if self.finder is not None:
            index = self.finder(op, facts)
            return None if index < 0 else self.rows[index].steps
        row = self.find(op, facts)
        return None if row is None else row.steps

    def leaves(self, op: str) -> Iterator[Rule]:
        """Yield rules at the numbers where answers change: a key must tell both sides apart."""
        seen = {(name, span) for _, row in self.by_op.get(op, ()) for name, span in row.sizes
                if "." not in name}
        for name, span in sorted(seen, key=str):
            if span.low is not None:
                yield Rule(name, "le", below(span.low), Code.PLAN_BUCKET_MISS)
            if span.high is not None:
                yield Rule(name, "le", span.high, Code.PLAN_BUCKET_MISS)
            for m in (*span.multiples, *span.others):
                yield Rule(name, "multiple_of", m, Code.PLAN_BUCKET_MISS)
        exact = {pair for _, row in self.by_op.get(op, ()) for pair in row.when
                 if type(pair[1]) in (int, float)}
        for name, value in sorted(exact, key=str):
            yield Rule(name, "eq", value, Code.PLAN_BUCKET_MISS)

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(sorted({c.kernel for row in self.rows for c in row.choices}))

    def save(self, path: str | os.PathLike[str]) -> None:
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Table:
        return cls.from_json(reading.read_json(path, "a dispatch table, such as lz solve writes"),
                             str(path))

    def __str__(self) -> str:
        return (f"table {self.id}: {plural(len(self.rows), 'row')} of "
                f"{plural(len(self.by_op), 'op')} for {self.stamp.device.name}")


def distribution_of(kernel: Kernel) -> str:
    """Return the package a kernel comes with: ours for what we compile, torch for torch's."""
    if not kernel.package:
        return "layerzero" if kernel.built is not None else "torch"
    return kernel.distribution or kernel.package.partition(".")[0].replace("_", "-")


def _shown(end: Number | None, beyond: Callable[[Number], Number]) -> str:
    """Show an end of a span; one next to a round float as that float in parentheses."""
    if end is None:
        return "..."
    return f"({beyond(end)})" if len(repr(beyond(end))) < len(repr(end)) - 4 else str(end)


def write_json(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write a file atomically: a reader sees the old one or the new one."""
    try:
        replace_output(Path(path), json.dumps(data, indent=1, allow_nan=False) + "\n")
    except OSError as e:
        raise DataError(
            f"{path} cannot be written: {e.strerror}; give a path in a folder that exists") from e


def digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True,
                                     separators=(",", ":")).encode()).hexdigest()
