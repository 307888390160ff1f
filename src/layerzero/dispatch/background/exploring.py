"""One kind of call that is being learned, and what its entries run meanwhile: an `Exploring`, which
has one kernel after the other serve the calls and times them.

selection/trial.py decides which kernel is next and which has won. This file has the clock, the CUDA
events, the account of what exploring costs, and what happens if a kernel throws. learning.py says
which calls are explored.
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
from ...selection.trial import Budget, Ticket, Trial
from ...spec.errors import KernelExecutionError
from ...spec.event import Fallback
from ...spec.op import Op
from ...spec.plan import Plan, Step
from ...spec.rules.expr import parse
from ...world import events, measurements
from ...world.snapshot import World
from ..cache import Entry

if TYPE_CHECKING:
    from ..dispatcher import Dispatcher

# a tie is recorded as this much slower for those that did not win
BEHIND_WINNER = 1.005
# seconds without a call after which the process counts as idle
MAX_GAP = 0.05
# a sample with less CPU time is not counted, except every third in a row
MIN_CPU_SHARE, MAX_DISTURBED = 0.9, 3
# deciding about one call takes about 10; more is another process's doing
MAX_OVERHEAD_US = 100.0
# calls in a row that are not timed while there is no budget; more where calls are so short that
# asking again would take more than this share of them
MAX_SKIPPED, MAX_ASKING_SHARE = 31, 0.001

# (op, bucket, place, transforms of kernels that need them), as transforms take time
Key = tuple[str, str, str, tuple[tuple[str, ...], ...]]

_now, _cpu_time = time.perf_counter, time.thread_time


class Account:
    """Counts what exploring has cost in this process, against its budget."""

    def __init__(self) -> None:
        self._lock = locks.Lock()              # held for an addition only
        self.reset()

    def reset(self) -> None:
        self.budget = Budget()
        self.first_call_at: float | None = None        # when the first call came
        # calls served by another kernel than without learning
        self.explored = 0
        self._last: float | None = None

    def charge(self, lost_us: float = 0.0, reserved_us: float = 0.0,
               explored: bool = False) -> None:
        with self._lock:
            self.budget.count(0.0, lost_us, reserved_us)
            self.explored += explored

    def tick(self, now: float) -> None:
        """Count the time between calls, up to MAX_GAP: not that in which the process is idle."""
        with self._lock:
            if self._last is not None and now > self._last:
                self.budget.count(total_us=min(now - self._last, MAX_GAP) * 1e6)
            self._last = now
            if self.first_call_at is None:
                self.first_call_at = time.monotonic()


account = Account()


class TimedCall(NamedTuple):
    """A call that was timed; on CUDA its time is known once the device has done it."""

    ticket: Ticket
    host_us: float
    overhead_us: float                         # of exploring itself, before the call
    prepared: bool = False                     # were weights packed during the call?
    worked_us: float = 0.0                     # CPU time of this thread; 0: not taken
    events_around: tuple[Any, Any] | None = None       # CUDA events around it
    # had the device not reached the first event when the call returned?
    behind: bool = False

    @property
    def disturbed(self) -> bool:
        """Was the CPU taken away during the call, so that its time is not known?"""
        return self.events_around is None and 0.0 < self.worked_us < MIN_CPU_SHARE * self.host_us

    def times(self) -> tuple[float, float] | None:
        """Return what a caller in a loop would see, the longer of host and device time, and the
        device's time alone; None if not known yet.

        If the device was waiting for the host, the time between the events includes the host's
        time.
        """
        if self.events_around is None:
            return self.host_us, self.host_us
        begin, end = self.events_around
        if not end.query():
            return None
        between = begin.elapsed_time(end) * 1e3
        # CPU time: waiting for other threads, or for a full queue, is not the kernel's doing.
        host = min(self.worked_us, self.host_us)
        device = max(between if self.behind else between - self.host_us, 1e-3)
        return max(host, device), device


class LearnedKind:
    """One kind of call that is being learned. A call that cannot take `lock` is not timed."""

    def __init__(self, key: Key, op: Op, plan: Plan, default: str,
                 on_settled: Callable[[LearnedKind], None]) -> None:
        base = plan.steps[0]
        self.key, self.op, self.facts = key, op, plan.facts
        self.on_settled = on_settled
        # On a GPU the native path records the launches of a kernel during its second call.
        self.trial = Trial(base.kernel, base.score.total_us, default,
                           zlib.crc32(repr(key).encode()),
                           warm_ups=3 if plan.facts["device"] == "cuda" else 1)
        self.steps: dict[str, Step] = {}
        self.lock = locks.Lock()
        # appended by any thread, read by the one that holds the lock
        self.done: deque[TimedCall] = deque()
        # the sample, the kernel to drop, and why
        self.failed: deque[tuple[Ticket | None, str, str]] = deque()
        self.serving = base.kernel
        self.settled = False
        self.cost_us = 0.0
        self.announced = False
        self.calls = 0                         # that came until it was settled, timed or not
        self.skip = self.pause = 0             # calls to let pass while there is no budget
        self.disturbed: dict[str, int] = {}    # kernel -> how often in a row

    def cost(self, step: Step, us: float) -> float:
        """Return the cost that selection counts: the user's boosts divide the time."""
        return us / step.score.boost

    def next(self, available: Callable[[str], bool], call_start: float) -> Ticket | None:
        """Return which kernel serves this call, timed; None: `serving`. The lock is held."""
        account.tick(call_start)
        self.collect()
        trial, ticket = self.trial, None
        # Without any budget nothing is decided: deciding costs, and would use up what comes in.
        if trial.winner or account.budget.allows(0.0):
            ticket = trial.next(available, account.budget.allows)
            self.serving = trial.serving
        if ticket is not None:
            self.pause = 0
            account.charge(reserved_us=ticket.reserved_us)
            return ticket
        if trial.winner:
            self.end()
            return None
        lost = min((_now() - call_start) * 1e6, MAX_OVERHEAD_US)
        if not trial.in_flight:                # no budget; otherwise it waits for samples
            rare = int(lost / (MAX_ASKING_SHARE * trial.expected_us(trial.base)))
            self.skip = self.pause = min(2 * self.pause + 1, max(MAX_SKIPPED, rare))
        self.cost_us += lost
        account.charge(lost)
        return None

    def end(self) -> None:
        if not self.settled:
            self.settled = True
            self.on_settled(self)

    def collect(self) -> None:
        """Take in the samples whose times are known by now."""
        while self.failed:
            ticket, kernel, why = self.failed.popleft()
            if ticket is not None:
                self.trial.record(ticket, None)
                account.charge(reserved_us=-ticket.reserved_us)
            self.trial.drop(kernel, why)
        while self.done:
            sample = self.done[0]
            times = sample.times()
            if times is None:
                # the device works in order: later samples are not done either
                return
            self.done.popleft()
            self._count_sample(sample, *times)

    def _count_sample(self, sample: TimedCall, us: float, device_us: float) -> None:
        ticket, trial = sample.ticket, self.trial
        in_a_row = self.disturbed[ticket.kernel] = (self.disturbed.get(ticket.kernel, 0) + 1
                                                    if sample.disturbed else 0)
        counts = not sample.prepared and in_a_row in (0, MAX_DISTURBED)
        if in_a_row == MAX_DISTURBED:          # a busy machine: this sample is better than none
            self.disturbed[ticket.kernel] = 0
        trial.record(ticket, self.cost(self.steps[ticket.kernel], us) if counts else None,
                     device_us)
        lost = min(sample.overhead_us, MAX_OVERHEAD_US)
        if ticket.kernel != trial.base:
            # time that another process took is not our cost
            if ticket.warm_up or sample.prepared:
                lost += max((sample.worked_us if sample.disturbed else us)
                            - trial.expected_us(trial.base), 0.0)
            else:
                lost += trial.extra_us(ticket.kernel)
        self.cost_us += lost
        account.charge(lost, -ticket.reserved_us, explored=ticket.kernel != trial.base)

    def measurements(self, world: World) -> list[Measurement]:
        """Return the result as measurements, such that selection decides as the trial did."""
        op, facts, trial = self.op, self.facts, self.trial
        kind = kind_of(op, facts)
        flops, nbytes = (float(parse(text)(facts)) for text in (op.flops, op.bytes))
        results = trial.results()
        best = statistics_of(results[trial.winner])
        rows = []
        for kernel, samples in results.items():
            s, score = statistics_of(samples), self.steps[kernel].score
            behind = (1.0 if kernel == trial.winner
                      else max(BEHIND_WINNER * best.median / s.median, 1.0))

            def kernel_us(us: float, score: Any = score, behind: float = behind) -> float:
                """Returns the time of the kernel alone: transforms of inputs are counted apart, and
                estimated."""
                total = us * behind * score.boost
                return max(total - score.transform_us, 0.05 * total)

            rows.append(Measurement(
                kernel, op.name, kind.bucket, self.key[2], kernel_us(s.median), s.spread,
                len(samples), kind.family, kind.sizes_text, flops, nbytes, kernel_us(s.p95),
                kernel_us(s.p99), mode=EAGER))
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
        rank = share * (len(ordered) - 1)
        low = int(rank)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)

    return Statistics(at(0.5), (at(0.9) - at(0.1)) / at(0.5), at(0.95), at(0.99))


# what an entry runs while its kind is learned

class Candidate(NamedTuple):
    """One kernel as it serves the calls of an entry."""

    # its own kernel is first in the plan, for the recovery
    entry: Entry
    # for a kernel that compiles: is it compiled for this call?
    ready: Callable[[tuple[Any, ...]], bool] | None
    # called as lz.<op>(backend=...), which counts calls and faults by itself
    named: bool = False


class Exploring:
    """The function that an entry runs while its kind is learned; `candidates` grows on loading."""

    def __init__(self, dispatcher: Dispatcher, kind: LearnedKind, plan: Plan,
                 run_plain: Callable[..., Any], base: Candidate) -> None:
        self.dispatcher, self.kind, self.plan = dispatcher, kind, plan
        # serves the calls that are not timed, as without learning
        self.run_plain = run_plain
        self.base = plan.steps[0].kernel
        self.candidates: Mapping[str, Candidate] = {self.base: base}
        self.cuda = plan.facts["device"] == "cuda"
        self.main = (dispatcher.names.index(dispatcher.op.main_tensor) if dispatcher.op.main_tensor
                     else -1)

    def __call__(self, *values: Any) -> Any:
        kind, candidates = self.kind, self.candidates
        kind.calls += not kind.settled         # not exact between threads, and need not be
        if kind.skip > 0:
            kind.skip -= 1
            return self._serve(candidates, values)
        if kind.settled or len(candidates) < 2 or (self.cuda and not self._timeable(values)):
            return self._serve(candidates, values)
        ticket: Ticket | None = None
        try:
            if not kind.lock.acquire(blocking=False):
                return self._serve(candidates, values)
            try:
                call_start = _now()
                ticket = kind.next(lambda kernel: self._available(candidates, kernel, values),
                                   call_start)
            finally:
                kind.lock.release()
            if ticket is None:
                return self._serve(candidates, values)
            candidate = candidates[ticket.kernel]
            self._count(candidate, ticket.kernel)
            timed = _run_timed_on_cuda if self.cuda else _run_timed
            out, sample = timed(candidate.entry.run, values, ticket, call_start)
        except faults.FAULTS as fault:
            if ticket is None:
                raise
            return self._recover(candidates, ticket.kernel, values, fault, ticket)
        except BaseException:                  # an interrupt: this sample will not come
            if ticket is not None:
                kind.failed.append((ticket, "", ""))
            raise
        kind.done.append(sample)
        return out

    def _available(self, candidates: Mapping[str, Candidate], kernel: str,
                   values: tuple[Any, ...]) -> bool:
        candidate = candidates.get(kernel)
        return candidate is not None and (candidate.ready is None or candidate.ready(values))

    def _timeable(self, values: tuple[Any, ...]) -> bool:
        """Return False inside a capture, and for tensors on another device than the current one."""
        return (not faults.capturing() and self.main >= 0
                and values[self.main].device.index == torch.cuda.current_device())

    def _serve(self, candidates: Mapping[str, Candidate], values: tuple[Any, ...]) -> Any:
        kernel = self.kind.serving
        candidate = candidates.get(kernel)
        if (kernel == self.base or candidate is None
            or (candidate.ready is not None and not candidate.ready(values))):
            return self.run_plain(*values)
        self._count(candidate, kernel)
        try:
            return candidate.entry.run(*values)
        except faults.FAULTS as fault:
            return self._recover(candidates, kernel, values, fault, None)

    def _count(self, candidate: Candidate, kernel: str) -> None:
        """Correct the ledger, which has counted the call for the first kernel of the plan."""
        if candidate.named or kernel != self.base:
            self.dispatcher.ledger.reassign(self.base, "" if candidate.named else kernel)

    def _recover(self, candidates: Mapping[str, Candidate], kernel: str, values: tuple[Any, ...],
                 fault: BaseException, ticket: Ticket | None) -> Any:
        """Drop the kernel for this kind; whose fault it was is decided as for any call."""
        to_drop = "" if isinstance(fault, faults.PASSED_ON) else kernel
        self.kind.failed.append((ticket, to_drop, f"it failed: {type(fault).__name__}"))
        if (not candidates[kernel].named or kernel == self.base
            or not isinstance(fault, KernelExecutionError)):
            return self.dispatcher.recover(candidates[kernel].entry, values, fault)
        out = self.run_plain(*values)
        self.dispatcher.ledger.count_fallback(self.base)
        events.emit(Fallback(self.kind.op.name, kernel, self.base, fault.reasons[0] if fault.reasons
                             else None))
        return out


def _packed_weights() -> int:
    """Returns how many weights are packed: a call that packs another is no sample."""
    from ...backends._packing import PACKED  # `import layerzero` reads no backend

    return len(PACKED)


def _run_timed(run: Callable[..., Any], values: tuple[Any, ...], ticket: Ticket,
               call_start: float) -> tuple[Any, TimedCall]:
    packed, worked = _packed_weights(), _cpu_time()
    start = _now()
    out = run(*values)
    took = _now() - start
    return out, TimedCall(ticket, took * 1e6, (start - call_start) * 1e6,
                          _packed_weights() != packed, (_cpu_time() - worked) * 1e6)


def _run_timed_on_cuda(run: Callable[..., Any], values: tuple[Any, ...], ticket: Ticket,
                       call_start: float) -> tuple[Any, TimedCall]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    packed = _packed_weights()
    begin.record()
    start, worked = _now(), _cpu_time()
    out = run(*values)
    worked, took = _cpu_time() - worked, _now() - start
    end.record()
    behind = not begin.query()
    overhead = _now() - call_start - took
    return out, TimedCall(ticket, took * 1e6, overhead * 1e6, _packed_weights() != packed,
                          worked * 1e6, (begin, end), behind)
