"""Learning while serving: calls of a kind that nobody has measured are served by the kernels that may
serve it, in turn, and timed, until it is clear which is fastest. No call is computed twice.

While a kind is learned, its entries run an `Exploring` (exploring.py). Once it is settled, the result is
written to the store like any other measurement, and the entries are the ordinary ones again.

One thread works behind the calls: it loads the kernels that are to be tried, and it writes results, at
most once in PUBLISH_SECONDS, because each new world empties the caches of all operations.
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
from ...select.engine import is_warm
from ...select.key import fixed_by_key
from ...select.trial import worth_trying
from ...spec.event import Learned, LearningStarted
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.plan import MEASURED, Plan, Step
from ...world import events, measurements
from ...world import snapshot as worlds
from ...world.catalog import Catalog
from ...world.context import Override
from ...world.incidents import mark_unloadable
from ...world.snapshot import World
from .. import protection
from ..binding import Binding
from ..cache import Entry
from . import jit
from .exploring import Exploring, Key, Kind, Way, account

if TYPE_CHECKING:
    from ..dispatcher import Dispatcher

MOST_KINDS = 1024                              # that are known to be learned
MOST_CLOSED = 8192                             # kinds that are remembered as done with
MOST_KERNELS = 8                               # that one kind is learned for, those expected to be fastest
MOST_GAP = 0.05                                # seconds without a call: beyond these the process is idle
KEPT, ATTEMPTS = 0.9, 3                        # less of a sample on the CPU: not counted, but for every third in a row
MOST_OVERHEAD_US = 100.0                       # to decide about one call takes some 10; more is another process
MOST_SKIPPED = 31                              # calls in a row that are not looked at while there is no budget
PUBLISH_SECONDS = 1.0
DEVICES = ("cpu", "cuda")                      # on others a call cannot be timed without waiting for it

_kinds: dict[Key, Kind] = {}                   # those being learned
_closed: dict[Key, None] = {}                  # those this process is done with, oldest first
_adding = locks.Lock()
_learned = _unclear = 0


# which entries

def exploring(dispatcher: Dispatcher, world: World, plan: Plan, run: Callable[..., Any],
              override: Override | None) -> Callable[..., Any]:
    """What the entry of this plan is to run: `run`, or an Exploring if the kind of call is to be learned."""
    if not _wanted(dispatcher.op, world, plan, override):
        return run
    key = _key(dispatcher.op, world, plan)
    candidates = _candidates(world, plan) if key not in _closed else []
    if not candidates:
        _kinds.pop(key, None)                  # measured meanwhile, by a call in another form
        return run
    default = _default(world, plan)
    with _adding:
        kind = _kinds.get(key)
        if kind is None:
            while len(_kinds) >= MOST_KINDS:   # the oldest goes on by itself, and newer calls of it begin anew
                del _kinds[next(iter(_kinds))]
            kind = _kinds[key] = Kind(key, dispatcher.op, plan, default.kernel if default is not None else "",
                                       _worker.settled)
    base = plan.steps[0]
    kind.steps.setdefault(base.kernel, base)
    kernel = world.catalog.by_id[base.kernel]
    found = Exploring(dispatcher, kind, plan, run, _way(dispatcher, world, kernel, plan, run))
    protection.place(run, found, "plain")
    _worker.prepare(found, world, candidates, override)
    return found


def _key(op: Op, world: World, plan: Plan) -> Key:
    copied = tuple(sorted((s.kernel, *map(str, s.transforms)) for s in plan.steps if s.transforms))
    return op.name, kind_of(op, plan.facts).bucket, world.place(plan.facts["device"]), copied


def _wanted(op: Op, world: World, plan: Plan, override: Override | None) -> bool:
    policy, facts = world.policy, plan.facts
    if not policy.setting("learn") or override is not None or op.read is not None:
        return False
    settled = plan.locked or plan.table or policy.setting("deterministic") or policy.setting("disabled")
    return not (settled or facts["grad"] or facts["deterministic"] or facts["device"] not in DEVICES
                or mode_of(facts) != EAGER or world.catalog.by_id[plan.steps[0].kernel].health in world.health)


def _default(world: World, plan: Plan) -> Step | None:
    """Torch's own kernel, the one that selection takes for the default."""
    own = [s for s in plan.steps if world.catalog.by_id[s.kernel].baseline]
    return min(own, key=lambda s: (s.score.source != "default", s.score.total_us), default=None)


def _candidates(world: World, plan: Plan) -> list[Step]:
    """Whom to try beside the first. Where something was measured already: only what compiles and was ready too late."""
    measured = any(s.score.source == MEASURED for s in plan.steps)
    first, default = plan.steps[0], _default(world, plan)

    def may(step: Step) -> bool:
        kernel = world.catalog.by_id[step.kernel]
        return (kernel.backend != "reference" and not kernel.untested and kernel.health not in world.health
                and not kernel.plans_each_size         # one such call would use up what exploring may cost
                and (not kernel.jit or is_warm(kernel, plan.facts, world.warmed))
                and (not measured or (kernel.jit and step.score.source != MEASURED))
                and worth_trying(step.score.total_us, first.score.total_us))

    found = sorted((s for s in plan.steps[1:] if may(s)), key=lambda s: s.score.total_us)[:MOST_KERNELS]
    if default is not None and default is not first and default not in found and (found or not measured):
        found.append(default)                  # what was measured counts only together with the default
    return found


def _way(dispatcher: Dispatcher, world: World, kernel: Kernel, plan: Plan, run: Callable[..., Any]) -> Way:
    """A kernel whose launches the native path replays is called by its name, so that its time is the one it will have
    when it is chosen: through Python its launch would take several times as long."""
    named = kernel.replayable and dispatcher.native is not None and not plan.steps[0].transforms
    if named:
        run = _by_name(dispatcher, kernel.id)
    entry = Entry(plan, Binding(protection.bare(run), None), run)
    protection.place(run, entry, "run")
    return Way(entry, _readiness(world, kernel, plan.facts), named)


def _by_name(dispatcher: Dispatcher, kernel: str) -> Callable[..., Any]:
    params, public = dispatcher.op.params, dispatcher.public
    split = next((i for i, p in enumerate(params) if p.keyword_only), len(params))
    names = tuple(p.name for p in params[split:])

    def run(*values: Any) -> Any:
        return public(*values[:split], **dict(zip(names, values[split:])), backend=kernel)

    return run


def _readiness(world: World, kernel: Kernel, facts: Mapping[str, Any]) -> Callable[[tuple[Any, ...]], bool] | None:
    if not kernel.jit or kernel.id in world.warmed:
        return None
    return lambda values: jit.entries(kernel, facts, values) <= world.warmed


def _prepare(found: Exploring, world: World, candidates: list[Step], override: Override | None) -> None:
    """Load and bind the candidates, behind the calls: an import may take seconds."""
    dispatcher, kind, plan = found.dispatcher, found.kind, found.plan
    fixed = fixed_by_key(world.program(dispatcher.op), plan.facts)
    ways = dict(found.ways)
    for step in candidates:
        kernel = world.catalog.by_id[step.kernel]
        try:
            bound = dispatcher.binding(kernel, step, plan.facts, {} if kernel.jit else fixed)
        except loading.LoadFailed as e:
            mark_unloadable(kernel, e.reason)
            continue
        first = replace(plan, steps=(step, *(s for s in plan.steps if s is not step)))
        run = dispatcher.warming(world, kernel, bound.run, first, override) if kernel.jit else bound.run
        ways[step.kernel] = _way(dispatcher, world, kernel, first, dispatcher.guarded(kernel, first, run, world))
    with kind.lock:
        for step in candidates:
            if step.kernel in ways:
                kind.steps.setdefault(step.kernel, step)
                kind.trial.enter(step.kernel, step.score.total_us)
        first_time, kind.told = not kind.told and len(ways) > 1, kind.told or len(ways) > 1
    if first_time:
        events.emit(LearningStarted(kind.op.name, kind.trial.base, kind.key[1], tuple(ways)))
    found.ways = ways
    if len(kind.trial.runners) == 1:           # nobody to compare with: not one could be loaded
        kind.trial.winner = kind.trial.base
        kind.end()


# behind the calls

class Worker:
    """One thread, started when there is something to do and gone when there is not."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._wake = locks.condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._settled: list[Kind] = []
        self._thread: threading.Thread | None = None
        self._last = -PUBLISH_SECONDS
        self._hurry = False

    def prepare(self, *task: Any) -> None:
        with self._wake:
            self._tasks.append(lambda: _prepare(*task))
            self._start()

    def settled(self, kind: Kind) -> None:
        with self._wake:
            self._settled.append(kind)
            self._start()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="layerzero-learning", daemon=True)
            self._thread.start()
        else:
            self._wake.notify_all()

    def _run(self) -> None:
        events.mark_background_thread()
        me = threading.current_thread()
        while True:
            with self._wake:
                if self._thread is not me:     # an interrupt came while it was started, and there is another
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
                settled, self._settled = ([], self._settled) if task is not None else (self._settled, [])
            try:
                task() if task is not None else self._publish(settled)
            except events.ANY_ERROR as e:      # a kernel that cannot be bound; the calls and this thread go on
                events.warn("learning: %s: %s", type(e).__name__, e)

    def _publish(self, kinds: list[Kind]) -> None:
        self._last = time.monotonic()
        publish(kinds)

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until nothing is left to load or to write; True if that was within the time."""
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
        """In the child: the thread is gone, and what it had to do is done here too."""
        tasks, settled = self._tasks, self._settled
        self.renew()
        self._tasks, self._settled = tasks, settled
        if tasks or settled:
            self._start()


_worker = Worker()
flush = _worker.flush


def publish(kinds: list[Kind]) -> None:
    """Write the results of these kinds, and make their entries ordinary ones again: one new world for all."""
    global _learned, _unclear
    world, rows = worlds.current(), []
    for kind in kinds:
        trial = kind.trial
        if trial.clear:
            rows += kind.measurements(world)
        _learned += trial.clear
        _unclear += not trial.clear
        _close(kind)
        events.emit(Learned(kind.op.name, trial.winner, kind.key[1], trial.clear, trial.samples, trial.calls,
                            kind.cost_us / 1e6))
    if rows:
        measurements.record(rows)
    else:
        ops = {kind.op.name for kind in kinds}
        worlds.publish(lambda w: w.replace(ops), "learned")


def _close(kind: Kind) -> None:
    """This process is done with the kind."""
    with _adding:
        _kinds.pop(kind.key, None)
        _closed[kind.key] = None
        while len(_closed) > MOST_CLOSED:
            del _closed[next(iter(_closed))]


# what happened

class Status(NamedTuple):
    """`share`: of the time since the first call was explored."""

    learning: int
    learned: int
    unclear: int                               # kinds given up without a result
    explored: int                              # calls that another kernel served than would have without learning
    seconds: float                             # what exploring has cost
    share: float

    def __str__(self) -> str:
        unclear = f", {self.unclear} without a clear result" if self.unclear else ""
        return (f"{self.learning} kinds of call are being learned, {self.learned} are learned{unclear}; "
                f"{self.explored} calls explored, which cost {self.seconds:.3f} s ({self.share:.2%} of the time)")


def status() -> Status:
    lost, began = account.budget.lost_us / 1e6, account.began
    span = time.monotonic() - began if began is not None else 0.0
    return Status(len(_kinds), _learned, _unclear, account.explored, lost, lost / span if span > 0 else 0.0)


def standing(op: Op, world: World, plan: Plan) -> Callable[[str], str]:
    """What explain says of a kernel for this kind of call while it is learned; "" otherwise."""
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


def _follow(world: World) -> None:
    global _catalog
    if not world.policy.setting("learn"):
        _kinds.clear()
    if world.catalog is _catalog:
        return
    known = world.catalog.by_id                # what was unregistered is not learned about any more
    for key, kind in list(_kinds.items()):
        if world.catalog.ops.get(kind.op.name) is not kind.op or not known.keys() >= kind.steps.keys():
            _kinds.pop(key, None)
    for key in [k for k in list(_closed) if k[0] not in world.catalog.ops or any(c[0] not in known for c in k[3])]:
        _closed.pop(key, None)
    _catalog = world.catalog


_catalog: Catalog | None = None                # that of the last world that was looked at


worlds.add_listener(_follow)
atexit.register(flush, 5.0)


def _after_fork() -> None:
    for kind in list(_kinds.values()):
        kind.after_fork()
    _worker.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
