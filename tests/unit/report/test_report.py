"""`lz report`: the numbers on the page are those that were measured, and nothing on it can reach
out or run.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from layerzero.cli.commands.report import gather, report
from layerzero.operate import inspection
from layerzero.perf.record import Measurement, PerfView, Rates
from layerzero.report import roofline, style
from layerzero.report.formats import format_ratio, format_time
from layerzero.report.markup import Markup, element, join
from layerzero.report.overview import (
    CallKind,
    Overview,
    RejectedKernel,
    RejectReason,
    group_by_kind,
    read_regret,
    summarize_gain,
)
from layerzero.report.page import render
from layerzero.spec.call import Call
from layerzero.spec.errors import ConfigError, DataError
from layerzero.tuning import regret
from layerzero.world import snapshot as worlds

HOSTILE = ("x\"'><script>window.injected=1</script><img src=http://evil.example/a.png "
           "onerror=alert(1)>")
RATES = Rates(flops_per_us=100_000.0, bytes_per_us=10_000.0)


def measured(kernel, us, op="linear", family="float32", rows=64, **more):
    sizes = f"rows={rows} hidden=1024"
    return Measurement(kernel, op, f"{family} {sizes}", "here-2t", us, family=family, **{
        "spread": 0.03, "samples": 20, "sizes": sizes, "flops": 2e6, "bytes": 1e5, **more})


ROWS = (measured("fast.one", 50.0), measured("torch.own", 100.0),
        measured("slow.one", 225.0, samples=1, spread=0.0),
        measured("torch.own", 40.0, rows=512), measured("fast.one", 40.4, rows=512, spread=0.6),
        measured("torch.own", 10.0, family="float32 grad"))
BASELINES = frozenset({"torch.own"})


def overview(rows=ROWS, rates=RATES, **more):
    return Overview("A machine", "here-2t", "2026-01-02 03:04", rates=rates, ops=9,
                    kinds=group_by_kind(rows, rates, BASELINES), **more)


class Reader(HTMLParser):
    """The page as tags, attributes and text; complains about what is not closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.rows, self.texts = [], [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(["", dict(attrs).get("class") or ""])
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.texts.append(data)
        if any(tag in ("td", "th") for tag in self.open):
            self.rows[-1][-1][0] += data

    @property
    def text(self):
        return "".join(self.texts)


# the numbers

def test_winner_tie_gain_and_roofline_of_a_kind():
    grad, small, large = group_by_kind(reversed(ROWS), RATES,
                                       BASELINES)[2], *group_by_kind(ROWS, RATES, BASELINES)[:2]
    assert [c.kernel for c in small.candidates] == ["fast.one", "torch.own", "slow.one"]
    assert (small.winner.kernel, small.tied, small.gain) == ("fast.one", (), 2.0)
    # 2e6 FLOP at 1e5 a microsecond
    assert small.roofline == pytest.approx(20.0 / 50.0)
    assert small.ratio("slow.one") == 4.5 and small.ratio("nobody") is None
    assert large.winner.kernel == "torch.own" and large.gain == 1.0
    assert [c.kernel for c in large.tied] == ["fast.one"]              # 1 % slower: no difference
    # the contract counts the way forward only
    assert grad.roofline is None and grad.family == "float32 grad"


def test_kinds_are_in_the_order_of_their_sizes_and_not_of_their_letters():
    rows = [measured("k.k", 1.0, rows=n) for n in (1024, 8, 64)]
    assert [k.sizes.split()[0] for k in group_by_kind(rows, None, frozenset())] == [
        "rows=8", "rows=64", "rows=1024"]


def test_the_summarize_gain_an_op_is_the_geometric_mean_of_what_could_be_compared():
    rows = [measured("torch.own", 80.0, rows=1), measured("fast.one", 10.0, rows=1),
            measured("fast.one", 1.0, rows=3),
            measured("torch.own", 20.0, rows=2), measured("fast.one", 10.0, rows=2)]
    gain = summarize_gain(group_by_kind(rows, None, BASELINES))
    assert (gain.low, gain.high, gain.kinds) == (2.0, 8.0, 2)
    assert gain.mean == pytest.approx(4.0)
    assert summarize_gain(group_by_kind(rows[2:3], None, BASELINES)) is None


def test_without_measured_rates_there_is_no_percentage():
    page = Reader(render(overview(rates=None)))
    assert all(kind.roofline is None for kind in group_by_kind(ROWS, None, BASELINES))
    assert "The ceilings of this device are not measured" in page.text


@pytest.mark.parametrize(("us", "text"), [(0.5, "0.5 µs"), (12.34, "12.3 µs"), (1234.0, "1.23 ms"),
                                          (2.5e6, "2.5 s")])
def test_times_are_written_in_a_unit_that_fits(us, text):
    assert format_time(us).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(("value", "text"), [(1.0, "1.00x"), (12.34, "12.3x"), (1234.5, "1234x")])
def test_ratios_are_written_with_as_many_digits_as_say_something(value, text):
    assert format_ratio(value) == text


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
    assert [kind for _, kind in small] == ["cell h4", "cell h0 best", "cell h6"]


def test_the_parts_of_the_page_are_there_and_every_tag_is_closed():
    page = Reader(render(overview(rejected=(RejectedKernel("gpu.only", "linear", (
        RejectReason("PLATFORM_MISMATCH", "runs on cuda, the tensors are on cpu", "use a GPU"),),
                                                           "a note"),),
        hidden=7)))
    for text in ("A machine", "here-2t", "2026-01-02 03:04", "6measurements", "1 of 9operations",
                 "No regret was given", "7 measurements of other",
                 "runs on cuda, the tensors are on cpu", "use a GPU", "a note",
                 "compute 100 GFLOP/s", "memory 10 GB/s"):
        assert text in page.text, text
    assert page.tags.count("h2") == 5
    assert ("first look only" in page.text
            and f"spread 3%, trust {ROWS[0].trust:.2f}, 20 samples" in page.text)
    targets = {value for _, name, value in page.attributes if name == "id"}
    assert {value[1:] for tag, name, value in page.attributes
            if (tag, name) == ("a", "href")} <= targets


def test_the_gain_per_operation_is_a_row_of_its_table():
    rows = [[cell[0] for cell in row] for row in Reader(render(overview())).rows]
    assert ["linear", "1.26x", "1.00x", "2.00x", "3 of 3 kinds",
            "torch.own (2), fast.one (1)"] in rows
    alone = Reader(render(overview([measured("fast.one", 5.0)])))
    assert ["linear", "-", "-", "-", "0 of 1 kind", "fast.one (1)"] in [[cell[0] for cell in row]
                                                                        for row in alone.rows]


def test_an_empty_page_says_what_to_do():
    page = Reader(render(overview(())))
    assert page.text.count("Nothing is measured yet: run lz tune") == 3
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
    found = [_luminance(back) for back, _ in style.HEAT[scheme]]
    assert len(found) == len(style.STEPS) + 1
    assert found == sorted(found, reverse=scheme == "dark")
    assert all(contrast(a[0], b[0]) > 1.05
               for a, b in zip(style.HEAT[scheme], style.HEAT[scheme][1:]))


@pytest.mark.parametrize(("ratio", "step"), [(1.0, 0), (1.02, 0), (1.03, 1), (1.5, 3), (2.01, 5),
                                             (4.0, 5), (99.0, 6)])
def test_the_step_of_a_ratio(ratio, step):
    assert style.heat_step(ratio) == step


# the roofline

def _points(svg):
    return [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.-]+)" cy="([\d.-]+)"',
                                                        svg)]


def test_a_winner_at_the_roof_lies_on_the_line():
    # 1e4 FLOP a byte: compute bound
    at_peak = measured("k.k", 1000.0, rows=1, flops=1e8, bytes=1e4)
    # 0.01 FLOP a byte: memory bound
    at_band = measured("k.k", 100.0, rows=2, flops=1e4, bytes=1e6)
    kinds = group_by_kind((at_peak, at_band), RATES, frozenset())
    assert [kind.roofline for kind in kinds] == [1.0, 1.0]
    svg = roofline.plot(kinds, RATES, {"linear": "A"})
    line = [tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', svg)[1].split()]
    (right, peak), (left, low) = _points(svg)
    assert [peak, peak] == pytest.approx([line[1][1], line[2][1]], abs=0.2)
    share = (left - line[0][0]) / (line[1][0] - line[0][0])
    assert (0 <= share <= 1 and low == pytest.approx(line[0][1] + share * (line[1][1] - line[0][1]),
                                                     abs=0.3))
    assert right > line[1][0]


@pytest.mark.parametrize(("flops", "moved", "us", "rates"), [
    (1.0, 1.0, 1e-6, Rates(1e-3, 1e6)), (1e18, 1.0, 1e9, Rates(1e12, 1e-3)),
    (1.0, 1e15, 1e12, RATES), (2e6, 1e5, 50.0, RATES)])
def test_every_point_and_the_roof_are_inside_the_picture(flops, moved, us, rates):
    kinds = group_by_kind([measured("k.k", us, flops=flops, bytes=moved)], rates, frozenset())
    svg = roofline.plot(kinds, rates, {"linear": "A"})
    corners = re.search(r'points="([^"]+)"', svg)[1].split()
    for x, y in (*_points(svg), *(map(float, corner.split(",")) for corner in corners)):
        assert roofline.LEFT - 0.1 <= x <= roofline.WIDTH - roofline.RIGHT + 0.1
        assert roofline.TOP - 0.1 <= y <= roofline.HEIGHT - roofline.BOTTOM + 0.1
    assert not re.search(r"\b(nan|inf)\b", svg)


def test_the_plot_leaves_out_what_has_no_place_in_it_and_says_so():
    rows = [*ROWS, measured("k.k", 5.0, op="embedding", flops=0.0)]
    page = Reader(render(overview(rows)))
    assert page.tags.count("circle") == 2
    assert "Not shown: 2 kinds of call" in page.text
    titles = [t for t in page.texts if "FLOP per byte," in t]
    assert (len(titles) == 2
            and "fast.one, 40 GFLOP/s, 20 FLOP per byte, 40% of the roofline" in titles[0])


# regret

def replayed(chosen, us, count=1):
    rounds = {name: [value * (1 + 0.001 * i) for i in range(20)] for name, value in us.items()}
    return regret.Replayed(Call("linear", count=count), f"linear {chosen}", chosen, "torch.own",
                           rounds)


def _written(found):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "regret.json"
        path.write_text(json.dumps(found.to_json()))
        return read_regret(path)


def test_what_lz_regret_writes_is_shown():
    found = regret.RegretReport((replayed("torch.own", {"torch.own": 10.0, "fast.one": 5.0},
                                          count=3),
                                 replayed("fast.one", {"torch.own": 10.0, "fast.one": 5.0})),
                                place="here-2t")
    read = _written(found)
    assert [row.regret for row in read.calls] == pytest.approx([1.0, 0.0])
    assert (read.median, read.p95) == (found.regret(0.5), found.regret(0.95))
    assert (read.flips, read.gain, read.lost) == (0, found.gain(), found.lost)
    page = Reader(render(overview(regret=read)))
    cells = [[cell[0] for cell in row] for row in page.rows if row[0][0].startswith("linear ")]
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
    found = gather("cpu")
    assert isinstance(found.kinds[0], CallKind) and len(found.kinds) == 1
    assert (found.kinds[0].winner.kernel, found.kinds[0].winner.us,
            found.hidden) == ("torch.rms_norm", 30.0, 1)
    assert [c.baseline for c in found.kinds[0].candidates] == [
        worlds.current().catalog.by_id[i].baseline
        for i in ("torch.rms_norm", "reference.rms_norm")]
    assert "★ torch.rms_norm" in page.text and "2023-11-1" in page.text
    assert "2 measurements of 1 kinds of call" in capsys.readouterr().out


def test_every_kernel_that_cannot_run_here_is_on_the_page_with_its_reason(world, tmp_path):
    report(tmp_path / "page.html", None, "cpu")
    text = Reader((tmp_path / "page.html").read_text("utf-8")).text
    refused = [row for row in inspection.list_kernels(None, "cpu") if row.reasons]
    assert refused
    for row in refused:
        assert row.id in text and all(reason.message in text for reason in row.reasons)
        assert all(reason.code.advice in text for reason in row.reasons)


def test_nothing_measured_is_said_and_is_no_error(world, tmp_path, capsys):
    worlds.publish(lambda w: w.replace(perf=PerfView()), "measured")
    report(tmp_path / "page.html", None, "cpu")
    assert "run lz tune" in capsys.readouterr().out
    assert "Nothing is measured yet" in (tmp_path / "page.html").read_text("utf-8")


def test_a_page_that_cannot_be_written_is_one_message(world, tmp_path):
    with pytest.raises(ConfigError, match="does not exist; make it first"):
        report(tmp_path / "nowhere" / "page.html", None, "cpu")
    with pytest.raises(ConfigError, match="cannot write the page"):
        report(tmp_path, None, "cpu")


def test_a_note_that_is_no_proper_text_does_not_stop_the_page(world, tmp_path, monkeypatch):
    from layerzero.cli.commands import report as command
    rejected = RejectedKernel("a.b", "linear", (RejectReason("X", "half \ud800 pair"),))
    monkeypatch.setattr(command, "_rejected_kernels", lambda device: [rejected])
    report(tmp_path / "page.html", None, "cpu")
    assert "half &#55296; pair" in (tmp_path / "page.html").read_text("utf-8")
