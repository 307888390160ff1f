"""What happened, as typed data: to whoever subscribed, to the counters, to the log."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from helpers import RMS_NORM, Fake, events_of, register, rows

import layerzero as lz
from layerzero.spec import event as kinds
from layerzero.spec.event import (
    BackendUnavailable,
    Evicted,
    Fallback,
    HealthChanged,
    PolicyRejected,
    Selected,
    WorldPublished,
)
from layerzero.spec.reason import Code, Reason
from layerzero.world import events

pytestmark = pytest.mark.usefixtures("world")
BOOM = Reason(Code.KERNEL_FAILED, None, "boom")


def test_one_call_tells_its_story_in_order(emitted):
    register(Fake("fake.first", fault=RuntimeError("boom")), Fake("fake.second", prior=1e5))
    lz.configure(breaker_threshold=1)
    emitted.clear()
    lz.rms_norm(rows())
    story = [(type(e), e.kernel) for e in emitted if not isinstance(e, WorldPublished)]
    assert story == [(Selected, "fake.first"), (HealthChanged, "fake.first"),
                     (Fallback, "fake.first")]
    selected = events_of(Selected, emitted)[0]
    assert selected.op == "rms_norm" and selected.microseconds > 0
    assert selected.candidates >= 4                        # the two, torch's own and the reference


def test_a_hit_says_nothing(emitted):
    lz.rms_norm(rows())
    emitted.clear()
    for _ in range(100):
        lz.rms_norm(rows())
    assert emitted == []


def test_every_change_of_the_world_has_a_number_and_a_cause(emitted):
    lz.configure(strict_mode=True)
    register(Fake())
    lz.lock("rms_norm", "fake.one")
    lz.unlock()
    lz.unregister("fake.one")
    lz.clear_cache()
    events = events_of(WorldPublished, emitted)
    causes = ["configure", "register", "configure", "unlock", "unregister", "forget"]
    assert [e.cause.partition(":")[0] for e in events] == causes
    assert [e.epoch for e in events] == list(range(events[0].epoch, events[0].epoch + 6))


def test_a_subscriber_is_called_until_it_stops():
    first: list = []
    second: list = []
    stop_first, stop_second = lz.subscribe(first.append), lz.subscribe(second.append)
    events.emit(Evicted("op", entries=1))
    stop_first()
    stop_first()                                           # twice does no harm
    events.emit(Evicted("op", entries=2))
    stop_second()
    events.emit(Evicted("op", entries=3))
    assert [e.entries for e in first] == [1] and [e.entries for e in second] == [1, 2]


def test_a_subscriber_that_fails_is_said_and_the_others_and_the_call_go_on(emitted, caplog):
    events.reset()                             # failures of subscribers are not all said
    def broken(event):
        raise ValueError("cannot write")

    stop = lz.subscribe(broken)
    after: list = []
    stop_after = lz.subscribe(after.append)
    with caplog.at_level(logging.WARNING, "layerzero"):
        lz.rms_norm(rows(), backend="reference.rms_norm")
    stop(), stop_after()
    assert events_of(Selected, emitted) and events_of(Selected, after)
    assert "cannot write" in caplog.text


def test_a_subscriber_may_itself_call_and_configure():
    seen: list = []

    def busy(event):
        if isinstance(event, WorldPublished) and not seen:
            seen.append(event)
            lz.configure(strict_mode=True)
            seen.append(lz.rms_norm(rows()))

    stop = lz.subscribe(busy)
    lz.clear_cache()
    stop()
    assert len(seen) == 2 and lz.get_config()["settings"]["strict_mode"] is True


def test_a_subscriber_that_waits_for_another_thread_does_not_hold_up_the_world():
    done: list = []

    def wait_for_another(event):
        if isinstance(event, WorldPublished) and event.cause == "forget":
            other = threading.Thread(target=lambda: (lz.configure(strict_mode=True),
                                                     done.append(1)))
            other.start()
            other.join(60)

    stop = lz.subscribe(wait_for_another)
    lz.clear_cache()
    stop()
    assert done == [1]


def test_the_counters_count_by_event_op_and_kernel():
    events.reset()
    for _ in range(3):
        events.emit(Fallback("rms_norm", "lib.a", "lib.b", BOOM))
    events.emit(Fallback("attention", "lib.c", "lib.b", BOOM))
    counts = events.counts()
    assert (counts["fallback", "rms_norm", "lib.a"] == 3
            and counts["fallback", "attention", "lib.c"] == 1)
    assert lz.stats().events["fallback"] == 4
    json.dumps(lz.stats().to_json())


def test_no_event_is_lost_among_threads():
    events.reset()
    gate = threading.Barrier(20, timeout=60)

    def work():
        gate.wait()
        for _ in range(200):
            events.emit(Evicted("op", entries=1))

    workers = [threading.Thread(target=work) for _ in range(20)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert events.counts()["evicted", "op", ""] == 4000


LOUD = [Fallback("rms_norm", "lib.a", "lib.b", BOOM), HealthChanged("", "lib.a", "open", BOOM),
        PolicyRejected(error="line 3: no"), BackendUnavailable("rms_norm", "lib.a", BOOM)]
QUIET = [Selected("rms_norm", "lib.a", 3, 10.0), Evicted("rms_norm", entries=3),
         WorldPublished(epoch=3, cause="forget")]


@pytest.mark.parametrize("event", LOUD + QUIET, ids=lambda e: e.name)
def test_a_step_down_is_a_warning_and_the_rest_is_for_debugging(event, caplog):
    with caplog.at_level(logging.DEBUG, "layerzero"):
        events.emit(event)
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if event in LOUD else logging.DEBUG)
    assert (record.getMessage().startswith(event.name)
            and (event.kernel or event.op or "") in record.getMessage())


@pytest.mark.parametrize("event", LOUD + QUIET, ids=lambda e: e.name)
def test_an_event_is_plain_json(event):
    data = json.loads(json.dumps(event.to_json()))
    assert data["event"] == event.name and data["kernel"] == event.kernel
    if getattr(event, "reason", None):
        assert data["reason"]["code"] == event.reason.code.value


def test_every_kind_has_a_name_of_its_own():
    classes = [k for k in vars(kinds).values() if isinstance(k, type)]
    every = [k for k in classes if issubclass(k, kinds.Event) and k is not kinds.Event]
    assert len(every) >= 8 and len({k.name for k in every}) == len(every)


def test_the_error_of_a_kernel_is_logged_with_its_op_its_name_and_its_words(caplog):
    fault = RuntimeError("shared memory exceeded\nand a long trace")
    register(Fake("fake.first", fault=fault), Fake("fake.second", prior=1e5))
    with caplog.at_level(logging.WARNING, "layerzero"):
        lz.rms_norm(rows())
    text = caplog.text
    assert all(part in text for part in (RMS_NORM.name, "fake.first", "fake.second",
                                         "shared memory exceeded"))
    assert "a long trace" not in text                      # one line
