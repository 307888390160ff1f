"""What a choice costs: the chosen kernel against every one that could have served, timed in turns.

The regret of a call is chosen / best - 1. The fastest of several noisy times is partly the luckiest, so the best is
picked by one half of the rounds and judged by the other, for many ways to halve them, and always by the ratio within
each round; the median of these judgements is the regret.
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
from ..operate import calls as written
from ..operate.inspection import dispatcher_of
from ..perf.record import COMPILED, EAGER, kind_of
from ..select.key import fixed_by_key
from ..spec.call import Call
from ..spec.codec import Record, encode
from ..spec.errors import LayerZeroError
from ..spec.plan import Plan
from ..world import context
from ..world import snapshot as worlds
from ..world.incidents import no_kernel_error
from .contest import by_name, compiled, facts_of
from .harness import Race, Watch, stopwatch
from .tuner import modes_of, resolved

LOOK_ROUNDS = 3
SPLITS = 25            # ways to halve the rounds
FAR_SLOWER = 5.0       # after a first look: a kernel so far behind the fastest takes no further part
MIN_ROUNDS, MAX_ROUNDS = 20, 400
WORSE = 0.03           # so much slower than torch's own choice counts as worse
MAX_MEDIAN, MAX_P95 = 0.02, 0.08
Rounds = Mapping[str, Sequence[float]]         # kernel -> microseconds, one number per round


# statistics

def ratio(rounds: Rounds, over: str, of: str, part: Sequence[int] | None = None) -> float:
    """How many times as long `over` takes as `of`: the median of the ratios within each round of the part."""
    part = range(len(rounds[of])) if part is None else part
    return statistics.median([rounds[over][i] / rounds[of][i] for i in part])


def winner(rounds: Rounds, chosen: str, part: Sequence[int] | None = None) -> str:
    """The fastest by the ratio to `chosen`; of equals, the chosen one."""
    return min(rounds, key=lambda name: (ratio(rounds, name, chosen, part), name != chosen))


def halves(rounds: Rounds) -> tuple[range, range]:
    """The earlier rounds and the later ones."""
    total = min(map(len, rounds.values()))
    return range(total // 2), range(total // 2, total)


def regret(rounds: Rounds, chosen: str) -> float:
    """chosen / best - 1. What is below zero by chance is zero."""
    order, chance = [*halves(rounds)[0], *halves(rounds)[1]], random.Random(0)
    middle = len(order) // 2
    found = []
    for _ in range(SPLITS):
        chance.shuffle(order)
        for pick, judge in ((order[:middle], order[middle:]), (order[middle:], order[:middle])):
            found.append(ratio(rounds, chosen, winner(rounds, chosen, pick), judge) - 1.0)
    return max(statistics.median(found), 0.0)


def quantile(values: Sequence[float], share: float, weights: Sequence[float] | None = None) -> float:
    """The smallest value that at least `share` of the weight is not above."""
    pairs = sorted(zip(values, weights or [1.0] * len(values)))
    wanted, so_far = share * sum(w for _, w in pairs), 0.0
    for value, weight in pairs:
        so_far += weight
        if so_far >= wanted - 1e-9:
            return value
    return pairs[-1][0]


# results

@dataclass(frozen=True)
class Replayed:
    """One call: who was chosen, what torch would run, and the rounds of all that could have served."""

    call: Call
    label: str
    chosen: str
    default: str                               # torch's own kernel; "" where there is none
    rounds: Rounds
    far_slower: Mapping[str, float] = field(default_factory=dict)      # microseconds of a first look
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        return winner(self.rounds, self.chosen)

    @cached_property
    def regret(self) -> float:
        return regret(self.rounds, self.chosen)

    @property
    def flip(self) -> tuple[str, str] | None:
        """The winners of the two halves of the rounds, where they differ."""
        found = tuple(winner(self.rounds, self.chosen, half) for half in halves(self.rounds))
        return None if found[0] == found[1] else (found[0], found[1])

    @property
    def gain(self) -> float | None:
        """How many times faster than torch's own choice."""
        return ratio(self.rounds, self.default, self.chosen) if self.default in self.rounds else None

    def us(self, kernel: str) -> float:
        return statistics.median(self.rounds[kernel])

    def to_json(self) -> dict[str, Any]:
        return {
            "call": self.call.to_json(), "label": self.label, "count": self.call.count, "chosen": self.chosen,
            "best": self.best, "default": self.default, "regret": self.regret, "gain": self.gain,
            "flip": encode(self.flip), "rounds": len(next(iter(self.rounds.values()))),
            "microseconds": {name: self.us(name) for name in self.rounds}, "far_slower": dict(self.far_slower),
            "failed": dict(self.failed)}


@dataclass(frozen=True)
class Skipped(Record):
    call: Call
    why: str


@dataclass(frozen=True)
class Report:
    """What the choices of a whole workload cost. `weighted`: each call as often as it came."""

    rows: tuple[Replayed, ...]
    skipped: tuple[Skipped, ...] = ()
    place: str = ""

    def regret(self, share: float, weighted: bool = False) -> float:
        found = [row.regret for row in self.rows]
        return quantile(found, share, self._weights(weighted)) if found else 0.0

    @property
    def lost(self) -> float:
        """Of all the time in these calls, how much more than the best choices would take."""
        taken = sum(row.call.count * row.us(row.chosen) for row in self.rows)
        best = sum(row.call.count * row.us(row.chosen) / (1.0 + row.regret) for row in self.rows)
        return taken / best - 1.0 if best else 0.0

    @property
    def flips(self) -> tuple[Replayed, ...]:
        return tuple(row for row in self.rows if row.flip is not None)

    @property
    def flips_that_matter(self) -> tuple[Replayed, ...]:
        """Those between kernels that are not equally fast over all the rounds."""
        return tuple(row for row in self.flips if row.flip and abs(ratio(row.rounds, *row.flip) - 1.0) > WORSE)

    def worse(self, weighted: bool = False) -> float:
        """Share of the calls that torch's own choice serves faster, by more than 3 %."""
        compared = [row for row in self.rows if row.gain is not None]
        weights = [row.call.count if weighted else 1 for row in compared]
        slower = [w for row, w in zip(compared, weights) if row.gain and 1.0 / row.gain > 1.0 + WORSE]
        return sum(slower) / sum(weights) if weights else 0.0

    def gain(self, weighted: bool = False) -> float:
        """Geometric mean over the calls of how many times faster than torch's own choice."""
        found = [(math.log(row.gain), row.call.count if weighted else 1) for row in self.rows if row.gain]
        return math.exp(sum(g * w for g, w in found) / sum(w for _, w in found)) if found else 1.0

    def _weights(self, weighted: bool) -> list[float]:
        return [float(row.call.count) if weighted else 1.0 for row in self.rows]

    def problems(self, max_median: float = MAX_MEDIAN, max_p95: float = MAX_P95) -> tuple[str, ...]:
        """What is not as it should be; empty if all is well."""
        found = [f"{name} regret is {value:.1%}, wanted at most {limit:.1%}" for name, value, limit in (
            ("median", self.regret(0.5), max_median), ("p95", self.regret(0.95), max_p95)) if value > limit]
        if not self.rows:
            found.append(f"none of the {len(self.skipped)} calls could be replayed")
        return tuple(found)

    def summary(self) -> dict[str, Any]:
        return {
            "calls": len(self.rows), "skipped": len(self.skipped), "place": self.place, "lost": self.lost,
            **{f"{name}{suffix}": value for suffix, weighted in (("", False), ("_weighted", True)) for name, value in (
                ("median_regret", self.regret(0.5, weighted)), ("p95_regret", self.regret(0.95, weighted)),
                ("worse_than_torch", self.worse(weighted)), ("gain_over_torch", self.gain(weighted)))},
            "flips": len(self.flips), "flips_that_matter": len(self.flips_that_matter)}

    def to_json(self) -> dict[str, Any]:
        return {**self.summary(), "rows": encode(self.rows), "skipped_calls": encode(self.skipped)}


# replaying

def replay(calls: Iterable[Call], *, seconds: float = 0.5, device: str = "cpu", seed: int = 0,
           watch: Watch | None = None, mode: str = EAGER,
           advance: Callable[[Call], None] = lambda call: None) -> Report:
    """Time each call for about `seconds`: the kernel that is chosen now, and all others that may serve.

    `mode`: as eager, captured or compiled calls are made and chosen."""
    rows: list[Replayed] = []
    skipped: list[Skipped] = []
    modes_of(mode, device)                     # says what is wrong with it
    watch = watch or stopwatch(device, mode)
    expected: tuple[type[BaseException], ...] = (LayerZeroError, *faults.FAULTS)
    for call in calls:
        advance(call)
        try:
            found = replay_one(call, seconds, device, seed, watch, mode)
        except expected as e:
            skipped.append(Skipped(call, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"))
            continue
        if isinstance(found, Skipped):
            skipped.append(found)
        else:
            rows.append(found)
    return Report(tuple(rows), tuple(skipped), worlds.current().place(device))


def replay_one(call: Call, seconds: float, device: str, seed: int, watch: Watch,
               mode: str = EAGER) -> Replayed | Skipped:
    op = dispatcher_of(call.op).op
    with torch.set_grad_enabled(call.grad):
        found, values = resolved(op, written.values(op, call, device, seed))
        world, override = worlds.current(), context.current.get()
        facts = {**found.facts(values, world), **facts_of(mode)}
        plan = world.plan(found.op, facts, override, thorough=True)
        if mode == COMPILED:
            known = world.catalog.by_id
            plan = replace(plan, steps=tuple(s for s in plan.steps if known[s.kernel].traceable))
        if not plan.steps:
            raise no_kernel_error(world, found.op, facts, override)
        chosen = plan.kernel or ""
        race = Race(watch, faults.FAULTS)
        ways, failed = _ways(found, plan, facts, values, call.grad, mode)
        for name, way in ways.items():
            race.enter(name, way)
        default = next((s.kernel for s in plan.steps if world.catalog.by_id[s.kernel].baseline), "")
        far_slower = _run(race, seconds, {chosen, default})
    failed |= {name: f"{type(e).__name__}: {e}" for name, e in race.failed.items()}
    rounds = {name: race.rounds[name] for name in race.running}
    kind = kind_of(found.op, facts)
    label = f"{found.op.name} {kind.family} {kind.sizes_text}"
    if chosen not in rounds:
        return Skipped(call, f"{chosen}, which is chosen, failed: {failed.get(chosen, 'it is not in the plan')}")
    return Replayed(call, label, chosen, default if default in rounds else "", rounds, far_slower, failed)


def _run(race: Race, seconds: float, kept: set[str]) -> dict[str, float]:
    """Rounds for about `seconds`. Those far behind after the first few are dropped: their medians."""
    end = time.perf_counter() + seconds
    race.run(LOOK_ROUNDS)
    medians = {name: statistics.median(race.rounds[name]) for name in race.running}
    far = {name: us for name, us in medians.items() if name not in kept and us > FAR_SLOWER * min(medians.values())}
    for name in far:
        race.drop(name)
    for turn in range(LOOK_ROUNDS, MAX_ROUNDS):
        if turn >= MIN_ROUNDS and time.perf_counter() > end:
            break
        race.run()
    return far


def _ways(found: Dispatcher, plan: Plan, facts: Mapping[str, Any], values: tuple[Any, ...],
          grad: bool, mode: str) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Every step of the plan as dispatch would bind it; and those whose library does not load."""
    world = worlds.current()
    fixed = fixed_by_key(world.program(found.op), facts)
    ways: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    for step in plan.steps:
        try:
            run: Callable[..., Any] = found.binding(world.catalog.by_id[step.kernel], step, facts, fixed).run
            if mode == COMPILED:
                run = compiled(found, step.kernel)
            elif mode == EAGER and not step.transforms and found.native is not None:
                run = by_name(found, step.kernel)
        except loading.LoadFailed as e:
            failed[step.kernel] = e.reason.message
            continue
        ways[step.kernel] = _with_gradients(run, values) if grad else _forward(run, values)
    return ways, failed


def _forward(run: Callable[..., Any], values: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: run(*values)


def _with_gradients(run: Callable[..., Any], values: tuple[Any, ...]) -> Callable[[], Any]:
    """Forward and backward: a training step pays for both."""
    inputs = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]

    def way() -> Any:
        out = run(*values)
        outs = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if t.requires_grad]
        return torch.autograd.grad(outs, inputs, [torch.ones_like(t) for t in outs], allow_unused=True)

    return way
