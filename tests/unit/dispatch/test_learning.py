"""Learning while serving: real dispatch, fake kernels whose times come from a script, and some real
kernels.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from helpers import (
    RMS_NORM,
    Fake,
    allow_only,
    events_of,
    faults_of,
    normalized,
    path_of,
    python,
    register,
    rows,
)

import layerzero as lz
from layerzero.dispatch import native, protection
from layerzero.dispatch.background import exploring, learning
from layerzero.dispatch.dispatcher import dispatchers
from layerzero.selection import trial
from layerzero.spec.event import Fallback, Learned, LearningStarted, WorldPublished
from layerzero.spec.rules import contiguous
from layerzero.world import snapshot as worlds


class Clock:
    """Stands still but for what kernels take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, us: float):
        def pass_time() -> None:
            self.now += us / 1e6
        return pass_time


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(exploring, "_now", clock)
    monkeypatch.setattr(exploring, "_cpu_time", clock)
    return clock


@pytest.fixture
def learn(world, tmp_path):
    learning.reset()
    lz.configure(learn=True, perfdb=str(tmp_path / "perf.sqlite"))
    yield
    learning.reset()


def fakes(clock: Clock, **times: float) -> dict[str, Fake]:
    """The first is what would serve anyway; nobody else may serve."""
    made = {name: Fake(f"fake.{name}", prior=1e6 - i, before=clock.takes(us))
            for i, (name, us) in enumerate(times.items())}
    register(*made.values())
    allow_only(*(fake.id for fake in made.values()))
    return made


def serve(x: torch.Tensor, calls: int = 300, call=None) -> None:
    """Calls of one kind; the first makes the entry, and its candidates are ready before the second.
    """
    for i in range(calls):
        torch.testing.assert_close((call or lz.rms_norm)(x), normalized(x))
        if i == 0:
            assert learning.flush()
        if not learning._kinds:
            break
    assert learning.flush()


def entry_of(x: torch.Tensor):
    dispatcher = dispatchers["rms_norm"]
    lz.rms_norm(x)
    return dispatcher.cache.table[dispatcher.key_of(*dispatcher.order_arguments((x,), {}))]


def is_learned(x: torch.Tensor) -> bool:
    return isinstance(entry_of(x).run, exploring.Exploring)


def test_the_fastest_serves_when_it_is_settled(path, learn, clock, emitted):
    candidates = fakes(clock, first=100.0, slow=180.0, fast=60.0)
    x, call = rows(), path_of("rms_norm", path)
    serve(x, call=call)
    started, learned = events_of(LearningStarted, emitted), events_of(Learned, emitted)
    assert [(e.kernel, set(e.candidates))
            for e in started] == [("fake.first", {f.id for f in candidates.values()})]
    assert [(e.kernel, e.clear) for e in learned] == [("fake.fast", True)]
    assert learned[0].calls <= 200 and learned[0].samples > 0 and "rows=3" in learned[0].kind
    assert lz.which("rms_norm", x) == "fake.fast"
    before = [f.calls for f in candidates.values()]
    for _ in range(5):
        call(x)
    assert [f.calls - n for f, n in zip(candidates.values(), before)] == [0, 0, 5]


def test_after_that_the_entry_is_the_plain_binding(learn, clock):
    fakes(clock, first=100.0, fast=60.0)
    x = rows()
    assert is_learned(x)
    serve(x)
    entry, dispatcher = entry_of(x), dispatchers["rms_norm"]
    assert (not isinstance(entry.run, (exploring.Exploring, protection.Guard))
            and entry.binding.call is not None)
    assert not is_learned(x) and learning.status().learning == 0 and dispatcher.cache.table


def test_no_call_is_computed_twice_and_each_is_counted_for_who_served_it(path, learn, clock):
    candidates = fakes(clock, first=100.0, slow=180.0, fast=60.0)
    x, call = rows(), path_of("rms_norm", path)
    before = dict(lz.stats().calls.get("rms_norm", {}))
    for i in range(100):
        call(x)
        if i == 0:
            learning.flush()
    assert sum(f.calls for f in candidates.values()) == 100
    after = lz.stats().calls["rms_norm"]
    assert {k: after.get(k, 0) - before.get(k, 0) for k in (f.id for f in candidates.values())} == {
        f.id: f.calls for f in candidates.values()}


def test_what_it_cost_is_counted(learn, clock):
    fakes(clock, first=100.0, slow=180.0)
    x = rows()
    serve(x)
    status = learning.status()
    assert status.learned == 1 and status.explored >= 2
    assert status.seconds == pytest.approx(status.explored * 80e-6, rel=0.01)
    assert (lz.stats().learning.learned == 1 and lz.stats().to_json()["learning"]["explored"]
            == status.explored)
    check = next(c for c in lz.doctor().checks if c.name == "learning")
    assert "1 are learned" in check.detail and "which cost" in check.detail


def test_a_tie_goes_to_torch(learn, clock, emitted):
    own = Fake("fake.own", baseline=True, before=clock.takes(100.0))
    other = Fake("fake.other", before=clock.takes(99.0))
    register(own, other)
    allow_only(own.id, other.id)
    x = rows()
    serve(x)
    assert events_of(Learned, emitted)[0].kernel == "fake.own"
    assert lz.which("rms_norm", x) == "fake.own"


def test_explain_says_that_it_is_being_learned(learn, clock):
    fakes(clock, first=100.0, other=99.9)
    x = rows()
    lz.rms_norm(x)
    learning.flush()
    for _ in range(8):
        lz.rms_norm(x)
    notes = {s.kernel: s.note for s in lz.explain("rms_norm", x).steps}
    assert ("being learned" in notes["fake.first"]
            and "samples, median 100.0 us" in notes["fake.first"])
    assert "being learned" in notes["fake.other"]
    assert "being learned" in str(lz.explain("rms_norm", x))
    serve(x)
    plan = lz.explain("rms_norm", x)
    assert "being learned" not in str(plan)
    assert {s.score.source for s in plan.steps} == {"measured"} and plan.steps[0].score.samples > 0


def test_the_budget_stops_exploring(learn, clock, monkeypatch):
    monkeypatch.setattr(exploring.account, "budget", trial.Budget(allowance_us=0.0, share=0.0))
    candidates = fakes(clock, first=100.0, slow=150.0)
    # guessed to be slower
    register(slower := Fake("fake.slower", prior=4e5, before=clock.takes(100.0)))
    candidates["slower"] = slower
    x = rows(1024, 1024)
    for i in range(60):
        lz.rms_norm(x)
        if i == 0:
            learning.flush()
    assert slower.calls == 0 and candidates["first"].calls + candidates["slow"].calls == 60
    # until its time was known: it was guessed to be as fast
    assert candidates["slow"].calls <= 2


def test_with_the_budget_used_up_nothing_is_decided_until_there_is_some_again(learn, clock,
                                                                              emitted):
    """Deciding takes longer than short calls: it would use up what they earn, for ever."""
    fakes(clock, first=100.0, fast=60.0)
    x, budget = rows(), exploring.account.budget
    lz.rms_norm(x)
    learning.flush()
    kind = next(iter(learning._kinds.values()))
    budget.count(lost_us=2 * budget.allowance_us)
    before = kind.trial.calls
    for _ in range(500):
        lz.rms_norm(x)
    assert kind.trial.calls == before and kind.calls >= 500
    budget.count(lost_us=-2 * budget.allowance_us)
    serve(x)
    [learned] = events_of(Learned, emitted)
    assert learned.kernel == "fake.fast" and learned.calls > 500


def test_a_call_during_which_the_cpu_was_taken_away_says_nothing(learn, clock, monkeypatch,
                                                                 emitted):
    """Two of three samples of the fastest hold a wait of 10 ms in which the thread did not work."""
    worked, waits = Clock(), itertools.cycle((0.0, 0.01, 0.01))
    monkeypatch.setattr(exploring, "_cpu_time", worked)

    def takes(us: float, wait: bool):
        def pass_time() -> None:
            worked.now += us / 1e6
            clock.now += us / 1e6 + (next(waits) if wait else 0.0)
        return pass_time

    candidates = fakes(clock, first=100.0, fast=60.0)
    candidates["first"].before, candidates["fast"].before = takes(100.0, False), takes(60.0, True)
    serve(rows())
    assert events_of(Learned, emitted)[0].kernel == "fake.fast"
    assert learning.status().seconds == pytest.approx(0.0, abs=1e-4)


def test_idle_time_earns_no_budget(learn, clock, monkeypatch):
    fakes(clock, first=100.0, fast=60.0)
    x = rows()
    lz.rms_norm(x)
    learning.flush()
    lz.rms_norm(x)
    clock.now += 3600.0
    lz.rms_norm(x)
    assert exploring.account.budget.total_us <= exploring.MAX_GAP * 1e6 + 1e3


def test_a_first_call_that_takes_long_is_no_sample(learn, clock, emitted):
    candidates = fakes(clock, first=100.0, fast=60.0)
    usual, calls = candidates["fast"].before, [50_000.0]

    def before() -> None:
        usual()
        clock.now += calls.pop() / 1e6 if calls else 0.0

    candidates["fast"].before = before
    serve(rows())
    assert events_of(Learned, emitted)[0].kernel == "fake.fast"


# whom it leaves alone

def test_off_by_default(world, clock):
    learning.reset()
    fakes(clock, first=100.0, fast=60.0)
    assert not is_learned(rows())
    assert next(c for c in lz.doctor().checks if c.name == "learning").detail == "off"


def test_never_where_the_same_bits_are_wanted(learn, clock):
    fakes(clock, first=100.0, fast=60.0)
    assert is_learned(rows())
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_learned(rows())
    finally:
        torch.use_deterministic_algorithms(False)
    lz.configure(deterministic=True)
    assert not is_learned(rows())


def test_never_with_gradients(learn, clock):
    fakes(clock, first=100.0, fast=60.0)
    assert not is_learned(rows().requires_grad_())
    with torch.no_grad():
        assert is_learned(rows().requires_grad_())


def test_never_for_a_kernel_that_was_asked_for(learn, clock):
    candidates = fakes(clock, first=100.0, fast=60.0)
    with lz.prefer("fake.first"):
        for _ in range(20):
            lz.rms_norm(rows())
    for _ in range(20):
        lz.rms_norm(rows(), backend="fake.first")
    lz.lock("rms_norm", "fake.first")
    serve(rows(), 20)
    assert candidates["fast"].calls == 0


@pytest.mark.parametrize("changed", [{"graph": True}, {"compiled": True}, {"grad": True},
                                     {"deterministic": True},
                                     {"device": "xpu"}])
def test_never_in_another_mode(learn, clock, changed):
    fakes(clock, first=100.0, fast=60.0)
    dispatcher, x = dispatchers["rms_norm"], rows()
    lz.rms_norm(x)
    world = worlds.current()
    plan = world.plan(dispatcher.op, dispatcher.facts(dispatcher.order_arguments((x,), {})))
    assert learning._is_learnable(dispatcher.op, world, plan, None)
    assert not learning._is_learnable(dispatcher.op, world,
                                      replace(plan, facts={**plan.facts, **changed}), None)


def test_never_while_torch_traces(learn):
    traced = torch.compile(lambda x: lz.rms_norm(x), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(traced(rows()), normalized(rows()))
    learning.flush()
    assert learning.status() == (0, 0, 0, 0, 0.0, 0.0)


def test_never_with_a_kernel_that_would_compile_or_was_not_tested(learn, clock):
    fakes(clock, first=100.0)
    register(compiles := Fake("fake.compiles", prior=1e5, jit=True),
             untested := Fake("fake.untested", untested=True))
    lz.configure(jit="in_request", allow_untested=True, rules=())
    x = rows()
    plan = lz.explain("rms_norm", x)
    assert {"fake.compiles", "fake.untested"} <= {s.kernel for s in plan.steps}
    base = plan.kernel
    others = {s.kernel for s in learning._candidate_steps(worlds.current(), plan)}
    assert not others & {compiles.id, untested.id, "reference.rms_norm", base}


def test_never_with_a_kernel_that_is_guessed_to_be_many_times_slower(learn, clock):
    candidates = fakes(clock, first=100.0)
    register(slow := Fake("fake.slow", prior=1.0))
    x = rows(1024, 1024)
    for _ in range(30):
        lz.rms_norm(x)
        learning.flush()
    assert slow.calls == 0 and candidates["first"].calls == 30


def test_a_kind_that_was_measured_is_not_learned(learn, clock):
    fakes(clock, first=100.0, fast=60.0)
    x = rows()
    serve(x)
    learning.reset()                           # as in a new process
    assert not is_learned(x)


# faults, threads, processes

def test_a_candidate_that_throws_is_blamed_and_leaves(path, learn, clock, emitted):
    candidates = fakes(clock, first=100.0, broken=60.0, fast=80.0)
    candidates["broken"].fault = ValueError("no luck")
    serve(rows(), call=path_of("rms_norm", path))
    assert candidates["broken"].calls == 1
    assert faults_of("fake.broken") == 1 and faults_of("fake.first") == 0
    assert [e.kernel for e in events_of(Fallback, emitted)] == ["fake.broken"]
    assert events_of(Learned, emitted)[0].kernel == "fake.fast"


@pytest.mark.parametrize("first_replayable", [False, True])
def test_a_kernel_whose_launches_are_replayed_is_timed_as_it_will_be_called(learn, clock, emitted,
                                                                            first_replayable):
    if native.module() is None:
        pytest.skip("nothing is replayed without the native path")
    first = Fake("fake.first", before=clock.takes(100.0), prior=1e6, replayable=first_replayable)
    fast = Fake("fake.fast", before=clock.takes(60.0), prior=1e6 - 1, replayable=True)
    broken = Fake("fake.broken", before=clock.takes(50.0), prior=1e6 - 2, replayable=True,
                  fault=ValueError("no luck"))
    register(first, fast, broken)
    allow_only(first.id, fast.id, broken.id)
    before = dict(lz.stats().calls.get("rms_norm", {}))
    serve(rows())
    assert events_of(Learned, emitted)[0].kernel == "fake.fast"
    assert broken.calls == 1 and faults_of("fake.broken") == 1
    assert [(e.kernel, e.served_by)
            for e in events_of(Fallback, emitted)] == [("fake.broken", "fake.first")]
    after = lz.stats().calls["rms_norm"]
    assert {f.id: after.get(f.id, 0) - before.get(f.id, 0) for f in (first, fast, broken)} == {
        # one of the first was a fallback
        first.id: first.calls - 1, fast.id: fast.calls, broken.id: 1}


def test_what_serves_anyway_may_fail_too(learn, clock):
    candidates = fakes(clock, first=100.0, fast=60.0)
    candidates["first"].fault = ValueError("no luck")
    x = rows()
    for _ in range(10):
        torch.testing.assert_close(lz.rms_norm(x), normalized(x))
    assert faults_of("fake.first") >= 1


def test_a_candidate_that_cannot_be_loaded_is_left_out(learn, clock):
    candidates = fakes(clock, first=100.0, fast=60.0)

    def load():
        raise ImportError("gone")

    lz.register(lz.Kernel("fake.gone", RMS_NORM, load, prior=1e6, less_work="none of it is real"))
    serve(rows())
    assert "fake.gone" in worlds.current().unloadable and candidates["fast"].calls > 0


def test_several_threads_learn_one_kind_together(learn, clock, emitted):
    candidates = fakes(clock, first=100.0, slow=400.0, fast=50.0)
    x, wrong = rows(), []
    lz.rms_norm(x)
    learning.flush()

    def work() -> None:
        for _ in range(200):
            if not torch.equal(lz.rms_norm(x), want):
                wrong.append(1)

    want = lz.rms_norm(x)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and sum(f.calls for f in candidates.values()) == 802
    learning.flush()
    assert len(events_of(Learned, emitted)) == 1 and learning.status().learning == 0


def test_a_call_does_not_wait_for_another_thread(learn, clock):
    candidates = fakes(clock, first=100.0, fast=60.0)
    x = rows()
    lz.rms_norm(x)
    learning.flush()
    kind = next(iter(learning._kinds.values()))
    held, done = threading.Event(), threading.Event()

    def hold():
        with kind.lock:
            held.set()
            done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(60)
    for _ in range(5):
        lz.rms_norm(x)
    done.set(), other.join()
    assert candidates["first"].calls == 6 and kind.trial.calls == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_in_the_middle(learn, clock):
    fakes(clock, first=100.0, fast=60.0)
    x = rows()
    lz.rms_norm(x)
    learning.flush()
    kind = next(iter(learning._kinds.values()))
    kind.lock.acquire()                        # as if another thread held it at that moment
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for _ in range(300):
                lz.rms_norm(x)
            code = 0 if learning.flush(60) and lz.which("rms_norm", x) == "fake.fast" else 2
        finally:
            os._exit(code)
    kind.lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# the store and the world

def test_kinds_that_are_settled_together_cost_one_new_world(learn, clock, emitted):
    fakes(clock, first=100.0, fast=60.0)
    first, second = rows(), rows(hidden=32)
    lz.rms_norm(first), lz.rms_norm(second)
    learning.flush()
    # as if something had just been published
    learning._worker._last = time.monotonic() + 60.0
    for _ in range(100):
        lz.rms_norm(first), lz.rms_norm(second)
    assert not events_of(Learned, emitted)
    learning.flush()
    assert len(events_of(Learned, emitted)) == 2
    assert [e.cause for e in events_of(WorldPublished, emitted)].count("measured") == 1


def test_it_is_written_to_the_store_and_the_next_process_starts_with_it(learn, tmp_path):
    x = rows(256, 512)
    with torch.no_grad():
        for i in range(1100):
            lz.rms_norm(x)
            if i == 0:
                learning.flush()
    learning.flush()
    plan = lz.explain("rms_norm", x)
    if learning.status().unclear:
        pytest.skip("this machine is too busy to learn anything")
    assert plan.steps[0].score.source == "measured"
    output = python(f"""
        import torch, layerzero as lz
        torch.set_num_threads({torch.get_num_threads()})
        plan = lz.explain("rms_norm", torch.randn(256, 512))
        print(plan.kernel, plan.steps[0].score.source, plan.steps[0].score.samples)
    """, LAYERZERO_PERFDB=str(tmp_path / "perf.sqlite"), LAYERZERO_SHIPPED_MEASUREMENTS="0",
                    LAYERZERO_LEARN="1")
    assert output == f"{plan.kernel} measured {plan.steps[0].score.samples}"


def test_what_is_written_says_what_selection_counts(learn, clock, emitted):
    """A copy of the inputs is timed with the kernel and counted apart."""
    first = Fake("fake.first", before=clock.takes(100.0), prior=2.0)
    copies = Fake("fake.copies", before=clock.takes(60.0), prior=1.9, requires=(contiguous("x"),))
    register(first, copies)
    allow_only(first.id, copies.id)
    x = rows(64, 128)[:, ::2]
    serve(x)
    assert events_of(Learned, emitted)[0].kernel == "fake.copies"
    step = next(s for s in lz.explain("rms_norm", x).steps if s.kernel == "fake.copies")
    assert step.score.transform_us > 0 and step.score.total_us == pytest.approx(60.0, rel=0.05)


def test_a_kind_without_a_clear_result_is_not_learned_again(learn, clock, monkeypatch, emitted):
    monkeypatch.setattr(trial, "MAX_CALLS", 2)
    fakes(clock, first=100.0, fast=60.0)
    x = rows()
    serve(x, 10)
    assert [e.clear for e in events_of(Learned, emitted)] == [False]
    assert not is_learned(x) and learning.status().unclear == 1
    assert all(s.score.source != "measured" for s in lz.explain("rms_norm", x).steps)


def test_switching_it_off_ends_it(learn, clock):
    candidates = fakes(clock, first=100.0, fast=60.0)
    x = rows()
    lz.rms_norm(x)
    learning.flush()
    lz.configure(learn=False)
    for _ in range(20):
        lz.rms_norm(x)
    assert candidates["fast"].calls == 0 and learning.status().learning == 0
