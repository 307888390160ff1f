"""The timing harness: clocks are scripted, so that what the numbers say can be checked exactly."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch

from layerzero.tuning import harness
from layerzero.tuning.harness import (
    LONG_NS,
    MARGIN,
    SAMPLE_SECONDS,
    SURE,
    Race,
    Timings,
    TimingSummary,
    WallWatch,
    quantile,
)
from layerzero.tuning.rates import matmul_dtypes, measure_rates


class Clock:
    """Nanoseconds that pass only when someone works or waits."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0

    def work(self, ns: int, taken_away: int = 0) -> None:
        self.wall += ns + taken_away
        self.cpu += ns

    def watch(self, **more) -> WallWatch:
        return WallWatch(now=lambda: self.wall, cpu_time=lambda: self.cpu, **more)


class Scripted:
    """A watch that runs the way once and gives the next number of its script; the last one for
    ever."""

    def __init__(self, **scripts) -> None:
        self.scripts, self.ran, self.max_calls = {k: list(v) for k, v in scripts.items()}, [], 1000
        self.seconds = 5e-4

    def way(self, name):
        def run():
            self.ran.append(name)

        return run

    def sample(self, way, calls):
        way()
        script = self.scripts[self.ran[-1]]
        return script.pop(0) if len(script) > 1 else script[0]


# clocks

def test_a_sample_is_microseconds_per_call():
    clock = Clock()
    assert clock.watch().sample(lambda: clock.work(3000), 50) == pytest.approx(3.0)


def test_a_sample_during_which_the_cpu_was_taken_away_is_taken_again():
    # the first belongs to the call that warms up
    clock, thefts = Clock(), [0, 90_000, 70_000, 0, 0]
    took = clock.watch().sample(lambda: clock.work(1000, thefts.pop(0)), 2)
    assert took == pytest.approx(1.0) and not thefts


def test_if_the_cpu_is_always_taken_away_the_best_attempt_counts():
    clock, thefts = Clock(), [500_000, 200_000, 300_000]
    assert clock.watch().sample(lambda: clock.work(1000, thefts.pop(0)), 1) == pytest.approx(201.0)
    assert not thefts


def test_a_long_sample_is_not_taken_again_whatever_was_taken_away():
    clock, calls = Clock(), []
    us = clock.watch().sample(
        lambda: (calls.append(1), clock.work(LONG_NS, taken_away=LONG_NS)), 1)
    assert (len(calls), us) == (1, LONG_NS * 2 / 1e3)


def test_a_flush_comes_before_each_sample_and_only_one_call_is_cold():
    clock, done = Clock(), []

    def flush():
        clock.work(10_000_000)                 # not in the sample
        done.append("flush")

    def call():
        clock.work(5000)
        done.append("call")

    watch = clock.watch(flush=flush)
    assert watch.max_calls == 1
    assert watch.sample(call, 1) == pytest.approx(5.0)
    assert done == ["flush", "call"]


def test_a_device_is_waited_for_before_and_after():
    clock, order = Clock(), []
    watch = WallWatch(wait=lambda: (order.append("wait"), clock.work(7000))[0],
                      now=lambda: clock.wall)
    assert watch.sample(lambda: order.append("call"), 1) == pytest.approx(7.0)
    assert order == ["wait", "call", "wait"]


def test_the_cpu_is_timed_warm_unless_cold_is_asked_for():
    assert harness.stopwatch("cpu").max_calls > 1
    assert harness.cache_bytes("cpu") >= 1 << 18


# what the samples say

def test_quantiles_lie_between_the_nearest_two():
    assert [quantile([1.0, 2.0, 4.0], q) for q in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1.0, 1.5, 2.0,
                                                                                   3.0, 4.0]
    assert quantile([5.0], 0.99) == 5.0


def test_a_summary_of_quiet_samples():
    s = TimingSummary.of([10.0 + 0.1 * i for i in range(11)])
    assert (s.median, s.samples, s.outliers) == (pytest.approx(10.5), 11, 0)
    assert (s.p10, s.p90, s.p95) == (pytest.approx(10.1), pytest.approx(10.9), pytest.approx(10.95))
    assert s.mean == pytest.approx(10.5) and s.variance == pytest.approx(0.11)
    assert s.spread == pytest.approx(0.8 / 10.5)


def test_an_outlier_is_counted_and_shows_in_the_tail_alone():
    quiet = [10.0, 10.1, 10.2, 10.0, 10.1, 10.2, 10.0, 10.1, 10.2]
    s, clean = TimingSummary.of([*quiet, 900.0]), TimingSummary.of(quiet)
    assert s.outliers == 1 and s.p99 > 800.0
    assert (s.mean, s.p90, s.variance) == (clean.mean, clean.p90, clean.variance)
    assert s.spread == pytest.approx(clean.spread, rel=0.05)


def test_one_sample_is_a_summary():
    s = TimingSummary.of([7.0])
    assert (s.median, s.p10, s.p99, s.variance, s.spread, s.samples) == (7.0, 7.0, 7.0, 0.0, 0.0, 1)


def test_a_steady_advantage_is_sure_under_noise_that_both_share():
    chance = random.Random(1)
    noise = [chance.uniform(50.0, 200.0) for _ in range(20)]
    timings = Timings({"a": noise, "b": [1.1 * n for n in noise]})
    assert (timings.beats("a", "b") == 1.0 and timings.beats("b", "a") == 0.0
            and timings.even("a", "b") == 0.0)
    assert timings.gain("b", "a").median == pytest.approx(1.1)


def test_noise_alone_is_no_advantage():
    chance = random.Random(2)
    a, b = ([100.0 * math.exp(chance.gauss(0.0, 0.3)) for _ in range(20)] for _ in range(2))
    timings = Timings({"a": a, "b": b})
    assert max(timings.beats("a", "b"), timings.beats("b", "a")) < SURE


def test_nearer_than_the_margin_is_even_however_sure():
    quiet = [100.0 + 0.01 * i for i in range(20)]
    timings = Timings({"a": quiet, "b": [n * (1 + MARGIN / 2) for n in quiet]})
    assert timings.even("a", "b") == 1.0 and timings.beats("a", "b") == 0.0
    assert timings.beats("a", "b", margin=0.0) == 1.0


def test_the_same_samples_give_the_same_confidence():
    chance = random.Random(3)
    timings = Timings({n: [chance.uniform(90, 110) for _ in range(12)] for n in "ab"})
    assert len({timings.beats("a", "b") for _ in range(3)}) == 1


# rounds

def test_a_sample_has_as_many_calls_as_fill_its_time():
    clock, calls = Clock(), []
    watch = clock.watch()
    race = Race(watch)
    race.enter("quick", lambda: (clock.work(10_000), calls.append(1)))         # 10 us
    before = len(calls)
    race.run()
    assert len(calls) - before == 1 + int(SAMPLE_SECONDS * 1e9 / 10_000)       # one to warm up
    race.enter("slow", lambda: clock.work(10_000_000))
    race.run(3)
    assert race.timings.rounds["slow"] == [10_000.0] * 3


def test_every_round_gives_each_its_turn_in_changing_order():
    watch = Scripted(a=[1.0], b=[1.0], c=[1.0])
    race = Race(watch)
    for name in "abc":
        race.enter(name, watch.way(name))
    watch.ran.clear()
    race.run(20)
    turns = [tuple(watch.ran[i:i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 3
    assert {len(samples) for samples in race.timings.rounds.values()} == {20}


def test_who_is_dropped_keeps_what_was_measured():
    watch = Scripted(a=[1.0], b=[9.0])
    race = Race(watch)
    for name in "ab":
        race.enter(name, watch.way(name))
    race.run(3)
    race.drop("b")
    race.run(4)
    assert (race.running, {n: len(r) for n, r in race.timings.rounds.items()}) == (("a",),
                                                                                   {"a": 7, "b": 3})
    assert race.timings.beats("a", "b") == 1.0


def test_when_the_time_is_up_after_a_first_call_nobody_is_judged_by_it():
    watch = Scripted(a=[1.0])
    race = Race(watch, deadline=time.perf_counter())
    assert race.enter("a", watch.way("a")) is None
    assert (watch.ran, race.running, race.timings.rounds, race.failed) == (["a"], (), {}, {})


def test_when_the_time_is_up_a_way_without_a_turn_keeps_its_time_on_entry():
    watch = Scripted(a=[9.0, 2.0, 7.0], b=[9.0, 3.0, 4.0])
    race = Race(watch)
    for name in "ab":
        race.enter(name, watch.way(name))
    race.run(only="b")
    watch.ran.clear()
    race.deadline = time.perf_counter()
    race.run(5)
    assert (race.timings.rounds, watch.ran) == ({"a": [2.0], "b": [4.0]}, [])


@pytest.mark.parametrize("good_calls", [0, 1, 4])
def test_who_throws_is_out_and_the_others_go_on(good_calls):
    watch, left = Scripted(a=[1.0]), [good_calls]
    boom = RuntimeError("boom")

    def faulty():
        watch.ran.append("a")
        left[0] -= 1
        if left[0] < 0:
            raise boom

    race = Race(watch, (RuntimeError,))
    race.enter("a", watch.way("a"))
    race.enter("b", faulty)
    race.run(10)
    assert race.failed == {"b": boom}
    assert list(race.timings.rounds) == ["a"] and len(race.timings.rounds["a"]) == 10


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()])
def test_what_is_not_to_be_caught_passes(error):
    def faulty():
        raise error

    with pytest.raises(type(error)):
        Race(Clock().watch(), (RuntimeError,)).enter("a", faulty)


def test_nothing_is_collected_while_the_clock_runs():
    import gc
    seen = []
    race = Race(Clock().watch())
    race.enter("a", lambda: seen.append(gc.isenabled()))
    seen.clear()
    race.run(1)
    assert set(seen) == {False} and gc.isenabled()


# the roof

def test_the_rates_of_this_cpu():
    rates = measure_rates("cpu", seconds=0.1).rates
    assert 0 < rates.flops_per_us < math.inf and 0 < rates.bytes_per_us < math.inf
    assert torch.float32 in matmul_dtypes("cpu")
