"""Subscribers that misbehave: whatever they raise, call or wait for, no caller and no thread of
ours pays for it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

import pytest
import torch
from helpers import Fake, events_of, health_of, normalized, python, register, rows, wait_for

import layerzero as lz
from layerzero.dispatch.background import compiling, learning
from layerzero.machine import locks
from layerzero.spec.event import Evicted, Fallback, HealthChanged, Selected, WorldPublished
from layerzero.world import clock, events
from layerzero.world import snapshot as worlds

pytestmark = pytest.mark.usefixtures("world")


class Panic(BaseException):
    """As pyo3 raises it when Rust code panics: not an Exception."""


def recurse(event):
    return recurse(event)


def leave(event):
    sys.exit(3)


def raising(error):
    def sink(event):
        raise error
    return sink


SINKS = {
    "SystemExit": raising(SystemExit(1)), "sys.exit": leave,
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "GeneratorExit": raising(GeneratorExit()),
    "panic": raising(Panic("called `unwrap()` on a None value")),
    "recursion": recurse, "memory": raising(MemoryError()),
    "assertion": raising(AssertionError("no")), "stop": raising(StopIteration()),
    "unprintable": raising(type("Odd", (Exception,), {"__str__": recurse})()),
}


@pytest.fixture(params=SINKS)
def hostile(request):
    stop = lz.subscribe(SINKS[request.param])
    yield request.param
    stop()


def test_no_exception_reaches_a_caller(hostile):
    x = rows()
    register(Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5))
    lz.configure(breaker_threshold=1)
    torch.testing.assert_close(lz.rms_norm(x), normalized(x))
    assert health_of("fake.first").state == "open"
    lz.unregister("fake.first"), lz.clear_cache()
    assert lz.which("rms_norm", x) == "fake.second"
    torch.testing.assert_close(lz.rms_norm(x), normalized(x))


def test_the_clock_goes_on(hostile):
    register(Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5))
    lz.configure(breaker_threshold=1, breaker_cooldown=0.05)
    # a thread that died the first time would not see the second
    for _ in range(2):
        lz.rms_norm(rows())
        wait_for(lambda: health_of("fake.first").state == "half_open")
        lz.rms_norm(rows())                    # fails again: twice the time
    assert threading.main_thread().is_alive()


def test_the_learning_worker_goes_on(hostile, tmp_path):
    learning.reset()
    lz.configure(learn=True, perfdb=str(tmp_path / "perf.sqlite"))
    try:
        register(Fake("fake.first"), Fake("fake.second", prior=9e5))
        # two kinds: the second is learned by a worker that lived on
        for hidden in (32, 64):
            for _ in range(300):
                lz.rms_norm(rows(hidden=hidden))
            assert learning.flush(60)
        assert (learning.status().learned + learning.status().unclear + learning.status().learning
                >= 2)
    finally:
        lz.configure(learn=False)
        learning.reset()


def test_what_a_worker_may_not_raise_does_not_end_it():
    def task():
        raise SystemExit(1)

    with learning._worker._wake:
        learning._worker._tasks.append(task)
        learning._worker._start()
    done = threading.Event()
    with learning._worker._wake:
        learning._worker._tasks.append(done.set)
        learning._worker._start()
    assert done.wait(60)


def test_what_the_world_raises_does_not_stop_the_clock(monkeypatch):
    calls = []

    def broken(now):
        calls.append(now)
        if len(calls) == 1:
            raise SystemExit(1)

    monkeypatch.setattr(clock, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(worlds, "apply_deadlines", broken)
    worlds.publish(lambda w: w.replace(deadlines=frozenset({time.monotonic() + 0.01})), "test")
    wait_for(lambda: len(calls) > 1)


def test_a_log_handler_that_raises_is_a_subscriber_too():
    class Broken(logging.Handler):
        def emit(self, record):
            raise SystemExit(1)

    handler = Broken()
    events.log.addHandler(handler)
    try:
        register(Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5))
        torch.testing.assert_close(lz.rms_norm(rows()), normalized(rows()))
        stop = lz.subscribe(raising(ValueError("no")))
        lz.clear_cache()
        stop()
    finally:
        events.log.removeHandler(handler)


def test_a_subscriber_that_calls_is_not_told_of_its_own_calls(emitted):
    seen = []

    def busy(event):
        seen.append(event)
        lz.clear_cache()
        lz.rms_norm(rows(hidden=16 + len(seen)))

    stop = lz.subscribe(busy)
    other = []
    stop_other = lz.subscribe(lambda event: (other.append(event), lz.clear_cache()))
    lz.clear_cache()
    stop(), stop_other()
    assert 0 < len(seen) < 10 and 0 < len(other) < 10
    assert len(events_of(WorldPublished, emitted)) > 1               # the others are


def test_a_subscriber_of_a_choice_may_make_the_same_call():
    x, results = rows(), []
    stop = lz.subscribe(lambda event: results.append(lz.rms_norm(x)) if isinstance(event, Selected)
                        else None)
    lz.clear_cache()
    lz.rms_norm(x)
    stop()
    assert len(results) == 1
    torch.testing.assert_close(results[0], normalized(x))


def test_a_subscriber_that_blocks_holds_up_its_caller_and_nobody_else():
    x, inside, go = rows(), threading.Event(), threading.Event()

    def block(event):
        if isinstance(event, Selected) and not inside.is_set():
            inside.set()
            go.wait(60)

    stop = lz.subscribe(block)
    try:
        lz.clear_cache()
        first = threading.Thread(target=lz.rms_norm, args=(x,))
        first.start()
        assert inside.wait(60)
        done = []
        same = threading.Thread(target=lambda: (done.append(lz.rms_norm(x)),
                                                lz.configure(strict_mode=False)))
        # the very call that is being told of, and a new world
        same.start()
        same.join(60)
        assert len(done) == 1 and not same.is_alive() and first.is_alive()
    finally:
        go.set(), stop()
        first.join(60)


def test_a_subscriber_that_blocks_does_not_stop_the_clock():
    go, blocked = threading.Event(), threading.Event()

    def block(event):
        if threading.current_thread().name.startswith("layerzero"):
            blocked.set()
            go.wait(60)

    register(Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5))
    lz.configure(breaker_threshold=1, breaker_cooldown=0.05)
    stop = lz.subscribe(block)
    try:
        for _ in range(3):
            lz.rms_norm(rows())
            wait_for(lambda: health_of("fake.first").state == "half_open")
        assert blocked.wait(60)
    finally:
        go.set(), stop()
    wait_for(lambda: not events._delivery._queue)


def test_events_of_a_blocked_subscriber_are_bounded():
    go = threading.Event()
    behind = events._DeliveryThread()
    behind.add(lambda: go.wait(60) and None)
    behind._blocked = True
    for _ in range(3 * events.MAX_QUEUED):
        behind.add(lambda: None)
    assert len(behind._queue) <= events.MAX_QUEUED
    go.set()
    wait_for(lambda: not behind._queue)


# the user's own Ctrl-C

def test_a_real_interrupt_in_a_subscriber_goes_on():
    def wait(event):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = lz.subscribe(wait)
    try:
        with pytest.raises(KeyboardInterrupt):
            lz.clear_cache()
    finally:
        stop()
        signal.signal(signal.SIGINT, before)
    torch.testing.assert_close(lz.rms_norm(rows()), normalized(rows()))


def test_a_real_interrupt_by_a_handler_of_the_program_goes_on():
    def handler(number, frame):
        raise KeyboardInterrupt("stopped by the user")

    before = signal.signal(signal.SIGINT, handler)
    stop = lz.subscribe(lambda event: (os.kill(os.getpid(), signal.SIGINT), time.sleep(5)))
    try:
        with pytest.raises(KeyboardInterrupt, match="by the user"):
            lz.clear_cache()
    finally:
        stop()
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_program_whose_subscriber_loops():
    output = python("""
        import os, signal, threading, layerzero as lz
        def loop(event):
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            while True:
                pass
        stop = lz.subscribe(loop)
        try:
            lz.clear_cache()
            print("went on")
        except KeyboardInterrupt:
            stop()
            print("ended")
    """)
    assert output == "ended"


# no lock is held

def test_no_event_is_told_or_emitted_while_a_lock_is_held(monkeypatch, tmp_path):
    """Every lock of the package is asked, at every event of a day in the life of the library."""
    messages, trouble, emit = [], [], events.emit

    def owned():
        return [lock for lock in list(locks._all_locks) if lock._is_owned()]

    def sink(event):
        messages.append(type(event))
        if owned():
            trouble.append((event, "told"))

    def emitting(event):
        if owned():
            trouble.append((event, "emitted"))
        emit(event)

    monkeypatch.setattr(events, "emit", emitting)
    stop = lz.subscribe(sink)
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nsettings: {cache_size: 2}\n")
    try:
        lz.load_config(policy)
        lz.configure(breaker_threshold=1, breaker_cooldown=0.02, policy_poll=0.02, learn=True,
                     perfdb=str(tmp_path / "perf.sqlite"))
        register(Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5),
                 Fake("fake.third", prior=1e4))
        for hidden in range(8, 16):
            lz.rms_norm(rows(hidden=hidden))
        wait_for(lambda: health_of("fake.first").state == "half_open")
        lz.rms_norm(rows())
        policy.write_text("version: 1\nsettings: {cache_size: what}\n")
        wait_for(lambda: any(kind.__name__ == "PolicyRejected" for kind in messages))
        bad = lz.Kernel("fake.unloadable", lz.op("rms_norm"), lambda: __import__("nowhere_at_all"),
                        prior=1e9,
                        less_work="none")
        lz.register(bad)
        lz.rms_norm(rows(hidden=24))
        for _ in range(200):
            lz.rms_norm(rows(hidden=48))
        learning.flush(60), compiling.wait(60)
        lz.unregister("fake.second")
        lz.explain("rms_norm", rows())
    finally:
        stop()
        lz.configure(learn=False)
        learning.reset()
    assert {Selected, HealthChanged, Fallback, WorldPublished, Evicted} <= set(messages)
    assert trouble == []


def test_many_lines_of_one_kind_are_not_all_logged(caplog):
    register(Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5))
    lz.configure(breaker_threshold=10**6)
    with caplog.at_level(logging.WARNING, "layerzero"):
        for _ in range(200):
            lz.rms_norm(rows())
    assert 1 <= sum("fallback" in line for line in caplog.messages) < 100
    assert sum(n for (name, _, kernel), n in events.counts().items() if kernel == "fake.first"
               and name == "fallback") \
        == 200                                 # every one is counted
