"""A worker that serves calls of a GPU: through memory that both processes have mapped."""

from __future__ import annotations

import pytest
import torch
from helpers import world  # noqa: F401

import layerzero as lz
from layerzero.errors import KernelExecutionError
from layerzero.machine.isolation import cuda
from layerzero.machine.isolation import pool as pools

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("world"),
              pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
WORKER = "worker.torch.rms_norm"


@pytest.fixture
def worker(world):  # noqa: F811
    lz.configure(isolation="torch.rms_norm=worker", isolation_memory=1 << 30)
    lz.rms_norm(torch.randn(2, 8, device="cuda"), backend=WORKER)
    yield pools.pools()[0].workers[0]
    pools.close_others(set())


def same(x: torch.Tensor, weight: torch.Tensor | None = None) -> None:
    with torch.no_grad():
        out = lz.rms_norm(x, weight, backend=WORKER)
        wanted = torch.rms_norm(x, x.shape[-1:], weight, 1e-6)
    assert out.device == x.device and out.stride() == wanted.stride() and torch.equal(out, wanted)


def test_calls_of_a_gpu(worker, monkeypatch):
    weight = torch.rand(64, device="cuda")
    for x in (torch.randn(4, 64, device="cuda"), torch.randn(64, 4, device="cuda").T,
              torch.randn(1, 64, device="cuda").expand(4, 64),
              torch.randn(4, 128, device="cuda")[:, ::2], torch.randn(0, 64, device="cuda")):
        for _ in range(3):
            same(x, weight)
    stage = worker.stages[0]
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):                         # streams wait for each other
        for _ in range(20):
            same(torch.randn(512, 1024, device="cuda"))
    for rows in (8192, 16384):                             # beyond the first stage: a larger one
        same(torch.randn(rows, 1024, device="cuda"))
    assert worker.stages[0] is not stage and worker.stages[0].size > stage.size
    same(torch.randn(4, 64, device="cuda"), weight)
    monkeypatch.setattr(cuda, "LARGEST", 1 << 20)          # beyond the largest: by handles
    same(torch.randn(4096, 1024, device="cuda"))
    same(torch.randn(4, 64, device="cuda"), weight)


def test_a_worker_that_dies_leaves_its_memory_to_the_next(worker):
    kept = [worker.stages[0].memory, *cuda._spare]         # what outgrown stages left, too
    worker.process.kill()
    with pytest.raises(KernelExecutionError, match="signal 9"):
        lz.rms_norm(torch.randn(3, 8, device="cuda"), backend=WORKER)
    pools.pools()[0].wait()
    same(torch.randn(4, 64, device="cuda"))
    memory = pools.pools()[0].workers[0].stages[0].memory
    assert any(memory.data_ptr() == t.data_ptr() for t in kept)
