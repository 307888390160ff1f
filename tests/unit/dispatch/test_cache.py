"""What is remembered, for how long, and that one thread chooses while the others wait."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from helpers import (
    ATTENTION,
    RMS_NORM,
    Fake,
    events_of,
    normalized,
    path_of,
    qkv,
    register,
    rows,
    wait_for,
)

import layerzero as lz
from layerzero.dispatch.binding import Binding
from layerzero.dispatch.cache import Count, Entry, Ledger, OpCache, _Flight
from layerzero.operate.inspection import dispatcher_of
from layerzero.perf.record import Measurement, PerfView, kind_of
from layerzero.spec.event import Evicted, Selected
from layerzero.spec.plan import Plan, Score, Step
from layerzero.spec.rules import at_most
from layerzero.world import snapshot as worlds


@pytest.fixture
def call(path, world):
    return path_of(RMS_NORM, path)


def chosen(emitted):
    return [e.kernel for e in events_of(Selected, emitted)]


# hit and miss

def test_the_same_kind_of_call_is_chosen_once(call, emitted):
    for _ in range(10):
        call(rows())
    assert len(chosen(emitted)) == 1
    assert lz.explain("rms_norm", rows()).from_cache


@pytest.mark.parametrize("other", [
    lambda x: {"x": x.double()}, lambda x: {"x": x.bfloat16()}, lambda x: {"x": x[:, :8]},
    lambda x: {"x": rows(9)}, lambda x: {"x": x, "weight": torch.ones(16)},
    lambda x: {"x": x.clone().requires_grad_()},
], ids=["float64", "bfloat16", "hidden", "rows", "weight", "grad"])
def test_another_kind_of_call_is_chosen_anew(call, emitted, other):
    x = rows()
    call(x), call(**other(x)), call(x), call(**other(x))
    assert len(chosen(emitted)) == 2


def test_deterministic_mode_is_another_kind_of_call(call, emitted):
    register(Fake(deterministic=False))
    call(rows())
    torch.set_deterministic_debug_mode("error")
    try:
        call(rows())
    finally:
        torch.set_deterministic_debug_mode("default")
    assert len(chosen(emitted)) == 2 and chosen(emitted)[0] == "fake.one" != chosen(emitted)[1]


def test_a_value_no_rule_reads_does_not_make_another_kind(call, emitted):
    for eps in (1e-5, 0.1, 3.0):
        torch.testing.assert_close(call(rows(), eps=eps), RMS_NORM.reference(rows(), eps=eps))
    assert len(chosen(emitted)) == 1


def test_a_growing_kv_cache_stays_in_its_bucket(path, emitted):
    lengths: list[int] = []

    def look(query, key, value):
        lengths.append(key.shape[2])
        return query.clone()

    lz.register(lz.Kernel("fake.look", ATTENTION, lambda: look, prior=1e6, less_work="a test"))
    call, query, cache = path_of(ATTENTION, path), torch.randn(1, 2, 1,
                                                               8), torch.randn(1, 2, 4000, 8)
    for n in range(2049, 3073):
        call(query, cache[:, :, :n], cache[:, :, :n])
    assert chosen(emitted) == ["fake.look"] and lengths == list(range(2049, 3073))
    call(query, cache[:, :, :3073], cache[:, :, :3073])
    assert len(chosen(emitted)) == 2                      # 3073 begins the next


def test_a_limit_inside_a_bucket_is_kept(path, emitted):
    fake = Fake("fake.short", ATTENTION, requires=(at_most("seq_k", 2500),))
    register(fake)
    call, kv, query = path_of(ATTENTION, path), torch.randn(1, 2, 3100, 8), torch.randn(1, 2, 1, 8)
    for n in (2049, 2500, 2501, 3072, 2499):
        call(query, kv[:, :, :n], kv[:, :, :n])
    assert fake.calls == 3
    assert len(chosen(emitted)) == 2 and fake.got["key"].shape[2] == 2499


def test_every_length_of_a_bucket_gets_the_right_answer(path):
    call = path_of(ATTENTION, path)
    for n in range(17, 34):
        q, k, v = qkv(seq_q=3, seq_k=n)
        torch.testing.assert_close(call(q, k, v), ATTENTION.reference(q, k, v), rtol=1e-5,
                                   atol=1e-5)


# invalidation: a new world is a new, empty cache

def test_publishing_forgets_everything_at_once(call, emitted):
    for n in range(1, 30):
        call(rows(n))
    table = dispatcher_of("rms_norm").cache.table
    assert len(table) >= 15
    lz.clear_cache()
    # nothing was walked through
    assert dispatcher_of("rms_norm").cache.table == {} and len(table) >= 15
    before = len(chosen(emitted))
    call(rows(3))
    assert len(chosen(emitted)) == before + 1


def test_what_is_forgotten_is_freed(call):
    call(rows())
    (entry,) = dispatcher_of("rms_norm").cache.table.values()
    gone = weakref.ref(entry)
    del entry
    lz.clear_cache()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("change", [
    lambda: lz.configure(strict_mode=True), lambda: lz.lock("rms_norm", "reference.rms_norm"),
    lambda: lz.register(lz.Kernel("fake.new", RMS_NORM, lambda: RMS_NORM.reference, prior=1e6,
                                  less_work="a test")),
    lambda: worlds.publish(lambda w: w.replace(perf=PerfView([])), "measured"), lz.clear_cache,
], ids=["setting", "lock", "register", "measurements", "clear"])
def test_whatever_selection_depends_on_invalidates(call, emitted, change):
    call(rows())
    hash_before = lz.get_config()["policy_hash"]
    change()
    call(rows())
    assert len(chosen(emitted)) == 2
    assert chosen(emitted)[1] == lz.which("rms_norm", rows())
    assert isinstance(hash_before, str)


def test_a_measurement_turns_the_choice_from_the_next_call_on(call):
    slow, fast = Fake("fake.slow"), Fake("fake.fast", prior=1e5)
    register(slow, fast)
    x = rows()
    call(x)
    facts = lz.explain("rms_norm", x).facts
    bucket, here = kind_of(RMS_NORM, facts).bucket, worlds.current().place("cpu")
    times = {slow.id: 50.0, fast.id: 5.0, "torch.rms_norm": 70.0}
    measurements = [Measurement(name, "rms_norm", bucket, here, us) for name, us in times.items()]
    worlds.publish(lambda w: w.replace(perf=w.perf.including(measurements)), "measured")
    call(x)
    assert (slow.calls, fast.calls) == (1, 1)


def test_choices_expire_by_themselves(call, emitted):
    lz.configure(cache_ttl=600)
    call(rows()), call(rows())
    assert len(chosen(emitted)) == 1
    lz.configure(cache_ttl=0.05)
    call(rows())
    seen = len(chosen(emitted))
    wait_for(lambda: (call(rows()), len(chosen(emitted)) > seen)[1])
    lz.configure(cache_ttl=None)
    epoch = worlds.current().epoch
    time.sleep(0.3)
    assert worlds.current().epoch == epoch


# a bound

@pytest.mark.parametrize("size", [1, 2, 16])
def test_the_cache_keeps_to_its_size(call, emitted, size):
    lz.configure(cache_size=size)
    dispatcher = dispatcher_of("rms_norm")
    for i in range(100):
        x = rows(2, hidden=1 + i)
        torch.testing.assert_close(call(x), normalized(x))
        assert len(dispatcher.cache.table) <= size
        assert dispatcher.native is None or dispatcher.native.compiled.size() <= size
    evicted = sum(e.entries for e in events_of(Evicted, emitted))
    assert evicted + len(dispatcher.cache.table) == 100


def test_what_is_used_stays_and_what_is_not_goes(world, emitted):
    lz.configure(cache_size=8)
    call = path_of(RMS_NORM, "python")
    hot = rows(2, hidden=500)
    call(hot)
    for i in range(200):
        call(rows(2, hidden=1 + i))
        call(hot)
    assert len(chosen(emitted)) == 201                    # the hot one was chosen once


def test_the_native_table_keeps_what_is_used_too(world):
    dispatcher = dispatcher_of("rms_norm")
    if dispatcher.native is None:
        pytest.skip("the native path is not built")
    lz.configure(cache_size=8)
    hot = rows(2, hidden=500)
    dispatcher.public(hot)
    entry = dispatcher.native.compiled.lookup(hot)
    for i in range(200):
        dispatcher.public(rows(2, hidden=1 + i))
        dispatcher.public(hot)
        assert dispatcher.native.compiled.lookup(hot) is entry


def entry(kernel="lib.k"):
    plan = Plan("op", {}, (Step(kernel, Score(1.0, 1.0)),), ())
    made = Entry(plan, Binding(lambda: None, None), lambda: None)
    made.tick()                                            # the call that made it
    return made


def test_a_sweep_gives_a_second_chance():
    dropped: list[int] = []
    cache = OpCache(4, dropped.append)
    made = {name: cache.obtain(name, entry) for name in "abcd"}
    for name in "ab":
        made[name].tick()
    cache.obtain("e", entry)
    assert set(cache.table) == {"a", "b", "e"} and dropped == [2]
    cache.obtain("f", entry)
    made["b"].tick()
    cache.obtain("g", entry)                               # "a" was not used since; nor "e" and "f"
    assert set(cache.table) == {"b", "g"} and dropped == [2, 3]


def test_where_all_are_in_use_the_oldest_half_goes():
    cache = OpCache(4)
    for name in "abcd":
        cache.obtain(name, entry).tick()
    cache.obtain("e", entry)
    assert set(cache.table) == {"c", "d", "e"}


# one thread chooses

def test_a_hundred_threads_that_miss_one_key_choose_once(call, emitted):
    fake = Fake(before=None)
    register(fake)
    loading = threading.Event()
    load = fake._load

    def slow_load():
        loading.wait(60)
        return load()

    lz.unregister("fake.one")
    lz.register(lz.Kernel("fake.one", RMS_NORM, slow_load, prior=1e6, less_work="a test"))
    x, out, gate = rows(), [], threading.Barrier(101, timeout=60)

    def work():
        gate.wait()
        out.append(call(x))

    workers = [threading.Thread(target=work) for _ in range(100)]
    for w in workers:
        w.start()
    gate.wait()
    time.sleep(0.05)
    loading.set()
    for w in workers:
        w.join(60)
    assert len(out) == 100 and fake.loads == 1 and fake.calls == 100
    assert chosen(emitted) == ["fake.one"]
    for got in out:
        torch.testing.assert_close(got, normalized(x))


def together(n, work):
    gate, results = threading.Barrier(n, timeout=60), [None] * n

    def run(i):
        gate.wait()
        try:
            results[i] = work()
        except BaseException as e:
            results[i] = e

    workers = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert not any(w.is_alive() for w in workers)
    return results


def test_those_who_wait_get_what_the_first_one_made():
    cache, made = OpCache(8), []

    def make():
        time.sleep(0.05)
        made.append(entry())
        return made[-1]

    results = together(20, lambda: cache.obtain("key", make))
    assert len(made) == 1 and all(r is made[0] for r in results)


def test_those_who_wait_get_the_error_of_the_first_one_and_the_next_call_tries_again(monkeypatch):
    cache, tries, waiting, wait = OpCache(8), [], set(), _Flight.wait
    monkeypatch.setattr(_Flight, "wait", lambda flight, seconds: (
        waiting.add(threading.get_ident()), wait(flight, seconds))[1])

    def make():
        tries.append(1)
        wait_for(lambda: len(waiting) == 19)
        raise lz.errors.NoKernelFoundError("nothing serves")

    results = together(20, lambda: cache.obtain("key", make))
    assert len(tries) == 1 and all(isinstance(r, lz.errors.NoKernelFoundError) for r in results)
    assert cache.table == {}
    assert cache.obtain("key", entry) is cache.table["key"]


def test_an_interrupt_is_for_the_thread_that_got_it():
    cache, tries = OpCache(8), []

    def make():
        tries.append(1)
        time.sleep(0.05)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return entry()

    results = together(20, lambda: cache.obtain("key", make))
    assert sum(isinstance(r, KeyboardInterrupt) for r in results) == 1 and len(tries) == 2
    assert sum(isinstance(r, Entry) for r in results) == 19


def test_different_keys_do_not_wait_for_each_other():
    cache, inside = OpCache(8), threading.Barrier(4, timeout=60)

    def make():
        # passes only if all four are here at once
        inside.wait()
        return entry()

    names = iter("abcd")
    assert all(isinstance(r, Entry) for r in together(4, lambda: cache.obtain(next(names), make)))


# overrides have their own entries

def test_an_override_has_its_own_entries_and_finds_them_again(call, emitted):
    fake = Fake(prior=0.001)
    register(fake)
    for _ in range(5):
        call(rows())
        with lz.prefer("fake.one"):
            call(rows())
    assert fake.calls == 5
    assert chosen(emitted).count("fake.one") == 1 and len(chosen(emitted)) == 2


def test_overrides_that_say_the_same_share_their_entries(call, emitted):
    for _ in range(3):
        with lz.prefer("reference.*"):
            call(rows())
        with lz.prefer("reference.*", strict_mode=True):
            call(rows())
        with lz.prefer("reference.*"), lz.prefer(strict_mode=True):
            call(rows())
    assert len(chosen(emitted)) == 2


def test_a_named_kernel_and_a_policy_for_one_call_are_remembered_too(call, emitted):
    for _ in range(5):
        call(rows(), backend="reference.rms_norm")
        call(rows(), policy={"strict_mode": True})
    assert len(chosen(emitted)) == 2


# counting

def test_a_count_is_read_without_changing_it():
    count = Count()
    for n in range(5):
        assert count.total == n and count.total == n
        count.tick()
    count.native += 7
    assert count.total == 12


def test_the_ledger_counts_also_what_is_hit_after_it_was_dropped():
    ledger, held = Ledger(), []
    for i in range(500):
        made = ledger.add(entry(f"lib.k{i % 2}"))
        if i % 100 == 0:
            held.append(made)
    assert ledger.totals() == {"lib.k0": 250, "lib.k1": 250}
    assert len(ledger._open) <= 64 + 2 * len(held) + 64
    for made in held:
        # a call that found it before it was dropped
        made.tick()
        made.native_hits += 2
    del made
    held.clear()
    assert ledger.totals() == {"lib.k0": 265, "lib.k1": 250}
    assert ledger._open == []


def test_a_count_that_is_read_while_its_entry_is_collected_is_not_lost():
    """The garbage collector clears the references to a cycle first and ends its members then:
    another thread may ask in between, as this finalizer does."""
    ledger, seen = Ledger(), []

    class Asks:
        def __del__(self):
            seen.append(ledger.totals())

    asks = Asks()                              # older than the entry: ended before it
    added = ledger.add(entry("lib.k"))
    added.native_hits += 2
    assert ledger.totals() == {"lib.k": 3}
    asks.entry, added.recordings = added, asks
    reference = weakref.ref(added)
    del asks, added
    gc.collect()
    assert reference() is None and seen == [{"lib.k": 3}] and ledger.totals() == {"lib.k": 3}
    assert ledger._open == []
