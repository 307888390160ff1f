"""The places of a store: machines of one model are one place; which kernels win at two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..perf.interface import Store
from ..perf.record import EAGER, Measurement
from ..spec.codec import Record
from ..spec.errors import ConfigError
from ..spec.names import suggest
from .lockfile import Difference


@dataclass(frozen=True)
class Place(Record):
    """Machines that share measurements: one device model, driver, torch and thread count."""

    place: str
    device: str = ""                           # its model
    threads: int = 0                           # of a CPU
    machines: tuple[str, ...] = ()             # nodes by Ray's names, others by a hash
    measurements: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.place, *self.machines, self.device)


def places(rows: Iterable[Measurement],
           environments: Mapping[str, Mapping[str, Any]]) -> tuple[Place, ...]:
    """Return the places of these rows, those with most rows first."""
    counts: dict[str, int] = {}
    used: dict[str, dict[str, None]] = {}
    for m in rows:
        counts[m.place] = counts.get(m.place, 0) + 1
        used.setdefault(m.place, {})[m.environment] = None
    return tuple(_place(name, count, [environments[i] for i in used[name] if i in environments])
                 for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _place(name: str, count: int, environments: list[Mapping[str, Any]]) -> Place:
    device: Mapping[str, Any] = next((e["device"] for e in environments if e.get("device")), {})
    machines = {str(e.get("node") or e.get("machine", "")) for e in environments} - {""}
    threads = name.rpartition("-")[2].removesuffix("t")
    return Place(name, str(device.get("name", "")), int(threads) if threads.isdecimal()
                 and "-" in name else 0, tuple(sorted(machines)), count)


def find_place(name: str, known: Iterable[Place]) -> Place:
    """Return the place that a node, a model of device or the beginning of a place names."""
    known = tuple(known)
    matches = ([p for p in known if name in p.names]
               or [p for p in known if p.place.startswith(name)])
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{name!r} names {len(matches)} places of the store: "
                          f"{', '.join(p.place for p in matches)}; give one of these")
    names = [n for p in known for n in p.names if n]
    known_ones = f"{suggest(name, names)}; lz perf places lists them" if names else (
        ", which has no measurements yet")
    raise ConfigError(f"{name!r} is no file, and no node, device or place of the store"
                      f"{known_ones}")


def compare_places(store: Store, a: str, b: str) -> tuple[Difference, ...]:
    """Compare the fastest kernel of every kind of call that was measured at either place."""
    rows = list(store.rows())
    known = places(rows, store.environments())
    winners = [_winners(rows, find_place(name, known).place) for name in (a, b)]
    kinds = sorted({*winners[0], *winners[1]})
    return tuple(Difference(bucket + ("" if mode == EAGER else f" ({mode})"), op,
                            *(won.get((op, bucket, mode), "") for won in winners))
                 for op, bucket, mode in kinds)


def _winners(rows: Iterable[Measurement], place: str) -> dict[tuple[str, str, str], str]:
    best: dict[tuple[str, str, str], Measurement] = {}
    for m in rows:
        key = m.op, m.bucket, m.mode
        if m.place == place and (key not in best or (m.median_us, m.kernel)
                                 < (best[key].median_us, best[key].kernel)):
            best[key] = m
    return {key: m.kernel for key, m in best.items()}
