"""Learning while serving: calls of a kind that was never measured are served by the kernels that
may serve it, in turn, and timed, until it is clear which is fastest. No call is computed twice.

While a kind is learned, its entries run an `Exploring` (exploring.py). Once it is settled, the
result is written to the store like any other measurement, and the entries are the ordinary ones
again.

One thread works in the background: it loads the kernels that are to be tried, and it writes
results, at most once in PUBLISH_SECONDS, because each new world empties the caches of all
operations.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...machine import loading, locks
from ...perf.record import EAGER, kind_of, mode_of
from ...selection.engine import is_warm
from ...selection.key import fixed_by_key
from ...selection.trial import worth_trying
from ...spec.event import Learned, LearningStarted
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.plan import MEASURED, Plan, Step
from ...world import events, measurements
from ...world import snapshot as worlds
from ...world.context import Override
from ...world.incidents import mark_unloadable
from ...world.registry.catalog import Catalog
from ...world.snapshot import World
from .. import protection, wrapping
from ..binding import Binding
from ..cache import Entry
from . import jit
from .exploring import Candidate, Exploring, Key, LearnedKind, account

if TYPE_CHECKING:
    from ..dispatcher import Dispatcher

MAX_KINDS = 1024                               # being learned at once
MAX_CLOSED = 8192                              # kinds that are remembered as done
# candidates of one kind, those expected to be fastest
MAX_KERNELS = 8
PUBLISH_SECONDS = 1.0
# elsewhere a call cannot be timed without waiting for it
DEVICES = ("cpu", "cuda")

_kinds: dict[Key, LearnedKind] = {}            # being learned
_closed: dict[Key, None] = {}                  # done in this process, oldest first
_kinds_lock = locks.Lock()
_learned = _unclear = 0


# which entries explore

def explore(dispatcher: Dispatcher, world: World, plan: Plan, run: Callable[..., Any],
            override: Override | None) -> Callable[..., Any]:
    """Return what the entry of this plan runs: `run`, or an Exploring if its kind is learned."""
    if not _is_learnable(dispatcher.op, world, plan, override):
        return run
    key = _key(dispatcher.op, world, plan)
    steps = _candidate_steps(world, plan) if key not in _closed else []
    if not steps:
        _kinds.pop(key, None)                  # measured meanwhile, through a call in another form
        return run
    default = _default(world, plan)
    with _kinds_lock:
        kind = _kinds.get(key)
        if kind is None:
            # entries of the oldest go on; new ones of it start over
            while len(_kinds) >= MAX_KINDS:
                del _kinds[next(iter(_kinds))]
            kind = _kinds[key] = LearnedKind(key, dispatcher.op, plan, default.kernel
                                             if default is not None else "",
                                             _worker.settled)
    base = plan.steps[0]
    kind.steps.setdefault(base.kernel, base)
    kernel = world.catalog.by_id[base.kernel]
    exploring = Exploring(dispatcher, kind, plan, run,
                          _candidate(dispatcher, world, kernel, plan, run))
    protection.unguard_later(run, exploring, "run_plain")
    _worker.prepare(exploring, world, steps, override)
    return exploring


def _key(op: Op, world: World, plan: Plan) -> Key:
    transforms = tuple(sorted((s.kernel, *map(str, s.transforms)) for s in plan.steps
                              if s.transforms))
    return op.name, kind_of(op, plan.facts).bucket, world.place(plan.facts["device"]), transforms


def _is_learnable(op: Op, world: World, plan: Plan, override: Override | None) -> bool:
    policy, facts = world.policy, plan.facts
    if not policy.setting("learn") or override is not None or op.read is not None:
        return False
    settled = (plan.locked or plan.table or policy.setting("deterministic")
               or policy.setting("disabled"))
    return not (settled or facts["grad"] or facts["deterministic"] or facts["device"] not in DEVICES
                or mode_of(facts) != EAGER
                or world.catalog.by_id[plan.steps[0].kernel].health in world.health)


def _default(world: World, plan: Plan) -> Step | None:
    """Return the step of torch's own kernel, which selection takes as the default."""
    baselines = [s for s in plan.steps if world.catalog.by_id[s.kernel].baseline]
    return min(baselines, key=lambda s: (s.score.source != "default", s.score.total_us),
               default=None)


def _candidate_steps(world: World, plan: Plan) -> list[Step]:
    """Return the steps to try beside the first. If some were measured already, these are only
    kernels that were compiled too late to be measured too."""
    measured = any(s.score.source == MEASURED for s in plan.steps)
    first, default = plan.steps[0], _default(world, plan)

    def is_candidate(step: Step) -> bool:
        kernel = world.catalog.by_id[step.kernel]
        return (kernel.backend != "reference" and not kernel.untested
                and kernel.health not in world.health
                and not kernel.plans_each_size         # one such call would use up the budget
                and (not kernel.jit or is_warm(kernel, plan.facts, world.warmed))
                and (not measured or (kernel.jit and step.score.source != MEASURED))
                and worth_trying(step.score.total_us, first.score.total_us))

    steps = sorted((s for s in plan.steps[1:] if is_candidate(s)),
                   key=lambda s: s.score.total_us)[:MAX_KERNELS]
    if (default is not None and default is not first and default not in steps
        and (steps or not measured)):
        # a measurement counts only together with the default's
        steps.append(default)
    return steps


def _candidate(dispatcher: Dispatcher, world: World, kernel: Kernel, plan: Plan,
               run: Callable[..., Any]) -> Candidate:
    """Make the candidate of one kernel.

    Where the native path records a kernel's launches, it is called as lz.<op>(backend=...), through
    that path, so that its time is the one it will have once chosen: through Python a launch takes
    several times as long. Others are called as an entry calls them: `backend=` would add more to
    them than they take.
    """
    named = (plan.facts["device"] == "cuda" and dispatcher.native is not None
             and kernel.replayable and not plan.steps[0].transforms)
    if named:
        run = dispatcher.with_backend(kernel.id)
    entry = Entry(plan, Binding(protection.without_guard(run), None), run)
    protection.unguard_later(run, entry, "run")
    return Candidate(entry, _readiness(world, kernel, plan.facts), named)


def _readiness(world: World, kernel: Kernel,
               facts: Mapping[str, Any]) -> Callable[[tuple[Any, ...]], bool] | None:
    if not kernel.jit or kernel.id in world.warmed:
        return None
    known: dict[Any, bool] = {}                # of calls that cannot be told apart

    def is_ready(values: tuple[Any, ...]) -> bool:
        key = jit.signature(values, False)
        if key not in known:
            if len(known) >= jit.MAX_SIGNATURES:
                known.clear()
            known[key] = jit.warmed_keys(kernel, facts, values) <= world.warmed
        return known[key]

    return is_ready


def _prepare(exploring: Exploring, world: World, steps: list[Step],
             override: Override | None) -> None:
    """Load and bind the kernels of these steps, in the background: an import may take seconds.

    None is called here: on a GPU that would disturb the calls that are being timed, and the first
    calls of a kernel, which load it, are no samples.
    """
    dispatcher, kind, plan = exploring.dispatcher, exploring.kind, exploring.plan
    fixed = fixed_by_key(world.program(dispatcher.op), plan.facts)
    candidates = dict(exploring.candidates)
    for step in steps:
        kernel = world.catalog.by_id[step.kernel]
        try:
            binding = dispatcher.bind(kernel, step, plan.facts, {} if kernel.jit else fixed)
        except loading.LoadFailed as e:
            mark_unloadable(kernel, e.reason)
            continue
        reordered = replace(plan, steps=(step, *(s for s in plan.steps if s is not step)))
        run = (wrapping.wrap_jit(dispatcher, world, kernel, binding.run, reordered, override)
               if kernel.jit else binding.run)
        run = wrapping.wrap_guard(dispatcher, kernel, reordered, run, world)
        candidates[step.kernel] = _candidate(dispatcher, world, kernel, reordered, run)
    with kind.lock:
        for step in steps:
            if step.kernel in candidates:
                kind.steps.setdefault(step.kernel, step)
                kind.trial.enter(step.kernel, step.score.total_us)
        first_time, kind.announced = (not kind.announced and len(candidates) > 1, kind.announced
                                      or len(candidates) > 1)
    if first_time:
        events.emit(LearningStarted(kind.op.name, kind.trial.base, kind.key[1], tuple(candidates)))
    exploring.candidates = candidates
    # nothing to compare with: no other kernel could be loaded
    if len(kind.trial.runners) == 1:
        kind.trial.winner = kind.trial.base
        kind.end()


# the background thread

class Worker:
    """One thread, which starts when there is something to do and ends when there is not."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._wake = locks.condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._settled: list[LearnedKind] = []
        self._thread: threading.Thread | None = None
        self._last = -PUBLISH_SECONDS
        self._hurry = False

    def prepare(self, *task: Any) -> None:
        with self._wake:
            self._tasks.append(lambda: _prepare(*task))
            self._start()

    def settled(self, kind: LearnedKind) -> None:
        with self._wake:
            self._settled.append(kind)
            self._start()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="layerzero-learning",
                                            daemon=True)
            self._thread.start()
        else:
            self._wake.notify_all()

    def _run(self) -> None:
        events.mark_background_thread()
        me = threading.current_thread()
        while True:
            with self._wake:
                # an interrupt came while it was started, and another was started
                if self._thread is not me:
                    return
                task = self._tasks.popleft() if self._tasks else None
                if task is None and not self._settled:
                    self._thread = None
                    self._hurry = False
                    self._wake.notify_all()
                    return
                wait = self._last + PUBLISH_SECONDS - time.monotonic()
                if task is None and wait > 0 and not self._hurry:
                    self._wake.wait(wait)
                    continue
                settled, self._settled = (([], self._settled) if task is not None
                                          else (self._settled, []))
            try:
                task() if task is not None else self._publish(settled)
            # a kernel that cannot be bound, say; this thread goes on
            except events.ANY_ERROR as e:
                events.warn("learning: %s: %s", type(e).__name__, e)

    def _publish(self, kinds: list[LearnedKind]) -> None:
        self._last = time.monotonic()
        publish(kinds)

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until nothing is left to load or write; return False if `seconds` came first."""
        end = time.monotonic() + seconds
        with self._wake:
            while self._at_work() and time.monotonic() < end:
                self._hurry = True
                self._wake.notify_all()
                self._wake.wait(max(end - time.monotonic(), 0.0))
            return not self._at_work()

    def _at_work(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def after_fork(self) -> None:
        """Runs in a forked child: the thread is gone; start one for what it had to do."""
        tasks, settled = self._tasks, self._settled
        self.renew()
        self._tasks, self._settled = tasks, settled
        if tasks or settled:
            self._start()


_worker = Worker()
flush = _worker.flush


def publish(kinds: list[LearnedKind]) -> None:
    """Write the results of these kinds and publish one world in which they no longer explore."""
    global _learned, _unclear
    world, rows = worlds.current(), []
    for kind in kinds:
        trial = kind.trial
        if trial.clear:
            rows += kind.measurements(world)
        _learned += trial.clear
        _unclear += not trial.clear
        _close(kind)
        events.emit(Learned(kind.op.name, trial.winner, kind.key[1], trial.clear, trial.samples,
                            kind.calls, kind.cost_us / 1e6))
    if rows:
        measurements.record(rows)
    else:
        ops = {kind.op.name for kind in kinds}
        worlds.publish(lambda w: w.replace(ops), "learned")


def _close(kind: LearnedKind) -> None:
    """Remember that this process is done with the kind."""
    with _kinds_lock:
        _kinds.pop(kind.key, None)
        _closed[kind.key] = None
        while len(_closed) > MAX_CLOSED:
            del _closed[next(iter(_closed))]


# status

class LearnStatus(NamedTuple):
    """The state of learning, and its cost; `share` is of the time since the first explored call."""

    learning: int
    learned: int
    unclear: int                               # kinds given up without a result
    # calls served by another kernel than without learning
    explored: int
    seconds: float                             # what exploring has cost
    share: float

    def __str__(self) -> str:
        unclear = f", {self.unclear} without a clear result" if self.unclear else ""
        return (
            f"{self.learning} kinds of call are being learned, {self.learned} are "
            f"learned{unclear}; {self.explored} calls explored, which cost {self.seconds:.3f} s "
            f"({self.share:.2%} of the time)")


def status() -> LearnStatus:
    lost, first_call = account.budget.lost_us / 1e6, account.first_call_at
    span = time.monotonic() - first_call if first_call is not None else 0.0
    return LearnStatus(len(_kinds), _learned, _unclear, account.explored, lost, lost / span
                       if span > 0 else 0.0)


def progress_of(op: Op, world: World, plan: Plan) -> Callable[[str], str]:
    """Return what explain shows for a kernel while this kind of call is learned; "" otherwise."""
    if not _kinds or plan.facts["device"] not in DEVICES or mode_of(plan.facts) != EAGER:
        return lambda kernel: ""
    kind = _kinds.get(_key(op, world, plan))
    return kind.trial.standing if kind is not None else lambda kernel: ""


def reset() -> None:
    """Forget what was learned and what it cost; the store keeps the measurements."""
    global _learned, _unclear
    flush()
    _kinds.clear()
    _closed.clear()
    account.reset()
    _learned = _unclear = 0


def _forget_unregistered(world: World) -> None:
    global _catalog
    if not world.policy.setting("learn"):
        _kinds.clear()
    if world.catalog is _catalog:
        return
    kernels = world.catalog.by_id              # kinds with unregistered kernels are dropped
    for key, kind in _kinds.copy().items():
        if (world.catalog.ops.get(kind.op.name) is not kind.op
            or not kernels.keys() >= kind.steps.keys()):
            _kinds.pop(key, None)
    for key in [k for k in list(_closed) if k[0] not in world.catalog.ops
                or any(c[0] not in kernels for c in k[3])]:
        _closed.pop(key, None)
    _catalog = world.catalog


_catalog: Catalog | None = None                # the last one seen by _forget_unregistered


worlds.add_listener(_forget_unregistered)
atexit.register(flush, 5.0)


def _after_fork() -> None:
    for kind in list(_kinds.values()):
        kind.after_fork()
    _worker.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
