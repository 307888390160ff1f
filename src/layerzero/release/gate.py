"""May this be released? The stages one after the other, the waivers over what they found, one
report.

A release is accepted when the gate has passed on one target of each hardware class: `combine` looks
at the reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..files.reading import read_json
from ..machine import hardware
from ..machine.loading import installed_version
from ..spec.codec import encode
from ..spec.errors import ConfigError, DataError
from ..spec.names import suggest
from ..verify.cases.declarations import Checked
from . import waivers as waiving
from .performance import Baseline
from .stages import STAGES, GateOptions, ModelChecked, run_stage
from .targets import KNOWN
from .waivers import Waiver

SCHEMA = "layerzero.gate/1"
Say = Callable[[str, Checked], None]           # stage, check


def stages_of(words: Iterable[str]) -> tuple[str, ...]:
    """Return the named stages in their own order; all stages if none is named."""
    named = [name.strip() for word in words for name in word.split(",") if name.strip()]
    for name in named:
        if name not in STAGES:
            raise ConfigError(f"--stages: there is no stage {name!r}{suggest(name, STAGES)}")
    return tuple(name for name in STAGES if name in named) if named else tuple(STAGES)


def run_gate(options: GateOptions, stages: Sequence[str], waivers: Sequence[Waiver] = (),
             today: date | None = None, say: Say = lambda stage, check: None) -> dict[str, Any]:
    """Run the stages and judge. The report is plain data, as `lz gate --json` prints it."""
    started = time.perf_counter()
    results: dict[str, list[Checked]] = {}
    for name in stages:
        results[name] = []
        for check in run_stage(name, options):
            results[name].append(check)
            say(name, check)
    names = [waiving.name_of(stage, f) for stage, checks in results.items() for c in checks
             for f in c.findings]
    day = today or _today(options)
    waived = waiving.apply(waivers, names, stages, options.target, day)
    if waivers:
        results["waivers"] = [waived.check]
        say("waivers", waived.check)
    reported = [_stage(name, checks, waived.by) for name, checks in results.items()]
    states = [check["state"] for stage in reported for check in stage["checks"]]
    return {
        "schema": SCHEMA, "passed": "failed" not in states, "target": options.target,
        "device": hardware.probe(options.device).to_json(), "torch": str(torch.__version__),
        "layerzero": installed_version("layerzero") or "unknown", "lane": options.lane,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 1), "checks": len(states),
        "failed": states.count("failed"), "stages": reported, "waived": encode(waived.by),
        "waivers": [{**w.to_json(), "state": _state_of(w, waived, day)} for w in waivers],
        "static": encode(results.get("static", [])),
        "models": [c.cell.to_json() for c in results.get("models", ())
                   if isinstance(c, ModelChecked) and c.cell]}


def _today(options: GateOptions) -> date:
    """Return the date, at least the baseline's: a clock set back revives no waiver."""
    now = datetime.now(timezone.utc).date()
    try:
        return max(now, date.fromisoformat(Baseline.load(options.baseline_file).made[:10]))
    except ValueError:                         # also DataError: the performance stage reports it
        return now


def _state_of(waiver: Waiver, waived: waiving.Waived, day: date) -> str:
    if waiver.expires < day:
        return "expired"
    return ("used" if waiver in waived.by.values() else "unused" if waiver in waived.unused
            else "not asked")


def _stage(name: str, checks: Sequence[Checked], by: Mapping[str, Waiver]) -> dict[str, Any]:
    rows = []
    for check in checks:
        data = check.to_json()
        for row, finding in zip(data["findings"], check.findings):
            waiver = by.get(waiving.name_of(name, finding))
            data["findings"][data["findings"].index(row)] = {**row, "waived": waiver.reason
                                                             if waiver else ""}
        open_findings = [f for f in data["findings"] if not f["waived"]]
        data["passed"] = not open_findings
        rows.append({**data, "state": "failed" if open_findings else "waived" if data["findings"]
                     else "passed"})
    says = STAGES[name].says if name in STAGES else "every waiver is in force and is needed"
    states = {row["state"] for row in rows}
    return {"stage": name, "says": says, "checks": rows,
            "state": next(state for state in ("failed", "waived", "passed") if state in states
                          or state == "passed")}


# Several targets.

def load_report(path: Path) -> dict[str, Any]:
    data = read_json(path, "a report, such as lz gate --out writes")
    got = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
    if (got != SCHEMA or not isinstance(data.get("target"), str)
            or not isinstance(data.get("passed"), bool)
            or not isinstance(data.get("stages"), list)):
        raise DataError(f"{path}: wanted a report of lz gate with schema {SCHEMA}, got {got!r}")
    return dict(data)


def combine(paths: Sequence[Path], required: Sequence[str]) -> dict[str, Any]:
    """Accepted: every required target has a full report that passed, and none failed."""
    for name in required:
        if name not in KNOWN:
            raise ConfigError(f"--require: there is no target {name!r}{suggest(name, KNOWN)}")
    rows = []
    for path in paths:
        data = load_report(path)
        ran = {str(stage.get("stage")) for stage in data["stages"] if isinstance(stage, Mapping)}
        left_out = [name for name in STAGES if name not in ran]
        rows.append({"file": str(path), "target": data["target"], "passed": data["passed"],
                     "lane": data.get("lane"),
                     "left_out": left_out,
                     "counts": bool(data["passed"] and not left_out
                                    and data.get("lane") in ("usual", "full"))})
    covered = {row["target"] for row in rows if row["counts"]}
    missing = [name for name in required if name not in covered]
    return {"accepted": not missing and bool(rows) and all(row["passed"] for row in rows),
            "reports": rows,
            "required": list(required), "missing": missing}
