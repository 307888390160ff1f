"""gemv.cu in the emulator keeps the contract of quantized_linear, whatever it is configured to."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.linear import gemv
from layerzero.ops import quantized_linear as op

from .run import COMPILER, Kernel, assert_contract

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

FULL = os.environ.get("LZ_TEST_FULL") == "1"
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bfloat16", {"format": "int4", "rows": (2,), "k": 1024, "n": 48, "group": 128, "bias": True}),
    ("float16", {"format": "int4", "rows": (3, 3), "k": 544, "n": 17, "group": 32,
                 "symmetric": False,
                 "scale_dtype": "bfloat16"}),
    ("float16", {"format": "int8", "rows": (2,), "k": 1040, "n": 40, "group": 32,
                 "stride": "sparse"}),
    ("bfloat16", {"format": "int8", "rows": (5,), "k": 144, "n": 8, "bias": True,
                  "stride": "padded"}),
    ("bfloat16", {"format": "fp8_e4m3", "rows": (2,), "k": 336, "n": 24, "group": 128,
                  "scale_dtype": "float16"}),
)
# rows, parts of a launch, and what makes it go through them: clusters, tall tiles, several rounds,
# teams.
CONFIGS = (
    (1, gemv.Config(4, 2, 3, slots=2)), (9, gemv.Config(4, 2, 2, split=2, slots=2)),
    (16, gemv.Config(4, 4, 2, tall=2)), (3, gemv.Config(2, 1, 8, split=4)),
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiler, "kernel", Kernel)
    gemv._prepare.cache_clear()
    yield
    gemv._prepare.cache_clear()


@pytest.mark.parametrize("dtype, case", CASES)
def test_contract(dtype: str, case: dict[str, Any]) -> None:
    assert_contract("cuda.quantized_linear", case, dtype)


@pytest.mark.skipif(not FULL, reason="LZ_TEST_FULL=1 asks for it")
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16])
def test_contract_everywhere(rows: int) -> None:
    for n, (format, group, dtype) in enumerate(product(gemv.FORMATS, (0, 32, 64, 128, 256),
                                                       ("bfloat16", "float16"))):
        assert_contract("cuda.quantized_linear", {
            "format": format, "rows": (rows,), "group": group,
            "k": (32, 96, 544, 1184)[(rows + n) % 4], "n": (17, 40, 64)[n % 3],
            "symmetric": format == "fp8_e4m3" or (rows + n) % 3 > 0, "bias": n % 2 == 1,
            "scale_dtype": ("", "bfloat16", "float16")[(rows + n) % 5 % 3]}, dtype)


def run(values: dict[str, Any], config: gemv.Config | None = None) -> Tensor:
    arguments = [values[name] for name in ("x", "weight_q", "scales", "zeros", "bias", "format",
                                           "group_size")]
    return gemv.launch(*arguments, chosen=config)


@pytest.mark.parametrize("rows, config", CONFIGS)
def test_any_configuration_computes_the_same(rows: int, config: gemv.Config) -> None:
    values = op.inputs(format="int4", rows=(rows,), k=1056, n=200, group=128, bias=True,
                       dtype=torch.bfloat16)
    truth = op.reference(**{**values,
                            **{name: values[name].double() for name in ("x", "scales", "bias")}})
    eager = (op.reference(**values).double() - truth).abs().max()
    got = run(values, config)
    assert (got.double() - truth).abs().max() <= 2 * eager
    assert torch.equal(run(values, config), got)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    values = op.inputs(format="fp8_e4m3", rows=(2,), k=336, n=24, group=128, scale_dtype="float16",
                       dtype=torch.bfloat16)
    want = run(values)
    weight = values["weight_q"].view(torch.uint8)
    weight[3, 335], weight[12, 0] = 0x7F, 0xFF
    got = run(values)
    spoiled = torch.zeros(24, dtype=torch.bool)
    spoiled[[3, 12]] = True
    assert got[:, spoiled].isnan().all()
    assert torch.equal(got[:, ~spoiled], want[:, ~spoiled])
    weight[3, 335], weight[12, 0] = 0, 0
    values["x"][1, 7] = torch.nan
    got = run(values)
    assert got[1].isnan().all() and not got[0].isnan().any()


def test_fp8_codes_that_are_subnormal() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    weight = codes.view(torch.float8_e4m3fn).repeat(24, 2)[:, :336].contiguous()
    values = {"x": torch.zeros(2, 336, dtype=torch.bfloat16), "weight_q": weight,
              "scales": torch.ones(24, 3, dtype=torch.float16), "zeros": None, "bias": None,
              "format": "fp8_e4m3", "group_size": 128}
    for column in (1, 7, 8, 126, 129, 254):
        values["x"].zero_()[:, column] = 2.0
        assert torch.equal(run(values),
                           2.0 * weight[:, column].to(torch.bfloat16).expand(2, 24)), column


@pytest.mark.parametrize("size", [1e-3, 1e4])
def test_inputs_of_one_sign(size: float) -> None:
    """What the codes read too much is much more than what is left of them."""
    values = op.inputs(format="int4", rows=(2,), k=1024, n=48, group=128, bias=True,
                       dtype=torch.bfloat16)
    values["x"] = values["x"].abs() * size
    truth = op.reference(**{**values,
                            **{name: values[name].double() for name in ("x", "scales", "bias")}})
    eager = (op.reference(**values).double() - truth).abs().max()
    assert (run(values).double() - truth).abs().max() <= 2 * eager


@pytest.mark.parametrize("machine, most", [(gemv.Machine(8), 1 << 15), (gemv.Machine(132), 1 << 15),
                                           (gemv.Machine(48, 99 << 10), 4096)])
def test_every_configuration_can_be_launched(machine: gemv.Machine, most: int) -> None:
    for rows, n, k, format, group in product((1, 16), (1, 1024, 14336, 128256),
                                             (32, 544, 4096, most), gemv.FORMATS,
                                             (0, 32, 128)):
        shape = gemv.Shape(rows, n, k, format, group if group < k else 0, 4, format != "fp8_e4m3")
        config = gemv.with_slots(shape, gemv.config(shape, machine), machine)
        teams = config.warps // config.parts
        assert config.warps % config.parts == 0 == config.slots % teams
        assert config.slots * 16 <= config.warps * 32
        assert shape.blocks // config.split >= config.parts
        assert shape.shared(config) <= machine.shared, (shape, config)
