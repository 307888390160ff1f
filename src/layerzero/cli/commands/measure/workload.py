"""`lz record` writes the calls of a program; `lz regret` measures what the choices cost."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from ....files.calls import write_calls
from ....machine import hardware
from ....operate.recording import VARIABLE
from ....spec.call import Call
from ....spec.display import plural
from ....tuning import regret as regrets
from ....tuning.workload import read_recordings
from ... import show
from ...calls import calls_of, device_kind
from ...options import Source

SHOWN = 25
GRACE_SECONDS = 10.0                           # for an interrupted command to end by itself


def record(command: Sequence[str], out: Path, as_json: bool) -> int:
    """Run the command and write its calls; returns its exit code, or 1 where it made no call."""
    code, calls = record_calls(command)
    if calls:
        write_calls(out, calls)
    next_step = f"lz tune --calls {shlex.quote(str(out))}"
    if as_json:                                # one line: stdout is the command's too
        print(json.dumps({"path": str(out) if calls else None, "command_exit": code,
                          "kinds": len(calls), "calls": sum(call.count for call in calls),
                          "next": next_step if calls else None}))
    elif calls:
        _report(calls, out, next_step)
    if not calls:
        print(f"lz record: no lz call was made; {out} was not written", file=sys.stderr)
    return code if calls else code or 1


def record_calls(command: Sequence[str]) -> tuple[int, tuple[Call, ...]]:
    """Run a command; returns its exit code, and the lz calls of all its processes."""
    with tempfile.TemporaryDirectory(prefix="lz-record-") as folder:
        return _run(command, folder), read_recordings(Path(folder))


def _run(command: Sequence[str], folder: str) -> int:
    """Run the command. An interrupt is passed on; one that does not end by it, or is interrupted
    again, is ended."""
    process = subprocess.Popen(command, env={**os.environ, VARIABLE: folder})
    ways_to_end = iter((partial(_pass_on_interrupt, process), process.terminate))
    seconds = None
    while True:
        try:
            code = process.wait(seconds)
            # ended by a signal: the code a shell gives
            return code if code >= 0 else 128 - code
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            seconds = GRACE_SECONDS
            next(ways_to_end, process.kill)()


def _pass_on_interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process, unless it has got the signal itself: a terminal sends it to all."""
    try:
        with open("/dev/tty", "rb") as terminal:
            has_got_it = os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:                            # there is no terminal
        has_got_it = sys.platform == "win32"
    if not has_got_it:
        process.send_signal(signal.SIGINT)


def _report(calls: tuple[Call, ...], out: Path, next_step: str) -> None:
    kinds, times = Counter(c.op for c in calls), Counter({c.op: 0 for c in calls})
    for call in calls:
        times[call.op] += call.count
    served: dict[str, list[str]] = {}
    for call in calls:
        served.setdefault(call.op, []).extend(part for part in call.name.split("; ") if part)
    err = show.console(sys.stderr)             # stdout is the command's
    for op, n in times.most_common():
        err.print(f"{op}: {plural(n, 'call')} of {plural(kinds[op], 'kind')}, "
                  f"{', '.join(dict.fromkeys(served[op]))}", markup=False)
    err.print(f"{plural(len(calls), 'kind')} of call: {out}. Next: {next_step}", markup=False)


def regret(source: Source, *, device: str | None, seconds: float, mode: str,
           max_median: float | None, max_p95: float | None, everything: bool, as_json: bool) -> int:
    median = regrets.MAX_MEDIAN if max_median is None else max_median
    p95 = regrets.MAX_P95 if max_p95 is None else max_p95
    workload, kind = calls_of(source, device, "standard"), device_kind(device)
    columns = (TextColumn("{task.description:<24}", markup=False), BarColumn(),
               MofNCompleteColumn(), TimeElapsedColumn())
    done = itertools.count()
    with show.progress(*columns, total=len(workload)) as update:
        def advance(call: Call) -> None:
            update(description=call.op, completed=next(done))

        report = regrets.replay(workload, seconds=seconds, device=kind, mode=mode, advance=advance)
    problems = report.problems(median, p95)
    if as_json:
        show.as_json({"ok": not problems, "problems": list(problems), "device": kind, "mode": mode,
                      "limits": {"median": median, "p95": p95}, **report.to_json()})
    else:
        show_regret(report, hardware.probe(kind).name, len(report.rows) if everything else SHOWN)
        for problem in problems:
            show.text(f"!!  {problem}")
    return 1 if problems else 0


def show_regret(report: regrets.RegretReport, device: str, limit: int) -> None:
    """Print the calls with the greatest regret on this device, and the totals of the workload."""
    worst = sorted(report.rows, key=lambda row: row.regret, reverse=True)[:limit]
    show.heading(f"Regret of {plural(len(report.rows), 'call')} on {device}" + (
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
