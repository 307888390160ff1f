"""planes.cu in the emulator keeps the contract of quantized_linear, for whatever one row of x
holds.
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.linear import gemv, planes
from layerzero.ops import quantized_linear as op

from .run import COMPILER, Kernel, assert_contract

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

FULL = os.environ.get("LZ_TEST_FULL") == "1"
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bfloat16", {"k": 1024, "n": 48, "group": 128, "bias": True}),
    ("float16", {"k": 544, "n": 17, "group": 256, "symmetric": False, "scale_dtype": "float16",
                 "stride": "sparse"}),
    ("bfloat16", {"k": 32, "n": 40, "group": 0, "scale_dtype": "bfloat16", "bias": True}),
    ("bfloat16", {"k": 1024, "n": 33, "group": 128, "symmetric": False}),
)
# What makes a launch go through: two pairs of a warp, clusters, several rounds, inputs that warps
# have no part of.
CONFIGS = (planes.Config(5, blocks=2, slots=2), planes.Config(2, 2, split=2, slots=1))


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiler, "kernel", Kernel)
    planes._prepare.cache_clear()
    yield
    planes._prepare.cache_clear()


def assert_row(dtype: str, case: dict[str, Any]) -> None:
    assert_contract("cuda.quantized_linear", {"format": "int4", "rows": (1,), **case}, dtype)


@pytest.mark.parametrize("dtype, case", CASES)
def test_contract(dtype: str, case: dict[str, Any]) -> None:
    assert planes.is_supported(1, case["k"], "int4", case["group"])
    assert_row(dtype, case)


@pytest.mark.skipif(not FULL, reason="LZ_TEST_FULL=1 asks for it")
@pytest.mark.parametrize("k", [32, 96, 544, 1184, 4096, 8480])
def test_contract_everywhere(k: int) -> None:
    for n, (group, dtype, scale) in enumerate(product((0, 128, 384), ("bfloat16", "float16"),
                                                      ("", "bfloat16", "float16"))):
        assert_row(dtype, {"k": k, "n": (17, 40, 64)[n % 3], "group": group, "symmetric": n % 4 > 1,
                           "bias": n % 2 == 1, "scale_dtype": scale})


def values_of(k: int = 1024, n: int = 48, group: int = 128, dtype: torch.dtype = torch.bfloat16,
              **more: Any) -> dict[str, Any]:
    return op.inputs(format="int4", rows=(1,), k=k, n=n, group=group, bias=True, dtype=dtype,
                     **more)


def run(values: dict[str, Any], config: planes.Config | None = None) -> Tensor:
    out = torch.full((1, values["weight_q"].shape[0]), torch.nan, dtype=values["x"].dtype)
    arguments = [values[name] for name in ("x", "weight_q", "scales", "zeros", "bias",
                                           "group_size")]
    planes.launch(out, *arguments, chosen=config)
    return out


def assert_as_exact_as_eager(values: dict[str, Any], got: Tensor) -> None:
    truth = op.reference(**{**values,
                            **{name: values[name].double() for name in ("x", "scales", "bias")}})
    eager = (op.reference(**values).double() - truth).abs().max()
    assert (got.double() - truth).abs().max() <= 2 * eager


@pytest.mark.parametrize("config", CONFIGS)
def test_any_configuration_computes_the_same(config: planes.Config) -> None:
    values = values_of(1056 if config.pairs * 256 > 1024 else 1024, 200)
    got = run(values, config)
    assert_as_exact_as_eager(values, got)
    assert torch.equal(run(values, config), got)


def test_a_long_row_is_shared_by_a_cluster() -> None:
    """And so is one of few rows of the weight, of which no multiprocessor should go without its
    part."""
    values = values_of(8448, 17)
    assert planes.config(planes.Shape(17, 8448, 128, False), compiler.Machine()).split > 1
    assert_as_exact_as_eager(values, run(values))


@pytest.mark.parametrize("symmetric", [True, False])
def test_inputs_that_are_far_from_each_other(symmetric: bool) -> None:
    values = values_of(symmetric=symmetric)
    x, column = values["x"].clone(), torch.arange(1024)
    for scaled in (x * 1e-36, x * 1e36, x * 1e-39, x.abs(), x.abs() * 1e4,
                   torch.where(column % 97 == 3, x * 1e4, x),
                   torch.where(column % 200 == 7, x * 2 ** 20, x)):
        values["x"] = scaled
        assert_as_exact_as_eager(values, run(values))
    values["x"] = torch.zeros_like(x)
    assert torch.equal(run(values)[0], values["bias"])


@pytest.mark.parametrize("options", [
    {}, {"k": 544, "n": 17, "group": 256, "symmetric": False, "scale_dtype": "float16",
         "dtype": torch.float16}])
def test_what_is_not_a_number_is_seen_everywhere(options: dict[str, Any]) -> None:
    values = values_of(**options)
    for wrong in (torch.nan, torch.inf):
        values["x"][0, 300] = wrong
        assert run(values).isnan().all()


def test_every_row_of_x_but_the_only_one_goes_elsewhere() -> None:
    assert planes.is_supported(1, 4096, "int4", 128) and planes.is_supported(1, 1 << 15, "int4", 0)
    for rows, format, group in ((2, "int4", 128), (1, "int8", 128), (1, "fp8_e4m3", 0),
                                (1, "int4", 64)):
        assert not planes.is_supported(rows, 4096, format, group)
    values = values_of()
    arguments = [values[name] for name in ("x", "weight_q", "scales", "zeros", "bias")]
    assert torch.equal(gemv.launch(*arguments, "int4", 128), run(values))


@pytest.mark.parametrize("machine", [compiler.Machine(8), compiler.Machine(132),
                                     compiler.Machine(48, 99 << 10)])
def test_every_configuration_can_be_launched(machine: compiler.Machine) -> None:
    for n, k in product((1, 17, 1024, 4096, 14336, 128256),
                        (32, 544, 2048, 4096, 11008, 14336, 1 << 15)):
        shape = planes.Shape(n, k, 128, False)
        config = planes.with_slots(shape, planes.config(shape, machine), machine)
        assert (config.pairs >= -(-k // 256) and config.own <= planes.MAX_PAIRS_PER_WARP
                and config.split <= planes.MAX_SPLIT)
        assert (config.warps * config.blocks <= planes.MAX_WARPS
                and config.slots % (2 // config.own) == 0)
        assert config.shared <= machine.shared // config.blocks, (shape, config)
