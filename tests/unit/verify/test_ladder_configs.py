"""The ladder on models of other shapes: what is right passes though its gradient jumps, what is
wrong does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import emitted, world
from torch import Tensor

import layerzero as lz
from layerzero.models.decoder_config import parse_config
from layerzero.ops.linear import OP as linear
from layerzero.spec.kernel import Kernel
from layerzero.verify.model.ladder import climb
from layerzero.verify.model.training import training_routes

__all__ = ["emitted", "world"]
RELU = "hidden=40,heads=5,kv_heads=1,head_dim=24,window=5,rope_style=interleaved,activation=reglu,tied=true"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_gradient_with_jumps_is_no_fault(seed: int) -> None:
    """Rounding puts a few gates on the other side of zero: which ones is luck, in plain torch as
    well."""
    for rung in climb(2, configs=[parse_config(RELU)], dtypes=["bfloat16"], seed=seed):
        assert rung.passed, rung.worst


class _Weaker(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.8


def _wrong_backward() -> Callable[..., Any]:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            activation: str | None = None) -> Tensor:
        return linear.reference(_Weaker.apply(x), weight, bias, activation)

    return run


@pytest.mark.usefixtures("world")
def test_a_wrong_gradient_is_found_beside_the_jumps() -> None:
    lz.register(Kernel("planted.linear", linear, _wrong_backward, prior=1e6, less_work="a test"))
    (rung,) = climb(2, configs=[parse_config(RELU)], dtypes=["bfloat16"])
    assert (rung.status == "failed" and rung.culprit is not None
            and "planted.linear" in str(rung.culprit))


def test_float16_is_trained_with_a_scaled_loss_by_every_optimizer() -> None:
    name, config = parse_config("tiny,layers=1")
    names = [route.name for route in training_routes(config, "float16", steps=2)]
    assert [n.split(",")[0] for n in names] == ["2 steps of SGD"] * 2 + ["2 steps of AdamW"] * 2
    (rung,) = climb(5, configs=[(name, config)], dtypes=["float16"], steps=2)
    assert rung.passed, rung.worst
