"""Ever new policies, names, sizes and settings: what is remembered of them is bounded, and so is
what a call costs.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
import time
import warnings

import pytest
import torch
from helpers import ATTENTION, Fake, events_of, normalized, path_of, qkv, register, rows

import layerzero as lz
from layerzero.dispatch.background import learning
from layerzero.dispatch.dispatcher import dispatchers
from layerzero.selection.policy import Layer
from layerzero.spec.event import WorldPublished
from layerzero.world import context, events, incidents
from layerzero.world import snapshot as worlds

pytestmark = pytest.mark.usefixtures("frozen_heap", "world")


def entries_held() -> int:
    """Entries of every table that calls can add to."""
    world = worlds.current()
    return len(world.memo) + len(context._call_overrides) + len(context._interned) + len(
        world.extra_leaves) + sum(
        len(d.cache.table) + len(d._bindings) + len(d.ledger._open) for d in dispatchers.values())


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.fixture
def small(monkeypatch):
    """The same limits, small enough to be reached in a test."""
    monkeypatch.setattr(context, "_MAX_CALLS", 32)
    monkeypatch.setattr(context, "_MAX_INTERNED", 64)
    monkeypatch.setattr(worlds, "_MAX_MEMO", 64)
    context._call_overrides.clear(), context._interned.clear()
    lz.configure(cache_size=64)
    for dispatcher in dispatchers.values():
        dispatcher.ledger._limit = 0           # not what many entries of another test made it
    yield
    context._call_overrides.clear(), context._interned.clear()


def growth(call, rounds: int = 3, calls: int = 150) -> tuple[list[int], int]:
    """How many objects there are after each round of ever new numbers, and the most entries held.

    The most, as tables that are full are emptied in part: what they hold at one moment swings."""
    numbers = iter(range(10**9))
    results, most = [], 0
    for _ in range(rounds):
        for i in range(calls):
            call(next(numbers))
            if i % 7 == 0:                      # counting takes longer than a call
                most = max(most, entries_held())
        results.append(objects())
    return results, most


def assert_bounded(call) -> None:
    _, before = growth(call, 1, 300)            # fills the tables
    result, most = growth(lambda n: call(10**6 + n))
    assert most <= before + 150                 # one for each call would be 450
    if result[-1] - result[0] >= 2000:          # what was loaded once meanwhile is no leak
        result, _ = growth(lambda n: call(2 * 10**6 + n))
    # a leak of one object a call is 300, and of an override some thousands
    assert result[-1] - result[0] < 2000, result


def test_policies_with_ever_new_numbers(small, path):
    run, x = path_of("rms_norm", path), rows()
    assert_bounded(lambda n: run(x, policy={"cache_ttl": 10.0 + n}))
    torch.testing.assert_close(run(x), normalized(x))


def test_policies_with_ever_new_rules(small, path, emitted):
    run, x = path_of("rms_norm", path), rows()
    register(Fake())

    def call(n: int) -> None:
        deny = lz.PolicyRule.of("deny", "fake.one", "rms_norm", {"hidden": f"> {n}"})
        run(x, policy=Layer("call", {}, (deny,)))
        emitted[:] = events_of(WorldPublished, emitted)     # what the test itself remembers

    growth(call, 1, 100)                        # beyond what is put into the keys
    program = worlds.current().program(lz.op("rms_norm"))
    emitted.clear()
    assert_bounded(call)
    assert len(worlds.current().extra_leaves) <= incidents.MAX_EXTRA_TESTS
    assert worlds.current().program(lz.op("rms_norm")) is program
    assert events_of(WorldPublished, emitted) == []  # so that nobody else's choices are forgotten


def test_rules_beyond_the_bound_are_obeyed(path):
    run = path_of("attention", path)
    register(Fake("fake.attention", ATTENTION))
    for n in range(2 * incidents.MAX_EXTRA_TESTS):
        with lz.prefer("fake.attention", op="attention", when={"seq_k": f"> {1000 + n}"}):
            run(*qkv(2, 4))
    short, long = qkv(2, 700), qkv(2, 701)
    deny = Layer("call", {},
                 (lz.PolicyRule.of("deny", "fake.attention", "attention", {"seq_k": "> 700"}),))
    for q, served in ((short, 1), (long, 0), (short, 1), (long, 0)):
        before = lz.stats().calls["attention"].get("fake.attention", 0)
        torch.testing.assert_close(run(*q, policy=deny), ATTENTION.reference(*q))
        assert lz.stats().calls["attention"].get("fake.attention", 0) - before == served
    lz.clear_cache()
    assert not worlds.current().extra_leaves   # and there is room again


def test_backends_with_many_names(small):
    x = rows()

    def call(n: int) -> None:
        with pytest.raises(lz.errors.NamedKernelRefused):
            lz.rms_norm(x, backend=f"nobody.number{n}")

    assert_bounded(call)


def test_contexts_of_many_threads(small):
    x = rows()

    def call(n: int) -> None:
        def work() -> None:
            with lz.prefer("reference.*", cache_ttl=10.0 + n):
                lz.rms_norm(x)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert_bounded(call)


def test_a_policy_that_is_used_all_the_time_stays(small):
    x, regular = rows(), {"cache_ttl": 77.0}
    first = context.override_for_call(None, regular)
    for n in range(500):
        lz.rms_norm(x, policy={"cache_ttl": 1000.0 + n})
        lz.rms_norm(x, policy=regular)
    assert context.override_for_call(None, regular) is first


def test_many_shapes_and_dtypes(small):
    def call(n: int) -> None:
        dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float16)[n % 4]
        lz.rms_norm(rows(1, 1 + n % 997).to(dtype))

    assert_bounded(call)


def test_many_numbers_of_threads(small, tmp_path):
    before = torch.get_num_threads()
    learning.reset()
    lz.configure(learn=True, perfdb=str(tmp_path / "perf.sqlite"))
    try:
        def call(n: int) -> None:
            torch.set_num_threads(1 + n % 32)
            lz.clear_cache() if n % 32 == 0 else None
            lz.rms_norm(rows(hidden=8 + n % 5))

        assert_bounded(call)
    finally:
        torch.set_num_threads(before)
        lz.configure(learn=False)
        learning.reset()


def test_events_of_many_kinds_are_bounded():
    from layerzero.spec.event import Fallback
    events.reset()
    for n in range(events.MAX_COUNTERS + 100):
        events.emit(Fallback("op", f"kernel{n}", "other"))
    assert (len(events._lines) <= events.MAX_COUNTERS and len(events._counts) <= events.MAX_COUNTERS
            + 100)
    assert sum(n for (name, op, _), n in events.counts().items()
               if (name, op) == ("fallback", "op")) \
        == events.MAX_COUNTERS + 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def exit_code(child: int, seconds: float) -> int | None:
    """Of a child process; None if it does not end by itself: it is asked for its stacks and killed.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGUSR1)
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_a_fork_in_the_middle_of_all_that(small, tmp_path):
    """Threads call with ever new policies, register, fail and configure; children are forked
    meanwhile."""
    stacks = (tmp_path / "stacks").open("w+")
    faulthandler.register(signal.SIGUSR1, stacks)
    x, end, trouble, codes = rows(), threading.Event(), [], []
    register(Fake("fake.flaky", fault=RuntimeError("boom")), Fake("fake.good", prior=1e5))
    lz.configure(breaker_cooldown=0.01, breaker_threshold=2)

    def attack(which: int) -> None:
        n = 0
        try:
            while not end.is_set():
                n += 1
                if which == 0:
                    lz.rms_norm(x, policy={"cache_ttl": 10.0 + n})
                elif which == 1:
                    fake = Fake(f"fake.number{n}", prior=1.0)
                    register(fake)
                    lz.rms_norm(x)
                    lz.unregister(fake.id)
                elif which == 2:
                    lz.rms_norm(x, policy=Layer("call", {}, (lz.PolicyRule.of(
                        "deny", "fake.good", "rms_norm", {"hidden": f"> {n}"}),)))
                else:
                    lz.configure(strict_mode=bool(n % 2))
        except BaseException as e:
            trouble.append(e)

    threads = [threading.Thread(target=attack, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    for n in range(5):
                        lz.configure(strict_mode=bool(n % 2))
                        good = torch.allclose(lz.rms_norm(x, policy={"cache_ttl": 5.0 + n}),
                                              normalized(x), atol=1e-5)
                        code = 0 if good else 2
                finally:
                    os._exit(code)
            codes.append(exit_code(child, seconds=20))
    finally:
        end.set()
        for thread in threads:
            thread.join(60)
        faulthandler.unregister(signal.SIGUSR1)
    assert not trouble
    # Once in more than a thousand forks a child hung, and it is not known on what: locks of torch
    # are not reset in a child. One of ours that a fork leaves taken would stop most of them.
    if None in codes:
        stacks.seek(0)
        warnings.warn(f"a forked child hung:\n{stacks.read()}", stacklevel=1)
    assert codes.count(0) >= 7 and set(codes) <= {0, None}, codes
