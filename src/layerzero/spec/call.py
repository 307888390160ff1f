"""A call described without its tensors, so that it can be stored, sent and built again.

Tuning, planning, warm-up, regret and recorded traces all use this form. Small integer tensors
(block tables, offsets, token ids) keep their values, since random ones would break the contract;
all other tensors are drawn from a seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import DataError, SpecError
from .reading import Limits, read_json_lines

MOST_VALUES = 65536                            # of an integer tensor that is stored with its values
LIMITS = Limits(size=256 << 20)                # of a file of calls
Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None     # None: contiguous
    values: tuple[int, ...] | None = None      # of whole numbers and booleans, in order
    below: int = 0                             # of whole numbers too many to keep: each is in 0 .. below - 1

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype}
        if self.strides is not None:
            data["strides"] = list(self.strides)
        if self.values is not None:
            data["values"] = list(self.values)
        if self.below:
            data["below"] = self.below
        return data

    @classmethod
    def from_json(cls, data: Any, owner: str) -> TensorSpec:
        known = {"shape", "dtype", "strides", "values", "below"}
        if not isinstance(data, Mapping) or not {"shape", "dtype"} <= data.keys() <= known:
            raise SpecError(f"{owner}: wanted a tensor with shape and dtype (also {', '.join(sorted(known))}), "
                            f"got {data!r:.200}")
        shape, strides, values = (_whole(data.get(n), f"{owner}: {n}") for n in ("shape", "strides", "values"))
        if shape is None or any(n < 0 for n in shape) or type(data["dtype"]) is not str:
            raise SpecError(f"{owner}: shape must be sizes >= 0 and dtype a name, got {data!r:.200}")
        if strides is not None and (len(strides) != len(shape) or any(s < 0 for s in strides)):
            raise SpecError(f"{owner}: wanted {len(shape)} strides >= 0, got {list(strides)}")
        total = 1
        for n in shape:
            total *= n
        if values is not None and len(values) != total:
            raise SpecError(f"{owner}: wanted {total} values for shape {list(shape)}, got {len(values)}")
        below = data.get("below", 0)
        if type(below) is not int or below < 0:
            raise SpecError(f"{owner}: below must be a whole number >= 0, got {below!r}")
        return cls(shape, data["dtype"], strides, values, below)


@dataclass(frozen=True)
class Call:
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
        data: dict[str, Any] = {"op": self.op}
        if self.case is not None:
            data |= {"case": dict(self.case), "dtype": self.dtype}
        else:
            data["arguments"] = {n: v.to_json() if isinstance(v, TensorSpec) else v for n, v in self.arguments.items()}
        return data | {n: v for n, v in (("count", self.count), ("grad", self.grad), ("name", self.name))
                       if v != type(self).__dataclass_fields__[n].default}

    @classmethod
    def from_json(cls, data: Any, owner: str = "call") -> Call:
        fields = {"op", "arguments", "case", "dtype", "count", "grad", "name"}
        if not isinstance(data, Mapping) or type(data.get("op")) is not str or not data.keys() <= fields:
            raise SpecError(f"{owner}: wanted an object with op and {', '.join(sorted(fields - {'op'}))}, "
                            f"got {data!r:.200}")
        types = {"arguments": Mapping, "case": (Mapping, type(None)), "dtype": str, "count": int, "grad": bool,
                 "name": str}
        for name, kind in types.items():
            if name in data and (not isinstance(data[name], kind) or (kind is int and type(data[name]) is bool)):  # type: ignore[arg-type]
                raise SpecError(f"{owner}: {name} has the wrong type, got {data[name]!r:.200}")
        given: dict[str, TensorSpec | Scalar] = {}
        for name, value in data.get("arguments", {}).items():
            if isinstance(value, Mapping):
                given[name] = TensorSpec.from_json(value, f"{owner}: {data['op']}: {name}")
            elif value is None or type(value) in (bool, int, float, str):
                given[name] = value
            else:
                raise SpecError(f"{owner}: {data['op']}: {name} must be a tensor or a plain value, got {value!r:.200}")
        return cls(arguments=given, **{n: data[n] for n in fields - {"arguments"} if n in data})


def _whole(value: Any, owner: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(type(n) is not int for n in value):
        raise SpecError(f"{owner} must be a list of whole numbers, got {value!r:.200}")
    return tuple(value)


def write_calls(path: Path, calls: Iterable[Call]) -> None:
    """One call a line."""
    path.write_text("".join(json.dumps(call.to_json()) + "\n" for call in calls))


def read_calls(path: Path) -> tuple[Call, ...]:
    return tuple(_read_calls(path))


def _read_calls(path: Path) -> Iterator[Call]:
    wanted = "calls as JSON lines, such as lz record writes"
    for number, data in read_json_lines(path, wanted, limits=LIMITS, nan=True):
        try:
            yield Call.from_json(data)
        except SpecError as e:
            raise DataError(f"{path}:{number}: {e}") from e
