"""The circuit breaker: pure transitions over frozen values; the world holds them, `dispatch` applies them.

closed --threshold failures--> open --cooldown--> half_open --one success--> closed
                                 ^                    |
                                 +----one failure-----+   (with twice the cooldown, up to ten minutes)
A sticky device fault goes to `disabled`, and stays there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..spec.reason import Code, Reason

LONGEST_COOLDOWN = 600.0


@dataclass(frozen=True)
class Health:
    state: str = "closed"                      # closed | open | half_open | disabled
    failures: int = 0
    cooldown: float = 0.0
    until: float = 0.0                         # monotonic time at which an open breaker may be tried
    reason: Reason | None = None               # the last fault

    @property
    def blocks(self) -> Reason | None:
        """Why selection must leave this one out, if it must."""
        last = str(self.reason.got) if self.reason else "repeated faults"
        if self.state == "open":
            return Reason(Code.CIRCUIT_OPEN, f"{self.cooldown:g} s", f"{self.failures} faults in a row; last: {last}")
        if self.state == "disabled":
            return Reason(Code.BACKEND_DISABLED, None, last)
        return None


def failed(old: Health | None, reason: Reason, now: float, threshold: int, cooldown: float) -> Health:
    old = old or Health()
    failures = old.failures + 1
    if old.state == "disabled":
        return old
    if old.state == "open":                    # a call that had begun before: the cooldown goes on as it was
        return replace(old, failures=failures, reason=reason)
    if old.state == "half_open":
        longer = min(old.cooldown * 2, LONGEST_COOLDOWN)
        return Health("open", failures, longer, now + longer, reason)
    if failures >= threshold:
        return Health("open", failures, cooldown, now + cooldown, reason)
    return Health("closed", failures, 0.0, 0.0, reason)


def succeeded(old: Health | None) -> Health | None:
    """None: nothing against it any more. A call that had begun before it was opened or disabled changes nothing."""
    return old if old is not None and old.state in ("open", "disabled") else None


def disabled(reason: Reason) -> Health:
    return Health("disabled", 1, reason=reason)


def cooled(health: Mapping[str, Health], now: float) -> dict[str, Health]:
    """Open breakers whose time has come turn half open."""
    return {k: replace(h, state="half_open") if h.state == "open" and now >= h.until else h for k, h in health.items()}


def next_deadline(health: Mapping[str, Health]) -> float | None:
    return min((h.until for h in health.values() if h.state == "open"), default=None)
