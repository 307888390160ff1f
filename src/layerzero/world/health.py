"""The circuit breaker: pure transitions over frozen values. The world holds the breakers that are
not closed.

closed --too many faults--> open --cooldown--> half_open --one success--> closed
                             ^                    |
                             +----one fault-------+   (with twice the cooldown, up to ten minutes)
A sticky device fault goes to `disabled`, and stays there.

A breaker opens after a number of consecutive faults, or at a fault rate over the last calls. Faults
are counted outside the world, so that counting one invalidates nothing. The number of calls comes
from the caches, which count hits anyway: a hit does nothing for its kernel's health. """

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..spec.reason import Code, Reason

MAX_COOLDOWN = 600.0


@dataclass(frozen=True)
class Health:
    state: str = "closed"                      # closed | open | half_open | disabled
    failures: int = 0                          # among the last calls
    cooldown: float = 0.0
    # monotonic time at which an open breaker may be tried
    until: float = 0.0
    reason: Reason | None = None               # the last fault

    @property
    def blocks(self) -> Reason | None:
        """Returns why selection must skip the kernel; None if it may be tried."""
        last = str(self.reason.got) if self.reason else "repeated faults"
        if self.state == "open":
            return Reason(Code.CIRCUIT_OPEN, f"{self.cooldown:g} s",
                          f"{self.failures} faults; last: {last}")
        if self.state == "disabled":
            return Reason(Code.BACKEND_DISABLED, None, last)
        return None


@dataclass(frozen=True)
class BreakerLimits:
    """The policy's settings for when a breaker opens."""

    # consecutive faults; also the fewest that count as a rate
    threshold: int = 3
    rate: float = 0.05                         # faults / calls in the window
    window: int = 200                          # calls


class Faults:
    """The faults of one kernel among its last calls. `calls` is always the number of its calls so
    far, this one included; threads may see it lag a little."""

    def __init__(self) -> None:
        self.streak = 0                        # consecutive faults
        self.last: Reason | None = None
        self._fault_calls: deque[int] = deque()  # the number of calls at each fault in the window

    def add(self, calls: int, reason: Reason, limits: BreakerLimits) -> bool:
        """Counts a fault and returns whether the breaker must open."""
        calls = max(calls, self._fault_calls[-1] if self._fault_calls else 1)
        self.streak = (self.streak + 1 if self._fault_calls and calls - self._fault_calls[-1] <= 1
                       else 1)
        self.last = reason
        self._fault_calls.append(calls)
        self._forget(calls, limits.window)
        recent = min(calls, limits.window)
        return self.streak >= limits.threshold or (
            len(self._fault_calls) >= limits.threshold and len(self._fault_calls) >= limits.rate
            * recent)

    def among_last(self, calls: int, limits: BreakerLimits) -> int:
        """Returns how many of the last calls failed."""
        self._forget(calls, limits.window)
        return len(self._fault_calls)

    def _forget(self, calls: int, window: int) -> None:
        while (self._fault_calls and (calls - self._fault_calls[0] >= window
                                      or len(self._fault_calls) > window)):
            self._fault_calls.popleft()


def after_failure(old: Health | None, reason: Reason, now: float, too_many: bool, failures: int,
                  cooldown: float) -> Health | None:
    """Returns the breaker after a fault; it opens if there were `too_many`."""
    if old is not None and old.state in ("open", "disabled"):  # the call began before it opened
        return old
    if old is not None and old.state == "half_open":
        longer = min(old.cooldown * 2, MAX_COOLDOWN)
        return Health("open", failures, longer, now + longer, reason)
    return Health("open", failures, cooldown, now + cooldown, reason) if too_many else None


def after_success(old: Health | None) -> Health | None:
    """Returns the breaker after a success, None for closed; an open one stays open."""
    return old if old is not None and old.state in ("open", "disabled") else None


def disabled(reason: Reason) -> Health:
    return Health("disabled", 1, reason=reason)


def after_cooldown(health: Mapping[str, Health], now: float) -> dict[str, Health]:
    """Returns the breakers with those whose cooldown is over half open."""
    return {k: replace(h, state="half_open") if h.state == "open" and now >= h.until else h
            for k, h in health.items()}


def next_deadline(health: Mapping[str, Health]) -> float | None:
    return min((h.until for h in health.values() if h.state == "open"), default=None)
