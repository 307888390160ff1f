"""The report in a real Chromium: it fits a phone, follows light and dark, runs nothing and asks
nobody.

Chromium comes with PyQt6-WebEngine (`pip install PyQt6-WebEngine`), in this Python or in the one
that the variable BROWSER_PYTHON names. Skipped where there is none. The pictures are kept in the
test's folder (pytest --basetemp).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.cli.commands.report import gather
from layerzero.perf.record import Measurement, Rates
from layerzero.report import style
from layerzero.report.overview import (
    Overview,
    RejectedKernel,
    RejectReason,
    group_by_kind,
    read_regret,
)
from layerzero.report.page import render
from layerzero.spec.call import Call
from layerzero.tuning import regret

PYTHON = os.environ.get("BROWSER_PYTHON", sys.executable)
BROWSER = Path(__file__).with_name("browser.py")
HOSTILE = ("<script>injected=1;console.error('ran')</script><img src=http://127.0.0.1:9/a.png "
           "onerror=window.injected=1>")
LONG = "library.a_kernel_with_a_name_that_goes_on_and_on_" + "x" * 90
PHONE, DESK = (360, 800), (1280, 900)


def _has_browser() -> bool:
    code = "import PyQt6.QtWebEngineCore, PyQt6.QtWebEngineWidgets"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, check=False).returncode == 0


pytestmark = [pytest.mark.integration, pytest.mark.skipif(
    not _has_browser(),
    reason="no Chromium: pip install PyQt6-WebEngine, or name its Python in BROWSER_PYTHON")]


def look(folder: Path, scheme: str, pages: dict[str, str]) -> dict[tuple[str, int], dict]:
    """Each page on a phone and on a desk: what Chromium says, by name and width."""
    views = []
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, "utf-8")
        views += [{"page": str(folder / f"{name}.html"), "width": width, "height": height,
                   "scheme": scheme,
                   "png": str(folder / f"{name}-{width}-{scheme}.png")}
                  for width, height in (PHONE, DESK)]
    done = subprocess.run([PYTHON, str(BROWSER), json.dumps(views)], capture_output=True, text=True,
                          timeout=240,
                          check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {(Path(view["page"]).stem, view["width"]): answer
            for view, answer in zip(views, answers, strict=True)}


def overview(folder: Path) -> Overview:
    """Many kinds, a name that is too long, one that is hostile, and the kernels that cannot run
    here.
    """
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
        {"fast.one": [10.0 + n] * 8, LONG: [10.0] * 8, "torch.own": [20.0] * 8}) for n in range(30))
    written = folder / "regret.json"
    written.write_text(json.dumps(regret.RegretReport(replayed, (), place).to_json()))
    here = gather("cpu")
    kinds = group_by_kind(rows, rates, frozenset({"torch.own"}))
    return Overview(here.device, place, here.created_at, here.facts, kinds, rates,
                    (*here.rejected, RejectedKernel(
                        LONG, HOSTILE, (RejectReason("NOT_INSTALLED", HOSTILE, LONG),), LONG)),
                    read_regret(written), here.ops)


@pytest.fixture(scope="module", params=["light", "dark"])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"report-{request.param}")
    empty = Overview("A machine", "here-2t", "today")
    return request.param, look(folder, request.param,
                               {"full": render(overview(folder)), "empty": render(empty)})


def test_the_page_never_scrolls_sideways(seen):
    for (name, width), found in seen[1].items():
        assert found["loaded"] and found["width"] == width
        assert found["page_width"] <= width and found["too_wide"] == [], (name, width)
        assert found["spilled"] == 0           # no text runs over the next column
    # the tables do, so that nothing is lost
    assert seen[1]["full", PHONE[0]]["scrolling_tables"] > 3


def test_nothing_is_asked_for_and_nothing_runs(seen):
    for found in seen[1].values():
        assert (found["requests"], found["console"], found["scripts"],
                found["images"]) == ([], [], 0, 0)
        assert found["injected"] is None


def test_what_is_hostile_is_shown_as_text(seen):
    assert seen[1]["full", DESK[0]]["text"].count(HOSTILE) >= 3
    assert "Nothing is measured yet" in seen[1]["empty", PHONE[0]]["text"]


def test_the_scheme_of_the_system_is_followed(seen):
    scheme, views = seen
    wanted = style.COLOURS[scheme]["page"]
    for found in views.values():
        assert found["dark"] == (scheme == "dark")
        assert _hex(found["background"]) == wanted


def test_the_heat_map_has_the_colours_that_were_checked(seen):
    scheme, views = seen
    cells = {tuple(map(_hex, pair)) for pair in views["full", PHONE[0]]["cells"]}
    assert cells == {*style.HEAT[scheme]}


def test_every_winner_is_a_point_and_the_picture_is_not_blank(seen):
    for (name, _), found in seen[1].items():
        assert found["points"] == (12 if name == "full" else 0)
        assert found["picture"] and found["colours"] > 20


def test_this_browser_would_notice(tmp_path):
    """A page with every fault: the checks above can fail."""
    bad = f"<body style='background:#123456'><div style='width:900px'>wide</div>{HOSTILE}</body>"
    found = look(tmp_path, "light", {"bad": bad})["bad", PHONE[0]]
    assert found["page_width"] > PHONE[0] and found["too_wide"] == ["DIV."]
    assert found["requests"] == ["http://127.0.0.1:9/a.png"] and found["console"] == ["ran"]
    assert (found["scripts"], found["images"], found["injected"]) == (1, 1, 1)


def _hex(colour: str) -> str:
    return "#" + "".join(f"{int(n):02x}" for n in re.findall(r"\d+", colour)[:3])
