"""Broken kernels must be found, and named; right ones must pass, whatever the seed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import textwrap
from collections.abc import Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
from broken_kernels import FAULTS, Fault
from helpers import run_python
from torch import Tensor

from layerzero.backends import CATALOG as BACKENDS
from layerzero.machine import loading
from layerzero.ops import CATALOG as OPS
from layerzero.spec.kernel import Kernel
from layerzero.verify.cases.generated import cases_for
from layerzero.verify.certification.certify import certify
from layerzero.verify.diagnosis.diagnose import CLASSES
from layerzero.verify.kernel.contract import case_refusals, case_values, check_case
from layerzero.verify.kernel.gradients import check_gradients, gradient_cases

SEEDS = int(os.environ.get("LZ_TEST_SEEDS", "0"))      # 20 takes an hour
HERE = Path(__file__).parent


# One op after the other, here and below: its inputs and references are kept while it lasts.
@pytest.mark.parametrize("fault", sorted(FAULTS, key=lambda f: f.op.name), ids=lambda f: f.name)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    verdict = certify(fault.kernel(), stop_early=True)
    assert verdict.status == "failed" and verdict.certificate is None
    assert verdict.diagnosis is not None and verdict.diagnosis.kind in CLASSES
    assert verdict.diagnosis.kind in fault.kinds, str(verdict.diagnosis)


def test_every_fault_is_another() -> None:
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 24 + 10
    assert {kind for f in FAULTS for kind in f.kinds} <= CLASSES.keys()


# What is right passes.

KERNELS = sorted((kernel for name in BACKENDS
                  for kernel in importlib.import_module(f"layerzero.backends.{name}").KERNELS
                  if not kernel.jit and loading.availability(kernel) is None),
                 key=lambda kernel: kernel.op.name)


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_a_right_kernel_passes_for_another_seed(kernel: Kernel, seed: int) -> None:
    """Some of the cases of each; the whole grid is in tests/contract, and all seeds in the test
    below."""
    op = kernel.op
    dtypes = ("float32", "bfloat16") if "bfloat16" in op.dtypes else op.dtypes[:1]
    cells = ((case, dtype) for dtype in dtypes for case in op.cases[seed % 3::3])
    served = islice((c for c in cells if not case_refusals(kernel, *c)), 4)
    results = [check_case(kernel, case, dtype, seed=seed) for case, dtype in served]
    results += [check_gradients(kernel, case, "float32", seed=seed)
                for case in gradient_cases(op)[:1]]
    if all(r.status == "skipped" for r in results):
        pytest.skip("its rules refuse these cases here")
    assert not [str(r) for r in results if r.status == "failed"]


@pytest.mark.stress
@pytest.mark.skipif(not SEEDS, reason="takes an hour; LZ_TEST_SEEDS=20 runs it")
@pytest.mark.parametrize("kernel", KERNELS if SEEDS else KERNELS[:1], ids=lambda k: k.id)
def test_a_right_kernel_passes_for_every_seed(kernel: Kernel) -> None:
    verdict = certify(kernel, lane="quick", seeds=range(SEEDS))
    assert verdict.status != "failed", f"{verdict.diagnosis}\n" + "\n".join(
        map(str, verdict.failures[:5]))


@pytest.mark.parametrize("name", OPS)
def test_the_cases_vary_every_argument(name: str) -> None:
    """A parameter that has one value in all cases is one that a kernel may ignore unseen."""
    op = importlib.import_module(f"layerzero.ops.{name}").OP
    seen: dict[str, set[str]] = {p.name: set() for p in op.params}
    wanted = {p.name: 2 if p.optional or p.kind != "tensor" else 1 for p in op.params}

    def cells() -> Iterator[tuple[str, Mapping[str, Any]]]:
        yield from product(op.dtypes, op.cases)                # nearly always they are enough
        yield from product(op.dtypes, cases_for(op, "quick"))

    for dtype, case in cells():
        for argument, value in case_values(op, case, dtype).items():
            seen[argument].add("a tensor" if isinstance(value, Tensor) else repr(value)[:400])
        same = {name for name, count in wanted.items() if len(seen[name]) < count}
        if not same - ALIKE:                   # the rest could only show more
            return
    assert same <= ALIKE


# Random by nature; a switch for what torch asks for; a tokenizer is told from another by other
# tests.
ALIKE = {"dropout_p", "enable_gqa", "tokenizer", "generator", "seed_rows"}


# Two libraries that really do it, where they are installed.

def run(code: str) -> str:
    """What `code` prints last in a process of its own: these libraries change torch for good."""
    env = {**os.environ,
           "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = run_python("-c", textwrap.dedent(code), env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_zentorch_as_it_comes_is_caught_overwriting_the_weight() -> None:
    if importlib.util.find_spec("zentorch") is None:
        pytest.skip("zentorch is not installed")
    out = run("""
        import torch
        try:
            import zentorch
        except ImportError as e:
            print("skip:", str(e).splitlines()[0])
            raise SystemExit
        from layerzero.ops.linear import OP
        from layerzero.spec.kernel import Kernel
        from layerzero.verify.kernel.contract import check_case

        def load():
            product = torch.ops.zentorch.zentorch_linear_unary.default
            return lambda x, weight: product(x, weight, None)

        result = check_case(Kernel("zentorch.as_it_comes", OP, load), {"bias": False}, "bfloat16")
        print(result.status, result.kinds, result.detail)
    """)
    if out.startswith("skip:"):
        pytest.skip(out)
    assert out == "failed ('in-place change',) weight was overwritten"


def test_openvino_as_it_comes_is_caught_computing_float32_in_bfloat16() -> None:
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    out = run("""
        import numpy, openvino, torch
        import openvino.opset13 as ops
        from layerzero.ops.linear import OP
        from layerzero.spec.kernel import Kernel
        from layerzero.verify.certification.certify import certify

        core = openvino.Core()

        def load():
            def run(x, weight):
                rows = ops.parameter([-1, x.shape[-1]], numpy.float32)
                stored = ops.constant(weight.contiguous().numpy())
                model = openvino.Model([ops.matmul(rows, stored, False, True)], [rows])
                made = core.compile_model(model, "CPU")(x.reshape(-1, x.shape[-1]).contiguous().numpy())[0]
                return torch.from_numpy(made.copy()).reshape(*x.shape[:-1], weight.shape[0])
            return run

        hint = core.get_property("CPU", "INFERENCE_PRECISION_HINT")
        if hint not in (openvino.Type.bf16, openvino.Type.dynamic):
            print("skip: this CPU computes in float32")
            raise SystemExit
        from layerzero.spec.rules import absent, dtypes, at_least
        kernel = Kernel("openvino.as_it_comes", OP, load, differentiable=False, requires=(
            dtypes("float32"), absent("bias.dtype"), absent("activation"), at_least("rows", 1),
            at_least("in_features", 1), at_least("out_features", 1)))
        verdict = certify(kernel, stop_early=True)
        assert not verdict.failures or "fault" not in verdict.failures[0].kinds, verdict.failures[0].detail
        print(verdict.status, verdict.diagnosis.kind if verdict.diagnosis else "")
    """)
    if out.startswith("skip:"):
        pytest.skip(out)
    if out == "passed ":
        pytest.skip("this build of openvino keeps float32")
    assert out == "failed precision"
