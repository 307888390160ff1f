"""CUDA graphs on a GPU: safe is what was captured, replayed with other inputs and found right, and
nothing else is.
"""

from __future__ import annotations

import pytest
import torch
from helpers import NVIDIA_ONLY, RMS_NORM, allow_only, emitted, events_of, world

import layerzero as lz
from layerzero.machine import hardware
from layerzero.operate import graphs
from layerzero.operate.graphs import GraphKernelDisabled
from layerzero.spec.reason import Code
from layerzero.spec.rules import equals
from layerzero.verify.certification.capture import (
    capture_cases,
    is_graph_safe,
    validate_graph_capture,
)
from layerzero.verify.certification.certify import certify
from layerzero.world import snapshot as worlds
from layerzero.world.registry import certificates

__all__ = ["emitted", "world"]                # fixtures

pytestmark = NVIDIA_ONLY


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch, world, tmp_path):
    monkeypatch.setattr(certificates, "_captures", {})
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))


def rows(n: int = 8, hidden: int = 256, seed: int = 0,
         dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, hidden, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


NO_OFFSET = (equals("offset", 0.0),)


# kernels that lie about themselves: all declare that they are safe

def waits(x, weight=None, eps=1e-6):
    scale = 1.0 + 0.0 * x.sum().item()         # asks the host
    return RMS_NORM.reference(x, weight, eps) * scale


def copies_to_the_host(x, weight=None, eps=1e-6):
    return RMS_NORM.reference(x.cpu(), None if weight is None else weight.cpu(), eps).cuda()


def allocates_pinned(x, weight=None, eps=1e-6):
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    there.copy_(x)                             # and waits for it
    return RMS_NORM.reference(there.to("cuda"), weight, eps)


def on_the_default_stream(x, weight=None, eps=1e-6):
    with torch.cuda.stream(torch.cuda.default_stream()):
        return RMS_NORM.reference(x, weight, eps)


_remembered: dict[int, torch.Tensor] = {}


def remembers_by_address(x, weight=None, eps=1e-6):
    """What it saw at an address once it takes for what is there for ever."""
    if x.data_ptr() not in _remembered:
        _remembered[x.data_ptr()] = RMS_NORM.reference(x, weight, eps)
    return _remembered[x.data_ptr()].clone()


_buffer: dict[torch.Size, torch.Tensor] = {}


def one_result_for_all(x, weight=None, eps=1e-6):
    kept = _buffer.setdefault(x.shape, torch.empty_like(x))
    return kept.copy_(RMS_NORM.reference(x, weight, eps))


def sound(x, weight=None, eps=1e-6):
    return RMS_NORM.reference(x, weight, eps)


def liar(fn) -> lz.Kernel:
    return lz.Kernel(f"liar.{fn.__name__}", RMS_NORM, lambda: fn, NO_OFFSET, prior=1e6,
                     less_work="a test")


@pytest.mark.parametrize(("fn", "kinds"), [
    (waits, {"sync"}), (copies_to_the_host, {"sync"}),
    (allocates_pinned, {"sync", "fault", "stale result"}),
    (on_the_default_stream, {"stale result", "allocation", "sync", "fault"}),
    (remembers_by_address, {"stale result"}), (one_result_for_all, {"stale result"})])
def test_a_kernel_that_cannot_be_captured_is_found_out(fn, kinds):
    _remembered.clear()
    _buffer.clear()
    kernel = liar(fn)
    lz.register(kernel)
    verdict = is_graph_safe(kernel.id)
    assert verdict.safe is False and {p.kind for p in verdict.problems} <= kinds, verdict.problems
    # a capture that failed leaves torch's generator usable
    torch.rand(4, device="cuda")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.testing.assert_close(lz.rms_norm(rows()), RMS_NORM.reference(rows()))


def test_the_line_that_waits_is_named():
    verdict = capture_cases(liar(waits))
    assert any("x.sum().item()" in p.where for p in verdict.problems), verdict.problems


def test_a_sound_kernel_is_safe_whatever_it_declares():
    kernel = lz.Kernel("modest.norm", RMS_NORM, lambda: sound, NO_OFFSET, graph_safe=False)
    verdict = is_graph_safe(kernel)
    assert verdict and verdict.captures >= 1 and verdict.pool_bytes > 0, verdict


@pytest.mark.parametrize("name", [
    "torch.rms_norm", "torch.layer_norm", "torch.linear", "torch.sdpa", "torch.sdpa_efficient",
    "torch.sdpa_flash_cuda", "torch.sdpa_cudnn", "torch.sdpa_math"])
def test_what_torch_brings_is_shown_to_be_safe(name):
    if name not in worlds.current().catalog.by_id:
        pytest.skip(f"there is no {name}")
    verdict = is_graph_safe(name)
    assert verdict.safe is not False, verdict
    print(verdict, verdict.pool_bytes)


# selection follows

def test_what_was_found_unsafe_is_not_chosen_in_a_capture_and_still_outside():
    kernel = liar(waits)
    lz.register(kernel)
    assert lz.which("rms_norm", rows()) == kernel.id
    assert not is_graph_safe(kernel)
    assert lz.which("rms_norm", rows()) == kernel.id
    with lz.prefer(graph_strict_mode=True):
        assert lz.which("rms_norm", rows()) != kernel.id
        reasons = lz.explain("rms_norm", rows()).why_not(kernel.id)
    assert [r.code for r in reasons] == [Code.CUDA_GRAPH_UNSAFE] and "failed" in str(reasons[0].got)
    x, out = rows(), torch.empty(0)
    graph = torch.cuda.CUDAGraph()
    graphs.warmup_capture(lz.rms_norm, x)
    with graphs.graph(graph) as held:
        out = lz.rms_norm(x)
    assert kernel.id not in held.kernels and held.kernels
    x.copy_(rows(seed=1))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, RMS_NORM.reference(rows(seed=1)))


def test_a_capture_that_a_kernel_spoils_names_it_and_the_next_one_works():
    kernel = liar(waits)
    lz.register(kernel)
    x, graph = rows(), torch.cuda.CUDAGraph()
    lz.rms_norm(x)
    with pytest.raises((lz.errors.KernelExecutionError, RuntimeError)) as caught, graphs.graph(
            graph):
        lz.rms_norm(x)
    cause = graphs.first_cause(caught.value, None)
    assert "captur" in str(cause), cause
    again = torch.cuda.CUDAGraph()
    graphs.warmup_capture(lz.rms_norm, x)
    with graphs.graph(again) as held:
        out = lz.rms_norm(x)
    again.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, RMS_NORM.reference(x))
    assert kernel.id not in held.kernels


def test_where_no_kernel_is_safe_the_error_says_so():
    kernel = liar(waits)
    lz.register(kernel)
    assert not is_graph_safe(kernel)
    allow_only(kernel.id, op="rms_norm")
    lz.configure(graph_strict_mode=True)
    with pytest.raises(lz.errors.NoKernelFoundError) as caught:
        lz.rms_norm(rows())
    assert Code.CUDA_GRAPH_UNSAFE in caught.value.codes
    report = validate_graph_capture(lz.rms_norm, rows())
    assert [p.kind for p in report.problems] == ["no kernel"], report


def test_the_certificate_says_what_the_capture_has_shown():
    here, kernel = hardware.probe("cuda"), worlds.current().catalog.by_id["torch.rms_norm"]
    certificate = certify(kernel, "cuda").certificate
    assert (certificate is not None and certificate.graph_safe is True
            and certificate.graph_bytes > 0)
    certificates.write(certificate, here)
    assert certificates.capture_verdicts([kernel], here) == {kernel.id: True}
    verdict = is_graph_safe(kernel)
    assert verdict and verdict.source == "certificate"


# what a graph holds

def test_a_graph_keeps_its_kernels_through_other_worlds_and_says_when_one_is_disabled(emitted):
    kernel = lz.Kernel("mine.norm", RMS_NORM, lambda: sound, NO_OFFSET, prior=1e6,
                       less_work="a test", package="torch")
    lz.register(kernel)
    x, graph = rows(), torch.cuda.CUDAGraph()
    graphs.warmup_capture(lz.rms_norm, x)
    with graphs.graph(graph) as held:
        out = lz.rms_norm(x)
    assert held.calls == {"rms_norm": {"mine.norm": 1}} and graph.layerzero is held
    lz.configure(rules=(lz.PolicyRule.of("deny", "mine.norm", "rms_norm"),))
    lz.unregister("mine.norm")
    assert [e.kernel for e in events_of(GraphKernelDisabled, emitted)] == ["mine.norm"]
    x.copy_(rows(seed=2))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, RMS_NORM.reference(rows(seed=2)))


def test_several_streams_in_one_graph():
    a, b = rows(), rows(seed=1)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def both():
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        one = lz.rms_norm(a)
        with torch.cuda.stream(side):
            two = lz.rms_norm(b)
        here.wait_stream(side)
        return one + two

    graphs.warmup_capture(both)
    with graphs.graph(graph, stream=torch.cuda.Stream()) as held:
        out = both()
    assert sum(held.calls["rms_norm"].values()) == 2
    a.copy_(rows(seed=3))
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, RMS_NORM.reference(rows(seed=3)) + RMS_NORM.reference(b))


# a user's function

def block(x, q, k, v):
    return lz.rms_norm(x) + 1, lz.attention(q, k, v, is_causal=True)


def attention_inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 4, 32, 64, device="cuda", dtype=torch.float16) for _ in range(3)]


def test_a_function_that_can_be_captured():
    x, inputs = rows(), attention_inputs()
    original = [t.clone() for t in (x, *inputs)]
    report = validate_graph_capture(block, x, *inputs)
    print(report)
    assert report and report.replays == 3 and report.pool_bytes > 0
    assert {(c.op, c.count) for c in report.calls} == {("rms_norm", 1), ("attention", 1)}
    # they have their own numbers back
    assert all(torch.equal(a, b) for a, b in zip(original, (x, *inputs)))
    assert report.to_json()["ok"] is True


def test_what_a_function_does_wrong_is_told_with_its_line():
    def asks(x):
        y = lz.rms_norm(x)
        if y.sum().item() > 1e9:
            y = -y
        return y

    report = validate_graph_capture(asks, rows())
    assert not report and {p.kind for p in report.problems} == {"sync"}
    assert any("y.sum().item()" in p.where for p in report.problems), report

    turns: list[int] = []

    def counts(x):                             # what the host decides is frozen in the graph
        turns.append(1)
        return lz.rms_norm(x) * len(turns)

    report = validate_graph_capture(counts, rows())
    assert {p.kind for p in report.problems} == {"stale result"}, report


def test_what_a_function_raises_is_told():
    def fails(x):
        raise KeyError("no such thing")

    report = validate_graph_capture(fails, rows())
    assert ([p.kind for p in report.problems] == ["fault"]
            and "no such thing" in report.problems[0].text)
