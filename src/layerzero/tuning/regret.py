"""The regret of selection: the chosen kernel against every one that could have served, timed in
turns.

The regret of a call is chosen / best - 1. The fastest of several noisy times is partly the
luckiest, so the best is picked by one half of the rounds and judged by the other, for many random
halves, and always by the ratio within each round; the median of these judgements is the regret.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..dispatch.dispatcher import Dispatcher
from ..machine import faults, loading
from ..operate.calls import make_values
from ..operate.inspection import dispatcher_of
from ..perf.record import COMPILED, EAGER, kind_of
from ..selection.key import fixed_by_key
from ..spec.call import Call
from ..spec.codec import Record, encode
from ..spec.errors import LayerZeroError
from ..spec.plan import Plan
from ..world import context
from ..world import snapshot as worlds
from ..world.incidents import no_kernel_error
from .contest import as_contestant, compile_call, mode_facts
from .harness import Contestant, Race, Watch, stopwatch
from .tuner import modes_of, resolve

FIRST_ROUNDS = 3
SPLITS = 25            # random halves of the rounds
FAR_SLOWER = 5.0       # times slower than the fastest after the first rounds: dropped
MIN_ROUNDS, MAX_ROUNDS = 20, 400
WORSE = 0.03           # slower than torch's own choice by more than this counts as worse
MAX_MEDIAN, MAX_P95 = 0.02, 0.08
Rounds = Mapping[str, Sequence[float]]         # kernel -> microseconds, one number per round


# statistics

def ratio(rounds: Rounds, over: str, of: str, part: Sequence[int] | None = None) -> float:
    """Return how many times as long `over` takes as `of`: the median ratio of the rounds."""
    part = range(len(rounds[of])) if part is None else part
    return statistics.median([rounds[over][i] / rounds[of][i] for i in part])


def fastest(rounds: Rounds, chosen: str, part: Sequence[int] | None = None) -> str:
    """Return the fastest by the ratio to `chosen`; of equals, the chosen one."""
    return min(rounds, key=lambda name: (ratio(rounds, name, chosen, part), name != chosen))


def halves(rounds: Rounds) -> tuple[range, range]:
    """Return the earlier rounds and the later ones."""
    total = min(map(len, rounds.values()))
    return range(total // 2), range(total // 2, total)


def regret(rounds: Rounds, chosen: str) -> float:
    """Return chosen / best - 1, and zero where noise makes it negative."""
    order, generator = [*halves(rounds)[0], *halves(rounds)[1]], random.Random(0)
    middle = len(order) // 2
    regrets = []
    for _ in range(SPLITS):
        generator.shuffle(order)
        for pick, judge in ((order[:middle], order[middle:]), (order[middle:], order[:middle])):
            regrets.append(ratio(rounds, chosen, fastest(rounds, chosen, pick), judge) - 1.0)
    return max(statistics.median(regrets), 0.0)


def quantile(values: Sequence[float], share: float,
             weights: Sequence[float] | None = None) -> float:
    """Return the smallest value such that `share` of the weight is not above it."""
    pairs = sorted(zip(values, weights or [1.0] * len(values)))
    target, so_far = share * sum(w for _, w in pairs), 0.0
    for value, weight in pairs:
        so_far += weight
        if so_far >= target - 1e-9:
            return value
    return pairs[-1][0]


# results

@dataclass(frozen=True)
class Replayed:
    """One call: the chosen kernel, what torch would run, and rounds of all that may serve."""

    call: Call
    label: str
    chosen: str
    default: str                               # torch's own kernel; "" where there is none
    rounds: Rounds
    # microseconds in the first rounds
    far_slower: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        return fastest(self.rounds, self.chosen)

    @cached_property
    def regret(self) -> float:
        return regret(self.rounds, self.chosen)

    @property
    def flip(self) -> tuple[str, str] | None:
        """The fastest of the two halves of the rounds, if they differ."""
        first, second = (fastest(self.rounds, self.chosen, half) for half in halves(self.rounds))
        return None if first == second else (first, second)

    @property
    def gain(self) -> float | None:
        """Returns how many times faster than torch's own choice."""
        return (ratio(self.rounds, self.default, self.chosen) if self.default in self.rounds
                else None)

    def us(self, kernel: str) -> float:
        return statistics.median(self.rounds[kernel])

    def to_json(self) -> dict[str, Any]:
        return {
            "call": self.call.to_json(), "label": self.label, "count": self.call.count,
            "chosen": self.chosen, "best": self.best, "default": self.default,
            "regret": self.regret, "gain": self.gain, "flip": encode(self.flip),
            "rounds": len(next(iter(self.rounds.values()))),
            "microseconds": {name: self.us(name) for name in self.rounds},
            "far_slower": dict(self.far_slower), "failed": dict(self.failed)}


@dataclass(frozen=True)
class NotReplayed(Record):
    call: Call
    why: str


@dataclass(frozen=True)
class RegretReport:
    """The regret of a whole workload. `weighted`: each call counts as often as it came."""

    rows: tuple[Replayed, ...]
    skipped: tuple[NotReplayed, ...] = ()
    place: str = ""

    def regret(self, share: float, weighted: bool = False) -> float:
        values = [row.regret for row in self.rows]
        return quantile(values, share, self._weights(weighted)) if values else 0.0

    @property
    def lost(self) -> float:
        """Returns how much more time all these calls take than at best, as a share."""
        chosen = sum(row.call.count * row.us(row.chosen) for row in self.rows)
        best = sum(row.call.count * row.us(row.chosen) / (1.0 + row.regret) for row in self.rows)
        return chosen / best - 1.0 if best else 0.0

    @property
    def flips(self) -> tuple[Replayed, ...]:
        return tuple(row for row in self.rows if row.flip is not None)

    @property
    def flips_that_matter(self) -> tuple[Replayed, ...]:
        """The flips between kernels that are not equally fast over all the rounds."""
        return tuple(row for row in self.flips if row.flip
                     and abs(ratio(row.rounds, *row.flip) - 1.0) > WORSE)

    def worse(self, weighted: bool = False) -> float:
        """Share of the calls that torch's own choice serves faster, by more than 3 %."""
        compared = [row for row in self.rows if row.gain is not None]
        weights = [row.call.count if weighted else 1 for row in compared]
        slower = [w for row, w in zip(compared, weights) if row.gain
                  and 1.0 / row.gain > 1.0 + WORSE]
        return sum(slower) / sum(weights) if weights else 0.0

    def gain(self, weighted: bool = False) -> float:
        """Geometric mean over the calls of how many times faster than torch's own choice."""
        values = [(math.log(row.gain), row.call.count if weighted else 1) for row in self.rows
                  if row.gain]
        return (math.exp(sum(g * w for g, w in values) / sum(w for _, w in values)) if values
                else 1.0)

    def _weights(self, weighted: bool) -> list[float]:
        return [float(row.call.count) if weighted else 1.0 for row in self.rows]

    def problems(self, max_median: float = MAX_MEDIAN, max_p95: float = MAX_P95) -> tuple[str, ...]:
        """Return what exceeds the limits; empty if nothing does."""
        values = [f"{name} regret is {value:.1%}, wanted at most {limit:.1%}"
                  for name, value, limit in (
            ("median", self.regret(0.5), max_median), ("p95", self.regret(0.95), max_p95))
                  if value > limit]
        if not self.rows:
            values.append(f"none of the {len(self.skipped)} calls could be replayed")
        return tuple(values)

    def summary(self) -> dict[str, Any]:
        return {
            "calls": len(self.rows), "skipped": len(self.skipped), "place": self.place,
            "lost": self.lost,
            **{f"{name}{suffix}": value for suffix, weighted in (("", False), ("_weighted", True))
               for name, value in (
                ("median_regret", self.regret(0.5, weighted)),
                ("p95_regret", self.regret(0.95, weighted)),
                ("worse_than_torch", self.worse(weighted)),
                ("gain_over_torch", self.gain(weighted)))},
            "flips": len(self.flips), "flips_that_matter": len(self.flips_that_matter)}

    def to_json(self) -> dict[str, Any]:
        return {**self.summary(), "rows": encode(self.rows), "skipped_calls": encode(self.skipped)}


# replaying

def replay(calls: Iterable[Call], *, seconds: float = 0.5, device: str = "cpu", seed: int = 0,
           watch: Watch | None = None, mode: str = EAGER,
           advance: Callable[[Call], None] = lambda call: None) -> RegretReport:
    """Time each call for about `seconds`: the kernel that is chosen now, and all others that may
    serve.

    `mode`: as eager, captured or compiled calls are made and chosen."""
    rows: list[Replayed] = []
    skipped: list[NotReplayed] = []
    modes_of(mode, device)                     # raises if it is wrong
    watch = watch or stopwatch(device, mode)
    expected: tuple[type[BaseException], ...] = (LayerZeroError, *faults.FAULTS)
    for call in calls:
        advance(call)
        try:
            result = replay_one(call, seconds, device, seed, watch, mode)
        except expected as e:
            skipped.append(NotReplayed(call,
                                       f"{type(e).__name__}: "
                                       f"{str(e).splitlines()[0] if str(e) else ''}"))
            continue
        if isinstance(result, NotReplayed):
            skipped.append(result)
        else:
            rows.append(result)
    return RegretReport(tuple(rows), tuple(skipped), worlds.current().place(device))


def replay_one(call: Call, seconds: float, device: str, seed: int, watch: Watch,
               mode: str = EAGER) -> Replayed | NotReplayed:
    op = dispatcher_of(call.op).op
    with torch.set_grad_enabled(call.grad):
        dispatcher, values = resolve(op, make_values(op, call, device, seed))
        world, override = worlds.current(), context.current.get()
        facts = {**dispatcher.facts(values, world), **mode_facts(mode)}
        plan = world.plan(dispatcher.op, facts, override, thorough=True)
        if mode == COMPILED:
            by_id = world.catalog.by_id
            plan = replace(plan, steps=tuple(s for s in plan.steps if by_id[s.kernel].traceable))
        if not plan.steps:
            raise no_kernel_error(world, dispatcher.op, facts, override)
        chosen = plan.kernel or ""
        race = Race(watch, faults.FAULTS)
        contestants, failed = _contestants(dispatcher, plan, facts, values, call.grad, mode)
        for name, contestant in contestants.items():
            race.enter(name, contestant)
        default = next((s.kernel for s in plan.steps if world.catalog.by_id[s.kernel].baseline), "")
        far_slower = _run(race, seconds, {chosen, default})
    failed |= {name: f"{type(e).__name__}: {e}" for name, e in race.failed.items()}
    rounds = {name: race.rounds[name] for name in race.running}
    kind = kind_of(dispatcher.op, facts)
    label = f"{dispatcher.op.name} {kind.family} {kind.sizes_text}"
    if chosen not in rounds:
        return NotReplayed(call,
                           f"{chosen}, which is chosen, failed: "
                           f"{failed.get(chosen, 'it is not in the plan')}")
    return Replayed(call, label, chosen, default if default in rounds else "", rounds, far_slower,
                    failed)


def _run(race: Race, seconds: float, never_dropped: set[str]) -> dict[str, float]:
    """Run rounds for about `seconds`; return the medians of those dropped early."""
    end = time.perf_counter() + seconds
    race.run(FIRST_ROUNDS)
    medians = {name: statistics.median(race.rounds[name]) for name in race.running}
    limit = FAR_SLOWER * min(medians.values(), default=math.inf)
    far = {name: us for name, us in medians.items() if name not in never_dropped and us > limit}
    for name in far:
        race.drop(name)
    for turn in range(FIRST_ROUNDS, MAX_ROUNDS):
        if turn >= MIN_ROUNDS and time.perf_counter() > end:
            break
        race.run()
    return far


def _contestants(dispatcher: Dispatcher, plan: Plan, facts: Mapping[str, Any],
                 values: tuple[Any, ...], grad: bool, mode: str) -> tuple[dict[str, Contestant],
                                                                          dict[str, str]]:
    """Bind every step of the plan as dispatch would; return those that do not load, too."""
    world = worlds.current()
    fixed = fixed_by_key(world.program(dispatcher.op), facts)
    contestants: dict[str, Contestant] = {}
    failed: dict[str, str] = {}
    for step in plan.steps:
        try:
            run: Callable[..., Any] = dispatcher.bind(world.catalog.by_id[step.kernel], step, facts,
                                                      fixed).run
            if mode == COMPILED:
                run = compile_call(dispatcher, step.kernel)
            elif mode == EAGER and not step.transforms and dispatcher.native is not None:
                run = dispatcher.with_backend(step.kernel)
        except loading.LoadFailed as e:
            failed[step.kernel] = e.reason.message
            continue
        contestants[step.kernel] = as_contestant(run, values, grad)
    return contestants, failed
