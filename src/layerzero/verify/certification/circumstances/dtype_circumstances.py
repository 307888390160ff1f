"""Circumstances of dtypes: a tensor that need not have the dtype of the others in another one than
the cases give.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....spec.op import Op
from ...cases.generated import is_allowed
from ...kernel.circumstance import Circumstance
from ...kernel.contract import results_of
from ...kernel.shared import fingerprint
from .row_circumstances import if_finite

INTEGERS = {torch.int64: torch.int32, torch.int32: torch.int64}
# As long, so that the size of a number does not tell them apart; wider; counts as floats.
SECOND = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16,
          torch.float32: torch.float64, torch.int64: torch.float32, torch.int32: torch.float32}


class OtherDtype(Circumstance):
    """A tensor that need not have the dtype of the others in another one than the cases give:
    numbers of 16 bits wider, others narrower, indices and counts in the other width; of integers of
    one byte, as zero points are, a wider one, or floats, between the integers where the result is
    not rounded to codes."""

    def __init__(self, tensor: str, narrow: str = "bfloat16") -> None:
        self.tensor, self.narrow = tensor, getattr(torch, narrow)
        self.name = f"{tensor} in another dtype" + (
            f" than float32: {narrow}" if narrow != "bfloat16" else "")

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if not isinstance(t, Tensor) or t.dtype == torch.bool:
            return None
        if t.is_floating_point() and self.tensor not in free_tensors(op):
            return None                        # the others have its dtype
        other = self._other(op, values, t)
        return None if other is None else if_finite(op, {**values, self.tensor: other})

    def _other(self, op: Op, values: dict[str, Any], t: Tensor) -> Tensor | None:
        if t.dtype in INTEGERS:
            other = t.to(INTEGERS[t.dtype])
            return other if torch.equal(other, t) else None    # a seed of 64 bits
        if t.is_floating_point():
            if t.dtype.itemsize != 2:
                return None if t.dtype.itemsize == 1 else t.to(self.narrow)
            # with digits that 16 bits have not
            place = torch.arange(t.numel(), device=t.device).view(t.shape)
            return t.float() * (1.0 + torch.sin(place.float()) * 2.0 ** -10)
        if self.narrow == torch.bfloat16:
            return t.int()
        is_code = any(not r.is_floating_point() for r in results_of(op.meta(**values)))
        return t + (0.0 if is_code else 0.25)


class SecondDtypes(Circumstance):
    """All tensors that need not have the dtype of the main one in a second other dtype, those that
    the contract allows in it."""

    name = "all but the main tensor in another dtype"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        altered = dict(values)
        for name in free_tensors(op):
            t = values[name]
            if isinstance(t, Tensor) and t.dtype in SECOND:
                other = {**altered, name: t.to(SECOND[t.dtype])}
                altered = other if is_allowed(op, other, fingerprint(other)) else altered
        if all(altered[name] is values[name] for name in values):
            return None
        return if_finite(op, altered)


def free_tensors(op: Op) -> Iterator[str]:
    """Yields the tensors that need not have the dtype of the main one."""
    return (n for n in op.tensors if n != op.main_tensor and n not in op.same_dtype)
