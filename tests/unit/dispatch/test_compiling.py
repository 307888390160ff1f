"""Compiling in the background: the call is served at once, and the compiled kernel takes over when
it is ready.
"""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import pytest
import torch
from helpers import (
    RMS_NORM,
    Fake,
    events_of,
    faults_of,
    health_of,
    normalized,
    path_of,
    python,
    register,
    rows,
    wait_for,
)

import layerzero as lz
from layerzero.dispatch.background import compiling, inputs
from layerzero.operate.inspection import dispatcher_of
from layerzero.perf.record import Measurement, kind_of
from layerzero.spec.event import CompileQueued, CompileSkipped, Fallback, KernelRefused, WarmedUp
from layerzero.world import measurements
from layerzero.world import snapshot as worlds

IDS = itertools.count()


class Slow(Fake):
    """A kernel that compiles on first use of each size, on the thread that calls it, for as long as
    the test wants."""

    def __init__(self, **more):
        super().__init__(f"slow.k{next(IDS)}", jit=True, **more)
        self.compiled: set[tuple[int, ...]] = set()
        self.threads: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.before = self.compile

    def compile(self):
        self.threads.append(threading.current_thread().name)
        assert self.go.wait(60)
        self.compiled.add(tuple(self.got["x"].shape))


@pytest.fixture(autouse=True)
def nothing_left_over(world):
    yield
    assert compiling.wait(60)
    for known in (compiling._requested, compiling._forms):
        known.clear()


@pytest.fixture
def slow(world):
    fake = Slow()
    register(fake)
    yield fake
    fake.go.set()


def measure(kernel, x, us=0.5, **arguments):
    """As if it had been measured here for calls like this."""
    dispatcher = dispatcher_of(kernel.op.name)
    facts = dispatcher.facts(dispatcher.order_arguments((x,), arguments))
    kind, place = kind_of(kernel.op, facts), worlds.current().place("cpu")
    others = [k for k in worlds.current().kernels(kernel.op.name) if k.baseline]
    rows = [Measurement(k.id, kernel.op.name, kind.bucket, place, t, 0.01, 50, kind.family,
                        kind.sizes_text)
            for k, t in ((kernel, us), *((k, 5.0) for k in others))]
    worlds.publish(lambda w: w.replace(perf=w.perf.including(
        [measurements._complete_row(row, w, 0.0, {}) for row in rows])), "test")


def test_the_call_is_served_at_once_and_the_compiled_kernel_takes_over(path, slow, emitted):
    call, x = path_of(RMS_NORM, path), rows(40)
    measure(slow.kernel, x)
    slow.go.clear()
    for _ in range(5):                                     # nobody waits: the compiler does
        torch.testing.assert_close(call(x), normalized(x))
    assert not slow.compiled and lz.which("rms_norm", x) != slow.id
    wait_for(lambda: slow.threads)
    assert lz.stats().compiling.compiling.startswith(f"{slow.id} for cpu")
    assert any(c.name == "compiling in the background" and c.ok for c in lz.doctor().checks)
    slow.go.set()
    wait_for(lambda: lz.which("rms_norm", x) == slow.id)
    calls = slow.calls
    torch.testing.assert_close(call(x), normalized(x))
    assert slow.calls == calls + 1
    for kind in (CompileQueued, WarmedUp):
        assert [e.kernel for e in events_of(kind, emitted)] == [slow.id]
    assert set(slow.threads[:calls]) == {"layerzero-compile"} and not events_of(Fallback, emitted)
    assert compiling.wait(60) and lz.stats().compiling.compiling == ""
    # the whole bucket is ready, not this size alone
    call(rows(37))
    assert slow.calls == calls + 2


def test_what_was_not_measured_is_not_worth_compiling_unless_it_is_preferred(slow, emitted):
    x = rows(40)
    lz.rms_norm(x)
    assert not events_of(CompileQueued, emitted) and not slow.calls
    with lz.prefer(slow.id):
        lz.rms_norm(x)
        assert [e.kernel for e in events_of(CompileQueued, emitted)] == [slow.id]
        assert compiling.wait(60)
        assert lz.which("rms_norm", x) == slow.id


def test_what_was_measured_and_is_slower_is_not_compiled(slow, emitted):
    x = rows(40)
    measure(slow.kernel, x, us=1e6)
    lz.rms_norm(x)
    assert not events_of(CompileQueued, emitted)


@pytest.mark.parametrize(("mode", "thread"), [("never", None), ("in_request", "MainThread")])
def test_the_policy_says_when_it_is_compiled(slow, emitted, mode, thread):
    lz.configure(jit=mode)
    x = rows(40)
    measure(slow.kernel, x)
    torch.testing.assert_close(lz.rms_norm(x), normalized(x))
    assert not events_of(CompileQueued, emitted) and slow.threads == ([thread] if thread else [])


def test_a_warm_up_still_waits(slow):
    x = rows(40)
    measure(slow.kernel, x)
    report = lz.warmup([lz.testing.Call("rms_norm",
                                        {"x": lz.testing.TensorSpec((40, 16), "float32")})])
    assert report.ok and lz.which("rms_norm", x) == slow.id


def test_a_compile_that_fails_is_remembered_for_its_kind_and_not_tried_again(path, slow, emitted):
    call = path_of(RMS_NORM, path)
    for n in (40, 70):
        measure(slow.kernel, rows(n))
    slow.fault = RuntimeError("ptxas: too many registers")
    for _ in range(3):
        torch.testing.assert_close(call(rows(40)), normalized(rows(40)))
        assert compiling.wait(60)
    assert slow.calls == 1 and health_of(slow.id) is None and faults_of(slow.id) == 0
    (refused,) = events_of(KernelRefused, emitted)
    assert "too many registers" in refused.reason.message and "rows" in refused.kind
    assert "too many registers" in lz.explain("rms_norm", rows(40)).why_not(slow.id)[-1].message
    assert any(c.name == f"refused by {slow.id}" for c in lz.doctor().checks)
    slow.fault = None
    call(rows(70))                                         # another kind of call is another matter
    assert compiling.wait(60) and lz.which("rms_norm", rows(70)) == slow.id


def test_another_form_of_a_kind_that_is_ready_is_compiled_too(slow, emitted):
    x = rows(40)
    measure(slow.kernel, x)
    lz.rms_norm(x)
    assert compiling.wait(60)
    calls = slow.calls
    lz.rms_norm(x, eps=1e-3)
    assert [e.served_by != slow.id for e in events_of(Fallback, emitted)] == [True]
    assert compiling.wait(60)
    calls = slow.calls
    lz.rms_norm(x, eps=1e-3)
    assert slow.calls == calls + 1 and slow.got["eps"] == 1e-3


def test_forms_without_end_are_not_all_compiled(slow, emitted):
    x = rows(40)
    measure(slow.kernel, x)
    for i in range(3 * compiling.MAX_FORMS):
        lz.rms_norm(x, eps=1e-3 * (i + 1))
        assert compiling.wait(60)
    assert len(events_of(CompileQueued, emitted)) == compiling.MAX_FORMS


def test_the_queue_is_bounded_and_says_what_it_left_out(slow, emitted, monkeypatch):
    monkeypatch.setattr(compiling, "MAX_QUEUED", 2)
    slow.go.clear()
    sizes = (20, 40, 70, 200, 400)
    for n in sizes:
        measure(slow.kernel, rows(n))
    for n in sizes[:1]:
        lz.rms_norm(rows(n))
    wait_for(lambda: slow.threads)
    for n in sizes[1:]:
        torch.testing.assert_close(lz.rms_norm(rows(n)), normalized(rows(n)))
    assert len(lz.stats().compiling.waiting) == 2
    assert [e.problem for e in events_of(CompileSkipped, emitted)] == ["2 wait already"] * 2


def test_inputs_too_large_to_be_made_up_are_left_alone(slow, emitted, monkeypatch):
    monkeypatch.setattr(inputs, "free_bytes", lambda kind: 10_000)
    x = rows(40)
    measure(slow.kernel, x)
    lz.rms_norm(x)
    assert "use lz.warmup" in events_of(CompileSkipped, emitted)[0].problem and not slow.calls


def test_nothing_of_the_caller_is_touched(slow):
    """Neither its tensors nor its random numbers."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    x = rows(40)
    original = x.clone()
    measure(slow.kernel, x)
    torch.manual_seed(1)
    lz.rms_norm(x)
    assert compiling.wait(60) and slow.calls
    torch.testing.assert_close(torch.rand(3), expected)
    torch.testing.assert_close(x, original, rtol=0, atol=0)
    assert slow.got["x"].data_ptr() != x.data_ptr()


def make_like(t: torch.Tensor, grad: bool = False) -> torch.Tensor:
    return inputs.describe((t,), grad).values[0].make()


def described(t):
    """The same in every process: its numbers are not."""
    return f"{tuple(t.shape)} {t.stride()} {t.dtype}"


@pytest.mark.parametrize("t", [
    torch.randn(3, 4), torch.randn(4, 6).t(), torch.randn(4, 6)[:, ::2],
    torch.randn(1, 5).expand(4, 5), torch.randn(0, 3), torch.tensor(3.0),
    torch.randn(2, 3).to(torch.bfloat16), torch.zeros(4).to(torch.float8_e5m2)],
    ids=described)
def test_inputs_are_made_alike(t):
    tensor = make_like(t)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (t.shape, t.stride(), t.dtype)
    assert tensor.is_contiguous() == t.is_contiguous() and not tensor.requires_grad
    assert make_like(t.detach().clone().requires_grad_() if t.is_floating_point() else t,
                     True).requires_grad


@pytest.mark.parametrize("t", [torch.arange(12).view(3, 4), torch.arange(12).view(3, 4).t()[1:],
                               torch.tensor([True]),
                               torch.arange(6, dtype=torch.int32)[::2]], ids=described)
def test_whole_numbers_are_those_of_the_call(t):
    tensor = make_like(t)
    torch.testing.assert_close(tensor, t, rtol=0, atol=0)
    assert tensor.stride() == t.stride() and tensor.data_ptr() != t.data_ptr()


def test_many_threads_ask_once(slow, emitted):
    x = rows(40)
    measure(slow.kernel, x)
    slow.go.clear()
    gate = threading.Barrier(8, timeout=60)
    results: list[torch.Tensor] = []

    def work():
        gate.wait()
        for n in (40, 41, 42):
            results.append(lz.rms_norm(rows(n)))

    workers = [threading.Thread(target=work) for _ in range(8)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    slow.go.set()
    assert len(results) == 24 and len(events_of(CompileQueued, emitted)) == 1


def test_a_kernel_that_is_unregistered_meanwhile_does_not_come_back(slow, emitted):
    first, x = Slow(prior=1e9), rows(40)
    register(first)
    for kernel, n, us in ((first, 40, 0.1), (slow, 40, 9.0), (first, 70, 9.0), (slow, 70, 0.1)):
        measure(kernel.kernel, rows(n), us=us)
    first.go.clear()
    lz.rms_norm(x)
    wait_for(lambda: first.threads)
    lz.rms_norm(rows(70))                                  # waits behind it
    lz.unregister(slow.id)
    lz.unregister(first.id)
    first.go.set()
    assert compiling.wait(60) and not slow.calls
    assert not [w for w in worlds.current().warmed if w[0] in (slow.id, first.id)]
    assert [e.problem for e in events_of(CompileSkipped, emitted)
            if e.kernel == slow.id] == ["it was unregistered"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_begins_with_an_empty_queue_and_compiles_for_itself(slow):
    x = rows(40)
    measure(slow.kernel, x)
    for n in (70, 200):
        measure(slow.kernel, rows(n))
    lz.rms_norm(x)
    assert compiling.wait(60)
    lz.rms_norm(rows(70))
    # perhaps while it is compiled: the fork waits for that
    pid = os.fork()
    if pid == 0:
        try:
            assert compiling.status().compiling == "" and compiling._thread is None
            lz.rms_norm(rows(200))
            assert compiling.wait(60) and lz.which("rms_norm", rows(200)) == slow.id
            os._exit(0)
        # said to the parent, which may not print for it
        except BaseException as e:
            os.write(2, f"{type(e).__name__}: {e}\n".encode())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert compiling.wait(60) and lz.which("rms_norm", rows(70)) == slow.id


PROGRAM = """
    import sys, time, threading
    import torch, layerzero as lz
    from pathlib import Path
    from helpers import RMS_NORM, Fake, register, rows
    from layerzero.dispatch.background import compiling

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else {folder!r})
    fake = Fake("slow.shared", jit=True)

    def compile():
        done = folder / "compiled"
        if done.exists():
            return
        with open(folder / "log", "a") as log:
            log.write("compiled\\n")
        time.sleep({seconds})
        done.touch()

    fake.before = compile
    register(fake)
    with lz.prefer("slow.shared"):
        lz.rms_norm(rows(40))
        {then}
"""


def test_of_several_processes_one_compiles(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    code = PROGRAM.format(folder=str(folder), seconds=1.0, then="""
        assert compiling.wait(60)
        print(lz.which("rms_norm", rows(40)))""")
    out: list[str] = []
    workers = [threading.Thread(target=lambda: out.append(python(code))) for _ in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    assert out == ["slow.shared"] * 3
    assert Path(folder, "log").read_text() == "compiled\n"


def test_a_process_ends_cleanly_while_something_is_compiled(tmp_path):
    code = PROGRAM.format(folder=str(tmp_path), seconds=0.5, then="""
        while not (folder / "log").exists(): time.sleep(0.01)  # it has begun
        lz.rms_norm(rows(200))
        print("bye", flush=True)""")
    assert python(code) == "bye"
    assert Path(tmp_path, "compiled").exists()             # it was given the time to end


def test_a_real_formula_is_compiled_in_the_background(world, emitted):
    kernel = worlds.current().catalog.by_id["torch.compiled_rms_norm"]
    if worlds.current().availability().get(kernel.id) is not None:
        pytest.skip("no C++ compiler here")
    x = rows(40)
    measure(kernel, x)
    torch.testing.assert_close(lz.rms_norm(x), normalized(x))
    assert [e.kernel for e in events_of(CompileQueued, emitted)] == [kernel.id]
    assert compiling.wait(240) and not events_of(KernelRefused, emitted)
    assert lz.which("rms_norm", x) == kernel.id
    torch.testing.assert_close(lz.rms_norm(x), normalized(x))
