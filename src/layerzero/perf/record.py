"""What was measured: one record per kernel and kind of call, and an immutable view of many.

A *kind of call* is what the cache key tells apart for speed: dtype and switches (its `family`), and
its sizes on the grid of spec/grid.py. `place` is where it was measured: the device's signature, and
for a CPU the number of threads, since the winner depends on it. `mode` is how: eagerly, captured in
a CUDA graph, or compiled by torch.compile. The three have different winners, and a measurement says
nothing about another mode than its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ..spec.codec import decode
from ..spec.device import Device
from ..spec.errors import ConfigError, DataError
from ..spec.grid import bucket_label
from ..spec.op import Op
from ..spec.rules import Rule
from ..spec.rules.expr import parse

MAX_DISTANCE = 4.0     # octaves, summed over all sizes, at which a measurement still counts
NEIGHBOURS = 4
QUIET_SPREAD = 0.25    # a measurement with at most this spread is never replaced by a noisier one
MAX_TRUSTED_SAMPLES = 16  # more samples add no trust
# added to the roofline before calls of different sizes are compared: no call is free
OVERHEAD_US = 2.0

EAGER, CAPTURED, COMPILED = MODES = ("eager", "captured", "compiled")


def mode_of(facts: Mapping[str, Any]) -> str:
    """Returns the mode of a call with these facts."""
    if facts.get("graph"):
        return CAPTURED
    return COMPILED if facts.get("compiled") else EAGER


class Measurement(NamedTuple):
    """Microseconds of `kernel` for calls that share `bucket`, at `place` in `mode`."""

    kernel: str
    op: str
    # family and sizes, as text: the name of the kind of call
    bucket: str
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
    # paid once before the first call, not part of the others
    compile_us: float = 0.0
    build: str = ""                            # which build of the kernel's library
    at: float = 0.0                            # seconds since 1970
    environment: str = ""                      # id of the whole environment it was measured in
    mode: str = EAGER                          # eager | captured | compiled

    @classmethod
    def from_json(cls, data: Any) -> Measurement:
        """Reads a row of a file, which is not trusted: DataError says what is wrong with it."""
        return decode(cls, data, "measurement").checked()

    def checked(self) -> Measurement:
        """Returns the row with every number of its type; raises DataError for impossible values."""
        fields: tuple[Any, ...] = self
        values: list[Any] = []
        for name, value in zip(self._fields, fields):
            if name in TEXTS:
                if not is_text(value) or (name in _REQUIRED and not value):
                    raise DataError(
                        f"measurement of {self.kernel!r}: {name} must be text, got {value!r}")
                if name == "mode" and value not in MODES:
                    raise DataError(
                        f"measurement of {self.kernel!r}: mode must be one of {', '.join(MODES)}, "
                        f"got {value!r}")
                if name == "sizes" and not all(_SIZE.fullmatch(part) for part in value.split()):
                    raise DataError(
                        f"measurement of {self.kernel!r}: sizes must be like 'batch=1 seq_k=4096', "
                        f"got {value!r}")
                values.append(value)
                continue
            low, kind = _MIN.get(name, 0.0), int if name == "samples" else float
            upper = _MAX.get(name, 1e300)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value < upper:
                raise DataError(f"measurement of {self.kernel!r}: {name} must be a number >= "
                                f"{low:g} and < {upper:g}, got {value!r}")
            values.append(kind(value))
        return Measurement._make(values)

    @property
    def trust(self) -> float:
        """1 for a quiet measurement, falling towards 0 as its spread grows; samples add trust. Only
        up to MAX_TRUSTED_SAMPLES: what disturbed one sample may have disturbed them all."""
        return 1.0 / (1.0 + (self.spread / QUIET_SPREAD) ** 2
                      / min(self.samples, MAX_TRUSTED_SAMPLES))

    def supersedes(self, other: Measurement) -> bool:
        """Does this row replace `other`? Quiet before noisy, then newer, in any order."""
        return (self.spread <= QUIET_SPREAD, self.at) >= (other.spread <= QUIET_SPREAD, other.at)


TEXTS = frozenset(("kernel", "op", "bucket", "place", "family", "sizes", "build", "environment",
                   "mode"))
_SIZE = re.compile(r"\w+=-?\d{1,19}")
_REQUIRED = ("kernel", "op", "bucket", "place", "median_us")
_MIN: Mapping[str, float] = {"median_us": 1e-6, "samples": 1}
_MAX: Mapping[str, float] = {"samples": 2.0**53}   # exact as a double


def is_text(value: Any) -> bool:
    """Is it text that every store can keep: Unicode without NUL and lone surrogates?"""
    if not isinstance(value, str) or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


class Rates(NamedTuple):
    """Peak rates of a device, per microsecond. Measured by tuning; until then, round figures."""

    flops_per_us: float
    bytes_per_us: float

    def roofline_us(self, flops: float, moved: float) -> float:
        return max(flops / self.flops_per_us, moved / self.bytes_per_us, 1e-3)


def checked_rates(rates: Mapping[str, Rates]) -> dict[str, Rates]:
    """Returns rates by place with every number a float; raises ConfigError for impossible ones."""
    checked: dict[str, Rates] = {}
    for place, pair in rates.items():
        if not is_text(place) or not place or not isinstance(pair, tuple) or len(pair) != 2 or any(
                isinstance(n, bool) or not isinstance(n, (int, float)) or not 0 < n < 1e300
                for n in pair):
            raise ConfigError(f"rates of {place!r:.80}: wanted Rates(flops_per_us, bytes_per_us), "
                              f"two numbers > 0 and < 1e300, got {pair!r:.120}")
        checked[place] = Rates(*map(float, pair))
    return checked


class Kind(NamedTuple):
    """The kind of a call, for measurements."""

    family: str                                # dtype and switches
    sizes: tuple[tuple[str, int], ...]
    bucket: str

    @property
    def sizes_text(self) -> str:
        return " ".join(f"{name}={n}" for name, n in self.sizes)


class Estimate(NamedTuple):
    """An estimate for a kind of call from neighbouring measurements."""

    us: float
    trust: float
    samples: int
    distance: float                            # octaves to the nearest one


def kind_of(op: Op, facts: Mapping[str, Any]) -> Kind:
    main_dtype = facts["dtype"]
    family = [str(main_dtype)]
    for p in op.params:
        if p.kind == "tensor":
            dtype = facts.get(f"{p.name}.dtype")
            if (dtype is not None
                and (p.optional or (dtype != main_dtype and p.name not in op.same_dtype))):
                family.append(f"{p.name}={dtype}")
        elif p.kind in ("bool", "str"):
            if facts[p.name] != p.default:
                family.append(f"{p.name}={facts[p.name]}")
        elif p.kind == "int":
            if p.name in free_integers(op):
                family += [p.name] * ((facts[p.name] is None) != (p.default is None))
            elif facts[p.name] != p.default:
                family.append(f"{p.name}={bucket_label(max(facts[p.name] or 0, 0))}")
        elif p.kind == "float":
            if bool(facts[p.name]) != bool(p.default):
                family.append(p.name)
            elif (facts[p.name] != p.default and p.default is not None
                  and p.default == _limits(op).get(p.name)):
                # top_p = 1 is off: another amount of work
                family.append(f"{p.name}<{p.default:g}")
    if facts["grad"]:
        family.append("grad")
    sizes = tuple((dim, facts[dim]) for dim in op.dims if facts[dim] is not None)
    labels = [f"{dim}={n if dim in op.exact else bucket_label(n)}" for dim, n in sizes]
    text = " ".join(family)
    return Kind(text, sizes, " ".join([text, *labels]))


@lru_cache(maxsize=None)
def free_integers(op: Op) -> frozenset[str]:
    """Returns the integer parameters outside the contract, such as a seed: they cost no time."""
    mentioned = {leaf.fact for rule in op.requires for leaf in rule.leaves()}.union(
        op.exact, *(parse(text).names for text in (op.flops, op.bytes, *op.derived.values())))
    return frozenset(p.name for p in op.params if p.kind == "int" and p.name not in mentioned)


@lru_cache(maxsize=None)
def _limits(op: Op) -> Mapping[str, Any]:
    """Returns the largest value that the contract allows for each number."""
    rules = (rule for rule in op.requires if isinstance(rule, Rule))
    return {rule.fact: n for rule in rules for n in rule.predicate.cuts().above}


def place_of(device: Device, threads: int = 0) -> str:
    return (f"{device.signature}-{threads}t" if device.type == "cpu" and threads
            else device.signature)


def is_cpu_place(place: str) -> bool:
    """Returns whether it is the place of a CPU: only these name a number of threads."""
    return place.endswith("t") and "-" in place


def environment_id(environment: Mapping[str, Any]) -> str:
    """Returns the id of an environment: a hash of its content."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]


class Source(Protocol):
    """Measurements that are read when their kernel is first needed; they never change."""

    kernels: Collection[str]                   # kernels with measurements

    def rows_of(self, kernel: str) -> list[Measurement]: ...

    def count(self) -> int: ...


Key = tuple[str, str, str]                     # (bucket, place, mode)
Rows = Mapping[Key, Measurement]               # of one kernel
# (place, family, mode) -> (sizes in octaves, row)
SizeIndex = Mapping[Key, list[tuple[dict[str, float], Measurement]]]


class PerfView:
    """An immutable set of measurements by (kernel, bucket, place, mode), and rates by place."""

    __slots__ = ("_extra", "_index", "_rows", "_source", "rates")

    def __init__(self, measurements: Iterable[Measurement] = (),
                 rates: Mapping[str, Rates] | None = None, source: Source | None = None) -> None:
        self._source = source
        # of kernels that were read, or differ from the source
        self._rows: dict[str, Rows] = {}
        self._index: dict[str, SizeIndex] = {}
        self._extra = 0                        # rows that the source does not have
        self.rates: Mapping[str, Rates] = MappingProxyType(dict(rates or {}))
        self._add(measurements)

    def _add(self, measurements: Iterable[Measurement]) -> None:
        changed: dict[str, dict[Key, Measurement]] = {}
        for m in measurements:
            rows = changed.get(m.kernel)
            if rows is None:
                rows = changed[m.kernel] = dict(self._rows_of(m.kernel))
            key = (m.bucket, m.place, m.mode)
            old = rows.get(key)
            if old is None or m.supersedes(old):
                rows[key] = m
        for kernel, rows in changed.items():
            self._replace(kernel, rows)

    def _replace(self, kernel: str, rows: Rows) -> None:
        self._extra += len(rows) - len(self._rows_of(kernel))
        self._rows[kernel] = rows
        self._index.pop(kernel, None)

    def _rows_of(self, kernel: str) -> Rows:
        rows = self._rows.get(kernel)
        if rows is None:                       # two threads may both do this, with equal results
            source = self._source
            measured = (source.rows_of(kernel) if source is not None and kernel in source.kernels
                        else ())
            rows = self._rows[kernel] = {(m.bucket, m.place, m.mode): m for m in measured}
        return rows

    def get(self, kernel: str, bucket: str, place: str, mode: str = EAGER) -> Measurement | None:
        return self._rows_of(kernel).get((bucket, place, mode))

    def longest_compile_us(self, kernel: str, place: str, mode: str = EAGER) -> float | None:
        """Returns the longest time its compiler took there for any call; None if none is known."""
        return max((m.compile_us for m in self._rows_of(kernel).values()
                    if (m.place, m.mode) == (place, mode) and m.compile_us), default=None)

    def near(self, kernel: str, kind: Kind, place: str,
             mode: str = EAGER) -> list[tuple[float, Measurement]]:
        """Returns a kernel's nearest measurements in the family, with distances, nearest first."""
        index = self._index.get(kernel)
        if index is None:
            index = self._index[kernel] = _build_index(self._rows_of(kernel))
        octaves = {name: _octave(n) for name, n in kind.sizes}
        candidates = ((_distance(octaves, sizes), m)
                      for sizes, m in index.get((place, kind.family, mode), ()))
        return sorted((pair for pair in candidates if pair[0] <= MAX_DISTANCE),
                      key=lambda pair: pair[0])[:NEIGHBOURS]

    def estimate(self, kernel: str, kind: Kind, place: str, rates: Rates, roofline_us: float,
                 mode: str = EAGER) -> Estimate | None:
        """Estimates a time from how far the kernel's nearest measurements miss the roofline."""
        near = self.near(kernel, kind, place, mode)
        if not near:
            return None
        log_slowdown = weight = trust = 0.0
        for distance, m in near:
            w = m.trust / (0.25 + distance * distance)
            log_slowdown += w * math.log(m.median_us
                                         / (OVERHEAD_US + rates.roofline_us(m.flops, m.bytes)))
            trust += w * m.trust
            weight += w
        nearest = near[0][0]
        us = (OVERHEAD_US + roofline_us) * math.exp(log_slowdown / weight)
        return Estimate(us, trust / weight / (1.0 + nearest / 2), sum(m.samples for _, m in near),
                        nearest)

    def relative(self, kernel: str, near: list[tuple[float, Measurement]]) -> float | None:
        """Returns the mean ratio of the kernel's times to those in `near`, at the same kinds of
        call.

        None if one is missing: a kernel measured only where it is fast must not look fast
        everywhere.
        """
        total = weight = 0.0
        for distance, m in near:
            measured = self.get(kernel, m.bucket, m.place, m.mode)
            if measured is None:
                return None
            w = min(measured.trust, m.trust) / (0.25 + distance * distance)
            total += w * math.log(measured.median_us / m.median_us)
            weight += w
        return math.exp(total / weight) if weight else None

    def __len__(self) -> int:
        return self._extra + (self._source.count() if self._source is not None else 0)

    def __bool__(self) -> bool:
        """Is there any measurement? Does not count, which is slow for a large source."""
        return self._extra > 0 or (self._source is not None and bool(self._source.kernels))

    def __iter__(self) -> Iterator[Measurement]:
        for kernel in sorted({*self._rows,
                              *(self._source.kernels if self._source is not None else ())}):
            yield from self._rows_of(kernel).values()

    def including(self, measurements: Iterable[Measurement],
                  rates: Mapping[str, Rates] | None = None,
                  builds: Mapping[str, str] | None = None) -> PerfView:
        """Returns this view with more rows, without those of other builds than `builds`."""
        view = PerfView((), {**self.rates, **(rates or {})}, self._source)
        view._rows, view._index, view._extra = dict(self._rows), dict(self._index), self._extra
        for kernel, build in (builds or {}).items():
            rows = view._rows_of(kernel)
            current = {key: m for key, m in rows.items() if m.build in ("", build)}
            if len(current) < len(rows):
                view._replace(kernel, current)
        view._add(measurements)
        return view


def _build_index(rows: Rows) -> SizeIndex:
    index: dict[Key, list[tuple[dict[str, float], Measurement]]] = {}
    for m in rows.values():
        if m.median_us > 0 and m.sizes:
            sizes = {name: _octave(int(n))
                     for name, _, n in (part.partition("=") for part in m.sizes.split())}
            index.setdefault((m.place, m.family, m.mode), []).append((sizes, m))
    return index


def _octave(n: int) -> float:
    return math.log2(n) if n > 0 else -1.0


def _distance(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    if a.keys() != b.keys():
        return math.inf
    return sum(abs(a[name] - b[name]) for name in a)
