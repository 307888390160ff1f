"""Who serves next and who has won, with times from a script: no clock, no kernels."""

from __future__ import annotations

import random

import pytest

from layerzero.selection import trial as trials
from layerzero.selection.trial import Budget, Trial, fewest_samples, interval, worth_trying

YES = lambda *_: True                          # noqa: E731


def play(trial: Trial, times: dict[str, float], calls: int = 1000, noise: float = 0.0, allowed=YES,
         available=YES,
         seed: int = 0) -> list[str]:
    """Serve calls until it is settled; who served them."""
    chance, served = random.Random(seed), []
    for _ in range(calls):
        ticket = trial.next(available, allowed)
        if trial.winner:
            break
        kernel = ticket.kernel if ticket is not None else trial.serving
        served.append(kernel)
        if ticket is not None:
            trial.record(ticket, times[kernel] * chance.lognormvariate(0.0, noise))
    return served


def trial_of(*kernels: str, default: str = "torch", **guesses: float) -> Trial:
    trial = Trial("torch", guesses.get("torch", 10.0), default)
    for kernel in kernels:
        trial.enter(kernel, guesses.get(kernel, 10.0))
    return trial


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_wins_within_two_hundred_calls(noise, seed):
    trial = trial_of("a", "b", "c")
    served = play(trial, {"torch": 100.0, "a": 70.0, "b": 150.0, "c": 90.0}, noise=noise, seed=seed)
    assert trial.winner == "a" and trial.clear
    assert len(served) <= 200


def test_a_tie_goes_to_torch():
    trial = trial_of("a", "b")
    play(trial, {"torch": 100.0, "a": 99.0, "b": 100.5})
    assert trial.winner == "torch" and trial.clear


def test_a_tie_in_the_noise_goes_to_torch_when_the_samples_run_out():
    for seed in range(10):
        trial = trial_of("a")
        play(trial, {"torch": 100.0, "a": 100.0}, noise=0.3, seed=seed)
        gain = trial.runners["torch"].median / trial.runners["a"].median
        assert trial.winner == "torch" or gain > 1.0
        assert trial.samples <= trials.MAX_SAMPLES


def test_without_a_default_a_tie_is_settled_all_the_same():
    trial = trial_of("a", default="")
    play(trial, {"torch": 100.0, "a": 100.0})
    assert trial.winner in ("torch", "a")


def test_what_serves_anyway_is_timed_before_anything_is_tried():
    trial = trial_of("a")
    served = play(trial, {"torch": 100.0, "a": 90.0}, calls=1 + trials.FIRST_SAMPLES)
    assert set(served) == {"torch"}


def test_everybody_still_in_gets_one_call_of_each_round():
    trial = trial_of("a", "b")
    before = 1 + trials.FIRST_SAMPLES
    served = play(trial, {"torch": 100.0, "a": 99.0, "b": 101.0}, calls=before + 12)[before:]
    for i in range(0, 12, 3):
        assert sorted(served[i:i + 3]) == ["a", "b", "torch"]


def test_one_many_times_slower_leaves_after_one_costly_sample():
    trial = trial_of("a")
    served = play(trial, {"torch": 1000.0, "a": 5000.0})
    assert served.count("a") == 2              # its first call, which says nothing, and one sample
    assert "5.0 times as slow" in trial.runners["a"].out


def test_one_short_sample_alone_is_not_believed():
    trial = trial_of("a")
    served = play(trial, {"torch": 10.0, "a": 50.0})
    assert served.count("a") == 3


def test_torchs_own_may_be_the_hopeless_one():
    trial = trial_of("a")
    play(trial, {"torch": 100_000.0, "a": 500.0})
    assert trial.winner == "a" and trial.clear


def test_a_first_call_is_no_sample():
    trial, seen = trial_of("a"), set()
    while (ticket := trial.next(YES, YES)) is not None:
        first = ticket.kernel not in seen
        seen.add(ticket.kernel)
        assert ticket.warm_up == first
        trial.record(ticket, 1e6 if first else {"torch": 100.0, "a": 50.0}[ticket.kernel])
    assert trial.winner == "a"
    assert max(trial.results()["a"]) == 50.0


def test_a_kernel_that_may_not_cost_so_much_sits_out_and_the_others_go_on():
    trial = trial_of("a", "b", b=80.0)         # expected to cost seven times as much over torch
    served = play(trial, {"torch": 100.0, "a": 70.0, "b": 10.0}, trials.MAX_CALLS + 1,
                  allowed=lambda us: us < 200.0)
    assert "b" not in served and served[100:] == ["a"] * len(served[100:])
    assert trial.winner == "a" and trial.clear


def test_nothing_is_timed_while_nothing_may_be_tried():
    trial = trial_of("a", a=20.0)
    served = play(trial, {"torch": 100.0, "a": 10.0}, calls=50, allowed=lambda extra: extra == 0.0)
    assert set(served) == {"torch"} and trial.samples == trials.FIRST_SAMPLES and not trial.winner


def test_after_so_many_calls_it_ends_without_a_result():
    trial = trial_of("a", a=20.0)
    play(trial, {"torch": 100.0, "a": 10.0}, calls=trials.MAX_CALLS + 1,
         allowed=lambda extra: extra == 0.0)
    assert trial.winner == "torch" and not trial.clear


def test_one_that_failed_is_out_and_the_rest_go_on():
    trial = trial_of("a", "b")
    trial.drop("a", "it failed")
    assert "a" not in play(trial, {"torch": 100.0, "b": 50.0})
    assert trial.winner == "b"


def test_where_every_other_fails_it_is_settled():
    trial = trial_of("a")
    trial.drop("a", "it failed")
    assert trial.winner == "torch" and not trial.clear
    trial.drop("torch", "too late")
    assert not trial.runners["torch"].out


def test_a_late_kernel_joins():
    trial = trial_of("a")
    play(trial, {"torch": 100.0, "a": 99.5}, calls=6)
    trial.enter("late", 10.0)
    play(trial, {"torch": 100.0, "a": 99.5, "late": 40.0})
    assert trial.winner == "late"


def test_calls_in_flight_are_limited_and_few_before_a_first_time_is_known():
    trial = trial_of("a")
    tickets = [t for _ in range(20) if (t := trial.next(YES, YES)) is not None]
    assert [t.kernel for t in tickets] == ["torch"] * trials.MAX_UNKNOWN
    for ticket in tickets:
        trial.record(ticket, 100.0)
    tickets = [t for _ in range(100) if (t := trial.next(YES, YES)) is not None]
    assert len(tickets) == trials.MAX_IN_FLIGHT == trial.in_flight
    assert sum(t.kernel == "a" for t in tickets) == trials.MAX_UNKNOWN
    trial.record(tickets[0], None)
    assert trial.next(YES, YES) is not None


def test_the_standing_in_words():
    trial = trial_of("a")
    play(trial, {"torch": 1000.0, "a": 5000.0})
    assert trial.standing(
        "torch") == f"being learned: {len(trial.runners['torch'].rounds)} samples, median 1000.0 us"
    assert "out: 5.0 times" in trial.standing("a") and trial.standing("other") == ""


def test_what_is_expected_to_be_many_times_slower_is_not_worth_trying():
    assert worth_trying(99.0, 10.0) and not worth_trying(101.0, 10.0)


def test_a_few_disturbed_samples_do_not_overrule_torch():
    """The first calls of a process are slow for reasons that are nobody's, and torch's are first."""
    trial, chance, served = trial_of("a", "b"), random.Random(3), 0
    while (ticket := trial.next(YES, YES)) is not None:
        served += ticket.kernel == "torch"
        us = {"torch": 100.0, "a": 130.0, "b": 180.0}[ticket.kernel]
        trial.record(ticket, us * chance.lognormvariate(0.0, 0.03) * (6.0 if served < 6 else 1.0))
    assert trial.winner == "torch" and trial.clear


def test_the_leader_serves_before_it_has_won():
    trial = trial_of("a")
    play(trial, {"torch": 100.0, "a": 50.0}, calls=1 + trials.FIRST_SAMPLES + 2 * 5)
    assert not trial.winner and trial.serving == "a"


def test_the_base_is_sampled_at_once_and_the_others_after_one_of_their_calls_is_done():
    trial = Trial("torch", 10.0, "torch", warm_ups=3)
    trial.enter("a", 10.0)
    first = [t for _ in range(20) if (t := trial.next(YES, YES)) is not None]
    assert [t.kernel for t in first] == ["torch"] * (3 + trials.FIRST_SAMPLES)
    for ticket in first:
        trial.record(ticket, 100.0)
    second = [t for _ in range(200) if (t := trial.next(YES, YES)) is not None]
    assert sum(t.kernel == "a" for t in second) == trials.MAX_UNKNOWN
    for ticket in second:
        trial.record(ticket, 100.0)
    third = [t for _ in range(200) if (t := trial.next(YES, YES)) is not None]
    assert len(third) == trials.MAX_IN_FLIGHT and not third[-1].warm_up


@pytest.mark.parametrize("ahead", [0, 100, 400])
def test_in_a_mixed_stream_the_best_serves_after_two_hundred_calls_of_each_kind(ahead):
    """As on a GPU: nine kinds with five kernels each, whose times are known only `ahead` calls
    later, and the first calls of each kernel take long."""
    chance, budget = random.Random(ahead), Budget()
    names = ("torch", "a", "b", "c", "d")
    speeds = [{k: 20.0 * chance.choice((0.5, 0.7, 1.0, 1.3, 2.0, 3.0)) for k in names}
              for _ in range(9)]
    kinds = [Trial("torch", 20.0, "torch", seed, warm_ups=3) for seed in range(9)]
    for trial in kinds:
        for name in names[1:]:
            trial.enter(name, 20.0)
    loaded: set[tuple[int, str]] = set()
    calls, serving, queue = [0] * 9, [""] * 9, []
    for _ in range(9 * 400):
        i = chance.randrange(9)
        trial, speed = kinds[i], speeds[i]
        calls[i] += 1
        while len(queue) > ahead:
            of, ticket, us = queue.pop(0)
            if ticket is not None:
                kinds[of].record(ticket, us)
        ticket = trial.next(YES, budget.allows)
        kernel = ticket.kernel if ticket is not None else trial.serving
        us = speed[kernel] * chance.lognormvariate(0.0, 0.1)
        if (i, kernel) not in loaded:
            loaded.add((i, kernel))
            us += 2000.0
        budget.count(total_us=us, lost_us=max(us - speed["torch"], 0.0))
        queue.append((i, ticket, us))
        if calls[i] == 200:
            serving[i] = trial.serving
    assert all(s[k] <= 1.03 * min(s.values()) for s, k in zip(speeds, serving, strict=True))
    assert all(trial.winner for trial in kinds)
    assert budget.lost_us <= 0.02 * 60e6


# the budget

def test_exploring_costs_a_share_of_the_time_and_an_allowance():
    budget = Budget(share=0.02, allowance_us=100.0)
    assert budget.allows(100.0) and not budget.allows(101.0)
    budget.count(reserved_us=60.0)
    assert budget.allows(40.0) and not budget.allows(41.0)
    budget.count(reserved_us=-60.0, lost_us=100.0)
    assert not budget.allows(1.0)
    budget.count(total_us=1000.0)
    assert budget.allows(20.0) and not budget.allows(21.0)


@pytest.mark.parametrize("slow", [1.5, 2.5, 9.0])
def test_the_budget_holds_over_a_stream_of_many_kinds(slow):
    """Ten kinds, each with a slower candidate: what exploring costs stays within its share, and all
    are settled."""
    budget = Budget(share=0.015, allowance_us=500.0)
    kinds = [trial_of("a", a=10.0 * slow) for _ in range(10)]
    chance = random.Random(0)
    for _ in range(20_000):                    # two seconds of calls: 30 ms to explore
        trial = chance.choice(kinds)
        ticket = trial.next(YES, budget.allows)
        kernel = ticket.kernel if ticket is not None else trial.serving
        us = {"torch": 100.0, "a": 100.0 * slow}[kernel] * chance.lognormvariate(0.0, 0.05)
        budget.count(total_us=us, lost_us=us - 100.0 if kernel == "a" else 0.0)
        if ticket is not None:
            trial.record(ticket, us)
        assert budget.lost_us <= budget.allowance_us + budget.share * budget.total_us + 100.0 * slow
    assert [t.winner for t in kinds] == ["torch"] * 10


# statistics

def test_an_interval_needs_eight_values_and_holds_the_median():
    assert fewest_samples() == 8
    assert interval([1.0] * 7) is None
    assert interval(range(8)) == (0, 7)
    chance, missed = random.Random(1), 0
    for _ in range(500):
        low, high = interval([chance.gauss(0.0, 1.0) for _ in range(20)])
        missed += not low <= 0.0 <= high
    assert missed <= 15                        # one in a hundred is meant
