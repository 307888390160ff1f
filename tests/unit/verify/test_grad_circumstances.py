"""What a kernel does in grad mode, and with parameters of which nothing is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.verify.certification.circumstances.grad_circumstances import (
    GivenParameters,
    GradMode,
)
from layerzero.verify.kernel.circumstance import Circumstance
from layerzero.verify.kernel.contract import check_case

NORM = lz.op("rms_norm")


def leaves_grad_mode_off(x: torch.Tensor, weight: Any = None, eps: float = 1e-6, *,
                         offset: float = 0.0) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return NORM.reference(x, weight, eps, offset=offset)


def forgets_parameters(x: torch.Tensor, weight: Any = None, eps: float = 1e-6, *,
                       offset: float = 0.0) -> torch.Tensor:
    given = None if isinstance(weight, torch.nn.Parameter) else weight
    return NORM.reference(x, given, eps, offset=offset)


def returns_a_parameter(x: torch.Tensor, weight: Any = None, eps: float = 1e-6, *,
                        offset: float = 0.0) -> torch.Tensor:
    out = NORM.reference(x, weight, eps, offset=offset)
    return torch.nn.Parameter(out) if isinstance(weight, torch.nn.Parameter) else out


@pytest.mark.parametrize(("run", "circumstance", "kind"), [
    (leaves_grad_mode_off, GradMode(), "global state"),
    (forgets_parameters, GivenParameters(), "error"),
    (returns_a_parameter, GivenParameters(), "result")])
def test_it_is_found_there_and_nowhere_else(run: Any, circumstance: Circumstance,
                                            kind: str) -> None:
    kernel = lz.Kernel(f"planted.{run.__name__}", NORM, lambda: run)
    assert check_case(kernel, {}, "float32").passed
    found = check_case(kernel, {}, "float32", circumstance=circumstance)
    assert found.status == "failed" and kind in found.kinds
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("circumstance", [GradMode(), GivenParameters()])
def test_a_kernel_without_a_backward_is_asked_too(circumstance: Circumstance) -> None:
    kernel = lz.Kernel("planted.right", NORM, lambda: NORM.reference, differentiable=False)
    assert check_case(kernel, {}, "float32", circumstance=circumstance).passed
