"""`import layerzero` brings nothing along: no backend library, no compiler, no command line, no
GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import layerzero as lz

FORBIDDEN = ("flash_attn", "flash_attn_interface", "xformers", "triton", "flashinfer",
             "liger_kernel", "transformers", "diffusers", "torch._dynamo", "torch._inductor",
             "yaml", "rich", "typer", "click", "prometheus_client",
             "opentelemetry")


# one process in all: what is imported, and whether a GPU is started, step by step
STEPS = """
import json, sys
loaded = lambda: sorted(sys.modules)
import torch
steps = {"torch": loaded()}
import layerzero
steps["import"] = loaded()
layerzero.rms_norm(torch.ones(2, 8))
steps["call"] = loaded()
layerzero.list_kernels(device="cpu")
print(json.dumps({**steps, "gpu": torch.cuda.is_initialized()}))
"""


@pytest.fixture(scope="module")
def steps() -> dict:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True,
                          timeout=240, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def new_modules(steps: dict, step: str) -> set[str]:
    return set(steps[step]) - set(steps["torch"])


def of(roots: tuple[str, ...], modules: set[str]) -> set[str]:
    return {m for m in modules if any(m == root or m.startswith(root + ".") for root in roots)}


def test_import_brings_no_library(steps):
    new = new_modules(steps, "import")
    assert "layerzero.dispatch.dispatcher" in new
    assert of(FORBIDDEN, new) == set()


def test_import_reads_no_backend_file(steps):
    """They are read on the first call or question, not before."""
    new = new_modules(steps, "import")
    assert {m for m in new if m.startswith("layerzero.backends.")} == set()


def test_a_call_on_the_cpu_brings_no_library(steps):
    new = new_modules(steps, "call")
    assert any(m.startswith("layerzero.backends.") for m in new)
    assert of(FORBIDDEN, new) == set()


def test_neither_import_nor_a_call_on_the_cpu_starts_a_gpu(steps):
    assert steps["gpu"] is False


def test_every_public_name_is_there():
    assert [name for name in lz.__all__ if not hasattr(lz, name)] == []
