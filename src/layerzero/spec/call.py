"""A call described without its tensors, so that it can be stored, sent and built again.

Tuning, planning, warm-up, regret and recorded traces all use this form. Small integer tensors
(block tables, offsets, token ids) keep their values, since random ones would break the contract;
all other tensors are drawn from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .codec import At, Count, Record
from .errors import SpecError

MAX_VALUES = 65536                             # of an integer tensor that is stored with its values
Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class TensorSpec(Record, omit="strides values below"):
    shape: tuple[Count, ...]
    dtype: str
    strides: tuple[Count, ...] | None = None   # None: contiguous
    values: tuple[int, ...] | None = None      # of whole numbers and booleans, in order
    # of whole numbers too many to keep: each is in 0 .. below - 1
    below: Count = 0

    def check_json(self, at: At) -> None:
        if self.strides is not None and len(self.strides) != len(self.shape):
            at.wrong(f"{len(self.shape)} strides for shape {list(self.shape)}", list(self.strides))
        if self.values is not None and len(self.values) != math.prod(self.shape):
            at.wrong(f"{math.prod(self.shape)} values for shape {list(self.shape)}",
                     len(self.values))


@dataclass(frozen=True)
class Call(Record, omit="count grad name"):
    """One call of an op: its `arguments` by name, or a `case` for the op's input generator."""

    op: str
    arguments: Mapping[str, TensorSpec | Scalar] = field(default_factory=dict)
    case: Mapping[str, Any] | None = None
    dtype: str = "float32"                     # of a case
    count: int = 1                             # how often it was seen
    grad: bool = False
    name: str = ""                             # where it comes from: "llama-3-8b decode 4096"

    def __post_init__(self) -> None:
        if not self.op or (self.case is not None and self.arguments):
            raise SpecError(f"a call has an op and either arguments or a case, got {self!r:.200}")
        if self.count < 1:
            raise SpecError(f"call of {self.op}: count must be >= 1, got {self.count}")

    def times(self, count: int) -> Call:
        return replace(self, count=count)

    def to_json(self) -> dict[str, Any]:
        unused = ("case", "dtype") if self.case is None else ("arguments",)
        return {name: value for name, value in super().to_json().items() if name not in unused}
