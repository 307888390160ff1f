"""The circuit breaker: its transitions as pure functions, and what calls see of it."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from helpers import (
    RMS_NORM,
    Fake,
    allow_only,
    end_cooldown,
    events_of,
    faults_of,
    health_of,
    normalized,
    path_of,
    register,
    rows,
    wait_for,
)

import layerzero as lz
from layerzero.machine import memory
from layerzero.spec.event import Fallback, HealthChanged, Selected
from layerzero.spec.reason import Code, Reason
from layerzero.spec.rules.launch import LaunchRefused
from layerzero.world import incidents
from layerzero.world import snapshot as worlds
from layerzero.world.health import (
    MAX_COOLDOWN,
    BreakerLimits,
    Faults,
    Health,
    after_cooldown,
    after_failure,
    after_success,
    disabled,
    next_deadline,
)

BOOM = Reason(Code.KERNEL_FAILED, None, "RuntimeError: boom")


# counting

def count(faults, calls, *, threshold=3, rate=0.05, window=200):
    """Was the last of the faults at these counts of calls one too many?"""
    return [faults.add(n, BOOM, BreakerLimits(threshold, rate, window)) for n in calls][-1]


def test_so_many_faults_in_a_row_are_too_many_however_long_it_worked():
    faults = Faults()
    assert not count(faults, [5000, 5001]) and count(faults, [5002])
    assert faults.streak == 3 and faults.last is BOOM
    assert count(Faults(), [1], threshold=1)


def test_a_call_that_succeeds_between_them_ends_the_row():
    assert not count(Faults(), [5000, 5001, 5003, 5004])


@pytest.mark.parametrize(("calls", "too_many"), [
    ([1000 + 25 * i for i in range(40)], False),           # 4 % of a window
    # 5 %: 10 of 200
    ([1000 + 20 * i for i in range(9)], False), ([1000 + 20 * i for i in range(10)], True),
    # of a few calls many, but never fewer than the threshold
    ([2, 4], False), ([2, 4, 6], True),
    ([20, 40], False), ([20, 40, 60], True), ([20, 40, 61], False)])
def test_too_large_a_share_of_the_last_calls_is_too_many(calls, too_many):
    assert count(Faults(), calls) is too_many


def test_faults_that_were_long_ago_are_forgotten_and_the_memory_of_them_is_bounded():
    faults = Faults()
    count(faults, [1, 3, 50])
    assert (faults.among_last(60, BreakerLimits()) == 3 and faults.among_last(220, BreakerLimits())
            == 1)
    count(faults, range(300, 9000), threshold=10_000, rate=1.0)
    assert faults.among_last(9000, BreakerLimits()) < 200


@pytest.mark.parametrize(("rate", "opens"), [(0.01, 0), (0.05, 1), (0.5, 1)])
def test_what_the_default_limits_do_about_a_flaky_kernel(rate, opens):
    """Over 20 kernels of each kind and 2,000 calls of each."""
    opened = 0
    for seed in range(20):
        luck, faults = random.Random(seed), Faults()
        opened += any(luck.random() < rate and faults.add(n, BOOM, BreakerLimits())
                      for n in range(1, 2001))
    assert opened == 20 if opens else opened <= 3


# transitions

def after(*steps, cooldown=10.0, start=None):
    """The breaker after steps: ("fail", now, too many?), ("wait", now), "succeed"."""
    state = start
    for step in steps:
        if step == "succeed":
            state = after_success(state)
        elif step[0] == "fail":
            state = after_failure(state, BOOM, step[1], step[2], 3, cooldown)
        else:
            state = after_cooldown({"k": state}, step[1])["k"] if state else None
    return state


OPENED = ("fail", 0, True)


def test_it_opens_when_there_are_too_many():
    assert after(("fail", 0, False)) is None
    opened = after(("fail", 2, True))
    assert opened == Health("open", 3, 10.0, 12.0, BOOM)
    assert opened.blocks.code is Code.CIRCUIT_OPEN
    assert ("3 faults" in opened.blocks.message and "boom" in opened.blocks.message
            and "10 s" in opened.blocks.message)


def test_after_the_cooldown_it_is_half_open_and_one_success_closes_it():
    assert after(OPENED, ("wait", 9.99)).state == "open"
    half = after(OPENED, ("wait", 10.0))
    assert half.state == "half_open" and half.blocks is None
    assert after("succeed", start=half) is None


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_a_limit():
    state, now, cooldowns = after(OPENED), 0.0, []
    for _ in range(12):
        cooldowns.append(state.cooldown)
        now = state.until
        state = after(("wait", now), ("fail", now, False), start=state)
        assert state.state == "open" and state.until == now + state.cooldown
    assert cooldowns[:4] == [10, 20, 40, 80] and cooldowns[-1] == MAX_COOLDOWN == max(cooldowns)
    recovered = after(("wait", state.until), "succeed", ("fail", state.until, True), start=state)
    assert recovered.cooldown == 10                        # it starts again at the beginning


def test_a_call_that_had_begun_before_changes_an_open_breaker_in_nothing():
    opened = after(OPENED, ("wait", 10), ("fail", 10, True))
    assert (after(("fail", 15, True), start=opened) is opened
            and after("succeed", start=opened) is opened)


def test_disabled_is_for_good():
    gone = disabled(Reason(Code.DEVICE_FAULT, None, "illegal memory access"))
    assert (gone.blocks.code is Code.BACKEND_DISABLED
            and "illegal memory access" in gone.blocks.message)
    assert after(("fail", 0, True), ("wait", 1e9), "succeed", ("fail", 2e9, True),
                 start=gone) == gone


def test_the_next_deadline_is_that_of_the_first_open_breaker():
    assert next_deadline({}) is None
    states = {"a": Health("open", 3, 10, 50.0), "b": Health("open", 3, 10, 40.0),
              "c": Health("closed", 1),
              "d": Health("half_open", 3, 10, 5.0), "e": disabled(BOOM)}
    assert next_deadline(states) == 40.0
    assert {k: h.state for k, h in after_cooldown(states, 45.0).items()} == {
        "a": "open", "b": "half_open", "c": "closed", "d": "half_open", "e": "disabled"}


# what calls see

@pytest.fixture
def call(path, world):
    return path_of(RMS_NORM, path)


def states(emitted, group):
    return [e.state for e in events_of(HealthChanged, emitted) if e.kernel == group]


def test_a_kernel_that_keeps_failing_is_left_out_until_it_has_cooled(call, emitted):
    lz.configure(breaker_threshold=3, breaker_cooldown=600)
    first, second = Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    for _ in range(3):
        torch.testing.assert_close(call(x), normalized(x))
    assert health_of("fake.first").state == "open" and states(emitted, "fake.first") == ["open"]
    for _ in range(20):
        call(x)
    assert first.calls == 3 and second.calls == 23         # not even tried
    assert len(events_of(Fallback, emitted)) == 3                # and so nothing to fall back from
    (reason,) = lz.explain("rms_norm", x).why_not("fake.first")
    assert reason.code is Code.CIRCUIT_OPEN and "boom" in reason.message
    with pytest.raises(lz.errors.NamedKernelRefused, match="CIRCUIT_OPEN"):
        call(x, backend="fake.first")
    assert any(c.name == "health of fake.first" and not c.ok for c in lz.doctor().checks)

    first.fault = None
    end_cooldown("fake.first")
    # by the clock: nobody calls
    wait_for(lambda: states(emitted, "fake.first") == ["open", "half_open"])
    torch.testing.assert_close(call(x), normalized(x))
    assert first.calls == 4 and health_of("fake.first") is None
    assert states(emitted, "fake.first") == ["open", "half_open", "closed"]
    call(x)
    assert first.calls == 5


def test_a_probe_that_fails_opens_it_for_twice_as_long_and_its_call_is_served(call, emitted):
    lz.configure(breaker_threshold=1, breaker_cooldown=0.05)
    first, second = Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    for n, cooldown in enumerate((0.05, 0.1, 0.2), 1):
        torch.testing.assert_close(call(x), normalized(x))
        assert first.calls == n and health_of("fake.first").cooldown == pytest.approx(cooldown)
        wait_for(lambda: states(emitted, "fake.first") == ["open", "half_open"] * n)  # noqa: B023
    assert health_of("fake.first").state == "half_open"


def test_faults_that_are_seldom_open_nothing(call, emitted):
    lz.configure(breaker_threshold=2, breaker_rate=0.6)
    first, second = Fake("fake.first"), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    for i in range(10):
        first.fault = RuntimeError("boom") if i % 2 else None
        torch.testing.assert_close(call(x), normalized(x))
    assert first.calls == 10 and second.calls == 5 and not states(emitted, "fake.first")
    assert faults_of("fake.first") == 5
    assert any("5 of its last calls failed" in s.note for s in lz.explain("rms_norm", x).steps)


def test_faults_that_are_frequent_open_it_though_they_are_never_in_a_row(call, emitted, path):
    # a name of its own: what other tests called counts as well
    first, second = Fake(f"fake.{path}"), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    for i in range(10):
        first.fault = RuntimeError("boom") if i % 2 else None
        torch.testing.assert_close(call(x), normalized(x))
    assert first.calls == 6 and states(emitted, f"fake.{path}") == ["open"]    # at the third fault


def test_calls_of_every_shape_and_of_every_world_count(call):
    lz.configure(breaker_rate=0.2)
    fake = Fake()
    register(fake)
    for n in range(2, 30):
        call(rows(n))
    # a new world: the entries are gone, their counts are not
    lz.configure(breaker_cooldown=20)
    for _ in range(20):
        call(rows(3))
    fake.fault = RuntimeError("boom")
    call(rows(4))
    fake.fault = None
    call(rows(5))
    fake.fault = RuntimeError("boom")
    call(rows(6)), call(rows(7))
    assert health_of("fake.one") is None and faults_of("fake.one") == 3       # of 52


def test_a_fallback_is_called_too_and_its_faults_count(call):
    first, second = Fake("fake.first", fault=MemoryError()), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    for i in range(4):
        second.fault = RuntimeError("now and then") if i % 2 else None
        call(x)
    assert second.calls == 4 and faults_of("fake.second") == 2 and faults_of("fake.first") == 0


def test_where_all_kernels_fail_alike_the_call_is_wrong_and_nobody_is_blamed(call, emitted):
    lz.configure(breaker_threshold=1)
    first, second = Fake("fake.first", fault=OverflowError("int too big")), Fake("fake.second",
                                                                                 prior=1e5)
    second.fault = ValueError("out of range")
    register(first, second)
    allow_only("fake.first", "fake.second")
    for _ in range(5):
        with pytest.raises(lz.errors.KernelExecutionError, match="every kernel of the plan failed"):
            call(rows())
    assert not worlds.current().health and faults_of("fake.first") == faults_of("fake.second") == 0
    second.fault = None
    torch.testing.assert_close(call(rows()),
                               normalized(rows()))       # now it is the first one's doing
    assert health_of("fake.first").state == "open"


def test_a_named_kernel_that_fails_alone_is_blamed(call):
    lz.configure(breaker_threshold=2)
    register(Fake(fault=RuntimeError("boom")))
    for _ in range(2):
        with pytest.raises(lz.errors.KernelExecutionError):
            call(rows(), backend="fake.one")
    assert health_of("fake.one").state == "open"


def test_the_reference_is_never_switched_off(call):
    """Not by faults, and not by a device that is lost: it is what remains."""
    lz.configure(breaker_threshold=1)
    reference = Fake("reference.broken", fault=RuntimeError("boom"))
    register(reference)
    for _ in range(5):
        call(rows())
    assert reference.calls == 5 and not worlds.current().health
    reference.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(lz.errors.DeviceLost):
        call(rows())
    assert not worlds.current().health


# what others see

@pytest.fixture
def innocent(path, world):
    """A call of another op, and how often a choice was made for it."""
    chosen = []
    stop = lz.subscribe(lambda e: chosen.append(e) if isinstance(e, Selected)
                        and e.op == "layer_norm" else None)
    run = path_of(lz.op("layer_norm"), path)
    run(rows())
    yield lambda: (run(rows()), len(chosen))[1]
    stop()


def test_a_flaky_kernel_makes_no_other_op_choose_again(call, innocent, emitted):
    lz.configure(breaker_threshold=3, breaker_cooldown=0.01)
    first, second = Fake("fake.first"), Fake("fake.second", prior=1e5)
    register(first, second)
    before = innocent()
    epoch, luck, end = worlds.current().epoch, random.Random(0), time.monotonic() + 60
    while (not {"open", "half_open"} <= set(states(emitted, "fake.first"))
           and time.monotonic() < end):
        first.fault = RuntimeError("boom") if luck.random() < 0.3 else None
        torch.testing.assert_close(call(rows()), normalized(rows()))
        assert innocent() == before
    # its breaker did all it can do
    assert {"open", "half_open"} <= set(states(emitted, "fake.first"))
    assert worlds.current().epoch > epoch and innocent() == before


def test_a_single_fault_changes_nothing_for_anybody(call, emitted):
    fake = Fake(fault=RuntimeError("boom"))
    register(fake)
    epoch = worlds.current().epoch
    call(rows())
    fake.fault = None
    call(rows())
    assert fake.calls == 2 and worlds.current().epoch == epoch


def test_a_library_that_does_not_load_and_a_kind_that_is_refused_concern_their_own_op_alone(
        call, innocent):
    def load():
        raise ImportError("no such file")

    lz.register(lz.Kernel("broken.one", RMS_NORM, load, prior=1e9))
    refusing = Fake(fault=LaunchRefused("too large",
                                        [Reason(Code.CUDA_BLOCK_LIMIT_EXCEEDED, "<= 1", 2,
                                                "grid x")]))
    register(refusing)
    before = innocent()
    for n in (3, 3, 40, 40):
        call(rows(n))
    assert refusing.calls == 2                             # once for each kind
    assert innocent() == before
    refusing.fault = None
    call(rows(900))
    assert refusing.calls == 3 and not worlds.current().health
    assert [r.code for r in lz.explain("rms_norm", rows(40)).why_not("fake.one")] == [
        Code.CUDA_BLOCK_LIMIT_EXCEEDED]


def test_what_is_remembered_of_refusals_is_bounded(world, monkeypatch):
    monkeypatch.setattr(incidents, "MAX_REFUSALS", 3)
    fake = Fake(fault=LaunchRefused("no",
                                    [Reason(Code.CUDA_BLOCK_LIMIT_EXCEEDED, "<= 1", 2, "grid x")]))
    register(fake)
    for n in range(1, 9):
        lz.rms_norm(rows(n))
    assert len(worlds.current().refused["fake.one"]) == 3


def test_unregistering_a_kernel_forgets_all_that_was_found_out_about_it(call):
    lz.configure(breaker_threshold=1)
    fake = Fake(fault=RuntimeError("boom"))
    register(fake)
    call(rows())
    assert health_of("fake.one").state == "open"
    lz.unregister("fake.one")
    assert health_of("fake.one") is None and "fake.one" not in incidents._faults
    fake.fault = None
    register(fake)
    call(rows())
    assert fake.calls == 2 and faults_of("fake.one") == 0


def test_unregistering_one_kernel_of_a_library_leaves_the_librarys_breaker(call):
    lz.configure(breaker_threshold=1)
    register(Fake("lib.one", fault=RuntimeError("no"), package="json"),
             Fake("lib.two", prior=1.0, package="json"))
    call(rows())
    lz.unregister("lib.one")
    assert health_of("lib").state == "open"
    lz.unregister("lib.two")
    assert health_of("lib") is None


@pytest.mark.parametrize("same_key", [True, False], ids=["one shape", "two shapes"])
def test_a_half_open_kernel_is_probed_by_one_call_at_a_time(call, same_key):
    lz.configure(breaker_threshold=1, breaker_cooldown=0.02)
    entered, leave = threading.Event(), threading.Event()
    first, second = Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5)
    register(first, second)
    x, other = rows(3), rows(3 if same_key else 4)
    call(x)
    wait_for(lambda: health_of("fake.first").state == "half_open")
    first.fault, first.before = None, lambda: (entered.set(), leave.wait(60))
    out = []
    prober = threading.Thread(target=lambda: out.append(call(x)))
    prober.start()
    assert entered.wait(60)
    served = second.calls
    for _ in range(5):
        torch.testing.assert_close(call(other), normalized(other))
    assert first.calls == 2 and second.calls == served + 5
    assert health_of("fake.first").state == "half_open"    # waiting in line is no fault
    leave.set()
    prober.join(60)
    torch.testing.assert_close(out[0], normalized(x))
    assert health_of("fake.first") is None
    call(other)
    assert first.calls == 3


def test_a_call_that_names_a_half_open_kernel_is_not_turned_away_by_a_probe(call):
    lz.configure(breaker_threshold=1, breaker_cooldown=0.02)
    entered, leave = threading.Event(), threading.Event()
    fake = Fake(fault=RuntimeError("boom"))
    register(fake)
    x = rows()
    call(x)
    wait_for(lambda: health_of("fake.one").state == "half_open")
    fake.fault, fake.before = None, lambda: entered.is_set() or (entered.set(), leave.wait(60))
    prober = threading.Thread(target=lambda: call(x))
    prober.start()
    assert entered.wait(60)
    torch.testing.assert_close(call(x, backend="fake.one"), normalized(x))
    leave.set()
    prober.join(60)


def test_an_interrupted_probe_lets_the_next_one_try(call):
    lz.configure(breaker_threshold=1, breaker_cooldown=0.02)
    fake = Fake(fault=RuntimeError("boom"))
    register(fake)
    x = rows()
    call(x)
    wait_for(lambda: health_of("fake.one").state == "half_open")
    fake.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        call(x)
    fake.fault = None
    call(x)
    assert fake.calls == 3 and health_of("fake.one") is None


def test_a_fault_counts_against_the_whole_library_and_for_torch_against_the_kernel_alone(call):
    lz.configure(breaker_threshold=1)
    lib, lib_two = Fake("lib.one", fault=RuntimeError("no"),
                        package="json"), Fake("lib.two", prior=1e5, package="json")
    bare, bare_two = Fake("bare.one", fault=RuntimeError("no"),
                          prior=1e4), Fake("bare.two", prior=1e3)
    register(lib, lib_two, bare, bare_two)
    x = rows()
    call(x)
    # the plan was made before it opened
    assert set(worlds.current().health) == {"lib"} and lib_two.calls == 1
    call(x)
    assert lib.calls == 1 and lib_two.calls == 1 and bare.calls == 1
    assert set(worlds.current().health) == {"lib", "bare.one"}
    call(x)
    assert bare.calls == 1 and bare_two.calls == 2
    plan = lz.explain("rms_norm", x)
    assert {k: plan.why_not(k)[0].code
            for k in ("lib.one", "lib.two", "bare.one")} == dict.fromkeys(
        ("lib.one", "lib.two", "bare.one"), Code.CIRCUIT_OPEN)
    assert plan.kernel == "bare.two"


def test_a_breaker_counts_for_every_op_of_its_library(world):
    lz.configure(breaker_threshold=1)
    norm = Fake("lib.norm", fault=RuntimeError("no"), package="json")
    layer = Fake("lib.layer", lz.op("layer_norm"), package="json")
    register(norm, layer)
    x = rows()
    lz.layer_norm(x), lz.rms_norm(x), lz.layer_norm(x)
    assert layer.calls == 1
    assert [r.code for r in lz.validate("layer_norm", "lib.layer", x)] == [Code.CIRCUIT_OPEN]


def test_no_fault_is_lost_among_threads(call):
    lz.configure(breaker_threshold=10_000)
    gate = threading.Barrier(16, timeout=60)
    fake = Fake(fault=RuntimeError("boom"), before=lambda: gate.wait())
    register(fake)
    x = rows()

    def work():
        for _ in range(5):
            call(x)

    workers = [threading.Thread(target=work) for _ in range(16)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert fake.calls == 80 and faults_of("fake.one") == 80


def test_a_late_success_does_not_bring_back_a_lost_device(call):
    entered, leave = threading.Event(), threading.Event()
    fake = Fake(fault=RuntimeError("boom"))
    register(fake)
    x = rows()
    call(x)
    fake.fault, fake.before = None, lambda: (entered.set(), leave.wait(60))
    worker = threading.Thread(target=lambda: call(x))
    worker.start()
    assert entered.wait(60)
    fake.before, fake.fault = None, RuntimeError(
        "CUDA error: an illegal memory access was encountered")
    with pytest.raises(lz.errors.DeviceLost):
        call(x)
    fake.fault = None
    leave.set()
    worker.join(60)
    assert health_of("fake.one").state == "disabled"


def test_the_clock_sleeps_when_there_is_nothing_to_wait_for(world):
    memory.forget()                            # choices of other tests, which depend on free memory
    lz.configure(breaker_threshold=1, breaker_cooldown=0.02)
    register(Fake(fault=RuntimeError("boom")))
    lz.rms_norm(rows())
    wait_for(lambda: health_of("fake.one").state == "half_open")
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "layerzero-clock"])
    epoch = worlds.current().epoch
    time.sleep(0.1)
    assert worlds.current().epoch == epoch                 # nothing happens by itself any more
