"""A kernel for an operation of our own, and one for an operation that LayerZero brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.spec.rules import at_most, device, dtypes

from . import VERSION
from .scale_shift import OP as scale_shift


def _scale_shift() -> Callable[..., Any]:
    def run(x: Tensor, scale: Tensor, shift: Tensor | None = None, *, gain: float = 1.0) -> Tensor:
        return x * scale * gain if shift is None else torch.addcmul(shift, x, scale, value=gain)

    return run


def _rms_norm() -> Callable[..., Any]:
    def run(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        return torch.rms_norm(x, x.shape[-1:], weight, eps)

    return run


KERNELS = (
    lz.Kernel("example.addcmul", scale_shift, _scale_shift, prior=2.0, note=f"version {VERSION}"),
    lz.Kernel("example.rms_norm", lz.op("rms_norm"), _rms_norm, prior=50.0, less_work="example",
              note=f"version {VERSION}",
              requires=(device("cpu"), dtypes("float32"), at_most("hidden", 64))),
)
