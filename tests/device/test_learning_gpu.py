"""Learning while serving on a CUDA device: without waiting for it, and never inside a capture."""

from __future__ import annotations

import pytest
import torch
from helpers import world

import layerzero as lz
from layerzero.dispatch.background import learning
from layerzero.dispatch.background.exploring import LearnedKind

__all__ = ["world"]                            # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("world")]


@pytest.fixture
def learn(world):
    learning.reset()
    lz.configure(learn=True, perfdb="off", shipped_measurements=False)
    yield
    learning.reset()


def tensors(rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16),
            torch.ones(4096, device="cuda", dtype=torch.bfloat16))


def start(*values: torch.Tensor) -> LearnedKind:
    lz.rms_norm(*values)
    assert learning.flush()
    return next(iter(learning._kinds.values()))


@torch.no_grad()
def test_it_learns_and_no_call_waits_for_the_device(learn):
    x, weight = tensors()
    kind = start(x, weight)
    want = lz.rms_norm(x, weight)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")    # whatever waits for the device raises
    try:
        for _ in range(1500):
            out = lz.rms_norm(x, weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    assert learning.flush()
    assert kind.trial.winner and learning.status().learning == 0
    if kind.trial.clear:
        assert lz.explain("rms_norm", x, weight).steps[0].score.source == "measured"


@torch.no_grad()
def test_never_inside_a_capture(learn):
    x, weight = tensors()
    kind = start(x, weight)
    want = lz.rms_norm(x, weight)
    torch.cuda.synchronize()
    before, graph = kind.trial.calls, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            out = lz.rms_norm(x, weight)
    assert kind.trial.calls == before
    graph.replay()
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_a_call_on_a_stream_beside_is_timed_there(learn):
    x, weight = tensors()
    kind = start(x, weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(50):
            lz.rms_norm(x, weight)
    side.synchronize()
    lz.rms_norm(x, weight)
    assert kind.trial.samples > 0 or kind.trial.winner
