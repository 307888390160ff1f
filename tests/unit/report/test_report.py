"""`lz report`: the numbers on the page are those that were measured; nothing on it can run."""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from pathlib import Path

import pytest
from report_pages import (
    BASELINES,
    HOSTILE,
    RATES,
    ROWS,
    THREE,
    Reader,
    flat,
    measured,
    overview,
    us,
    usages,
)

from layerzero.cli.commands.measure.report import report
from layerzero.operate import inspection
from layerzero.perf.record import Measurement, PerfView, kind_of
from layerzero.plan.call_facts import facts_of
from layerzero.report import gathering, style
from layerzero.report.markup import Markup, element, join
from layerzero.report.overview import (
    CallKind,
    Overview,
    RejectedKernel,
    RejectReason,
    UnmeasuredKind,
    Workload,
    group_by_kind,
)
from layerzero.report.page import headline, render
from layerzero.report.regret import read_regret
from layerzero.spec.call import Call
from layerzero.spec.errors import ConfigError, DataError
from layerzero.spec.reason import Category
from layerzero.tuning import regret
from layerzero.tuning.workload import calls_for
from layerzero.world import snapshot as worlds

# the page

def test_each_cell_of_the_heat_map_has_its_number_and_the_winner_its_star():
    rows = {row[0][0]: [cell for cell in row[1:] if re.search("cell|none", cell[1])]
            for row in Reader(render(overview())).rows if any("cell" in cell[1] for cell in row)}
    assert len(rows) == 3
    small = next(cells for name, cells in rows.items() if "rows=64" in name and "grad" not in name)
    large = next(cells for name, cells in rows.items() if "rows=512" in name)
    # torch.own wins more rows, so it comes first
    assert [text for text, _ in small] == ["2.00", "★ 1.00", "4.50"]
    # a tie, noisy; never measured
    assert [text for text, _ in large] == ["★ 1.00", "= 1.01~", "-"]
    assert [kind for _, kind in small] == ["opt cell h4", "opt cell h0 best", "opt cell h6"]


SECTIONS = ["What was gained", "Where the time goes", "Where it is lost", "Run this next",
            "Over time", "Every kernel timed", "Roofline", "Regret", "Kernels that cannot run here",
            "What the numbers mean"]


def test_the_parts_of_the_page_are_there_and_every_tag_is_closed():
    page = Reader(render(overview(rejected=(RejectedKernel("gpu.only", "linear", (
        RejectReason("PLATFORM_MISMATCH", "runs on cuda, the tensors are on cpu", "use a GPU"),),
                                                           "a note"),),
        hidden=7)))
    for text in ("A machine", "here-2t", "2026-01-02 03:04", "6 measurements of 3 kinds",
                 "1 of 9 operations", "No regret was given", "7 measurements of other",
                 "runs on cuda, the tensors are on cpu", "use a GPU", "a note",
                 "compute 100 GFLOP/s", "memory 10 GB/s"):
        assert text in flat(page.text), text
    assert [t for t in page.texts if t in SECTIONS][-10:] == SECTIONS  # once in the links before
    assert ("first look only" in page.text
            and f"spread 3%, trust {ROWS[0].trust:.2f}, 20 samples" in page.text)
    targets = {value for _, name, value in page.attributes if name == "id"}
    assert {value[1:] for tag, name, value in page.attributes
            if (tag, name) == ("a", "href")} <= targets


def test_the_gain_per_operation_is_a_row_of_its_table():
    rows = [[cell[0] for cell in row] for row in Reader(render(overview())).rows]
    times = [us(n) for n in (150, 100, 50)]
    assert ["linear", *times, "1.50x", "1.00x", "2.00x", "3 of 3"] in rows
    alone = Reader(render(overview([measured("fast.one", 5.0)])))
    assert ["linear", "-", "-", "-", "-", "-", "-", "0 of 1"] in [[cell[0] for cell in row]
                                                                 for row in alone.rows]


def test_the_headline_says_the_gain_and_of_what():
    assert headline(overview()) == (
        "1.50x faster than torch",
        f"{us(100)} instead of {us(150)} for each measured kind of call once")
    untimed = group_by_kind(ROWS[:2], RATES, BASELINES, usages(rows64=(1, "x.x")))
    assert headline(overview(kinds=untimed))[0] == "2.00x faster than torch"   # that of the fastest
    workload = Workload("an app", "--calls a.jsonl")
    rows = measured("torch.own", 5.0), measured("mine.one", 10.0)
    kinds = group_by_kind(rows, RATES, BASELINES, usages(rows64=(3, "mine.one")))
    assert headline(overview(kinds=kinds, workload=workload)) == (
        "2.00x slower than torch", f"{us(30)} instead of {us(15)} for an app")
    assert headline(overview(()))[0] == "Nothing is measured yet"
    partly = headline(overview(THREE))[1]
    assert partly.endswith("each measured kind of call once (2 of 3 kinds)")


def test_the_time_goes_to_the_kinds_in_the_order_of_their_time():
    kinds = group_by_kind(THREE, None, BASELINES, usages(
        rows2=(30, "fast.one"), rows1=(1, ""), rows3=(2, "")))
    page = Reader(render(overview(kinds=kinds, workload=Workload("an app", "--calls a.jsonl"))))
    rows = [[flat(cell[0]) for cell in row] for row in page.rows if row[0][1] == "rank"]
    assert [(row[0], row[2], *row[4:7]) for row in rows[:3]] == [
        ("1", "30", "300 µs", "96%", "2.00x"), ("2", "1", "10 µs", "3%", "8.00x"),
        ("3", "2", "2 µs", "0.6%", "-")]
    assert "Weighted by the 33 calls of an app." in flat(page.text)


def test_what_is_lost_is_listed_with_what_is_not_measured():
    kinds = group_by_kind(ROWS, RATES, BASELINES, usages(rows64=(10, "torch.own")))
    workload = Workload("an app", "--calls a.jsonl", (
        UnmeasuredKind("attention float32 batch=1", 4, "torch.sdpa", 2000.0),),
        (("odd", "why not"),))
    page = Reader(render(overview(kinds=kinds, workload=workload)))
    text = flat(page.text)
    assert "To the choice of kernels: 500 µs" in text
    assert "Unknown: 1 kind of call not measured" in text
    assert "A call of odd cannot be decided: why not" in text
    assert "To the distance from the roof: 800 µs" in text
    rows = [[flat(cell[0]) for cell in row] for row in page.rows]
    assert ["attention float32 batch=1", "4", "torch.sdpa", "2 ms"] in rows


def test_kernels_of_other_hardware_are_folded():
    other = RejectReason("PLATFORM_MISMATCH", "runs on cuda", hardware=True)
    missing = RejectReason("NOT_INSTALLED", "needs package x", command="pip install x")
    gathered = overview(rejected=(
        RejectedKernel("gpu.only", "linear", (missing, other)),
        RejectedKernel("cpu.one", "linear", (missing,))))
    assert [k.kernel for k in gathered.other_hardware] == ["gpu.only"]
    assert [(code, [k.kernel for k in group]) for code, group in gathered.rejected_by_code] == [
        ("NOT_INSTALLED", ["cpu.one"])]
    page = render(gathered)
    assert re.search(r"<details>\s*<summary>1 kernel made for other hardware", page)
    assert re.search(r'<details open="">\s*<summary><b>NOT_INSTALLED</b> 1 kernel<', page)


def test_an_empty_page_says_what_to_do():
    page = Reader(render(overview(())))
    assert page.text.count("Nothing is measured yet: run lz tune") == 5
    assert "svg" not in page.tags


def test_what_a_plugin_says_is_text_and_nothing_else():
    rows = [measured(HOSTILE, 5.0, op=HOSTILE, family=HOSTILE, sizes="", spread=0.9),
            measured("a.b", 6.0, op=HOSTILE,
                                                                                             family=HOSTILE)]
    row = regret.Replayed(Call("linear"), HOSTILE, HOSTILE, "",
                          {HOSTILE: [2.0] * 8, "b.b": [1.0] * 8},
                          failed={"c.c": HOSTILE})
    rejected = RejectedKernel(HOSTILE, HOSTILE, (RejectReason(HOSTILE, HOSTILE, HOSTILE),), HOSTILE)
    page = Reader(render(overview(
        rows, rejected=(rejected,), facts={HOSTILE: HOSTILE}, measured_at=HOSTILE,
        regret=_written(regret.RegretReport(
            (row,), (regret.NotReplayed(Call("linear"), HOSTILE),), HOSTILE)))))
    assert page.text.count(HOSTILE) > 15
    _harmless(page)


def _harmless(page):
    assert not {"script", "img", "iframe", "object", "embed", "base", "form", "image",
                "use"} & {*page.tags}
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("href", "src"):
            assert value.startswith("#") or value == "data:,"
        if name == "style":
            assert re.fullmatch(r"width:[\d.]+%", value)


def test_the_page_may_load_nothing():
    page = render(overview())
    reader = Reader(page)
    _harmless(reader)
    assert ("url(" not in page and "@import" not in page and "http:" not in page
            and "https:" not in page)
    policy = next(value for _, name, value in reader.attributes if name == "content")
    assert policy.startswith("default-src 'none'; ")


def test_text_is_escaped_and_markup_is_not_escaped_twice():
    made = element("p", "<b>", element("b", "x & y"), 3, class_="a\"b")
    assert made == '<p class="a&quot;b">&lt;b&gt;<b>x &amp; y</b>3</p>'
    assert join("<", Markup("<br>")) == "&lt;<br>"


def test_without_jinja2_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"pip install 'layerzero\[cli\]'"):
        render(overview())


# colours

def _luminance(colour):
    channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_background(scheme):
    colours = style.COLOURS[scheme]
    for back, text in style.HEAT[scheme]:
        assert contrast(back, text) >= 4.5, (back, text)
    for back in (colours["page"], colours["card"]):
        for name in ("text", "muted", "accent", "warn"):
            assert contrast(back, colours[name]) >= 4.5, name
    for name in ("bar", "other"):              # shapes
        assert contrast(colours["page"], colours[name]) >= 3.0, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_steps_of_the_heat_map_differ_in_lightness_so_that_they_read_without_colour(scheme):
    luminances = [_luminance(back) for back, _ in style.HEAT[scheme]]
    assert len(luminances) == len(style.STEPS) + 1
    assert luminances == sorted(luminances, reverse=scheme == "dark")
    assert all(contrast(a[0], b[0]) > 1.05
               for a, b in zip(style.HEAT[scheme], style.HEAT[scheme][1:]))


@pytest.mark.parametrize(("ratio", "step"), [(1.0, 0), (1.02, 0), (1.03, 1), (1.5, 3), (2.01, 5),
                                             (4.0, 5), (99.0, 6)])
def test_the_step_of_a_ratio(ratio, step):
    assert style.heat_step(ratio) == step


# regret

def replayed(chosen, us, count=1):
    rounds = {name: [value * (1 + 0.001 * i) for i in range(20)] for name, value in us.items()}
    return regret.Replayed(Call("linear", count=count), f"linear {chosen}", chosen, "torch.own",
                           rounds)


def _written(page):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "regret.json"
        path.write_text(json.dumps(page.to_json()))
        return read_regret(path)


def test_what_lz_regret_writes_is_shown():
    report = regret.RegretReport((replayed("torch.own", {"torch.own": 10.0, "fast.one": 5.0},
                                           count=3),
                                  replayed("fast.one", {"torch.own": 10.0, "fast.one": 5.0})),
                                 place="here-2t")
    read = _written(report)
    assert [row.regret for row in read.calls] == pytest.approx([1.0, 0.0])
    assert (read.median, read.p95) == (report.regret(0.5), report.regret(0.95))
    assert (read.flips, read.gain, read.lost) == (0, report.gain(), report.lost)
    page = Reader(render(overview(regret=read)))
    cells = [[cell[0] for cell in row] for row in page.rows
             if row[0][0] in ("linear torch.own", "linear fast.one")]
    us = "\N{NO-BREAK SPACE}µs"
    assert cells[0][:6] == ["linear torch.own", "100.0%", f"torch.own10.1{us}", f"fast.one5.05{us}",
                            "1.00x", "3"]
    assert cells[1][3:] == ["the same", "2.00x", "1", "no"]
    assert "another place" not in page.text
    assert "It was measured at another place, here-2t" in Reader(
        render(Overview("m", "there", "now", regret=read))).text


def test_a_replay_of_nothing_is_no_success():
    nothing = regret.RegretReport((), (regret.NotReplayed(Call("moe"), "too large"),))
    page = Reader(render(overview(regret=_written(nothing))))
    assert "No call could be replayed" in page.text and "too large" in page.text


@pytest.mark.parametrize("text", [
    "", "[]", "3", "{}", '{"rows": []}', "\N{SNOWMAN}", '{"rows": [{}]}', "[" * 100_000,
    json.dumps({**regret.RegretReport(()).to_json(), "median_regret": math.nan}),
    json.dumps({**regret.RegretReport(()).to_json(), "lost": "much"}),
    json.dumps({**regret.RegretReport(()).to_json(), "rows": [None]})])
def test_a_file_of_something_else_is_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text, "utf-8")
    with pytest.raises(DataError, match=r"other\.json: wanted what lz regret --json prints"):
        read_regret(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"none\.json"):
        read_regret(tmp_path / "none.json")


# the command

@pytest.fixture
def known(world):
    """A world in which two kernels of rms_norm were measured here, and one elsewhere."""
    def row(kernel, us, place):
        return Measurement(kernel, "rms_norm", "float32 rows=64 hidden=64", place, us, samples=9,
                           family="float32", sizes="rows=64 hidden=64", flops=1e6, bytes=1e5,
                           at=1.7e9)

    place = worlds.current().place("cpu")
    rows = [row("reference.rms_norm", 90.0, place), row("torch.rms_norm", 30.0, place),
            row("torch.rms_norm", 5.0, "another-machine")]
    worlds.publish(lambda w: w.replace(perf=PerfView(rows, {place: RATES})), "measured")


def test_the_page_holds_what_was_measured_on_this_device(known, tmp_path, capsys):
    report(tmp_path / "page.html", None, "cpu")
    page = Reader((tmp_path / "page.html").read_text("utf-8"))
    gathered = gathering.gather("cpu")
    assert isinstance(gathered.kinds[0], CallKind) and len(gathered.kinds) == 1
    assert (gathered.kinds[0].fastest.kernel, gathered.kinds[0].fastest.us,
            gathered.hidden) == ("torch.rms_norm", 30.0, 1)
    assert [c.baseline for c in gathered.kinds[0].candidates] == [
        worlds.current().catalog.by_id[i].baseline
        for i in ("torch.rms_norm", "reference.rms_norm")]
    assert "★ torch.rms_norm" in page.text and "2023-11-1" in page.text
    assert "2 measurements of 1 kind of call" in capsys.readouterr().out


def test_every_kernel_that_cannot_run_here_is_on_the_page_with_its_reason(world, tmp_path):
    report(tmp_path / "page.html", None, "cpu")
    text = Reader((tmp_path / "page.html").read_text("utf-8")).text
    refused = [row for row in inspection.list_kernels(None, "cpu") if row.reasons]
    assert refused
    for row in refused:
        assert row.id in text and all(reason.message in text for reason in row.reasons)
        if not any(reason.code.category is Category.HARDWARE for reason in row.reasons):
            assert all(reason.code.advice in text for reason in row.reasons)


def test_nothing_measured_is_said_and_is_no_error(world, tmp_path, capsys):
    worlds.publish(lambda w: w.replace(perf=PerfView()), "measured")
    report(tmp_path / "page.html", None, "cpu")
    assert "next: lz tune" in capsys.readouterr().out
    assert "Nothing is measured yet" in (tmp_path / "page.html").read_text("utf-8")


def test_a_page_that_cannot_be_written_is_one_message(world, tmp_path):
    with pytest.raises(ConfigError, match="cannot write the page"):
        report(tmp_path, None, "cpu")


def test_a_note_that_is_no_proper_text_does_not_stop_the_page(world, tmp_path, monkeypatch,
                                                                 capsys):
    rejected = RejectedKernel("a.b", "linear", (RejectReason("X", "half \ud800 pair"),))
    monkeypatch.setattr(gathering, "_rejected_kernels", lambda device: [rejected])
    report(tmp_path / "page.html", None, "cpu")
    assert "half &#55296; pair" in (tmp_path / "page.html").read_text("utf-8")
    capsys.readouterr()
    report(Path("-"), None, "cpu")             # the page and nothing else
    out = capsys.readouterr().out
    assert "half &#55296; pair" in out
    assert out.startswith("<!") and out.rstrip().endswith("</html>")


def test_a_workload_weighs_what_was_measured_and_says_what_is_chosen(world, tmp_path, capsys):
    """Two of its kinds are measured: the other ones are unknown and the page says so."""
    calls = calls_for("smollm2-135m", dtype="float32", prompt=8, context=16)
    chosen = [call for call in calls if call.op in ("rms_norm", "mlp")][:2]
    place, rows = worlds.current().place("cpu"), []
    for call in chosen:
        op, facts = facts_of(call, worlds.current(), "cpu")
        kind = kind_of(op, facts)
        rows += [Measurement(name, op.name, kind.bucket, place, us, 0.01, 20, kind.family,
                             kind.sizes_text, 1e6, 1e5, at=1.7e9)
                 for name, us in ((f"torch.{op.name}", 60.0), (f"reference.{op.name}", 240.0))]
    worlds.publish(lambda w: w.replace(perf=PerfView(rows, {place: RATES})), "measured")
    page = gathering.gather("cpu", source=gathering.Source("a model", "--model m", calls))
    assert {kind.op: kind.calls for kind in page.total.kinds} == {c.op: c.count for c in chosen}
    assert page.total.us == sum(60.0 * call.count for call in chosen)
    for kind in page.total.kinds:
        assert kind.used.kernel == kind.usage.chosen == f"torch.{kind.op}"
    assert len(page.workload.unmeasured) == len(calls) - 2
    report(tmp_path / "page.html", None, "cpu", model="smollm2-135m", prompt=8, context=16)
    assert "next: lz tune --model smollm2-135m --dtype" in capsys.readouterr().out


def test_two_workloads_are_one_too_many(world, tmp_path):
    (tmp_path / "calls.jsonl").write_text("")
    with pytest.raises(ConfigError, match="give one of --calls and --model"):
        report(None, None, "cpu", tmp_path / "calls.jsonl", "smollm2-135m")
    with pytest.raises(ConfigError, match="is no file"):
        report(None, None, "cpu", tmp_path / "none.jsonl")
