"""What was measured: one record per kernel and kind of call, and an immutable view of many.

A *kind of call* is what the cache key tells apart for speed: dtype and switches (its `family`), and
its sizes on the grid of spec/grid.py. `place` is where it was measured: the device's signature, and
for a CPU the number of threads, since the winner depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..spec.device import Device
from ..spec.grid import bucket_label
from ..spec.op import Op

FARTHEST = 4.0         # octaves, over all sizes together, from which a measurement still says something
NEIGHBOURS = 4
OVERHEAD_US = 2.0      # added to the roofline before calls of different sizes are compared: no call is free


class Measurement(NamedTuple):
    """Microseconds of `kernel` for calls that share `bucket`, at `place`."""

    kernel: str
    op: str
    bucket: str                                # family and sizes, as text: the name of the kind of call
    place: str
    median_us: float
    spread: float = 0.0                        # relative: (p90 - p10) / median
    samples: int = 1
    family: str = ""
    sizes: str = ""                            # "batch=1 seq_k=4096": those that were timed
    flops: float = 0.0                         # of the timed call, by its contract
    bytes: float = 0.0
    p95_us: float = 0.0
    p99_us: float = 0.0
    compile_us: float = 0.0                    # paid once before the first call, kept apart
    build: str = ""                            # which build of the kernel's library
    at: float = 0.0                            # seconds since 1970
    environment: str = ""                      # id of the whole environment it was measured in

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        return cls(**data)

    @property
    def trust(self) -> float:
        """1 for a quiet measurement, falling towards 0 as its spread grows."""
        return 1.0 / (1.0 + (self.spread / 0.25) ** 2)


class Rates(NamedTuple):
    """What the device can do at best: per microsecond. Measured by tuning; until then, round figures."""

    flops_per_us: float
    bytes_per_us: float

    def roofline_us(self, flops: float, moved: float) -> float:
        return max(flops / self.flops_per_us, moved / self.bytes_per_us, 1e-3)


class Kind(NamedTuple):
    """The kind of a call, for measurements."""

    family: str                                # dtype and switches
    sizes: tuple[tuple[str, int], ...]
    bucket: str

    @property
    def sizes_text(self) -> str:
        return " ".join(f"{name}={n}" for name, n in self.sizes)


class Estimate(NamedTuple):
    """What neighbouring measurements say of a kind of call that was not measured."""

    us: float
    trust: float
    samples: int
    distance: float                            # octaves to the nearest one


def kind_of(op: Op, facts: Mapping[str, Any]) -> Kind:
    main = facts["dtype"]
    family = [str(main)]
    for p in op.params:
        if p.kind == "tensor":
            given = facts.get(f"{p.name}.dtype")
            if given is not None and (p.optional or (given != main and p.name not in op.same_dtype)):
                family.append(f"{p.name}={given}")
        elif p.kind in ("bool", "str"):
            if facts[p.name] != p.default:
                family.append(f"{p.name}={facts[p.name]}")
        elif p.kind == "int":
            if facts[p.name] != p.default:
                family.append(f"{p.name}={bucket_label(max(facts[p.name] or 0, 0))}")
        elif p.kind == "float" and bool(facts[p.name]) != bool(p.default):
            family.append(p.name)
    if facts["grad"]:
        family.append("grad")
    sizes = tuple((dim, facts[dim]) for dim in op.dims if facts[dim] is not None)
    labels = [f"{dim}={n if dim in op.exact else bucket_label(n)}" for dim, n in sizes]
    text = " ".join(family)
    return Kind(text, sizes, " ".join([text, *labels]))


def bucket_of(op: Op, facts: Mapping[str, Any]) -> str:
    return kind_of(op, facts).bucket


def place_of(device: Device, threads: int = 0) -> str:
    return f"{device.signature}-{threads}t" if device.type == "cpu" and threads else device.signature


class PerfView:
    """A frozen set of measurements, asked by (kernel, bucket, place), and the rates of each place."""

    __slots__ = ("_near", "_rows", "rates")

    def __init__(self, measurements: Iterable[Measurement] = (), rates: Mapping[str, Rates] | None = None) -> None:
        self._rows: dict[tuple[str, str, str], Measurement] = {(m[0], m[2], m[3]): m for m in measurements}
        self._near: dict[tuple[str, str], dict[str, list[tuple[dict[str, float], Measurement]]]] | None = None
        self.rates: Mapping[str, Rates] = MappingProxyType(dict(rates or {}))

    def get(self, kernel: str, bucket: str, place: str) -> Measurement | None:
        return self._rows.get((kernel, bucket, place))

    def estimate(self, kernel: str, kind: Kind, place: str, rates: Rates, roofline_us: float) -> Estimate | None:
        """From the nearest measurements of the same kernel and family: how far each stayed behind the roofline."""
        if self._near is None:
            self._near = self._index()         # two threads may both make it: the same value
        rows = self._near.get((place, kind.family), {}).get(kernel)
        if not rows:
            return None
        here = {name: _octave(n) for name, n in kind.sizes}
        near = sorted(((d, m) for sizes, m in rows if (d := _distance(here, sizes)) <= FARTHEST), key=lambda x: x[0])
        if not near:
            return None
        behind = weight = trust = 0.0
        for distance, m in near[:NEIGHBOURS]:
            w = m.trust / (0.25 + distance * distance)
            behind += w * math.log(m.median_us / (OVERHEAD_US + rates.roofline_us(m.flops, m.bytes)))
            trust += w * m.trust
            weight += w
        nearest = near[0][0]
        us = (OVERHEAD_US + roofline_us) * math.exp(behind / weight)
        return Estimate(us, trust / weight / (1.0 + nearest / 2), sum(m.samples for _, m in near[:NEIGHBOURS]), nearest)

    def _index(self) -> dict[tuple[str, str], dict[str, list[tuple[dict[str, float], Measurement]]]]:
        index: dict[tuple[str, str], dict[str, list[tuple[dict[str, float], Measurement]]]] = {}
        for m in self._rows.values():
            if m.median_us > 0 and m.sizes:
                sizes = {name: _octave(int(n)) for name, _, n in (part.partition("=") for part in m.sizes.split())}
                index.setdefault((m.place, m.family), {}).setdefault(m.kernel, []).append((sizes, m))
        return index

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._rows.values())

    def including(self, measurements: Iterable[Measurement], rates: Mapping[str, Rates] | None = None) -> PerfView:
        return PerfView([*self._rows.values(), *measurements], {**self.rates, **(rates or {})})


def _octave(n: int) -> float:
    return math.log2(n) if n > 0 else -1.0


def _distance(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    if a.keys() != b.keys():
        return math.inf
    return sum(abs(a[name] - b[name]) for name in a)
