"""Tuning: time every kernel that may serve, for every kind of call, and let the measurements decide
from then on.

One call stands for its kind; kinds that are expected to take most of the time go first, so that
stopping early leaves little undone. Measurements are saved after each kind: an interrupted run goes
on where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dispatch.background import jit
from ..dispatch.dispatcher import Dispatcher, dispatchers, public_function
from ..machine import builds, hardware
from ..machine.memory import free_bytes
from ..operate.calls import make_values
from ..operate.inspection import dispatcher_of
from ..operate.readiness import first_line
from ..perf.record import CAPTURED, EAGER, MODES, Kind, Measurement, Rates, kind_of
from ..spec.call import Call, TensorSpec
from ..spec.errors import ConfigError, LayerZeroError
from ..spec.op import Op
from ..world import context, measurements
from ..world import snapshot as worlds
from ..world.snapshot import World
from .contest import Contest, eligible_plan, mode_facts
from .harness import Watch, cache_bytes, stopwatch
from .rates import measure_rates
from .report import Skipped, Tuned, TuneReport
from .workload import calls_for, meta_tensor

ROUNDS = 60
# times the rates of a device: a faster kernel shows that they were measured too low
BEYOND = 1.05
# to measure the rates of a device, and at most this share of the time that is left
RATES_SECONDS, RATES_SHARE = 1.5, 0.25
MEMORY_SHARE = 0.8     # of free memory that one call may take
SHARES = 4             # of the time that is left, in which one call is timed
# Raised by a call that is described wrongly, or does not fit into memory.
CANNOT_BE_MADE = (LayerZeroError, RuntimeError, TypeError, ValueError, MemoryError)

# kinds of call done, their number, what is being timed
Progress = Callable[[int, int, str], None]
Save = Callable[[Sequence[Measurement], Mapping[str, Rates] | None], Any]


def tune(calls: str | Path | Call | Iterable[Call], *, device: str | None = None,
         seconds: float | None = None, rounds: int = ROUNDS, again: bool = False,
         mode: str | Sequence[str] | None = None, cold: bool = False, compile: bool = True,
         progress: Progress | None = None, save: Save | None = None) -> TuneReport:
    """Time the kernels that may serve these calls, and select by the measurements from then on.

    calls     some, or what they come from: an operation, a model, a file of calls
    device    where; the accelerator of this machine, else its CPU
    seconds   stop after about so long
    rounds    the most samples of one kernel in one kind of call
    again     also what was measured before
    mode      eager, captured (in a CUDA graph), compiled (by torch.compile), or several: each is
              measured apart and decides the calls that are made in it; by default eager, and on a
              GPU captured too
    cold      eager calls with cold caches, instead of back to back in a loop
    compile   also kernels that have to be compiled first, which takes seconds each
    progress  called with (done, total, what) before each kind of call
    save  called with the measurements of each kind, instead of keeping them where all others are
    """
    start = time.perf_counter()
    target = hardware.probe(device).type if device else hardware.main_kind()
    tuner = Tuner(rounds, cold, None if seconds is None else start + seconds,
                  save or measurements.record, compile)
    report_progress = progress or (lambda done, total, what: None)
    surveyed, skipped = survey(_calls(calls), target)
    jobs = [replace(job, mode=m) for job in surveyed for m in modes_of(mode, target)]
    tuned: list[Tuned] = []
    already: list[Call] = []
    done, stopped = 0, ""
    try:
        for done, job in enumerate(jobs):
            if tuner.out_of_time:
                stopped = "out of time"
                break
            report_progress(done, len(jobs), str(job))
            if not again and is_measured(worlds.current(), job, compile):
                already.append(job.call)
                continue
            result = tuner.tune(job, len(jobs) - done)
            if isinstance(result, Skipped):
                skipped.append(result)
            else:
                tuned.append(result)
        else:
            done = len(jobs)
    except KeyboardInterrupt:
        stopped = "interrupted"
    report_progress(done, len(jobs), stopped)
    return TuneReport(tuple(tuned), tuple(already), tuple(skipped),
                      tuple(job.call for job in jobs[done:]), stopped,
                      tuner.rates, time.perf_counter() - start)


def modes_of(mode: str | Sequence[str] | None, device: str) -> tuple[str, ...]:
    """Return the modes to measure in, or raise ConfigError. A CPU has no graphs to capture."""
    if mode is None:
        return (EAGER, CAPTURED) if device == "cuda" else (EAGER,)
    modes = tuple(dict.fromkeys([mode] if isinstance(mode, str) else mode))
    wrong = [m for m in modes if m not in MODES]
    if wrong or not modes:
        raise ConfigError(
            f"mode must be of {', '.join(MODES)}, got {', '.join(map(repr, wrong)) or 'none'}")
    if CAPTURED in modes and device != "cuda":
        raise ConfigError(
            f"mode {CAPTURED!r} needs a CUDA device, whose graphs it means; this is for the "
            f"{device}")
    return modes


def _calls(source: str | Path | Call | Iterable[Call]) -> Iterable[Call]:
    if isinstance(source, (str, Path)):
        return calls_for(source)
    return (source,) if isinstance(source, Call) else source


# the jobs

@dataclass(frozen=True)
class Job:
    """One kind of call, and the call that stands for it."""

    op: Op
    call: Call
    kind: Kind
    facts: Mapping[str, Any]                   # read from meta tensors
    expected_us: float
    nbytes: int                                # inputs and results
    mode: str = EAGER

    @property
    def device(self) -> str:
        return str(self.facts["device"])

    def __str__(self) -> str:
        mode = "" if self.mode == EAGER else f" ({self.mode})"
        return f"{self.op.name} {self.kind.family} {self.kind.sizes_text}{mode}"


def survey(calls: Iterable[Call], device: str) -> tuple[list[Job], list[Skipped]]:
    """Return the kinds of call, the most expensive first, and the calls that cannot be made."""
    jobs: dict[tuple[str, str], Job] = {}
    skipped: list[Skipped] = []
    for call in calls:
        try:
            job = _job(call, device)
        except CANNOT_BE_MADE as e:
            skipped.append(Skipped(call, first_line(e)))
            continue
        key = (job.op.name, job.kind.bucket)
        known = jobs.get(key)
        if known is not None:
            heavier = job if _weight(job) > _weight(known) else known
            job = replace(heavier, call=heavier.call.times(known.call.count + call.count))
        jobs[key] = job
    return sorted(jobs.values(), key=_weight, reverse=True), skipped


def _weight(job: Job) -> float:
    return job.expected_us * job.call.count


def _job(call: Call, device: str) -> Job:
    """Return what is known of a call without memory for its tensors."""
    op = dispatcher_of(call.op).op
    arguments: dict[str, Any] = {
        n: meta_tensor(v) if isinstance(v, TensorSpec) else v for n, v in call.arguments.items()}
    with _grad_mode(call):
        values_by_name = make_values(op, replace(call, arguments=arguments), "meta")
        dispatcher, values = resolve(op, values_by_name)
        op, world = dispatcher.op, worlds.current()
        facts = dispatcher.facts(values, world)
        results = op.meta(**dict(zip(dispatcher.names, values)))
    if any(isinstance(v, Tensor) for v in values):
        facts = {**facts, "device": device}
    plan = world.plan(op, facts, context.current.get())
    tensors = [*values, *(results if isinstance(results, (tuple, list)) else (results,))]
    return Job(op, call, kind_of(op, facts), facts, plan.steps[0].score.total_us if plan.steps
               else 0.0,
               sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)))


def resolve(op: Op, arguments: Mapping[str, Any]) -> tuple[Dispatcher, tuple[Any, ...]]:
    """Return the call's dispatcher and arguments in order; unusual calls made canonical."""
    values = dict(arguments)
    while op.canonical is not None and (redirect := op.canonical(values)) is not None:
        op = worlds.current().catalog.ops[redirect.op]
        values = {p.name: redirect.values.get(p.name, p.default) for p in op.params}
    public_function(op)                        # made now if it was never called
    dispatcher = dispatchers[op.name]
    dispatcher.ensure_world()
    return dispatcher, tuple(values[name] for name in dispatcher.names)


def _grad_mode(call: Call) -> AbstractContextManager[Any]:
    return torch.enable_grad() if call.grad else torch.no_grad()


def is_measured(world: World, job: Job, compile: bool = True) -> bool:
    """Was every kernel that may serve measured, in its current build?"""
    facts, place = {**job.facts, **mode_facts(job.mode)}, world.place(job.device)
    steps = eligible_plan(world, job.op, facts, compile).steps
    rows = [(step.kernel, world.perf.get(step.kernel, job.kind.bucket, place, job.mode))
            for step in steps]
    return bool(rows) and all(
        m is not None and m.build in ("", builds.build_of(world.catalog.by_id[kernel]))
        for kernel, m in rows)


# timing

class Tuner:
    """Times one kind of call after another, and saves after each."""

    def __init__(self, rounds: int, cold: bool, deadline: float | None, save: Save,
                 compile: bool) -> None:
        self.rounds, self.cold, self.deadline, self.save, self.compile = (rounds, cold, deadline,
                                                                          save, compile)
        self.rates: dict[str, Rates] = {}      # by place, measured in this run
        self._watches: dict[tuple[str, str], Watch] = {}
        self._last_inputs: tuple[Call | None, Dispatcher | None, tuple[Any, ...]] = None, None, ()

    @property
    def seconds_left(self) -> float:
        return math.inf if self.deadline is None else self.deadline - time.perf_counter()

    @property
    def out_of_time(self) -> bool:
        return self.seconds_left <= 0

    def tune(self, job: Job, left: int = 1) -> Tuned | Skipped:
        """Time one call, with `left` calls to go: a large one must not take the time of all."""
        self._ensure_rates(job.device)
        deadline = (None if self.deadline is None else time.perf_counter()
                    + self.seconds_left * min(1.0, SHARES / left))
        # inputs are drawn on the host
        for where, factor in ((job.device, 4 if job.call.grad else 3), ("cpu", 2)):
            if factor * job.nbytes > MEMORY_SHARE * (free := free_bytes(where)):
                return Skipped(job.call,
                               f"needs about {factor * job.nbytes / 2**30:.1f} GiB on the {where}, "
                                         f"{free / 2**30:.1f} GiB are free")
        with _grad_mode(job.call):
            try:
                dispatcher, values = self._inputs(job)
                facts = {**dispatcher.facts(values, worlds.current()), **mode_facts(job.mode)}
            except CANNOT_BE_MADE as e:
                return Skipped(job.call, first_line(e))
            contest = Contest(job.call, dispatcher, values, facts,
                              self._watch(job.device, job.mode), self.compile, deadline)
            contest.enter()
            contest.run(self.rounds)
        if not contest.race.timings.rounds:
            return Skipped(job.call,
                           "; ".join([*(f"{k}: {r.message}" for k, r in contest.failed.items()),
                                                *(f"{k}: no time for it"
                                                  for k in contest.no_time_for)])
                           or "no kernel may serve it")
        result = contest.verdict(self.rates)
        if (exceeds_rates(result, job.device, self._known_rates(job.device))
            and not self.out_of_time):
            self._measure_rates(job.device)
            result = contest.verdict(self.rates)
        self.save(result.measurements, None)
        timed = (contest.world.catalog.by_id[t.kernel] for t in result.kernels)
        with _grad_mode(job.call):
            compiled = frozenset().union(*(jit.warmed_keys(k, facts, values) for k in timed
                                           if k.jit))
        if not compiled <= worlds.current().warmed:
            worlds.publish(lambda w: w.replace({contest.op.name}, warmed=w.warmed | compiled),
                           "warmed")
        return result

    def _inputs(self, job: Job) -> tuple[Dispatcher, tuple[Any, ...]]:
        """Make the inputs once for all modes of a call: that takes longer than timing it."""
        call, dispatcher, values = self._last_inputs
        if call is not job.call or dispatcher is None:
            self._last_inputs = None, None, ()         # free their memory before allocating more
            op = dispatcher_of(job.call.op).op
            dispatcher, values = resolve(op, make_values(op, job.call, job.device))
            self._last_inputs = job.call, dispatcher, values
        return dispatcher, values

    def _known_rates(self, device: str) -> Rates | None:
        place = worlds.current().place(device)
        return self.rates.get(place) or worlds.current().perf.rates.get(place)

    def _ensure_rates(self, device: str) -> None:
        if self._known_rates(device) is None:
            self._measure_rates(device)

    def _measure_rates(self, device: str) -> None:
        """Keep the better of the known rates and those measured now: noise only slows down. A noisy
        reading serves this run and is not saved, so that the next run measures again."""
        place, known = worlds.current().place(device), self._known_rates(device)
        reading = measure_rates(device, min(RATES_SECONDS, RATES_SHARE * self.seconds_left))
        self.rates[place] = (reading.rates if known is None
                             else Rates(*map(max, reading.rates, known)))
        if not reading.noisy:
            self.save((), {place: self.rates[place]})

    def _watch(self, device: str, mode: str) -> Watch:
        if (device, mode) not in self._watches:
            self._watches[device, mode] = stopwatch(device, mode, self.cold)
        return self._watches[device, mode]


def exceeds_rates(result: Tuned, device: str, rates: Rates | None) -> bool:
    """Was a kernel faster than the peak rates of the device? Then those were measured while the
    device was busy. A higher bandwidth proves nothing if all the bytes fit a cache."""
    if rates is None or result.roofline is None:
        return False
    us = result.winner.summary.median
    return (result.flops > BEYOND * us * rates.flops_per_us
            or (result.bytes > 4 * cache_bytes(device) and result.bytes > BEYOND * us
                * rates.bytes_per_us))
