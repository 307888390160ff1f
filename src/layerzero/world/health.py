"""The circuit breaker: pure transitions over frozen values; the world holds those that are not closed.

closed --too many faults--> open --cooldown--> half_open --one success--> closed
                             ^                    |
                             +----one fault-------+   (with twice the cooldown, up to ten minutes)
A sticky device fault goes to `disabled`, and stays there.

Too many is a rate, not only a row: so many faults one after the other, or so large a share of the last calls. The
faults are counted here, outside the world, so that counting one changes nothing for anybody. How many calls there were
is what the caches count anyway: a hit does nothing for its kernel's health.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..spec.reason import Code, Reason

LONGEST_COOLDOWN = 600.0


@dataclass(frozen=True)
class Health:
    state: str = "closed"                      # closed | open | half_open | disabled
    failures: int = 0                          # among the last calls
    cooldown: float = 0.0
    until: float = 0.0                         # monotonic time at which an open breaker may be tried
    reason: Reason | None = None               # the last fault

    @property
    def blocks(self) -> Reason | None:
        """Why selection must leave this one out, if it must."""
        last = str(self.reason.got) if self.reason else "repeated faults"
        if self.state == "open":
            return Reason(Code.CIRCUIT_OPEN, f"{self.cooldown:g} s", f"{self.failures} faults; last: {last}")
        if self.state == "disabled":
            return Reason(Code.BACKEND_DISABLED, None, last)
        return None


@dataclass(frozen=True)
class Limits:
    """When a breaker opens, as the policy says."""

    threshold: int = 3                         # faults one after the other, and the fewest that make a rate
    rate: float = 0.05                         # share of the last calls
    window: int = 200                          # how many calls are the last ones


class Faults:
    """The faults of one kernel among its last calls. `calls` is always how often it was called so far, this call
    included; it may lag behind a little among threads."""

    def __init__(self) -> None:
        self.row = 0                           # one after the other
        self.last: Reason | None = None
        self._at: deque[int] = deque()         # the count of calls at each fault of the window

    def add(self, calls: int, reason: Reason, limits: Limits) -> bool:
        """Count one; is it one too many?"""
        calls = max(calls, self._at[-1] if self._at else 1)
        self.row = self.row + 1 if self._at and calls - self._at[-1] <= 1 else 1
        self.last = reason
        self._at.append(calls)
        self._forget(calls, limits.window)
        among = min(calls, limits.window)
        return self.row >= limits.threshold or (
            len(self._at) >= limits.threshold and len(self._at) >= limits.rate * among)

    def among_last(self, calls: int, limits: Limits) -> int:
        """How many of the last calls failed."""
        self._forget(calls, limits.window)
        return len(self._at)

    def _forget(self, calls: int, window: int) -> None:
        while self._at and (calls - self._at[0] >= window or len(self._at) > window):
            self._at.popleft()


def failed(old: Health | None, reason: Reason, now: float, too_many: bool, failures: int,
           cooldown: float) -> Health | None:
    """The breaker after a fault, which was the last straw or was not."""
    if old is not None and old.state in ("open", "disabled"):  # a call that had begun before: it goes on as it was
        return old
    if old is not None and old.state == "half_open":
        longer = min(old.cooldown * 2, LONGEST_COOLDOWN)
        return Health("open", failures, longer, now + longer, reason)
    return Health("open", failures, cooldown, now + cooldown, reason) if too_many else None


def succeeded(old: Health | None) -> Health | None:
    """None: closed. A call that had begun before it was opened or disabled changes nothing."""
    return old if old is not None and old.state in ("open", "disabled") else None


def disabled(reason: Reason) -> Health:
    return Health("disabled", 1, reason=reason)


def cooled(health: Mapping[str, Health], now: float) -> dict[str, Health]:
    """Open breakers whose time has come turn half open."""
    return {k: replace(h, state="half_open") if h.state == "open" and now >= h.until else h for k, h in health.items()}


def next_deadline(health: Mapping[str, Health]) -> float | None:
    return min((h.until for h in health.values() if h.state == "open"), default=None)
