"""`lz tune`: time the kernels that may serve; selection uses the measurements from then on."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ...machine import hardware
from ...operate.inspection import dispatcher_of
from ...spec.call import Call
from ...spec.errors import ConfigError
from ...tuning import tuner
from ...tuning.report import Tuned, TuneReport, label
from ...tuning.workload import calls_for
from .. import show
from ..arguments import parse_call
from ..options import Batch, CallsFile, Context, DeviceKind, Json, Model, Prompt, check_calls_file

AND = "and"                                    # between the shapes of two calls


def tune(
    op: Annotated[str | None,
                  typer.Argument(metavar="[OP]",
                                 help="an operation: its cases, or these shapes")] = None,
    words: Annotated[list[str] | None, typer.Argument(
        metavar="[SHAPE...]",
        help="query=1x32x1x128 is_causal=true ...; several calls: x=8x64 and x=512x64")] = None,
    calls: CallsFile = None,
    model: Model = None,
    seconds: Annotated[float | None,
                       typer.Option(help="stop after about so long; run again to go on")] = None,
    again: Annotated[bool, typer.Option("--again", help="also what was measured before")] = False,
    mode: Annotated[list[str] | None, typer.Option(
        help="eager, captured (in a CUDA graph) or compiled (by torch.compile), each measured and "
             "chosen apart; may be given several times. Default: eager, and on a GPU captured too")] = None,
    cold: Annotated[bool, typer.Option(
        "--cold", help="overwrite the last cache before each eager call, instead of calls back to "
                       "back")] = False,
    compiling: Annotated[bool, typer.Option(
        "--compile/--no-compile", help="also kernels that have to be compiled first")] = True,
    rounds: Annotated[int, typer.Option(help="the most samples of one kernel in one kind of call")] = tuner.ROUNDS,
    dtype: Annotated[str, typer.Option(help="of the shapes, the cases or the model; auto: bfloat16 "
                                       "where the device computes in it, else float32")] = "bfloat16",
    device: DeviceKind = None,
    batch: Batch = 1, prompt: Prompt = 512, context: Context = 4096,
    as_json: Json = False,
) -> None:
    """Time every kernel that may serve, keep the times, and choose by them from then on.

    Without any of OP, --calls and --model: the standard workload. Exit code 1 if nothing could be
    tuned.
    """
    sources = [name for name, value in (("OP", op), ("--calls", calls), ("--model", model))
               if value is not None]
    if len(sources) > 1:
        raise ConfigError(
            f"lz tune takes one of OP, --calls and --model, got {' and '.join(sources)}")
    check_calls_file(calls)
    if dtype == "auto":
        dtype = ("bfloat16" if hardware.probe(device or hardware.main_kind()).supports_bf16
                 else "float32")
    if op is not None and words:
        workload = _parse_calls(op, words, dtype)
    else:
        workload = calls_for(op or calls or model or "standard", dtype=dtype, batch=batch,
                             prompt=prompt,
                             context=context)
    columns = (TextColumn("{task.description:<50.50}", markup=False), BarColumn(),
               MofNCompleteColumn(),
               TimeElapsedColumn(), TimeRemainingColumn())
    with show.progress(*columns) as update:
        def progress(done: int, total: int, description: str) -> None:
            update(completed=done, total=total, description=description)

        report = tuner.tune(workload, device=device, seconds=seconds, rounds=rounds, again=again,
                            mode=mode, cold=cold,
                            compile=compiling, progress=progress)
    show.as_json(report.to_json()) if as_json else _show(report)
    if report.stopped == "interrupted":
        raise typer.Exit(130)
    raise typer.Exit(0 if report.tuned or report.already or report.left else 1)


def _parse_calls(op: str, words: list[str], dtype: str) -> tuple[Call, ...]:
    """Parse the calls on the command line, with `and` between them."""
    groups: list[list[str]] = [[]]
    for word in words:
        groups[-1].append(word) if word != AND else groups.append([])
    declared = dispatcher_of(op).op
    return tuple(call for group in groups
                 for call in calls_for(op, arguments=parse_call(declared, group, dtype)))


def _show(report: TuneReport) -> None:
    if report.tuned:
        show.table(("kernel", "us", "over torch", "roofline", "how sure", "before", "call"),
                   [_row(t) for t in report.tuned], right=("us", "over torch", "roofline"))
    if any(t.roofline is not None and t.roofline > 1.0 for t in report.tuned):
        show.text("A roofline above 100% is that of memory, for data that came from a cache.")
    for t in report.tuned:
        for kernel, reason in t.failed.items():
            show.text(f"{kernel} failed for {t.label}: {reason.message}")
        if t.no_time_for:
            show.text(f"{t.label}: no time for {', '.join(t.no_time_for)}; tune again to go on")
        if t.chosen not in (t.best, *t.tied):
            show.text(f"{t.label}: {t.chosen} is chosen all the same; lz explain says why")
    for skipped in report.skipped:
        show.text(f"skipped {label(skipped.call)}: {skipped.reason}")
    compiled: dict[str, float] = {}
    for k in (k for t in report.tuned for k in t.kernels if k.compile_us):
        compiled[k.kernel] = compiled.get(k.kernel, 0.0) + k.compile_us / 1e6
    if compiled:
        show.text("Compiled first, apart from the times: "
                  + ", ".join(f"{kernel} {seconds:.1f} s" for kernel, seconds in compiled.items()))
    for rates in report.rates.values():
        show.text(
            f"This device at best: {rates.flops_per_us / 1e6:.2f} TFLOP/s, "
            f"{rates.bytes_per_us / 1e3:.1f} GB/s.")
    show.text(report.closing + ".")


def _row(t: Tuned) -> tuple[str, ...]:
    gain = "" if t.gain is None else "itself" if t.baseline == t.best else str(t.gain)
    return (t.best, f"{t.winner.summary.median:.2f}", gain, "" if t.roofline is None
            else f"{t.roofline:.0%}", "tie" if t.tied else t.certainty,
            "same" if t.before == t.chosen else t.before or "none",
            f"{t.call.op} {t.family} {t.sizes}")
