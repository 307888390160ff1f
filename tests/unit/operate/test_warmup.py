"""Warm-up: what is compiled when, what serves meanwhile, and that no request ever compiles."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    RMS_NORM,
    Fake,
    allow_only,
    events_of,
    faults_of,
    health_of,
    normalized,
    register,
    rows,
    run_lz,
    wait_for,
)
from torch.nn import Parameter

import layerzero as lz
from layerzero.backends.native import build as native_build
from layerzero.dispatch.background import compiling, jit, sizes
from layerzero.dispatch.facts import read
from layerzero.files.calls import write_calls
from layerzero.operate import warmup as warming
from layerzero.operate.inspection import dispatcher_of
from layerzero.operate.warmup import warmup
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.event import (
    BackendUnavailable,
    Fallback,
    KernelRefused,
    WarmedUp,
    WarmupSkipped,
)
from layerzero.world import snapshot as worlds

CALL = "layerzero-warmup"                      # the thread that may compile


def norm(n: int = 40, hidden: int = 16, **more) -> Call:
    """A call of rms_norm; 33 to 48 rows are one bucket."""
    return Call("rms_norm", {"x": TensorSpec((n, hidden), "float32"), **more}, name=f"{n} rows")


class Compiler(Fake):
    """A kernel that compiles on first use, as we see it: it notes which sizes and threads it was
    called for."""

    def __init__(self, id: str = "fake.jit", **declared) -> None:
        # while it is closed, the first call of each size is not done
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.seen: list[int] = []
        self.threads: Counter[str] = Counter()
        super().__init__(id, jit=True, before=self._before, **declared)

    def _before(self) -> None:
        self.seen.append(self.got["x"].shape[0])
        self.threads[threading.current_thread().name] += 1
        self.entered.set()
        assert self.gate.wait(60)


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    """A warm-up says in the environment where compiled code goes."""
    # our CPU kernels are loaded once, and from the folder they were built in
    with suppress(ImportError):
        native_build.module()
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    for variable in compiling.CACHES:
        monkeypatch.setenv(variable, str(tmp_path))


@pytest.fixture
def compiler(world):
    fake = Compiler()
    register(fake)
    yield fake
    fake.gate.set()
    wait_for(lambda: warming._thread is None)  # nothing of this test is compiled during the next


def which(n: int = 40) -> str:
    return lz.which("rms_norm", rows(n))


# what is ready, and for what

def test_it_waits_until_the_kernel_is_ready(compiler, emitted):
    assert which() != compiler.id
    report = warmup([norm()])
    assert (report.ok and report.ready[0].kernel == which() == compiler.id
            and report.ready[0].compiled)
    assert [e.kernel for e in events_of(WarmedUp, emitted)] == [compiler.id]
    assert set(compiler.threads) == {CALL}
    torch.testing.assert_close(lz.rms_norm(rows(40)), normalized(rows(40)))
    assert compiler.threads["MainThread"] == 1


def test_it_is_ready_for_the_bucket_and_for_no_other(compiler):
    warmup([norm(40)])
    assert [which(n) == compiler.id for n in (32, 33, 40, 48, 49)] == [False, True, True, True,
                                                                       False]
    outside = lz.explain("rms_norm", rows(49))
    assert [r.code for r in outside.why_not(compiler.id)] == [lz.Code.JIT_NOT_WARMED]
    before = compiler.calls
    for n in (32, 49, 400):
        lz.rms_norm(rows(n))
    assert compiler.calls == before


def test_both_ends_of_the_bucket_are_tried(compiler):
    warmup([norm(40)])
    assert set(compiler.seen) == {33, 40, 48}


def test_the_kernel_that_serves_meanwhile_is_loaded_first(compiler):
    other = Fake("fake.other", prior=1e5)
    register(other)
    compiler.before = lambda: order.append(other.loads)
    order: list[int] = []
    warmup([norm()])
    assert order[0] == 1 and other.calls == 1


def test_without_anything_to_compile_the_choice_is_made_and_remembered(world):
    report = warmup([norm(70)])
    assert report.ok and not report.ready[0].compiled and report.ready[0].kernel == which(70)
    assert lz.explain("rms_norm", rows(70)).from_cache


def test_all_critical_choices_are_remembered_in_the_newest_world(compiler):
    warmup([norm(40), norm(70), norm(200)])
    assert all(lz.explain("rms_norm", rows(n)).from_cache for n in (40, 70, 200))


def test_what_is_ready_is_not_compiled_again(compiler):
    warmup([norm()])
    compiler.seen.clear()
    compiler.threads.clear()
    epoch = worlds.current().epoch
    report = warmup([norm()])
    assert report.ok and worlds.current().epoch == epoch
    # called as a request would, not compiled
    assert set(compiler.seen) == {40} and compiler.calls < 8


# the form of a call: what a compiler looks at and selection does not

def padded(n: int, hidden: int) -> torch.Tensor:
    return torch.randn(n, 2 * hidden)[:, :hidden]


@pytest.mark.parametrize("args", [
    (rows(40).view(2, 20, 16),), (rows(40), None, 1e-3), (padded(40, 16),), (rows(16, 40).t(),),
    (rows(40), rows(1)[0]), (rows(40).double().float().requires_grad_(),)],
    ids=["more dimensions", "another number", "padded", "transposed", "a weight",
         "a gradient is wanted"])
def test_a_call_of_another_form_is_served_and_nothing_compiles(compiler, emitted, args):
    warmup([norm(40)])
    compiler.threads.clear()
    plan = lz.explain("rms_norm", *args)
    assert (plan.kernel != compiler.id
            and lz.Code.JIT_NOT_WARMED in [r.code for r in plan.why_not(compiler.id)])
    for _ in range(3):
        torch.testing.assert_close(lz.rms_norm(*args), RMS_NORM.reference(*args))
    assert not compiler.threads
    events = events_of(Fallback, emitted)
    assert (len(events) <= 1 and all(e.kernel == compiler.id
                                     and e.reason.code is lz.Code.JIT_NOT_WARMED for e in events))


def test_a_call_with_another_thread_count_is_another_form(compiler):
    warmup([norm(40)])
    compiler.threads.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        lz.rms_norm(rows(40))
    finally:
        torch.set_num_threads(threads)
    assert not compiler.threads
    lz.rms_norm(rows(40))
    assert compiler.threads["MainThread"] == 1


def test_parameters_no_grad_and_inference_mode_are_not_forms_of_their_own(compiler):
    weight = Parameter(torch.ones(16))
    warmup([norm(40, weight=TensorSpec((16,), "float32"))])
    compiler.threads.clear()
    made = rows(40)
    with torch.no_grad():
        lz.rms_norm(made, weight)
    assert type(compiler.got["weight"]) is torch.Tensor and not compiler.got["weight"].requires_grad
    with torch.inference_mode():
        x = rows(40) * 1
        assert x.is_inference()
        out = lz.rms_norm(x, weight)
        assert not compiler.got["x"].is_inference()
        torch.testing.assert_close(out, RMS_NORM.reference(x, weight))
    lz.rms_norm(x, weight.detach())            # an inference tensor outside of its mode
    assert compiler.threads["MainThread"] == 3


def test_where_nothing_else_may_serve_a_call_of_another_form_says_so(compiler):
    warmup([norm(40)])
    allow_only(compiler.id)
    lz.rms_norm(rows(40))
    for _ in range(5):
        with pytest.raises(lz.errors.NoKernelFoundError, match="JIT_NOT_WARMED"):
            lz.rms_norm(rows(40), None, 1e-3)
    assert health_of(compiler.id) is None      # no fault of its own


def test_a_fault_of_what_serves_instead_is_counted_against_that_kernel(compiler):
    other = Fake("fake.other", prior=1e5, fault=None)
    register(other)
    warmup([norm(40)])
    other.fault = RuntimeError("broken")
    torch.testing.assert_close(lz.rms_norm(rows(40), None, 1e-3),
                               RMS_NORM.reference(rows(40), None, 1e-3))
    assert faults_of("fake.other") == 1 and faults_of(compiler.id) == 0


def test_when_a_kernel_fails_what_might_compile_is_tried_last(compiler):
    first, last = Fake("fake.first", prior=1e9), Fake("fake.last", prior=10)
    register(first, last)
    warmup([norm(40)])
    with lz.prefer(compiler.id):
        warmup([norm(40)])
    first.fault = RuntimeError("broken")
    compiler.threads.clear()
    lz.rms_norm(rows(40))
    # not by the call; it may be compiled in the background meanwhile
    assert last.calls == 1 and threading.current_thread().name not in compiler.threads


def test_equal_sizes_and_sizes_of_one_are_part_of_the_form():
    op, facts = RMS_NORM, {}
    constant = jit.constant_axes(op, facts)

    def form(*shape: int) -> jit.Form:
        return jit.form_of((torch.empty(*shape), None, 1e-6, 0.0), constant, False)

    assert form(3, 5, 16) == form(7, 9, 16) == form(16, 5, 16)
    assert len({form(3, 5, 16), form(4, 4, 16), form(1, 5, 16), form(5, 1, 16), form(0, 5, 16),
                form(15, 16)}) == 6


def test_a_number_that_a_library_is_passed_is_no_form_of_its_own():
    op = lz.op("sample")
    logits = torch.zeros(2, 300)

    def entries(package: str, **by):
        kernel = lz.Kernel("fake.sampler", op, lambda: print, jit=True, package=package)
        values = tuple({**{p.name: p.default for p in op.params}, "logits": logits, **by}.values())
        return jit.warmed_keys(kernel, read(op, dict(zip(op.by_name, values))), values)

    first = entries("torch", temperature=0.7, top_p=0.9, seed=7, offset=3)
    assert first == entries("torch", temperature=0.8, top_p=0.5, seed=8, offset=4)
    assert first != entries("torch", temperature=1.0, top_p=0.9, seed=7, offset=3)
    # torch.compile makes a constant of it
    assert entries("", seed=7) != entries("", seed=8)


def test_strides_are_told_apart_by_order_unless_there_are_gaps():
    assert jit.memory_order((2, 3, 4), (12, 4, 1)) == (0, 1, 2)
    assert jit.memory_order((2, 3, 4), (12, 1, 3)) == (0, 2, 1) == jit.memory_order((5, 7, 9),
                                                                                    (63, 1, 7))
    assert jit.memory_order((2, 3, 4), (24, 8, 1)) == (-1, 24, 8, 1)
    assert jit.memory_order((1, 8, 1, 4), (32, 4, 4, 1)) != jit.memory_order((1, 8, 1, 4),
                                                                             (32, 4, 32, 1))
    assert jit.memory_order((), ()) == ()


def test_the_ends_of_a_bucket_keep_what_is_equal_and_the_order_in_memory():
    dispatcher = dispatcher_of("attention")
    q = torch.randn(2, 40, 4, 16).transpose(1, 2)
    values = dispatcher.order_arguments((q, q.clone(memory_format=torch.preserve_format), q),
                                        {"layout": "bhsd"})
    facts = dispatcher.facts(values, worlds.current())
    from layerzero.selection.engine import kind_to_compile
    made = list(sizes.at_bucket_ends(dispatcher, facts, values,
                                     kind_to_compile(dispatcher.op, facts)))
    assert [tuple(v[0].shape) for v in made] == [(2, 4, 33, 16), (2, 4, 48, 16)]
    assert all(v[1].shape == v[0].shape and v[0].transpose(1, 2).is_contiguous() for v in made)


def test_whole_numbers_are_not_made_more_of():
    dispatcher = dispatcher_of("cross_entropy")
    values = dispatcher.order_arguments((torch.randn(40, 8), torch.zeros(40, dtype=torch.int64)),
                                        {})
    facts = dispatcher.facts(values, worlds.current())
    assert not list(sizes.at_bucket_ends(dispatcher, facts, values, ""))


# order, background, time

def test_critical_calls_come_first(compiler):
    warmup([norm(40), norm(70)], critical=[norm(200), norm(400)]).wait(60)
    firsts = [n for i, n in enumerate(compiler.seen) if n not in compiler.seen[:i]
              and n in (40, 70, 200, 400)]
    assert firsts == [200, 400, 40, 70]


def test_the_rest_is_done_in_the_background(compiler, emitted):
    report = warmup([norm(40)], critical=[])
    assert report.wait(60) and report.ok and which() == compiler.id
    compiler.gate.clear()
    compiler.entered.clear()
    report = warmup([norm(70)], critical=[])
    assert compiler.entered.wait(60) and len(report.waiting) == 1
    served = lz.rms_norm(rows(70))             # not waiting for it
    torch.testing.assert_close(served, normalized(rows(70)))
    assert which(70) != compiler.id
    compiler.gate.set()
    assert report.wait(60) and which(70) == compiler.id


def test_without_background_everything_is_waited_for(compiler):
    report = warmup([norm(40)], critical=[norm(70)], background=False)
    assert report.ok and len(report.ready) == 2


def test_after_the_timeout_another_kernel_serves_and_the_compiled_one_later(compiler, emitted):
    compiler.gate.clear()
    report = warmup([norm(40)], timeout=0.2)
    assert len(report.waiting) == 1 and not report.ok
    late = events_of(Fallback, emitted)
    assert [(e.op, e.kernel, e.served_by) for e in late] == [("rms_norm", compiler.id, which())]
    assert late[0].reason.code is lz.Code.KERNEL_TIMEOUT and "0.2 s" in late[0].reason.message
    torch.testing.assert_close(lz.rms_norm(rows(40)), normalized(rows(40)))
    assert not report.wait(0.01)
    compiler.gate.set()
    assert report.wait(60) and report.ok and which() == compiler.id


def test_a_slow_library_does_not_keep_others_from_loading(compiler):
    loading, release = threading.Event(), threading.Event()

    def load():
        loading.set()
        assert release.wait(60)
        return RMS_NORM.reference

    lz.register(lz.Kernel("slow.jit", RMS_NORM, load, jit=True, prior=1e9, less_work="a test"))
    report = warmup([norm(40)], timeout=0)
    assert loading.wait(60)
    other = Fake("fake.other", prior=1e12)
    register(other)
    lz.rms_norm(rows(40))
    assert other.calls == 1
    release.set()
    assert report.wait(60)


def test_the_queue_is_bounded_and_what_does_not_fit_is_told(compiler, emitted):
    compiler.gate.clear()
    busy = warmup([norm(40)], critical=[])
    assert compiler.entered.wait(60)
    report = warmup([norm(n) for n in (70, 100, 200, 400)], critical=[], most_waiting=2)
    assert [o.call.name for o in report.skipped] == ["200 rows", "400 rows"]
    assert "2 calls wait already" in report.skipped[0].why
    assert [e.op for e in events_of(WarmupSkipped, emitted)] == ["rms_norm", "rms_norm"]
    compiler.gate.set()
    assert busy.wait(60) and report.wait(60)
    assert len(report.ready) == 2 and which(200) != compiler.id == which(100)


def test_critical_calls_are_never_dropped(compiler):
    report = warmup([], critical=[norm(40), norm(70), norm(200)], most_waiting=0)
    assert report.ok and len(report.ready) == 3


def test_an_interrupt_ends_the_waiting_and_begins_nothing_more(compiler, request):
    # a shell's background job is born deaf to it
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, was))
    compiler.gate.clear()
    timer = threading.Thread(target=lambda: (
        compiler.entered.wait(60),
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)))
    timer.start()
    reports: list[warming.WarmupReport] = []
    made = warming.WarmupReport
    warming.WarmupReport = lambda calls: reports.append(made(calls)) or reports[-1]    # type: ignore[assignment,misc]
    try:
        with pytest.raises(KeyboardInterrupt):
            warmup([norm(40), norm(70)])
    finally:
        warming.WarmupReport = made            # type: ignore[misc]
        timer.join()
    assert [o.state for o in reports[0].outcomes] == ["waiting", "skipped"]
    compiler.gate.set()
    assert reports[0].wait(60) and which() == compiler.id and which(70) != compiler.id


def test_requests_never_compile_while_others_warm_up(compiler):
    errors: list[BaseException] = []
    stop = threading.Event()

    def ask(seed: int) -> None:
        try:
            while not stop.is_set():
                for n in (40, 70, 200, 400):
                    torch.testing.assert_close(lz.rms_norm(rows(n, seed=seed)),
                                               normalized(rows(n, seed=seed)))
                    lz.rms_norm(rows(n, seed=seed), None, 1e-3)
        except BaseException as e:
            errors.append(e)

    compiled: set[int] = set()
    outside: list[int] = []

    def before() -> None:                      # a size no thread of ours compiled before
        got = compiler.here.got
        n = got["x"].shape[0]
        if threading.current_thread().name == CALL:
            compiled.add(n)
        elif n not in compiled or got.get("eps") == 1e-3:
            outside.append(n)

    compiler.before = before
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    try:
        report = warmup([norm(70), norm(200), norm(400)], critical=[norm(40)])
        assert report.wait(60) and report.ok
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not errors and not outside and compiled >= {40, 70, 200, 400}


# what goes wrong

def test_a_kernel_whose_compile_fails_for_a_kind_is_refused_for_that_kind_alone(compiler, emitted):
    compiler.fault = RuntimeError("error: no such instruction")
    report = warmup([norm(40), norm(40)])
    assert compiler.calls == 1 and len(report.ready) == 2 and not report.ok
    assert (list(report.outcomes[0].left_out) == [compiler.id]
            and "no such instruction" in str(report))
    assert [(e.kernel, "hidden=16" in e.kind)
            for e in events_of(KernelRefused, emitted)] == [(compiler.id, True)]
    assert health_of(compiler.id) is None and faults_of(compiler.id) == 0
    reason = lz.explain("rms_norm", rows(40)).why_not(compiler.id)[-1]
    assert reason.code is lz.Code.KERNEL_FAILED and "compiling failed" in reason.message
    compiler.fault = None
    warmup([norm(40)])
    lz.rms_norm(rows(40))
    assert compiler.calls == 1                 # it would fail again, after as many seconds
    # another kind of call is another matter
    assert warmup([norm(70)]).ok and which(70) == compiler.id


def test_the_next_best_kernel_is_compiled_instead(compiler):
    compiler.fault = RuntimeError("broken")
    second = Compiler("fake.second", prior=1e5)
    register(second)
    report = warmup([norm(40)])
    assert report.ready[0].kernel == which() == "fake.second"


def test_a_compile_that_fails_in_a_request_is_not_tried_again_for_that_kind(compiler):
    lz.configure(jit="in_request")
    compiler.fault = RuntimeError("broken")
    for n in (40, 70, 200, 400) * 3:
        torch.testing.assert_close(lz.rms_norm(rows(n)), normalized(rows(n)))
    assert compiler.calls == 4 and health_of(compiler.id) is None and faults_of(compiler.id) == 0
    compiler.fault = None
    lz.rms_norm(rows(900))
    assert compiler.calls == 5


def test_a_library_that_does_not_load_leaves_the_world(compiler, emitted):
    def load():
        raise ImportError("no such file")

    lz.register(lz.Kernel("broken.jit", RMS_NORM, load, jit=True, prior=1e9, less_work="a test",
                          package="torch"))
    report = warmup([norm(40), norm(70)])
    assert [o.kernel for o in report.ready] == [compiler.id] * 2
    assert [e.kernel for e in events_of(BackendUnavailable, emitted)] == ["broken.jit"]


def test_running_out_of_memory_is_no_fault_of_the_kernel(compiler):
    compiler.fault = MemoryError("too large")
    report = warmup([norm(40)])
    assert "too large" in report.ready[0].left_out[compiler.id] and health_of(compiler.id) is None
    compiler.fault = None
    assert warmup([norm(40)]).ok and which() == compiler.id


def test_a_call_that_cannot_be_made_does_not_stop_the_others(compiler, emitted):
    report = warmup([Call("rms_norm", {"y": 3}), Call("no_such_op"), norm(40)])
    assert [o.state for o in report.outcomes] == ["failed", "failed", "ready"]
    assert "no parameter y" in report.failed[0].why and "no_such_op" in report.failed[1].why
    assert len(events_of(WarmupSkipped, emitted)) == 2
    assert not report.ok and report.to_json()["calls"][0]["state"] == "failed"


def test_a_progress_function_hears_of_each_and_may_fail(compiler, caplog):
    received: list[str] = []

    def progress(outcome: warming.WarmupOutcome) -> None:
        received.append(outcome.state)
        raise ValueError("no terminal")

    warmup([norm(40), Call("no_such_op")], progress=progress)
    wait_for(lambda: len(received) == 2)
    assert received == ["ready", "failed"] and "no terminal" in caplog.text


# where the calls come from, and what holds for them

def test_calls_come_from_a_file_a_table_or_a_list(compiler, tmp_path):
    write_calls(tmp_path / "calls.jsonl", [norm(40)])
    assert warmup(tmp_path / "calls.jsonl").ok and which(40) == compiler.id
    assert warmup(str(tmp_path / "calls.jsonl")).ok
    table = SimpleNamespace(jit=(SimpleNamespace(kernel=compiler.id, call=norm(70)),))
    assert warmup(table).ok and which(70) == compiler.id
    assert warmup(norm(200)).ok and warmup(norm(n) for n in (400,)).ok and warmup([]).ok


def test_what_is_no_call_is_refused(world, tmp_path):
    with pytest.raises(lz.errors.ConfigError, match="wanted calls"):
        warmup([rows(3)])
    with pytest.raises(lz.errors.ConfigError, match="timeout"):
        warmup([norm()], timeout=-1)
    with pytest.raises(lz.errors.DataError, match="missing"):
        warmup(tmp_path / "missing.jsonl")


def test_the_callers_policy_holds_in_the_background_too(compiler):
    wanted = Compiler("fake.wanted", prior=20.0)
    register(wanted)
    with lz.prefer(wanted.id):
        report = warmup([norm(40)])
        assert report.ready[0].kernel == which() == wanted.id
    assert compiler.calls == 0


def test_caches_are_ours_unless_the_user_says_where(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere/else")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    warming.share_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere/else"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    for torchs_own in ("", os.path.join(tempfile.gettempdir(), "torchinductor_somebody")):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", torchs_own)
        warming.share_caches()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_without_a_folder_to_lock_in_it_goes_on(compiler, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "file"))
    assert warmup([norm(40)]).ok and "cannot lock" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_waits_for_nothing_and_can_warm_up_itself(compiler):
    compiler.gate.clear()
    report = warmup([norm(70)], critical=[])
    assert compiler.entered.wait(60)
    patience, compiling.FORK_SECONDS = compiling.FORK_SECONDS, 0.05
    try:
        child = os.fork()
    finally:
        compiling.FORK_SECONDS = patience
    if child == 0:
        code = 1
        try:
            compiler.gate = threading.Event()
            compiler.gate.set()
            gone = report.wait(0) and report.skipped[0].why == "left to the parent process"
            code = 0 if gone and warmup([norm(40)], timeout=60).ok and which() == compiler.id else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    compiler.gate.set()
    assert report.wait(60) and report.ok


# lz warmup

def test_the_command_warms_up_and_says_what_is_ready(compiler, capsys, tmp_path):
    code, out, _ = run_lz(capsys, "warmup", "rms_norm", "x=40x16", "--dtype", "float32", "--device",
                       "cpu", "--json")
    data = json.loads(out)
    assert code == 0 and data["ok"] and data["calls"][0]["kernel"] == compiler.id == which(40)
    write_calls(tmp_path / "calls.jsonl", [norm(70), norm(200)])
    code, out, _ = run_lz(capsys, "warmup", "--calls", str(tmp_path / "calls.jsonl"), "--device",
                       "cpu")
    assert code == 0 and out.count(compiler.id) == 2 and "2 ready" in out


def test_the_command_ends_with_1_where_something_is_not_ready(compiler, capsys):
    compiler.fault = RuntimeError("no such instruction")
    code, out, _ = run_lz(capsys, "warmup", "rms_norm", "x=40x16", "--dtype", "float32", "--device",
                       "cpu")
    assert code == 1 and "no such instruction" in out


@pytest.mark.parametrize("words", [(), ("rms_norm", "--model", "llama-3-8b"),
                                   ("--calls", "missing.jsonl")])
def test_a_wrong_question_is_one_message(words, capsys):
    code, _, err = run_lz(capsys, "warmup", *words)
    assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == 1
