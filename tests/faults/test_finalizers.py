"""Code that runs where nobody expects it: a finalizer (the garbage collector runs one at any
allocation, in any thread) or a signal handler that calls our functions, whatever its thread is
doing and holding. Nothing is lost by it, and nobody waits for ever.
"""

from __future__ import annotations

import dis
import itertools
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers import Fake, normalized, register, rows

import layerzero as lz
from layerzero.dispatch.dispatcher import dispatchers
from layerzero.files import codegen
from layerzero.machine import locks, memory
from layerzero.operate.inspection import dispatcher_of
from layerzero.perf.record import Measurement
from layerzero.world import measurements
from layerzero.world import snapshot as worlds

POINTS = 30                                    # of one scenario
PACKAGE = Path(lz.__file__).parent
# instructions at which the interpreter may run a signal handler or the garbage collector
PAUSES = ("CALL", "PRECALL", "RESUME", "JUMP_BACKWARD", "BUILD", "FOR_ITER", "LIST", "BINARY",
          "BEFORE_WITH", "LOAD_ATTR", "LOAD_METHOD", "YIELD", "JUMP_ABSOLUTE")

pytestmark = pytest.mark.usefixtures("world")


class Finalizer:
    """Calls `do` at the Nth pause of this thread in our files; with N = 0 it only counts."""

    def __init__(self, at: int, do: Callable[[], Any]) -> None:
        self.at, self.do, self.seen, self.where = at, do, 0, ""

    def __enter__(self) -> Finalizer:
        sys._getframe().f_trace_opcodes = True # else Python 3.12 traces none the first time
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if event == "opcode" and dis.opname[code.co_code[frame.f_lasti]].startswith(PAUSES):
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
                self.do()
        return self._step


def sweep(act: Callable[[], Any], do: Callable[[], Any]) -> Iterator[str]:
    """Runs `act` again and again, and `do` within it at another place each time, which is yielded
    after both have ended."""
    act()
    with Finalizer(0, do) as counter:
        act()
    assert counter.seen > 10, "nothing was traced"
    # Not the same place in every round of a loop: the step is odd.
    for at in range(1, counter.seen + 1, max(counter.seen // POINTS, 1) | 1):
        with Finalizer(at, do) as finalizer:
            act()
        if finalizer.where:
            yield finalizer.where


def in_threads(*functions: Callable[[], Any]) -> None:
    """Runs them at once; none may wait for what does not come."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it hangs"


def test_what_is_configured_within_another_configuration_is_not_lost():
    x, numbers, names = rows(), itertools.count(100), itertools.cycle(("fake.first", "fake.second"))
    register(Fake("fake.first"), Fake("fake.second", prior=1e5))
    lz.rms_norm(x)
    chosen: dict[str, Any] = {}

    def lock() -> None:
        chosen["kernel"] = next(names)
        lz.lock("rms_norm", chosen["kernel"])

    def configure() -> None:
        chosen["size"] = next(numbers)
        lz.configure(cache_size=chosen["size"])

    for where in sweep(lock, configure):
        world = worlds.current()
        assert world.policy.setting("cache_size") == chosen["size"], where
        assert lz.get_locks()["rms_norm"]["kernel"] == chosen["kernel"], where
        for dispatcher in dispatchers.values():
            assert dispatcher.world in (None, world), f"left behind at {where}"
        torch.testing.assert_close(lz.rms_norm(x), normalized(x))
        assert dispatchers["rms_norm"].cache.size == chosen["size"], where
        assert lz.which("rms_norm", x) == chosen["kernel"], where


def test_what_is_measured_while_measurements_are_written_is_written_too(tmp_path):
    lz.configure(perfdb=str(tmp_path / "perf.sqlite"))
    kernel, numbers, recorded = dispatcher_of("rms_norm").op.name, itertools.count(), set()

    def record() -> None:
        bucket = f"bucket {next(numbers)}"
        measurements.record([Measurement("torch.rms_norm", kernel, bucket, "somewhere", 1.0)])
        recorded.add(bucket)

    for where in sweep(record, record):
        measurements.retry_save()              # as its timer would
        with measurements.store(read_only=True) as store:
            assert {m.bucket for m in store.rows()} == recorded, where


def test_who_subscribes_while_another_subscribes_is_called():
    seen: list[Any] = []
    stops: list[Callable[[], None]] = []

    def subscribe_and_stop() -> None:
        for stop in [lz.subscribe(lambda event: None) for _ in range(2)]:
            stop()

    for where in sweep(subscribe_and_stop, lambda: stops.append(lz.subscribe(seen.append))):
        seen.clear()
        lz.clear_cache()
        assert seen, where
        stops.pop()()
        seen.clear()
        lz.clear_cache()
        assert not seen, where


def test_generated_code_keeps_its_text_while_code_of_the_same_text_ends():
    source, kept = "def f():\n    return 1\n", []

    def compile_and_forget() -> None:
        codegen.compile(source, "finalizer")

    for where in sweep(lambda: kept.append(codegen.compile(source, "finalizer")),
                       compile_and_forget):
        assert codegen.text(kept[-1]) == source, where
        kept.clear()
        assert not any(file.startswith("<lz finalizer") for file in linecache.cache), where


def test_a_selection_within_a_selection_that_counts_memory():
    def record(served: int) -> None:
        memory.record_need("rms_norm", "cpu", served, 0)

    def check() -> None:
        for _ in sweep(lambda: record(1), lambda: record(2)):
            pass

    in_threads(check)
    memory.forget()


@pytest.mark.parametrize("call", ["configure", "call"])
def test_threads_that_wait_for_each_other_go_on(call):
    """One publishes a world and wants the lock of a ledger; the other holds that lock when its
    finalizer runs, which wants to publish as well, or to have what the first one selects."""
    x, dispatcher = rows(hidden=48), dispatcher_of("rms_norm")
    register(Fake("fake.first"))
    lz.rms_norm(rows())
    holds, publishes = threading.Event(), threading.Event()
    done: list[str] = []

    def publish() -> None:
        def change(world: worlds.World) -> worlds.World:
            publishes.set()
            return world.replace(catalog=world.catalog.with_item(Fake("fake.second").kernel, "t"))

        holds.wait(30)
        worlds.publish(change, "test")
        done.append("published")

    def finalize() -> None:
        with dispatcher.ledger._lock:          # as Ledger.add holds it
            holds.set()
            publishes.wait(30)
            if call == "configure":
                lz.configure(cache_size=77)
            else:
                torch.testing.assert_close(lz.rms_norm(x), normalized(x))
        done.append("finalized")

    in_threads(publish, finalize)
    assert sorted(done) == ["finalized", "published"]
    assert "fake.second" in worlds.current().catalog.by_id
    assert worlds.current().policy.setting("cache_size") == 77 or call == "call"
    assert not locks._waiting and not locks._loans


def test_a_circle_of_many_threads_and_locks_ends_with_every_section_whole():
    """Each section reads, waits for another lock, and writes: nobody else may come between."""
    every, counts = [locks.Lock() for _ in range(4)], [0] * 4
    start = threading.Barrier(4)

    def work(i: int) -> Callable[[], None]:
        def run() -> None:
            start.wait(30)
            for n in range(5):
                first, second = i, (i + 1 + n % 3) % 4
                with every[first], every[second]:
                    before = counts[second]
                    for _ in range(200):
                        pass
                    counts[second] = before + 1
        return run

    in_threads(*(work(i) for i in range(4)))
    assert sum(counts) == 20
    assert not locks._waiting and not locks._loans


def test_no_dict_that_outlives_a_call_is_listed_with_its_items():
    """`list(d.items())` makes tuples, so that a collection may start in it and a finalizer change
    the dict, which is a RuntimeError. `d.copy().items()` copies it in one step."""
    listed = re.compile(r"\blist\((_|self\.|[a-z]+\.)[a-z_.]*\.items\(\)")
    assert not [(path, found[0]) for path in PACKAGE.rglob("*.py")
                if (found := listed.search(path.read_text()))]
