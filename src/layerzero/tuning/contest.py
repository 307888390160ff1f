"""A contest of the kernels that may serve one call: which is fastest, how surely, by how much."""

from __future__ import annotations

import math
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
from ..selection.key import fixed_by_key
from ..spec.call import Call
from ..spec.errors import DeviceLost
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.plan import DEFAULT, PRIOR, Plan, Step
from ..spec.reason import Reason
from ..spec.rules import slow_half_matmul
from ..spec.rules.expr import parse
from ..world import context
from ..world import snapshot as worlds
from ..world.incidents import blame, mark_unloadable
from ..world.measurements import tighten_spread
from ..world.snapshot import World
from .functions import BACKENDS, Functions, torch_functions
from .harness import SURE, Contestant, Race, Timings, Watch
from .report import TimedKernel, Tuned

# until the slowest leave, until a verdict, until the next
FIRST_ROUNDS, MIN_ROUNDS, MORE_ROUNDS = 3, 10, 5
# for the rounds of one kind of call, after the first ones
CALL_SECONDS = 3.0
# a compiler is expected to take this long where none has run yet: it cannot be interrupted
COMPILE_SECONDS = 15.0
# a call of torch's may take this many times as long as guessed where it computes in a half type an
# element at a time
HALF_SLOWDOWN = 100.0
# a tie with torch's default is recorded as this much slower
BEHIND_DEFAULT = 1.005
# times slower than the best: after two calls, after the first rounds
DROP_ON_ENTRY, DROP_AFTER_FIRST = 10.0, 3.0


def mode_facts(mode: str) -> dict[str, bool]:
    """Return the facts that say in which mode a call is made."""
    return {"graph": mode == CAPTURED, "compiled": mode == COMPILED}


def eligible_plan(world: World, op: Op, facts: Mapping[str, Any], compile: bool = True) -> Plan:
    """Return the plan as if every kernel were compiled and no dispatch table in use."""
    jit_kernels = frozenset(k.id for k in world.kernels(op.name) if k.jit and compile)
    free = world.replace(warmed=world.warmed | jit_kernels, table=None)
    plan = free.plan(op, facts, context.current.get(), thorough=True)
    if mode_of(facts) != COMPILED:
        return plan
    by_id = world.catalog.by_id                # torch.compile takes only what it can trace
    return replace(plan, steps=tuple(s for s in plan.steps if by_id[s.kernel].traceable
                                     and not by_id[s.kernel].jit))


class Contest:
    """The contest for one call with its tensors, in the gradient mode of the call."""

    def __init__(self, call: Call, dispatcher: Dispatcher, values: tuple[Any, ...],
                 facts: Mapping[str, Any], watch: Watch, compile: bool = True,
                 deadline: float | None = None) -> None:
        self.call, self.dispatcher, self.op, self.values, self.facts = (call, dispatcher,
                                                                        dispatcher.op, values,
                                                                        facts)
        self.mode = mode_of(facts)
        self.world = worlds.current()
        self._device_facts = {**facts, **self.world.device(str(facts["device"])).facts()}
        self.plan = eligible_plan(self.world, self.op, facts, compile)
        self.scores = {step.kernel: step.score for step in self.plan.steps}
        self.race = Race(watch, faults.FAULTS, deadline=math.inf if deadline is None else deadline)
        self.compile_us: dict[str, float] = {}
        self.failed: dict[str, Reason] = {}
        self.no_time_for: list[str] = []       # kernels, because of the deadline
        self.torch_calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self.same_as: dict[str, str] = {}      # kernel -> one that runs the same torch functions

    def enter(self) -> None:
        """Load and compile each kernel, in the order of the plan but those that compile last, and
        drop those that are far behind already.

        A kernel enters only if there should be time for its compiler and the two calls of its
        entry. If a first call takes all the time that is left, it is the last: what was measured
        before it stays. Compiling may take longer than expected, so with a deadline the others have
        run some rounds before.
        """
        best, rounds_ahead = math.inf, False
        by_id, race = self.world.catalog.by_id, self.race
        fixed = fixed_by_key(self.world.program(self.op), self.facts)
        for step in sorted(self.plan.steps, key=lambda step: by_id[step.kernel].jit):
            kernel = by_id[step.kernel]
            if kernel.jit and race.deadline < math.inf and not rounds_ahead:
                race.run(FIRST_ROUNDS)
                rounds_ahead = True
            if not race.has_time_for(self._compile_us(kernel) + 2 * self._call_us(kernel)):
                self.no_time_for.append(kernel.id)
                continue
            bound = self._bind(kernel, step, {} if kernel.jit else fixed)
            if bound is None:
                continue
            run, inputs = bound
            if kernel.backend in BACKENDS and not kernel.jit:
                self.torch_calls[kernel.id] = run, inputs
            if self.mode == COMPILED:
                run, inputs = compile_call(self.dispatcher, kernel.id), self.values
            took = race.enter(kernel.id, as_contestant(run, inputs, self.call.grad),
                              compiles=kernel.jit or self.mode == COMPILED)
            if took is None:
                self._note_absence(kernel.id)
                continue
            first, us = took
            if self.mode == EAGER and not step.transforms and self.dispatcher.native is not None:
                called = race.replace(kernel.id, as_contestant(
                    self.dispatcher.with_backend(kernel.id), inputs, self.call.grad))
                if called is None:
                    self._note_absence(kernel.id)
                    continue
                us = called
            self.compile_us[kernel.id] = (max(first - us, 0.0) if kernel.jit
                                          or self.mode == COMPILED else 0.0)
            if us > DROP_ON_ENTRY * best:
                race.run(only=kernel.id)       # once more: the first time may be noise
                self._note_failures()
                if kernel.id in self.failed:
                    continue
                us = min(us, race.rounds[kernel.id][-1])
                if us > DROP_ON_ENTRY * best:
                    race.drop(kernel.id)
                else:
                    race.rounds[kernel.id].clear()
            best = min(best, us)
        if rounds_ahead and not race.out_of_time:      # all of them will take turns
            for name in race.running:
                race.rounds[name].clear()

    def _bind(self, kernel: Kernel, step: Step,
              fixed: Mapping[str, Any]) -> tuple[Callable[..., Any], Any] | None:
        """Load the kernel; return it and its inputs, or None after noting why it failed."""
        try:
            run = self.dispatcher.bind(kernel, step, self.facts, fixed).run
            inputs = apply_transforms(self.op, step, self.values, self.facts)
            # as a request will call it, with the check of its form
            if kernel.jit:
                warmed = jit.warmed_keys(kernel, self.facts, inputs)
                run = jit.only_compiled(kernel, run, self.facts, warmed, _unreachable)
            return run, inputs
        except loading.LoadFailed as e:
            mark_unloadable(kernel, e.reason)
            self.failed[kernel.id] = e.reason
        except (RuntimeError, MemoryError) as e:           # no memory for the copies
            self.failed[kernel.id] = faults.reason_of(e, faults.classify(e))
        return None


    def run(self, rounds: int) -> None:
        """Run rounds until it is settled which is fastest, or the time is up."""
        race = self.race
        race.run(FIRST_ROUNDS)
        end = min(time.perf_counter() + CALL_SECONDS, race.deadline)
        for name in far_behind(race.timings, race.running):
            race.drop(name)
        self._find_same()
        race.run(min(MIN_ROUNDS, rounds) - FIRST_ROUNDS)
        done = MIN_ROUNDS
        while done < rounds and time.perf_counter() < end and not is_settled(
                self.costs(), race.running, race.watch.margin):
            race.run(min(MORE_ROUNDS, rounds - done))
            done += MORE_ROUNDS
        self._note_failures()

    def _find_same(self) -> None:
        """Find the kernels that run the same torch functions as another: torch's default, if that
        does, else the one that selection prefers."""
        by_id, first = self.world.catalog.by_id, dict[Functions, str]()
        names = sorted((name for name in self.torch_calls if name in self.race.running),
                       key=lambda name: not by_id[name].baseline)
        for name in names if len(names) > 1 else ():
            if not self.race.has_time_for(self.race.timings.median(name)):
                break
            try:
                functions = torch_functions(*self.torch_calls[name])
            except faults.FAULTS:              # the rounds will say so too
                continue
            if first.setdefault(functions, name) != name:
                self.same_as[name] = first[functions]
        self.torch_calls.clear()

    def _compile_us(self, kernel: Kernel) -> float:
        """Return how long its compiler is expected to run for this call."""
        if not kernel.jit and self.mode != COMPILED:
            return 0.0
        if jit.warmed_keys(kernel, self.facts, self.values) <= self.world.warmed:
            return 0.0
        place = self.world.place(self.facts["device"])
        known = self.world.perf.longest_compile_us(kernel.id, place, self.mode)
        return COMPILE_SECONDS * 1e6 if known is None else known

    def _call_us(self, kernel: Kernel) -> float:
        """Return how long a call is expected to take, at the worst if that is a guess."""
        score = self.scores[kernel.id]
        guessed = score.source in (PRIOR, DEFAULT) and kernel.backend in BACKENDS
        slow = guessed and all(rule.check(self._device_facts) is None
                               for rule in slow_half_matmul())
        return score.total_us * (HALF_SLOWDOWN if slow else 1.0)

    def _note_absence(self, kernel: str) -> None:
        self._note_failures()
        if kernel not in self.failed:
            self.no_time_for.append(kernel)

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

    @property
    def timings(self) -> Timings:
        """The times; kernels that run the same torch functions share those of one of them."""
        rounds = self.race.timings.rounds
        return Timings({name: rounds.get(self.same_as.get(name, name), own)
                        for name, own in rounds.items()})

    def costs(self) -> Timings:
        """Return the costs that selection counts, with transforms and the user's boosts."""
        return Timings({name: [self._cost(name, us) for us in rounds]
                        for name, rounds in self.timings.rounds.items()})

    def _cost(self, name: str, us: float) -> float:
        score = self.scores[name]
        return (us + score.transform_us) / score.boost

    def verdict(self, rates: Mapping[str, Rates]) -> Tuned:
        """Return which kernel is fastest, and the measurements to record with new `rates`."""
        costs, override = self.costs(), context.current.get()
        ranked = sorted(costs.rounds, key=lambda name: (costs.median(name), name))
        margin = self.race.watch.margin
        tied = [ranked[0],
                *(name for name in ranked[1:] if costs.beats(ranked[0], name, margin) < SURE)]
        rows, chosen = tighten_spread(self.world, self.op, self.facts,
                                      self._level_ties(self._measurements(ranked), tied, costs),
                                      tied, override)
        best = chosen if chosen in tied else ranked[0]
        baseline = next((name for name in ranked if self.world.catalog.by_id[name].baseline), "")
        kind, flops, nbytes = kind_of(self.op, self.facts), rows[0].flops, rows[0].bytes
        roof = rates.get(rows[0].place) or self.world.perf.rates.get(rows[0].place)
        # the contract counts the forward pass only
        if self.call.grad or not (flops or nbytes):
            roof = None
        timed = {name: TimedKernel(name, self.timings.summary(name), costs.median(name),
                                   self.compile_us[name],
                             name not in self.race.running) for name in ranked}
        return Tuned(
            self.call, kind.sizes_text, kind.family, best, chosen, mode=self.mode,
            before=self.world.plan(self.op, self.facts, override).kernel or "",
            sure=min((costs.beats(best, name, 0.0) for name in ranked if name not in tied),
                     default=1.0),
            tied=tuple(sorted({*tied} - {best})), kernels=tuple(timed.values()), baseline=baseline,
            gain=costs.gain(baseline, best) if baseline else None, flops=flops, bytes=nbytes,
            roofline=roof.roofline_us(flops, nbytes) / timed[best].summary.median if roof else None,
            failed=dict(self.failed), no_time_for=tuple(self.no_time_for),
            rejected=self.plan.rejected, measurements=rows)

    def _measurements(self, names: list[str]) -> tuple[Measurement, ...]:
        op, kind, place = self.op, kind_of(self.op,
                                           self.facts), self.world.place(self.facts["device"])
        flops, nbytes = (float(parse(text)(self.facts)) for text in (op.flops, op.bytes))
        summaries = ((name, self.timings.summary(name)) for name in names)
        return tuple(Measurement(
            name, op.name, kind.bucket, place, s.median, s.spread, s.samples, kind.family,
            kind.sizes_text, flops, nbytes, s.p95, s.p99, self.compile_us[name],
            builds.build_of(self.world.catalog.by_id[name]), time.time(), mode=self.mode)
            for name, s in summaries)

    def _level_ties(self, rows: tuple[Measurement, ...], tied: list[str],
                    costs: Timings) -> tuple[Measurement, ...]:
        """Record kernels that cannot be told apart as equal, so that noise does not change the
        choice in every run: with the time of the fastest, so that none that lost comes before them.

        Torch's own default wins a tie: the others have nothing to offer over it.
        """
        if len(tied) == 1:
            return rows
        shared_us = costs.median(tied[0])
        tied_rows = [m for m in rows if m.kernel in tied]
        spread, samples = max(m.spread for m in tied_rows), min(m.samples for m in tied_rows)
        baselines = {k for k in tied if self.world.catalog.by_id[k].baseline}

        def level(m: Measurement) -> Measurement:
            score = self.scores[m.kernel]
            total = (shared_us if not baselines or m.kernel in baselines
                     else shared_us * BEHIND_DEFAULT)
            us = total * score.boost - score.transform_us
            return m._replace(median_us=us if us > 0 else m.median_us, spread=spread,
                              samples=samples)

        return tuple(level(m) if m.kernel in tied else m for m in rows)


def compile_call(dispatcher: Dispatcher, kernel: str) -> Callable[..., Any]:
    """Compile a call of this kernel by torch.compile, as it would be inside a model."""
    return torch.compile(dispatcher.with_backend(kernel), fullgraph=True, dynamic=False)


def _unreachable(values: tuple[Any, ...]) -> tuple[str, Any]:
    raise AssertionError("a call came in another form than the one it was compiled for")


def far_behind(timings: Timings, running: Iterable[str]) -> list[str]:
    """Return those whose every sample took several times as long as any of the fastest."""
    entered = [name for name in running if name in timings.rounds]
    limit = DROP_AFTER_FIRST * min((max(timings.rounds[name]) for name in entered),
                                   default=math.inf)
    return [name for name in entered if min(timings.rounds[name]) > limit]


def is_settled(costs: Timings, running: Iterable[str], margin: float) -> bool:
    """Is the fastest, with confidence, faster than each of the others or equal to it?"""
    names = sorted((name for name in running if name in costs.rounds), key=costs.median)
    return all(costs.beats(names[0], name, margin) >= SURE
               or costs.even(names[0], name, margin) >= SURE
               for name in names[1:])


def apply_transforms(op: Op, step: Step, values: tuple[Any, ...],
                     facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the inputs after the transforms of the step, whose cost is in its score already."""
    inputs = {p.name: value for p, value in zip(op.params, values)}
    variant = facts[op.variant] if op.variant else ""
    layout = next((t.target for t in step.transforms if t.kind == "layout"), variant)
    for t in step.transforms:
        if t.kind == "cast":
            dtype, old_dtype = getattr(torch, t.target), inputs[op.main_tensor].dtype
            masks = [n for n, tokens in op.patterns[variant].items() if tokens[0].startswith("~")
                     and inputs[n] is not None and inputs[n].dtype == old_dtype]
            for name in (*(op.same_dtype or (op.main_tensor,)), *masks):
                inputs[name] = _leaf(inputs[name], partial(Tensor.to, dtype=dtype))
    for t in step.transforms:
        if t.kind == "contiguous":             # as the kernel sees it, in its own layout
            axes = permutation(op.patterns[variant].get(t.target, ()),
                               op.patterns[layout].get(t.target, ()))
            inputs[t.target] = _leaf(inputs[t.target], partial(_contiguous, axes=axes))
    return tuple(inputs.values())


def _leaf(tensor: Tensor | None, change: Callable[[Tensor], Tensor]) -> Tensor | None:
    if tensor is None:
        return None
    return change(tensor.detach()).requires_grad_(tensor.requires_grad)


def _contiguous(tensor: Tensor, axes: tuple[int, ...] | None) -> Tensor:
    if axes is None:
        return tensor.contiguous()
    back = [axes.index(i) for i in range(len(axes))]
    return tensor.permute(axes).contiguous().permute(back)


def as_contestant(run: Callable[..., Any], inputs: tuple[Any, ...], backward: bool) -> Contestant:
    """Make a call with these inputs; with `backward`, forward and backward."""
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad] if backward else []
    if not leaves:
        return lambda: run(*inputs)
    ones: list[Tensor] = []

    def forward_backward() -> Any:
        results = run(*inputs)
        outs = [t for t in (results if isinstance(results, (tuple, list)) else (results,))
                if isinstance(t, Tensor) and t.requires_grad]
        if len(ones) != len(outs):
            ones[:] = [torch.ones_like(t) for t in outs]
        return torch.autograd.grad(outs, leaves, ones, allow_unused=True)

    return forward_backward
