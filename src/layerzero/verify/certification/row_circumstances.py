"""Circumstances of rows: the last number of each tensor loud, rows of zeros, rows in another order
in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.op import Op
from ..kernel.cases import if_allowed
from ..kernel.contract import Circumstance, eager_results
from ..kernel.shared import fingerprint


def if_finite(op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the values if the contract allows the call and its results are numbers."""
    allowed = if_allowed(op, values)
    if allowed is None:
        return None
    try:
        with torch.no_grad():
            results = eager_results(op, allowed, fingerprint(allowed))
    except FAULTS:
        return None
    floats = [t for t in results if isinstance(t, Tensor) and t.is_floating_point()
              and t.dtype.itemsize > 1]
    return allowed if all(bool(t.isfinite().all()) for t in floats) else None


def _main_tensors(op: Op, values: dict[str, Any]) -> dict[str, Tensor]:
    names = op.same_dtype or op.differentiable or (op.main_tensor,)
    return {n: t for n in names if isinstance(t := values[n], Tensor) and t.numel() and t.dim()
            and t.is_floating_point() and t.dtype.itemsize > 1}


class LoudEnds(Circumstance):
    """The last number of every main tensor is large: the last tile holds the largest score."""

    name, even = "filled with one loud number at each end", False

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        ends = {n: t.clone() for n, t in _main_tensors(op, values).items()}
        for t in ends.values():
            t[(-1,) * t.dim()] = 100.0
        return if_finite(op, {**values, **ends}) if ends else None


class ZeroRows(Circumstance):
    """The first and the last row of every main tensor are zeros, as padding is: nothing is divided
    by their norm, sum or maximum."""

    name = "filled with rows of zeros"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        rows = {n: t.clone() for n, t in _main_tensors(op, values).items() if t.dim() > 1}
        for t in rows.values():
            t[(0,) * (t.dim() - 1)] = t[(-1,) * (t.dim() - 1)] = 0.0
        return if_finite(op, {**values, **rows}) if rows else None


class MemoryOrder(Circumstance):
    """One tensor whose rows lie in another order in memory, as of heads that were transposed."""

    any_dtype = True

    def __init__(self, tensor: str, a: int, b: int) -> None:
        self.tensor, self.dims = tensor, (a, b)
        self.name = f"{tensor} with dimensions {a} and {b} exchanged in memory"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t, (a, b) = values[self.tensor], self.dims
        if not isinstance(t, Tensor) or t.dim() <= b + 1 or min(t.shape[a], t.shape[b]) < 2:
            return None
        moved = t.transpose(a, b).contiguous().transpose(a, b)
        return {**values, self.tensor: moved}
