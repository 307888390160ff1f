"""The kernels that may serve one call, against each other: who is fastest, by how much, and how sure that is."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch.background import jit
from ..dispatch.binding import permutation
from ..dispatch.dispatcher import Dispatcher
from ..machine import builds, faults, loading
from ..perf.record import CAPTURED, COMPILED, EAGER, Measurement, Rates, kind_of, mode_of
from ..select.key import fixed_by_key
from ..spec.call import Call
from ..spec.errors import DeviceLost
from ..spec.expr import parse
from ..spec.op import Op
from ..spec.plan import Plan, Step
from ..spec.reason import Reason
from ..world import context
from ..world import snapshot as worlds
from ..world.incidents import blame, mark_unloadable
from ..world.measurements import tighten_spread
from ..world.snapshot import World
from .harness import SURE, Race, Timings, Watch, Way
from .report import Timed, Tuned

LOOK, LEAST, BETWEEN_LOOKS = 3, 10, 5          # rounds: before the hopeless leave, before a verdict, between two
CALL_SECONDS = 3.0                             # for the rounds of one kind of call, once each kernel had its first look
BEHIND_DEFAULT = 1.005                         # how a tie with torch's own default is written down for the others
HOPELESS_AT_ONCE, HOPELESS = 10.0, 3.0         # times slower than the best: after two calls, after the first look


def facts_of(mode: str) -> dict[str, bool]:
    """What the facts of a call say of the mode it is made in."""
    return {"graph": mode == CAPTURED, "compiled": mode == COMPILED}


def eligible(world: World, op: Op, facts: Mapping[str, Any], compile: bool = True) -> Plan:
    """The plan if everything that compiles were compiled, which tuning does, and no table had chosen ahead."""
    compiled = frozenset(k.id for k in world.kernels(op.name) if k.jit and compile)
    free = world.replace(warmed=world.warmed | compiled, table=None)
    plan = free.plan(op, facts, context.current.get(), thorough=True)
    if mode_of(facts) != COMPILED:
        return plan
    known = world.catalog.by_id                # torch.compile takes what it can look into
    return replace(plan, steps=tuple(s for s in plan.steps if known[s.kernel].traceable and not known[s.kernel].jit))


class Contest:
    """One call with its tensors. Everything must happen in the gradient mode of the call."""

    def __init__(self, call: Call, dispatcher: Dispatcher, values: tuple[Any, ...], facts: Mapping[str, Any],
                 watch: Watch, compile: bool = True, deadline: float | None = None) -> None:
        self.call, self.dispatcher, self.op, self.values, self.facts = call, dispatcher, dispatcher.op, values, facts
        self.mode = mode_of(facts)
        self.world = worlds.current()
        self.plan = eligible(self.world, self.op, facts, compile)
        self.scores = {step.kernel: step.score for step in self.plan.steps}
        self.race = Race(watch, faults.FAULTS, deadline=math.inf if deadline is None else deadline)
        self.compile_us: dict[str, float] = {}
        self.failed: dict[str, Reason] = {}
        self.no_time_for: list[str] = []       # kernels, because of the deadline

    def enter(self) -> None:
        """Load and compile each, in the order of the plan; who is far behind already takes no further part.

        A kernel enters only if there is time for the two calls of its entry, as far as can be expected. The
        first call that takes all that is left is the last: what was measured before it stays.
        """
        best = math.inf
        fixed = fixed_by_key(self.world.program(self.op), self.facts)
        for step in self.plan.steps:
            kernel, race = self.world.catalog.by_id[step.kernel], self.race
            if time.perf_counter() + 2e-6 * step.score.total_us >= race.deadline:
                self.no_time_for.append(kernel.id)
                continue
            try:
                run = self.dispatcher.binding(kernel, step, self.facts, {} if kernel.jit else fixed).run
                inputs = prepared(self.op, step, self.values, self.facts)
                if kernel.jit:                 # as a request will call it, with the look at its form
                    run = jit.guarded(kernel, run, self.facts, jit.entries(kernel, self.facts, inputs), _unreachable)
            except loading.LoadFailed as e:
                mark_unloadable(kernel, e.reason)
                self.failed[kernel.id] = e.reason
                continue
            except (RuntimeError, MemoryError) as e:           # no room for the copies
                self.failed[kernel.id] = faults.reason_of(e, faults.classify(e))
                continue
            if self.mode == COMPILED:
                run, inputs = compiled(self.dispatcher, kernel.id), self.values
            took = race.enter(kernel.id, _way(run, inputs, self.call.grad))
            if took is None:
                self._note_failures()
                if kernel.id not in self.failed:
                    self.no_time_for.append(kernel.id)
                continue
            first, us = took
            if self.mode == EAGER and not step.transforms and self.dispatcher.native is not None:
                called = race.replace(kernel.id, _way(by_name(self.dispatcher, kernel.id), inputs, self.call.grad))
                if called is None:
                    self._note_failures()
                    continue
                us = called
            self.compile_us[kernel.id] = max(first - us, 0.0) if kernel.jit or self.mode == COMPILED else 0.0
            if us > HOPELESS_AT_ONCE * best:
                race.run(only=kernel.id)       # once more: the first may have been bad luck
                self._note_failures()
                if kernel.id in self.failed:
                    continue
                us = min(us, race.rounds[kernel.id][-1])
                if us > HOPELESS_AT_ONCE * best:
                    race.drop(kernel.id)
                else:
                    race.rounds[kernel.id].clear()
            best = min(best, us)

    def run(self, rounds: int) -> None:
        """Rounds until it is settled who is fastest, or the time is up."""
        race = self.race
        race.run(LOOK)
        end = min(time.perf_counter() + CALL_SECONDS, race.deadline)
        for name in hopeless(race.timings, race.running):
            race.drop(name)
        race.run(min(LEAST, rounds) - LOOK)
        done = LEAST
        while done < rounds and time.perf_counter() < end and not settled(
                self.costs(), race.running, race.watch.margin):
            race.run(min(BETWEEN_LOOKS, rounds - done))
            done += BETWEEN_LOOKS
        self._note_failures()

    def _note_failures(self) -> None:
        for name, error in self.race.failed.items():
            if name in self.failed:
                continue
            if isinstance(error, (DeviceLost, Warning)):
                raise error
            kind = faults.classify(error)
            self.failed[name] = faults.reason_of(error, kind)
            if kind == "sticky":               # raises DeviceLost
                blame(self.world, self.world.catalog.by_id[name], error, [], self.op.name)
            if kind == "memory" and self.facts["device"] == "cuda":
                torch.cuda.empty_cache()

    def costs(self) -> Timings:
        """What selection counts: also copies of inputs, and the user's boosts."""
        return Timings({name: [self._cost(name, us) for us in rounds]
                        for name, rounds in self.race.timings.rounds.items()})

    def _cost(self, name: str, us: float) -> float:
        score = self.scores[name]
        return (us + score.transform_us) / score.boost

    def verdict(self, rates: Mapping[str, Rates]) -> Tuned:
        """Who is fastest, and what to write down. `rates`, by place, are those measured just now."""
        costs, asked = self.costs(), context.current.get()
        ranked = sorted(costs.rounds, key=lambda name: (costs.median(name), name))
        margin = self.race.watch.margin
        group = [ranked[0], *(name for name in ranked[1:] if costs.beats(ranked[0], name, margin) < SURE)]
        rows, chosen = tighten_spread(self.world, self.op, self.facts,
                                      self._levelled(self._measurements(ranked), group, costs), group, asked)
        best = chosen if chosen in group else ranked[0]
        own = next((name for name in ranked if self.world.catalog.by_id[name].baseline), "")
        kind, flops, moved = kind_of(self.op, self.facts), rows[0].flops, rows[0].bytes
        roof = rates.get(rows[0].place) or self.world.perf.rates.get(rows[0].place)
        if self.call.grad or not (flops or moved):             # the contract counts the way forward only
            roof = None
        timed = {name: Timed(name, self.race.timings.summary(name), costs.median(name), self.compile_us[name],
                             name not in self.race.running) for name in ranked}
        return Tuned(
            self.call, kind.sizes_text, kind.family, best, chosen, mode=self.mode,
            before=self.world.plan(self.op, self.facts, asked).kernel or "",
            sure=min((costs.beats(best, name, 0.0) for name in ranked if name not in group), default=1.0),
            tied=tuple(sorted({*group} - {best})), kernels=tuple(timed.values()), baseline=own,
            gain=costs.gain(own, best) if own else None, flops=flops, bytes=moved,
            roofline=roof.roofline_us(flops, moved) / timed[best].summary.median if roof else None,
            failed=dict(self.failed), no_time_for=tuple(self.no_time_for), rejected=self.plan.rejected,
            measurements=rows)

    def _measurements(self, names: list[str]) -> tuple[Measurement, ...]:
        op, kind, place = self.op, kind_of(self.op, self.facts), self.world.place(self.facts["device"])
        flops, moved = (float(parse(text)(self.facts)) for text in (op.flops, op.bytes))
        found = ((name, self.race.timings.summary(name)) for name in names)
        return tuple(Measurement(
            name, op.name, kind.bucket, place, s.median, s.spread, s.samples, kind.family, kind.sizes_text, flops,
            moved, s.p95, s.p99, self.compile_us[name], builds.build_of(self.world.catalog.by_id[name]), time.time(),
            mode=self.mode)
            for name, s in found)

    def _levelled(self, rows: tuple[Measurement, ...], group: list[str], costs: Timings) -> tuple[Measurement, ...]:
        """What cannot be told apart is written down as equal, so that noise does not choose anew in every run.

        Where torch's own default is among them it gets the call: the others have nothing to offer over it.
        """
        if len(group) == 1:
            return rows
        shared = statistics.median(us for name in group for us in costs.rounds[name])
        alike = [m for m in rows if m.kernel in group]
        spread, samples = max(m.spread for m in alike), min(m.samples for m in alike)
        own = {k for k in group if self.world.catalog.by_id[k].baseline}

        def level(m: Measurement) -> Measurement:
            score = self.scores[m.kernel]
            total = shared if not own or m.kernel in own else shared * BEHIND_DEFAULT
            us = total * score.boost - score.transform_us
            return m._replace(median_us=us if us > 0 else m.median_us, spread=spread, samples=samples)

        return tuple(level(m) if m.kernel in group else m for m in rows)


def by_name(dispatcher: Dispatcher, kernel: str) -> Callable[..., Any]:
    """A call of the public function that names the kernel, of values in the order of the op's parameters: what an
    eager call costs is what it costs this way, through the native path and its launches."""
    # Keyword-only parameters cannot be given by their place: names bind them.
    places, public = dispatcher.op.params, dispatcher.public
    split = next((i for i, p in enumerate(places) if p.keyword_only), len(places))
    names = [p.name for p in places[split:]]

    def call(*values: Any) -> Any:
        return public(*values[:split], **dict(zip(names, values[split:])), backend=kernel)

    return call


def compiled(dispatcher: Dispatcher, kernel: str) -> Callable[..., Any]:
    """The same, compiled by torch.compile as it would be inside a model."""
    return torch.compile(by_name(dispatcher, kernel), fullgraph=True, dynamic=False)


def _unreachable(values: tuple[Any, ...]) -> tuple[str, Any]:
    raise AssertionError("a call came in another form than the one it was compiled for")


def hopeless(timings: Timings, running: Iterable[str]) -> list[str]:
    """Those whose every sample took several times as long as any of the fastest."""
    entered = [name for name in running if name in timings.rounds]
    limit = HOPELESS * min((max(timings.rounds[name]) for name in entered), default=math.inf)
    return [name for name in entered if min(timings.rounds[name]) > limit]


def settled(costs: Timings, running: Iterable[str], margin: float) -> bool:
    """Is the fastest surely faster than each other, or surely no different?"""
    names = sorted((name for name in running if name in costs.rounds), key=costs.median)
    return all(costs.beats(names[0], name, margin) >= SURE or costs.even(names[0], name, margin) >= SURE
               for name in names[1:])


def prepared(op: Op, step: Step, values: tuple[Any, ...], facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """The inputs after the copies and casts of the step: what those cost is in its score already."""
    ready = {p.name: value for p, value in zip(op.params, values)}
    variant = facts[op.variant] if op.variant else ""
    layout = next((t.target for t in step.transforms if t.kind == "layout"), variant)
    for t in step.transforms:
        if t.kind == "cast":
            dtype, was = getattr(torch, t.target), ready[op.main_tensor].dtype
            masks = [n for n, tokens in op.patterns[variant].items() if tokens[0].startswith("~")
                     and ready[n] is not None and ready[n].dtype == was]
            for name in (*(op.same_dtype or (op.main_tensor,)), *masks):
                ready[name] = _leaf(ready[name], partial(Tensor.to, dtype=dtype))
    for t in step.transforms:
        if t.kind == "contiguous":             # as the kernel will see it, in its own layout
            axes = permutation(op.patterns[variant].get(t.target, ()), op.patterns[layout].get(t.target, ()))
            ready[t.target] = _leaf(ready[t.target], partial(_contiguous, axes=axes))
    return tuple(ready.values())


def _leaf(tensor: Tensor | None, change: Callable[[Tensor], Tensor]) -> Tensor | None:
    if tensor is None:
        return None
    return change(tensor.detach()).requires_grad_(tensor.requires_grad)


def _contiguous(tensor: Tensor, axes: tuple[int, ...] | None) -> Tensor:
    if axes is None:
        return tensor.contiguous()
    back = [axes.index(i) for i in range(len(axes))]
    return tensor.permute(axes).contiguous().permute(back)


def _way(run: Callable[..., Any], inputs: tuple[Any, ...], backward: bool) -> Way:
    """One call; where a gradient is asked for, with its way back."""
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad] if backward else []
    if not leaves:
        return lambda: run(*inputs)
    ones: list[Tensor] = []

    def both() -> Any:
        results = run(*inputs)
        outs = [t for t in (results if isinstance(results, (tuple, list)) else (results,))
                if isinstance(t, Tensor) and t.requires_grad]
        if len(ones) != len(outs):
            ones[:] = [torch.ones_like(t) for t in outs]
        return torch.autograd.grad(outs, leaves, ones, allow_unused=True)

    return both
