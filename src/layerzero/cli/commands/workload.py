"""`lz record` writes down the calls of a program; `lz regret` measures what the choices for them
cost.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from ...machine import hardware
from ...operate.recording import VARIABLE
from ...perf.record import EAGER
from ...spec.call import Call, write_calls
from ...spec.errors import ConfigError
from ...tuning import regret as regrets
from ...tuning.workload import calls_for, read_recordings
from .. import show
from ..options import (
    Batch,
    CallsFile,
    Context,
    DeviceKind,
    Json,
    Model,
    OpCases,
    Prompt,
    check_calls_file,
)

# Arguments after the options belong to the recorded command.
PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
SHOWN = 25


def record(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...",
                                                 help="python app.py --its-own options")],
    out: Annotated[Path, typer.Option("--out", "-o", help="the file of calls, one a line")] = Path(
        "calls.jsonl"),
) -> None:
    """Run a command and write down every lz call that it and its child processes make, with counts.

    The exit code is the command's own; 1 where it went well and made no call.
    """
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist; make it first")
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(
            f"there is no command {command[0]!r}; write it like: lz record -- python app.py")
    with tempfile.TemporaryDirectory(prefix="lz-record-") as folder:
        code = _run([program, *command[1:]], folder)
        calls = read_recordings(Path(folder))
    if not calls:
        print(f"lz record: no lz call was made; {out} was not written", file=sys.stderr)
        raise typer.Exit(code or 1)
    write_calls(out, calls)
    _report(calls, out)
    raise typer.Exit(code)


def _run(command: list[str], folder: str) -> int:
    process = subprocess.Popen(command, env={**os.environ, VARIABLE: folder})
    while True:
        try:
            code = process.wait()
            # ended by a signal: the code a shell gives
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:              # the command got it too, and may finish its work
            continue


def _report(calls: tuple[Call, ...], out: Path) -> None:
    kinds, times = Counter(c.op for c in calls), Counter({c.op: 0 for c in calls})
    for call in calls:
        times[call.op] += call.count
    served: dict[str, list[str]] = {}
    for call in calls:
        served.setdefault(call.op, []).extend(part for part in call.name.split("; ") if part)
    err = show.console(sys.stderr)             # stdout is the command's
    for op, n in times.most_common():
        err.print(f"{op}: {n} calls of {kinds[op]} kinds, {', '.join(dict.fromkeys(served[op]))}",
                  markup=False)
    err.print(
        f"{len(calls)} kinds of call are in {out}. Next: lz tune, then lz regret --calls {out}",
        markup=False)


def regret(
    calls: CallsFile = None,
    model: Model = None,
    op: OpCases = None,
    standard: Annotated[bool, typer.Option("--standard",
                                           help="the standard workload, also by default")] = False,
    seconds_per_call: Annotated[float, typer.Option(help="time to spend on each call")] = 0.5,
    mode: Annotated[str,
                    typer.Option(
                        help="eager, captured (in a CUDA graph) or compiled (by torch.compile)")] = EAGER,
    max_median: Annotated[float, typer.Option(help="fail above this median regret")] = regrets.MAX_MEDIAN,
    max_p95: Annotated[float, typer.Option("--max-p95", help="fail above this 95th percentile")] = regrets.MAX_P95,
    batch: Batch = 1, prompt: Prompt = 512, context: Context = 4096,
    scale: Annotated[float, typer.Option(help="of --model: make it narrower, 0.125 for an eighth")] = 1.0,
    dtype: Annotated[str, typer.Option(help="of --model and --op")] = "bfloat16",
    device: DeviceKind = None,
    everything: Annotated[bool, typer.Option("--all", help="show every call, not the worst ones "
                                                           "only")] = False,
    as_json: Json = False,
) -> None:
    """Replay calls: the chosen kernel against every other, in turns.

    Exit code 1 if the choices are not good enough.
    """
    sources = [source for source in (calls, model, op, "standard" if standard else None)
               if source is not None]
    if len(sources) > 1:
        raise ConfigError(
            "give one of --calls, --model, --op and --standard, got "
            f"{' and '.join(map(str, sources))}")
    check_calls_file(calls)
    workload = calls_for(sources[0] if sources else "standard", batch=batch, prompt=prompt,
                         context=context,
                         scale=scale, dtype=dtype)
    kind = hardware.probe(device).type if device else hardware.main_kind()
    columns = (TextColumn("{task.description:<24}", markup=False), BarColumn(),
               MofNCompleteColumn(),
               TimeElapsedColumn())
    done = itertools.count()
    with show.progress(*columns, total=len(workload)) as update:
        def advance(call: Call) -> None:
            update(description=call.op, completed=next(done))

        report = regrets.replay(workload, seconds=seconds_per_call, device=kind, mode=mode,
                                advance=advance)
    problems = report.problems(max_median, max_p95)
    if as_json:
        show.as_json({"ok": not problems, "problems": list(problems), "device": kind, "mode": mode,
                      "limits": {
            "median": max_median, "p95": max_p95}, **report.to_json()})
    else:
        show_report(report, len(report.rows) if everything else SHOWN)
        for problem in problems:
            show.text(f"!!  {problem}")
    raise typer.Exit(1 if problems else 0)


def show_report(report: regrets.RegretReport, most: int = SHOWN) -> None:
    """Print the calls with the greatest regret, and the totals of the workload."""
    worst = sorted(report.rows, key=lambda row: row.regret, reverse=True)[:most]
    show.heading(f"Regret of {len(report.rows)} calls on {report.place}" + (
        f", the {len(worst)} greatest" if len(worst) < len(report.rows) else ""))
    numbers = ("times", "us", "best us", "regret", "over torch")
    show.table(("call", "times", "chosen", "us", "best", "best us", "regret", "over torch"), [(
        row.label, str(row.call.count), row.chosen, f"{row.us(row.chosen):.1f}",
        row.best if row.best != row.chosen else "the same", f"{row.us(row.best):.1f}",
        f"{row.regret:.1%}", f"{row.gain:.2f}x" if row.gain else "-") for row in worst],
               right=numbers)
    for skipped in report.skipped:
        show.text(f"skipped: {skipped.call.op} ({skipped.call.name or 'no name'}): {skipped.why}")
    show.heading("In all")
    show.table(("", "each call once", "as often as it came"), [
        ("median regret", f"{report.regret(0.5):.1%}", f"{report.regret(0.5, True):.1%}"),
        ("p95 regret", f"{report.regret(0.95):.1%}", f"{report.regret(0.95, True):.1%}"),
        ("worse than torch's default by 3 %", f"{report.worse():.1%}", f"{report.worse(True):.1%}"),
        ("gain over torch's default, geometric mean", f"{report.gain():.2f}x",
         f"{report.gain(True):.2f}x"),
        ("time lost against the best choices", "", f"{report.lost:.1%}"),
        ("another winner in the second half", f"{len(report.flips)} of {len(report.rows)}",
         f"{len(report.flips_that_matter)} between unequal kernels")],
               right=("each call once", "as often as it came"))
