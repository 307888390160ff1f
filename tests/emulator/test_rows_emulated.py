"""rows.cu in the emulator keeps the contract of linear, whatever it is configured to."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.compiler import Machine
from layerzero.backends.cuda.linear import rows
from layerzero.ops import linear as op

from .run import COMPILER, Kernel, assert_contract

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bfloat16", {"rows": (2, 4), "k": 520, "n": 72}),
    ("float16", {"rows": (11,), "k": 264, "n": 17, "bias": False, "stride": "padded"}),
    ("bfloat16", {"rows": (1,), "k": 8, "n": 1}),
)
# rows, and what makes a launch go through all of its parts: clusters, more tiles than fit between
# two sums, rings shorter and longer than a tile
CONFIGS = ((3, rows.Config(1, 3, warps=4, slots=2)), (8, rows.Config(2, 9, warps=2, slots=1)),
           (16, rows.Config(4, 2, warps=2, slots=3)))


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiler, "kernel", Kernel)
    rows._prepare.cache_clear()
    yield
    rows._prepare.cache_clear()


@pytest.mark.parametrize("dtype, case", CASES)
def test_contract(dtype: str, case: dict[str, Any]) -> None:
    assert_contract("cuda.linear_rows", case, dtype)


def values_of(count: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Returns arguments, what torch computes of them, and what is true."""
    values = op.inputs(rows=(count,), k=328, n=20 * 16 + 10, dtype=torch.bfloat16)
    del values["activation"]
    return values, op.reference(**values), op.reference(**{n: t.double() for n, t in values.items()})


def assert_as_exact(got: Tensor, eager: Tensor, truth: Tensor) -> None:
    assert (got.double() - truth).abs().max() <= 2 * (eager.double() - truth).abs().max()


@pytest.mark.parametrize("count, config", CONFIGS)
def test_any_configuration_computes_the_same(count: int, config: rows.Config) -> None:
    values, eager, truth = values_of(count)
    got = rows.launch(**values, chosen=config)
    assert_as_exact(got, eager, truth)
    # neither the other rows nor how many there are matters
    few = rows.launch(values["x"][:count - 1], values["weight"], values["bias"], config)
    assert torch.equal(few, got[:-1])


def test_products_that_end_with_the_activation_or_in_float32() -> None:
    values, *products = values_of(3)
    config = rows.Config(2, 3, warps=2, slots=2)
    gated = rows.launch(**values, chosen=config, gated=True)
    assert_as_exact(gated, *(silu(t.chunk(2, -1)[0]) * t.chunk(2, -1)[1] for t in products))
    wide = rows.launch(**values, chosen=config, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert (wide.double() - products[1]).abs().max() < 1e-5


@pytest.mark.parametrize("machine", [Machine(8), Machine(132), Machine(48, 99 << 10)])
def test_every_configuration_can_be_launched(machine: Machine) -> None:
    for columns, n, k in product((1, 2), (1, 1024, 14336, 128256), (8, 576, 4096, 14336, 16384)):
        shape = rows.Shape(columns, n, k)
        config = rows.with_stages(shape, rows.config(shape, machine), machine)
        assert shape.units(config) * columns <= rows.MAX_UNITS
        assert config.stages > 1 and shape.shared(config) <= machine.shared
        assert rows.clusters(shape, machine.processors // config.split) <= shape.tiles
