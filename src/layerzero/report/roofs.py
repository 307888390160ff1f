"""The highest rates known of a device: measured by tuning, or reached by a kernel since."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..perf.record import Rates


class Cost(NamedTuple):
    """The work of one call by its contract, and the time that the fastest kernel takes for it."""

    flops: float
    bytes: float
    us: float


class Roofs(NamedTuple):
    """Rates per microsecond. A kernel that is faster than a measured rate raises it."""

    flops: float
    memory: float                              # bytes, of calls that do not fit the last cache
    cache: float                               # bytes, of calls that do; at least that of memory
    cache_bytes: int = 0                       # size of the last cache; 0: unknown, all is memory
    raised: frozenset[str] = frozenset()       # the names of the rates that a kernel exceeded

    @classmethod
    def known(cls, rates: Rates, costs: Iterable[Cost], cache_bytes: int = 0) -> Roofs:
        """Return the rates that tuning measured, raised to what was reached by any of `costs`."""
        costs = tuple(costs)
        cached = [c.bytes / c.us for c in costs if c.bytes <= cache_bytes]
        streamed = [c.bytes / c.us for c in costs if c.bytes > cache_bytes]
        flops = max([rates.flops_per_us, *(c.flops / c.us for c in costs)])
        memory = max([rates.bytes_per_us, *streamed])
        raised = {"flops"} if flops > rates.flops_per_us else set()
        raised |= {"memory"} if memory > rates.bytes_per_us else set()
        return cls(flops, memory, max([memory, *cached]), cache_bytes, frozenset(raised))

    def bandwidth(self, nbytes: float) -> float:
        """Return the bytes per microsecond that a call which moves `nbytes` may reach."""
        return self.cache if nbytes <= self.cache_bytes else self.memory

    def least_us(self, flops: float, nbytes: float) -> float:
        """Return the time of a call at these rates."""
        return max(flops / self.flops, nbytes / self.bandwidth(nbytes), 1e-3)

    def limit(self, flops: float, nbytes: float) -> str:
        """Return which rate decides: "compute", "memory" or "cache"."""
        if flops / self.flops >= nbytes / self.bandwidth(nbytes):
            return "compute"
        return "cache" if nbytes <= self.cache_bytes else "memory"
