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


def modules_after(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c",
                           f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"],
                          capture_output=True, text=True, timeout=240, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def torch_alone() -> set[str]:
    return modules_after("import torch")


def of(roots: tuple[str, ...], modules: set[str]) -> set[str]:
    return {m for m in modules if any(m == root or m.startswith(root + ".") for root in roots)}


def test_import_brings_no_library(torch_alone):
    new = modules_after("import layerzero") - torch_alone
    assert "layerzero.dispatch.dispatcher" in new
    assert of(FORBIDDEN, new) == set()


def test_import_reads_no_backend_file(torch_alone):
    """They are read on the first call or question, not before."""
    new = modules_after("import layerzero") - torch_alone
    assert {m for m in new if m.startswith("layerzero.backends.")} == set()


def test_a_call_on_the_cpu_brings_no_library(torch_alone):
    new = modules_after(
        "import torch, layerzero\nlayerzero.rms_norm(torch.ones(2, 8))") - torch_alone
    assert any(m.startswith("layerzero.backends.") for m in new)
    assert of(FORBIDDEN, new) == set()


def test_import_starts_no_gpu():
    code = ("import torch, layerzero; layerzero.list_kernels(device='cpu'); "
            "print(torch.cuda.is_initialized())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240,
                          check=True)
    assert done.stdout.strip() == "False"


def test_every_public_name_is_there():
    assert [name for name in lz.__all__ if not hasattr(lz, name)] == []
