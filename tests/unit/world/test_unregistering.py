"""What is unregistered is gone: nothing of it is kept alive, remembered, or held against what comes
after it.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from helpers import RMS_NORM, Fake, allow_only, health_of, normalized, register, rows, run_python

import layerzero as lz
from layerzero.dispatch import wrapping
from layerzero.dispatch.background import compiling, learning
from layerzero.dispatch.dispatcher import dispatchers
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec.reason import Code, Reason
from layerzero.world import incidents
from layerzero.world import snapshot as worlds

pytestmark = pytest.mark.usefixtures("frozen_heap", "world")


def traces(fake: Fake) -> dict[str, weakref.ref]:
    """Weak references to the kernel, to the function that was loaded for it, and to what both hold
    on to."""
    return {"kernel": weakref.ref(fake.kernel), "run": weakref.ref(incidents.loaded(fake.kernel)),
            "fake": weakref.ref(fake)}


def assert_gone(references: dict[str, weakref.ref]) -> None:
    for _ in range(3):
        gc.collect()
    alive = [name for name, reference in references.items() if reference() is not None]
    assert not alive, [type(r).__name__ + " " + str(r)[:200]
                       for r in gc.get_referrers(references[alive[0]]())]


def remembers(name: str) -> list[str]:
    """Where the library still knows this kernel or op by its name."""
    world = worlds.current()
    places = {
        "loaded": incidents._loaded, "loading": incidents._loading, "faults": incidents._faults,
        "probes": wrapping.probes, "health": world.health, "refused": world.refused,
        "unloadable": world.unloadable, "warmed": world.warmed, "certified": world.certified,
        "origins": world.catalog.origins, "learned kinds": learning._kinds,
        "closed kinds": learning._closed, "asked to compile": compiling._requested,
        "forms": compiling._forms,
        "bindings": [key for d in dispatchers.values() for key in d._bindings],
        "entries": [e.plan.kernel for d in dispatchers.values() for e in d.cache.table.values()],
        "measurements": {m.kernel for m in world.perf.rows} if hasattr(world.perf, "rows") else (),
    }
    return [place for place, entries in places.items() if name in str(list(entries))]


def test_a_kernel_that_served_calls_is_freed(path):
    fake, x = Fake(), rows()
    register(fake)
    call = (dispatcher_of("rms_norm").public if path == "native"
            else dispatcher_of("rms_norm").python_call)
    for _ in range(3):
        torch.testing.assert_close(call(x), normalized(x))
        call(rows(hidden=8), policy={"cache_ttl": 5.0})
        call(rows(hidden=4), backend="fake.one")
    with lz.prefer("fake.one"):
        call(x)
    lz.explain("rms_norm", x)
    assert fake.calls > 5
    references = traces(fake)
    lz.unregister("fake.one")
    del fake
    assert_gone(references)
    assert remembers("fake.one") == []


def test_a_kernel_that_failed_is_freed_and_begins_anew():
    x = rows()
    fake = Fake("fake.one", fault=RuntimeError("boom"))
    register(fake, Fake("fake.two", prior=1e5))
    lz.configure(breaker_threshold=2, breaker_cooldown=600.0)
    for _ in range(3):
        lz.rms_norm(x)
    assert health_of("fake.one").state == "open"
    references = traces(fake)
    lz.unregister("fake.one")
    assert health_of("fake.one") is None
    del fake
    assert_gone(references)
    assert remembers("fake.one") == []
    again = Fake("fake.one", fault=RuntimeError("boom"))
    register(again)
    assert lz.which("rms_norm", x) == "fake.one"
    lz.rms_norm(x)
    assert health_of("fake.one") is None       # one fault: those of its namesake do not count
    lz.rms_norm(x)
    assert health_of("fake.one").state == "open"


def test_the_last_kernel_of_a_library_takes_its_breaker_along():
    x = rows()
    first = Fake("mylib.first", fault=RuntimeError("boom"), package="torch", distribution="torch")
    second = Fake("mylib.second", prior=1e5, package="torch", distribution="torch")
    register(first, second)
    lz.configure(breaker_threshold=1, breaker_cooldown=600.0)
    lz.rms_norm(x)
    assert health_of("mylib").state == "open"
    lz.unregister("mylib")                     # the library as a whole
    assert health_of("mylib") is None and remembers("mylib") == []
    register(second)
    assert lz.which("rms_norm", x) == "mylib.second"


def test_a_call_that_began_before_holds_nothing_against_a_kernel_that_is_gone():
    x = rows()

    def leave():
        lz.unregister("fake.one")

    fake = Fake("fake.one", fault=RuntimeError("boom"), before=leave)
    register(fake, Fake("fake.two", prior=1e5))
    lz.configure(breaker_threshold=1, breaker_cooldown=600.0)
    torch.testing.assert_close(lz.rms_norm(x), normalized(x))
    assert health_of("fake.one") is None and remembers("fake.one") == []
    references = {"kernel": weakref.ref(fake.kernel), "fake": weakref.ref(fake)}
    del fake
    assert_gone(references)


def test_an_op_is_freed_with_its_kernels():
    if "torch._dynamo" in sys.modules:         # which keeps the functions of operations it has seen
        alone = f"{__file__}::test_an_op_is_freed_with_its_kernels"
        done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", alone)
        assert done.returncode == 0, done.stdout[-3000:]
        return
    op = replace(RMS_NORM, name="scaled_for_test")
    lz.register(op)
    fake = Fake("fake.scaled", op=op)
    register(fake)
    x = rows()
    torch.testing.assert_close(lz.scaled_for_test(x), normalized(x))
    assert fake.calls == 1
    dispatcher = traces(fake) | {"dispatcher": weakref.ref(dispatchers["scaled_for_test"]),
                                 "op": weakref.ref(op)}
    lz.unregister("scaled_for_test")
    assert ("scaled_for_test" not in dispatchers
            and "scaled_for_test" not in worlds.current().catalog.ops)
    assert remembers("scaled_for_test") == [] and remembers("fake.scaled") == []
    del fake, op
    assert_gone(dispatcher)


def test_what_was_learned_about_is_freed(tmp_path):
    learning.reset()
    lz.configure(learn=True, perfdb=str(tmp_path / "perf.sqlite"))
    try:
        first, second = Fake("fake.first"), Fake("fake.second", prior=9e5)
        register(first, second)
        allow_only("fake.first", "fake.second")
        for _ in range(20):
            lz.rms_norm(rows())
        assert learning.flush(60)
        assert learning._kinds
        references = traces(first)
        lz.unregister("fake.first")
        assert learning.flush(60)
        del first
        assert_gone(references)
        assert remembers("fake.first") == []
    finally:
        lz.configure(learn=False)
        learning.reset()


def test_what_waits_to_be_compiled_is_freed(monkeypatch):
    go, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(compiling, "compile_now", lambda *args: begun.set()
                        or (go.wait(60) and None))
    dispatcher = dispatcher_of("rms_norm")
    blocking, waiting = Fake("fake.blocks", jit=True), Fake("fake.waits", jit=True)
    register(blocking, waiting)
    x = rows()
    values = (x, *(p.default for p in dispatcher.op.params[1:]))
    plan = worlds.current().plan(dispatcher.op, dispatcher.facts(values), compiled=True)
    steps = {s.kernel: s for s in plan.steps}
    for fake in (blocking, waiting):
        compiling.request(dispatcher, fake.kernel, steps[fake.id], plan.facts, values)
    assert begun.wait(60)
    traced = traces(waiting)
    lz.unregister("fake.waits")
    assert remembers("fake.waits") == []
    assert all(job.kernel.id != "fake.waits" for job in compiling._queue)
    del waiting, fake
    assert_gone(traced)
    go.set()
    assert compiling.wait(60)


def test_refusals_and_warm_ups_are_forgotten():
    fake = Fake("fake.one", jit=True)
    register(fake)
    facts = dispatcher_of("rms_norm").facts((rows(), *(p.default for p in RMS_NORM.params[1:])))
    incidents.refuse(fake.kernel, facts, Reason(Code.KERNEL_FAILED, None, "boom"))
    worlds.publish(lambda w: w.replace(warmed=w.warmed | {"fake.one", ("fake.one", "kind")},
                                   certified=w.certified | {"fake.one"}), "test")
    assert remembers("fake.one")
    lz.unregister("fake.one")
    assert remembers("fake.one") == []


def test_registering_and_unregistering_for_ever_costs_nothing():
    """Ever new names: nothing of the library grows with them."""
    def size() -> int:
        gc.collect()
        return sum(len(gc.get_referents(d)) for d in (
            incidents._loaded, incidents._loading, incidents._faults, wrapping.probes,
            compiling._requested, learning._closed,
            *(dispatcher._bindings for dispatcher in dispatchers.values())))

    def once(i: int) -> None:
        fake = Fake(f"fake.number{i}", fault=RuntimeError("boom") if i % 2 else None)
        register(fake)
        lz.rms_norm(rows())
        lz.unregister(fake.id)

    once(0), once(1)
    before = size()
    for i in range(2, 60):
        once(i)
    assert size() <= before + 8
    ledger = dispatchers["rms_norm"].ledger
    assert sum("fake.number" in name for name in ledger.totals()) <= 1


def test_unknown_names_are_refused():
    with pytest.raises(lz.errors.RegistrationError, match="nothing is registered"):
        lz.unregister("no.such.kernel")
