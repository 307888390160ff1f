"""A dispatch table: which kernel serves which calls, decided ahead of time and written down.

A row says, for one op: what the call must be (dtype, switches, which tensors are given, how they lie),
from where to where each of its sizes may go, and the kernels to try, best first. The stamp says where
the table holds: device and driver, builds of the kernels, what they can do, policy. `dispatch_table.json`
is documented in docs/tables.md. plan/solver.py makes tables, plan/lower.py turns one into plain Python.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Union

from ..machine.builds import build_of
from ..machine.loading import installed_version
from ..spec import reading
from ..spec.call import Call
from ..spec.device import Device
from ..spec.errors import DataError, SpecError
from ..spec.kernel import Kernel
from ..spec.plan import Score, Step, Transform
from ..spec.predicate import above, below, is_number
from ..spec.reason import Code, Reason
from ..spec.rules import Rule
from ..spec.sealed import replace_output
from ..world import capabilities
from ..world.snapshot import World

SCHEMA = "layerzero.dispatch_table/1"
DEFAULT_PATH = "dispatch_table.json"
MOST_ROWS = 20_000
TRANSFORMS = ("contiguous", "cast", "layout")
_SAME_MACHINE = ("index", "total_memory")      # of a device: as in its signature, these do not count

Number = Union[int, float]
Scalar = Union[str, int, float, bool, None]
Facts = Mapping[str, Any]


class Span(NamedTuple):
    """The numbers from `low` to `high`, both included (None: no end), of the multiples and non-multiples named."""

    low: Number | None = None
    high: Number | None = None
    multiples: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def covers(self, n: Any) -> bool:
        return (n is not None and (self.low is None or n >= self.low) and (self.high is None or n <= self.high)
                and all(n % m == 0 for m in self.multiples) and all(n % m != 0 for m in self.others))

    @property
    def point(self) -> bool:
        return self.low is not None and self.low == self.high

    def __str__(self) -> str:
        text = str(self.low) if self.point else f"{_shown(self.low, below)}-{_shown(self.high, above)}"
        return text + "".join(f" x{m}" for m in self.multiples) + "".join(f" not x{m}" for m in self.others)

    def to_json(self) -> Any:
        ends = [self.low, self.high]
        if not self.multiples and not self.others:
            return ends
        return {"range": ends, "multiple_of": list(self.multiples), "not_multiple_of": list(self.others)}

    @classmethod
    def from_json(cls, data: Any, owner: str) -> Span:
        if isinstance(data, Mapping):
            check_keys(data, ("range", "multiple_of", "not_multiple_of"), owner)
            ends, multiples, others = data["range"], data["multiple_of"], data["not_multiple_of"]
        else:
            ends, multiples, others = data, [], []
        if not isinstance(ends, list) or len(ends) != 2 or not all(e is None or is_number(e) for e in ends):
            raise wrong(owner, "a range [from, to] of numbers or null", data)
        if None not in ends and ends[0] > ends[1]:
            raise wrong(owner, "a range whose first number is the smaller one", data)
        for name, values in (("multiple_of", multiples), ("not_multiple_of", others)):
            if not isinstance(values, list) or not all(type(m) is int and m > 0 for m in values):
                raise wrong(f"{owner}.{name}", "a list of whole numbers > 0", values)
        return cls(ends[0], ends[1], tuple(multiples), tuple(others))


class Choice(NamedTuple):
    """One kernel of a row: what the inputs go through first, and the memory it needs at most."""

    kernel: str
    transforms: tuple[tuple[str, str], ...] = ()
    workspace: int = 0

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"kernel": self.kernel}
        if self.transforms:
            data["transforms"] = [list(t) for t in self.transforms]
        if self.workspace:
            data["workspace"] = self.workspace
        return data

    @classmethod
    def from_json(cls, data: Any, owner: str) -> Choice:
        check_keys(data, ("kernel",), owner, ("transforms", "workspace"))
        transforms, workspace = data.get("transforms", []), data.get("workspace", 0)
        if not isinstance(transforms, list) or not all(
                isinstance(t, list) and len(t) == 2 and t[0] in TRANSFORMS and type(t[1]) is str for t in transforms):
            raise wrong(f"{owner}.transforms", f"a list of [kind, target], kind one of {', '.join(TRANSFORMS)}",
                         transforms)
        if type(workspace) is not int or workspace < 0:
            raise wrong(f"{owner}.workspace", "bytes, a whole number >= 0", workspace)
        return cls(text_of(data["kernel"], f"{owner}.kernel"), tuple((t[0], t[1]) for t in transforms), workspace)


@dataclass(frozen=True)
class Row:
    """`when` must be equal, `sizes` must be within. A fact of `when` that is None must be absent."""

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
        told = [str(v) if n == "dtype" else f"{n}={v}" for n, v in self.when
                if v not in (None, False, "plain") and "." not in n and n != "device"]
        return " ".join([self.op, *told, *(f"{n}={s}" for n, s in self.sizes)])

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "when": dict(self.when), "sizes": {n: s.to_json() for n, s in self.sizes},
                "choices": [c.to_json() for c in self.choices]}

    @classmethod
    def from_json(cls, data: Any, owner: str) -> Row:
        check_keys(data, ("op", "when", "sizes", "choices"), owner)
        when, sizes, choices = data["when"], data["sizes"], data["choices"]
        if not isinstance(when, Mapping) or not all(
                v is None or type(v) in (str, int, bool) or is_number(v) for v in when.values()):
            raise wrong(f"{owner}.when", "an object of fact: value", when)
        if not isinstance(sizes, Mapping):
            raise wrong(f"{owner}.sizes", "an object of size: range", sizes)
        if not isinstance(choices, list) or not choices:
            raise wrong(f"{owner}.choices", "a list of at least one kernel", choices)
        return cls(text_of(data["op"], f"{owner}.op"), tuple(when.items()),
                   tuple((n, Span.from_json(s, f"{owner}.sizes.{n}")) for n, s in sizes.items()),
                   tuple(Choice.from_json(c, f"{owner}.choices[{i}]") for i, c in enumerate(choices)))


@dataclass(frozen=True)
class Stamp:
    """Where a table holds."""

    device: Device
    place: str                                 # as measurements have it: the device's signature and threads
    policy: str
    capabilities: str
    builds: Mapping[str, str]                  # kernel -> version of what it was built from
    library: str

    @classmethod
    def of(cls, world: World, kind: str, kernels: Iterator[str] | Sequence[str]) -> Stamp:
        known = world.catalog.by_id
        return cls(world.device(kind), world.place(kind), world.policy.hash,
                   capabilities.capabilities_hash(capabilities.export(world.catalog)),
                   {k: build_of(known[k]) for k in sorted(set(kernels)) if k in known},
                   installed_version("layerzero") or "unknown")

    def drift(self, now: Stamp) -> list[Reason]:
        """What is not as it was. An empty list: the table holds here."""
        then, here = ({k: v for k, v in asdict(s.device).items() if k not in _SAME_MACHINE} for s in (self, now))
        changed = [(f"device.{name}", then[name], here[name]) for name in then if then[name] != here[name]]
        if not changed and self.place != now.place:
            changed.append(("threads", self.place, now.place))
        changed += [(name, getattr(self, name), getattr(now, name)) for name in ("policy", "capabilities")
                    if getattr(self, name) != getattr(now, name)]
        changed += [(f"build of {k}", v, now.builds.get(k, "absent")) for k, v in self.builds.items()
                    if now.builds.get(k) != v]
        return [Reason(Code.PLAN_DRIFT, f"{name} {want}", f"{name} {got}", name) for name, want, got in changed]

    def to_json(self) -> dict[str, Any]:
        return {"device": self.device.to_json(), "signature": self.device.signature, "place": self.place,
                "policy": self.policy, "capabilities": self.capabilities, "builds": dict(self.builds),
                "layerzero": self.library}

    @classmethod
    def from_json(cls, data: Any, owner: str) -> Stamp:
        texts = ("signature", "place", "policy", "capabilities", "layerzero")
        check_keys(data, ("device", "builds", *texts), owner)
        signature, place, policy, hashed, library = (text_of(data[name], f"{owner}.{name}") for name in texts)
        try:
            device = Device.from_json(data["device"])
        except SpecError as e:
            raise DataError(f"{owner}.device: {e}") from e
        if signature != device.signature:
            raise wrong(f"{owner}.signature", f"{device.signature}, that of the device beside it", signature)
        builds = data["builds"]
        if not isinstance(builds, Mapping) or not all(type(v) is str for v in builds.values()):
            raise wrong(f"{owner}.builds", "an object of kernel: build", builds)
        return cls(device, place, policy, hashed, dict(builds), library)


class Artefact(NamedTuple):
    """A kernel that compiles on first use, and a call to compile it for."""

    kernel: str
    call: Call


@dataclass(frozen=True)
class Table:
    stamp: Stamp
    rows: tuple[Row, ...]
    jit: tuple[Artefact, ...] = ()
    finder: Callable[[str, Facts], int] | None = field(default=None, compare=False, repr=False)   # the lowered form

    @cached_property
    def id(self) -> str:
        return digest(self._content())[:16]

    @property
    def policy(self) -> str:
        return self.stamp.policy

    @cached_property
    def by_op(self) -> Mapping[str, tuple[tuple[int, Row], ...]]:
        found: dict[str, list[tuple[int, Row]]] = {}
        for i, row in enumerate(self.rows):
            found.setdefault(row.op, []).append((i, row))
        return {op: tuple(rows) for op, rows in found.items()}

    def find(self, op: str, facts: Facts) -> Row | None:
        """The row for the facts of a call, or None. Rows do not overlap."""
        return next((row for _, row in self.by_op.get(op, ()) if row.covers(facts)), None)

    def steps(self, op: str, facts: Facts) -> tuple[Step, ...] | None:
        if self.finder is not None:
            index = self.finder(op, facts)
            return None if index < 0 else self.rows[index].steps
        row = self.find(op, facts)
        return None if row is None else row.steps

    def leaves(self, op: str) -> Iterator[Rule]:
        """The numbers at which answers change: a key must tell both sides apart."""
        seen = {(name, span) for _, row in self.by_op.get(op, ()) for name, span in row.sizes if "." not in name}
        for name, span in sorted(seen, key=str):
            if span.low is not None:
                yield Rule(name, "le", below(span.low), Code.PLAN_BUCKET_MISS)
            if span.high is not None:
                yield Rule(name, "le", span.high, Code.PLAN_BUCKET_MISS)
            for m in (*span.multiples, *span.others):
                yield Rule(name, "multiple_of", m, Code.PLAN_BUCKET_MISS)
        exact = {pair for _, row in self.by_op.get(op, ()) for pair in row.when if type(pair[1]) in (int, float)}
        for name, value in sorted(exact, key=str):
            yield Rule(name, "eq", value, Code.PLAN_BUCKET_MISS)

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(sorted({c.kernel for row in self.rows for c in row.choices}))

    def _content(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "stamp": self.stamp.to_json(), "rows": [row.to_json() for row in self.rows],
                "jit": [{"kernel": a.kernel, "call": a.call.to_json()} for a in self.jit]}

    def to_json(self) -> dict[str, Any]:
        content = self._content()
        return {"schema": SCHEMA, "hash": digest(content), **content}

    @classmethod
    def from_json(cls, data: Any, owner: str = "table") -> Table:
        check_schema(data, SCHEMA, owner)
        check_keys(data, ("schema", "hash", "stamp", "rows", "jit"), owner)
        for name in ("rows", "jit"):
            if not isinstance(data[name], list) or len(data[name]) > MOST_ROWS:
                raise wrong(f"{owner}.{name}", f"a list of at most {MOST_ROWS}", data[name])
        rows = tuple(Row.from_json(row, f"{owner}.rows[{i}]") for i, row in enumerate(data["rows"]))
        jit = []
        for i, item in enumerate(data["jit"]):
            check_keys(item, ("kernel", "call"), f"{owner}.jit[{i}]")
            try:
                call = Call.from_json(item["call"], f"{owner}.jit[{i}].call")
            except SpecError as e:
                raise DataError(str(e)) from e
            jit.append(Artefact(text_of(item["kernel"], f"{owner}.jit[{i}].kernel"), call))
        found = cls(Stamp.from_json(data["stamp"], f"{owner}.stamp"), rows, tuple(jit))
        check_hash(data, owner)
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Table:
        return cls.from_json(read_json(path, "a dispatch table, such as lz solve writes"), str(path))

    def __str__(self) -> str:
        return f"table {self.id}: {len(self.rows)} rows of {len(self.by_op)} ops for {self.stamp.device.name}"


def distribution_of(kernel: Kernel) -> str:
    """The package on the index that a kernel comes with: ours for what we compile, torch for what torch brings."""
    if not kernel.package:
        return "layerzero" if kernel.built is not None else "torch"
    return kernel.distribution or kernel.package.partition(".")[0].replace("_", "-")


def _shown(end: Number | None, beyond: Callable[[Number], Number]) -> str:
    """An end of a span; one that leaves out a round number just so is shown as that number, left out."""
    if end is None:
        return "..."
    return f"({beyond(end)})" if len(repr(beyond(end))) < len(repr(end)) - 4 else str(end)


# files

def read_json(path: str | os.PathLike[str], what: str) -> Any:
    return reading.read_json(path, what)


def write_json(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """In one step: a reader sees the old file or the new one."""
    try:
        replace_output(Path(path), json.dumps(data, indent=1, allow_nan=False) + "\n")
    except OSError as e:
        raise DataError(f"{path} cannot be written: {e.strerror}; give a path in a folder that exists") from e


def digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_hash(data: Mapping[str, Any], owner: str) -> None:
    content = {k: v for k, v in data.items() if k != "hash"}
    if data["hash"] != digest(content):
        raise wrong(f"{owner}.hash", f"{digest(content)[:16]}..., that of the content: the file was changed after it "
                     "was made", f"{str(data['hash'])[:16]}...")


def check_schema(data: Any, wanted: str, owner: str) -> None:
    got = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
    if got != wanted:
        raise DataError(f"{owner}: wanted schema {wanted}, got {got!r}; make it again with this version",
                        [Reason(Code.SCHEMA_UNKNOWN, wanted, got)])


def check_keys(data: Any, wanted: Sequence[str], owner: str, also: Sequence[str] = ()) -> None:
    if not isinstance(data, Mapping):
        raise wrong(owner, f"an object with {', '.join(wanted)}", data)
    missing, surplus = [k for k in wanted if k not in data], [k for k in data if k not in (*wanted, *also)]
    if missing or surplus:
        raise DataError(f"{owner}: missing: {', '.join(missing) or 'nothing'}; unknown: "
                        f"{', '.join(surplus) or 'nothing'}; wanted are {', '.join((*wanted, *also))}")


def text_of(value: Any, owner: str) -> str:
    if type(value) is not str or not value:
        raise wrong(owner, "text", value)
    return value


def wrong(owner: str, want: str, got: Any) -> DataError:
    return DataError(f"{owner}: wanted {want}, got {got!r:.120}")
