"""Ctrl-C between any two instructions of ours: no lock stays held, nobody waits for ever, and the
next call is right.

An interrupt is raised at the Nth instruction of the call path (machine, world, dispatch, operate),
for one N after the other. By default N goes through a sample that is the same in every run;
SWEEP=all takes every N, which takes an hour.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers import Fake, allow_only, normalized, register, rows, wait_for

import layerzero as lz
from layerzero.dispatch.background import compiling, learning
from layerzero.dispatch.dispatcher import dispatchers
from layerzero.machine import locks
from layerzero.operate import warmup as warming
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.event import Evicted
from layerzero.world import clock, context, events, incidents
from layerzero.world import snapshot as worlds

EVERY = os.environ.get("SWEEP", "") == "all"
POINTS = 60                                    # of one scenario, unless every one is asked for
ROOMS = tuple(f"{Path(lz.__file__).parent / room}{os.sep}"
              for room in ("machine", "world", "dispatch", "operate"))

pytestmark = pytest.mark.usefixtures("world")


class Interrupt:
    """Raises KeyboardInterrupt at the Nth instruction of this thread in those rooms; with N = 0 it
    only counts."""

    def __init__(self, at: int, rooms: tuple[str, ...] = ROOMS) -> None:
        self.at, self.rooms, self.seen, self.where = at, rooms, 0, ""

    def __enter__(self) -> Interrupt:
        sys._getframe().f_trace_opcodes = True # else Python 3.12 traces none the first time
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self.rooms) or code.co_name == "__del__":
            return None                        # what __del__ raises goes nowhere
        # the locks by which threads start are Python's own
        if code.co_filename == threading.__file__ and frame.f_locals.get("self") != warming._lock:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                self.where = (f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in "
                              f"{frame.f_code.co_name}")
                raise KeyboardInterrupt
        return self._step


def in_another_thread(do: Callable[[], Any], where: str) -> Any:
    """What it gives there; it may not wait for anything that does not come."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(do())
        except BaseException as e:
            results.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), f"after an interrupt at {where} another thread hangs"
    if isinstance(results[0], BaseException):
        raise AssertionError(f"after an interrupt at {where}") from results[0]
    return results[0]


def take_every_lock() -> None:
    for lock in list(locks._all_locks):
        assert lock.acquire(timeout=60), "a lock stays held"
        lock.release()
    for plain in (compiling._compile_lock,):
        assert plain.acquire(timeout=60), "the lock of the compiler stays held"
        plain.release()


def check(x: torch.Tensor, where: str) -> None:
    wanted = normalized(x)
    torch.testing.assert_close(in_another_thread(lambda: lz.rms_norm(x), where), wanted)
    torch.testing.assert_close(lz.rms_norm(x), wanted)
    in_another_thread(take_every_lock, where)
    world = worlds.current()
    assert context.current.get() is None
    for name, dispatcher in dispatchers.items():
        if (dispatcher.world is not None and name in world.catalog.ops
            and world.catalog.ops[name] is dispatcher.op):
            assert dispatcher.world is world, (
                f"{name} is in another world after an interrupt at {where}")
            assert dispatcher.globals["TABLE"] is dispatcher.cache.table, where
            under_way = [f for f in dispatcher.cache._flights.values() if f.is_under_way]
            assert not under_way, f"a choice is never made after an interrupt at {where}"
    if world.next_deadline is not None:
        assert (clock._thread is not None
                and clock._thread.is_alive()), f"no clock after an interrupt at {where}"
    seen: list[Any] = []
    stop = lz.subscribe(seen.append)
    events.emit(Evicted("rms_norm", entries=1))
    stop()
    assert any(isinstance(e, Evicted)
               for e in seen), f"events are not told after an interrupt at {where}"


def sweep(prepare: Callable[[], Any], act: Callable[[Any], Any], x: torch.Tensor,
          after: Callable[[str], None] = lambda where: None,
          rooms: tuple[str, ...] = ROOMS) -> None:
    arguments = prepare()
    act(arguments)                             # once as it is: imports and what is made only once
    arguments = prepare()
    with Interrupt(0, rooms) as counter:
        act(arguments)
    total = counter.seen
    assert total > 50, "nothing was traced"
    step = 1 if EVERY else max(total // POINTS, 1)
    raised = 0
    # Not the same place in every round of a loop: the step is odd.
    for at in range(1, total + 1, step | 1):
        arguments = prepare()
        interrupt = Interrupt(at, rooms)
        try:
            with interrupt:
                act(arguments)
        except KeyboardInterrupt:
            raised += 1
        check(x, interrupt.where)
        after(interrupt.where)
    assert raised > 10


def test_a_miss(path):
    x = rows()
    call = dispatcher_of("rms_norm")
    public = call.public if path == "native" else call.python_call
    register(Fake())
    sweep(lz.clear_cache, lambda _: public(x), x)


def test_a_miss_in_which_entries_are_evicted_and_overrides_made():
    x = rows()
    lz.configure(cache_size=2)
    numbers = iter(range(10**9))

    def prepare():
        lz.clear_cache()
        for hidden in (4, 8):
            lz.rms_norm(rows(hidden=hidden))
        return next(numbers)

    sweep(prepare, lambda n: lz.rms_norm(x, policy={"cache_ttl": 1000.0 + n}), x)


def test_a_fallback():
    x = rows()
    register(Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5))
    lz.configure(breaker_threshold=1, breaker_cooldown=600.0)

    def prepare():                             # so that every fallback opens the breaker
        incidents._faults.clear()
        worlds.publish(lambda w: w.replace(health={}), "test")

    sweep(prepare, lambda _: lz.rms_norm(x), x)


def test_a_probe_of_a_half_open_breaker():
    x = rows()
    fake = Fake("fake.first")
    register(fake, Fake("fake.second", prior=1e5))
    lz.configure(breaker_threshold=1, breaker_cooldown=0.005)

    def prepare():
        fake.fault = RuntimeError("boom")
        lz.rms_norm(x)
        fake.fault = None
        end = time.monotonic() + 60
        while ((h := worlds.current().health.get("fake.first")) is not None
               and h.state != "half_open"):
            assert time.monotonic() < end
            time.sleep(0.002)

    def closes(where):
        end = time.monotonic() + 60
        # a probe that nobody ended would keep it out for ever
        while "fake.first" in worlds.current().health:
            assert time.monotonic() < end, where
            lz.rms_norm(x)
            time.sleep(0.002)

    sweep(prepare, lambda _: lz.rms_norm(x), x, closes)


def test_an_explanation():
    x = rows()
    sweep(lz.clear_cache, lambda _: lz.explain("rms_norm", x), x)


def test_a_new_configuration():
    x = rows()
    register(Fake("fake.first"), Fake("fake.second", prior=1e5))
    lz.rms_norm(x)
    names = iter(("fake.first", "fake.second") * 10**6)

    def follows(where):
        message = lz.get_locks()["rms_norm"]["kernel"]
        assert lz.which("rms_norm", x) == message, where
        # and not only by word: what was remembered before is not called
        lz.rms_norm(x)
        assert dispatchers["rms_norm"].cache.table, where
        assert {e.plan.kernel for e in dispatchers["rms_norm"].cache.table.values()} == {
            message}, where

    lz.lock("rms_norm", "fake.first")
    sweep(lambda: next(names), lambda name: lz.lock("rms_norm", name), x, follows)


def test_registering_and_unregistering():
    x, fake = rows(), Fake()

    def prepare():
        if "fake.one" in worlds.current().catalog.by_id:
            lz.unregister("fake.one")
        lz.rms_norm(x)

    def act(_):
        lz.register(fake.kernel)
        lz.rms_norm(x)
        lz.unregister("fake.one")

    sweep(prepare, act, x)


def test_calls_that_are_learned_from_and_their_result(tmp_path):
    x = rows()
    learning.reset()
    lz.configure(learn=True, perfdb=str(tmp_path / "perf.sqlite"))
    try:
        register(Fake("fake.first"), Fake("fake.second", prior=9e5))
        allow_only("fake.first", "fake.second")

        def prepare():
            learning.reset()
            worlds.publish(lambda w: w.replace(perf=type(w.perf)()), "test")
            lz.rms_norm(x)
            assert learning.flush(60)

        def act(_):
            for _ in range(3):
                lz.rms_norm(x)
            learning.publish(list(learning._kinds.values()))

        def nothing_waits(where):
            for kind in list(learning._kinds.values()):
                for _ in range(3):
                    lz.rms_norm(x)
                assert kind.trial.in_flight <= 2, (
                    f"a sample never comes after an interrupt at {where}")

        sweep(prepare, act, x, nothing_waits)
    finally:
        lz.configure(learn=False)
        learning.reset()


def test_handing_a_call_over_to_the_compiler(monkeypatch):
    x = rows()
    dispatcher = dispatcher_of("rms_norm")
    fake = Fake("fake.compiles", jit=True)
    register(fake)
    made: list[Any] = []
    monkeypatch.setattr(compiling, "compile_now", lambda *args: made.append(args))
    plan = worlds.current().plan(dispatcher.op,
                                 dispatcher.facts((x,
                                                   *(p.default for p in dispatcher.op.params[1:]))),
                                 compiled=True)
    step = next(s for s in plan.steps if s.kernel == fake.id)
    values = (x, *(p.default for p in dispatcher.op.params[1:]))

    def prepare():
        assert compiling.wait(60)
        compiling._requested.clear(), compiling._forms.clear(), made.clear()

    def asked_again(where):
        assert compiling.wait(60), where
        # the interrupt came before it was handed over: it may be asked again
        if not made:
            compiling.request(dispatcher, fake.kernel, step, plan.facts, values)
            assert compiling.wait(60) and made, f"nobody compiles after an interrupt at {where}"

    sweep(prepare, lambda _: compiling.request(dispatcher, fake.kernel, step, plan.facts, values),
          x,
          asked_again)


def test_a_warm_up_that_is_waited_for():
    x = rows()
    register(Fake("fake.compiles", jit=True))

    def calls(n):
        return [Call("rms_norm", {"x": TensorSpec((n, 16), "float32")})]

    def idle():
        wait_for(lambda: warming._thread is None or not warming._thread.is_alive(), 60)

    def prepare():
        idle()
        worlds.publish(lambda w: w.replace(warmed=frozenset()), "test")

    def act(_):
        try:
            warming.warmup(calls(40), device="cpu")
        finally:                               # what is compiled already goes on
            idle()

    def the_next_one_is_done(where):
        # this thread does not wait for the lock again, so it gives back nothing that it still holds
        reports = [warming.warmup(calls(70), critical=[])]
        ready = in_another_thread(lambda: reports[0].wait(60), where)
        assert ready and reports[0].ok, f"{reports[0]} after an interrupt at {where}"

    sweep(prepare, act, x, the_next_one_is_done,
          rooms=(str(Path(warming.__file__)), str(Path(threading.__file__))))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_that_was_forked_after_an_interrupt_works():
    x = rows()
    for at in (40, 150, 400, 700):
        lz.clear_cache()
        try:
            with Interrupt(at):
                lz.rms_norm(x)
        except KeyboardInterrupt:
            pass
        child = os.fork()
        if child == 0:
            code = 1
            try:
                lz.configure(strict_mode=False)
                code = (0 if torch.equal(lz.rms_norm(x), normalized(x))
                        or torch.allclose(lz.rms_norm(x), normalized(x)) else 2)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


LOOK_FOR_OWNERS = """
import faulthandler, sys, threading, time
from types import FrameType
from layerzero.machine.locks import stack_of

faulthandler.dump_traceback_later(20, exit=True)


class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        for _ in range(20):                    # another thread may run in here
            pass


def start_threads():
    while time.monotonic() < end:
        thread = threading.Thread(target=lambda: [Cycle() for _ in range(5)])
        thread.start()
        thread.join()


def descend(levels):
    Cycle()
    if levels:
        descend(levels - 1)


def call():
    while time.monotonic() < end:
        descend(20)


def look():
    while time.monotonic() < end:
        for thread in threads:
            assert all(type(frame) is FrameType for frame in stack_of(thread.ident).frames)
        Cycle()


sys.setswitchinterval(1e-5)
end, failed = time.monotonic() + 1.5, []
threading.excepthook = failed.append
threads = [threading.Thread(target=f) for f in (start_threads, start_threads, call, call, look, look)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(str(failed[0]) if failed else 0)
"""


def test_a_waiting_thread_that_looks_for_the_owner_does_not_stop_the_interpreter():
    """CPython before 3.12 does, or gives the memory of a frame to something else: a collection
    starts while it makes the objects of frames, and other threads run in a finalizer."""
    child = subprocess.run([sys.executable, "-c", LOOK_FOR_OWNERS], capture_output=True, text=True,
                           timeout=120)
    assert child.returncode == 0, child.stderr
