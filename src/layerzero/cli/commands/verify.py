"""`lz verify definitions`: definitions of others, in the FlashInfer-Trace schema, against lz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...verify.trace.answers.references import References
from ...verify.trace.dataset import find_definitions, find_workloads
from ...verify.trace.definition import Definition
from ...verify.trace.run import DefinitionReport, verify
from ...verify.trace.traces import write
from ...verify.trace.write_tests import write_tests as write_test_files
from .. import show
from ..calls import device_kind

_MARKS = {"passed": "ok", "unmapped": "--", "unproven": "??"}


def verify_definitions(names: Sequence[str], folder: Path, *, op_type: str, sizes: Sequence[str],
                       workloads: int, trust: Sequence[Path], timeout: float,
                       tolerance: float | None, as_is: bool, seed: int, device: str | None,
                       traces: Path | None, write_tests: Path | None, as_json: bool) -> int:
    kind = device_kind(device)
    definitions = find_definitions(folder, *names, op_type=op_type)
    settings: dict[str, Any] = {"device": kind, "seed": seed, "tolerance": tolerance,
                                "as_is": as_is}
    with References(trust, timeout) as references:
        if write_tests is not None:
            return _write_tests(write_tests, definitions, references, settings, as_json)
        reports = _verify_all(definitions, references, sizes, workloads, settings, not as_json)
    written = write(traces, reports, kind) if traces is not None else []
    return _show_result(reports, written, as_json)


def _write_tests(folder: Path, definitions: Sequence[Definition], references: References,
                 settings: dict[str, Any], as_json: bool) -> int:
    """Write a test file per definition, in the reading that its trusted reference confirms, else
    the likeliest."""
    trusted = [d for d in definitions if not references.refusal(d)]
    readings = {d.name: verify(d, references, **settings).reading for d in trusted}
    paths = write_test_files(folder, definitions, readings)
    if as_json:
        show.as_json({"written": [str(p) for p in paths]})
    else:
        show.text("\n".join(map(str, paths))
                  or f"nothing: {folder} has a test for each of them already")
    return 0


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
    missing = "".join(f"\n      not against {name}: {reason}"
                      for name, reason in report.absent.items() if name == "reference")
    return (
        f"{report.definition.name} ({size}{smaller}): {report.answer} by "
        f"{', '.join(report.kernels)}, equal to {', '.join(dict.fromkeys(against))}{missing}")


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
