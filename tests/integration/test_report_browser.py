"""The report in a real Chromium: it fits a phone, follows light and dark, and asks nobody anything.

Skipped where there is no Chromium: install the package `chromium`, or name the program in the
variable CHROMIUM. The pictures are kept in the test's folder (pytest --basetemp).
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

from layerzero.perf.record import Measurement, Rates
from layerzero.report import style
from layerzero.report.gathering import gather
from layerzero.report.history import Point
from layerzero.report.overview import (
    Overview,
    RejectedKernel,
    RejectReason,
    UnmeasuredKind,
    Usage,
    Workload,
    group_by_kind,
)
from layerzero.report.page import render
from layerzero.report.regret import read_regret
from layerzero.report.saved import compare
from layerzero.spec.call import Call
from layerzero.tuning import regret

HOSTILE = ("<script>injected=1;console.error('ran')</script>"
           "<img src=http://127.0.0.1:9/a.png onerror=window.injected=1>")
LONG = "library.a_kernel_with_a_name_that_goes_on_and_on_" + "x" * 90
PHONE, DESK = 400, 1280
VIEWS = (("full", PHONE, "light"), ("full", DESK, "light"), ("full", DESK, "dark"),
         ("empty", PHONE, "dark"), ("bad", PHONE, "light"))
DAY = 86400.0


def _runs() -> bool:
    """Is there a Chromium, and does it start here?"""
    if CHROMIUM is None:
        return False
    done = subprocess.run([CHROMIUM, "--version"], capture_output=True, timeout=60, check=False)
    return done.returncode == 0


pytestmark = [pytest.mark.integration, pytest.mark.skipif(
    not _runs(), reason="no Chromium: install it, or name the program in CHROMIUM")]


def full_overview(folder: Path) -> Overview:
    """Many kinds, a name that is too long, one that is hostile, an earlier report, every part."""
    place, rates = "here-2t", Rates(1e5, 1e4)
    kernels = ["torch.own", "fast.one", "native.another", LONG,
               *(f"library.kernel_{i}" for i in range(8))]
    times = (1.0, 1.01, 1.08, 1.2, 1.4, 1.9, 3.0, 50.0)        # every step of the heat map
    rows = [Measurement(
        kernel, op, f"float32 rows={n}", place, 10.0 * n ** 0.5 * times[(i + n) % 8],
        0.05 * (i % 8), 20, "float32 is_causal=True",
        f"rows={n} hidden=4096 a_longer_name_of_a_size={n}", 2e3 * n * 4096, 4e4 * n)
        for op in ("linear", "attention", HOSTILE) for n in (1, 16, 64, 512)
        for i, kernel in enumerate(kernels)]
    replayed = tuple(regret.Replayed(
        Call("linear"), f"linear float32 rows={n} {HOSTILE}", "fast.one", "torch.own",
        {"fast.one": [10.0 + n] * 8, LONG: [10.0] * 8, "torch.own": [20.0] * 8})
        for n in range(30))
    written = folder / "regret.json"
    written.write_text(json.dumps(regret.RegretReport(replayed, (), place).to_json()))
    usages = {(row.op, row.bucket): Usage(7, LONG if "rows=64" in row.bucket else "fast.one",
                                          "x=1x2") for row in rows}
    kinds = group_by_kind(rows, rates, frozenset({"torch.own"}), usages, 1 << 20)
    here = gather("cpu")
    overview = Overview(
        here.device, place, here.created_at, here.facts, kinds, rates,
        (*here.rejected, RejectedKernel(
            LONG, HOSTILE, (RejectReason("NOT_INSTALLED", HOSTILE, LONG, command=LONG),), LONG)),
        read_regret(written), here.ops, at=here.at, cache_bytes=1 << 20, torch="2.9.0",
        workload=Workload(f"{LONG} {HOSTILE}", f"--calls {LONG}.jsonl", (
            UnmeasuredKind(f"{HOSTILE} {LONG}", 3, LONG, 5e3),), ((HOSTILE, LONG),)),
        history=tuple(Point(here.at - (9 - i) * 20 * DAY, 8.1e4 - 6e3 * i, 8.12e4, f"2.{i // 4}.0")
                      for i in range(10)))
    before = replace(overview.saved, kinds=tuple(
        replace(kind, us=kind.us * (1 + i % 3), kernel=LONG, spread=0.01)
        for i, kind in enumerate(overview.saved.kinds)))
    return replace(overview, against=compare(before, overview.saved))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What Chromium says of each page, by its name, the width of the window and the scheme."""
    folder = tmp_path_factory.mktemp("report")
    pages = {"full": render(full_overview(folder)),
             "empty": render(Overview("A machine", "here-2t", "today")),
             "bad": f"<body style='background:#123'><div style='width:1900px'>wide</div>{HOSTILE}"
                    "<svg viewBox='0 0 90 20'><text y='9'>one</text><text y='9'>two</text></svg>"}
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, "utf-8")
    with Browser() as browser:
        return {(name, width, scheme): browser.look(
            folder / f"{name}.html", width, scheme=scheme,
            picture=folder / f"{name}-{width}-{scheme}.png") for name, width, scheme in VIEWS}


@pytest.fixture
def good(seen):
    return {view: page for view, page in seen.items() if view[0] != "bad"}


def test_the_page_never_scrolls_sideways(good):
    for (name, width, _), page in good.items():
        assert page["width"] == width
        assert page["page_width"] <= width and page["too_wide"] == [], (name, width)
        assert page["spilled"] == 0           # no text runs over the next column


def test_no_label_of_a_chart_lies_on_another_or_is_cut_off(good):
    for view, page in good.items():
        assert (page["collisions"], page["outside"]) == ([], []), view


def test_on_a_phone_the_columns_that_matter_need_no_scrolling(good):
    scrolling = good["full", PHONE, "light"]["scrolling_tables"]
    assert not {"Gain per operation", "The 10 kinds of call that take most time",
                "The kinds of call farthest from the roof", "Heat map of linear",
                "Kinds of call that became faster or slower"} & {*scrolling}
    assert good["full", PHONE, "light"]["cells"] == []         # the heat map is for a desk


def test_nothing_is_asked_for_and_nothing_runs(good):
    for page in good.values():
        assert (page["requests"], page["console"], page["scripts"], page["images"]) == (
            [], [], 0, 0)
        assert page["injected"] is None


def test_what_is_hostile_is_shown_as_text(good):
    assert good["full", DESK, "light"]["text"].count(HOSTILE) >= 3
    assert "Nothing is measured yet" in good["empty", PHONE, "dark"]["text"]


def test_the_scheme_of_the_system_is_followed(good):
    for (_, _, scheme), page in good.items():
        assert page["dark"] == (scheme == "dark")
        assert _hex(page["background"]) == style.COLOURS[scheme]["page"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_heat_map_has_the_colours_that_were_checked(good, scheme):
    cells = {tuple(map(_hex, pair)) for pair in good["full", DESK, scheme]["cells"]}
    assert cells == {*style.HEAT[scheme]}


def test_every_kind_is_a_point_and_every_date_has_two(good):
    for (name, _, _), page in good.items():
        assert page["points"] == (12 + 2 * 10 if name == "full" else 0)


def test_this_browser_would_notice(seen):
    """A page with every fault: the checks above can fail."""
    page = seen["bad", PHONE, "light"]
    assert page["page_width"] > PHONE and page["too_wide"] == ["DIV."]
    assert page["requests"] == ["http://127.0.0.1:9/a.png"] and page["console"] == ["ran"]
    assert (page["scripts"], page["images"], page["injected"]) == (1, 1, 1)
    assert page["collisions"] == ["one / two"]


def _hex(colour: str) -> str:
    return "#" + "".join(f"{int(n):02x}" for n in re.findall(r"\d+", colour)[:3])
