"""`lz gate`: one verdict on a release: declarations, models, contracts, files, speed, soak."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ....files.sealed import replace_output
from ....release import performance, schemas, targets
from ....release.gate import combine, run_gate, stages_of
from ....release.page import render
from ....release.stages import STAGES, GateOptions, ModelChecked
from ....release.waivers import Waiver, read_waivers
from ....spec.errors import ConfigError, DataError
from ....verify.cases.declarations import Checked
from ....verify.model.families import Cell
from ... import show

# of a source checkout; an installed package has no docs/
_ROOT = Path(__file__).resolve().parents[5]
WAIVERS = "waivers.yaml"                       # beside the baselines
STAGE_REPORTS = {"correctness": "contract_report_latest.json",
                 "models": "model_matrix_report_latest.json"}


def gate(stages: Sequence[str], lane: str, *, target: str, device: str, families: Sequence[str],
         backend: str, baseline: Path | None, waivers: Path | None, soak_seconds: float,
         write_baseline: bool, write_schemas: bool, out: Path | None, as_json: bool) -> int:
    chosen, kind = targets.choose_target(target, device)
    options = GateOptions(chosen, kind, lane, _ROOT, baseline, tuple(families), backend,
                          soak_seconds)
    if write_baseline or write_schemas:
        return _write_records(options, write_baseline, write_schemas, as_json)
    return run(options, stages_of(stages), _load_waivers(waivers), out, as_json)


def run(options: GateOptions, stages: Sequence[str] = tuple(STAGES), waivers: Sequence[Waiver] = (),
        out: Path | None = None, as_json: bool = False) -> int:
    """Run the gate, print and write its report; returns the exit code."""
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out: wanted a folder, {out} is a file")
    lines: list[str] = []
    cells: list[Cell] = []
    started: list[str] = []

    def write(text: str) -> None:
        lines.append(text)
        if not as_json:
            print(text, flush=True)

    def say(stage: str, check: Checked) -> None:
        if stage not in started:
            started.append(stage)
            write(
                f"{stage}: "
                f"{STAGES[stage].says if stage in STAGES else 'what may be passed until when'}")
        if isinstance(check, ModelChecked) and check.cell is not None:
            cells.append(check.cell)
        write(_check_text(check))

    write(f"lz gate for {options.target} on {options.device}, torch {torch.__version__}")
    options = GateOptions(**{**options.__dict__, "say": write})
    report = run_gate(options, stages, waivers, say=say)
    if cells:
        write(_kernels_text(cells))
    for name, waiver in report["waived"].items():
        write(f"waived until {waiver['expires']}: {name}: {waiver['reason']}")
    left_out = [name for name in STAGES if name not in stages]
    write(
        f"{'passed' if report['passed'] else 'FAILED'}: {report['checks'] - report['failed']} "
        f"passed, {report['failed']} failed, {report['seconds']:.0f} s"
        + (f"; not asked: {', '.join(left_out)}" if left_out else ""))
    if as_json:
        show.as_json(report)
    if out is not None:
        _write(out, report, lines)
    return 0 if report["passed"] else 1


def _load_waivers(path: Path | None) -> tuple[Waiver, ...]:
    file = path or _ROOT / "benchmarks" / "baselines" / WAIVERS
    return read_waivers(file) if path is not None or file.is_file() else ()


def _write_records(options: GateOptions, baseline: bool, structures: bool, as_json: bool) -> int:
    if not options.baselines.parent.is_dir() and options.baseline is None:
        raise ConfigError(
            f"there is no {options.baselines.parent}: not a source checkout; give --baseline FILE")
    written: list[str] = []
    if structures:
        schemas.write_record(options.baselines / schemas.RECORD)
        written.append(str(options.baselines / schemas.RECORD))
    if baseline:
        path = options.baseline or options.baselines / f"{options.target}.json"
        measured = performance.make_baseline(options.target, options.device)
        measured.save(path)
        written.append(str(path))
        if not as_json:
            show.table(("call", "lz", "torch", "ratio", "95 % of"), [
                (name, f"{t.lz_us:.1f} us", f"{t.torch_us:.1f} us", f"{t.ratio:.2f}x",
                 f"{t.low:.2f} to {t.high:.2f}")
                for name, t in measured.calls.items()], right=("lz", "torch", "ratio"))
    show.as_json({"written": written}) if as_json else show.text(
        "\n".join(f"wrote {path}" for path in written))
    return 0


def combine_reports(paths: Sequence[Path], required: Sequence[str], as_json: bool) -> int:
    if not paths:
        raise ConfigError(
            "--require goes with --combine GATE.JSON, the report of a target; got none")
    verdict = combine(paths, required)
    if as_json:
        show.as_json(verdict)
    else:
        show.table(("", "target", "report", "lane", "not asked"), [
            ("ok" if row["counts"] else "--" if row["passed"] else "!!", row["target"], row["file"],
             str(row["lane"]), ", ".join(row["left_out"])) for row in verdict["reports"]])
        for name in verdict["missing"]:
            show.text(
                f"!!  {name}: no report that passed every stage; run lz gate --out DIR on such a "
                "machine")
        show.text("accepted" if verdict["accepted"] else "NOT accepted")
    return 0 if verdict["accepted"] else 1


def _check_text(check: Checked) -> str:
    mark = "!!" if not check.passed else "--" if check.note else "ok"
    head = (f"{mark}  {check.name}: {check.says} ({check.note or f'{check.asked} asked'}, "
            f"{check.seconds:.1f} s)")
    return "\n".join([head, *(f"      {finding}" for finding in check.findings)])


def _kernels_text(cells: list[Cell]) -> str:
    """List the kernels that served: a matrix in which one kernel did everything proves little."""
    served: Counter[tuple[str, str]] = Counter()
    for cell in cells:
        served.update(cell.kernels)
    by_op: dict[str, list[str]] = {}
    for (op, kernel), n in sorted(served.items()):
        by_op.setdefault(op, []).append(f"{kernel} x{n}")
    rows = ([f"      {op}: {', '.join(names)}" for op, names in by_op.items()]
            or ["      nothing was served"])
    return "\n".join(["the models were served by", *rows])


def _stage_reports(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the reports of single stages that others read, by the names of their files."""
    about = {n: report[n] for n in ("schema", "target", "device", "torch", "layerzero", "lane",
                                    "made")}
    for stage in report["stages"]:
        if stage["stage"] in STAGE_REPORTS:
            cells = {"cells": report["models"]} if stage["stage"] == "models" else {}
            yield STAGE_REPORTS[stage["stage"]], {
                **about, "passed": stage["state"] != "failed", **stage, **cells}


def _write(folder: Path, report: dict[str, Any], lines: list[str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_output(folder / "gate.json", json.dumps(report, indent=1) + "\n")
        replace_output(folder / "gate.txt", "\n".join(lines) + "\n")
        for name, part in _stage_reports(report):
            replace_output(folder / name, json.dumps(part, indent=1) + "\n")
        # last: it needs Jinja2
        replace_output(folder / "gate.html", render(report))
    except OSError as e:
        raise DataError(
            f"--out {folder}: cannot be written: {e.strerror}; give a folder that can") from e
