"""A new operation is one file in ops/, a new backend one file in backends/: everything else follows
from them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import helpers
import pytest

ROOT = Path(__file__).parents[3]

OPERATION = '''"""Gated softsign: gate / (1 + |gate|) * up. Computed in float32 or wider."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec.mistake import Mistake
from ..spec.op import Op, Tolerance
from ..spec.rules import dtypes
from .formulas.common import FLOATS


def reference(gate: Tensor, up: Tensor, gain: float = 1.0) -> Tensor:
    """gain * softsign(gate) * up, elementwise."""
    acc_dtype = torch.promote_types(gate.dtype, torch.float32)
    a = gate.to(acc_dtype)
    return (gain * a / (1 + a.abs()) * up.to(acc_dtype)).to(gate.dtype)


def meta(gate: Tensor, up: Tensor, gain: float = 1.0) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def inputs(rows: tuple[int, ...] = (5,), hidden: int = 64, gain: float = 1.0, dtype: torch.dtype = torch.float32,
           device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    gate, up = (torch.randn(*rows, hidden, generator=gen).to(device=device, dtype=dtype) for _ in range(2))
    return {"gate": gate, "up": up, "gain": gain}


OP = Op(
    name="softsign_gate", family="activation", reference=reference, meta=meta, inputs=inputs,
    cases=({}, {"rows": (2, 7)}, {"rows": (0,)}, {"hidden": 1}, {"gain": 0.5}),
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-6, 1e-6),
                         "float64": (1e-10, 1e-10)}),
    shapes={"gate": "*rows hidden", "up": "*rows hidden"}, returns=("*rows hidden",), same_dtype=("gate", "up"),
    requires=(dtypes(*FLOATS),), flops="5 * rows * hidden", bytes="3 * itemsize * rows * hidden",
    differentiable=("gate", "up"),
    mistakes=(Mistake("scale", "the gain left out", lambda op, v: None if v["gain"] == 1.0 else {
        **v, "gain": 1.0}),),
)
'''

BACKEND = '''"""torch's own functions for the gated softsign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..ops.softsign_gate import OP as softsign_gate
from ..spec.kernel import Kernel
from ..spec.rules import device, dtypes


def _gate() -> Callable[..., Any]:
    def run(gate: Tensor, up: Tensor, gain: float = 1.0) -> Tensor:
        return gain * F.softsign(gate) * up

    return run


KERNELS = (
    Kernel("torch.softsign_gate", softsign_gate, _gate, requires=(device("cpu", "cuda"), dtypes("float32", "float64")),
           deterministic=True, differentiable=True, baseline=True),
)
'''

FOLLOWS = '''
import sys
sys.path.insert(0, "docs")
import torch
import layerzero as lz
import generate
import stub
from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.certify import certify

gate, up = torch.randn(4, 8), torch.randn(4, 8)
torch.testing.assert_close(lz.softsign_gate(gate, up), torch.nn.functional.softsign(gate) * up)
assert "softsign_gate" in lz.__dir__()
assert {k.id for k in lz.list_kernels("softsign_gate")} == {"torch.softsign_gate", "reference.softsign_gate"}
assert "softsign_gate" in generate.ops() and "torch.softsign_gate" in generate.capabilities()
assert "def softsign_gate(" in stub.stubs()[stub.PACKAGE / "__init__.pyi"]


def _forgets_the_gain():
    return lambda gate, up, gain=1.0: torch.nn.functional.softsign(gate) * up


wrong = Kernel("wrong.softsign_gate", lz.op("softsign_gate"), _forgets_the_gain)
verdict = certify(wrong, stop_early=True)
assert verdict.status == "failed" and verdict.diagnosis.kind == "scale", verdict
print("all of it follows")
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    # what Python has compiled holds for the copies, which are as old as their originals
    for name in ("src", "docs", "tests/contract"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("tests/conftest.py", "tests/helpers.py", "tests/lanes.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    package = folder / "src" / "layerzero"
    (package / "ops" / "softsign_gate.py").write_text(OPERATION)
    (package / "backends" / "torch_softsign_gate.py").write_text(BACKEND)
    return folder


def run_python(copy: Path, *command: str) -> str:
    done = helpers.run_python(*command, cwd=copy, timeout=280,
                              env={**os.environ, "PYTHONPATH": str(copy / "src")})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_function_list_docs_stub_and_diagnosis_follow(copy: Path) -> None:
    assert "all of it follows" in run_python(copy, "-c", FOLLOWS)


def test_the_command_lists_it(copy: Path) -> None:
    assert "softsign_gate" in run_python(copy, "-m", "layerzero", "list")


def test_contract_and_gradient_tests_follow(copy: Path) -> None:
    output = run_python(copy, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/contract",
                        "-k",
                        "softsign_gate")
    passed = {line.partition("::")[2].partition(" PASSED")[0]
              for line in output.splitlines() if " PASSED" in line}
    floats = ("float16", "bfloat16", "float32", "float64")
    tests = {*(f"test_kernel_keeps_the_contract[reference.softsign_gate-{dtype}]"
               for dtype in floats),
             "test_kernel_keeps_the_contract[torch.softsign_gate-float32]",
             *(f"test_backward[{backend}.softsign_gate-{dtype}]"
               for backend in ("torch", "reference") for dtype in ("float32", "float64")
               if (backend, dtype) != ("torch", "float64")),
             "test_each_limit_alone_turns_an_accepted_call_away[torch.softsign_gate]"}
    assert tests <= passed, sorted(tests - passed)
