"""Where events go: the log, the counters, and whoever subscribed. Never on the path of a hit."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from ..spec.event import (
    BackendUnavailable,
    CertificateRefused,
    Event,
    Fallback,
    HealthChanged,
    KernelRefused,
    PolicyRejected,
    StoreTrouble,
)
from . import redaction

log = logging.getLogger("layerzero")
log.addFilter(redaction.LogFilter())
Sink = Callable[[Event], None]

_sinks: tuple[Sink, ...] = ()
_wanting_reasons: tuple[Sink, ...] = ()        # those of them that want to know why the others were not chosen
_counts: Counter[tuple[str, str, str]] = Counter()
_recent: deque[tuple[float, Event]] = deque(maxlen=512)        # (time, event), as they were redacted then
_lock = threading.Lock()
_LOUD = (BackendUnavailable, CertificateRefused, Fallback, HealthChanged, KernelRefused, PolicyRejected, StoreTrouble)


def emit(event: Event) -> None:
    event = redaction.event(event)
    _recent.append((time.time(), event))
    with _lock:
        _counts[event.name, event.op, event.kernel] += 1
    level = logging.WARNING if isinstance(event, _LOUD) else logging.DEBUG
    if log.isEnabledFor(level):
        log.log(level, "%s", describe(event))
    for sink in _sinks:
        try:
            sink(event)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError) as e:
            log.warning("event sink %r failed: %s", sink, e)


def describe(event: Event) -> str:
    parts = [f"{k}={v}" for k, v in event.shown().items() if v not in ("", None, ())]
    return f"{event.name} " + " ".join(parts)


def wants_reasons() -> bool:
    """Would anyone see why the kernels that were not chosen were not? To find it out takes a while."""
    return bool(_wanting_reasons) or log.isEnabledFor(logging.DEBUG)


def subscribe(sink: Sink, reasons: bool = True) -> Callable[[], None]:
    """Call `sink` with every event from now on; returns a function that stops it.

    Without `reasons`, a choice does not say why the others were rejected, and takes less time.
    """
    global _sinks, _wanting_reasons
    def forward(event: Event) -> None:         # one of its own per subscription, so that each stops alone
        sink(event)

    with _lock:
        _sinks = (*_sinks, forward)
        _wanting_reasons = (*_wanting_reasons, forward) if reasons else _wanting_reasons

    def stop() -> None:
        global _sinks, _wanting_reasons
        with _lock:
            _sinks, _wanting_reasons = (tuple(s for s in sinks if s is not forward)
                                        for sinks in (_sinks, _wanting_reasons))

    return stop


def recent() -> list[tuple[float, Event]]:
    """The last events of this process with their times, oldest first."""
    return list(_recent)


def counts() -> dict[tuple[str, str, str], int]:
    """(event, op, kernel) -> how often."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    with _lock:
        _counts.clear()


def after_fork(*_: Any) -> None:
    global _lock
    _lock = threading.Lock()
