"""What a sound kernel may be off by in float32, and what none may."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from layerzero.ops.mamba_chunk_scan import OP as SCAN
from layerzero.ops.mlp import OP as MLP
from layerzero.ops.quantized_linear import OP as QUANTIZED_LINEAR
from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.circumstances.argument_circumstances import EveryCode
from layerzero.verify.kernel.contract import case_values, check_case, formula, upcast
from layerzero.verify.kernel.error_budget import rounding_budget, terms_of

LONG = {"hidden": 74088, "inner": 1, "rows": (3,)}


def one_after_another(x: Tensor, weight: Tensor) -> Tensor:
    """A product in float32 whose terms are added in order."""
    terms = (x[:, None] * weight).numpy()
    return torch.from_numpy(np.add.accumulate(terms, axis=-1)[..., -1].copy())


def mlp_with(product: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    def load():
        def run(x, weight_in, weight_down, activation="swiglu", *, weight_up=None, bias_in=None,
                bias_up=None, bias_down=None):
            gate, up = product(x, weight_in).chunk(2, -1)
            return (torch.nn.functional.silu(gate) * up) @ weight_down.t()

        return run

    return Kernel("fake.mlp", MLP, load)


def short(t: Tensor) -> Tensor:
    """The number that tensor cores read of a float32: ten bits behind the point."""
    return (t.view(torch.int32) & ~0x1fff).view(torch.float32)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_long_sum_may_be_added_in_order(seed: int) -> None:
    assert check_case(mlp_with(one_after_another), LONG, "float32", seed=seed).passed


@pytest.mark.parametrize("product", [
    lambda x, w: one_after_another(x[:, :-1], w[:, :-1]),
    lambda x, w: one_after_another(short(x), short(w)),
    lambda x, w: one_after_another(x.bfloat16().float(), w.bfloat16().float())],
    ids=["the last term lost", "tf32", "bfloat16"])
def test_nothing_else_may_be_off_in_a_long_sum(
        product: Callable[[Tensor, Tensor], Tensor]) -> None:
    result = check_case(mlp_with(product), LONG, "float32", seed=3)
    assert result.status == "failed" and result.ratio > 5


def test_what_is_summed_over_is_in_no_result() -> None:
    wide = case_values(MLP, {"hidden": 96, "inner": 256}, "float32")
    narrow = case_values(MLP, {"hidden": 300, "inner": 17}, "float32")
    assert terms_of(MLP, wide, 1) == [2 * 256] and terms_of(MLP, narrow, 1) == [300]


def test_each_result_has_its_own_sum() -> None:
    """The state size is summed over in y, and the sequence in the states."""
    values = case_values(SCAN, {"b": 2, "s": 40, "h": 4, "g": 2, "d": 4, "n": 253}, "float32")
    assert terms_of(SCAN, values, 2) == [253, 40]


def test_a_sum_that_cancels_is_as_exact_as_its_products() -> None:
    """Activations of eight bits: a rounding of x changes no code of them."""
    case = next(c for c in QUANTIZED_LINEAR.cases if c.get("activations") == "q8"
                and c["format"] == "iq4_xs")
    values = EveryCode("weight_q").alter(QUANTIZED_LINEAR, case_values(
        QUANTIZED_LINEAR, case, "float32", seed=22))
    assert values is not None
    wide = upcast(values)
    exact = formula(QUANTIZED_LINEAR, wide)

    def budget(op):
        return rounding_budget(lambda v: formula(QUANTIZED_LINEAR, v), values, wide, exact, op=op)[0]

    inputs_alone, with_signs = budget(None), budget(QUANTIZED_LINEAR)
    row, smallest = 1, 14                      # 4.8e3 between 5.9e6 and 5.6e7
    assert inputs_alone[row, smallest] < 1e-3 < 1 < with_signs[row, smallest]
    # but no more than a few roundings of the largest result
    assert float(with_signs.max()) < 16 * 2.0 ** -24 * float(exact[0].abs().max())
