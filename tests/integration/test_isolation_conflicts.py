"""Libraries that cannot live in one process, serving in one process tree: another torch, and
OpenVINO, each in the interpreter that ISOLATION_PYTHON names.

    python -m venv /tmp/other && /tmp/other/bin/pip install torch==2.8.0 numpy packaging openvino
    ISOLATION_PYTHON=/tmp/other/bin/python pytest tests/integration/test_isolation_conflicts.py
"""

from __future__ import annotations

import os

import openvino_kernels
import pytest
import torch
from helpers import world  # noqa: F401

import layerzero as lz
from layerzero.machine.isolation import pool as pools
from layerzero.operate.matrix import matrix
from layerzero.spec.reason import Code
from layerzero.world.registry import isolation

PYTHON = os.environ.get("ISOLATION_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ISOLATION_PYTHON names no other interpreter"),
    pytest.mark.usefixtures("world")]


@pytest.fixture(autouse=True)
def ended():
    yield
    pools.close_others(set())


def test_two_versions_of_torch_serve_one_process():
    there = isolation.version_in(PYTHON, "torch")
    if there.partition("+")[0] == torch.__version__.partition("+")[0]:
        pytest.skip(f"{PYTHON} has the same torch, {there}")
    lz.configure(isolation=[f"torch.rms_norm=worker:{PYTHON}", "torch.layer_norm=worker"],
                 isolation_memory=256 << 20)
    x, weight = torch.randn(64, 1024), torch.rand(1024)
    other = lz.rms_norm(x, weight, backend="worker.torch.rms_norm")
    same = lz.layer_norm(x, weight, backend="worker.torch.layer_norm")
    torch_versions = {p.python: p.workers[0].versions["torch"] for p in pools.pools()}
    assert torch_versions[PYTHON].partition("+")[0] == there.partition("+")[0]
    assert torch_versions[""] == torch.__version__
    torch.testing.assert_close(other, torch.rms_norm(x, (1024,), weight, 1e-6))
    torch.testing.assert_close(same, torch.layer_norm(x, (1024,), weight))
    half = x.bfloat16().T[:64]
    torch.testing.assert_close(lz.rms_norm(half, backend="worker.torch.rms_norm"),
                               torch.rms_norm(half, (64,), None, 1e-6))


def test_a_library_of_another_interpreter_serves_by_itself():
    if not isolation.version_in(PYTHON, "openvino"):
        pytest.skip(f"{PYTHON} has no openvino")
    lz.register(openvino_kernels.KERNELS[0])
    lz.configure(isolation=f"*=auto:{PYTHON}", isolation_memory=256 << 20)
    x, weight = torch.randn(8, 256), torch.randn(128, 256)
    plan = lz.explain("linear", x, weight)
    assert "worker.openvino.linear" in [step.kernel for step in plan.steps]
    here = next(r for r in plan.rejected if r.kernel == "openvino.linear")
    assert here.reasons[0].code is Code.NOT_INSTALLED
    out = lz.linear(x, weight, backend="worker.openvino.linear")
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight), atol=1e-4, rtol=1e-4)
    row = next(row for row in matrix().rows if row.library == "openvino")
    assert (row.verdict, row.worker, row.worker_verdict) == ("not installed", PYTHON, "fits")
    assert row.ok
