"""Regret: the statistics on numbers that are given, the replay with kernels whose cost is known,
the command.
"""

from __future__ import annotations

import json
import random

import pytest
import torch
from helpers import Fake, allow_only, register, run_lz

import layerzero as lz
from layerzero.files.calls import write_calls
from layerzero.spec.call import Call, TensorSpec
from layerzero.tuning import regret as regrets
from layerzero.tuning.regret import (
    NotReplayed,
    RegretReport,
    Replayed,
    fastest,
    quantile,
    ratio,
    regret,
)

NORM = Call("rms_norm", {"x": TensorSpec((4, 64), "float32")}, count=3, name="here")


def noisy_times(us: float, seed: int, rounds: int = 40, noise: float = 0.2) -> list[float]:
    chance = random.Random(seed)
    return [us * (1 + chance.uniform(-noise, noise)) for _ in range(rounds)]


def row(chosen="a", default="a", count=1, **rounds) -> Replayed:
    whole = {name: us if isinstance(us, list) else [float(us)] * 20 for name, us in rounds.items()}
    return Replayed(NORM.times(count), "label", chosen, default, whole)


# statistics

def test_the_regret_is_what_the_best_would_have_saved():
    rounds = {"a": [20.0] * 20, "b": [10.0] * 20, "c": [40.0] * 20}
    assert regret(rounds, "a") == pytest.approx(1.0)
    assert regret(rounds, "b") == 0.0
    assert regret(rounds, "c") == pytest.approx(3.0)
    assert fastest(rounds, "a") == "b"


def test_a_slow_machine_falls_on_all_and_does_not_count():
    weather = [1.0, 1.0, 5.0, 1.0, 9.0, 1.0, 2.0, 1.0, 7.0, 1.0] * 4
    rounds = {"a": [11.0 * w for w in weather], "b": [10.0 * w for w in weather]}
    assert (regret(rounds, "a") == pytest.approx(0.1)
            and ratio(rounds, "a", "b") == pytest.approx(1.1))


def test_being_the_luckiest_of_many_equals_is_no_merit():
    """The fastest median of twenty equal kernels looks several percent faster than the chosen one;
    it is not."""
    honest, naive = [], []
    for trial in range(30):
        rounds = {f"k{i}": noisy_times(10.0, 100 * trial + i) for i in range(20)}
        honest.append(regret(rounds, "k0"))
        naive.append(ratio(rounds, "k0", fastest(rounds, "k0")) - 1.0)
    assert sorted(naive)[15] > 0.05
    assert sorted(honest)[15] < 0.5 * sorted(naive)[15]


def test_a_true_difference_survives_the_noise():
    regrets = [regret({"a": noisy_times(15.0, 2 * t), "b": noisy_times(10.0, 2 * t + 1)},
                      "a") for t in range(20)]
    assert 0.4 < sorted(regrets)[10] < 0.6


def test_of_equals_the_chosen_one_wins():
    assert fastest({"b": [1.0] * 4, "a": [1.0] * 4}, "a") == "a"
    assert fastest({"a": [1.0] * 4, "b": [1.0] * 4}, "b") == "b"


@pytest.mark.parametrize(("share", "weights", "expected"), [
    (0.5, None, 2.0), (0.95, None, 4.0), (0.25, None, 1.0), (0.5, [1, 1, 1, 97], 4.0),
    (0.5, [97, 1, 1, 1], 1.0), (1.0, None, 4.0),
])
def test_quantiles(share, weights, expected):
    assert quantile([3.0, 1.0, 4.0, 2.0], share, weights
                    and [weights[2], weights[0], weights[3], weights[1]]) == expected


def test_a_report_sums_up():
    report = RegretReport((
        row(count=90, a=10, b=20), row(count=9, a=12, b=10, default="b"),
        row(count=1, a=30, b=10, t=60, default="t")))
    assert report.regret(0.5) == pytest.approx(0.2) and report.regret(0.5, weighted=True) == 0.0
    assert report.regret(0.95) == pytest.approx(2.0)
    assert (report.worse() == pytest.approx(1 / 3)
            and report.worse(weighted=True) == pytest.approx(0.09))
    assert report.gain() == pytest.approx((1.0 * (10 / 12) * 2.0) ** (1 / 3))
    assert report.lost == pytest.approx((900 + 108 + 30) / (900 + 90 + 10) - 1)
    assert not report.problems(0.25, 2.5)
    assert (len(report.problems(0.1, 1.0)) == 2
            and "20.0%, wanted at most 10.0%" in report.problems(0.1, 1.0)[0])
    assert json.loads(json.dumps(report.to_json()))["median_regret"] == pytest.approx(0.2)


def test_worse_than_torch_is_more_than_three_percent():
    assert RegretReport((row(a=10.2, b=10, default="b"),)).worse() == 0.0
    assert RegretReport((row(a=10.5, b=10, default="b"),)).worse() == 1.0
    assert RegretReport((row(a=10, default=""),)).worse() == 0.0  # nothing to compare with
    assert RegretReport((row(a=10, default=""),)).gain() == 1.0


def test_a_flip_is_another_winner_in_the_second_half():
    turned = row(a=[10.0] * 20, b=[9.0] * 10 + [11.0] * 10)
    near = row(a=[10.0] * 20, b=[9.99] * 10 + [10.01] * 10)
    assert turned.flip == ("b", "a") and near.flip == ("b", "a")
    report = RegretReport((turned, near, row(a=1, b=2)))
    assert report.flips == (turned, near)
    uneven = row(a=[10.0] * 20, b=[5.0] * 9 + [11.0] * 11)
    assert RegretReport((uneven, near)).flips_that_matter == (uneven,)


def test_an_empty_replay_is_a_problem():
    report = RegretReport((), (NotReplayed(NORM, "why"),))
    assert ("none of the 1 calls" in report.problems()[0]
            and report.summary()["gain_over_torch"] == 1.0)


# replaying

class Costs:
    """A watch that knows what each kernel costs: whoever ran is asked, the clock is not."""

    max_calls, seconds = 1, 5e-4

    def __init__(self, fakes: dict[Fake, float], others: float = 50.0) -> None:
        self.fakes, self.others = fakes, others

    def sample(self, way, calls):
        before = {fake: fake.calls for fake in self.fakes}
        for _ in range(calls):
            way()
        return next((us for fake, us in self.fakes.items() if fake.calls > before[fake]),
                    self.others)


def replay(call, watch, **more):
    return regrets.replay([call], seconds=0.0, watch=watch, **more)


def test_a_bad_choice_is_found(world):
    dear, cheap = Fake("fake.dear", prior=1e7), Fake("fake.cheap", prior=1e6)
    register(dear, cheap)
    report = replay(NORM, Costs({dear: 30.0, cheap: 10.0}))
    (row,) = report.rows
    assert (row.chosen, row.best, row.default) == ("fake.dear", "fake.cheap",
                                                   "torch.rms_norm")
    assert row.regret == pytest.approx(2.0) and row.gain == pytest.approx(50 / 30)
    assert report.problems() and row.call is NORM


def test_a_good_choice_has_no_regret(world):
    good = Fake("fake.good")
    register(good)
    report = replay(NORM, Costs({good: 10.0}))
    assert (report.rows[0].regret == 0.0 and report.rows[0].gain == pytest.approx(5.0)
            and not report.problems())


def test_those_far_behind_take_no_further_part_but_the_default_does(world):
    good, lame = Fake("fake.good"), Fake("fake.lame", prior=1e5)
    register(good, lame)
    (row,) = replay(NORM, Costs({good: 1.0, lame: 100.0})).rows
    assert row.far_slower["fake.lame"] == 100.0 and "fake.lame" not in row.rounds
    assert row.gain == pytest.approx(50.0)
    assert lame.calls < good.calls


def test_a_kernel_that_fails_is_left_out_and_named(world):
    good, broken = Fake("fake.good"), Fake("fake.broken", prior=1e5,
                                           fault=RuntimeError("out of order"))
    register(good, broken)
    (row,) = replay(NORM, Costs({good: 10.0, broken: 1.0})).rows
    assert row.best == "fake.good" and "out of order" in row.failed["fake.broken"]


def test_a_chosen_kernel_that_fails_is_not_hidden(world):
    broken = Fake("fake.broken", fault=RuntimeError("out of order"))
    register(broken)
    report = replay(NORM, Costs({broken: 1.0}))
    assert report.rows == () and "fake.broken, which is chosen, failed" in report.skipped[0].why


def test_what_cannot_be_replayed_is_skipped_with_its_reason(world):
    wrong = Call("rms_norm",
                 {"x": TensorSpec((4, 64), "float32"), "weight": TensorSpec((3,), "float32")})
    report = regrets.replay([wrong, NORM], seconds=0.0, watch=Costs({}))
    assert (len(report.rows) == 1 and report.skipped[0].call is wrong
            and "weight" in report.skipped[0].why)
    allow_only("fake.nobody")
    assert "NoKernelFoundError" in replay(NORM, Costs({})).skipped[0].why


def test_the_policy_in_force_decides_who_is_chosen(world):
    one, two = Fake("fake.one", prior=1e7), Fake("fake.two", prior=1e6)
    register(one, two)
    lz.configure(rules=(lz.PolicyRule.of("boost", "fake.two", "rms_norm", factor=100.0),))
    assert replay(NORM, Costs({one: 10.0, two: 10.0})).rows[0].chosen == "fake.two"


def test_gradients_are_timed_both_ways(world):
    seen = []
    fake = Fake("fake.grad", before=lambda: seen.append(torch.is_grad_enabled()))
    register(fake)
    call = Call("rms_norm", NORM.arguments, grad=True)
    (row,) = replay(call, Costs({fake: 10.0})).rows
    assert row.chosen == "fake.grad" and all(seen) and seen
    seen.clear()
    replay(NORM, Costs({fake: 10.0}))
    assert seen and not any(seen)


def test_an_unusual_call_is_replayed_as_what_is_served(world):
    flat = TensorSpec((2, 8, 16), "float32")
    (row,) = replay(Call("attention", dict.fromkeys(("query", "key", "value"), flat)),
                    Costs({})).rows
    assert "batch=1 heads=2" in row.label and row.default == "torch.sdpa"


# the command

@pytest.fixture
def run(capsys, world):
    return lambda *words: run_lz(capsys, "regret", *words, "--device", "cpu", "--seconds-per-call", "0")


@pytest.fixture
def file(tmp_path):
    write_calls(tmp_path / "calls.jsonl", [NORM, Call("layer_norm", NORM.arguments)])
    return str(tmp_path / "calls.jsonl")


def test_the_command_replays_a_file(run, file):
    code, out, _ = run("--calls", file, "--json", "--max-median", "1e9", "--max-p95", "1e9")
    data = json.loads(out)
    assert code == 0 and data["ok"] and [r["count"] for r in data["rows"]] == [3, 1]
    assert all(r["chosen"] in r["microseconds"] and r["rounds"] >= 20 for r in data["rows"])
    assert {"median_regret", "p95_regret", "worse_than_torch", "gain_over_torch", "flips",
            "lost"} <= data.keys()


def test_the_command_fails_above_a_threshold(run, file):
    code, out, _ = run("--calls", file, "--max-median", "-1")
    assert code == 1 and "median regret is" in out and "wanted at most -100.0%" in out
    assert "gain over torch's default" in out and "rms_norm" in out


def test_the_command_knows_models_and_operations(run):
    code, out, _ = run("--model", "gpt2", "--scale", "0.1", "--prompt", "8", "--context", "16",
                       "--dtype", "float32", "--json", "--max-median", "1e9", "--max-p95", "1e9")
    assert code == 0 and json.loads(out)["calls"] > 8
    code, out, _ = run("rms_norm", "--dtype", "float32", "--json", "--max-median", "1e9",
                       "--max-p95", "1e9")
    assert code == 0 and json.loads(out)["calls"] > 8


@pytest.mark.parametrize(("words", "message"), [
    (("rms_norm", "--model", "gpt2"), "takes one of"), (("--calls", "nowhere.jsonl"), "lz record"),
    (("--model", "gpt-2"), "did you mean 'gpt2'"),
])
def test_a_wrong_question_is_one_message(run, words, message):
    code, _, err = run(*words)
    assert code == 2 and message in err and "Traceback" not in err
