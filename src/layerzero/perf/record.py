"""What was measured: one record per kernel and kind of call, and an immutable view of many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..spec.grid import bucket_label
from ..spec.op import Op


@dataclass(frozen=True)
class Measurement:
    """Median microseconds of `kernel` for calls that share `bucket`, on the device with that signature."""

    kernel: str
    op: str
    bucket: str
    device: str
    median_us: float
    spread: float = 0.0                        # relative: (p90 - p10) / median
    samples: int = 1

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        return cls(**data)

    @property
    def trust(self) -> float:
        """1 for a quiet measurement, falling towards 0 as its spread grows."""
        return 1.0 / (1.0 + (self.spread / 0.25) ** 2)


def bucket_of(op: Op, facts: Mapping[str, Any]) -> str:
    """The name of the kind of call, for measurements: exact sizes, bucketed sizes, dtype and switches."""
    parts = [str(facts["dtype"])]
    for dim in op.dims:
        n = facts[dim]
        parts.append(f"{dim}={n if dim in op.exact or n is None else bucket_label(n)}")
    for p in op.params:
        if p.kind == "tensor":
            given = facts.get(f"{p.name}.dtype")
            if p.optional and given is not None:
                parts.append(f"{p.name}={given}")
        elif p.kind in ("bool", "str") and facts[p.name] != p.default:
            parts.append(f"{p.name}={facts[p.name]}")
        elif p.kind == "int" and facts[p.name] != p.default:
            parts.append(f"{p.name}={bucket_label(max(facts[p.name], 0))}")
        elif p.kind == "float" and bool(facts[p.name]) != bool(p.default):
            parts.append(p.name)
    if facts["grad"]:
        parts.append("grad")
    return " ".join(parts)


class PerfView:
    """A frozen set of measurements, asked by (kernel, bucket, device)."""

    __slots__ = ("_rows",)

    def __init__(self, measurements: Iterable[Measurement] = ()) -> None:
        self._rows = MappingProxyType({(m.kernel, m.bucket, m.device): m for m in measurements})

    def get(self, kernel: str, bucket: str, device: str) -> Measurement | None:
        return self._rows.get((kernel, bucket, device))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Any:
        return iter(self._rows.values())

    def including(self, measurements: Iterable[Measurement]) -> PerfView:
        return PerfView([*self._rows.values(), *measurements])
