"""`lz verify definitions`: definitions of others, in the FlashInfer-Trace schema, against lz."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from ....files.sealed import replace_output
from ....machine import hardware
from ....verify.report import page, read_log, summarise
from ....verify.trace.answers.references import References
from ....verify.trace.dataset import find_definitions, find_workloads
from ....verify.trace.definition import Definition
from ....verify.trace.mutation.mutate import MutationReport, summary
from ....verify.trace.mutation.mutate import mutate as run_mutants
from ....verify.trace.run import DefinitionReport, verify
from ....verify.trace.traces import write
from ....verify.trace.write_tests import write_tests as write_test_files
from ... import show
from ...calls import device_kind

_MARKS = {"passed": "ok", "unmapped": "--", "unproven": "??"}


def verify_definitions(names: Sequence[str], folder: Path, *, op_type: str, sizes: Sequence[str],
                       workloads: int, trust: Sequence[Path], timeout: float,
                       tolerance: float | None, as_is: bool, seed: int, device: str | None,
                       traces: Path | None, write_tests: Path | None, force: bool,
                       mutate: int | None, out: Path | None, as_json: bool) -> int:
    kind = device_kind(device)
    definitions = find_definitions(folder, *names, op_type=op_type)
    settings: dict[str, Any] = {"device": kind, "seed": seed, "tolerance": tolerance,
                                "as_is": as_is, "warm": traces is not None}
    with References(trust, timeout) as references:
        if write_tests is not None:
            return _write_tests(write_tests, definitions, references, settings, force, as_json)
        if mutate is not None:
            return _mutate(definitions, references, mutate, seed, out, as_json)
        reports = _verify_all(definitions, references, sizes, workloads, settings, not as_json)
    written = write(traces, reports, kind) if traces is not None else []
    return _show_result(reports, written, as_json)


def _write_tests(folder: Path, definitions: Sequence[Definition], references: References,
                 settings: dict[str, Any], force: bool, as_json: bool) -> int:
    """Write a test file per definition, in the reading that its reference confirms."""
    trusted = [d for d in definitions if not references.refusal(d)]
    reports = [verify(d, references, **settings) for d in trusted]
    # a reading against the text of a definition is none to test
    readings = {r.definition.name: r.reading for r in reports if r.passed}
    paths = write_test_files(folder, definitions, readings, overwrite=force)
    if as_json:
        show.as_json({"written": [str(p) for p in paths]})
    else:
        show.text("\n".join(map(str, paths))
                  or f"nothing: {folder} has a test for each of them already (--force writes them "
                  "again)")
    return 0


GOAL = 0.98                                    # of mutants that are not equivalent


def _mutate(definitions: Sequence[Definition], references: References, limit: int, seed: int,
            out: Path | None, as_json: bool) -> int:
    """Change every reference in `most` ways, or in all if that is 0; returns 1 if too many changes
    are not noticed."""
    reports: list[MutationReport] = []
    for definition in definitions:
        columns = TextColumn(definition.name, markup=False), BarColumn(), MofNCompleteColumn()
        with show.progress(*columns) as bar:
            def advance(done: int, total: int, bar: Callable[..., None] = bar) -> None:
                bar(completed=done, total=total)

            report = run_mutants(definition, references, limit, seed, progress=advance)
        reports.append(report)
        if out is not None:                    # after each: a run may be ended at any time
            data = _mutation_data(reports, limit, seed)
            replace_output(out, json.dumps(data, indent=1) + "\n")
        if as_json:
            continue
        counts = report.counts
        show.text(f"--  {report.definition}: {report.skipped}" if report.skipped else
                  f"{'ok' if not counts['survived'] else '!!'}  {report.definition}: "
                  f"{counts['killed']} killed, {counts['survived']} survived, "
                  f"{counts['equivalent']} equivalent")
        for outcome in report.outcomes:
            if outcome.status == "survived":
                show.text(f"      survived: {outcome.mutant}")
    data = _mutation_data(reports, limit, seed)
    if as_json:
        show.as_json(data)
    elif data["rate"] is not None:
        show.text(f"{data['definitions']} definitions, {data['killed']} mutants killed, "
                  f"{data['survived']} survived, {data['equivalent']} equivalent: "
                  f"{data['rate']:.2%} killed")
    return 0 if data["rate"] is not None and data["rate"] >= GOAL else 1


def _mutation_data(reports: Sequence[MutationReport], limit: int, seed: int) -> dict[str, Any]:
    return {"kind": "mutants", **summary(reports), "seed": seed, "mutants_each": limit or "all",
            "torch": torch.__version__, "machine": hardware.probe("cpu").name,
            "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "reports": [r.to_json() for r in reports]}


def _verify_all(definitions: Sequence[Definition], references: References, sizes: Sequence[str],
                workloads: int, settings: dict[str, Any], verbose: bool) -> list[DefinitionReport]:
    """Verify every definition; with `verbose` each report is printed as it comes."""
    reports: list[DefinitionReport] = []
    for definition in definitions:
        cases: list[dict[str, Any]] = [{"size": s} for s in sizes]
        cases += ([{"workload": w} for w in find_workloads(definition)[:workloads]] if workloads
                  else [])
        for case in cases:
            report = verify(definition, references, **case, **settings)
            reports.append(report)
            if verbose:
                show.text(f"{_MARKS.get(report.status, '!!')}  {_report_text(report, case)}")
            if report.status == "unmapped":
                break
    return reports


def _report_text(report: DefinitionReport, case: dict[str, Any]) -> str:
    if report.status != "passed":
        return str(report)
    against = [c.want for c in report.comparisons if c.got == "lz"]
    smaller = ", made smaller" if report.scaled else ""
    workload = case.get("workload")
    size = f"workload {workload.uuid}" if workload else case["size"]
    note = f"\n      {report.detail}" if report.detail else ""
    missing = "".join(f"\n      not against {name}: {reason}"
                      for name, reason in report.absent.items() if name == "reference")
    return (
        f"{report.definition.name} ({size}{smaller}): {report.answer} by "
        f"{', '.join(report.kernels)}, equal to {', '.join(dict.fromkeys(against))}{note}{missing}")


def _show_result(reports: Sequence[DefinitionReport], written: Sequence[Path],
                 as_json: bool) -> int:
    counts = Counter(report.status for report in reports)
    if as_json:
        show.as_json({"counts": dict(counts), "reports": [r.to_json() for r in reports],
                      "traces": [str(p) for p in written]})
    else:
        show.text(", ".join(f"{n} {status}" for status, n in counts.items()))
        for path in dict.fromkeys(written):
            show.text(f"wrote {path}")
    died = any(report.died for report in reports)
    return 1 if counts["failed"] or counts["disputed"] or died else 0


def verify_report(logs: Sequence[Path], out: Path | None, as_json: bool) -> int:
    """Summarise logs of benchmarks/false_alarms.py; returns 1 if a verdict failed."""
    summaries = summarise([row for path in logs for row in read_log(path)])
    if out is not None:
        replace_output(out,
                       json.dumps({"kind": "kernels", "summaries": summaries}, indent=1) + "\n")
    if as_json:
        show.as_json({"summaries": summaries})
    else:
        show.text(page(summaries, ()))
    return 1 if any(s["alarms"] for s in summaries) else 0
