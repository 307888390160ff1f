"""The circuit breaker: its transitions as pure functions, and what calls see of it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from helpers import RMS_NORM, Fake, health_of, normed, of, path_of, register, rows, wait_for

import layerzero as lz
from layerzero.runtime import world as worlds
from layerzero.runtime.health import LONGEST_COOLDOWN, Health, cooled, disabled, failed, next_deadline, succeeded
from layerzero.spec.event import Fallback, HealthChanged
from layerzero.spec.reason import Code, Reason

BOOM = Reason(Code.KERNEL_FAILED, None, "RuntimeError: boom")


# transitions

def after(*steps, threshold=3, cooldown=10.0, start=None):
    """The health after steps: ("fail", now), ("wait", now), "succeed"."""
    state = start
    for step in steps:
        if step == "succeed":
            state = succeeded(state)
        elif step[0] == "fail":
            state = failed(state, BOOM, step[1], threshold, cooldown)
        else:
            state = cooled({"k": state}, step[1])["k"] if state else None
    return state


def test_it_opens_after_as_many_faults_in_a_row_as_the_threshold():
    assert after(("fail", 0)) == Health("closed", 1, reason=BOOM)
    assert after(("fail", 0), ("fail", 1)).blocks is None
    opened = after(("fail", 0), ("fail", 1), ("fail", 2))
    assert opened == Health("open", 3, 10.0, 12.0, BOOM)
    assert opened.blocks.code is Code.CIRCUIT_OPEN
    assert "3 faults" in opened.blocks.message and "boom" in opened.blocks.message and "10 s" in opened.blocks.message
    assert after(("fail", 0), threshold=1).state == "open"


def test_a_success_takes_everything_back():
    assert after(("fail", 0), ("fail", 1), "succeed") is None
    assert after(("fail", 0), ("fail", 1), "succeed", ("fail", 2), ("fail", 3)).state == "closed"


def test_after_the_cooldown_it_is_half_open_and_one_success_closes_it():
    opened = [("fail", 0)] * 3
    assert after(*opened, ("wait", 9.99)).state == "open"
    half = after(*opened, ("wait", 10.0))
    assert half.state == "half_open" and half.blocks is None
    assert after("succeed", start=half) is None


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_a_limit():
    state, now, cooldowns = after(*[("fail", 0)] * 3), 0.0, []
    for _ in range(12):
        cooldowns.append(state.cooldown)
        now = state.until
        state = after(("wait", now), ("fail", now), start=state)
        assert state.state == "open" and state.until == now + state.cooldown
    assert cooldowns[:4] == [10, 20, 40, 80] and cooldowns[-1] == LONGEST_COOLDOWN == max(cooldowns)
    recovered = after(("wait", state.until), "succeed", *[("fail", state.until)] * 3, start=state)
    assert recovered.cooldown == 10                        # it starts again at the beginning


def test_a_call_that_had_begun_before_changes_an_open_breaker_in_nothing_but_the_count():
    opened = after(*[("fail", 0)] * 3, ("wait", 10), ("fail", 10))
    late = after(("fail", 15), start=opened)
    assert (late.state, late.cooldown, late.until) == ("open", 20.0, 30.0) and late.failures == opened.failures + 1
    assert after("succeed", start=opened) == opened


def test_disabled_is_for_good():
    gone = disabled(Reason(Code.DEVICE_FAULT, None, "illegal memory access"))
    assert gone.blocks.code is Code.BACKEND_DISABLED and "illegal memory access" in gone.blocks.message
    assert after(("fail", 0), ("wait", 1e9), "succeed", ("fail", 2e9), start=gone) == gone


def test_the_next_deadline_is_that_of_the_first_open_breaker():
    assert next_deadline({}) is None
    states = {"a": Health("open", 3, 10, 50.0), "b": Health("open", 3, 10, 40.0), "c": Health("closed", 1),
              "d": Health("half_open", 3, 10, 5.0), "e": disabled(BOOM)}
    assert next_deadline(states) == 40.0
    assert {k: h.state for k, h in cooled(states, 45.0).items()} == {
        "a": "open", "b": "half_open", "c": "closed", "d": "half_open", "e": "disabled"}


# what calls see

@pytest.fixture
def call(path, world):
    return path_of(RMS_NORM, path)


def states(happened, group):
    return [e.state for e in of(HealthChanged, happened) if e.kernel == group]


def test_a_kernel_that_keeps_failing_is_left_out_until_it_has_cooled(call, happened):
    lz.configure(breaker_threshold=3, breaker_cooldown=0.3)
    first, second = Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    for _ in range(3):
        torch.testing.assert_close(call(x), normed(x))
    assert health_of("fake.first").state == "open" and states(happened, "fake.first") == ["open"]
    for _ in range(20):
        call(x)
    assert first.calls == 3 and second.calls == 23         # not even tried
    assert len(of(Fallback, happened)) == 3                # and so nothing to fall back from
    (reason,) = lz.explain("rms_norm", x).why_not("fake.first")
    assert reason.code is Code.CIRCUIT_OPEN and "boom" in reason.message
    with pytest.raises(lz.NamedKernelRefused, match="CIRCUIT_OPEN"):
        call(x, backend="fake.first")
    assert any(c.name == "health of fake.first" and not c.ok for c in lz.doctor().checks)

    first.fault = None
    wait_for(lambda: health_of("fake.first").state == "half_open")           # by the clock: nobody calls
    torch.testing.assert_close(call(x), normed(x))
    assert first.calls == 4 and health_of("fake.first") is None
    assert states(happened, "fake.first") == ["open", "half_open", "closed"]
    call(x)
    assert first.calls == 5


def test_a_probe_that_fails_opens_it_for_twice_as_long_and_its_call_is_served(call, happened):
    lz.configure(breaker_threshold=1, breaker_cooldown=0.05)
    first, second = Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    for n, cooldown in enumerate((0.05, 0.1, 0.2), 1):
        torch.testing.assert_close(call(x), normed(x))
        assert first.calls == n and health_of("fake.first").cooldown == pytest.approx(cooldown)
        wait_for(lambda: health_of("fake.first").state == "half_open")
    assert states(happened, "fake.first") == ["open", "half_open"] * 3


def test_faults_that_are_not_in_a_row_open_nothing(call, happened):
    lz.configure(breaker_threshold=2)
    first, second = Fake("fake.first"), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    for i in range(10):
        first.fault = RuntimeError("boom") if i % 2 else None
        torch.testing.assert_close(call(x), normed(x))
    assert first.calls == 10 and second.calls == 5 and not states(happened, "fake.first")


def test_a_fallback_that_serves_has_its_own_faults_forgiven(call):
    lz.configure(breaker_threshold=3)
    first, second = Fake("fake.first", fault=MemoryError()), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    for i in range(8):
        second.fault = RuntimeError("now and then") if i % 2 else None
        call(x)
    assert second.calls == 8 and health_of("fake.second").state == "closed"


def test_one_success_among_other_shapes_counts_for_all(call):
    lz.configure(breaker_threshold=2)
    fake = Fake(fault=RuntimeError("boom"))
    register(fake)
    call(rows(2))
    fake.fault = None
    call(rows(3))
    assert health_of("fake.one") is None
    fake.fault = RuntimeError("boom")
    call(rows(4))
    assert health_of("fake.one").failures == 1


@pytest.mark.parametrize("same_key", [True, False], ids=["one shape", "two shapes"])
def test_a_half_open_kernel_is_probed_by_one_call_at_a_time(call, same_key):
    lz.configure(breaker_threshold=1, breaker_cooldown=0.02)
    entered, leave = threading.Event(), threading.Event()
    first, second = Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5)
    register(first, second)
    x, other = rows(3), rows(3 if same_key else 4)
    call(x)
    wait_for(lambda: health_of("fake.first").state == "half_open")
    first.fault, first.before = None, lambda: (entered.set(), leave.wait(10))
    out = []
    prober = threading.Thread(target=lambda: out.append(call(x)))
    prober.start()
    assert entered.wait(10)
    served = second.calls
    for _ in range(5):
        torch.testing.assert_close(call(other), normed(other))
    assert first.calls == 2 and second.calls == served + 5
    assert health_of("fake.first").state == "half_open"    # waiting in line is no fault
    leave.set()
    prober.join(10)
    torch.testing.assert_close(out[0], normed(x))
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
    fake.fault, fake.before = None, lambda: entered.is_set() or (entered.set(), leave.wait(10))
    prober = threading.Thread(target=lambda: call(x))
    prober.start()
    assert entered.wait(10)
    torch.testing.assert_close(call(x, backend="fake.one"), normed(x))
    leave.set()
    prober.join(10)


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
    lib, lib_two = Fake("lib.one", fault=RuntimeError("no"), package="json"), Fake("lib.two", prior=1e5, package="json")
    bare, bare_two = Fake("bare.one", fault=RuntimeError("no"), prior=1e4), Fake("bare.two", prior=1e3)
    register(lib, lib_two, bare, bare_two)
    x = rows()
    call(x)
    assert set(worlds.current().health) == {"lib"} and lib_two.calls == 1     # the plan was made before it opened
    call(x)
    assert lib.calls == 1 and lib_two.calls == 1 and bare.calls == 1
    assert set(worlds.current().health) == {"lib", "bare.one"}
    call(x)
    assert bare.calls == 1 and bare_two.calls == 2
    plan = lz.explain("rms_norm", x)
    assert {k: plan.why_not(k)[0].code for k in ("lib.one", "lib.two", "bare.one")} == dict.fromkeys(
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
    gate = threading.Barrier(16, timeout=30)
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
    assert fake.calls == 80 and health_of("fake.one").failures == 80


def test_a_late_success_does_not_bring_back_a_lost_device(call):
    entered, leave = threading.Event(), threading.Event()
    fake = Fake(fault=RuntimeError("boom"))
    register(fake)
    x = rows()
    call(x)                                                # from now on it is watched
    fake.fault, fake.before = None, lambda: (entered.set(), leave.wait(10))
    worker = threading.Thread(target=lambda: call(x))
    worker.start()
    assert entered.wait(10)
    fake.before, fake.fault = None, RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(lz.DeviceLost):
        call(x)
    fake.fault = None
    leave.set()
    worker.join(10)
    assert health_of("fake.one").state == "disabled"


def test_the_clock_sleeps_when_there_is_nothing_to_wait_for(world):
    lz.configure(breaker_threshold=1, breaker_cooldown=0.02)
    register(Fake(fault=RuntimeError("boom")))
    lz.rms_norm(rows())
    wait_for(lambda: health_of("fake.one").state == "half_open")
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "layerzero-clock"])
    epoch = worlds.current().epoch
    time.sleep(0.1)
    assert worlds.current().epoch == epoch                 # nothing happens by itself any more
