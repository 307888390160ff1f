"""Bring your own Triton kernel: what is refused when it is declared, that its launch is told apart
as Triton does, and that it keeps the contract in Triton's interpreter. What needs a GPU is in
tests/device/test_own_triton_gpu.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                reason="triton is not installed")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(HERE / "own_triton.py")], capture_output=True,
                          text=True, env=env,
                          timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes: dict[str, list[dict[str, str]]] = {}
    for line in done.stdout.splitlines():
        outcomes.setdefault(json.loads(line)["kernel"], []).append(json.loads(line))
    return outcomes


@pytest.mark.parametrize("name", ["mine.rms_norm", "mine.tuned_num_warps2"])
def test_it_keeps_the_contract(name, results):
    ran = [r for r in results[name] if r["status"] != "skipped"]
    assert len(ran) >= 2, results[name]
    assert all(r["status"] == "passed" for r in ran), results[name]


def test_it_serves_a_call_through_lz(results):
    assert results["lz.rms_norm"] == [{"kernel": "lz.rms_norm", "status": "passed",
                                       "text": "mine.rms_norm"}]


def test_a_grid_beyond_the_limits_is_refused_before_the_launch(results):
    assert results["limits"][0]["status"] == "passed"


# declared wrongly

@pytest.fixture
def mine(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    import own_triton
    return own_triton


@pytest.mark.parametrize(("meta", "word"), [
    ({"BLOCK": 1000}, "BLOCK must be a power of two, got 1000"), ({"BLOCK": 0}, "BLOCK must be"),
    ({"num_warps": 3}, "num_warps must be a power of two, got 3"),
    ({"num_stages": 0}, "num_stages must be"),
    ({"BLOCKS": 64}, "BLOCKS is no parameter of the Triton function"),
    ({"warps": 4}, "options are maxnreg, num_ctas")])
def test_a_configuration_that_no_device_takes_is_refused_when_it_is_declared(mine, meta, word):
    import layerzero as lz
    from layerzero.operate.triton_kernels import triton_kernel
    with pytest.raises(lz.errors.RegistrationError, match=word):
        triton_kernel("mine.x", mine.OP, mine.scaled_rows, launch=mine.launch, grid=(1,), meta=meta)


def test_what_is_no_triton_function_is_refused(mine):
    import layerzero as lz
    from layerzero.operate.triton_kernels import triton_kernel, triton_kernels
    with pytest.raises(lz.errors.RegistrationError,
                       match=r"wanted a @triton\.jit function, got function"):
        triton_kernel("mine.x", mine.OP, mine.launch, launch=mine.launch, grid=(1,))
    with pytest.raises(lz.errors.RegistrationError,
                       match=r"'package\.module:name', got 'own_triton'"):
        triton_kernel("mine.x", mine.OP, "own_triton", launch=mine.launch, grid=(1,))
    with pytest.raises(lz.errors.RegistrationError,
                       match=r"launch wants a parameter 'y'; lz\.rms_norm has x, weight"):
        triton_kernel("mine.x", mine.OP, mine.scaled_rows, launch=lambda y: None, grid=(1,))
    with pytest.raises(lz.errors.RegistrationError, match="two configurations"):
        triton_kernels("mine.x", mine.OP, mine.scaled_rows, launch=mine.launch, grid=(1,),
                       configs=[{}, {}])
    with pytest.raises(lz.errors.RegistrationError, match="at least one configuration"):
        triton_kernels("mine.x", mine.OP, mine.scaled_rows, launch=mine.launch, grid=(1,),
                       configs=[])


def test_each_configuration_is_a_kernel_with_the_build_of_its_file(mine):
    from layerzero.machine.builds import build_of
    assert [k.id for k in mine.TUNED] == ["mine.tuned_num_warps2", "mine.tuned_num_warps4",
                                          "mine.tuned_num_warps8_num_stages1"]
    assert mine.MINE.jit and not mine.MINE.differentiable and mine.MINE.health == "mine"
    assert mine.MINE.load.__module__ == "own_triton" and build_of(mine.MINE).startswith("triton==")


PLUGIN = """
import torch
import layerzero as lz
from layerzero.operate.triton_kernels import triton_kernel

def launch(x, weight=None, eps=1e-6):
    return None, (x,)

KERNELS = (triton_kernel("strange.norm", lz.op("rms_norm"), "lz_strange.device:norm", launch=launch, grid=(1,)),)
"""
ASK = """
import json, sys
import layerzero as lz
row = next(k for k in lz.list_kernels("rms_norm") if k.id == "strange.norm")
print(json.dumps({"package": row.package, "triton": "triton" in sys.modules}))
"""


def test_a_plugin_declares_it_without_importing_triton(tmp_path):
    package, info = tmp_path / "lz_strange", tmp_path / "lz_strange-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lz-strange\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[layerzero.backends]\nstrange = lz_strange\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=240,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"package": "triton", "triton": False}


# what a launch tells apart

POINTERS = [torch.zeros(64), torch.zeros(64)[1:], torch.zeros(64)[4:],
            torch.zeros(8, dtype=torch.float16)]
NUMBERS = [0, 1, 2, 15, 16, 17, 32, -16, 2**31 - 1, 2**31, 2**33]
OTHERS = [1.0, 0.5, True, False, None]


def test_equal_keys_mean_equal_specialisations_to_triton(mine):
    """Triton's own binder for an NVIDIA GPU, on values that cross every line it draws."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from layerzero.backends.triton.launch import Launcher

    binder = create_function_from_signature(
        mine.scaled_rows.signature, mine.scaled_rows.params,
        make_backend(GPUTarget("cuda", 90, 32)))
    launcher = Launcher(mine.scaled_rows)
    seen: dict[object, object] = {}
    kinds: dict[object, object] = {}
    for x, hidden, eps in itertools.product(POINTERS, NUMBERS, OTHERS):
        args = (x, x, x, hidden, eps)
        wanted = repr(binder(*args, WEIGHT=True, BLOCK=64)[1])
        reader = launcher._readers.setdefault(tuple(map(type, args)),
                                              launcher._reader(tuple(map(type, args))))
        key, passed = reader(*args)
        assert seen.setdefault(key, wanted) == wanted
        assert passed == (x.data_ptr(), x.data_ptr(), x.data_ptr(), hidden, eps)
        kind = tuple(map(launcher._kind, mine.scaled_rows.params, args))
        assert kinds.setdefault(kind, wanted) == wanted
    assert len(set(kinds.values())) == len(kinds)          # and no more is told apart than need be


def test_arguments_that_are_not_understood_are_left_to_triton(mine):
    from layerzero.backends.triton.launch import Launcher
    launcher = Launcher(mine.scaled_rows)
    assert launcher._reader((torch.Tensor, torch.Tensor, torch.Tensor, tuple, float)) is None
    assert launcher._reader((torch.Tensor,)) is None


def test_a_function_with_constants_between_its_arguments_is_left_to_triton(tmp_path, monkeypatch):
    (tmp_path / "odd_order.py").write_text(
        "import triton\nimport triton.language as tl\n\n@triton.jit\ndef f(x_ptr, BLOCK: "
        "tl.constexpr, n):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import odd_order

    from layerzero.backends.triton.launch import Launcher
    assert Launcher(odd_order.f)._reader((torch.Tensor, int)) is None


@pytest.mark.parametrize(("grid", "axis"), [((2**31,), "grid x"), ((1, 65536), "grid y"),
                                            ((1, 1, 65536), "grid z"), ((-1,), "grid x"),
                                            ((1.0,), "grid x"), ((), "the grid"),
                                            ((1, 1, 1, 1), "the grid")])
def test_limits_of_a_grid(grid, axis):
    from layerzero.spec.rules.launch import LaunchLimits, grid_problems
    assert [r.fact for r in grid_problems(grid, LaunchLimits())] == [axis]
    assert not grid_problems((2**31 - 1, 65535, 65535), LaunchLimits())


def test_limits_of_a_block():
    from layerzero.spec.rules.launch import LaunchLimits, block_problems
    assert not block_problems(32, 48 << 10, LaunchLimits())
    problems = block_problems(64, 300_000, LaunchLimits(shared=232_448))
    assert [r.message for r in problems] == [
        "threads of a block must be <= 1024, got 2048",
        "shared memory of a block in bytes must be <= 232448, got 300000"]
