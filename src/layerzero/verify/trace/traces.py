"""Results as Traces, and what is needed to read them: a dataset in the layout of flashinfer-bench.

    definitions/<op_type>/<definition>.json
    solutions/<op_type>/<definition>/<solution>.json      the lz call, as code that others can run
    traces/<op_type>/<definition>.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ...files.sealed import replace_output
from ...machine import hardware, loading
from .answers.lookup import answers
from .definition import (
    BuildSpec,
    Correctness,
    Definition,
    Environment,
    Evaluation,
    Performance,
    Solution,
    SourceFile,
    Trace,
    check_names,
)
from .run import Comparison, DefinitionReport
from .write_tests import as_docstring


def solution_name(definition: Definition) -> str:
    return f"layerzero_{definition.name}"


def solution_of(definition: Definition, reading: int = 0) -> Solution:
    """A solution whose code is the lz call; `reading` is which of answers() it is."""
    check_names(definition)
    stripped = json.dumps(replace(definition, description="").to_json(), indent=1)
    names = ", ".join(definition.inputs)
    arguments = ", ".join(f"{n!r}: {n}" for n in definition.inputs)
    outputs = ", ".join(f"made[{n!r}]" for n in definition.outputs)
    content = (f'{as_docstring(str(answers(definition)[reading]))}\n\nimport json\n\n'
               "from layerzero.verify.trace.answers.lookup import answers\n"
               "from layerzero.verify.trace.definition import Definition\n\n"
               f"DEFINITION = Definition.from_json(json.loads({stripped!r}))\n"
               f"ANSWER = answers(DEFINITION)[{reading:d}]\n\n\n"
               f"def run({names}):\n    made = ANSWER({{{arguments}}})\n    return {outputs}\n")
    spec = BuildSpec("python", tuple(sorted({"cpu", *hardware.present()})), "main.py::run",
                     ("layerzero", "torch"), destination_passing_style=False)
    return Solution(solution_name(definition), definition.name, "layerzero", spec,
                    (SourceFile("main.py", content),), str(answers(definition)[reading]))


def trace_of(report: DefinitionReport, device: str = "cpu") -> Trace | None:
    """None for what says nothing of the definition: unmapped, unproven, run smaller, or read
    against its text."""
    if report.status in ("unmapped", "unproven") or report.scaled or report.workload is None:
        return None
    if answers(report.definition)[report.reading].contradictions:
        return None
    machine = hardware.probe(torch.device(device).type)
    libs = {"torch": torch.__version__, "layerzero": loading.installed_version("layerzero")
            or "unknown"}
    judged = _decisive(report)
    status = "RUNTIME_ERROR" if judged is None else "PASSED" if judged.passed else judged.status
    correctness = None
    if judged is not None and status in ("PASSED", "INCORRECT_NUMERICAL"):
        metrics = [v.metrics for v in judged.verdicts]
        outputs = {v.output: {k: x for k, x in v.metrics.to_json().items() if _plain(x)}
                   for v in judged.verdicts}
        correctness = Correctness(max(m.max_rel for m in metrics), max(m.max_abs for m in metrics),
                                  {"against": judged.want, "kernels": list(report.kernels),
                                   "outputs": outputs})
    performance = (Performance(report.latency_ms, report.reference_ms) if status == "PASSED"
                   else None)
    evaluation = Evaluation(status, Environment(machine.name or machine.type, libs),
                            datetime.now(timezone.utc).isoformat(), str(report), correctness,
                            performance)
    return Trace(report.definition.name, report.workload, solution_name(report.definition),
                 evaluation)


def _decisive(report: DefinitionReport) -> Comparison | None:
    """The first comparison of lz that failed, else its first, with the reference if it ran."""
    ours = [c for c in report.comparisons if c.got == "lz"]
    return next((c for c in ours if not c.passed), ours[0] if ours else None)


def _plain(value: Any) -> bool:
    """What JSON can hold: no infinity and no NaN, which stand in the errors beside it."""
    return not isinstance(value, float) or (value == value and abs(value) != float("inf"))


def write(folder: str | Path, reports: Iterable[DefinitionReport],
          device: str = "cpu") -> list[Path]:
    """Append the traces of these reports to a dataset, with the definitions it lacks."""
    root, written = Path(folder), []
    for report in reports:
        trace = trace_of(report, device)
        if trace is None:
            continue
        definition = report.definition
        place = Path(definition.op_type) / definition.name
        _write_once(root / "definitions" / f"{place}.json", definition.to_json())
        solution = solution_of(definition, report.reading)
        _write_once(root / "solutions" / place / f"{solution.name}.json", solution.to_json())
        path = root / "traces" / f"{place}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(trace.to_json()) + "\n")
        written.append(path)
    return written


def _write_once(path: Path, data: Any) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_output(path, json.dumps(data, indent=2) + "\n")
