"""Measuring: which kernel is fastest here, and what the choices cost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ...spec.errors import ConfigError
from .. import options as o
from ..root import app, declare, group

PANEL = "Measure what is fastest here"
MODES = ("eager", "captured", "compiled")
# Arguments after the options belong to the recorded command.
PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}

Command = Annotated[list[str], typer.Argument(
    metavar="-- COMMAND", help="python app.py --its-own options")]
KernelPattern = Annotated[str, typer.Option(
    "--kernel", help="only kernels whose id matches, such as torch.*")]

perf = group("What was measured here: show, prune, export, import.")
app.add_typer(perf, name="perf", rich_help_panel=PANEL)


@declare(PANEL, "lz demo --seconds 20",
         short="A decoder block through lz and plain torch: what is gained.")
def demo(seconds: Annotated[float, typer.Option(
             min=0.0, help="the time for all of it; what does not fit is left out")] = 45.0,
         device: o.DeviceKind = None, as_json: o.Json = False) -> None:
    """A decoder block through lz and through plain torch: who serves, why, is it equal, what is
    gained."""
    from ..commands.measure.demo import demo as run
    raise typer.Exit(run(device, seconds, as_json))


@declare(PANEL, "lz record -o calls.jsonl -- python app.py", context_settings=PASS_ON,
         short="Run a program and write down the lz calls it makes.")
def record(command: Command, out: Annotated[Path, typer.Option(
               "--out", "-o", help="the file of calls, one a line")] = Path("calls.jsonl"),
           as_json: o.Json = False) -> None:
    """Run a command and write down every lz call that it and its child processes make, with counts.

    The exit code is the command's own; 1 where it went well and made no call. With --json the
    object is the last line of stdout, after what the command printed.
    """
    o.check_out("--out", out)
    program = check_program(command, "lz record")
    from ..commands.measure.workload import record as run
    raise typer.Exit(run(program, out, as_json))


@declare(PANEL, "lz tune --calls calls.jsonl --seconds 60",
         short="Time the kernels that may serve; choose by that from then on.")
def tune(
    op: o.SomeOp = None, words: o.Shapes = None, calls: o.CallsFile = None, model: o.Model = None,
    seconds: Annotated[float | None, typer.Option(
        min=0.0, help="stop after about this many seconds; run again to continue")] = None,
    again: Annotated[bool, typer.Option("--again", help="also what was measured before")] = False,
    mode: Annotated[list[str] | None, typer.Option(help=(
        "eager, captured (in a CUDA graph) or compiled (by torch.compile), each measured and "
        "chosen apart; may be given several times. Default: eager, and on a GPU captured "
        "too"))] = None,
    cold: Annotated[bool, typer.Option("--cold", help=(
        "overwrite the last cache before each eager call, instead of calls back to back"))] = False,
    compiling: Annotated[bool, typer.Option(
        "--compile/--no-compile", help="also kernels that have to be compiled first")] = True,
    rounds: Annotated[int | None, typer.Option(min=1, help=(
        "the most samples of one kernel in one kind of call"))] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help=(
        "tune on all nodes of this Ray cluster; auto: the one that runs on this machine"))] = None,
    dtype: o.Dtype = "bfloat16", device: o.DeviceKind = None, batch: o.Batch = 1,
    prompt: o.Prompt = 512, context: o.Context = 4096, as_json: o.Json = False,
) -> None:
    """Time every kernel that may serve, keep the times, and choose by them from then on.

    Without any of OP, --calls and --model: the standard workload. Exit code 1 if nothing could be
    tuned.
    """
    source = o.Source(op, words or (), calls, model, dtype=dtype, batch=batch, prompt=prompt,
                    context=context).check("lz tune", needed=False)
    for name in mode or ():
        _check_mode(name)
    from ..commands.measure.tune import tune as run
    raise typer.Exit(run(source, device=device, seconds=seconds, again=again, mode=mode or None,
                         cold=cold, compiling=compiling, rounds=rounds, ray=ray, as_json=as_json))


@declare(PANEL, "lz regret --calls calls.jsonl",
         short="Replay calls: how far is each choice behind the best?")
def regret(
    op: o.SomeOp = None, words: o.Shapes = None, calls: o.CallsFile = None, model: o.Model = None,
    seconds_per_call: Annotated[float, typer.Option(
        min=0.0, help="time to spend on each call")] = 0.5,
    mode: Annotated[str, typer.Option(help=(
        "eager, captured (in a CUDA graph) or compiled (by torch.compile)"))] = "eager",
    max_median: Annotated[float | None, typer.Option(help=(
        "fail above this median regret; default: 0.02"))] = None,
    max_p95: Annotated[float | None, typer.Option("--max-p95", help=(
        "fail above this 95th percentile; default: 0.08"))] = None,
    scale: Annotated[float, typer.Option(help=(
        "with --model: make it narrower, 0.125 for an eighth"))] = 1.0,
    dtype: o.Dtype = "bfloat16", device: o.DeviceKind = None, batch: o.Batch = 1,
    prompt: o.Prompt = 512, context: o.Context = 4096,
    everything: Annotated[bool, typer.Option(
        "--all", help="show every call, not the worst ones only")] = False,
    as_json: o.Json = False,
) -> None:
    """Replay calls: the chosen kernel against every other, in turns.

    Without any of OP, --calls and --model: the standard workload. Exit code 1 if the choices are
    not good enough.
    """
    source = o.Source(op, words or (), calls, model, dtype=dtype, batch=batch, prompt=prompt,
                    context=context, scale=scale).check("lz regret", needed=False)
    _check_mode(mode)
    from ..commands.measure.workload import regret as run
    raise typer.Exit(run(source, device=device, seconds=seconds_per_call, mode=mode,
                         max_median=max_median,
                         max_p95=max_p95, everything=everything, as_json=as_json))


@declare(PANEL, "lz report -o report.html", short="Write what was measured here as one HTML page.")
def report(
    out: Annotated[Path | None, typer.Option("--out", "-o", help=(
        "the page; replaced if it exists; -: to stdout. Default: report.html, with --json none"))
    ] = None,
    regret: Annotated[Path | None, typer.Option(
        "--regret", help="a file of lz regret --json, to be shown too")] = None,
    device: o.DeviceKind = None, calls: o.CallsFile = None, model: o.Model = None,
    dtype: o.Dtype = o.AUTO, batch: o.Batch = 1, prompt: o.Prompt = 512,
    context: o.Context = 4096,
    against: Annotated[list[Path] | None, typer.Option("--against", help=(
        "an earlier lz report --json: what changed since; may be given several times: all are "
        "drawn over time, the newest is compared"))] = None,
    as_json: o.Json = False,
) -> None:
    """Write one HTML page: what was gained, where the time goes and is lost, and what to run next.

    Every number is weighted by the calls of --calls or --model; without them each measured kind of
    call counts once. --json prints what a later --against reads.
    """
    if out != o.STDOUT:
        o.check_out("--out", out)
    elif as_json:
        raise ConfigError("--out - and --json: both would print to stdout; give one of them")
    o.check_file("--regret", regret, "lz regret --json > regret.json writes one")
    o.check_file("--calls", calls, "lz record -- python app.py writes one")
    for path in against or ():
        o.check_file("--against", path, "lz report --json > report.json writes one")
    from ..commands.measure.report import report as run
    raise typer.Exit(run(out, regret, device, calls, model, dtype, batch, prompt, context,
                         against or (), as_json))


@declare("", "lz perf show attention --all", "show", to=perf)
def show_rows(op: o.OnlyOp = None, kernel: KernelPattern = "*",
              everything: Annotated[bool, typer.Option(
                  "--all", help="also rows that do not count here")] = False,
              limit: Annotated[int, typer.Option(
                  min=0, help="at most this many rows; 0: all")] = 50,
              as_json: o.Json = False) -> None:
    """The measurements, and whether each still counts here: builds, drivers and toolkits change."""
    from ..commands.measure import perf as commands
    raise typer.Exit(commands.show_rows(kernel, op or "*", everything, limit, as_json))


@declare("", "lz perf places", "places", to=perf)
def show_places(as_json: o.Json = False) -> None:
    """The models of device that were measured, and the machines of each: those of one place share
    what they measured, and lz diff compares two places."""
    from ..commands.measure import perf as commands
    raise typer.Exit(commands.show_places(as_json))


@declare("", "lz perf prune --older-than 90 --dry-run", to=perf)
def prune(kernel: KernelPattern = "*",
          older_than: Annotated[float | None, typer.Option(
              help="also what is older than this many days")] = None,
          everything: Annotated[bool, typer.Option(
              "--all", help="everything, of other machines too")] = False,
          dry_run: Annotated[bool, typer.Option(
              "--dry-run", help="say what would go, and remove nothing")] = False,
          as_json: o.Json = False) -> None:
    """Remove what does not count any more: other builds, drivers or toolkits of this machine, what
    expired."""
    from ..commands.measure import perf as commands
    raise typer.Exit(commands.prune(kernel, older_than, everything, dry_run, as_json))


@declare("", "lz perf export here.jsonl", to=perf)
def export(path: Annotated[Path, typer.Argument(
    help="a file of JSON lines; replaced if it exists")],
           as_json: o.Json = False) -> None:
    """Write every measurement, its environment, and the rates of each device to a file."""
    from ..commands.measure import perf as commands
    raise typer.Exit(commands.export(path, as_json))


@declare("", "lz perf import there.jsonl", "import", to=perf)
def import_rows(paths: Annotated[list[Path], typer.Argument(
                    help="files of lz perf export, or other perf.sqlite")],
                as_json: o.Json = False) -> None:
    """Take over the measurements of other machines. Of two of the same thing the better one stays.
    """
    from ..commands.measure import perf as commands
    raise typer.Exit(commands.import_rows(paths, as_json))


def check_program(command: list[str], name: str) -> list[str]:
    """Return the command with the path of its program; there must be one."""
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"there is no command {command[0]!r}; write it like: {name} -- python "
                          "app.py")
    return [program, *command[1:]]


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ConfigError(f"mode must be of {', '.join(MODES)}, got {mode!r}")
