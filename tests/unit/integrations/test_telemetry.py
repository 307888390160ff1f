"""What can be seen from outside: explain, stats and events, and the real Prometheus and
OpenTelemetry clients.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.integrations import opentelemetry, prometheus
from layerzero.spec.reason import Code
from layerzero.spec.rules import at_most, contiguous
from layerzero.world import events
from layerzero.world import snapshot as worlds
from layerzero.world.health import Health

prometheus_client = pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

RMS_NORM = lz.op("rms_norm")


def good() -> Any:
    return RMS_NORM.reference


def broken() -> Any:
    def run(x, weight=None, eps=1e-6):
        raise RuntimeError("this kernel is broken")
    return run


def kernel(name: str, load: Any = good, **rest: Any) -> lz.Kernel:
    """One that goes first wherever it may serve."""
    return lz.Kernel(name, RMS_NORM, load, prior=1e9, less_work="a test",
                     requires=(at_most("hidden", 64),), **rest)


@pytest.fixture(autouse=True)
def nothing_remembered(world):
    lz.clear_cache()


@pytest.fixture
def x():
    return torch.randn(3, 32)


# explain: the report of a choice

def test_the_report_of_a_choice_has_everyone_with_score_or_reasons(x):
    lz.register(kernel("ours.good"))
    plan = lz.explain("rms_norm", x)
    everyone = {k.id for k in worlds.current().kernels("rms_norm")}
    assert {s.kernel for s in plan.steps} | {r.kernel for r in plan.rejected} == everyone
    assert plan.kernel == "ours.good" == plan.steps[0].kernel
    assert [s.score.total_us for s in plan.steps] == sorted(s.score.total_us for s in plan.steps)
    assert all(s.score.total_us > 0 for s in plan.steps) and all(r.reasons for r in plan.rejected)
    assert plan.facts["hidden"] == 32 and plan.facts["dtype"] == "float32"


def test_the_report_says_why_a_kernel_was_left_out(x):
    lz.register(kernel("ours.good"))
    wide = torch.randn(3, 128)
    assert lz.explain("rms_norm", x).why_not("ours.good") == ()
    (reason,) = lz.explain("rms_norm", wide).why_not("ours.good")
    assert (reason.code, reason.want, reason.got) == (Code.SHAPE_UNSUPPORTED, "<= 64", 128)
    shown = next(line for line in str(lz.explain("rms_norm", wide)).splitlines()
                 if "ours.good" in line)
    assert "SHAPE_UNSUPPORTED: hidden must be <= 64, got 128" in shown


def test_the_report_is_json(x):
    plan = lz.explain("rms_norm", x)
    assert lz.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_report_says_whether_the_choice_was_remembered(x):
    assert not lz.explain("rms_norm", x).from_cache
    lz.rms_norm(x)
    assert lz.explain("rms_norm", x).from_cache


# stats and events

def calls(op: str = "rms_norm") -> dict[str, int]:
    return dict(lz.stats().calls.get(op, {}))


def test_calls_are_counted_by_kernel(x):
    lz.register(kernel("ours.good"))
    lz.rms_norm(x)
    before = calls()["ours.good"]
    for _ in range(5):
        lz.rms_norm(x)
    assert calls()["ours.good"] == before + 5
    assert lz.stats().to_json()["calls"]["rms_norm"]["ours.good"] == before + 5


def test_counts_survive_a_new_world(x):
    lz.register(kernel("ours.good"))
    lz.rms_norm(x)
    lz.rms_norm(x)
    before = calls()["ours.good"]
    lz.clear_cache()
    assert calls()["ours.good"] == before


def test_a_choice_is_one_event_and_a_remembered_one_is_none(x):
    lz.register(kernel("ours.good"))
    received = []
    stop = lz.subscribe(received.append)
    lz.rms_norm(x)
    lz.rms_norm(x)
    lz.rms_norm(x)
    stop()
    (selected,) = [e for e in received if e.name == "selected"]
    assert (selected.op, selected.kernel, selected.transforms) == ("rms_norm", "ours.good", ())
    assert (selected.source, selected.transform_cost_total) == ("less work", 0.0)
    assert selected.candidates == len(worlds.current().kernels("rms_norm"))
    assert selected.microseconds > 0
    lz.rms_norm(torch.randn(3, 33))
    assert len([e for e in received if e.name == "selected"]) == 1     # nobody listens any more


def test_a_step_down_is_an_event_a_line_in_the_log_and_a_note_in_the_report(x, caplog):
    lz.register(kernel("ours.broken", broken))
    received = []
    stop = lz.subscribe(received.append)
    with caplog.at_level(logging.WARNING, "layerzero"):
        out = lz.rms_norm(x)
    stop()
    torch.testing.assert_close(out, RMS_NORM.reference(x))
    (fallback,) = [e for e in received if e.name == "fallback"]
    assert (fallback.kernel, fallback.reason.code) == ("ours.broken", Code.KERNEL_FAILED)
    assert fallback.served_by == lz.explain("rms_norm", x).steps[1].kernel
    assert "fallback" in caplog.text and "this kernel is broken" in caplog.text
    assert json.loads(json.dumps(fallback.to_json()))["reason"][
        "got"] == "RuntimeError: this kernel is broken"


def test_a_sink_that_fails_hurts_nobody(x, caplog):
    received = []

    def bad(event):
        raise ValueError("sink is broken")

    stops = [lz.subscribe(bad), lz.subscribe(received.append)]
    with caplog.at_level(logging.WARNING, "layerzero"):
        lz.rms_norm(x)
    for stop in stops:
        stop()
    assert "sink is broken" in caplog.text
    assert [e.name for e in received].count("selected") == 1


def test_events_are_counted(x):
    before = events.counts().get(("selected", "rms_norm", "ours.good"), 0)
    lz.register(kernel("ours.good"))
    lz.rms_norm(x)
    assert events.counts()["selected", "rms_norm", "ours.good"] == before + 1
    assert lz.stats().events["selected"] >= before + 1


# Prometheus

@pytest.fixture
def registry():
    registry = prometheus_client.CollectorRegistry()
    uninstall = prometheus.install(registry)
    yield registry
    uninstall()


def test_prometheus_counts_choices_calls_and_seconds(registry, x):
    lz.register(kernel("ours.good"))
    about = {"op": "rms_norm", "kernel": "ours.good"}
    assert registry.get_sample_value("layerzero_selections_total", about) is None
    lz.rms_norm(x)
    before = registry.get_sample_value("layerzero_calls_total", about) or 0
    for _ in range(7):
        lz.rms_norm(x)
    assert registry.get_sample_value("layerzero_selections_total", about) == 1
    assert registry.get_sample_value("layerzero_calls_total", about) == before + 7
    assert registry.get_sample_value("layerzero_selection_seconds_count", {"op": "rms_norm"}) == 1
    assert registry.get_sample_value("layerzero_selection_seconds_sum", {"op": "rms_norm"}) > 0


def test_prometheus_counts_steps_down_with_their_code_and_shows_the_breaker(registry, x):
    lz.configure(breaker_threshold=2)
    lz.register(kernel("ours.broken", broken))
    state = {"kernel": "ours.broken"}
    assert registry.get_sample_value("layerzero_breaker_state",
                                     state) == prometheus.BREAKER_STATES["closed"]
    lz.rms_norm(x)
    served_by = lz.explain("rms_norm", x).steps[1].kernel
    about = {"op": "rms_norm", "kernel": "ours.broken", "served_by": served_by,
             "code": "KERNEL_FAILED"}
    assert registry.get_sample_value("layerzero_fallbacks_total", about) == 1
    lz.rms_norm(x)
    assert registry.get_sample_value("layerzero_fallbacks_total", about) == 2
    assert registry.get_sample_value("layerzero_breaker_state",
                                     state) == prometheus.BREAKER_STATES["open"]


@pytest.mark.parametrize(("state", "number"), sorted(prometheus.BREAKER_STATES.items()))
def test_prometheus_shows_every_state_of_a_breaker(registry, state, number):
    broken = Health(state, 1, until=time.monotonic() + 3600)
    worlds.publish(lambda w: w.replace(health={"some_library": broken}), "test")
    assert registry.get_sample_value("layerzero_breaker_state",
                                     {"kernel": "some_library"}) == number


def test_prometheus_shows_the_epoch(registry):
    before = registry.get_sample_value("layerzero_world_epoch")
    assert before == worlds.current().epoch
    lz.clear_cache()
    assert registry.get_sample_value("layerzero_world_epoch") == before + 1


def test_the_page_prometheus_reads_is_well_formed(registry, x):
    from prometheus_client.parser import text_string_to_metric_families

    lz.rms_norm(x)
    page = prometheus_client.generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert set(families) >= {
        "layerzero_selections", "layerzero_calls", "layerzero_fallbacks", "layerzero_breaker_state",
        "layerzero_selection_seconds", "layerzero_world_epoch"}
    assert all(family.documentation for name, family in families.items()
               if name.startswith("layerzero"))


def test_prometheus_uninstalls_whole_and_installs_again(x):
    registry = prometheus_client.CollectorRegistry()
    uninstall = prometheus.install(registry)
    with pytest.raises(lz.errors.ConfigError, match="already"):
        prometheus.install(registry)
    uninstall()
    uninstall()
    assert list(registry.collect()) == []
    lz.rms_norm(x)
    again = prometheus.install(registry)
    lz.rms_norm(torch.randn(3, 33))
    assert registry.get_sample_value("layerzero_selection_seconds_count", {"op": "rms_norm"}) == 1
    again()


def test_prometheus_may_ask_while_others_call(registry):
    lz.register(kernel("ours.good"))
    tensors = [torch.randn(n, 32) for n in range(1, 17)]
    lz.rms_norm(tensors[0])
    before = calls()["ours.good"]
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                for t in tensors:
                    lz.rms_norm(t)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    seen = [before]
    while any(thread.is_alive() for thread in threads):
        seen.append(registry.get_sample_value("layerzero_calls_total",
                                              {"op": "rms_norm", "kernel": "ours.good"}))
    for thread in threads:
        thread.join()
    assert not failed
    assert seen == sorted(seen)                                     # a counter never goes back
    # 16 kinds of calls: each was chosen for once, whichever thread came first.
    assert registry.get_sample_value("layerzero_selections_total",
                                     {"op": "rms_norm", "kernel": "ours.good"}) == 16


# OpenTelemetry

class Telemetry:
    """The real SDK with everything kept in memory."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self.reader])

    def install(self) -> Any:
        return opentelemetry.install(self.tracer_provider, self.meter_provider)

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        return [point for resource in (data.resource_metrics if data else ())
                for scope in resource.scope_metrics
                for metric in scope.metrics if metric.name == name
                for point in metric.data.data_points]

    def value(self, name: str, **about: str) -> Any:
        wanted = {f"layerzero.{key}": value for key, value in about.items()}
        points = [p for p in self.points(name) if wanted.items() <= dict(p.attributes).items()]
        return points[0].value if points else None


@pytest.fixture
def telemetry():
    telemetry = Telemetry()
    uninstall = telemetry.install()
    yield telemetry
    uninstall()


def test_a_choice_is_a_span_below_the_caller_s(telemetry, x):
    lz.register(kernel("ours.good"))
    tracer = telemetry.tracer_provider.get_tracer("model")
    with tracer.start_as_current_span("forward"):
        lz.rms_norm(x)
        lz.rms_norm(x)
    select, forward = telemetry.spans.get_finished_spans()          # one choice for two calls
    assert select.name == "layerzero.select" and forward.name == "forward"
    assert select.parent.span_id == forward.context.span_id
    attributes = dict(select.attributes)
    plan = lz.explain("rms_norm", x)
    assert {line.partition(":")[0] for line in attributes.pop("layerzero.reasons")} == {
        r.kernel for r in plan.rejected} != set()
    assert attributes == {
        "layerzero.op": "rms_norm", "layerzero.kernel": "ours.good", "layerzero.transforms": (),
        "layerzero.candidates": len(worlds.current().kernels("rms_norm")),
        "layerzero.source": plan.steps[0].score.source, "layerzero.transform_cost_total": 0.0}
    assert select.end_time > select.start_time


def test_a_span_shows_the_transforms(telemetry):
    lz.register(lz.Kernel("ours.packed", RMS_NORM, good, prior=1e9, less_work="a test",
                          requires=(contiguous("x"),)))
    lz.rms_norm(torch.randn(32, 32).t())
    (span,) = telemetry.spans.get_finished_spans()
    assert span.attributes["layerzero.transforms"] == ("contiguous(x)",)
    assert span.attributes["layerzero.transform_cost_total"] > 0


def test_every_call_is_a_span_where_that_is_asked_for(x):
    telemetry = Telemetry()
    lz.register(kernel("ours.broken", broken))
    uninstall = opentelemetry.install(telemetry.tracer_provider, telemetry.meter_provider,
                                      dispatch=True)
    try:
        with telemetry.tracer_provider.get_tracer("model").start_as_current_span("forward"):
            lz.rms_norm(x)
            lz.rms_norm(x)
    finally:
        uninstall()
    lz.rms_norm(x)
    spans = telemetry.spans.get_finished_spans()
    forward = next(s for s in spans if s.name == "forward")
    dispatched = [s for s in spans if s.name == "layerzero.dispatch"]
    # and none after it was uninstalled
    assert len(dispatched) == 2
    assert all(s.parent.span_id == forward.context.span_id for s in dispatched)
    assert all(forward.start_time <= s.start_time <= s.end_time <= forward.end_time
               for s in dispatched)
    about = dict(dispatched[0].attributes)
    assert about["layerzero.chosen"] == "ours.broken" and about["layerzero.kernel"] != "ours.broken"
    assert "hidden=32" in about["layerzero.call"] and about["layerzero.transform_cost_total"] == 0.0


def test_spans_and_a_recording_see_the_same_calls(x):
    telemetry = Telemetry()
    uninstall = opentelemetry.install(telemetry.tracer_provider, telemetry.meter_provider,
                                      dispatch=True)
    with lz.recording() as recorded:
        lz.rms_norm(x)
    lz.rms_norm(x)
    uninstall()
    assert sum(call.count for call in recorded.calls) == 1
    assert [s.name for s in telemetry.spans.get_finished_spans()].count("layerzero.dispatch") == 2


def test_a_step_down_is_an_event_on_the_caller_s_span(telemetry, x):
    lz.register(kernel("ours.broken", broken))
    with telemetry.tracer_provider.get_tracer("model").start_as_current_span("forward"):
        lz.rms_norm(x)
    forward = next(s for s in telemetry.spans.get_finished_spans() if s.name == "forward")
    (event,) = forward.events
    assert event.name == "layerzero.fallback"
    assert event.attributes["layerzero.kernel"] == "ours.broken"
    assert event.attributes["layerzero.code"] == "KERNEL_FAILED"
    assert "this kernel is broken" in event.attributes["layerzero.reason"]
    assert telemetry.value("layerzero.fallbacks", op="rms_norm", kernel="ours.broken",
                           code="KERNEL_FAILED") == 1


def test_opentelemetry_counts_choices_and_calls(telemetry, x):
    lz.register(kernel("ours.good"))
    lz.rms_norm(x)
    before = telemetry.value("layerzero.calls", op="rms_norm", kernel="ours.good") or 0
    for _ in range(4):
        lz.rms_norm(x)
    assert telemetry.value("layerzero.calls", op="rms_norm", kernel="ours.good") == before + 4
    assert telemetry.value("layerzero.selections", op="rms_norm", kernel="ours.good") == 1
    (histogram,) = telemetry.points("layerzero.selection.duration")
    assert histogram.count == 1 and histogram.sum > 0


def test_opentelemetry_counts_changes_of_a_breaker(telemetry, x):
    lz.configure(breaker_threshold=1)
    lz.register(kernel("ours.broken", broken))
    lz.rms_norm(x)
    assert telemetry.value("layerzero.health.changes", kernel="ours.broken", state="open") == 1


def test_opentelemetry_uninstalls_and_installs_again(x):
    telemetry = Telemetry()
    uninstall = telemetry.install()
    with pytest.raises(lz.errors.ConfigError, match="already"):
        telemetry.install()
    uninstall()
    uninstall()
    lz.rms_norm(x)
    assert telemetry.spans.get_finished_spans() == ()
    assert telemetry.points("layerzero.calls") == []
    again = telemetry.install()
    lz.rms_norm(torch.randn(3, 33))
    lz.rms_norm(torch.randn(3, 33))
    assert len(telemetry.spans.get_finished_spans()) == 1
    assert telemetry.points("layerzero.calls")
    again()


def test_two_meters_are_told_apart(x):
    one, two = Telemetry(), Telemetry()
    stops = one.install(), two.install()
    lz.rms_norm(x)
    assert len(one.spans.get_finished_spans()) == len(two.spans.get_finished_spans()) == 1
    stops[0]()
    lz.rms_norm(torch.randn(3, 33))
    assert len(one.spans.get_finished_spans()) == 1 and len(two.spans.get_finished_spans()) == 2
    stops[1]()


def test_without_a_configured_sdk_nothing_happens(x):
    uninstall = opentelemetry.install()
    torch.testing.assert_close(lz.rms_norm(x), RMS_NORM.reference(x))
    uninstall()


# the libraries are optional

@pytest.mark.parametrize(("module", "library"), [
    (prometheus, "prometheus_client"), (opentelemetry, "opentelemetry")],
                         ids=["prometheus", "opentelemetry"])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(module, library, monkeypatch):
    # what an import finds when nothing is installed
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(lz.errors.ConfigError, match=rf"{library}.*install layerzero\[telemetry\]"):
        module.install()
