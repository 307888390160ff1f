"""CUDA graphs, as far as no GPU is needed: who may be captured, what is held, and what is said
where there is no CUDA.

The captures themselves are in tests/device/test_graphs_gpu.py.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from helpers import (
    RMS_NORM,
    Fake,
    call_facts,
    events_of,
    health_of,
    nvidia,
    path_of,
    policy,
    register,
    rows,
)

import layerzero as lz
from layerzero.machine import faults, hardware
from layerzero.machine.builds import build_of
from layerzero.operate import graphs
from layerzero.operate.graphs import GraphKernelDisabled, HeldGraph
from layerzero.selection.engine import SelectionContext, make_roster, select
from layerzero.selection.score import rates_of
from layerzero.spec.plan import Plan
from layerzero.verify.certification.capture import is_graph_safe, validate_graph_capture
from layerzero.world import snapshot as worlds
from layerzero.world.registry import certificates
from layerzero.world.registry.certificates import Certificate, contract_of

HOPPER = nvidia(90)
HERE = hardware.probe("cpu")
UNSAFE = lz.Code.CUDA_GRAPH_UNSAFE


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch, world):
    monkeypatch.setattr(certificates, "_captures", {})


def in_a_graph(shown: dict[str, bool], safe: bool = True, capturing: bool = True,
               **settings) -> Plan:
    """What selection makes of one kernel in a captured call, or under graph_strict_mode."""
    kernel = lz.Kernel("lib.k", RMS_NORM, lambda: RMS_NORM.reference, graph_safe=safe)
    context = SelectionContext(policy(**settings), HOPPER.facts(), HOPPER.signature, rates_of("cuda"),
                               certified={"lib.k"}, captures=lambda: shown)
    facts = {**call_facts(RMS_NORM, torch.empty(2, 8, device="meta")), **HOPPER.facts(),
             "graph": capturing}
    return select(RMS_NORM, make_roster([kernel], context), facts, context, thorough=True)


# who may be captured

@pytest.mark.parametrize(("shown", "declared", "serves"), [
    ({}, True, True), ({}, False, False), ({"lib.k": True}, False, True),
    ({"lib.k": False}, True, False), ({"lib.other": False}, True, True)])
@pytest.mark.parametrize("asked",
                         [{"capturing": True}, {"capturing": False, "graph_strict_mode": True}])
def test_what_a_capture_has_shown_counts_more_than_what_is_declared(shown, declared, serves, asked):
    plan = in_a_graph(shown, declared, **asked)
    assert bool(plan) is serves
    assert [r.code for r in plan.why_not("lib.k")] == ([] if serves else [UNSAFE])


@pytest.mark.parametrize(("shown", "declared", "word"), [
    ({"lib.k": False}, True, "a capture on this device failed"), ({}, False, "declared so")])
def test_the_reason_says_how_it_is_known(shown, declared, word):
    (reason,) = in_a_graph(shown, declared).why_not("lib.k")
    assert word in str(reason.got)


def test_where_certificates_are_demanded_a_declaration_is_not_enough():
    (reason,) = in_a_graph({}, True, require_certificates=True).why_not("lib.k")
    assert reason.code is UNSAFE and "lz verify" in str(reason.got)
    assert in_a_graph({"lib.k": True}, False, require_certificates=True)


def test_outside_a_capture_nobody_asks():
    def never():
        raise AssertionError("read")

    context = SelectionContext(policy(), HOPPER.facts(), HOPPER.signature, rates_of("cuda"),
                               captures=never)
    kernel = lz.Kernel("lib.k", RMS_NORM, lambda: RMS_NORM.reference, graph_safe=False)
    facts = {**call_facts(RMS_NORM, torch.empty(2, 8, device="meta")), **HOPPER.facts(),
             "graph": False}
    assert select(RMS_NORM, make_roster([kernel], context), facts, context)


# what certificates say

def certificate(kernel: lz.Kernel, **changes) -> Certificate:
    cert = Certificate(kernel.id, kernel.op.name, build_of(kernel), contract_of(kernel.op),
                       HERE.signature, HERE.name, 10, 2, ("float32",), "abc")
    return replace(cert, **changes)


def test_a_verdict_is_read_from_the_certificate_and_voids_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    by_id = worlds.current().catalog.by_id
    safe, unsafe, silent = by_id["torch.rms_norm"], by_id["reference.rms_norm"], by_id[
        "torch.linear"]
    certificates.write(certificate(safe, graph_safe=True, graph_bytes=512), HERE)
    certificates.write(certificate(unsafe, graph_safe=False, graph_problem="it waits"), HERE)
    certificates.write(certificate(silent), HERE)
    assert certificates.capture_verdicts(by_id.values(), HERE) == {safe.id: True, unsafe.id: False}
    certificates.write(certificate(safe, graph_safe=True, build="another"), HERE)
    assert certificates.capture_verdicts(by_id.values(), HERE) == {unsafe.id: False}
    read = certificates.read(certificates.folder(HERE) / f"{unsafe.id}.json")
    assert (read.graph_problem, read.graph_bytes) == ("it waits", 0)


def test_what_this_process_found_counts_until_the_kernel_is_replaced():
    one, other = Fake("fake.one").kernel, Fake("fake.one").kernel
    certificates.record_capture(one, "waits for the host")
    assert certificates.capture_verdicts([one], HERE) == {"fake.one": False}
    assert certificates.capture_verdicts([other], HERE) == {}
    certificates.record_capture(one, "")
    assert certificates.capture_verdicts([one], HERE) == {"fake.one": True}


# a capture that is lost

@pytest.mark.parametrize(("text", "kind"), [
    ("CUDA error: operation not permitted when stream is capturing", "capture"),
    (
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor "
        "is pinned.", "capture"),
    ("CUDA error: operation would make the legacy stream depend on a capturing blocking stream",
     "capture"),
    ("CUDA error: operation failed due to a previous error during capture", "lost"),
    ("CUDA error: an illegal memory access was encountered", "sticky"), ("CUDA error: invalid "
                                                                         "argument", "kernel")])
def test_errors_of_a_capture_have_a_class_of_their_own(text, kind):
    assert faults.classify(RuntimeError(text)) == kind


def test_a_kernel_that_spoils_a_capture_is_named_and_not_captured_again(path):
    waits = Fake("fake.waits",
                 fault=RuntimeError("CUDA error: operation not permitted when stream is capturing"))
    other = Fake("fake.other", prior=1e5)
    register(waits, other)
    with pytest.raises(
            lz.errors.KernelExecutionError,
            match=r"fake\.waits cannot be captured .*capture again") as caught:
        path_of(RMS_NORM, path)(rows())
    assert caught.value.codes == (UNSAFE,)
    # nobody can serve in a capture that is lost
    assert other.calls == 0
    # outside a capture there is nothing wrong with it
    assert health_of("fake.waits") is None
    assert certificates.capture_verdicts(worlds.current().catalog.kernels,
                                         HERE) == {"fake.waits": False}


def test_a_kernel_called_in_a_capture_that_was_spoilt_before_is_not_blamed(path):
    late = Fake("fake.late",
                fault=RuntimeError(
                    "CUDA error: operation failed due to a previous error during capture"))
    register(late)
    with pytest.raises(lz.errors.KernelExecutionError,
                       match=r"spoilt before fake\.late.*validate_graph_capture"):
        path_of(RMS_NORM, path)(rows())
    assert certificates.capture_verdicts(worlds.current().catalog.kernels, HERE) == {}
    assert health_of("fake.late") is None


# what a graph holds

def held(*fakes: Fake) -> HeldGraph:
    made = HeldGraph("graph of a test")
    graphs.hold(made, {"rms_norm": {f.id: 1 for f in fakes}})
    return made


def broken(fake: Fake) -> None:
    fake.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(lz.errors.DeviceLost):
        lz.rms_norm(rows(), backend=fake.id)


def test_an_event_says_when_a_kernel_of_a_live_graph_was_disabled(emitted):
    inside, outside = Fake("fake.inside"), Fake("fake.outside")
    register(inside, outside)
    graph = held(inside)
    assert graph.kernels == ("fake.inside",) and not graph.disabled
    broken(outside)
    lz.configure(memory_headroom=1 << 40)                  # another world changes nothing
    assert not events_of(GraphKernelDisabled, emitted)
    broken(inside)
    lz.configure(memory_headroom=None)
    (event,) = events_of(GraphKernelDisabled, emitted)           # once
    assert (event.op, event.kernel, event.graph) == ("rms_norm", "fake.inside", "graph of a test")
    assert (event.reason.code is lz.Code.BACKEND_DISABLED
            and "illegal memory access" in event.reason.message)
    assert graph.disabled["fake.inside"] is event.reason
    assert event.to_json()["event"] == "graph_kernel_disabled"


def test_an_unregistered_kernel_stays_loaded_for_the_graph_and_is_told(emitted):
    fake = Fake("fake.gone")
    register(fake)
    graph = held(fake)
    lz.unregister("fake.gone")
    assert [e.kernel for e in events_of(GraphKernelDisabled, emitted)] == ["fake.gone"]
    assert len(graph._loaded) == 1 and fake.loads == 1


def test_a_graph_that_is_gone_is_told_nothing(emitted):
    fake = Fake("fake.one")
    register(fake)
    graph = held(fake)
    del graph
    gc.collect()
    lz.unregister("fake.one")
    assert not events_of(GraphKernelDisabled, emitted)


def test_the_calls_since_are_counted_by_op_and_kernel(path):
    fake = Fake("fake.counted")
    register(fake)
    call = path_of(RMS_NORM, path)
    call(rows())
    before = graphs.hits()
    assert graphs.since(before) == {}
    for _ in range(3):
        call(rows())
    assert graphs.since(before) == {"rms_norm": {"fake.counted": 3}}


def test_the_first_cause_and_its_line_are_found():
    def guilty():
        raise ValueError("the first")

    try:
        raise KeyError("what the caller is handling")
    except KeyError as outside:
        try:
            try:
                guilty()
            finally:
                raise RuntimeError("capture_end failed")
        except RuntimeError as e:
            cause = graphs.first_cause(e, outside)
    assert str(cause) == "the first"
    problem = graphs.problem_of(cause)
    assert problem.kind == "fault" and problem.where.endswith('raise ValueError("the first")')


# without CUDA

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_cuda_it_is_said_that_there_is_none():
    verdict = is_graph_safe("torch.rms_norm")
    assert verdict.safe is None and not verdict and "no CUDA device here" in str(verdict)
    assert "no CUDA device here" in is_graph_safe("rms_norm", rows()).why
    report = validate_graph_capture(lz.rms_norm, rows())
    assert (not report and [p.kind for p in report.problems] == ["no cuda"]
            and "no CUDA device" in str(report))
    assert report.to_json()["ok"] is False
    with pytest.raises(lz.errors.ConfigError,
                       match="there is no CUDA device here"), graphs.graph(object()):
        pass
    with pytest.raises(lz.errors.ConfigError, match="there is no CUDA device here"):
        graphs.warmup_capture(lz.rms_norm, rows())


def test_a_certificate_reaches_selection(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    kernel = worlds.current().catalog.by_id["torch.rms_norm"]
    certificates.write(replace(certificate(kernel, graph_safe=False), device=HOPPER.signature),
                       HOPPER)
    lz.clear_cache()
    with lz.prefer(graph_strict_mode=True):
        reasons = lz.explain("rms_norm", rows(), on=HOPPER).why_not(kernel.id)
    assert [r.code for r in reasons] == [UNSAFE]
    assert lz.explain("rms_norm", rows(), on=HOPPER).why_not(kernel.id) == ()


def test_attempts_of_one_race_share_a_collection(monkeypatch):
    class Cycle:
        def __init__(self):
            self.me = self

    collections, collect = [], gc.collect
    monkeypatch.setattr(graphs.gc, "collect", lambda: collections.append(collect()))
    before = weakref.ref(Cycle())
    with graphs.collected_once():
        assert before() is None and len(collections) == 1
        later = weakref.ref(Cycle())
        with graphs.collected_once():
            pass
        [[] for _ in range(5000)]              # nor does it happen by itself, amid a capture
        assert later() is not None and not gc.isenabled() and len(collections) == 1
    assert gc.isenabled()
    gc.disable()
    try:
        with graphs.collected_once():
            pass
        assert not gc.isenabled()              # a caller's own choice stays
    finally:
        gc.enable()
