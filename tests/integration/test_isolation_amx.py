"""A library whose AMX tiles torch takes away: it kills the process that both live in, and serves
from a worker. It is how ggml uses them; the real ggml is not needed."""

from __future__ import annotations

import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import amx_kernels
import pytest
import torch
from helpers import world  # noqa: F401

import layerzero as lz
from layerzero.machine.isolation import pool as pools


def has_amx() -> bool:
    info = Path("/proc/cpuinfo")
    return (platform.machine() == "x86_64" and info.exists() and "amx_bf16" in info.read_text()
            and shutil.which("gcc") is not None)


pytestmark = [pytest.mark.usefixtures("world"),
              pytest.mark.skipif(not has_amx(), reason="needs a CPU with AMX, and gcc")]
TOGETHER = """
import torch, amx_kernels
torch.set_num_threads(1)
run = amx_kernels.load()
x, weight = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
first = run(x, weight)
torch.testing.assert_close(first, x @ weight.T, atol=0.1, rtol=0.05)
torch.randn(512, 512).bfloat16() @ torch.randn(512, 512).bfloat16()
assert torch.equal(run(x, weight), first)
"""


def test_two_users_of_amx_tiles_serve_one_process():
    together = subprocess.run([sys.executable, "-c", TOGETHER], capture_output=True, text=True,
                              cwd=Path(__file__).parent, timeout=120)
    if together.returncode == 0:
        pytest.skip("torch's products leave the tiles of this thread as they are")
    assert together.returncode == -signal.SIGILL, together.stderr[-500:]
    lz.register(amx_kernels.KERNELS[0])
    lz.configure(isolation="amx_tiles.*=worker", isolation_memory=64 << 20)
    x, weight = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    first = lz.linear(x, weight, backend="worker.amx_tiles.linear")
    for _ in range(3):
        large = torch.randn(512, 512).bfloat16()
        assert torch.isfinite(large @ large).all()         # with torch's own tiles, here
        assert torch.equal(lz.linear(x, weight, backend="worker.amx_tiles.linear"), first)
    torch.testing.assert_close(first, x @ weight.T, atol=0.1, rtol=0.05)
    pools.close_others(set())
