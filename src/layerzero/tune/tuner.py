"""Time every kernel that may serve, for every kind of call there is, and let the measurements decide from then on.

One call stands for its kind; kinds that are expected to take most of the time go first, so that stopping
early leaves little behind. Everything is written down after each kind: an interrupted run goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dispatch.background import jit
from ..dispatch.dispatcher import Dispatcher, dispatchers, function
from ..machine import builds, hardware
from ..machine.memory import free_bytes
from ..operate.calls import values as make_values
from ..operate.inspection import dispatcher_of
from ..perf.record import CAPTURED, EAGER, MODES, Kind, Measurement, Rates, kind_of
from ..spec.call import Call, TensorSpec
from ..spec.errors import ConfigError, LayerZeroError
from ..spec.op import Op
from ..world import context, measurements
from ..world import snapshot as worlds
from ..world.snapshot import World
from .contest import Contest, eligible, facts_of
from .harness import Watch, cache_bytes, stopwatch
from .rates import measure_rates
from .report import Skipped, Tuned, TuneReport
from .workload import calls_for

ROUNDS = 60
BEYOND = 1.05          # times the rates of a device: faster than this, they were measured too low
OF_FREE_MEMORY = 0.8
# What comes of a call that was written down wrongly, or does not fit into memory.
CANNOT_BE_MADE = (LayerZeroError, RuntimeError, TypeError, ValueError, MemoryError)

Progress = Callable[[int, int, str], None]     # kinds of call done, all of them, what is being timed
Save = Callable[[Sequence[Measurement], Mapping[str, Rates] | None], Any]


def tune(calls: str | Path | Call | Iterable[Call], *, device: str | None = None, seconds: float | None = None,
         rounds: int = ROUNDS, again: bool = False, mode: str | Sequence[str] | None = None, cold: bool = False,
         compile: bool = True, progress: Progress | None = None, save: Save | None = None) -> TuneReport:
    """Time the kernels that may serve these calls, and choose by what was measured from then on.

    calls     some, or what they come from: an operation, a model, a file of calls
    device    where; the accelerator of this machine, else its CPU
    seconds   stop after about so long
    rounds    the most samples of one kernel in one kind of call
    again     also what was measured before
    mode      eager, captured (in a CUDA graph), compiled (by torch.compile), or several: each is measured apart and
              decides the calls that are made in it; by default eager, and on a GPU captured too
    cold      eager calls with cold caches, instead of back to back in a loop
    compile   also kernels that have to be compiled first, which takes seconds each
    progress  called with (done, total, what) before each kind of call
    save      called with the measurements of each kind, instead of keeping them where all others are
    """
    began = time.perf_counter()
    target = hardware.probe(device).type if device else hardware.main_kind()
    tuner = Tuner(rounds, cold, None if seconds is None else began + seconds, save or measurements.record, compile)
    say = progress or (lambda done, total, what: None)
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
            say(done, len(jobs), str(job))
            if not again and measured(worlds.current(), job, compile):
                already.append(job.call)
                continue
            found = tuner.tune(job)
            if isinstance(found, Skipped):
                skipped.append(found)
            else:
                tuned.append(found)
        else:
            done = len(jobs)
    except KeyboardInterrupt:
        stopped = "interrupted"
    say(done, len(jobs), stopped)
    return TuneReport(tuple(tuned), tuple(already), tuple(skipped), tuple(job.call for job in jobs[done:]), stopped,
                      tuner.rates, time.perf_counter() - began)


def modes_of(mode: str | Sequence[str] | None, device: str) -> tuple[str, ...]:
    """The modes to measure in, or ConfigError. A CPU has no graphs to capture."""
    if mode is None:
        return (EAGER, CAPTURED) if device == "cuda" else (EAGER,)
    asked = tuple(dict.fromkeys([mode] if isinstance(mode, str) else mode))
    wrong = [m for m in asked if m not in MODES]
    if wrong or not asked:
        raise ConfigError(f"mode must be of {', '.join(MODES)}, got {', '.join(map(repr, wrong)) or 'none'}")
    if CAPTURED in asked and device != "cuda":
        raise ConfigError(f"mode {CAPTURED!r} needs a CUDA device, whose graphs it means; this is for the {device}")
    return asked


def _calls(source: str | Path | Call | Iterable[Call]) -> Iterable[Call]:
    if isinstance(source, (str, Path)):
        return calls_for(source)
    return (source,) if isinstance(source, Call) else source


# what there is to do

@dataclass(frozen=True)
class Job:
    """One kind of call, and the call that stands for it."""

    op: Op
    call: Call
    kind: Kind
    facts: Mapping[str, Any]                   # of tensors without storage
    expected_us: float
    nbytes: int                                # of inputs and results
    mode: str = EAGER

    @property
    def device(self) -> str:
        return str(self.facts["device"])

    def __str__(self) -> str:
        mode = "" if self.mode == EAGER else f" ({self.mode})"
        return f"{self.op.name} {self.kind.family} {self.kind.sizes_text}{mode}"


def survey(calls: Iterable[Call], device: str) -> tuple[list[Job], list[Skipped]]:
    """The kinds of call, those that take most time first, and the calls that cannot be made."""
    found: dict[tuple[str, str], Job] = {}
    skipped: list[Skipped] = []
    for call in calls:
        try:
            job = _job(call, device)
        except CANNOT_BE_MADE as e:
            skipped.append(Skipped(call, _first_line(e)))
            continue
        key = (job.op.name, job.kind.bucket)
        old = found.get(key)
        if old is not None:
            heavier = job if _weight(job) > _weight(old) else old
            job = replace(heavier, call=heavier.call.times(old.call.count + call.count))
        found[key] = job
    return sorted(found.values(), key=_weight, reverse=True), skipped


def _weight(job: Job) -> float:
    return job.expected_us * job.call.count


def _job(call: Call, device: str) -> Job:
    """What can be known of a call without making it."""
    op = dispatcher_of(call.op).op
    hollow = {n: _hollow(v) if isinstance(v, TensorSpec) else v for n, v in call.arguments.items()}
    with _mode(call):
        made = make_values(op, replace(call, arguments=hollow), "meta")
        dispatcher, values = resolved(op, made)
        op, world = dispatcher.op, worlds.current()
        facts = dispatcher.facts(values, world)
        results = op.meta(**dict(zip(dispatcher.names, values)))
    if any(isinstance(v, Tensor) for v in values):
        facts = {**facts, "device": device}
    plan = world.plan(op, facts, context.current.get())
    tensors = [*values, *(results if isinstance(results, (tuple, list)) else (results,))]
    return Job(op, call, kind_of(op, facts), facts, plan.steps[0].score.total_us if plan.steps else 0.0,
               sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)))


def _hollow(spec: TensorSpec) -> Any:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return spec                            # making it says what is wrong
    if spec.strides is None:
        return torch.empty(spec.shape, dtype=dtype, device="meta")
    return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device="meta")


def resolved(op: Op, made: Mapping[str, Any]) -> tuple[Dispatcher, tuple[Any, ...]]:
    """Who serves the call, and its arguments in order: an unusual one is rewritten as a usual one first."""
    given = dict(made)
    while op.canonical is not None and (redirect := op.canonical(given)) is not None:
        op = worlds.current().catalog.ops[redirect.op]
        given = {p.name: redirect.values.get(p.name, p.default) for p in op.params}
    function(op)                               # made now if it was never called
    dispatcher = dispatchers[op.name]
    dispatcher._ready()
    return dispatcher, tuple(given[name] for name in dispatcher.names)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _mode(call: Call) -> AbstractContextManager[Any]:
    return torch.enable_grad() if call.grad else torch.no_grad()


def measured(world: World, job: Job, compile: bool = True) -> bool:
    """Was every kernel that may serve measured, in the build that is here?"""
    facts, place = {**job.facts, **facts_of(job.mode)}, world.place(job.device)
    steps = eligible(world, job.op, facts, compile).steps
    rows = [(step.kernel, world.perf.get(step.kernel, job.kind.bucket, place, job.mode)) for step in steps]
    return bool(rows) and all(
        m is not None and m.build in ("", builds.build_of(world.catalog.by_id[kernel])) for kernel, m in rows)


# doing it


class Tuner:
    """Times one kind of call after another, and saves after each."""

    def __init__(self, rounds: int, cold: bool, deadline: float | None, save: Save, compile: bool) -> None:
        self.rounds, self.cold, self.deadline, self.save, self.compile = rounds, cold, deadline, save, compile
        self.rates: dict[str, Rates] = {}      # by place, those measured now
        self._watches: dict[tuple[str, str], Watch] = {}
        self._made: tuple[Call | None, Dispatcher | None, tuple[Any, ...]] = None, None, ()    # of the last call

    @property
    def out_of_time(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def tune(self, job: Job) -> Tuned | Skipped:
        self._ensure_rates(job.device)
        for where, factor in ((job.device, 4 if job.call.grad else 3), ("cpu", 2)):    # numbers are drawn on the host
            if factor * job.nbytes > OF_FREE_MEMORY * (free := free_bytes(where)):
                return Skipped(job.call, f"needs about {factor * job.nbytes / 2**30:.1f} GiB on the {where}, "
                                         f"{free / 2**30:.1f} GiB are free")
        with _mode(job.call):
            try:
                dispatcher, values = self._inputs(job)
                facts = {**dispatcher.facts(values, worlds.current()), **facts_of(job.mode)}
            except CANNOT_BE_MADE as e:
                return Skipped(job.call, _first_line(e))
            contest = Contest(job.call, dispatcher, values, facts, self._watch(job.device, job.mode), self.compile,
                              self.deadline)
            contest.enter()
            contest.run(self.rounds)
        if not contest.race.timings.rounds:
            return Skipped(job.call, "; ".join([*(f"{k}: {r.message}" for k, r in contest.failed.items()),
                                                *(f"{k}: no time for it" for k in contest.no_time_for)])
                           or "no kernel may serve it")
        found = contest.verdict(self.rates)
        if beats_the_roof(found, job.device, self._roof(job.device)) and not self.out_of_time:
            self._measure_rates(job.device)
            found = contest.verdict(self.rates)
        self.save(found.measurements, None)
        timed = (contest.world.catalog.by_id[t.kernel] for t in found.kernels)
        with _mode(job.call):
            compiled = frozenset().union(*(jit.entries(k, facts, values) for k in timed if k.jit))
        if not compiled <= worlds.current().warmed:
            worlds.publish(lambda w: w.replace({contest.op.name}, warmed=w.warmed | compiled), "warmed")
        return found

    def _inputs(self, job: Job) -> tuple[Dispatcher, tuple[Any, ...]]:
        """Made once for all modes of a call: for a large one that takes longer than timing it."""
        call, dispatcher, values = self._made
        if call is not job.call or dispatcher is None:
            self._made = None, None, ()        # its memory is free before more is asked for
            op = dispatcher_of(job.call.op).op
            dispatcher, values = resolved(op, make_values(op, job.call, job.device))
            self._made = job.call, dispatcher, values
        return dispatcher, values

    def _roof(self, device: str) -> Rates | None:
        place = worlds.current().place(device)
        return self.rates.get(place) or worlds.current().perf.rates.get(place)

    def _ensure_rates(self, device: str) -> None:
        if self._roof(device) is None:
            self._measure_rates(device)

    def _measure_rates(self, device: str) -> None:
        """The better of what is known and what is measured now: noise only ever slows down. A noisy reading serves
        this run and is not kept, so that the next one measures again."""
        place, known = worlds.current().place(device), self._roof(device)
        read = measure_rates(device)
        self.rates[place] = read.rates if known is None else Rates(*map(max, read.rates, known))
        if not read.noisy:
            self.save((), {place: self.rates[place]})

    def _watch(self, device: str, mode: str) -> Watch:
        if (device, mode) not in self._watches:
            self._watches[device, mode] = stopwatch(device, mode, self.cold)
        return self._watches[device, mode]


def beats_the_roof(found: Tuned, device: str, roof: Rates | None) -> bool:
    """Was a kernel faster than the device is said to be at best? Then that was measured while the device was busy.
    More bytes a second than memory gives is no sign of it where all of them fit a cache."""
    if roof is None or found.roofline is None:
        return False
    us = found.winner.summary.median
    return (found.flops > BEYOND * us * roof.flops_per_us
            or (found.bytes > 4 * cache_bytes(device) and found.bytes > BEYOND * us * roof.bytes_per_us))
