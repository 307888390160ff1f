"""Reports over time: what is kept as JSON, the changes since, and the chart of the store."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from report_pages import BASELINES, RATES, ROWS, Reader, flat, overview, usages

from layerzero.cli.commands.measure.report import report
from layerzero.perf.record import Measurement
from layerzero.report import gathering, timeline
from layerzero.report.history import SESSION_GAP, Point, Reference, Timed, times_of, trace
from layerzero.report.overview import group_by_kind
from layerzero.report.page import render
from layerzero.report.saved import SavedKind, SavedReport, compare, read_report
from layerzero.spec.errors import DataError
from layerzero.world import measurements, perf_loading
from layerzero.world import snapshot as worlds

DAY = 86400.0
LINEAR, NORM = ("linear", "a"), ("rms_norm", "b")
TODAY = {LINEAR: Reference(10, 4.0, 8.0), NORM: Reference(1, 5.0, 20.0)}


def saved(*kinds, at=1.7e9, **more):
    return SavedReport("A machine", "here-2t", "2026-01-01 00:00 UTC", at, "", kinds, **more)


def kind(name, us, calls=1, spread=0.02, **more):
    return SavedKind("linear", name, f"linear {name}", more.pop("kernel", "k.k"), us, spread, calls,
                     **more)


# what is kept

def test_a_report_is_read_back_as_it_was_written(tmp_path):
    path, page = tmp_path / "before.json", replace(overview(), at=1.7e9).saved
    path.write_text(json.dumps({**page.to_json(), "summary": {"gain": 1.5}}))
    assert read_report(path) == page
    assert [k.kernel for k in page.kinds] == ["fast.one", "torch.own", "torch.own"]
    assert [k.torch_us for k in page.kinds] == [100.0, 40.0, 10.0]


@pytest.mark.parametrize(("change", "word"), [
    ({"schema": "other"}, "wanted schema layerzero-report-1"),
    ({"kinds": 3}, "kinds: wanted a list"), ({"kinds": [{"op": "x"}]}, "missing"),
    ({"at": -1}, "at: wanted seconds since 1970"),
    ({"kinds": [{**kind("a", 1.0).to_json(), "us": 0}]}, r"us: wanted microseconds")])
def test_a_file_that_is_no_report_is_refused_by_name(tmp_path, change, word):
    path = tmp_path / "before.json"
    path.write_text(json.dumps({**saved(kind("a", 1.0)).to_json(), **change}))
    wanted = r"before\.json: wanted what lz report --json prints"
    with pytest.raises(DataError, match=f"{wanted}.*{word}"):
        read_report(path)


# what changed

def test_a_change_is_one_only_beyond_the_spread_of_both():
    before = saved(kind("a", 10.0), kind("b", 10.0), kind("c", 10.0, spread=0.5), kind("d", 10.0),
                   kind("gone", 1.0))
    after = saved(kind("a", 5.0, calls=7), kind("b", 20.0), kind("c", 12.0, spread=0.5),
                  kind("d", 10.1, spread=0.0), kind("new", 1.0))
    comparison = compare(before, after)
    verdicts = {c.kind.bucket: c.verdict for c in comparison.changes}
    assert verdicts == {"a": "faster", "b": "slower", "c": "same", "d": "same", "gone": "gone",
                        "new": "new"}
    assert [c.kind.bucket for c in comparison.changes[:2]] == ["a", "b"]    # the most time first
    assert (comparison.before_us, comparison.after_us) == (100.0, 35.0 + 20.0 + 12.0 + 10.1)
    assert comparison.changes[0].gain == 2.0 and comparison.changes[0].saved_us == 35.0


def test_the_changes_are_a_part_of_the_page():
    now = replace(overview(kinds=group_by_kind(ROWS, RATES, BASELINES, usages(
        rows64=(10, "fast.one"), rows512=(1, "")))), at=1.8e9)
    old = [replace(k, us=k.us * 3, kernel="old.one") if "rows=64" in k.bucket else k
           for k in now.saved.kinds]
    page = Reader(render(replace(now, against=compare(saved(*old), now.saved))))
    text = flat(page.text)
    assert "Compared with the report of 2026-01-01 00:00 UTC" in text
    assert "540 µs now, 1.54 ms then, for the 2 kinds" in text
    assert "1 faster 0 slower 1 same 0 new 0 gone" in text
    row = next([flat(cell[0]) for cell in row] for row in page.rows if "old.one" in row[0][0])
    assert row[0].endswith("fast.one instead of old.one")
    assert row[1:] == ["faster", "150 µs", "50 µs", "3.00x", "1 ms"]
    elsewhere = saved(*old, torch="2.9")
    other = render(replace(now, against=compare(replace(elsewhere, place="there"), now.saved)))
    assert "It was made at another place: A machine, torch 2.9." in flat(Reader(other).text)


# over time

def test_a_point_is_what_was_known_at_its_date():
    times = [Timed(1 * DAY, LINEAR, "torch.own", 9.0, True, "2.8"),
             Timed(1 * DAY + 60, LINEAR, "fast.one", 6.0, False, "2.8"),
             Timed(9 * DAY, LINEAR, "fast.one", 4.0, False, "2.9"),    # a newer build
             Timed(9 * DAY, NORM, "fast.norm", 5.0, False, "2.9"),
             Timed(9 * DAY, ("softmax", "c"), "x.x", 1.0, False)]      # not in the workload
    assert trace(times, TODAY) == (
        Point(1 * DAY + 60, 10 * 6.0 + 20.0, 10 * 9.0 + 20.0, "2.8"),  # the norm ran torch's own
        Point(9 * DAY, 10 * 4.0 + 5.0, 10 * 8.0 + 20.0, "2.9"))        # today
    assert trace((), TODAY) == ()


def test_measurements_close_together_are_one_session():
    times = [Timed(i * SESSION_GAP, LINEAR, "k.k", 5.0, False) for i in (1, 1.5, 2.4, 9)]
    assert [p.at / SESSION_GAP for p in trace(times, TODAY)] == pytest.approx([2.4, 9])


def test_an_earlier_report_adds_the_times_that_were_replaced_since():
    old = saved(kind("a", 6.0, torch_kernel="torch.own", torch_us=9.0),
                kind("b", 5.0, kernel="torch.own", torch_kernel="torch.own", torch_us=5.0),
                kind("c", 1.0, mode="captured"), at=DAY, torch="2.8")
    assert list(times_of(old, "eager")) == [
        Timed(DAY, ("linear", "a"), "k.k", 6.0, False, "2.8"),
        Timed(DAY, ("linear", "a"), "torch.own", 9.0, True, "2.8"),
        Timed(DAY, ("linear", "b"), "torch.own", 5.0, True, "2.8")]


@pytest.mark.parametrize("days", [(0.1, 0.2), (1, 2, 3, 4, 5, 6, 7, 8), (1, 1.1, 400)])
@pytest.mark.parametrize("scale", [1e-2, 3.7, 1e9])
def test_every_date_is_inside_the_chart_and_its_labels_are_apart(days, scale):
    points = [Point(1.7e9 + day * DAY, scale * (1 + i % 3), scale * 3, f"2.{i}")
              for i, day in enumerate(days)]
    svg = timeline.plot(points)
    dots = re.findall(r'cx="([\d.-]+)" cy="([\d.-]+)"', svg)
    assert len(dots) == 2 * len(points)
    for x, y in dots:
        assert timeline.LEFT <= float(x) <= timeline.WIDTH - timeline.RIGHT
        assert timeline.TOP - 0.1 <= float(y) <= timeline.HEIGHT - timeline.BOTTOM + 0.1
    ends = [float(y) for y in re.findall(r'class="end \w+" x="\d+" y="([\d.]+)"', svg)]
    assert len(ends) == 2 and abs(ends[0] - ends[1]) >= 14
    assert not re.search(r"\b(nan|inf)\b", svg)


def test_one_session_is_no_chart_and_two_are():
    points = tuple(Point(1.7e9 + day * DAY, 50.0, 100.0) for day in (0, 3))
    assert "svg" not in Reader(render(replace(overview(rates=None), history=points[:1]))).tags
    page = Reader(render(replace(overview(rates=None), history=points)))
    assert page.tags.count("svg") == 1 and "lz 50" in page.text


# the command and the store

@pytest.fixture
def stored(world):
    """Three sessions of rms_norm in the store: another build, another place, and today."""
    place = worlds.current().place("cpu")
    device = worlds.current().device("cpu").to_json()
    kinds = {"torch.rms_norm": 30.0, "native.rms_norm": 20.0}

    def rows(where, at, factor, build):
        return [Measurement(kernel, "rms_norm", "float32 rows=64 hidden=64", where, us * factor,
                            0.02, 20, "float32", "rows=64 hidden=64", 1e6, 1e5, build=build, at=at)
                for kernel, us in kinds.items()]

    now = worlds.current()
    with measurements.store() as store:
        older = {"device": {**device, "torch_version": "2.0"}}
        store.put(rows("0123456789abcdef-" + place.rpartition("-")[2], 1.70e9, 4.0, "old"), older)
        store.put(rows(place, 1.71e9, 2.0, "old"), {"device": device})
        store.put(rows("another-1t", 1.72e9, 9.0, "x"), {"device": {**device, "name": "other"}})
    today = rows(place, 1.73e9, 1.0, "")
    worlds.publish(lambda w: w.replace(perf=w.perf.including(today, {place: RATES})), "measured")
    yield
    worlds.publish(lambda w: w.replace(perf=now.perf), "measured")


def test_the_chart_is_made_of_the_store(stored):
    history = gathering.gather("cpu").history
    assert [(p.at, p.us, p.torch_us) for p in history] == [
        (1.70e9, 80.0, 120.0), (1.71e9, 40.0, 60.0), (1.73e9, 20.0, 30.0)]
    assert history[0].torch == "2.0" and history[-1].torch != "2.0"


def test_what_the_command_prints_is_what_against_reads(stored, tmp_path, capsys):
    before = tmp_path / "before.json"
    report(None, None, "cpu", as_json=True)
    printed = capsys.readouterr().out
    before.write_text(printed)
    summary = json.loads(printed)["summary"]
    assert (summary["us"], summary["torch_us"], summary["gain"]) == (20.0, 30.0, 1.5)
    assert len(summary["history"]) == 3 and summary["next"][0]["command"].startswith("lz ")
    report(tmp_path / "page.html", None, "cpu", against=[before], as_json=True)
    again = json.loads(capsys.readouterr().out)
    assert again["summary"]["against"] == {
        "created_at": json.loads(printed)["created_at"], "gain": 1.0, "faster": 0, "slower": 0,
        "same": 1, "new": 0, "gone": 0}
    assert "Since the last report" in (tmp_path / "page.html").read_text("utf-8")


def test_a_store_that_cannot_be_read_costs_the_chart_only(stored):
    target = perf_loading.location(worlds.current().policy)
    target.write_bytes(b"no database at all" * 100)
    page = gathering.gather("cpu")
    assert page.total.us == 20.0 and [p.at for p in page.history] == [1.73e9]
