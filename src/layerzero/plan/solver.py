"""From calls to a dispatch table.

Each call is decided as it would be at run time, from its facts alone: no tensor is made, nothing
runs. An answer holds for every call with the same key. Between the smallest and the largest size
that was seen the grid's other buckets are decided too, and neighbours with one winner become one
row.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..dispatch.facts import TENSOR_READERS
from ..machine import hardware
from ..selection.key import OFF_CPU, NumberField, tests_of
from ..spec.call import Call
from ..spec.errors import ConfigError, DataError, InvalidCall
from ..spec.grid import bucket_bottom, bucket_top
from ..spec.op import Op
from ..spec.plan import Plan
from ..spec.rules import Rule
from ..spec.rules.expr import parse
from ..spec.rules.predicate import Cuts, above, below
from ..world import snapshot as worlds
from ..world.snapshot import World
from .call_facts import facts_of
from .dryrun import dry_run
from .proof import Known, interval, proven
from .table import Artefact, Choice, Facts, Number, Row, Scalar, Span, Stamp, Table

# of one family of calls that are decided beyond those that came
MAX_CELLS = 4096
# sizes of a bucket that are looked at for their divisors
MAX_RESIDUES = 64
_ALWAYS = ("device", "dtype", "grad", "deterministic", "graph", "tensor_kind")
_NUMERIC_TENSOR_FACTS = ("alignment", "stride_last")


def solve(calls: Iterable[Call] | Callable[..., Any], *example: Any,
          path: str | os.PathLike[str] | None = None, device: str | None = None, fill: bool = True,
          **named: Any) -> Table:
    """Select the kernels of all these calls now, under the policy in force; with `path`, write the
    table there.

    `calls` are descriptions (a recorded trace, a model's), or a model with example arguments, whose
    calls are found by a dry run. With `fill=False` the sizes between those of the calls are left
    out.
    """
    listed: Iterable[Call] = dry_run(calls, *example, **named).calls if callable(calls) else calls
    if (example or named) and not callable(calls):
        raise ConfigError(
            "lz.tables.solve: example arguments go with a model; calls are given alone")
    world = replace(worlds.current(), table=None, memo={})
    kind = device or hardware.main_kind()
    solver = _Solver(world, kind, fill)
    for i, call in enumerate(listed):
        solver.add(call, f"call {i} ({call.name or call.op})")
    rows = tuple(row for rows in solver.rows() for row in rows)
    kernels = [c.kernel for row in rows for c in row.choices]
    table = Table(Stamp.of(world, kind, kernels), rows, tuple(solver.artefacts))
    if path is not None:
        table.save(path)
    return table


@dataclass
class _Family:
    """Calls that differ in bucketed sizes only."""

    op: Op
    fields: Mapping[str, NumberField]
    axes: tuple[str, ...]
    when: tuple[tuple[str, Scalar], ...]
    seen: list[dict[str, Any]]


class _Solver:
    def __init__(self, world: World, kind: str, fill: bool) -> None:
        self.world, self.kind, self.fill = world, kind, fill
        self.artefacts: list[Artefact] = []
        self._families: dict[Any, _Family] = {}
        self._device = world.device(kind).facts()

    def add(self, call: Call, owner: str) -> None:
        try:
            op, facts = facts_of(call, self.world, self.kind)
        except InvalidCall as e:
            raise DataError(f"lz.tables.solve: {owner} cannot be decided: {e}") from e
        fields = number_fields(self.world, op, self.kind)
        axes = tuple(n for n in op.dims if n in fields and fields[n].bucket
                     and facts[n] is not None)
        when = conditions(self.world, op, facts, fields)
        fixed = tuple((n, span_of(f, facts[n], _is_integer(op, n))) for n, f in fields.items()
                      if facts[n] is not None and n not in axes and n not in op.derived)
        family = self._families.setdefault((op.name, when, fixed, axes),
                                           _Family(op, fields, axes, when, []))
        family.seen.append(facts)
        plan = self.world.plan(op, facts)
        if plan.kernel is not None and self.world.catalog.by_id[plan.kernel].jit:
            self.artefacts.append(Artefact(plan.kernel, call))

    def rows(self) -> Iterator[list[Row]]:
        for family in self._families.values():
            cells: dict[Any, Row] = {}
            for facts in itertools.chain(family.seen, self._fill_in(family) if self.fill else ()):
                sizes = self._sizes(family, facts)
                if sizes not in cells:
                    row = self._decide(family, facts, sizes)
                    if row is not None:
                        cells[sizes] = row
            yield self._merge(family, list(cells.values()))

    # one cell

    def _sizes(self, family: _Family, facts: Facts) -> tuple[tuple[str, Span], ...]:
        op = family.op
        spans = {n: span_of(f, facts[n], _is_integer(op, n)) for n, f in family.fields.items()
                 if facts[n] is not None}
        spans = {n: s for n, s in spans.items() if not _settled(op, n, s)}
        known: Known = {**facts, **spans}
        known = {n: v for n, v in known.items() if n not in op.derived}
        for name in op.derived:
            implied = interval(op, name, known) if name in spans else None
            if implied is not None and _within(implied, spans[name]):
                del spans[name]                # the sizes say it already
        return tuple(spans.items())

    def _decide(self, family: _Family, facts: Facts,
                sizes: tuple[tuple[str, Span], ...]) -> Row | None:
        plan: Plan = self.world.plan(family.op, facts)
        choices = [Choice(s.kernel, tuple((t.kind, t.target) for t in s.transforms), s.workspace)
                   for s in plan.steps]
        return self._keep_proven(family, Row(family.op.name, family.when, sizes, tuple(choices)))

    def _keep_proven(self, family: _Family, row: Row) -> Row | None:
        """Return the row with the kernels whose rules hold on it; None without the first."""
        known: Known = facts_of_row(family.op, row, self._device)
        fit = tuple(c for c in row.choices if proven(family.op, self.world.catalog.by_id[c.kernel],
                                                     c, known))
        return replace(row, choices=fit) if fit and fit[0] == row.choices[0] else None

    # what was not seen

    def _fill_in(self, family: _Family) -> Iterator[dict[str, Any]]:
        """Yield facts for sizes between the calls': one per combination of buckets and divisors."""
        axes: list[list[int]] = []
        for name in family.axes:
            sizes_seen = sorted({facts[name] for facts in family.seen})
            axes.append(list(_representatives(family.fields[name], sizes_seen[0], sizes_seen[-1])))
        total = 1
        for values in axes:
            total *= len(values)
        if total > MAX_CELLS:
            return
        contract = family.op.requires
        for sizes in itertools.product(*axes):
            facts = {**family.seen[0], **dict(zip(family.axes, sizes))}
            for name, text in family.op.derived.items():
                absent = any(facts[n] is None for n in parse(text).names)
                facts[name] = None if absent else parse(text)(facts)
            if all(rule.check(facts) is None for rule in contract):
                yield facts

    # neighbours

    def _merge(self, family: _Family, rows: list[Row]) -> list[Row]:
        names = list(dict.fromkeys(name for row in rows for name, _ in row.sizes))
        while True:
            before = len(rows)
            for name in names:
                rows = self._merge_along(family, rows, name)
            if len(rows) == before:
                return rows

    def _merge_along(self, family: _Family, rows: list[Row], name: str) -> list[Row]:
        """Join rows that differ in this size only, touch, and have the same first kernel."""
        groups: dict[Any, list[Row]] = {}
        for row in rows:
            rest = tuple((n, s) for n, s in row.sizes if n != name)
            groups.setdefault((rest, name in dict(row.sizes), row.choices[0][:2]), []).append(row)
        out: list[Row] = []
        for (_, has, _), group in groups.items():
            if not has:
                out += group
                continue
            group.sort(key=lambda r: _sort_key(dict(r.sizes)[name]))
            merged: list[Row] = []
            for row in group:
                joined = None
                # multiples lie beside each other
                for i in range(len(merged) - 1, max(len(merged) - 5, -1), -1):
                    joined = self._join(family, merged[i], row, name)
                    if joined is not None:
                        merged[i] = joined
                        break
                if joined is None:
                    merged.append(row)
            out += merged
        return out

    def _join(self, family: _Family, a: Row, b: Row, name: str) -> Row | None:
        span = union(dict(a.sizes)[name], dict(b.sizes)[name])
        if span is None:
            return None
        choices_of_b = {c[:2]: c for c in b.choices}
        choices = tuple(Choice(*c[:2], max(c.workspace, choices_of_b[c[:2]].workspace))
                        for c in a.choices if c[:2] in choices_of_b)
        sizes = tuple((n, span if n == name else s) for n, s in a.sizes
                      # a derived one of any value
                      if n != name or span != Span() or n not in family.op.derived)
        return self._keep_proven(family, Row(a.op, a.when, sizes, choices))


# what a key tells apart

def cell_of(world: World, op: Op, facts: Facts, choice: Choice) -> Row:
    """Return a row of the calls that have the same cache key as this one, served by `choice`."""
    fields = number_fields(world, op, facts["device"])
    spans = {n: span_of(f, facts[n], _is_integer(op, n)) for n, f in fields.items()
             if facts[n] is not None}
    sizes = tuple((n, s) for n, s in spans.items() if not _settled(op, n, s))
    return Row(op.name, conditions(world, op, facts, fields), sizes, (choice,))


def number_fields(world: World, op: Op, kind: str) -> dict[str, NumberField]:
    """Return the numbers that a choice may depend on, each with the tests that kernels and policy
    make of it.

    Tests of the contract alone are left out: a call that breaks it never reaches a table.
    """
    key = ("number fields", op.name, kind)
    fields: dict[str, NumberField] | None = world.memo.get(key)
    if fields is None:
        fields = world.memo[key] = _read_number_fields(world, op, kind)
    return fields


def _read_number_fields(world: World, op: Op, kind: str) -> dict[str, NumberField]:
    program = world.program(op)
    leaves = [leaf for k in world.kernels(op.name) for leaf in tests_of(k)]
    leaves += world.policy.leaves(op.name, op.fact_names)
    tests: dict[str, list[Rule]] = {}
    for leaf in leaves:
        if not (leaf.fact.endswith(OFF_CPU) and kind == "cpu"):
            tests.setdefault(leaf.fact.removesuffix(OFF_CPU), []).append(leaf)
    fields = {f.fact: _with_tests(f, tests.get(f.fact, ()), _is_integer(op, f.fact))
              for f in program.fields
              if f.exact or f.bucket or f.fact in tests}
    for tensor, fact in program.tensor_facts:
        name = f"{tensor}.{fact.removesuffix(OFF_CPU)}"
        if fact.removesuffix(OFF_CPU) in _NUMERIC_TENSOR_FACTS and name in tests:
            fields[name] = _with_tests(NumberField(name), tests[name], True)
    return fields


def _with_tests(f: NumberField, leaves: Sequence[Rule], whole: bool) -> NumberField:
    cuts = Cuts.of(leaf.predicate for leaf in leaves)
    edges = cuts.above.union(-(-n // 1) - 1 if whole else below(float(n)) for n in cuts.below)
    return replace(f, above=tuple(sorted(edges)), equals=tuple(sorted(cuts.at)),
                   multiples=tuple(sorted(cuts.multiples)))


def conditions(world: World, op: Op, facts: Facts,
               fields: Mapping[str, NumberField]) -> tuple[tuple[str, Scalar], ...]:
    """Return the facts that must be equal: all that a key keeps, except numbers in a range."""
    program = world.program(op)
    names = [*_ALWAYS, *(p.name for p in op.params if p.kind in ("bool", "str")), *op.reads]
    names += [f"{t}.{f}" for t, f in program.tensor_facts if f in TENSOR_READERS
              and f not in _NUMERIC_TENSOR_FACTS]
    names += [n for n in facts if n.endswith(".broadcast")]
    equal = {n: facts[n] for n in names if n in facts}
    for name, f in fields.items():
        value = facts[name]
        if value is None or _settled(op, name, span_of(f, value, _is_integer(op, name))):
            equal[name] = value
    return tuple((n, check_scalar(n, v)) for n, v in sorted(equal.items()))


def check_scalar(name: str, value: Any) -> Scalar:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise DataError(f"lz.tables.solve: {name} is {value!r:.80}, which cannot be written in a table")


def span_of(f: NumberField, value: Number, whole: bool) -> Span:
    """Return the span around `value` in which all tests of `f` give the same answers."""
    if value != value:
        raise DataError(f"lz.tables.solve: {f.fact} is not a number; a table has no row for that")
    if f.exact:
        return Span(value, value)
    low: Number | None = None
    high: Number | None = None
    if whole:
        value = int(value)
    if f.bucket and value >= 0:
        low, high = bucket_bottom(int(value)), bucket_top(int(value))
    for edge in f.above:
        end: Number = _floor(edge) if whole else float(edge)
        if value > edge:
            low = above(end) if low is None else max(low, above(end))
        else:
            high = end if high is None else min(high, end)
    for hole in f.equals:
        if value == hole:
            low = high = value
            break
        end = (_floor(hole) if hole == _floor(hole) else None) if whole else float(hole)  # type: ignore[assignment]
        if end is None:
            continue                           # no whole number equals it
        if value > end:
            low = above(end) if low is None else max(low, above(end))
        else:
            high = below(end) if high is None else min(high, below(end))
    if low is not None and low == high:
        return Span(low, high)
    yes = tuple(m for m in f.multiples if value % m == 0)
    return Span(low, high, yes, tuple(m for m in f.multiples if value % m != 0))


def _floor(n: float) -> int:
    return int(n // 1)


def _is_integer(op: Op, name: str) -> bool:
    return not (name in op.by_name and op.by_name[name].kind == "float")


def _settled(op: Op, name: str, span: Span) -> bool:
    """Is this number one value of a parameter or a stride? Then it is a condition, not a range."""
    return span.point and name not in op.dims and name not in op.derived


def facts_of_row(op: Op, row: Row, device: Facts) -> Known:
    """Return what is known of every call of a row."""
    when = dict(row.when)
    itemsize = ({"itemsize": getattr(torch, str(when["dtype"])).itemsize} if when.get("dtype")
                else {})
    defaults = dict.fromkeys(absent_facts(op, row))
    return {**device, **defaults, **itemsize, **when, **dict(row.sizes)}


def absent_facts(op: Op, row: Row) -> list[str]:
    """Return the facts of tensors that the calls of a row do not have."""
    when = dict(row.when)
    absent = [t for t in op.tensors if f"{t}.dtype" in when and when[f"{t}.dtype"] is None]
    return [f"{t}.{fact}" for t in absent for fact in (*TENSOR_READERS, "broadcast")]


# ranges

def union(a: Span, b: Span) -> Span | None:
    """Return both spans as one if there is nothing between them, else None."""
    if a[2:] == b[2:]:
        if (a.high is None or b.low is None or b.low > above(a.high)
            or (a.low is not None and b.low < a.low)):
            return None
        high = None if b.high is None else max(a.high, b.high)
        return Span(a.low, high, *a[2:])
    if a[:2] != b[:2]:
        return None
    flipped = (set(a.multiples) & set(b.others)) | (set(a.others) & set(b.multiples))
    if len(flipped) != 1:
        return None
    rest = [tuple(m for m in ms if m not in flipped)
            for ms in (a.multiples, a.others, b.multiples, b.others)]
    return Span(a.low, a.high, rest[0], rest[1]) if rest[:2] == rest[2:] else None


def _within(inner: Span, outer: Span) -> bool:
    return (not outer.multiples and not outer.others
            and (outer.low is None or (inner.low is not None and inner.low >= outer.low))
            and (outer.high is None or (inner.high is not None and inner.high <= outer.high)))


def _sort_key(span: Span) -> tuple[Any, ...]:
    return (span.multiples, span.others, float("-inf") if span.low is None else span.low)


def _representatives(f: NumberField, first: int, last: int) -> Iterator[int]:
    """Yield sizes between the buckets of `first` and `last`: the ends of each tested span."""
    at, end = bucket_bottom(first), bucket_top(last)
    while at <= end:
        top = bucket_top(at)
        kinds: dict[Span, list[int]] = {}
        near = [*range(at, min(top, at + MAX_RESIDUES) + 1),
                *range(max(at, top - MAX_RESIDUES), top + 1)]
        edges = [n for e in (*f.above, *f.equals) for n in (_floor(e) - 1, _floor(e), _floor(e) + 1)
                 if at <= n <= top]
        for n in sorted({*near, *edges}):
            kinds.setdefault(span_of(f, n, True), []).append(n)
        for values in kinds.values():
            yield from dict.fromkeys((values[-1], values[0]))
        at = top + 1
