"""Counters for Prometheus.

    from layerzero.integrations import prometheus
    uninstall = prometheus.install()

A cache hit costs nothing more: the cache counts calls anyway, and a scrape reads its counts.
`layerzero_calls_total` counts by the chosen kernel; a call that another kernel served is also in
`layerzero_fallbacks_total`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..operate import inspection
from ..spec.errors import ConfigError
from ..spec.event import Event, Fallback, Selected
from ..world import events
from ..world import snapshot as worlds

BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2, "disabled": 3}
SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 1e-1, 1.0, 10.0)


def install(registry: Any = None) -> Callable[[], None]:
    """Expose LayerZero in `registry` (default: the global one); returns an uninstaller."""
    try:
        import prometheus_client.core
    except ImportError as e:
        raise ConfigError("counters for Prometheus need prometheus_client, which is not installed; "
                          "install layerzero[telemetry]") from e
    target = prometheus_client.REGISTRY if registry is None else registry
    collector = _Collector(prometheus_client)
    try:
        target.register(collector)
    except ValueError as e:
        raise ConfigError("LayerZero is in this Prometheus registry already; "
                          "call what install() returned before installing it again") from e
    stop = events.subscribe(collector.on_event, reasons=False)

    def uninstall() -> None:
        nonlocal collector
        stop()
        if collector is not None:
            target.unregister(collector)
            collector = None  # type: ignore[assignment]

    return uninstall


class _Collector:
    """All metrics in one collector, so that a registry has either all of them or none."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.selections = client.Counter(
            "layerzero_selections", "Choices made for kinds of calls not seen before",
            ("op", "kernel"), registry=None)
        self.fallbacks = client.Counter(
            "layerzero_fallbacks", "Calls that `kernel` was chosen for and `served_by` served",
            ("op", "kernel", "served_by", "code"), registry=None)
        self.transforms = client.Counter(
            "layerzero_selected_transform_microseconds",
            "Expected cost of the transforms of the choices made", ("op", "kernel"), registry=None)
        self.seconds = client.Histogram(
            "layerzero_selection_seconds", "Time to make a choice, loading included", ("op",),
            buckets=SECONDS, registry=None)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Selected):
            self.selections.labels(event.op, event.kernel).inc()
            self.seconds.labels(event.op).observe(event.microseconds / 1e6)
            if event.transform_cost_total:
                self.transforms.labels(event.op, event.kernel).inc(event.transform_cost_total)
        elif isinstance(event, Fallback):
            code = event.reason.code.value if event.reason else ""
            self.fallbacks.labels(event.op, event.kernel, event.served_by, code).inc()

    def describe(self) -> Iterator[Any]:
        for metric in (self.selections, self.fallbacks, self.seconds, self.transforms):
            yield from metric.describe()
        yield from self._empty()

    def collect(self) -> Iterator[Any]:
        for metric in (self.selections, self.fallbacks, self.seconds, self.transforms):
            yield from metric.collect()
        calls, breakers, epoch = self._empty()
        for op, kernels in inspection.stats().calls.items():
            for kernel, n in kernels.items():
                calls.add_metric((op, kernel), n)
        world = worlds.current()
        # A breaker is per library; torch's own kernels have one each.
        for group in sorted({kernel.health for kernel in world.catalog.kernels}
                            | world.health.keys()):
            health = world.health.get(group)
            breakers.add_metric((group,), BREAKER_STATES[health.state if health else "closed"])
        epoch.add_metric((), world.epoch)
        yield from (calls, breakers, epoch)

    def _empty(self) -> tuple[Any, Any, Any]:
        """Return the families that are read on a scrape, without samples."""
        states = ", ".join(f"{n} {state}" for state, n in BREAKER_STATES.items())
        counter, gauge = self.client.core.CounterMetricFamily, self.client.core.GaugeMetricFamily
        return (counter("layerzero_calls", "Calls, by the kernel chosen for them",
                        labels=("op", "kernel")),
                gauge("layerzero_breaker_state", f"Circuit breaker: {states}", labels=("kernel",)),
                gauge("layerzero_world_epoch", "How often what choices depend on has changed",
                      labels=()))
