"""Workers forked after the library was used: their calls work, nothing they need is held by a
thread that is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback

import pytest
import torch
from helpers import (
    RMS_NORM,
    Fake,
    faults_of,
    health_of,
    normalized,
    path_of,
    register,
    rows,
    wait_for,
)

import layerzero as lz
from layerzero.operate.inspection import dispatcher_of
from layerzero.world import clock
from layerzero.world import snapshot as worlds

pytestmark = [pytest.mark.stress, pytest.mark.usefixtures("world"),
              pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
              pytest.mark.filterwarnings(
                  "ignore:.*use of fork\\(\\) may lead to deadlocks.*:DeprecationWarning")]


def same(got, want):
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


def in_child(work, seconds=60.0):
    """Run `work` in a forked child; the child's error is the test's, and a child that hangs is
    killed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # torch's own thread pool does not survive a fork
            torch.set_num_threads(1)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, "the child failed; see its trace above"
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGABRT)                           # so that it says where it hangs
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {seconds} s")


def test_a_child_calls_configures_and_falls_back(path):
    call, x = path_of(RMS_NORM, path), rows()
    first, second = Fake("fake.first"), Fake("fake.second", prior=1e5)
    register(first, second)
    call(x)

    def work():
        same(call(x), normalized(x))     # remembered
        same(call(rows(40)), normalized(rows(40)))
        first.fault = RuntimeError("boom")
        same(call(x), normalized(x))
        assert second.calls == 1 and faults_of("fake.first") == 1
        lz.lock("rms_norm", "reference.rms_norm")
        call(x)
        assert first.calls == 4
        out = []
        worker = threading.Thread(target=lambda: out.append(call(x)))
        worker.start()
        worker.join(60)
        same(out[0], normalized(x))

    in_child(work)
    assert first.fault is None and faults_of("fake.first") == 0      # the parent's count is its own
    call(x)
    assert first.calls == 2


def test_the_clock_goes_on_in_the_child(path):
    call, x = path_of(RMS_NORM, path), rows()
    fake = Fake(fault=RuntimeError("boom"))
    register(fake)
    lz.configure(breaker_threshold=1, breaker_cooldown=0.3)
    call(x)
    assert health_of("fake.one") is not None

    def work():
        wait_for(lambda: health_of("fake.one").state == "half_open")
        assert clock._thread is None or clock._thread.is_alive()
        lz.configure(disabled=True, seconds=0.1)
        wait_for(lambda: not lz.get_config()["settings"]["disabled"])

    in_child(work)
    wait_for(lambda: health_of("fake.one").state == "half_open")


def test_the_clock_goes_on_also_if_it_was_at_work_when_the_fork_came(monkeypatch):
    busy, leave, pass_time = threading.Event(), threading.Event(), worlds.apply_deadlines

    def hold_the_clock(now):
        if threading.current_thread().name == "layerzero-clock":
            busy.set()
            leave.wait(60)
        pass_time(now)

    monkeypatch.setattr(worlds, "apply_deadlines", hold_the_clock)
    lz.configure(breaker_threshold=1, breaker_cooldown=0.05)
    register(Fake(fault=RuntimeError("boom")))
    lz.rms_norm(rows())
    try:
        assert busy.wait(60)

        def work():
            leave.set()
            wait_for(lambda: health_of("fake.one").state == "half_open")

        in_child(work)
    finally:
        leave.set()


def test_a_child_does_not_wait_for_a_choice_that_a_thread_of_the_parent_was_making(path):
    call, x = path_of(RMS_NORM, path), rows()
    entered, leave = threading.Event(), threading.Event()
    parent = os.getpid()

    def slow_load():
        if os.getpid() == parent:
            entered.set()
            leave.wait(60)
        return RMS_NORM.reference

    lz.register(lz.Kernel("fake.slow", RMS_NORM, slow_load, prior=1e6, less_work="a test"))
    worker = threading.Thread(target=lambda: call(x))
    worker.start()
    try:
        assert entered.wait(60)
        in_child(lambda: same(call(x), normalized(x)))
    finally:
        leave.set()
        worker.join(60)


def test_a_child_may_probe_what_a_thread_of_the_parent_was_probing(path):
    call, x = path_of(RMS_NORM, path), rows()
    entered, leave = threading.Event(), threading.Event()
    parent = os.getpid()
    fake = Fake(fault=RuntimeError("boom"))
    register(fake)
    lz.configure(breaker_threshold=1, breaker_cooldown=0.02)
    call(x)
    wait_for(lambda: health_of("fake.one").state == "half_open")
    fake.fault, fake.before = None, lambda: os.getpid() == parent and (entered.set(),
                                                                       leave.wait(60))
    worker = threading.Thread(target=lambda: call(x))
    worker.start()
    try:
        assert entered.wait(60)

        def work():
            call(x)
            assert health_of("fake.one") is None           # it was free to try, and cleared it

        in_child(work)
    finally:
        leave.set()
        worker.join(60)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="a cached_property has no lock there")
def test_a_child_is_not_held_up_by_a_value_that_a_thread_of_the_parent_was_computing():
    lock, held, leave = type(worlds.current().policy).__dict__[
        "settings"].lock, threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(60)
        in_child(lambda: (lz.configure(strict_mode=True), lz.rms_norm(rows())))
    finally:
        leave.set()
        holder.join(60)


def test_children_forked_in_the_middle_of_everything(path):
    """While threads call, miss, publish and emit: some lock is held at nearly every moment."""
    call, stop, errors = path_of(RMS_NORM, path), threading.Event(), []
    shapes = [rows(2, h) for h in range(8, 72, 8)]

    def disturb():
        lz.clear_cache()
        with lz.prefer("reference.*"):
            call(shapes[0])

    def make_calls():
        for x in shapes:
            call(x)
        lz.stats()

    def over_and_over(act):
        try:
            while not stop.wait(0.0005):
                act()
        except BaseException as e:
            errors.append(e)

    workers = [threading.Thread(target=over_and_over, args=(act,))
               for act in (disturb, make_calls, make_calls)]
    for w in workers:
        w.start()

    def work():
        for x in shapes:
            same(call(x), normalized(x))
        lz.configure(strict_mode=True)
        with lz.prefer("reference.*"):
            call(shapes[0])
        assert dispatcher_of("rms_norm").world is worlds.current() and lz.stats().calls["rms_norm"]

    try:
        for _ in range(12):
            in_child(work)
    finally:
        stop.set()
        for w in workers:
            w.join(60)
    assert errors == []


def _square(n: int) -> float:
    x = rows(1 + n % 7, 16)
    same(lz.rms_norm(x), normalized(x))
    return float(n * n)


def test_a_pool_of_forked_workers():
    lz.rms_norm(rows())
    with multiprocessing.get_context("fork").Pool(3, torch.set_num_threads, (1,)) as pool:
        assert pool.map_async(_square, range(60)).get(timeout=60) == [float(n * n)
                                                                      for n in range(60)]


def test_a_child_of_a_child():
    x = rows()
    lz.rms_norm(x)
    in_child(lambda: in_child(lambda: same(lz.rms_norm(x), normalized(x))), 90)
