"""Plan a whole block of ops together, ahead of time.

A kernel that is the fastest for its own op may leave its result in a memory order that the next op
must copy first, or take an input only after a copy, or have a fused form beside which it loses.
`plan_block` searches every path through the block: each kernel of each op, in each layout the op
knows, in each dtype that is allowed between ops, and each of the alternatives where the block gives
several (fused or not). A path costs the expected time of its kernels (measured here where tuning
was done) plus the bytes its copies and casts move. The search is exact: of paths that meet in the
same memory order and dtype, the cheapest is kept.

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
from ..spec.codec import Record
from ..spec.errors import InvalidCall, NoKernelFoundError, SpecError
from ..spec.op import Op
from ..spec.plan import SelectionReport
from ..spec.plan import Step as PlanStep
from ..world import snapshot as worlds

Values = Mapping[str, Any]


@dataclass(frozen=True)
class BlockStep(Record, json="part kernel layout dtype kernel_us transform_us transforms source"):
    """The kernel, or the glue, that a plan runs for one part of the block."""

    part: str                                  # op or name of the glue
    kernel: str                                # "" for glue
    layout: str                                # of an op with layouts: the one it is called in
    dtype: str
    kernel_us: float
    transform_us: float
    transforms: tuple[str, ...]
    source: str                                # of the time: measured | interpolated | prior
    run: Callable[[dict[str, Any]], None] = field(repr=False, compare=False,
                                                  default=lambda values: None)


@dataclass(frozen=True, repr=False)
class BlockPlan(SelectionReport, Record,
                json="block signature total_us transform_cost_total fused_ops ways_seen steps"):
    block: str
    signature: str
    steps: tuple[BlockStep, ...]
    results: tuple[str, ...]
    # ops taken in place of several, as the block's alternatives name them
    fused: tuple[str, ...]
    ways_seen: int

    @property
    def total_us(self) -> float:
        return sum(s.kernel_us + s.transform_us for s in self.steps)

    @property
    def transform_cost_total(self) -> float:
        return sum(s.transform_us for s in self.steps)

    @property
    def fused_ops(self) -> tuple[str, ...]:
        return self.fused

    def __call__(self, **values: Any) -> tuple[Any, ...]:
        """Run the block as planned, with no selection on the way."""
        known = dict(values)
        for step in self.steps:
            step.run(known)
        return tuple(known[name] for name in self.results)

    def __str__(self) -> str:
        lines = [
            f"{self.block}: {self.total_us:.1f} us expected, of it {self.transform_cost_total:.1f} "
            "us in copies"
            + (f"; fused: {', '.join(self.fused_ops)}" if self.fused_ops else "")]
        for s in self.steps:
            after = f"  after {', '.join(s.transforms)}" if s.transforms else ""
            lines.append(
                f"  {s.part:<18} {s.kernel:<28} {s.layout:<6} {s.kernel_us + s.transform_us:10.1f} "
                f"us {f'({s.source})' if s.source else '':<14}{after}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Path:
    """A partial path through the block: cost, steps, and values as they lie in memory."""

    cost: float
    steps: tuple[BlockStep, ...]
    values: Mapping[str, Any]
    fused: tuple[str, ...]


_plans: dict[tuple[int, str, bool], BlockPlan] = {}


def plan_block(block: Block, values: Values, greedy: bool = False) -> BlockPlan:
    """Find the cheapest path through `block` for inputs like `values`; plans are kept by their
    signature.

    `greedy` chooses op by op: the fastest kernel for each in the layout it is called in, and the
    first of every set of alternatives.
    """
    world = worlds.current()
    signature = _signature(block, values, world.epoch)
    plan = _plans.get((id(block), signature, greedy))
    if plan is not None:
        return plan
    _check(block.parts, set(values))
    search = _Search(block, greedy)
    with torch.no_grad():
        paths = search.through(block.parts, [_Path(0.0, (), dict(values), ())],
                               frozenset(block.results))
    best = min(paths, key=lambda path: path.cost)
    plan = BlockPlan(block.name, signature, best.steps, block.results, best.fused, search.seen)
    for old in [k for k in _plans if k[0] == id(block) and not k[1].endswith(f"@{world.epoch}")]:
        del _plans[old]                        # made for a world that is gone
    _plans[id(block), signature, greedy] = plan
    return plan


def _signature(block: Block, values: Values, epoch: int) -> str:
    inputs = {n: [list(v.shape), list(v.stride()), str(v.dtype), v.device.type]
              if isinstance(v, Tensor) else repr(v)
              for n, v in sorted(values.items())}
    return hashlib.sha256(json.dumps([block.name, inputs]).encode()).hexdigest()[:16] + f"@{epoch}"


def _check(parts: Sequence[Part], known: set[str]) -> set[str]:
    """Raise SpecError for a value that no part produces; return the names of all values."""
    for part in parts:
        if isinstance(part, Either):
            produced = [_check(way, set(known)) - known for way in part.ways]
            known |= set.intersection(*produced)
            continue
        missing = [n for n in part.reads if n not in known]
        if missing:
            raise SpecError(
                f"{_name(part)} reads {', '.join(missing)}, which nothing before it gives; "
                f"there are {', '.join(sorted(known))}")
        known |= set(part.gives)
    return known


def _name(part: Stage | Glue) -> str:
    return part.op if isinstance(part, Stage) else part.name


def _reads(parts: Sequence[Part]) -> frozenset[str]:
    return frozenset(n for part in parts for n in (
        frozenset[str]().union(*(_reads(way) for way in part.ways)) if isinstance(part, Either)
        else part.reads))


class _Search:
    def __init__(self, block: Block, greedy: bool) -> None:
        self.dtypes, self.greedy, self.seen = block.dtypes, greedy, 0
        self.world = worlds.current()

    def through(self, parts: Sequence[Part], paths: list[_Path],
                results: frozenset[str]) -> list[_Path]:
        for i, part in enumerate(parts):
            alive = results | _reads(parts[i + 1:])
            paths = self.prune([new for path in paths for new in self.extend(part, path, alive)],
                               alive)
        return paths

    def prune(self, paths: list[_Path], alive: frozenset[str]) -> list[_Path]:
        """Keep the cheapest of the paths whose live values lie alike in memory."""
        best: dict[Any, _Path] = {}
        for path in paths:
            values = {n: v for n, v in path.values.items() if n in alive}
            key = tuple((n, v.dtype, v.stride()) for n, v in sorted(values.items())
                        if isinstance(v, Tensor))
            if key not in best or path.cost < best[key].cost:
                best[key] = replace(path, values=values)
        if not best:
            raise NoKernelFoundError(
                "no way through this part of the block: every kernel failed or was refused")
        return list(best.values())

    def extend(self, part: Part, path: _Path, alive: frozenset[str]) -> Iterator[_Path]:
        if isinstance(part, Either):
            for i, parts in enumerate(part.ways[:1] if self.greedy else part.ways):
                for end in self.through(parts, [path], alive):
                    names = tuple(p.op for p in parts if isinstance(p, Stage))
                    yield replace(end, fused=end.fused + names) if i else end
        elif isinstance(part, Glue):
            yield self.glue(part, path)
        else:
            paths = list(self.stage(part, path))
            if self.greedy and paths:          # the one with the least expected time of its own
                paths = [min(paths, key=lambda p: p.cost)]
            yield from paths

    def glue(self, part: Glue, path: _Path) -> _Path:
        self.seen += 1
        inputs = [path.values[n] for n in part.reads]
        out = part.run(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        kind = inputs[0].device.type
        copied = sum(t.numel() * t.element_size() for t in outs if isinstance(t, Tensor)
                     and not _is_view(t, inputs))
        spent = 2.0 * copied / self.rates(kind).bytes_per_us

        def run(values: dict[str, Any]) -> None:
            result = part.run(*(values[n] for n in part.reads))
            values.update(zip(part.gives, result if isinstance(result, tuple) else (result,)))

        copies = (f"copy({', '.join(part.gives)})",) if copied and part.is_copy else ()
        kernel_us, transform_us = (0.0, spent) if part.is_copy else (spent, 0.0)
        step = BlockStep(part.name, "", "", "", kernel_us, transform_us, copies, "", run)
        return _Path(path.cost + spent, (*path.steps, step),
                     {**path.values, **dict(zip(part.gives, outs))}, path.fused)

    def stage(self, part: Stage, path: _Path) -> Iterator[_Path]:
        op = self.world.catalog.ops.get(part.op)
        if op is None:
            raise SpecError(
                f"there is no op {part.op!r}; there are {', '.join(self.world.catalog.ops)}")
        arguments = {p.name: p.default for p in op.params} | dict(part.fixed)
        arguments |= {param: path.values[name] for param, name in part.takes.items()}
        own = arguments[op.variant] if op.variant else ""
        layouts = ((own,) if self.greedy or not op.variant
                   else tuple(n for n in op.patterns if _fits(op, n, arguments)))
        now = arguments[op.main_tensor].dtype
        for dtype in dict.fromkeys((now,) if self.greedy else (now, *self.dtypes)):
            for layout in layouts:
                yield from self.kernels(part, op, arguments, layout, dtype, path)

    def kernels(self, part: Stage, op: Op, arguments: Mapping[str, Any], layout: str,
                dtype: torch.dtype, path: _Path) -> Iterator[_Path]:
        dispatch.public_function(op)
        owner, moved = dispatch.dispatchers[op.name], _Conversion(op, arguments, layout, dtype)
        values = moved.inputs(arguments)
        kind = values[op.main_tensor].device.type
        cast_us = moved.cast_bytes / self.rates(kind).bytes_per_us
        try:
            facts = owner.facts(tuple(values[p.name] for p in op.params), self.world)
        except InvalidCall:
            if layout == (arguments[op.variant] if op.variant else "") and not moved.cast_bytes:
                # as the block itself would call it: the block's mistake
                raise
            return
        if (moved.cast_bytes
            and not self.world.selection_context(kind, None).policy.setting("allow_adaptation")):
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
            chosen = BlockStep(op.name, step.kernel, layout,
                               str(values[op.main_tensor].dtype).removeprefix("torch."),
                               spent, copies, (*moved.transforms, *_copies(step)),
                               step.score.source, moved.runner(part, binding.run))
            yield _Path(path.cost + spent + copies, (*path.steps, chosen),
                        {**path.values, **dict(zip(part.gives, out))}, path.fused)

    def rates(self, kind: str) -> Any:
        return self.world.selection_context(kind, None).rates


def _fits(op: Op, layout: str, arguments: Mapping[str, Any]) -> bool:
    """Can the tensors be viewed in that layout, with as many axes each as it names?"""
    own = op.patterns[arguments[op.variant]]
    return layout == arguments[op.variant] or all(
        len(tokens) == arguments[name].dim() for name, tokens in own.items()
        if arguments[name] is not None and permutation(tokens, op.patterns[layout][name]))


def _copies(step: PlanStep) -> tuple[str, ...]:
    return tuple(str(t) for t in step.transforms if t.bytes)


def _is_view(tensor: Tensor, of: Sequence[Any]) -> bool:
    home = tensor.untyped_storage().data_ptr()
    return any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() == home for t in of)


class _Conversion:
    """Views a stage's inputs in another layout and dtype, and its results in the block's own."""

    def __init__(self, op: Op, arguments: Mapping[str, Any], layout: str,
                 dtype: torch.dtype) -> None:
        self.op, self.layout, self.dtype = op, layout, dtype
        self.own = arguments[op.variant] if op.variant else ""
        self.was = arguments[op.main_tensor].dtype
        tensors = [arguments[n] for n in op.same_dtype or (op.main_tensor,)
                   if arguments[n] is not None]
        moved = (0 if dtype == self.was else sum(t.numel() * (t.element_size() + dtype.itemsize)
                                                 for t in tensors))
        self.cast_bytes = 2 * moved            # there, and the result back
        self.transforms = (f"cast({str(dtype).removeprefix('torch.')})",) if moved else ()

    def inputs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(arguments)
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
            outs = tuple(t.to(self.was) if isinstance(t, Tensor) and t.dtype == self.dtype else t
                         for t in outs)
        return outs

    def runner(self, part: Stage, run: Callable[..., Any]) -> Callable[[dict[str, Any]], None]:
        op, plain = self.op, self.layout == self.own and self.dtype == self.was
        order = [(p.name, part.takes.get(p.name), part.fixed.get(p.name, p.default))
                 for p in op.params]

        def go(values: dict[str, Any]) -> None:
            if plain:
                out = run(*(values[name] if name is not None else fixed
                            for _, name, fixed in order))
                outs = out if isinstance(out, tuple) else (out,)
            else:
                arguments = {param: values[name] if name is not None else fixed
                             for param, name, fixed in order}
                moved = self.inputs(arguments)
                outs = self.outputs(run(*(moved[p.name] for p in op.params)))
            values.update(zip(part.gives, outs))

        return go
