"""Memory that runs short while choices are remembered, kernels that run out of it too often, and
calls that hang.
"""

from __future__ import annotations

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
    path_of,
    qkv,
    register,
    rows,
    wait_for,
)

import layerzero as lz
from layerzero.machine import memory
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec.event import Fallback, KernelRefused
from layerzero.spec.reason import Code
from layerzero.world import clock, incidents
from layerzero.world import snapshot as worlds

MB, GB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def nothing_noted(world):
    memory.forget()
    incidents._shortages.clear()
    yield
    memory.forget()
    incidents._shortages.clear()


@pytest.fixture
def free(monkeypatch):
    """How much memory is free, as the test says."""
    class Free:
        bytes = 64 * GB

    monkeypatch.setattr(memory, "free_bytes", lambda kind: Free.bytes)
    monkeypatch.setattr(memory, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(memory, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(memory, "RELAXED_CHECK_SECONDS", 0.02)
    return Free


def serving(op, kernel):
    return [e for e in dispatcher_of(op).cache.table.values() if e.plan.kernel == kernel]


# free memory falls, and comes back

def test_a_remembered_greedy_kernel_is_reconsidered_when_memory_falls(path, free, emitted):
    greedy = Fake("fake.greedy", workspace=f"{GB}")
    register(greedy)
    call, x = path_of(RMS_NORM, path), rows()
    for _ in range(3):
        call(x)
    assert greedy.calls == 3
    free.bytes = GB // 2
    wait_for(lambda: not serving("rms_norm", "fake.greedy"))       # by the clock: no call was made
    call(x)
    assert greedy.calls == 3
    assert [r.code for r in lz.explain("rms_norm", x).why_not("fake.greedy")] == [
        Code.MEMORY_HEADROOM_EXCEEDED]
    free.bytes = 64 * GB
    wait_for(lambda: (call(x), greedy.calls)[1] > 3)               # and it comes back by itself


def test_only_the_ops_that_it_concerns_choose_anew(path, free):
    register(Fake("fake.greedy", workspace=f"{GB}"), Fake("fake.plain", ATTENTION))
    call, other = path_of(RMS_NORM, path), path_of(ATTENTION, path)
    call(rows())
    other(*qkv())
    kept, version = serving("attention", "fake.plain"), worlds.current().version("attention")
    assert kept
    free.bytes = MB
    wait_for(lambda: not serving("rms_norm", "fake.greedy"))
    assert (serving("attention", "fake.plain") == kept
            and worlds.current().version("attention") == version)


def test_where_nothing_needs_memory_the_clock_has_nothing_to_look_at(path):
    register(Fake("fake.plain"))
    path_of(RMS_NORM, path)(rows())
    assert memory.next_check() is None


def test_memory_that_moves_without_changing_a_choice_publishes_nothing(path, free):
    register(Fake("fake.greedy", workspace=f"{MB}"))
    path_of(RMS_NORM, path)(rows())
    epoch, first = worlds.current().epoch, memory.next_check()
    for step in range(20):
        free.bytes = (64 - step) * GB
        time.sleep(0.01)
    wait_for(lambda: memory.next_check() != first)                 # it did look
    assert worlds.current().epoch == epoch


def test_a_configured_headroom_is_what_the_clock_goes_by(path, free):
    greedy = Fake("fake.greedy", workspace=f"{MB}")
    register(greedy)
    lz.configure(memory_headroom=2 * MB)
    call, x = path_of(RMS_NORM, path), rows()
    call(x)
    free.bytes = 0
    first = memory.next_check()
    wait_for(lambda: memory.next_check() != first)
    call(x)
    assert greedy.calls == 2


def test_small_workspaces_count_too(path, free):
    """Sixteen megabytes each: none is large, and there is no room for one."""
    small = Fake("fake.small", workspace=f"{16 * MB}")
    register(small)
    free.bytes = 15 * MB
    call, x = path_of(RMS_NORM, path), rows()
    call(x)
    assert small.calls == 0
    free.bytes = GB
    wait_for(lambda: (call(x), small.calls)[1])


def test_a_table_s_choice_is_reconsidered_too(free, path):
    greedy = Fake("fake.greedy", workspace=f"{GB}")
    register(greedy)
    specs = {"x": lz.testing.TensorSpec((4, 64), "float32"),
             "weight": lz.testing.TensorSpec((64,), "float32")}
    lz.tables.use_table(lz.tables.solve([lz.testing.Call("rms_norm", specs)], device="cpu"))
    call, x, weight = path_of(RMS_NORM, path), rows(4, 64), torch.ones(64)
    call(x, weight)
    assert greedy.calls == 1
    free.bytes = MB
    wait_for(lambda: not serving("rms_norm", "fake.greedy"))
    call(x, weight)
    assert greedy.calls == 1
    free.bytes = 64 * GB
    wait_for(lambda: (call(x, weight), greedy.calls)[1] > 1)


def test_a_burst_of_misses_asks_once(monkeypatch, path):
    asked = []
    monkeypatch.setattr(memory, "free_bytes", lambda kind: asked.append(kind) or GB)
    monkeypatch.setattr(memory, "FRESH_SECONDS", 60.0)
    register(Fake("fake.greedy", workspace=f"{MB}"))
    for n in range(1, 17):
        path_of(RMS_NORM, path)(rows(n))
    assert len(asked) == 1


# containers

@pytest.mark.parametrize(("files", "want"), [
    ({"memory.max": "1000000\n", "memory.current": "300000\n"}, 700_000),
    ({"memory.max": "max\n", "memory.current": "300000\n"}, memory.UNLIMITED),
    ({"memory.max": "1000\n", "memory.current": "5000\n"}, 0),
    ({"memory.max": "1000000\n", "memory.current": "900000\n",
      "memory.stat": "anon 5\ninactive_file 400000\nactive_file 7\n"}, 500_000),
    ({"memory/memory.limit_in_bytes": "1000000\n", "memory/memory.usage_in_bytes": "400000\n"},
     600_000),
    ({"memory.max": "rubbish", "memory.current": ""}, memory.UNLIMITED),
    ({}, memory.UNLIMITED)])
def test_the_limit_of_a_container_is_the_limit(tmp_path, monkeypatch, files, want):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_cgroup_folders", lambda: (tmp_path,))
    assert memory.cgroup_free() == want
    assert memory.free_bytes("cpu") <= want


# out of memory again and again

def test_repeated_out_of_memory_moves_the_choice(path, emitted):
    greedy, modest = Fake("fake.greedy", fault=torch.OutOfMemoryError("8 GiB")), Fake("fake.modest",
                                                                                      prior=1e5)
    register(greedy, modest)
    call, x = path_of(RMS_NORM, path), rows()
    for _ in range(20):
        torch.testing.assert_close(call(x), RMS_NORM.reference(x))
    assert greedy.calls == 3 and modest.calls == 20
    assert len(events_of(Fallback, emitted)) == 3
    (refused,) = events_of(KernelRefused, emitted)
    assert refused.kernel == "fake.greedy" and refused.reason.code is Code.OUT_OF_MEMORY
    # its breaker has nothing to do with it
    assert health_of("fake.greedy") is None
    greedy.fault = None
    # other kinds of calls are served as before
    call(rows(300, 16))
    assert greedy.calls == 4


def test_it_comes_back_and_stays_away_longer_each_time(path):
    def readmit():                             # as if its time were up
        now = time.monotonic()
        for shortage in incidents._shortages.values():
            shortage.ends_at = now
        worlds.publish(
            lambda w: w.replace(refused_until=dict.fromkeys(w.refused_until, now)), "test")

    lz.configure(breaker_cooldown=60)
    greedy = Fake("fake.greedy", fault=MemoryError("no"))
    register(greedy)
    call, x = path_of(RMS_NORM, path), rows()
    for _ in range(5):
        call(x)
    assert greedy.calls == 3
    readmit()
    wait_for(lambda: (call(x), greedy.calls)[1] == 4)              # back, and at once out again
    (shortage,) = incidents._shortages.values()
    assert shortage.cooldown == pytest.approx(120)
    for _ in range(5):
        call(x)
    assert greedy.calls == 4
    greedy.fault = None
    readmit()
    wait_for(lambda: (call(x), greedy.calls)[1] > 10)              # it fits now, and stays
    assert not worlds.current().refused_until and not worlds.current().refused.get("fake.greedy")


def test_other_ops_keep_what_they_remember(path):
    register(Fake("fake.greedy", fault=MemoryError("no")), Fake("fake.plain", ATTENTION))
    path_of(ATTENTION, path)(*qkv())
    version = worlds.current().version("attention")
    for _ in range(10):
        path_of(RMS_NORM, path)(rows())
    assert worlds.current().version("attention") == version


def test_a_named_kernel_is_tried_all_the_same(path):
    greedy = Fake("fake.greedy", fault=MemoryError("no"))
    register(greedy)
    call, x = path_of(RMS_NORM, path), rows()
    for _ in range(10):
        call(x)
    with pytest.raises(lz.errors.KernelExecutionError, match="ran out of memory"):
        call(x, backend="fake.greedy")
    greedy.fault = None
    torch.testing.assert_close(call(x, backend="fake.greedy"), RMS_NORM.reference(x))


def test_now_and_then_out_of_memory_moves_nothing(path):
    greedy = Fake("fake.greedy")
    register(greedy)
    call, x = path_of(RMS_NORM, path), rows()
    for n in range(300):
        greedy.fault = MemoryError("no") if n % 60 == 59 else None
        call(x)
    assert greedy.calls == 300


def test_where_everybody_is_out_of_memory_nobody_is_left_out(path):
    fakes = [Fake(f"fake.k{i}", fault=MemoryError("no"), prior=10.0 ** (8 - i)) for i in range(2)]
    register(*fakes)
    only = [k.id for k in worlds.current().catalog.kernels if not k.id.startswith("fake.")]
    lz.configure(rules=(lz.PolicyRule.of("deny", only),))
    for _ in range(10):
        with pytest.raises(lz.errors.KernelExecutionError):
            path_of(RMS_NORM, path)(rows())
    assert [f.calls for f in fakes] == [10, 10] and not worlds.current().refused


def test_unregistering_forgets_the_shortage(path):
    register(Fake("fake.greedy", fault=MemoryError("no")))
    for _ in range(5):
        path_of(RMS_NORM, path)(rows())
    assert incidents._shortages and worlds.current().refused_until
    lz.unregister("fake.greedy")
    assert not incidents._shortages and not worlds.current().refused_until


def test_kinds_without_end_are_bounded(path, monkeypatch):
    monkeypatch.setattr(incidents, "MAX_REFUSALS", 8)
    greedy = Fake("fake.greedy", fault=MemoryError("no"))
    register(greedy)
    for n in range(1, 17):
        for _ in range(3):
            path_of(RMS_NORM, path)(rows(n))
    assert len(incidents._shortages) <= 8 and len(worlds.current().refused["fake.greedy"]) <= 8


# calls that hang

def test_a_call_that_hangs_is_bounded_where_policy_says_so(path, emitted):
    release = threading.Event()
    hanging = Fake("fake.hanging", before=lambda: release.wait(60))
    register(hanging)
    lz.configure(call_timeout=0.2)
    call, x = path_of(RMS_NORM, path), rows()
    try:
        with pytest.raises(
                lz.errors.KernelExecutionError,
                match=r"fake\.hanging did not finish within 0\.2 s") as caught:
            call(x)
        assert caught.value.codes == (Code.KERNEL_TIMEOUT,)
        # the next call does not wait again
        assert health_of("fake.hanging").state == "open"
        lz.configure(call_timeout=60)          # torch's own may be slow today
        torch.testing.assert_close(call(x), RMS_NORM.reference(x))
        assert hanging.calls == 1
    finally:
        release.set()


def test_a_limit_changes_nothing_else(path):
    good = Fake("fake.good")
    register(good)
    call, x = path_of(RMS_NORM, path), rows()
    with lz.prefer(call_timeout=30.0):
        for _ in range(3):
            torch.testing.assert_close(call(x), RMS_NORM.reference(x))
        with torch.inference_mode():
            assert call(x).is_inference()
        weight = torch.ones(16, requires_grad=True)
        with torch.no_grad():
            assert not call(x, weight).requires_grad
        # not bounded: a gradient is recorded
        assert call(x, weight).requires_grad
    good.fault = ValueError("odd")
    with lz.prefer(call_timeout=30.0), pytest.raises(lz.errors.KernelExecutionError, match="odd"):
        call(x, backend="fake.good")


def test_the_kernel_that_is_tried_next_is_bounded_too(path):
    release = threading.Event()
    register(Fake("fake.broken", fault=RuntimeError("no"), prior=1e7),
             Fake("fake.hanging", before=lambda: release.wait(60)))
    lz.configure(call_timeout=0.2)
    try:
        for _ in range(20):                    # on a busy machine the broken one may need 0.2 s
            with pytest.raises(lz.errors.KernelExecutionError, match="did not finish") as caught:
                path_of(RMS_NORM, path)(rows())
            if "fake.hanging" in str(caught.value):
                break
            worlds.publish(lambda w: w.replace(health={}), "test")
        assert "fake.hanging did not finish" in str(caught.value)
    finally:
        release.set()


def test_a_limit_must_be_one():
    for wrong in (0, -1, "soon", float("inf")):
        with pytest.raises(lz.errors.ConfigError, match="call_timeout"):
            lz.configure(call_timeout=wrong)


def test_the_clock_survives_all_this(free, path):
    register(Fake("fake.greedy", workspace=f"{GB}"))
    path_of(RMS_NORM, path)(rows())
    for n in range(10):
        free.bytes = MB if n % 2 else 64 * GB
        time.sleep(0.03)
        path_of(RMS_NORM, path)(rows())
    assert clock._thread is None or clock._thread.is_alive()
