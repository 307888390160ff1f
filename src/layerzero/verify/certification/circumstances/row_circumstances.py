"""Circumstances of rows: how they lie in memory, the last number of each tensor loud, rows of
zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.op import Op
from ...cases.generated import if_allowed, is_allowed
from ...kernel.contract import Circumstance, eager_results
from ...kernel.guarded import with_layout
from ...kernel.shared import compute_once, fingerprint


def if_finite(op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the values if the contract allows the call and its results are numbers."""
    contents = fingerprint(values)

    def compute() -> bool:
        try:
            results = eager_results(op, values, contents)
        except FAULTS:
            return False
        floats = [t for t in results if isinstance(t, Tensor) and t.is_floating_point()
                  and t.dtype.itemsize > 1]
        return all(bool(t.isfinite().all()) for t in floats)

    finite = is_allowed(op, values, contents) and compute_once(
        op, contents and ("finite", contents), compute, nbytes=0)
    return values if finite else None


def _main_tensors(op: Op, values: dict[str, Any]) -> dict[str, Tensor]:
    names = op.same_dtype or op.differentiable or (op.main_tensor,)
    return {n: t for n in names if isinstance(t := values[n], Tensor) and t.numel() and t.dim()
            and t.is_floating_point() and t.dtype.itemsize > 1}


class OtherLayout(Circumstance):
    """One tensor in another memory layout."""

    def __init__(self, tensor: str, layout: str) -> None:
        self.tensor, self.layout = tensor, layout
        self.name = f"{tensor} {layout}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        other = with_layout(t, self.layout) if isinstance(t, Tensor) else None
        return None if other is None else {**values, self.tensor: other}


class LoudElement(Circumstance):
    """One number of a tensor beside the main one is so large that its exponential is infinite."""

    even = False

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"filled with one loud number in {tensor}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if not isinstance(t, Tensor) or t.dtype != torch.float32 or not t.numel():
            return None
        loud = t.clone()
        loud.view(-1)[0] = 100.0
        return if_finite(op, {**values, self.tensor: loud})


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


class Narrowed(Circumstance):
    """One part of a tensor that may be broadcast, as of a mask of one column for all keys."""

    any_dtype = True

    def __init__(self, tensor: str, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.name = f"one part of {tensor} for all along dimension {dim}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        tokens = op.patterns[values[op.variant] if op.variant else ""].get(self.tensor, ())
        if (not isinstance(t, Tensor) or t.dim() <= self.dim or t.shape[self.dim] < 2
                or not "".join(tokens[self.dim - t.dim():][:1]).startswith("~")):
            return None
        return if_allowed(op, {**values, self.tensor: t.narrow(self.dim, 0, 1).contiguous()})


class OtherSigns(Circumstance):
    """A tensor of which every number has one sign, with every other number of the other sign."""

    any_dtype = True

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"{tensor} of both signs"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if (not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype.itemsize == 1
                or not t.numel() or bool((t > 0).any()) == bool((t < 0).any())):
            return None
        signs = 2 * (torch.arange(t.numel(), device=t.device) % 2).view(t.shape) - 1
        allowed = if_allowed(op, {**values, self.tensor: t * signs.to(t.dtype)})
        if allowed is None:
            return None
        with torch.no_grad():                  # what is hidden may be infinite
            results = eager_results(op, allowed, fingerprint(allowed))
        return None if any(bool(r.isnan().any()) for r in results) else allowed


class Shifted(Circumstance):
    """One tensor without the first or the last column of a wider one, as the inputs and the targets
    of training are: its rows are one number apart."""

    any_dtype = True

    def __init__(self, tensor: str, first: bool) -> None:
        self.tensor, self.first = tensor, first
        self.name = f"{tensor} without the {'first' if first else 'last'} column of another"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if not isinstance(t, Tensor) or t.dim() < 2 or not t.numel():
            return None
        codes = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        # integers that are allowed, but not there
        column = (torch.full_like(t[..., :1], torch.nan) if codes.is_floating_point()
                  else codes.flip(0)[..., :1])
        wide = torch.cat((column, codes) if self.first else (codes, column), -1)
        rows = wide[..., 1:] if self.first else wide[..., :-1]
        return {**values, self.tensor: rows if codes is t else rows.view(t.dtype)}
