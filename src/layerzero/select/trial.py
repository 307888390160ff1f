"""Which kernel serves a kind of call fastest, found out on the calls themselves. Pure: no clock, no device, no lock.

This is successive elimination. In each round every kernel that is still in serves one call, in an
order that is shuffled each time. Two kernels are compared by the ratio of their times within the
rounds that both served, so that what the machine does in that moment falls on both. How sure the
median ratio is comes from order statistics, which assume nothing about the noise. A kernel leaves
when it is surely no better; what torch itself would run keeps the call unless another is surely
faster by more than the margin.
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
UNSURE = 0.01              # how often an interval may miss the true ratio
LOOK_EVERY = 4             # rounds
FIRST = 2                  # samples of the kernel that serves anyway, before another is tried
MOST_SAMPLES = 160         # of one kind of call, over all kernels: then the medians decide
MOST_CALLS = 20_000        # of one kind of call, timed or not: a first call may have used up the budget for long
MOST_IN_FLIGHT = 32        # calls whose time is not known yet
MOST_UNKNOWN = 3           # of a kernel that has no time yet: it may turn out to be slow
HOPELESS = 3.0             # times slower than the best: out at once
SLOWER = 1.5               # times slower in each of the first samples: out after those
COSTLY_US = 1000.0         # a loss from which one sample is enough to be out
TOO_SLOW = 10.0            # times slower by expectation: never tried


class Ticket(NamedTuple):
    """One call that `kernel` is to serve and that is to be timed."""

    kernel: str
    round: int
    warm_up: bool                              # its first call: loads, allocates; counts as cost and not as a sample
    reserved_us: float                         # what it is expected to cost over the kernel that serves anyway


class Budget:
    """Exploring may cost this share of the time so far, and an allowance to begin with. Microseconds."""

    def __init__(self, share: float = 0.015, allowance_us: float = 200_000.0) -> None:
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
        self.median = math.nan
        self.in_flight = 0
        self.warm = False
        self.out = ""                          # why it takes no further part
        self._ordered: list[float] = []

    def add(self, round: int, us: float) -> None:
        self.rounds[round] = us
        insort(self._ordered, us)
        middle = len(self._ordered) // 2
        odd = len(self._ordered) % 2
        self.median = self._ordered[middle] if odd else (self._ordered[middle - 1] + self._ordered[middle]) / 2

    @property
    def least(self) -> float:
        return self._ordered[0]

    @property
    def most(self) -> float:
        return self._ordered[-1]


class Trial:
    """The kernels that may serve one kind of call. `base` is what would serve it anyway; `default` is torch's own."""

    def __init__(self, base: str, guess_us: float, default: str = "", seed: int = 0) -> None:
        self.base, self.default = base, default
        self.runners = {base: Runner(base, guess_us)}
        self.winner = ""                       # "" while it is not settled
        self.clear = False                     # is there a result that is worth keeping?
        self.calls = self.samples = self.in_flight = self.round = 0
        self._turn: list[str] = []
        self._chance = random.Random(seed)

    def enter(self, kernel: str, guess_us: float) -> None:
        """A further kernel, at any time."""
        if kernel not in self.runners and not self.winner:
            self.runners[kernel] = Runner(kernel, guess_us)

    @property
    def running(self) -> list[Runner]:
        return [r for r in self.runners.values() if not r.out]

    @property
    def serving(self) -> str:
        """Who serves a call that is not timed."""
        if self.winner or not self.runners[self.base].out:
            return self.winner or self.base
        leader = self._leader()
        return leader.kernel if leader is not None else self.base

    def expected_us(self, kernel: str) -> float:
        """As measured; before that, as its guess compares with the guess for the one that serves anyway."""
        runner, base = self.runners[kernel], self.runners[self.base]
        if runner.rounds:
            return runner.median
        return base.median * runner.guess_us / base.guess_us if base.rounds else runner.guess_us

    def extra_us(self, kernel: str) -> float:
        """What a call served by it is expected to cost over what it costs anyway."""
        return max(self.expected_us(kernel) - self.expected_us(self.base), 0.0)

    # which kernel serves the next call

    def next(self, available: Callable[[str], bool], allowed: Callable[[float], bool]) -> Ticket | None:
        """Who serves the next call and is timed; None: whoever is `serving`, untimed."""
        if self.winner:
            return None
        self.calls += 1
        if self.calls > MOST_CALLS:
            self._close()
            return None
        if self.in_flight >= MOST_IN_FLIGHT:
            return None
        for _ in range(2):                     # what is left of this round, then a new one
            while self._turn:
                runner = self.runners[self._turn.pop()]
                waits = not runner.rounds and runner.in_flight >= MOST_UNKNOWN
                if runner.out or waits or not available(runner.kernel) or not allowed(self.extra_us(runner.kernel)):
                    continue                   # it sits this round out
                ticket = Ticket(runner.kernel, self.round, not runner.warm, self.extra_us(runner.kernel))
                runner.warm = True
                runner.in_flight += 1
                self.in_flight += 1
                return ticket
            if not self._new_round(available, allowed):
                return None
        return None

    def _new_round(self, available: Callable[[str], bool], allowed: Callable[[float], bool]) -> bool:
        if self.round and self.round % LOOK_EVERY == 0:
            self._look()
            if self.winner:
                return False
        base = self.runners[self.base]
        if not base.out and len(base.rounds) < FIRST:
            turn = [self.base]                 # what a call costs anyway comes first
        else:
            turn = [r.kernel for r in self.running if allowed(self.extra_us(r.kernel)) and available(r.kernel)]
            if len(turn) < 2:
                return False                   # nobody to compare with for the moment
        self.round += 1
        self._chance.shuffle(turn)
        self._turn = turn
        return True

    # what was found out

    def sampled(self, ticket: Ticket, us: float | None) -> None:
        """The call took so long; None: its time says nothing."""
        runner = self.runners[ticket.kernel]
        runner.in_flight -= 1
        self.in_flight -= 1
        if self.winner or runner.out or ticket.warm_up or us is None:
            return
        runner.add(ticket.round, max(us, 1e-3))
        self.samples += 1
        self._drop_hopeless(runner)
        if not self.winner and self.samples >= MOST_SAMPLES:
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
        if least > HOPELESS * best.median and (count >= FIRST or least - best.median >= COSTLY_US):
            self.drop(runner.kernel, f"{least / best.median:.1f} times as slow as {best.kernel}")
        elif count >= 3 and len(best.rounds) >= 3 and least > SLOWER * best.most:
            self.drop(runner.kernel, f"{runner.median / best.median:.1f} times as slow as {best.kernel}")

    def _leader(self) -> Runner | None:
        return min((r for r in self.running if r.rounds), key=lambda r: r.median, default=None)

    def _look(self) -> None:
        """Drop who is surely no better than the fastest; the fastest too, if it is no better than torch's own."""
        leader, margin = self._leader(), math.log1p(MARGIN)
        for other in self.running:
            found = interval(ratios(leader, other)) if leader is not None and other is not leader else None
            if leader is None or found is None:
                continue
            low, high = found
            if other.kernel == self.default:
                if low > margin:
                    self.drop(other.kernel, f"surely slower than {leader.kernel}")
                elif high <= margin:
                    self.drop(leader.kernel, f"no faster than {other.kernel}, which is torch's own")
                    return
            elif leader.kernel == self.default:
                if low > -margin:
                    self.drop(other.kernel, f"no faster than {leader.kernel}, which is torch's own")
            elif low > 0.0 or (low > -margin and high < margin):
                self.drop(other.kernel, f"no faster than {leader.kernel}")

    def _settle_if_alone(self) -> None:
        left = self.running
        if len(left) == 1 and len(self.runners) > 1:
            self.winner, self.clear = left[0].kernel, bool(left[0].rounds)
        elif not left:
            self.winner = self.base

    def _close(self) -> None:
        """There is no more time for it: the medians decide, where there are samples enough."""
        least = interval_needs()
        known = [r for r in self.running if len(r.rounds) >= least]
        best = min(known, key=lambda r: r.median, default=None)
        own = self.runners.get(self.default)
        if best is None or len(self.results()) < 2:
            self.winner = self.serving
            return
        if own is not None and own in known and own is not best:
            shared = ratios(best, own)
            if not shared or statistics.median(shared) <= math.log1p(MARGIN):
                best = own
        self.winner, self.clear = best.kernel, True

    def results(self) -> Mapping[str, list[float]]:
        """The samples of each kernel that has any, in microseconds."""
        return {r.kernel: list(r.rounds.values()) for r in self.runners.values() if r.rounds}

    def standing(self, kernel: str) -> str:
        """In words, for explain; "" for a kernel that takes no part."""
        runner = self.runners.get(kernel)
        if runner is None:
            return ""
        time = f", median {runner.median:.1f} us" if runner.rounds else ""
        out = f", out: {runner.out}" if runner.out else ""
        return f"being learned: {len(runner.rounds)} samples{time}{out}"


def worth_trying(guess_us: float, base_guess_us: float) -> bool:
    """A kernel that is expected to be many times slower than the one that serves anyway is not tried."""
    return guess_us <= TOO_SLOW * base_guess_us


# statistics

def ratios(one: Runner, other: Runner) -> list[float]:
    """log(other / one) in each round that both served."""
    return [math.log(other.rounds[i] / us) for i, us in one.rounds.items() if i in other.rounds]


def interval(values: Iterable[float]) -> tuple[float, float] | None:
    """Where the median of what `values` are drawn from lies, almost surely; None where they are too few to say."""
    ordered = sorted(values)
    rank = _rank(len(ordered))
    return (ordered[rank - 1], ordered[-rank]) if rank else None


@lru_cache(maxsize=None)
def _rank(n: int) -> int:
    """The median lies between the rank-th smallest and the rank-th largest of n, but for one time in 1 / UNSURE."""
    rank, below = 0, 0.0
    while rank < n:
        below += math.comb(n, rank) / 2 ** n
        if 2 * below > UNSURE:
            break
        rank += 1
    return rank


@lru_cache(maxsize=None)
def interval_needs() -> int:
    """The fewest samples that say anything."""
    n = 1
    while not _rank(n):
        n += 1
    return n
