"""A batch to write to a store: measurements, the environments they name, and timed rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .interface import KEY, Store
from .record import Measurement, Rates


@dataclass(frozen=True)
class Batch:
    """Immutable, one measurement per row, so that it stays small while the store is away."""

    rows: Mapping[tuple[str, ...], Measurement] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rates: Mapping[str, tuple[Rates, float]] = field(default_factory=dict)

    def including(self, rows: Iterable[Measurement], environments: Mapping[str, Mapping[str, Any]],
                  rates: Mapping[str, tuple[Rates, float]]) -> Batch:
        merged = dict(self.rows)
        for m in rows:
            key = tuple(getattr(m, name) for name in KEY)
            if key not in merged or m.supersedes(merged[key]):
                merged[key] = m
        return Batch(merged, {**self.environments, **environments}, {**self.rates, **rates})

    def write_to(self, store: Store) -> None:
        store.write(self.rows.values(), self.environments, self.rates)

    def __len__(self) -> int:
        return len(self.rows) + len(self.rates)
