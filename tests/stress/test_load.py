"""Many threads, many shapes, and a world that changes under them: every answer right, every call
counted.

LZ_STRESS=full runs them at full size.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time

import pytest
import torch
from helpers import (
    ATTENTION,
    RMS_NORM,
    Fake,
    events_of,
    health_of,
    normalized,
    path_of,
    qkv,
    register,
    rows,
    wait_for,
)

import layerzero as lz
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec.event import Fallback, HealthChanged, Selected
from layerzero.world import context, events
from layerzero.world import snapshot as worlds

pytestmark = [pytest.mark.stress, pytest.mark.usefixtures("frozen_heap", "world")]
FULL = os.environ.get("LZ_STRESS") == "full"
THREADS = 100
CALLS = 10_000 if FULL else 80             # of each thread
SHAPES = 1_000_000 if FULL else 3_000     # by each path


def resident() -> int:
    """Bytes of memory this process holds."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_together(n, work):
    """`work(i)` in n threads at once; what any of them raised is raised here."""
    gate, errors = threading.Barrier(n, timeout=60), []

    def run(i):
        try:
            gate.wait()
            work(i)
        except BaseException as e:
            errors.append(e)

    workers = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(n)]
    for w in workers:
        w.start()
    deadline = time.monotonic() + 240
    for w in workers:
        w.join(max(deadline - time.monotonic(), 0))
    assert not any(w.is_alive() for w in workers), "a thread hangs"
    if errors:
        raise errors[0]


class Disturber:
    """A thread that does `act` over and over while the block lasts; its errors are the test's."""

    def __init__(self, act, pause=0.002):
        self.act, self.pause, self.stop, self.errors, self.times = (act, pause, threading.Event(),
                                                                    [], 0)
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            while not self.stop.is_set():
                self.act(self.times)
                self.times += 1
                self.stop.wait(self.pause)
        except BaseException as e:
            self.errors.append(e)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive() and not self.errors, self.errors


def change_policy(i):
    """Locks, settings, measurements forgotten: each a new world."""
    wide = lz.PolicyRule.of("deny", "torch.*", "rms_norm", {"hidden": "> 40"})
    acts = (lambda: lz.configure(strict_mode=i % 2 == 0),
            lambda: lz.lock("rms_norm", "reference.rms_norm"), lz.unlock,
            lambda: lz.configure(rules=(wide,)), lz.clear_cache)
    acts[i % 5]()


def counted(op="rms_norm"):
    return sum(lz.stats().calls.get(op, {}).values())


def test_a_hundred_threads_over_mixed_shapes_while_the_world_changes(path, emitted):
    call = path_of(RMS_NORM, path)
    cases = [(x, normalized(x)) for x in (rows(n, hidden) for n in (1, 3, 17, 40)
                                          for hidden in (16, 24, 48))]
    flaky = Fake("fake.flaky")
    register(flaky)
    lz.configure(breaker_threshold=2, breaker_cooldown=0.01)
    flaky.fault = RuntimeError("now and then")

    def break_and_mend(i):
        flaky.fault = None if flaky.fault else RuntimeError("now and then")

    def work(i):
        order = random.Random(i)
        for _ in range(CALLS):
            x, want = order.choice(cases)
            got = call(x)
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)

    before = counted()
    with Disturber(change_policy, 0.01) as changes, Disturber(break_and_mend, 0.005):
        run_together(THREADS, work)
    assert counted() - before == THREADS * CALLS           # not one lost, not one twice
    assert changes.times > 10 and worlds.current().epoch > 10
    assert events_of(Fallback, emitted) and events_of(HealthChanged, emitted)
    assert {e.kernel for e in events_of(Fallback, emitted)} == {"fake.flaky"}
    assert not [h for name, h in worlds.current().health.items() if name != "fake.flaky"]


def test_a_hundred_threads_each_with_a_preference_of_its_own(path):
    call, x = path_of(RMS_NORM, path), rows()
    fakes = [Fake(f"fake.k{i}", prior=1e-4) for i in range(10)]
    register(*fakes)
    want, blocks = normalized(x), CALLS // 20 if FULL else 2

    def work(i):
        for _ in range(blocks):
            with lz.prefer(fakes[i % 10].id):
                for _ in range(20):
                    assert torch.allclose(call(x), want, rtol=1e-4, atol=1e-5)

    with Disturber(lambda i: lz.clear_cache(), 0.05):
        run_together(THREADS, work)
    assert [f.calls for f in fakes] == [THREADS // 10 * blocks * 20] * 10
    assert context.current.get() is None


def test_attention_in_many_threads_with_named_kernels_and_policies(path):
    call = path_of(ATTENTION, path)
    cases = [(qkv(seq_q=n, seq_k=m, heads=2, kv_heads=kv, dim=8), layout)
             for n, m in ((1, 5), (4, 4), (3, 20)) for kv in (1, 2) for layout in ("bhsd",)]
    wanted = [ATTENTION.reference(*args, layout=layout) for args, layout in cases]
    how = [{}, {"backend": "reference.attention"}, {"policy": {"strict_mode": True}},
           {"backend": "torch"}]

    def work(i):
        order = random.Random(i)
        for _ in range(CALLS // 10):
            at = order.randrange(len(cases))
            got = call(*cases[at][0], layout=cases[at][1], **order.choice(how))
            assert torch.allclose(got, wanted[at], rtol=1e-4, atol=1e-5)

    before = counted("attention")
    with Disturber(lambda i: lz.clear_cache(), 0.02):
        run_together(THREADS, work)
    assert counted("attention") - before == THREADS * (CALLS // 10)


def test_counts_never_go_back_while_the_world_changes(path):
    call, x, seen, stop = path_of(RMS_NORM, path), rows(), [], threading.Event()
    lz.configure(cache_size=2)
    start = counted()

    def watch():
        while not stop.is_set():
            seen.append(counted())

    watcher = threading.Thread(target=watch)
    watcher.start()
    shapes = [rows(2, h) for h in (8, 16, 24, 32)]
    with Disturber(lambda i: lz.clear_cache(), 0.005):
        run_together(8, lambda i: [call(shapes[n % 4]) for n in range(2 * CALLS)])
    stop.set()
    watcher.join(60)
    call(x)
    assert len(seen) > 3 and seen == sorted(seen)
    assert counted() - start == 8 * 2 * CALLS + 1


def test_a_crowd_before_an_empty_cache_chooses_once_per_kind(path, emitted):
    call, kinds = path_of(RMS_NORM, path), [rows(2, 8 * (1 + i)) for i in range(10)]
    run_together(THREADS, lambda i: [call(x) for x in kinds])
    assert len(events_of(Selected, emitted)) == 10


def test_only_one_call_at_a_time_probes_a_broken_kernel(path):
    call, x = path_of(RMS_NORM, path), rows()
    inside, most, lock = 0, 0, threading.Lock()

    def enter():
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.002)
        with lock:
            inside -= 1

    fake = Fake(fault=RuntimeError("boom"), before=enter)
    register(fake)
    lz.configure(breaker_threshold=1, breaker_cooldown=0.02)
    call(x)
    wait_for(lambda: health_of("fake.one").state == "half_open")
    most = 0
    shapes = [rows(n) for n in range(1, 9)]
    run_together(40, lambda i: [call(shapes[(i + n) % 8]) for n in range(5)])
    assert most == 1 and fake.calls < 40


def test_a_flood_of_shapes_keeps_the_cache_and_the_memory_bounded(path):
    """Each call is of a kind never seen before: the first dimension is bucketed, the last one is
    exact."""
    call, size = path_of(RMS_NORM, path), 512
    lz.register(lz.Kernel("fake.cheap", RMS_NORM, lambda: lambda x: torch.empty_like(x), prior=1e6,
                          less_work="a test"))
    lz.configure(cache_size=size)
    dispatcher, most = dispatcher_of("rms_norm"), 0
    buffer, out = torch.zeros(2 * 200_000), torch.zeros(())
    warm, memory = SHAPES // 4, 0
    for i in range(SHAPES):
        hidden, n = 1 + i % 200_000, 1 + i // 200_000
        out = call(buffer[:hidden].expand(n, hidden) if n > 2
                   else buffer[:n * hidden].view(n, hidden))
        if i % 997 == 0:
            most = max(most, len(dispatcher.cache.table))
            assert dispatcher.native is None or dispatcher.native.compiled.size() <= size
        if i == warm:
            gc.collect()
            memory = resident()
    gc.collect()
    assert 0 < most <= size and out is not None
    assert resident() - memory < 48 << 20
    assert events.counts()["evicted", "rms_norm", ""] >= SHAPES // size - 1


def test_a_flood_of_policies_keeps_the_memory_bounded():
    """Per-call overrides that never repeat, as a service with a deadline per request makes them."""
    x, many = rows(), 20_000 if FULL else 1_500
    memory = 0
    for i in range(many):
        with lz.prefer(memory_headroom=10_000 + i):
            lz.rms_norm(x)
        if i == many // 3:
            gc.collect()
            memory = resident()
    gc.collect()
    assert resident() - memory < 48 << 20
    assert len(context._interned) <= context._MAX_INTERNED
    assert len(worlds.current().memo) <= worlds._MAX_MEMO + 2
