"""Traces and metrics for OpenTelemetry.

    from layerzero.integrations import opentelemetry
    uninstall = opentelemetry.install()

A choice is a span below the caller's; a call served by another kernel than the chosen one is an event
on the caller's span. Calls that find their remembered choice make no span: they are counted by the
cache anyway and read when metrics are collected. `install(dispatch=True)` makes a span for every call
instead: each then takes the way of a miss, some microseconds more, so it is for looking, not for good.
The time of a span is the host's: a kernel on a GPU goes on after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from ..dispatch.cache import Entry
from ..operate import inspection, recording
from ..spec.errors import ConfigError
from ..spec.event import Event, Fallback, HealthChanged, Selected
from ..spec.op import Op
from ..world import events, redaction
from ..world.tables import describe_call

# An observable instrument cannot be taken out of its meter, and asking for it again gives the same one
# with its first callback. So each has a switch, which outlives what install() returned.
_switches: WeakKeyDictionary[Any, _Switch] = WeakKeyDictionary()


def install(tracer_provider: Any = None, meter_provider: Any = None, *, dispatch: bool = False) -> Callable[[], None]:
    """Report to these providers (by default the global ones); returns what stops it.

    `dispatch`: a span for every call too, not only for every choice.
    """
    try:
        from opentelemetry import metrics, trace
    except ImportError as e:
        raise ConfigError("traces and metrics need opentelemetry-api, which is not installed; "
                          "install layerzero[telemetry]") from e
    tracer = trace.get_tracer("layerzero", tracer_provider=tracer_provider)
    meter = metrics.get_meter("layerzero", meter_provider=meter_provider)
    fresh = _Switch(metrics.Observation)
    calls = meter.create_observable_counter("layerzero.calls", [fresh.observe], "{call}",
                                            "Calls, by the kernel chosen for them")
    switch = _switches.setdefault(calls, fresh)
    if switch.on:
        raise ConfigError("LayerZero reports to this OpenTelemetry meter already; "
                          "call what install() returned before installing it again")
    switch.on = True
    stop = events.subscribe(_Listener(trace, tracer, meter).hear)
    calls_seen = _Calls(tracer)
    if dispatch:
        recording.start(calls_seen)

    def uninstall() -> None:
        stop()
        switch.on = False
        if dispatch:
            recording.stop(calls_seen)

    return uninstall


class _Switch:
    def __init__(self, observation: Any) -> None:
        self.observation = observation
        self.on = False

    def observe(self, options: Any) -> Iterator[Any]:
        for op, kernels in inspection.stats().calls.items() if self.on else ():
            for kernel, n in kernels.items():
                yield self.observation(n, {"layerzero.op": op, "layerzero.kernel": kernel})


class _Calls:
    """A span for every call, told of by the same means that records calls."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer

    def served(self, op: Op, entry: Entry, kernel: str, values: tuple[Any, ...], began: int, ended: int) -> None:
        plan = entry.plan
        first = plan.steps[0]
        call = redaction.SHAPE if redaction.hides("shapes") else describe_call(op, plan.facts)
        span = self.tracer.start_span("layerzero.dispatch", start_time=began, attributes={
            "layerzero.op": op.name, "layerzero.kernel": kernel, "layerzero.chosen": plan.kernel or "",
            "layerzero.call": call, "layerzero.transforms": tuple(map(str, first.transforms)),
            "layerzero.transform_cost_total": first.score.transform_us})
        span.end(max(ended, began))

    def traced(self, op: Op, facts: Mapping[str, Any], kernel: str, values: tuple[Any, ...]) -> None:
        """What torch.compile traces runs later, as torch's own graph."""

    def flush(self) -> None:
        """The exporter of the SDK keeps its own time."""

    def after_fork(self) -> None:
        """Whether spans go on in a child is the SDK's business."""


class _Listener:
    def __init__(self, trace: Any, tracer: Any, meter: Any) -> None:
        self.trace, self.tracer = trace, tracer
        self.selections = meter.create_counter(
            "layerzero.selections", "{choice}", "Choices made for kinds of calls not seen before")
        self.microseconds = meter.create_histogram(
            "layerzero.selection.duration", "us", "Time to make a choice, loading included")
        self.fallbacks = meter.create_counter(
            "layerzero.fallbacks", "{call}", "Calls served by another kernel than the chosen one")
        self.health = meter.create_counter(
            "layerzero.health.changes", "{change}", "Changes of a circuit breaker's state")

    def hear(self, event: Event) -> None:
        if isinstance(event, Selected):
            self._selected(event)
        elif isinstance(event, Fallback):
            code = event.reason.code.value if event.reason else ""
            about = {"layerzero.op": event.op, "layerzero.kernel": event.kernel, "layerzero.served_by": event.served_by,
                     "layerzero.code": code}
            self.fallbacks.add(1, about)
            message = event.reason.message if event.reason else ""
            self.trace.get_current_span().add_event("layerzero.fallback", {**about, "layerzero.reason": message})
        elif isinstance(event, HealthChanged):
            self.health.add(1, {"layerzero.kernel": event.kernel, "layerzero.state": event.state})

    def _selected(self, event: Selected) -> None:
        about = {"layerzero.op": event.op, "layerzero.kernel": event.kernel}
        self.selections.add(1, about)
        self.microseconds.record(event.microseconds, {"layerzero.op": event.op})
        end = time.time_ns()                   # the choice is made already: the span is dated back
        span = self.tracer.start_span("layerzero.select", start_time=end - int(event.microseconds * 1000), attributes={
            **about, "layerzero.candidates": event.candidates, "layerzero.transforms": event.transforms,
            "layerzero.source": event.source, "layerzero.transform_cost_total": event.transform_cost_total,
            "layerzero.reasons": event.reasons})
        span.end(end)
