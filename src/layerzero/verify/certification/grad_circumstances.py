"""Circumstances of gradients: recorded, recordable, or not recorded though inputs require them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...spec.op import Op
from ..kernel.circumstance import Circumstance


class RecordingGradients(Circumstance):
    """The forward pass while gradients are recorded: a kernel may take another path there."""

    name = "recording gradients"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        if not op.differentiable:
            return None
        return {n: v.detach().requires_grad_() if n in op.differentiable and isinstance(v, Tensor)
                and v.is_floating_point() else v for n, v in values.items()}

    def around(self, device: str) -> Any:
        return torch.enable_grad()


class GradMode(Circumstance):
    """Grad mode as it is by default, with inputs that require no gradient."""

    name, any_dtype = "in grad mode", True

    def around(self, device: str) -> Any:
        return torch.enable_grad()


class GivenParameters(Circumstance):
    """Parameters that require gradients, where none are recorded: as a model is served."""

    name, any_dtype, records = "given parameters, recording nothing", True, False

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        names = [n for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()
                 and v.dtype.itemsize > 1]
        return {**values, **{n: torch.nn.Parameter(values[n]) for n in names}} if names else None
