"""Where events go: the log, the counters, and whoever subscribed. Never on the path of a hit."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..spec.event import (
    BackendUnavailable,
    CertificateRefused,
    Event,
    Fallback,
    FileRefused,
    HealthChanged,
    KernelRefused,
    PolicyRejected,
    StoreTrouble,
)

log = logging.getLogger("layerzero")
Sink = Callable[[Event], None]

_sinks: tuple[Sink, ...] = ()
_counts: Counter[tuple[str, str, str]] = Counter()
_lock = threading.Lock()
_LOUD = (BackendUnavailable, CertificateRefused, Fallback, FileRefused, HealthChanged, KernelRefused, PolicyRejected,
         StoreTrouble)


def emit(event: Event) -> None:
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
    parts = [f"{k}={v}" for k, v in event.__dict__.items() if v not in ("", None, ())]
    return f"{event.name} " + " ".join(parts)


def subscribe(sink: Sink) -> Callable[[], None]:
    """Call `sink` with every event from now on; returns a function that stops it."""
    global _sinks
    def forward(event: Event) -> None:         # one of its own per subscription, so that each stops alone
        sink(event)

    with _lock:
        _sinks = (*_sinks, forward)

    def stop() -> None:
        global _sinks
        with _lock:
            _sinks = tuple(s for s in _sinks if s is not forward)

    return stop


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
