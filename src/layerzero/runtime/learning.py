"""Learning while serving: calls of a kind that nobody has measured are served by the kernels that may serve it, in
turn, and timed, until it is clear which is fastest. No call is computed twice.

Who is next and who has won is decided by select/trial.py. Here is what that needs of a running process: the
clock, CUDA events, threads, the way into the store. While a kind is learned, its entries run an `Exploring`; once it is
settled, the result is written to the store like any other measurement, and the entries are the ordinary ones again.

One thread works behind the calls: it loads the kernels that are to be tried, and it writes results, at most once in
PUBLISH_SECONDS, because each new world empties the caches of all operations.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..backends.packing import PACKED
from ..perf.record import EAGER, Measurement, kind_of, mode_of
from ..select.engine import is_warm
from ..select.key import fixed_by_key
from ..select.trial import Budget, Ticket, Trial, worth_trying
from ..spec.errors import KernelFailed
from ..spec.event import Fallback, Learned, LearningStarted
from ..spec.expr import parse
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.plan import MEASURED, Plan, Step
from . import events, faults, jit, loading, measurements
from . import world as worlds
from .binding import Binding
from .cache import Entry
from .context import Override
from .incidents import mark_unloadable
from .world import World

if TYPE_CHECKING:
    from .dispatch import Dispatcher

MOST_KINDS = 1024                              # that are known to be learned
MOST_CLOSED = 8192                             # kinds that are remembered as done with
MOST_KERNELS = 8                               # that one kind is learned for, those expected to be fastest
MOST_GAP = 0.05                                # seconds without a call: beyond these the process is idle
KEPT, ATTEMPTS = 0.9, 3                        # less of a sample on the CPU: not counted, but for every third in a row
MOST_OVERHEAD_US = 100.0                       # to decide about one call takes some 10; more is another process
MOST_SKIPPED = 31                              # calls in a row that are not looked at while there is no budget
PUBLISH_SECONDS = 1.0
BEHIND_WINNER = 1.005                          # how a tie is written down for those that did not win
DEVICES = ("cpu", "cuda")                      # on others a call cannot be timed without waiting for it

# (op, bucket, place, which kernels need their inputs copied first): such calls take another time.
Key = tuple[str, str, str, tuple[tuple[str, ...], ...]]

_kinds: dict[Key, Kind] = {}                   # those being learned
_closed: dict[Key, None] = {}                  # those this process is done with, oldest first
_adding = threading.Lock()
_now, _worked = time.perf_counter, time.thread_time
_counting = threading.Lock()                   # held for a sum
_budget = Budget()
_began: float | None = None                    # when the first call was explored
_last: float | None = None                     # when a call of a kind that is being learned last came
_explored = _learned = _unclear = 0


class Sample(NamedTuple):
    """A call that was timed; on CUDA its time is known when the device has come so far."""

    ticket: Ticket
    host_us: float
    overhead_us: float                         # what exploring itself did before the call
    prepared: bool = False                     # were weights packed during the call?
    worked_us: float = 0.0                     # CPU time of this thread; 0: not taken
    marks: tuple[Any, Any] | None = None       # CUDA events around it
    behind: bool = False                       # had the device not come to the first mark when the call returned?

    @property
    def disturbed(self) -> bool:
        """Was the CPU taken away meanwhile?"""
        return 0.0 < self.worked_us < KEPT * self.host_us

    def us(self) -> float | None:
        """What a caller in a loop would see: the longer of host and device. None: not known yet.

        Where the device was waiting for the host, the time between the marks holds the host's time too.
        """
        if self.marks is None:
            return self.host_us
        begin, end = self.marks
        if not end.query():
            return None
        between = begin.elapsed_time(end) * 1e3
        return max(self.host_us, between if self.behind else between - self.host_us)


class Kind:
    """One kind of call that is being learned. `lock` is never waited for."""

    def __init__(self, key: Key, op: Op, plan: Plan, default: str) -> None:
        base = plan.steps[0]
        self.key, self.op, self.facts = key, op, plan.facts
        self.trial = Trial(base.kernel, base.score.total_us, default, zlib.crc32(repr(key).encode()))
        self.steps: dict[str, Step] = {}
        self.lock = threading.Lock()
        self.done: deque[Sample] = deque()     # by any thread; read by the one that holds the lock
        self.failed: deque[tuple[Ticket | None, str, str]] = deque()   # the call, the kernel to drop, and why
        self.serving = base.kernel
        self.settled = False
        self.cost_us = 0.0
        self.told = False
        self.skip = self.pause = 0             # calls to let pass while there is no budget
        self.disturbed: dict[str, int] = {}    # kernel -> how often in a row

    def cost(self, step: Step, us: float) -> float:
        """What selection counts: the user's boosts divide the time."""
        return us / step.score.boost

    def next(self, available: Callable[[str], bool], began: float) -> Ticket | None:
        """Who serves this call and is timed; the lock is held. None: `serving`, untimed."""
        _tick(began)
        self.collect()
        trial = self.trial
        ticket = trial.next(available, _budget.allows)
        self.serving = trial.serving
        if ticket is not None:
            self.pause = 0
            _charge(reserved_us=ticket.reserved_us)
            return ticket
        if trial.winner:
            self.end()
            return None
        if not trial.in_flight:                # no budget; else it only waits for the device
            self.skip = self.pause = min(2 * self.pause + 1, MOST_SKIPPED)
        lost = min((_now() - began) * 1e6, MOST_OVERHEAD_US)
        self.cost_us += lost
        _charge(lost)
        return None

    def end(self) -> None:
        if not self.settled:
            self.settled = True
            _worker.settled(self)

    def collect(self) -> None:
        """What is known by now of calls that were timed."""
        while self.failed:
            ticket, kernel, why = self.failed.popleft()
            if ticket is not None:
                self.trial.sampled(ticket, None)
                _charge(reserved_us=-ticket.reserved_us)
            self.trial.drop(kernel, why)
        while self.done:
            sample = self.done[0]
            us = sample.us()
            if us is None:
                return                         # the device works in order: later ones are not done either
            self.done.popleft()
            self._take(sample, us)

    def _take(self, sample: Sample, us: float) -> None:
        ticket, trial = sample.ticket, self.trial
        times = self.disturbed[ticket.kernel] = self.disturbed.get(ticket.kernel, 0) + 1 if sample.disturbed else 0
        counts = not sample.prepared and times in (0, ATTEMPTS)
        if times == ATTEMPTS:                  # a busy machine: better this one than none
            self.disturbed[ticket.kernel] = 0
        trial.sampled(ticket, self.cost(self.steps[ticket.kernel], us) if counts else None)
        lost = min(sample.overhead_us, MOST_OVERHEAD_US)
        if ticket.kernel != trial.base:
            if ticket.warm_up or sample.prepared:      # that another process took the CPU is not our cost
                lost += max((sample.worked_us if sample.disturbed else us) - trial.expected_us(trial.base), 0.0)
            else:
                lost += trial.extra_us(ticket.kernel)
        self.cost_us += lost
        _charge(lost, -ticket.reserved_us, explored=ticket.kernel != trial.base)

    def measurements(self, world: World) -> list[Measurement]:
        """The result, written so that selection makes the same of it as the trial did."""
        op, facts, trial = self.op, self.facts, self.trial
        kind = kind_of(op, facts)
        flops, moved = (float(parse(text)(facts)) for text in (op.flops, op.bytes))
        results = trial.results()
        best = statistics_of(results[trial.winner])
        rows = []
        for kernel, samples in results.items():
            s, score = statistics_of(samples), self.steps[kernel].score
            behind = 1.0 if kernel == trial.winner else max(BEHIND_WINNER * best.median / s.median, 1.0)

            def own(us: float, score: Any = score, behind: float = behind) -> float:
                """Of the kernel alone: copies of inputs are counted apart, and estimated."""
                total = us * behind * score.boost
                return max(total - score.transform_us, 0.05 * total)

            rows.append(Measurement(
                kernel, op.name, kind.bucket, self.key[2], own(s.median), s.spread, len(samples), kind.family,
                kind.sizes_text, flops, moved, own(s.p95), own(s.p99), mode=EAGER))
        return list(measurements.heeded(world, op, facts, rows, [trial.winner])[0])

    def after_fork(self) -> None:
        self.lock = threading.Lock()
        self.done.clear()                      # CUDA events of the parent
        for runner in self.trial.runners.values():
            runner.in_flight = 0
        self.trial.in_flight = 0


class Statistics(NamedTuple):
    median: float
    spread: float
    p95: float
    p99: float


def statistics_of(samples: list[float]) -> Statistics:
    ordered = sorted(samples)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return Statistics(at(0.5), (at(0.9) - at(0.1)) / at(0.5), at(0.95), at(0.99))


def _charge(lost_us: float = 0.0, reserved_us: float = 0.0, explored: bool = False) -> None:
    global _explored
    with _counting:
        _budget.count(0.0, lost_us, reserved_us)
        _explored += explored


def _tick(now: float) -> None:
    """Count the time in which calls come; not that in which the process has nothing to do."""
    global _began, _last
    with _counting:
        if _last is not None and now > _last:
            _budget.count(total_us=min(now - _last, MOST_GAP) * 1e6)
        _last = now
        if _began is None:
            _began = time.monotonic()


# the entry of a kind that is being learned

class Way(NamedTuple):
    """One kernel as it serves the calls of an entry."""

    run: Callable[..., Any]
    entry: Entry                               # with its own kernel first: for the recovery from its faults
    ready: Callable[[tuple[Any, ...]], bool] | None    # of one that compiles: is it compiled for this very call?
    named: bool = False                        # called by its name, which counts and blames by itself


class Exploring:
    """What an entry runs while its kind is learned. `ways` are filled in as their kernels are loaded."""

    def __init__(self, dispatcher: Dispatcher, kind: Kind, plan: Plan, plain: Callable[..., Any], base: Way) -> None:
        self.dispatcher, self.kind, self.plan = dispatcher, kind, plan
        self.plain = plain                     # what serves without learning, for calls that are not timed
        self.base = plan.steps[0].kernel
        self.ways: Mapping[str, Way] = {self.base: base}
        self.cuda = plan.facts["device"] == "cuda"
        self.main = dispatcher.names.index(dispatcher.op.main_tensor) if dispatcher.op.main_tensor else -1

    def __call__(self, *values: Any) -> Any:
        kind, ways = self.kind, self.ways
        if kind.skip > 0:                      # threads may both count: it need not be exact
            kind.skip -= 1
            return self._serve(ways, values)
        if kind.settled or len(ways) < 2 or (self.cuda and not self._timeable(values)) \
                or not kind.lock.acquire(blocking=False):
            return self._serve(ways, values)
        try:
            began = _now()
            ticket = kind.next(lambda kernel: self._available(ways, kernel, values), began)
        finally:
            kind.lock.release()
        if ticket is None:
            return self._serve(ways, values)
        way = ways[ticket.kernel]
        self._count(way, ticket.kernel)
        try:
            timed = _timed_on_cuda if self.cuda else _timed
            out, sample = timed(way.run, values, ticket, began)
        except faults.FAULTS as fault:
            return self._recovered(ways, ticket.kernel, values, fault, ticket)
        kind.done.append(sample)
        return out

    def _available(self, ways: Mapping[str, Way], kernel: str, values: tuple[Any, ...]) -> bool:
        way = ways.get(kernel)
        return way is not None and (way.ready is None or way.ready(values))

    def _timeable(self, values: tuple[Any, ...]) -> bool:
        """Not inside a capture, and not for a device whose stream is not the current one."""
        return (not faults.capturing() and self.main >= 0
                and values[self.main].device.index == torch.cuda.current_device())

    def _serve(self, ways: Mapping[str, Way], values: tuple[Any, ...]) -> Any:
        kernel = self.kind.serving
        way = ways.get(kernel)
        if kernel == self.base or way is None or (way.ready is not None and not way.ready(values)):
            return self.plain(*values)
        self._count(way, kernel)
        try:
            return way.run(*values)
        except faults.FAULTS as fault:
            return self._recovered(ways, kernel, values, fault, None)

    def _count(self, way: Way, kernel: str) -> None:
        """The call was counted for the kernel that serves anyway."""
        if way.named or kernel != self.base:
            self.dispatcher.ledger.moved(self.base, "" if way.named else kernel)

    def _recovered(self, ways: Mapping[str, Way], kernel: str, values: tuple[Any, ...], fault: BaseException,
                   ticket: Ticket | None) -> Any:
        """The kernel is out for this kind; whose fault it was, and who serves, is decided as for any other call."""
        guilty = "" if isinstance(fault, faults.PASSED_ON) else kernel
        self.kind.failed.append((ticket, guilty, f"it failed: {type(fault).__name__}"))
        if not ways[kernel].named or kernel == self.base or not isinstance(fault, KernelFailed):
            return self.dispatcher.recover(ways[kernel].entry, values, fault)
        out = self.plain(*values)
        self.dispatcher.ledger.fell_back(self.base)
        events.emit(Fallback(self.kind.op.name, kernel, self.base, fault.reasons[0] if fault.reasons else None))
        return out


def _timed(run: Callable[..., Any], values: tuple[Any, ...], ticket: Ticket, began: float) -> tuple[Any, Sample]:
    packed, worked = len(PACKED), _worked()
    start = _now()
    out = run(*values)
    took = _now() - start
    return out, Sample(ticket, took * 1e6, (start - began) * 1e6, len(PACKED) != packed, (_worked() - worked) * 1e6)


def _timed_on_cuda(run: Callable[..., Any], values: tuple[Any, ...], ticket: Ticket,
                   began: float) -> tuple[Any, Sample]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    packed = len(PACKED)
    begin.record()
    start = _now()
    out = run(*values)
    took = _now() - start
    end.record()
    behind = not begin.query()
    overhead = _now() - began - took
    return out, Sample(ticket, took * 1e6, overhead * 1e6, len(PACKED) != packed, 0.0, (begin, end), behind)


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
            kind = _kinds[key] = Kind(key, dispatcher.op, plan, default.kernel if default is not None else "")
    base = plan.steps[0]
    kind.steps.setdefault(base.kernel, base)
    kernel = world.catalog.by_id[base.kernel]
    found = Exploring(dispatcher, kind, plan, run, _way(dispatcher, world, kernel, plan, run))
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
    return Way(run, Entry(plan, Binding(run, None), run), _readiness(world, kernel, plan.facts), named)


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
        ways[step.kernel] = _way(dispatcher, world, kernel, first, run)
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
        self._wake = threading.Condition()
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
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="layerzero-learning", daemon=True)
            self._thread.start()
        else:
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
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
            except faults.FAULTS as e:         # a kernel that cannot be bound; the calls go on
                events.log.warning("learning: %s: %s", type(e).__name__, e)

    def _publish(self, kinds: list[Kind]) -> None:
        self._last = time.monotonic()
        publish(kinds)

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until nothing is left to load or to write; True if that was within the time."""
        end = time.monotonic() + seconds
        with self._wake:
            while self._thread is not None and time.monotonic() < end:
                self._hurry = True
                self._wake.notify_all()
                self._wake.wait(max(end - time.monotonic(), 0.0))
            return self._thread is None

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
        with _counting:
            _learned += trial.clear
            _unclear += not trial.clear
        _close(kind)
        events.emit(Learned(kind.op.name, trial.winner, kind.key[1], trial.clear, trial.samples, trial.calls,
                            kind.cost_us / 1e6))
    if rows:
        measurements.record(rows)
    else:
        worlds.publish(lambda w: w.but(), "learned")


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
    lost = _budget.lost_us / 1e6
    span = time.monotonic() - _began if _began is not None else 0.0
    return Status(len(_kinds), _learned, _unclear, _explored, lost, lost / span if span > 0 else 0.0)


def standing(op: Op, world: World, plan: Plan) -> Callable[[str], str]:
    """What explain says of a kernel for this kind of call while it is learned; "" otherwise."""
    if not _kinds or plan.facts["device"] not in DEVICES or mode_of(plan.facts) != EAGER:
        return lambda kernel: ""
    kind = _kinds.get(_key(op, world, plan))
    return kind.trial.standing if kind is not None else lambda kernel: ""


def reset() -> None:
    """Forget what was learned and what it cost; the store keeps the measurements."""
    global _budget, _began, _last, _explored, _learned, _unclear
    flush()
    _kinds.clear()
    _closed.clear()
    _budget, _began, _last, _explored, _learned, _unclear = Budget(), None, None, 0, 0, 0


def _follow(world: World) -> None:
    if not world.policy.setting("learn"):
        _kinds.clear()


worlds.listen(_follow)
atexit.register(flush, 5.0)


def _after_fork() -> None:
    global _adding, _counting
    _adding, _counting = threading.Lock(), threading.Lock()
    for kind in list(_kinds.values()):
        kind.after_fork()
    _worker.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
