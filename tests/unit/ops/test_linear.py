"""Linear layers: who serves them, their gradients, and libraries that do not behave."""

from __future__ import annotations

import importlib.util
import os
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import run_python
from torch.nn import functional as F

import layerzero as lz
from layerzero.machine.hardware import probe
from layerzero.spec.reason import Code

INTEL = "avx512f" in probe("cpu").isa
ACTIVATIONS = {None: lambda t: t, "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
               "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_torchs_linear_layer(activation, dtype):
    gen = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=gen).to(dtype)
                       for s in ((2, 9, 64), (48, 64), (48,)))
    want = ACTIVATIONS[activation](F.linear(x.double(), weight.double(), bias.double()))
    out = lz.linear(x, weight, bias, activation)
    assert out.dtype == dtype and out.shape == (2, 9, 48)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=rtol * 8)


@pytest.mark.skipif(not INTEL, reason="torch.linear_prepacked needs AVX-512")
def test_who_may_serve_which_layer():
    """Torch's own is the default; what goes before it was measured, or does less work on this
    processor."""
    def others(rows, dtype, **kwargs):
        x, weight = torch.empty(rows, 576, dtype=dtype), torch.empty(1536, 576, dtype=dtype)
        plan = lz.explain("linear", x, weight.requires_grad_(kwargs.get("grad", False)))
        assert all(s.score.source == "less work"
                   for s in plan.steps[:[s.kernel for s in plan.steps].index(OWN)])
        return {s.kernel for s in plan.steps} - {OWN, "reference.linear"}

    OWN = "torch.linear"
    assert "torch.linear_prepacked" in others(4, torch.float32) & others(128, torch.float32)
    assert not others(4, torch.bfloat16, grad=True)
    assert lz.which("linear", torch.empty(2, 8), torch.empty(8, 8)) == OWN


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_gradients(activation):
    gen = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(s, generator=gen, dtype=torch.float64, requires_grad=True)
                       for s in ((3, 5), (4, 5), (4,)))
    assert torch.autograd.gradcheck(lambda x, w, b: lz.linear(x, w, b, activation),
                                    (x, weight, bias))


def test_gradients_are_torchs():
    gen = torch.Generator().manual_seed(2)
    ours = [torch.randn(s, generator=gen).requires_grad_() for s in ((6, 32), (16, 32), (16,))]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    lz.linear(*ours, activation="relu").square().sum().backward()
    F.relu(F.linear(*theirs)).square().sum().backward()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(("change", "code", "name"), [
    ({"weight": torch.ones(8, 15)}, Code.DIM_MISMATCH, "weight"),
    ({"weight": torch.ones(16)}, Code.WRONG_NDIM, "weight"),
    ({"bias": torch.ones(9)}, Code.DIM_MISMATCH, "bias"),
    ({"x": torch.ones(())}, Code.WRONG_NDIM, "x"),
    ({"weight": torch.ones(8, 16).bfloat16()}, Code.MIXED_DTYPES, "weight"),
    ({"activation": "tanh"}, Code.VALUE_OUT_OF_RANGE, "activation"),
    ({"x": torch.ones(2, 16, dtype=torch.int64), "weight": torch.ones(8, 16, dtype=torch.int64)},
     Code.DTYPE_UNSUPPORTED, "dtype")])
def test_a_wrong_argument_is_named(change, code, name):
    with pytest.raises(lz.errors.InvalidCall) as error:
        lz.linear(**{"x": torch.ones(2, 16), "weight": torch.ones(8, 16), **change})
    assert any(r.code is code and r.fact.startswith(name)
               for r in error.value.reasons), str(error.value)


def test_autocast_is_that_of_torch():
    x, weight = torch.randn(4, 32), torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out, want = lz.linear(x, weight), F.linear(x, weight)
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want)


def test_inside_torch_compile():
    compiled = torch.compile(lambda x, w: lz.linear(x, w, activation="silu") + 1, fullgraph=True,
                             backend="aot_eager",
                             dynamic=True)
    for rows in (3, 8, 40):
        x, weight = torch.randn(rows, 32), torch.randn(16, 32)
        torch.testing.assert_close(compiled(x, weight), F.silu(F.linear(x, weight)) + 1)


# Libraries that are not here, are of another version, or want watching. Each in a process of its
# own.

def run(code: str, *path: str, timeout: float = 300.0) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((*path, os.environ["PYTHONPATH"])),
           "OMP_NUM_THREADS": "1"}
    done = run_python("-c", textwrap.dedent(code), env=env, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(("package", "kernel"), [
    ("zentorch", "zentorch.linear"), ("intel_extension_for_pytorch", "ipex.linear")])
def test_another_version_is_called_a_conflict_and_never_imported(tmp_path: Path, package, kernel):
    distribution, version = package, "1.0.0"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise SystemExit('imported')")
    info = tmp_path / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    out = run(f"""
        import torch, layerzero as lz
        x, w = torch.randn(4, 32), torch.randn(16, 32)
        assert torch.allclose(lz.linear(x, w), torch.nn.functional.linear(x, w), atol=1e-5)
        reasons = lz.validate("linear", "{kernel}", x, w)
        print([str(r.code) for r in reasons if str(r.code) != "CPU_ISA_MISSING"])
    """, str(tmp_path))
    assert out == "['VERSION_CONFLICT']"


CERTIFY = """
    import torch, layerzero as lz
    from layerzero.world import snapshot as world
    from layerzero.verify.kernel.contract import check_kernel
    kernel = world.current().catalog.by_id["{kernel}"]
    results = check_kernel(kernel)
    failed = [str(r) for r in results if r.status == "failed"]
    assert not failed, failed
    assert sum(r.passed for r in results) >= 40, [str(r) for r in results if not r.passed][:3]
    x = torch.randn(8, 64).bfloat16()
    weight = torch.randn(32, 64).bfloat16()
    kept = weight.clone()
    for _ in range(2):
        out = lz.linear(x, weight, backend="{kernel}")
        assert torch.equal(weight, kept), "the caller's weight was overwritten"
    weight.mul_(-3)
    changed = lz.linear(x, weight, backend="{kernel}")
    torch.testing.assert_close(changed, torch.nn.functional.linear(x, weight), rtol=2e-2, atol=0.1)
    print("certified")
"""


@pytest.mark.parametrize(("package", "kernel"), [
    ("zentorch", "zentorch.linear"), ("intel_extension_for_pytorch", "ipex.linear")])
def test_a_library_that_is_here_keeps_the_contract_and_leaves_weights_alone(package, kernel):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    refused = lz.validate("linear", kernel, torch.randn(8, 64).bfloat16(),
                          torch.randn(32, 64).bfloat16())
    conflicts = [r for r in refused if r.code in (Code.VERSION_CONFLICT, Code.CPU_ISA_MISSING)]
    if conflicts:
        pytest.skip(str(conflicts[0]))
    assert run(CERTIFY.format(kernel=kernel)) == "certified"
