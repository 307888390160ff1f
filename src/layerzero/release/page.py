"""The gate's report as one HTML page: no script, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..report.markup import Html, el, join
from ..report.page import POLICY
from ..report.style import style

_MARKS = {"passed": "passed", "failed": "FAILED", "waived": "waived"}


def render(report: Mapping[str, Any]) -> str:
    """The whole page of a report as `lz gate --json` prints it."""
    verdict = "passed" if report["passed"] else "FAILED"
    title = f"LayerZero gate: {report['target']} {verdict}"
    head = el("head", el("meta", charset="utf-8"), el("meta", http_equiv="Content-Security-Policy", content=POLICY),
              el("meta", name="viewport", content="width=device-width, initial-scale=1"),
              el("meta", name="color-scheme", content="light dark"), el("link", rel="icon", href="data:,"),
              el("title", title), el("style", Html(style())))
    facts = {"Target": report["target"], "Device": report["device"]["name"], "torch": report["torch"],
             "layerzero": report["layerzero"], "Made": report["made"], "Lane": report["lane"]}
    tiles = [(verdict, "may it be released?"), (str(report["checks"]), "checks"), (str(report["failed"]), "failed"),
             (str(len(report["waived"])), "waived"), (f"{report['seconds']:.0f} s", "took")]
    body = el("body", el("header", el("h1", "LayerZero gate"), el("p", report["device"]["name"]), el("dl", *(
        join(el("dt", name), el("dd", text)) for name, text in facts.items()), class_="facts"), el("div", *(
            el("div", el("b", number), el("span", what), class_="tile") for number, what in tiles), class_="tiles")),
        el("main", *(_stage(stage) for stage in report["stages"]), _waivers(report)),
        el("footer", "Made by ", el("code", "lz gate"), "."))
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


def _table(columns: tuple[str, ...], rows: list[Html]) -> Html:
    head = el("thead", el("tr", *(el("th", name, scope="col") for name in columns)))
    return el("div", el("table", head, el("tbody", *rows)), class_="scroll", tabindex="0", role="region",
              aria_label=columns[0])


def _stage(stage: Mapping[str, Any]) -> Html:
    rows = []
    for check in stage["checks"]:
        notes = [el("div", f"{f['subject']}: {f['problem']}" + (f"; {f['advice']}" if f["advice"] else "")
                    + (f" (waived: {f['waived']})" if f.get("waived") else ""), class_="warn")
                 for f in check["findings"]]
        note = el("div", check["note"], class_="muted") if check["note"] else None
        rows.append(el("tr", el("td", _MARKS[check["state"]]), el("td", check["check"]),
                       el("td", check["says"], note, *notes, class_="wide"),
                       el("td", f"{check['seconds']:.1f} s", class_="num")))
    return el("section", el("h2", f"{stage['stage']}: {_MARKS[stage['state']]}", id=stage["stage"]),
              el("p", stage["says"]), _table(("verdict", "check", "what must hold", "took"), rows))


def _waivers(report: Mapping[str, Any]) -> Html | None:
    if not report["waivers"]:
        return None
    rows = [el("tr", el("td", w["what"], class_="wide"), el("td", w["reason"], class_="wide"), el("td", w["expires"]),
               el("td", w["state"])) for w in report["waivers"]]
    return el("section", el("h2", "Waivers", id="waivers"), _table(("what", "reason", "until", "state"), rows))
