"""Traces and metrics for OpenTelemetry.

    from layerzero.integrations import opentelemetry
    uninstall = opentelemetry.install()

A choice is a child span of the caller's; a call served by another kernel than the chosen one is an
event on the caller's span. Cache hits make no span: the cache counts them anyway, and metrics read
its counts. `install(dispatch=True)` makes a span for every call: each then takes the path of a
miss, some microseconds more, so it is for debugging. A span has the host's time: a kernel on a GPU
goes on after it.
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

# An observable instrument cannot be removed from its meter, and creating it again returns the same
# one with its first callback. So each has a switch, which outlives the install.
_switches: WeakKeyDictionary[Any, _Switch] = WeakKeyDictionary()


def install(tracer_provider: Any = None, meter_provider: Any = None, *,
            dispatch: bool = False) -> Callable[[], None]:
    """Report to these providers (by default the global ones); returns a function that uninstalls.
    `dispatch` also makes a span for every call, not only for every choice."""
    try:
        from opentelemetry import metrics, trace
    except ImportError as e:
        raise ConfigError("traces and metrics need opentelemetry-api, which is not installed; "
                          "install layerzero[telemetry]") from e
    tracer = trace.get_tracer("layerzero", tracer_provider=tracer_provider)
    meter = metrics.get_meter("layerzero", meter_provider=meter_provider)
    new_switch = _Switch(metrics.Observation)
    counter = meter.create_observable_counter("layerzero.calls", [new_switch.observe], "{call}",
                                              "Calls, by the kernel chosen for them")
    switch = _switches.setdefault(counter, new_switch)
    if switch.on:
        raise ConfigError("LayerZero reports to this OpenTelemetry meter already; "
                          "call what install() returned before installing it again")
    switch.on = True
    stop = events.subscribe(_Listener(trace, tracer, meter).on_event)
    recorder = _CallSpans(tracer)
    if dispatch:
        recording.start(recorder)

    def uninstall() -> None:
        stop()
        switch.on = False
        if dispatch:
            recording.stop(recorder)

    return uninstall


class _Switch:
    def __init__(self, observation: Any) -> None:
        self.observation = observation
        self.on = False

    def observe(self, options: Any) -> Iterator[Any]:
        for op, kernels in inspection.stats().calls.items() if self.on else ():
            for kernel, n in kernels.items():
                yield self.observation(n, {"layerzero.op": op, "layerzero.kernel": kernel})


class _CallSpans:
    """Makes a span for every call, as a recorder of calls."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer

    def served(self, op: Op, entry: Entry, kernel: str, values: tuple[Any, ...], start: int,
               ended: int) -> None:
        plan = entry.plan
        first = plan.steps[0]
        call = redaction.SHAPE if redaction.hides("shapes") else describe_call(op, plan.facts)
        span = self.tracer.start_span("layerzero.dispatch", start_time=start, attributes={
            "layerzero.op": op.name, "layerzero.kernel": kernel, "layerzero.chosen": plan.kernel
            or "", "layerzero.call": call,
            "layerzero.transforms": tuple(map(str, first.transforms)),
            "layerzero.transform_cost_total": first.score.transform_us})
        span.end(max(ended, start))

    def traced(self, op: Op, facts: Mapping[str, Any], kernel: str,
               values: tuple[Any, ...]) -> None:
        """No span: what torch.compile traces runs later, as torch's own graph."""

    def flush(self) -> None:
        """Nothing to do: the SDK's exporter has its own schedule."""

    def after_fork(self) -> None:
        """Nothing to do: the SDK decides whether a child process has spans."""


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

    def on_event(self, event: Event) -> None:
        if isinstance(event, Selected):
            self._selected(event)
        elif isinstance(event, Fallback):
            code = event.reason.code.value if event.reason else ""
            attributes = {"layerzero.op": event.op, "layerzero.kernel": event.kernel,
                          "layerzero.served_by": event.served_by, "layerzero.code": code}
            self.fallbacks.add(1, attributes)
            message = event.reason.message if event.reason else ""
            self.trace.get_current_span().add_event(
                "layerzero.fallback", {**attributes, "layerzero.reason": message})
        elif isinstance(event, HealthChanged):
            self.health.add(1, {"layerzero.kernel": event.kernel, "layerzero.state": event.state})

    def _selected(self, event: Selected) -> None:
        attributes = {"layerzero.op": event.op, "layerzero.kernel": event.kernel}
        self.selections.add(1, attributes)
        self.microseconds.record(event.microseconds, {"layerzero.op": event.op})
        # the choice is made already: the span begins in the past
        end = time.time_ns()
        span = self.tracer.start_span("layerzero.select",
                                      start_time=end - int(event.microseconds * 1000), attributes={
            **attributes, "layerzero.candidates": event.candidates,
            "layerzero.transforms": event.transforms, "layerzero.source": event.source,
            "layerzero.transform_cost_total": event.transform_cost_total,
            "layerzero.reasons": event.reasons})
        span.end(end)
