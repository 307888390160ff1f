"""`lz verify`: check results by the ladder (--level), or by definitions in the FlashInfer-Trace
schema.

Each mode is a function that prints its result and returns the exit code; `command` picks the mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...spec.errors import ConfigError
from ...verify.trace.answers.references import References
from ...verify.trace.dataset import find_definitions, find_workloads
from ...verify.trace.definition import Definition
from ...verify.trace.inputs import SIZES
from ...verify.trace.run import DefinitionReport, verify
from ...verify.trace.traces import write
from ...verify.trace.write_tests import write_tests as write_test_files
from .. import show
from ..options import Json
from .ladder import TEXT, ladder
from .verify_levels import level_one

_MARKS = {"passed": "ok", "unmapped": "--", "unproven": "??"}
DEFAULT_FOLDER = Path()


def command(
    level: Annotated[int | None, typer.Option("--level", min=1, max=5, help=(
        "1: every kernel against its contract; 2: a layer; 3: each stage on real weights; 4: the "
        "logits of a model; 5: training"))] = None,
    quick: Annotated[bool, typer.Option("--quick",
                                        help="of --level: a minute or so; the default")] = False,
    isolated: Annotated[bool, typer.Option("--isolated", help=(
        "of level 1: libraries without a certificate run in a process of their own first"))] = False,
    full: Annotated[bool, typer.Option("--full", help="of --level: every case")] = False,
    stress: Annotated[bool, typer.Option("--stress", help="of --level: every case with many seeds")] = False,
    backend: Annotated[str, typer.Option("--backend", help="of --level: only kernels of this "
                                                           "library")] = "",
    kernel: Annotated[str, typer.Option("--kernel", help="of --level: only this kernel; * and ? at "
                                                         "level 1")] = "",
    op: Annotated[str, typer.Option("--op", help="of level 1: only kernels of this operation")] = "",
    config: Annotated[list[str] | None, typer.Option("--config", help="of levels 2 to 5; may be "
                                                                      "repeated")] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="of levels 2 to 5; may be "
                                                                    "repeated")] = None,
    steps: Annotated[int, typer.Option("--steps", help="of level 5: of each optimizer; 0: as the "
                                                       "lane says")] = 0,
    model: Annotated[str, typer.Option("--model", help=(
        "of levels 3 and 4: a GGUF file; default: SmolLM2 where it is installed; none: random "
        "weights"))] = "",
    text: Annotated[str, typer.Option("--text", help="of levels 3 and 4: what the model reads")] = "",
    against: Annotated[str, typer.Option("--against", help="of levels 3 and 4: plain or "
                                                           "transformers")] = "plain",
    verbose: Annotated[bool, typer.Option("--verbose", help="of levels 2 to 5: a table for every "
                                                            "layer")] = False,
    definition: Annotated[str | None, typer.Option("--definition", metavar="NAME", help="verify this one")] = None,
    op_type: Annotated[str | None, typer.Option("--op-type", metavar="T", help="verify all of this type")] = None,
    everything: Annotated[Path | None, typer.Option("--all", metavar="DIR", help="verify every one below DIR")] = None,
    folder: Annotated[Path, typer.Option("--dir", help="where definitions are looked for")] = DEFAULT_FOLDER,
    size: Annotated[list[str] | None, typer.Option("--size", help=f"{', '.join(SIZES)}; may be "
                                                                  "repeated")] = None,
    workloads: Annotated[int, typer.Option(help="also so many of the dataset's own workloads")] = 0,
    trust: Annotated[list[Path] | None, typer.Option(
        "--trust", metavar="DIR", help="run the references below DIR, which is code; may be "
                                       "repeated")] = None,
    timeout: Annotated[float, typer.Option(help="seconds that a reference may take")] = 60.0,
    tolerance: Annotated[float | None, typer.Option(help="atol and rtol, instead of those of the "
                                                         "dtype")] = None,
    as_is: Annotated[bool, typer.Option("--as-is", help="never make a large definition smaller")] = False,
    seed: Annotated[int, typer.Option(help="of the inputs")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    traces: Annotated[Path | None, typer.Option(metavar="DIR", help="write the results as Traces")] = None,
    write_tests: Annotated[Path | None, typer.Option(
        "--write-tests", metavar="DIR", help="write a pytest file for each definition instead")] = None,
    as_json: Json = False,
) -> None:
    """lz against references and independent libraries. Exit code 1 if something disagrees."""
    lanes = [name for name, chosen in (("quick", quick), ("full", full), ("stress", stress))
             if chosen]
    if len(lanes) > 1:
        raise ConfigError(
            f"lz verify takes one of --quick, --full, --stress, got {' and '.join(lanes)}")
    lane = lanes[0] if lanes else "quick"
    options = {"--level": level, "--definition": definition, "--op-type": op_type,
               "--all": everything}
    modes = [name for name, value in options.items() if value is not None]
    if len(modes) != 1:
        raise ConfigError("lz verify wants one of --level, --definition, --op-type, --all; "
                          f"got {' and '.join(modes) or 'none'}")
    if level == 1:
        raise typer.Exit(level_one(lane, backend=backend, kernel=kernel, op=op, device=device,
                                   as_json=as_json,
                                  isolated=isolated))
    if level is not None:
        raise typer.Exit(ladder(
            level, effort=lane, backend=backend, kernel=kernel, configs=tuple(config or ()),
            dtypes=tuple(dtype or ()), device=device, seed=seed, model=model, text=text or TEXT,
            against=against, verbose=verbose, as_json=as_json,
            **({"steps": steps} if steps else {})))
    unknown = [s for s in size or () if s not in SIZES]
    if unknown:
        raise ConfigError(f"--size must be one of {', '.join(SIZES)}, got {unknown[0]!r}")
    definitions = find_definitions(everything or folder, definition or "", op_type or "")
    settings: dict[str, Any] = {"device": device, "seed": seed, "tolerance": tolerance,
                                "as_is": as_is}
    with References(trust or (), timeout) as references:
        if write_tests is not None:
            raise typer.Exit(_write_tests(write_tests, definitions, references, settings, as_json))
        reports = _verify_all(definitions, references, tuple(size or ("small",)), workloads,
                              settings, not as_json)
    written = write(traces, reports, device) if traces is not None else []
    raise typer.Exit(_show_result(reports, written, as_json))


def _write_tests(folder: Path, definitions: Sequence[Definition], references: References,
                 settings: dict[str, Any], as_json: bool) -> int:
    """Write a test file per definition, in the reading that its trusted reference confirms, else
    the likeliest.
    """
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
    return 1 if counts["failed"] or counts["disputed"] else 0
