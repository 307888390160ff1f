"""Plan a whole block of ops together, ahead of time.

A kernel that is the fastest for its own op may leave its result in a memory order that the next op
must copy first, or take an input only after a copy, or have a fused form beside which it loses.
`plan_block` looks at every way through the block: each kernel of each op, in each layout the op
knows, in each dtype that is allowed between ops, and each of the alternatives where the block gives
several (fused or not). What a way costs is the expected time of its kernels (measured here where
tuning was done) plus the bytes its copies and casts move. The search is exact: ways that meet in the
same memory order and dtype are compared, and the more expensive one is dropped.

Kernels are run once while planning, on the inputs given: only that shows how each lays out its
result. Nothing of this happens on a call path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..dispatch import dispatcher as dispatch
from ..dispatch.binding import permutation
from ..machine import faults
from ..models.block import Block, Either, Glue, Part, Stage
from ..spec.errors import InvalidCall, NoKernel, SpecError
from ..spec.op import Op
from ..spec.plan import Step as PlanStep
from ..world import snapshot as worlds

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Chosen:
    """What a way does at one part of the block."""

    part: str                                  # op or name of the glue
    kernel: str                                # "" for glue
    layout: str                                # of an op with layouts: the one it is called in
    dtype: str
    kernel_us: float
    transform_us: float
    transforms: tuple[str, ...]
    source: str                                # of the time: measured | interpolated | prior
    run: Callable[[dict[str, Any]], None] = field(repr=False, compare=False, default=lambda values: None)

    def to_json(self) -> dict[str, Any]:
        return {n: list(v) if isinstance(v := getattr(self, n), tuple) else v for n in (
            "part", "kernel", "layout", "dtype", "kernel_us", "transform_us", "transforms", "source")}


@dataclass(frozen=True)
class BlockPlan:
    block: str
    signature: str
    steps: tuple[Chosen, ...]
    results: tuple[str, ...]
    fused_ops: tuple[str, ...]                 # ops taken in place of several, as the block's alternatives name them
    ways_seen: int

    @property
    def total_us(self) -> float:
        return sum(s.kernel_us + s.transform_us for s in self.steps)

    @property
    def transform_cost_total(self) -> float:
        return sum(s.transform_us for s in self.steps)

    def __call__(self, **values: Any) -> tuple[Any, ...]:
        """Run the block as planned, with no selection on the way."""
        known = dict(values)
        for step in self.steps:
            step.run(known)
        return tuple(known[name] for name in self.results)

    def to_json(self) -> dict[str, Any]:
        return {"block": self.block, "signature": self.signature, "total_us": self.total_us,
                "transform_cost_total": self.transform_cost_total, "fused_ops": list(self.fused_ops),
                "ways_seen": self.ways_seen, "steps": [s.to_json() for s in self.steps]}

    def __str__(self) -> str:
        lines = [f"{self.block}: {self.total_us:.1f} us expected, of it {self.transform_cost_total:.1f} us in copies"
                 + (f"; fused: {', '.join(self.fused_ops)}" if self.fused_ops else "")]
        for s in self.steps:
            after = f"  after {', '.join(s.transforms)}" if s.transforms else ""
            lines.append(f"  {s.part:<18} {s.kernel:<28} {s.layout:<6} {s.kernel_us + s.transform_us:10.1f} us "
                         f"{f'({s.source})' if s.source else '':<14}{after}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Way:
    """A way as far as it has come: what it cost, what it did, and the values as they lie in memory."""

    cost: float
    steps: tuple[Chosen, ...]
    values: Mapping[str, Any]
    fused: tuple[str, ...]


_remembered: dict[tuple[int, str, bool], BlockPlan] = {}


def plan_block(block: Block, values: Values, greedy: bool = False) -> BlockPlan:
    """The cheapest way through `block` for inputs like `values`; remembered by their signature.

    `greedy` is what choosing op by op amounts to: the fastest kernel for each in the layout it is called in,
    and the plain form of every alternative.
    """
    world = worlds.current()
    signature = _signature(block, values, world.epoch)
    found = _remembered.get((id(block), signature, greedy))
    if found is not None:
        return found
    _check(block.parts, set(values))
    search = _Search(block, greedy)
    with torch.no_grad():
        ways = search.through(block.parts, [_Way(0.0, (), dict(values), ())], frozenset(block.results))
    best = min(ways, key=lambda way: way.cost)
    plan = BlockPlan(block.name, signature, best.steps, block.results, best.fused, search.seen)
    for old in [k for k in _remembered if k[0] == id(block) and not k[1].endswith(f"@{world.epoch}")]:
        del _remembered[old]                   # made for a world that is gone
    _remembered[id(block), signature, greedy] = plan
    return plan


def _signature(block: Block, values: Values, epoch: int) -> str:
    inputs = {n: [list(v.shape), list(v.stride()), str(v.dtype), v.device.type] if isinstance(v, Tensor) else repr(v)
              for n, v in sorted(values.items())}
    return hashlib.sha256(json.dumps([block.name, inputs]).encode()).hexdigest()[:16] + f"@{epoch}"


def _check(parts: Sequence[Part], known: set[str]) -> set[str]:
    """Every value must come from somewhere, and every alternative must give the same ones."""
    for part in parts:
        if isinstance(part, Either):
            made = [_check(way, set(known)) - known for way in part.ways]
            known |= set.intersection(*made)
            continue
        missing = [n for n in part.reads if n not in known]
        if missing:
            raise SpecError(f"{_name(part)} reads {', '.join(missing)}, which nothing before it gives; "
                            f"there are {', '.join(sorted(known))}")
        known |= set(part.gives)
    return known


def _name(part: Stage | Glue) -> str:
    return part.op if isinstance(part, Stage) else part.name


def _reads(parts: Sequence[Part]) -> frozenset[str]:
    return frozenset(n for part in parts for n in (
        frozenset[str]().union(*(_reads(way) for way in part.ways)) if isinstance(part, Either) else part.reads))


class _Search:
    def __init__(self, block: Block, greedy: bool) -> None:
        self.dtypes, self.greedy, self.seen = block.dtypes, greedy, 0
        self.world = worlds.current()

    def through(self, parts: Sequence[Part], ways: list[_Way], wanted: frozenset[str]) -> list[_Way]:
        for i, part in enumerate(parts):
            alive = wanted | _reads(parts[i + 1:])
            ways = self.cheapest([new for way in ways for new in self.onward(part, way, alive)], alive)
        return ways

    def cheapest(self, ways: list[_Way], alive: frozenset[str]) -> list[_Way]:
        """Of the ways whose live values lie alike in memory, the cheapest."""
        best: dict[Any, _Way] = {}
        for way in ways:
            values = {n: v for n, v in way.values.items() if n in alive}
            key = tuple((n, v.dtype, v.stride()) for n, v in sorted(values.items()) if isinstance(v, Tensor))
            if key not in best or way.cost < best[key].cost:
                best[key] = replace(way, values=values)
        if not best:
            raise NoKernel("no way through this part of the block: every kernel failed or was refused")
        return list(best.values())

    def onward(self, part: Part, way: _Way, alive: frozenset[str]) -> Iterator[_Way]:
        if isinstance(part, Either):
            for i, parts in enumerate(part.ways[:1] if self.greedy else part.ways):
                for end in self.through(parts, [way], alive):
                    names = tuple(p.op for p in parts if isinstance(p, Stage))
                    yield replace(end, fused=end.fused + names) if i else end
        elif isinstance(part, Glue):
            yield self.glue(part, way)
        else:
            found = list(self.stage(part, way))
            if self.greedy and found:          # the one with the least expected time of its own
                found = [min(found, key=lambda w: w.cost)]
            yield from found

    def glue(self, part: Glue, way: _Way) -> _Way:
        self.seen += 1
        given = [way.values[n] for n in part.reads]
        out = part.run(*given)
        outs = out if isinstance(out, tuple) else (out,)
        kind = given[0].device.type
        copied = sum(t.numel() * t.element_size() for t in outs if isinstance(t, Tensor) and not _is_view(t, given))
        spent = 2.0 * copied / self.rates(kind).bytes_per_us

        def run(values: dict[str, Any]) -> None:
            result = part.run(*(values[n] for n in part.reads))
            values.update(zip(part.gives, result if isinstance(result, tuple) else (result,)))

        copies = (f"copy({', '.join(part.gives)})",) if copied and part.is_copy else ()
        kernel_us, transform_us = (0.0, spent) if part.is_copy else (spent, 0.0)
        step = Chosen(part.name, "", "", "", kernel_us, transform_us, copies, "", run)
        return _Way(way.cost + spent, (*way.steps, step), {**way.values, **dict(zip(part.gives, outs))}, way.fused)

    def stage(self, part: Stage, way: _Way) -> Iterator[_Way]:
        op = self.world.catalog.ops.get(part.op)
        if op is None:
            raise SpecError(f"there is no op {part.op!r}; there are {', '.join(self.world.catalog.ops)}")
        given = {p.name: p.default for p in op.params} | dict(part.fixed)
        given |= {param: way.values[name] for param, name in part.takes.items()}
        own = given[op.variant] if op.variant else ""
        layouts = (own,) if self.greedy or not op.variant else tuple(n for n in op.patterns if _fits(op, n, given))
        now = given[op.main_tensor].dtype
        for dtype in dict.fromkeys((now,) if self.greedy else (now, *self.dtypes)):
            for layout in layouts:
                yield from self.kernels(part, op, given, layout, dtype, way)

    def kernels(self, part: Stage, op: Op, given: Mapping[str, Any], layout: str, dtype: torch.dtype,
                way: _Way) -> Iterator[_Way]:
        dispatch.public_function(op)
        owner, moved = dispatch.dispatchers[op.name], _Move(op, given, layout, dtype)
        values = moved.inputs(given)
        kind = values[op.main_tensor].device.type
        cast_us = moved.cast_bytes / self.rates(kind).bytes_per_us
        try:
            facts = owner.facts(tuple(values[p.name] for p in op.params), self.world)
        except InvalidCall:
            if layout == (given[op.variant] if op.variant else "") and not moved.cast_bytes:
                raise                          # as the block itself would call it: the block's mistake
            return
        if moved.cast_bytes and not self.world.surroundings(kind, None).policy.setting("allow_adaptation"):
            return
        for step in self.world.plan(op, facts).steps:
            self.seen += 1
            try:
                binding = owner.bind(self.world.catalog.by_id[step.kernel], step, facts, {})
                out = moved.outputs(binding.run(*(values[p.name] for p in op.params)))
            except faults.FAULTS as e:         # LoadFailed among them
                if isinstance(e, faults.PASSED_ON):
                    raise
                continue                       # it would fail when called, too
            spent = step.score.kernel_us
            copies = step.score.transform_us + cast_us
            chosen = Chosen(op.name, step.kernel, layout, str(values[op.main_tensor].dtype).removeprefix("torch."),
                            spent, copies, (*moved.transforms, *_copies(step)), step.score.source,
                            moved.runner(part, binding.run))
            yield _Way(way.cost + spent + copies, (*way.steps, chosen),
                       {**way.values, **dict(zip(part.gives, out))}, way.fused)

    def rates(self, kind: str) -> Any:
        return self.world.surroundings(kind, None).rates


def _fits(op: Op, layout: str, given: Mapping[str, Any]) -> bool:
    """Can the tensors be seen in that layout: has each as many axes as it names?"""
    own = op.patterns[given[op.variant]]
    return layout == given[op.variant] or all(
        len(tokens) == given[name].dim() for name, tokens in own.items()
        if given[name] is not None and permutation(tokens, op.patterns[layout][name]))


def _copies(step: PlanStep) -> tuple[str, ...]:
    return tuple(str(t) for t in step.transforms if t.bytes)


def _is_view(tensor: Tensor, of: Sequence[Any]) -> bool:
    home = tensor.untyped_storage().data_ptr()
    return any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() == home for t in of)


class _Move:
    """The inputs of a stage seen in another layout and dtype, and its results seen in the block's own again."""

    def __init__(self, op: Op, given: Mapping[str, Any], layout: str, dtype: torch.dtype) -> None:
        self.op, self.layout, self.dtype = op, layout, dtype
        self.own = given[op.variant] if op.variant else ""
        self.was = given[op.main_tensor].dtype
        tensors = [given[n] for n in op.same_dtype or (op.main_tensor,) if given[n] is not None]
        moved = 0 if dtype == self.was else sum(t.numel() * (t.element_size() + dtype.itemsize) for t in tensors)
        self.cast_bytes = 2 * moved            # there, and the result back
        self.transforms = (f"cast({str(dtype).removeprefix('torch.')})",) if moved else ()

    def inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(given)
        if self.layout != self.own:
            source, target = self.op.patterns[self.own], self.op.patterns[self.layout]
            for name, tokens in source.items():
                axes = permutation(tokens, target[name])
                if axes and values[name] is not None:
                    values[name] = values[name].permute(axes)
            values[self.op.variant] = self.layout
        if self.dtype != self.was:
            for name in self.op.same_dtype or (self.op.main_tensor,):
                if values[name] is not None:
                    values[name] = values[name].to(self.dtype)
        return values

    def outputs(self, out: Any) -> tuple[Any, ...]:
        outs = out if isinstance(out, tuple) else (out,)
        if self.layout != self.own:
            pairs = zip(self.op.result_patterns[self.layout], self.op.result_patterns[self.own])
            moves = [permutation(s, t) for s, t in pairs]
            outs = tuple(t.permute(moves[i]) if i < len(moves) and moves[i] is not None else t
                         for i, t in enumerate(outs))
        if self.dtype != self.was:
            outs = tuple(t.to(self.was) if isinstance(t, Tensor) and t.dtype == self.dtype else t for t in outs)
        return outs

    def runner(self, part: Stage, run: Callable[..., Any]) -> Callable[[dict[str, Any]], None]:
        op, plain = self.op, self.layout == self.own and self.dtype == self.was
        order = [(p.name, part.takes.get(p.name), part.fixed.get(p.name, p.default)) for p in op.params]

        def go(values: dict[str, Any]) -> None:
            if plain:
                out = run(*(values[name] if name is not None else fixed for _, name, fixed in order))
                outs = out if isinstance(out, tuple) else (out,)
            else:
                given = {param: values[name] if name is not None else fixed for param, name, fixed in order}
                moved = self.inputs(given)
                outs = self.outputs(run(*(moved[p.name] for p in op.params)))
            values.update(zip(part.gives, outs))

        return go
