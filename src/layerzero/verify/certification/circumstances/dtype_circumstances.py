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
from ...kernel.shared import fingerprint
from .row_circumstances import if_finite

INTEGERS = {torch.int64: torch.int32, torch.int32: torch.int64}
# As long, so that the size of a number does not tell them apart; wider; counts as floats.
SECOND = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16,
          torch.float32: torch.float64, torch.int64: torch.float32, torch.int32: torch.float32}


class OtherDtype(Circumstance):
    """A tensor that need not have the dtype of the others in another one than the cases give:
    numbers of 16 bits wider, others narrower, indices and counts in the other width."""

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"{tensor} in another dtype"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        follows = isinstance(t, Tensor) and t.is_floating_point() and self.tensor not in \
            free_tensors(op)                   # the others have its dtype
        other = self.other(t) if isinstance(t, Tensor) and not follows else None
        if other is None or (not t.is_floating_point() and not torch.equal(t.to(other), t)):
            return None                        # a seed of 64 bits
        return if_finite(op, {**values, self.tensor: t.to(other)})

    def other(self, t: Tensor) -> torch.dtype | None:
        if t.dtype in INTEGERS:
            return INTEGERS[t.dtype]
        if not t.is_floating_point() or t.dtype.itemsize == 1:
            return None
        return torch.float32 if t.dtype.itemsize == 2 else torch.bfloat16


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
