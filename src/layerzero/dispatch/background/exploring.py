"""One kind of call that is being learned, and what its entries run meanwhile: an `Exploring`, which has
one kernel after the other serve the calls and times them.

Who is next and who has won is decided by select/trial.py. Here is the clock, the CUDA events, the
account of what it costs, and what happens if a kernel throws. learning.py says which calls come here.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...machine import faults, locks
from ...perf.record import EAGER, Measurement, kind_of
from ...select.trial import Budget, Ticket, Trial
from ...spec.errors import KernelExecutionError
from ...spec.event import Fallback
from ...spec.expr import parse
from ...spec.op import Op
from ...spec.plan import Plan, Step
from ...world import events, measurements
from ...world.snapshot import World
from ..cache import Entry

if TYPE_CHECKING:
    from ..dispatcher import Dispatcher

BEHIND_WINNER = 1.005                          # how a tie is written down for those that did not win
MOST_GAP = 0.05                                # seconds without a call: beyond these the process is idle
KEPT, ATTEMPTS = 0.9, 3                        # less of a sample on the CPU: not counted, but for every third in a row
MOST_OVERHEAD_US = 100.0                       # to decide about one call takes some 10; more is another process
MOST_SKIPPED = 31                              # calls in a row that are not looked at while there is no budget

# (op, bucket, place, which kernels need their inputs copied first): such calls take another time.
Key = tuple[str, str, str, tuple[tuple[str, ...], ...]]

_now, _worked = time.perf_counter, time.thread_time


class Account:
    """What exploring has cost in this process, and what it may."""

    def __init__(self) -> None:
        self._lock = locks.Lock()              # held for a sum
        self.reset()

    def reset(self) -> None:
        self.budget = Budget()
        self.began: float | None = None        # when the first call came
        self.explored = 0                      # calls that another kernel served than would have without learning
        self._last: float | None = None

    def charge(self, lost_us: float = 0.0, reserved_us: float = 0.0, explored: bool = False) -> None:
        with self._lock:
            self.budget.count(0.0, lost_us, reserved_us)
            self.explored += explored

    def tick(self, now: float) -> None:
        """Count the time in which calls come; not that in which the process has nothing to do."""
        with self._lock:
            if self._last is not None and now > self._last:
                self.budget.count(total_us=min(now - self._last, MOST_GAP) * 1e6)
            self._last = now
            if self.began is None:
                self.began = time.monotonic()


account = Account()


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

    def __init__(self, key: Key, op: Op, plan: Plan, default: str, on_settled: Callable[[Kind], None]) -> None:
        base = plan.steps[0]
        self.key, self.op, self.facts = key, op, plan.facts
        self.on_settled = on_settled
        self.trial = Trial(base.kernel, base.score.total_us, default, zlib.crc32(repr(key).encode()))
        self.steps: dict[str, Step] = {}
        self.lock = locks.Lock()
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
        account.tick(began)
        self.collect()
        trial = self.trial
        ticket = trial.next(available, account.budget.allows)
        self.serving = trial.serving
        if ticket is not None:
            self.pause = 0
            account.charge(reserved_us=ticket.reserved_us)
            return ticket
        if trial.winner:
            self.end()
            return None
        if not trial.in_flight:                # no budget; else it only waits for the device
            self.skip = self.pause = min(2 * self.pause + 1, MOST_SKIPPED)
        lost = min((_now() - began) * 1e6, MOST_OVERHEAD_US)
        self.cost_us += lost
        account.charge(lost)
        return None

    def end(self) -> None:
        if not self.settled:
            self.settled = True
            self.on_settled(self)

    def collect(self) -> None:
        """What is known by now of calls that were timed."""
        while self.failed:
            ticket, kernel, why = self.failed.popleft()
            if ticket is not None:
                self.trial.record(ticket, None)
                account.charge(reserved_us=-ticket.reserved_us)
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
        trial.record(ticket, self.cost(self.steps[ticket.kernel], us) if counts else None)
        lost = min(sample.overhead_us, MOST_OVERHEAD_US)
        if ticket.kernel != trial.base:
            if ticket.warm_up or sample.prepared:      # that another process took the CPU is not our cost
                lost += max((sample.worked_us if sample.disturbed else us) - trial.expected_us(trial.base), 0.0)
            else:
                lost += trial.extra_us(ticket.kernel)
        self.cost_us += lost
        account.charge(lost, -ticket.reserved_us, explored=ticket.kernel != trial.base)

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
        return list(measurements.tighten_spread(world, op, facts, rows, [trial.winner])[0])

    def after_fork(self) -> None:
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


# the entry of a kind that is being learned

class Way(NamedTuple):
    """One kernel as it serves the calls of an entry."""

    entry: Entry                               # what it runs; its own kernel comes first, for the recovery
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
        if kind.settled or len(ways) < 2 or (self.cuda and not self._timeable(values)):
            return self._serve(ways, values)
        ticket: Ticket | None = None
        try:
            if not kind.lock.acquire(blocking=False):
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
            timed = _timed_on_cuda if self.cuda else _timed
            out, sample = timed(way.entry.run, values, ticket, began)
        except faults.FAULTS as fault:
            if ticket is None:
                raise
            return self._recovered(ways, ticket.kernel, values, fault, ticket)
        except BaseException:                  # an interrupt, passed on: nobody waits for this sample
            if ticket is not None:
                kind.failed.append((ticket, "", ""))
            raise
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
            return way.entry.run(*values)
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
        if not ways[kernel].named or kernel == self.base or not isinstance(fault, KernelExecutionError):
            return self.dispatcher.recover(ways[kernel].entry, values, fault)
        out = self.plain(*values)
        self.dispatcher.ledger.fell_back(self.base)
        events.emit(Fallback(self.kind.op.name, kernel, self.base, fault.reasons[0] if fault.reasons else None))
        return out


def _packed() -> int:
    """How many weights kernels keep in an arrangement of their own: a call that adds one is no sample."""
    from ...backends._packing import PACKED  # `import layerzero` reads no backend

    return len(PACKED)


def _timed(run: Callable[..., Any], values: tuple[Any, ...], ticket: Ticket, began: float) -> tuple[Any, Sample]:
    packed, worked = _packed(), _worked()
    start = _now()
    out = run(*values)
    took = _now() - start
    return out, Sample(ticket, took * 1e6, (start - began) * 1e6, _packed() != packed, (_worked() - worked) * 1e6)


def _timed_on_cuda(run: Callable[..., Any], values: tuple[Any, ...], ticket: Ticket,
                   began: float) -> tuple[Any, Sample]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    packed = _packed()
    begin.record()
    start = _now()
    out = run(*values)
    took = _now() - start
    end.record()
    behind = not begin.query()
    overhead = _now() - began - took
    return out, Sample(ticket, took * 1e6, overhead * 1e6, _packed() != packed, 0.0, (begin, end), behind)
