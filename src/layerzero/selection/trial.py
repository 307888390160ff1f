"""Learning which kernel is fastest for a kind of call, from the calls themselves.

This is successive elimination. In each round every remaining kernel serves one call, in shuffled
order. Two kernels are compared by the ratio of their times within the rounds that both served, so
that a disturbance of the machine affects both. The confidence interval of the median ratio comes
from order statistics, which assume nothing about the noise. A kernel is eliminated when it is
surely no better; torch's own kernel wins unless another is surely faster by more than the margin.

No clock, no device and no lock is used here.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

MARGIN = 0.02              # nearer than this is a tie, and a tie goes to torch's own default
ACCEPTED = 0.03            # a kernel that is faster than the leader by this at most is dropped
ERROR_RATE = 0.01          # how often an interval may miss the true ratio
ROUNDS_PER_LOOK = 4        # between comparisons of all kernels
FIRST_SAMPLES = 2          # of the base kernel, before another is tried
MAX_SAMPLES = 120          # of one kind of call, over all kernels: then the medians decide
MAX_CALLS = 20_000         # of one kind of call, timed or not: the budget may be used up for long
MAX_IN_FLIGHT = 64         # calls whose time is not known yet
MAX_UNKNOWN = 3            # in flight of a kernel of which no call is done yet: it may be slow
HOPELESS = 3.0             # times slower than the best: eliminated at once
SLOWER = 1.5               # times slower in each of FEW_SAMPLES: eliminated after those
FEW_SAMPLES = 4
COSTLY_US = 1000.0         # a loss from which one sample is enough to eliminate
TOO_SLOW = 10.0            # times slower than the base by expectation: never tried
NEAR = 0.05                # of medians this near to the best, the device's share of them decides


class Ticket(NamedTuple):
    """One call that `kernel` is to serve and that is to be timed."""

    kernel: str
    round: int
    # its first calls, which load, allocate and record launches, are no samples
    warm_up: bool
    reserved_us: float                         # expected cost beyond that of the base kernel


class Budget:
    """The microseconds that exploring may cost: a share of the time so far plus an allowance."""

    def __init__(self, share: float = 0.005, allowance_us: float = 800_000.0) -> None:
        self.share, self.allowance_us = share, allowance_us
        self.total_us = self.lost_us = self.reserved_us = 0.0

    def allows(self, extra_us: float) -> bool:
        spent = self.lost_us + self.reserved_us + extra_us
        return spent <= self.allowance_us + self.share * self.total_us

    def count(self, total_us: float = 0.0, lost_us: float = 0.0, reserved_us: float = 0.0) -> None:
        self.total_us += total_us
        self.lost_us += lost_us
        self.reserved_us += reserved_us


class Runner:
    """One kernel in a trial."""

    def __init__(self, kernel: str, guess_us: float) -> None:
        self.kernel, self.guess_us = kernel, max(guess_us, 1e-3)
        self.rounds: dict[int, float] = {}     # round -> microseconds
        self.device_us: list[float] = []       # of the same calls, on the device alone
        self.median = math.nan
        self.in_flight = 0
        self.known = False                     # whether any call of it is done
        self.warm_ups = 0                      # calls so far that were no samples
        self.out = ""                          # why it was eliminated
        self._ordered: list[float] = []

    def add(self, round: int, us: float) -> None:
        self.rounds[round] = us
        insort(self._ordered, us)
        middle = len(self._ordered) // 2
        odd = len(self._ordered) % 2
        self.median = (self._ordered[middle] if odd
                       else (self._ordered[middle - 1] + self._ordered[middle]) / 2)

    @property
    def least(self) -> float:
        return self._ordered[0]

    @property
    def most(self) -> float:
        return self._ordered[-1]


class Trial:
    """A trial of the kernels for one kind of call.

    `base` is the kernel that serves without a trial, `default` the one that torch itself would run.
    The first `warm_ups` calls of each kernel are no samples.
    """

    def __init__(self, base: str, guess_us: float, default: str = "", seed: int = 0,
                 warm_ups: int = 1) -> None:
        self.base, self.default, self.warm_ups = base, default, warm_ups
        self.runners = {base: Runner(base, guess_us)}
        self.winner = ""                       # "" until the trial ends
        self.clear = False                     # whether there is a result to keep
        self.calls = self.samples = self.in_flight = self.round = 0
        self._queue: list[str] = []
        self._random = random.Random(seed)

    def enter(self, kernel: str, guess_us: float) -> None:
        """Add a kernel, at any time before the trial ends."""
        if kernel not in self.runners and not self.winner:
            self.runners[kernel] = Runner(kernel, guess_us)

    @property
    def running(self) -> list[Runner]:
        return [r for r in self.runners.values() if not r.out]

    @property
    def serving(self) -> str:
        """The kernel for calls that are not timed: the leader, once it is ahead of the base."""
        base, leader = self.runners[self.base], self._leader()
        if self.winner or leader is None:
            return self.winner or self.base
        if base.out or (len(leader.rounds) >= FEW_SAMPLES
                        and leader.median * (1 + NEAR) < base.median):
            return leader.kernel
        return self.base

    def expected_us(self, kernel: str) -> float:
        """Returns the measured median, else the base's scaled by the ratio of guesses."""
        runner, base = self.runners[kernel], self.runners[self.base]
        if runner.rounds:
            return runner.median
        return base.median * runner.guess_us / base.guess_us if base.rounds else runner.guess_us

    def extra_us(self, kernel: str) -> float:
        """Returns the expected cost of a call beyond that of the base kernel."""
        return max(self.expected_us(kernel) - self.expected_us(self.base), 0.0)

    # the next call

    def next(self, available: Callable[[str], bool],
             allowed: Callable[[float], bool]) -> Ticket | None:
        """Returns a ticket for the kernel to time next; None if `serving` serves untimed."""
        if self.winner:
            return None
        self.calls += 1
        if self.calls > MAX_CALLS:
            self._close()
            return None
        if self.in_flight >= MAX_IN_FLIGHT:
            return None
        for _ in range(2):                     # the rest of this round, then a new one
            while self._queue:
                runner = self.runners[self._queue.pop()]
                waits = not runner.known and runner.in_flight >= self._most_unknown(runner)
                if (runner.out or waits or not available(runner.kernel)
                    or not allowed(self.extra_us(runner.kernel))):
                    continue                   # it skips this round
                ticket = Ticket(runner.kernel, self.round, runner.warm_ups < self.warm_ups,
                                self.extra_us(runner.kernel))
                runner.warm_ups += 1
                runner.in_flight += 1
                self.in_flight += 1
                return ticket
            if not self._new_round(available, allowed):
                return None
        return None

    def _most_unknown(self, runner: Runner) -> int:
        """The base would serve anyway, so that its first samples are taken at once."""
        return self.warm_ups + FIRST_SAMPLES if runner.kernel == self.base else MAX_UNKNOWN

    def _new_round(self, available: Callable[[str], bool],
                   allowed: Callable[[float], bool]) -> bool:
        if self.round and self.round % ROUNDS_PER_LOOK == 0:
            self._eliminate()
            if self.winner:
                return False
        base = self.runners[self.base]
        if not base.out and len(base.rounds) < FIRST_SAMPLES:
            queue = [self.base]                # what a call costs without a trial comes first
        else:
            queue = [r.kernel for r in self.running if allowed(self.extra_us(r.kernel))
                     and available(r.kernel)]
            if len(queue) < 2:
                return False                   # no kernel to compare with at the moment
        self.round += 1
        self._random.shuffle(queue)
        self._queue = queue
        return True

    # results

    def record(self, ticket: Ticket, us: float | None, device_us: float | None = None) -> None:
        """Record the time of a call, and how long the device took; None if it is not usable."""
        runner = self.runners[ticket.kernel]
        runner.in_flight -= 1
        self.in_flight -= 1
        runner.known = True
        if self.winner or runner.out or ticket.warm_up or us is None:
            return
        runner.add(ticket.round, max(us, 1e-3))
        runner.device_us.append(us if device_us is None else device_us)
        self.samples += 1
        self._drop_hopeless(runner)
        if not self.winner and self.samples >= MAX_SAMPLES:
            self._close()

    def drop(self, kernel: str, why: str) -> None:
        runner = self.runners.get(kernel)
        if runner is None or runner.out or self.winner:
            return
        runner.out = why
        self._settle_if_alone()

    def _drop_hopeless(self, runner: Runner) -> None:
        others = [r for r in self.running if r is not runner and r.rounds]
        if not others:
            return
        best = min(others, key=lambda r: r.median)
        least, count = runner.least, len(runner.rounds)
        if runner.kernel in (self.base, self.default) and count < fewest_samples():
            return                             # a few disturbed samples do not overrule torch
        if (least > HOPELESS * best.median
            and (count >= FIRST_SAMPLES or least - best.median >= COSTLY_US)):
            self.drop(runner.kernel, f"{least / best.median:.1f} times as slow as {best.kernel}")
        elif (count >= FEW_SAMPLES and len(best.rounds) >= FEW_SAMPLES
              and least > SLOWER * best.most):
            self.drop(runner.kernel,
                      f"{runner.median / best.median:.1f} times as slow as {best.kernel}")

    def _leader(self) -> Runner | None:
        return min((r for r in self.running if r.rounds), key=lambda r: r.median, default=None)

    def _eliminate(self) -> None:
        """Drop kernels surely no better than the leader, or the leader if torch's is as good."""
        leader, margin = self._leader(), math.log1p(MARGIN)
        for other in self.running:
            bounds = (interval(ratios(leader, other)) if leader is not None and other is not leader
                      else None)
            if leader is None or bounds is None:
                continue
            low, high = bounds
            if other.kernel == self.default:
                if low > margin:
                    self.drop(other.kernel, f"surely slower than {leader.kernel}")
                elif high <= margin:
                    self.drop(leader.kernel, f"no faster than {other.kernel}, which is torch's own")
                    return
            elif leader.kernel == self.default:
                if low > -margin:
                    self.drop(other.kernel, f"no faster than {leader.kernel}, which is torch's own")
            elif low > -math.log1p(ACCEPTED):
                self.drop(other.kernel, f"no faster than {leader.kernel}")

    def _settle_if_alone(self) -> None:
        running = self.running
        if len(running) == 1 and len(self.runners) > 1:
            self.winner, self.clear = running[0].kernel, bool(running[0].rounds)
        elif not running:
            self.winner = self.base

    def _close(self) -> None:
        """End the trial: the medians decide, if there are enough samples."""
        least = fewest_samples()
        timed = [r for r in self.running if len(r.rounds) >= least]
        best = min(timed, key=lambda r: r.median, default=None)
        if best is not None:
            # Of several that the host's time makes alike, the one that leaves the device first.
            near = [r for r in timed if r.median <= (1 + NEAR) * best.median]
            best = min(near, key=lambda r: statistics.median(r.device_us))
        own = self.runners.get(self.default)
        if best is None or len(self.results()) < 2:
            self.winner = self.serving
            return
        if own is not None and own in timed and own is not best:
            shared = ratios(best, own)
            if not shared or statistics.median(shared) <= math.log1p(MARGIN):
                best = own
        self.winner, self.clear = best.kernel, True

    def results(self) -> Mapping[str, list[float]]:
        """Returns the samples of each kernel that has any, in microseconds."""
        return {r.kernel: list(r.rounds.values()) for r in self.runners.values() if r.rounds}

    def standing(self, kernel: str) -> str:
        """Returns the state of a kernel in words, for explain; "" if it is not in the trial."""
        runner = self.runners.get(kernel)
        if runner is None:
            return ""
        time = f", median {runner.median:.1f} us" if runner.rounds else ""
        out = f", out: {runner.out}" if runner.out else ""
        return f"being learned: {len(runner.rounds)} samples{time}{out}"


def worth_trying(guess_us: float, base_guess_us: float) -> bool:
    """Returns whether a kernel is not expected to be many times slower than the base kernel."""
    return guess_us <= TOO_SLOW * base_guess_us


# statistics

def ratios(base: Runner, other: Runner) -> list[float]:
    """Returns log(other / base) in each round that both served."""
    return [math.log(other.rounds[i] / us) for i, us in base.rounds.items() if i in other.rounds]


def interval(values: Iterable[float]) -> tuple[float, float] | None:
    """Returns a confidence interval of the median behind `values`; None if they are too few."""
    ordered = sorted(values)
    rank = _rank(len(ordered))
    return (ordered[rank - 1], ordered[-rank]) if rank else None


@lru_cache(maxsize=None)
def _rank(n: int) -> int:
    """Returns the rank whose smallest and largest of n samples bound the median, but for
    ERROR_RATE."""
    rank, below = 0, 0.0
    while rank < n:
        below += math.comb(n, rank) / 2 ** n
        if 2 * below > ERROR_RATE:
            break
        rank += 1
    return rank


@lru_cache(maxsize=None)
def fewest_samples() -> int:
    """Returns the smallest number of samples that has an interval."""
    n = 1
    while not _rank(n):
        n += 1
    return n
