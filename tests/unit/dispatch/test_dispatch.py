"""A call and what becomes of it when the kernel throws, by both call paths."""

from __future__ import annotations

import inspect
import logging
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (
    ATTENTION,
    RMS_NORM,
    Fake,
    allow_only,
    events_of,
    faults_of,
    health_of,
    normalized,
    path_of,
    python,
    qkv,
    register,
    rows,
)

import layerzero as lz
from layerzero.dispatch import dispatcher
from layerzero.machine import faults
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec.event import BackendUnavailable, Fallback, HealthChanged
from layerzero.spec.reason import Code
from layerzero.spec.rules import at_most
from layerzero.world import snapshot as worlds

pytestmark = pytest.mark.usefixtures("world")
STICKY = ["CUDA error: an illegal memory access was encountered",
          "CUDA error: device-side assert triggered", "CUDA error: unspecified launch failure",
          "CUDA error: misaligned address", "HIP error: device lost"]


@pytest.fixture
def call(path):
    return path_of(RMS_NORM, path)


@pytest.fixture
def pair():
    """Two kernels that go before all others, the first of which throws."""
    first, second = Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5)
    register(first, second)
    return first, second


# the kernel's own fault: the next one serves

def test_a_kernel_that_throws_is_replaced_by_the_next_of_its_plan(call, pair, emitted, caplog):
    first, second = pair
    x = rows()
    with caplog.at_level(logging.WARNING, "layerzero"):
        torch.testing.assert_close(call(x), normalized(x))
    assert (first.calls, second.calls) == (1, 1)
    (event,) = events_of(Fallback, emitted)
    assert (event.op, event.kernel, event.served_by) == ("rms_norm", "fake.first", "fake.second")
    assert event.reason.code is Code.KERNEL_FAILED and event.reason.got == "RuntimeError: boom"
    assert any("fake.first" in r.getMessage() and "fake.second" in r.getMessage()
               and "boom" in r.getMessage()
               for r in caplog.records if r.levelno == logging.WARNING)
    assert lz.stats().events["fallback"] == 1


def test_explain_shows_what_failed_and_what_served(call, pair):
    x = rows()
    call(x)
    plan = lz.explain("rms_norm", x)
    notes = {s.kernel: s.note for s in plan.steps}
    assert "boom" in notes["fake.first"] and "served 1 call as a fallback" in notes["fake.second"]
    assert notes["fake.first"] in str(plan) and notes["fake.second"] in str(plan)


def test_a_kernel_that_starts_to_throw_after_it_was_remembered(call, emitted):
    first, second = Fake("fake.first"), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    call(x), call(x)
    first.fault = RuntimeError("boom")
    torch.testing.assert_close(call(x), normalized(x))
    assert (first.calls, second.calls) == (3, 1)
    first.fault = None
    torch.testing.assert_close(call(x), normalized(x))
    assert (first.calls, second.calls) == (4, 1)           # one fault disables nothing
    assert len(events_of(Fallback, emitted)) == 1


class LibraryError(Exception):
    """As libraries have of their own."""


@pytest.mark.parametrize("fault", [
    LibraryError("x"), RuntimeError("x"), ValueError("x"), TypeError("x"), AssertionError("x"),
    AttributeError("x"), KeyError("x"), IndexError("x"), ZeroDivisionError("x"), OSError("x"),
    ImportError("x"), NotImplementedError("x"), RuntimeError()],
    ids=lambda e: type(e).__name__ + ("" if e.args else " without a text"))
@pytest.mark.parametrize("warm", [False, True], ids=["miss", "hit"])
def test_whatever_a_kernel_throws_is_its_own_fault(call, emitted, fault, warm):
    first, second = Fake("fake.first"), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    if warm:
        call(x)
    first.fault = fault
    torch.testing.assert_close(call(x), normalized(x))
    assert second.calls == 1
    assert events_of(Fallback, emitted)[0].reason.got.startswith(type(fault).__name__)
    assert faults_of("fake.first") == 1 and faults_of("fake.second") == 0


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SystemExit(3), UserWarning("as an error")],
                         ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("warm", [False, True], ids=["miss", "hit"])
def test_an_interrupt_an_exit_and_a_warning_made_an_error_pass_through(call, emitted, fault, warm):
    first, second = Fake("fake.first"), Fake("fake.second", prior=1e5)
    register(first, second)
    x = rows()
    if warm:
        call(x)
    first.fault = fault
    with pytest.raises(type(fault)) as raised:
        call(x)
    assert raised.value is fault
    assert second.calls == 0 and not worlds.current().health and not events_of(Fallback, emitted)


def test_a_warning_made_an_error_passes_through_in_a_fallback_too(call, pair):
    pair[1].fault = UserWarning("as an error")
    with pytest.raises(UserWarning):
        call(rows())
    assert health_of("fake.second") is None


def test_a_kernel_that_warns_where_warnings_are_errors_is_not_to_blame(call):
    register(Fake("fake.first",
                  before=lambda: warnings.warn("slow here", UserWarning, stacklevel=2)))
    x = rows()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match="slow here"):
                call(x)
    assert not worlds.current().health


def test_a_device_that_an_op_inside_a_kernel_found_lost_is_lost_for_the_call_too(call, pair):
    register(Fake("fake.inner", lz.op("layer_norm"), fault=RuntimeError(STICKY[0])))
    pair[0].fault, pair[0].before = None, lambda: lz.layer_norm(rows())
    with pytest.raises(lz.errors.DeviceLost, match=r"fake\.inner"):
        call(rows())
    assert pair[1].calls == 0 and health_of("fake.first") is None


def test_the_fault_of_the_first_and_of_the_second_both_count_and_the_third_serves(call, pair,
                                                                                  emitted):
    first, second = pair
    second.fault = ValueError("also")
    third = Fake("fake.third", prior=1e4)
    register(third)
    x = rows()
    torch.testing.assert_close(call(x), normalized(x))
    assert (first.calls, second.calls, third.calls) == (1, 1, 1)
    assert faults_of("fake.first") == faults_of("fake.second") == 1
    assert [(e.kernel, e.served_by)
            for e in events_of(Fallback, emitted)] == [("fake.first", "fake.third")]


def test_the_order_of_the_plan_is_the_order_of_the_fallback(call):
    tried: list[str] = []
    fakes = [Fake(f"fake.k{i}", fault=RuntimeError("no"), prior=10.0 ** (9 - i), overhead_us=0)
             for i in range(5)]
    for fake in fakes:
        fake.before = lambda fake=fake: tried.append(fake.id)
    register(*reversed(fakes))
    x = rows()
    order = [s.kernel for s in lz.explain("rms_norm", x).steps]
    torch.testing.assert_close(call(x), normalized(x))
    assert tried == order[:5] == [f.id for f in fakes]


def test_the_fallback_gets_its_own_transforms(path):
    first = Fake("fake.first", ATTENTION, variants=("bhsd",), fault=RuntimeError("no"))
    second = Fake("fake.second", ATTENTION, variants=("bshd",), prior=1e5)
    register(first, second)
    q, k, v = qkv(seq_q=5, seq_k=7, heads=4)
    torch.testing.assert_close(path_of(ATTENTION, path)(q, k, v), ATTENTION.reference(q, k, v))
    assert second.got["layout"] == "bshd" and second.got["query"].shape == (1, 5, 4, 16)


def test_arguments_by_keyword_reach_the_fallback_as_they_were(call, pair):
    x, weight = rows(), torch.rand(16)
    for _ in range(2):
        torch.testing.assert_close(call(eps=0.5, weight=weight, x=x),
                                   RMS_NORM.reference(x, weight, 0.5))
    assert pair[1].got["eps"] == 0.5 and pair[1].got["weight"] is weight


def test_a_fallback_whose_library_does_not_load_is_passed_over(call, emitted):
    def no_load():
        raise ImportError("libcudart.so.11: cannot open shared object file")

    register(Fake("fake.first", fault=RuntimeError("boom")), third := Fake("fake.third", prior=1e4))
    lz.register(lz.Kernel("fake.second", RMS_NORM, no_load, prior=1e5, less_work="a test"))
    x = rows()
    torch.testing.assert_close(call(x), normalized(x))
    assert third.calls == 1
    assert [e.kernel for e in events_of(BackendUnavailable, emitted)] == ["fake.second"]
    assert [r.code for r in lz.explain("rms_norm", x).why_not("fake.second")] == [Code.ABI_MISMATCH]


# the caller's mistake: raised at once

@pytest.mark.parametrize(("make", "code", "words"), [
    (lambda x: {"x": x, "weight": torch.rand(15)}, Code.DIM_MISMATCH, "weight"),
    (lambda x: {"x": "text"}, Code.WRONG_TYPE, "x must be a Tensor, got str"),
    (lambda x: {"x": x, "eps": "small"}, Code.WRONG_TYPE, "eps"),
    (lambda x: {"x": x, "eps": -1.0}, Code.VALUE_OUT_OF_RANGE, ">= 0"),
    (lambda x: {"x": x, "weight": torch.ones(16, dtype=torch.int64)}, Code.DTYPE_UNSUPPORTED,
     "int64"),
    (lambda x: {"x": x, "weight": torch.ones(16, device="meta")}, Code.MIXED_DEVICES, "meta"),
    (lambda x: {"x": None}, Code.WRONG_TYPE, "None"),
])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after a good call"])
def test_a_callers_mistake_raises_at_once_and_trips_nothing(call, emitted, make, code, words,
                                                            warm):
    fake = Fake()
    register(fake)
    x = rows()
    if warm:
        call(x)
    calls = fake.calls
    for _ in range(5):
        with pytest.raises(lz.errors.InvalidCall, match=words) as raised:
            call(**make(x))
        assert code in raised.value.codes and "lz.rms_norm" in str(raised.value)
        assert isinstance(raised.value, ValueError)
    assert fake.calls == calls and not worlds.current().health
    assert not events_of(Fallback, emitted) and not events_of(HealthChanged, emitted)


@pytest.mark.parametrize(("args", "kwargs"), [
    ((), {}), ((1, 2, 3, 4, 5, 6, 7, 8, 9), {}), ((), {"y": 1}), ((torch.ones(2),), {"x": 1})])
def test_a_call_with_the_wrong_arguments_names_the_op(call, args, kwargs):
    with pytest.raises(TypeError, match=r"^rms_norm\(\)"):
        call(*args, **kwargs)


def test_a_kernel_that_says_the_call_is_invalid_is_believed(call):
    mistake = lz.errors.InvalidCall("eps must not be 0.25")
    first, second = Fake("fake.first", fault=mistake), Fake("fake.second", prior=1e5)
    register(first, second)
    for _ in range(5):
        with pytest.raises(lz.errors.InvalidCall) as raised:
            call(rows(), eps=0.25)
        assert raised.value is mistake
    assert second.calls == 0 and not worlds.current().health


# out of memory: the next one serves, nothing trips

OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
                 MemoryError("no more"),
                 *map(RuntimeError, (
                     "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
                     "allocate memory: you tried to allocate 281474976710656 bytes. Error code 12 "
                     "(Cannot allocate memory)",
                     "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough "
                     "memory: you tried to allocate 281474976710656 bytes.",
                     "Could not allocate memory to change Tensor SizesAndStrides!",
                     "std::bad_alloc",
                     "failed to allocate 4096 bytes for packed weights",
                     "unable to allocate shared memory(shm) for file </torch_1>: No space left on "
                     "device (28)",
                     "unable to mmap 64 bytes from file </x>: Cannot allocate memory (12)",
                     "CUDA error: out of memory"))]


@pytest.mark.parametrize("fault", OUT_OF_MEMORY, ids=lambda e: str(e)[-40:])
def test_out_of_memory_walks_down_and_trips_nothing(call, pair, emitted, fault):
    first, second = pair
    first.fault = fault
    x = rows()
    # the third in a row would move the choice: test_memory_pressure.py
    for _ in range(2):
        torch.testing.assert_close(call(x), normalized(x))
    assert (first.calls, second.calls) == (2, 2) and not worlds.current().health
    assert {e.reason.code for e in events_of(Fallback, emitted)} == {Code.OUT_OF_MEMORY}


def test_out_of_memory_everywhere_is_an_error_that_says_so(call, pair):
    for fake in pair:
        fake.fault = torch.OutOfMemoryError("tried to allocate 2 GiB")
    allow_only("fake.first", "fake.second")
    with pytest.raises(lz.errors.KernelExecutionError, match="ran out of memory") as raised:
        call(rows())
    assert raised.value.codes == (Code.OUT_OF_MEMORY,) * 2
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert isinstance(raised.value, torch.OutOfMemoryError)    # as who retries with less expects


# a sticky fault: the device is gone

@pytest.mark.parametrize("text", STICKY)
def test_a_sticky_fault_disables_the_kernel_and_says_that_the_device_is_lost(call, pair, emitted,
                                                                             text):
    first, second = pair
    first.fault = RuntimeError(text)
    x = rows()
    with pytest.raises(lz.errors.DeviceLost, match="restart the process") as raised:
        call(x)
    assert (raised.value.codes == (Code.DEVICE_FAULT,)
            and isinstance(raised.value.__cause__, RuntimeError))
    # nothing else is worth trying on that device
    assert second.calls == 0
    assert [(e.kernel, e.state)
            for e in events_of(HealthChanged, emitted)] == [("fake.first", "disabled")]
    first.fault = None
    torch.testing.assert_close(call(x), normalized(x))         # on a device that still works
    assert (first.calls, second.calls) == (1, 1)
    assert [r.code for r in lz.explain("rms_norm", x).why_not("fake.first")] == [
        Code.BACKEND_DISABLED]
    assert any(c.name == "health of fake.first" and not c.ok for c in lz.doctor().checks)


def test_a_sticky_fault_in_a_fallback_is_one_too(call, pair):
    pair[1].fault = RuntimeError(STICKY[0])
    with pytest.raises(lz.errors.DeviceLost):
        call(rows())
    assert health_of("fake.second").state == "disabled" and health_of("fake.first") is None


def test_what_torch_says_here_when_memory_is_out():
    """Of the machine that runs this, whatever its allocator."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.int8)
    assert faults.classify(raised.value) == "memory", str(raised.value)


@pytest.mark.parametrize(("error", "kind"), [
    *((RuntimeError(text), "sticky") for text in STICKY), *((e, "memory") for e in OUT_OF_MEMORY),
    (TimeoutError("x"), "timeout"), (ValueError("illegal memory access"), "kernel"),
    (RuntimeError("no"), "kernel"), (lz.errors.InvalidCall("no"), "caller"),
    (OSError("device lost"), "kernel")])
def test_what_an_error_means(error, kind):
    assert faults.classify(error) == kind


# a kernel that gave up waiting

def test_a_timeout_counts_and_the_next_serves(call, pair, emitted):
    first, second = pair
    first.fault = TimeoutError("no answer from the worker within 2 s")
    x = rows()
    torch.testing.assert_close(call(x), normalized(x))
    (event,) = events_of(Fallback, emitted)
    assert event.reason.code is Code.KERNEL_TIMEOUT and "None" not in event.reason.message
    assert faults_of("fake.first") == 1 and second.calls == 1


# all of them

def test_when_all_fail_the_error_lists_each(call, pair):
    first, second = pair
    second.fault = ValueError("worse")
    allow_only("fake.first", "fake.second")
    with pytest.raises(lz.errors.KernelExecutionError) as raised:
        call(rows())
    text = str(raised.value)
    assert "fake.first" in text and "boom" in text and "fake.second" in text and "worse" in text
    assert raised.value.codes == (Code.KERNEL_FAILED,) * 2 and raised.value.__cause__ is first.fault


def test_when_none_may_serve_the_error_lists_each_with_its_reasons(call):
    register(Fake(requires=(at_most("hidden", 4),)))
    allow_only("fake.one")
    with pytest.raises(lz.errors.NoKernelFoundError) as raised:
        call(rows())
    text = str(raised.value)
    assert "fake.one" in text and "hidden must be <= 4, got 16" in text and "torch.rms_norm" in text
    assert {Code.SHAPE_UNSUPPORTED, Code.DENIED_BY_POLICY} <= set(raised.value.codes)
    assert not isinstance(raised.value, lz.errors.NamedKernelRefused)


# what was asked for by name is never replaced

def test_a_named_kernel_that_cannot_serve_is_refused_with_its_reasons(call):
    register(Fake(requires=(at_most("hidden", 4), at_most("rows", 1))))
    with pytest.raises(lz.errors.NamedKernelRefused) as raised:
        call(rows(), backend="fake.one")
    text = str(raised.value)
    assert ("backend=" in text and "hidden must be <= 4, got 16" in text
            and "rows must be <= 1, got 3" in text)
    assert raised.value.codes == (Code.SHAPE_UNSUPPORTED,) * 2 and "torch.rms_norm" not in text


@pytest.mark.parametrize("name", ["fake.nobody", "nobody"])
def test_a_name_that_no_kernel_has_is_refused_with_those_there_are(call, name):
    with pytest.raises(lz.errors.NamedKernelRefused, match=r"there are kernels of .*, torch, .*: "
                                                           r"lz list rms_norm shows") as raised:
        call(rows(), backend=name)
    assert name in str(raised.value)


def test_a_named_kernel_that_fails_is_not_replaced(call, pair):
    first, second = pair
    with pytest.raises(lz.errors.KernelExecutionError, match="named by backend=") as raised:
        call(rows(), backend="fake.first")
    assert "boom" in str(raised.value) and second.calls == 0
    lz.lock("rms_norm", "fake.first")
    with pytest.raises(lz.errors.KernelExecutionError, match=r"named by lz.lock\(\)"):
        call(rows())
    assert second.calls == 0 and first.calls == 2


def test_a_named_library_may_use_each_of_its_kernels(call, pair):
    x = rows()
    torch.testing.assert_close(call(x, backend="fake"), normalized(x))
    assert pair[1].calls == 1
    pair[1].fault = ValueError("too")
    with pytest.raises(lz.errors.KernelExecutionError, match=r"fake\.second"):
        call(x, backend="fake")


def test_a_name_counts_for_one_call(call):
    fake = Fake()
    register(fake)
    x = rows()
    call(x, backend="reference.rms_norm"), call(x, backend="torch")
    assert fake.calls == 0
    call(x)
    assert fake.calls == 1


def test_a_name_that_is_no_text_is_refused(call):
    for wrong in ("", 3, ["fake.one"]):
        with pytest.raises(lz.errors.ConfigError, match="backend="):
            call(rows(), backend=wrong)


# the ordinary call

def test_a_kernel_is_loaded_once_and_only_when_it_is_chosen(call):
    chosen, other = Fake(), Fake("fake.other", prior=1.0)
    register(chosen, other)
    lz.explain("rms_norm", rows())
    lz.list_kernels("rms_norm")
    assert chosen.loads == 0
    for n in range(1, 40):
        call(rows(n))
    lz.clear_cache()
    call(rows())
    assert chosen.loads == 1 and other.loads == 0


def test_every_call_is_counted_once_by_the_kernel_that_was_chosen(call):
    register(Fake())
    before = lz.stats().calls.get("rms_norm", {}).get("fake.one", 0)
    for i in range(50):
        call(rows(1 + i % 5))
    lz.clear_cache()
    for _ in range(7):
        call(rows())
    call(rows(), backend="fake.one")
    assert lz.stats().calls["rms_norm"]["fake.one"] == before + 58


@pytest.mark.parametrize(("op", "how", "more", "want"), [
    ("rms_norm", {"item": 1}, (7,), lambda s, t: t),
    ("add_rms_norm", {"first": 2}, (7,), lambda s, t: (s, t)),
    ("add_rms_norm", {}, (), lambda s, t: (s, t))])
def test_a_library_function_is_called_without_a_frame_between(path, op, how, more, want):
    def library(tensor, flag, *, epsilon):
        assert flag == "constant"
        return tensor * 2, tensor + epsilon, *more

    def load():
        return lz.kernels.direct(library, "x", lz.kernels.Const("constant"), epsilon="eps", **how)

    lz.register(lz.Kernel("fake.direct", lz.op(op), load, prior=1e6, less_work="a test"))
    call, x = path_of(op, path), rows()
    inputs = (x,) if op == "rms_norm" else (x, x)
    for _ in range(3):
        got, expected = call(*inputs, eps=0.5), want(x * 2, x + 0.5)
        assert type(got) is type(expected)
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b)


def test_a_kernel_may_call_its_own_op_while_it_loads_and_while_it_runs(call):
    def load():
        call(rows(), backend="reference.rms_norm")

        def run(x, weight=None, eps=1e-6):
            return lz.rms_norm(x, weight, eps, backend="reference.rms_norm")

        return run

    lz.register(lz.Kernel("fake.nested", RMS_NORM, load, prior=1e6, less_work="a test"))
    x = rows()
    for _ in range(2):
        torch.testing.assert_close(call(x), normalized(x))
    assert lz.which("rms_norm", x) == "fake.nested"


def test_a_kernel_that_calls_the_very_same_call_while_it_loads_does_not_wait_for_itself(call):
    depth: list[int] = []

    def load():
        depth.append(1)
        if len(depth) == 1:
            call(rows())
        return RMS_NORM.reference

    lz.register(lz.Kernel("fake.nested", RMS_NORM, load, prior=1e6, less_work="a test"))
    worker = threading.Thread(target=lambda: call(rows()), daemon=True)
    worker.start()
    worker.join(60)
    assert not worker.is_alive() and depth == [1, 1]


def test_a_kernel_taken_away_while_it_runs_finishes_its_call(call):
    entered, leave = threading.Event(), threading.Event()
    fake = Fake(before=lambda: (entered.set(), leave.wait(60)))
    register(fake)
    x, out = rows(), []
    worker = threading.Thread(target=lambda: out.append(call(x)))
    worker.start()
    assert entered.wait(60)
    lz.unregister("fake.one")
    torch.testing.assert_close(call(x), normalized(x))
    leave.set()
    worker.join(60)
    torch.testing.assert_close(out[0], normalized(x))


def test_a_kernel_taken_away_while_it_fails_is_replaced_all_the_same(call):
    entered, leave = threading.Event(), threading.Event()
    fake = Fake(fault=RuntimeError("boom"), before=lambda: (entered.set(), leave.wait(60)))
    register(fake)
    x, out = rows(), []
    worker = threading.Thread(target=lambda: out.append(call(x)))
    worker.start()
    assert entered.wait(60)
    lz.unregister("fake.one")
    leave.set()
    worker.join(60)
    torch.testing.assert_close(out[0], normalized(x))
    assert not worlds.current().health


def test_the_two_paths_are_one_function_to_the_outside():
    for op in (RMS_NORM, ATTENTION):
        dispatcher = dispatcher_of(op.name)
        for fn in (dispatcher.python_call, dispatcher.public, op.name):
            assert lz.which(fn, **op.inputs()) in {k.id for k in worlds.current().kernels(op.name)}
        names = [p for p in inspect.signature(dispatcher.public).parameters
                 if p not in ("backend", "policy")]
        assert names == [p.name for p in op.params]
        assert (dispatcher.public.__name__ == op.name
                and dispatcher.public.__doc__ == op.reference.__doc__)


def test_without_the_native_path_everything_is_the_same():
    output = python("""
        import torch, layerzero as lz
        from helpers import Fake, register, rows, normalized
        from layerzero.operate.inspection import dispatcher_of
        from layerzero.dispatch import native
        assert native.module() is None and dispatcher_of("rms_norm").native is None
        assert lz.rms_norm is dispatcher_of("rms_norm").python_call
        register(Fake("fake.first", fault=RuntimeError("boom")), second := Fake("fake.second", prior=1e5))
        x = rows()
        for _ in range(3):
            torch.testing.assert_close(lz.rms_norm(x), normalized(x))
        assert second.calls == 3 and lz.explain("rms_norm", x).why_not("fake.first")
        print(native.status().text, lz.doctor().ok, sep="|")
        """, LAYERZERO_NATIVE="0")
    text, ok = output.split("|")
    assert "switched off" in text and ok == "False"        # not ok: a breaker is open


def test_threads_that_call_an_op_for_the_first_time_share_its_function(monkeypatch):
    """Both find none and make one: what either gets must be the one that is kept."""
    op = worlds.current().catalog.ops["rms_norm"]
    both, generate = threading.Barrier(2), dispatcher.hotpath.generate_stub
    monkeypatch.setattr(dispatcher, "dispatchers", {})
    monkeypatch.setattr(dispatcher.hotpath, "generate_stub",
                        lambda op: (both.wait(10), generate(op))[1])
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(dispatcher.public_function, [op, op])
    assert first is second is dispatcher.dispatchers["rms_norm"].public


def test_kernels_are_called_outside_of_autocast(call):
    """torch would widen some functions there, and a kernel promises the dtype that it is given."""
    seen: list[bool] = []
    fake = Fake(before=lambda: seen.append(torch.is_autocast_enabled("cpu")))
    register(fake)
    x = rows(8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):                     # chosen, and remembered
            assert call(x).dtype == torch.bfloat16
    assert seen == [False, False]
