"""`lz warmup`: fill the caches of compiled code before serving processes start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...operate import warmup as warming
from ...operate.inspection import dispatcher_of
from ...plan.table import Table
from ...spec.call import Call
from ...spec.errors import ConfigError
from ...tuning.report import label
from ...tuning.workload import calls_for
from .. import show
from ..arguments import parse_call
from ..options import Batch, CallsFile, Context, DeviceKind, Json, Model, Prompt, check_calls_file


def warmup(
    op: Annotated[str | None, typer.Argument(metavar="[OP]",
                                             help="an operation: its cases, or this shape")] = None,
    words: Annotated[list[str] | None,
                     typer.Argument(metavar="[SHAPE...]",
                                    help="x=512x4096 weight=4096 ...")] = None,
    calls: CallsFile = None,
    table: Annotated[Path | None,
                     typer.Option("--table",
                                  help="a dispatch table, as lz solve writes it")] = None,
    model: Model = None,
    timeout: Annotated[float | None,
                       typer.Option(
                           help="seconds after which what is not ready is given up")] = None,
    dtype: Annotated[str, typer.Option(help="of the shape, the cases or the model")] = "bfloat16",
    device: DeviceKind = None,
    batch: Batch = 1, prompt: Prompt = 512, context: Context = 4096,
    as_json: Json = False,
) -> None:
    """Compile what these calls need, into caches that later processes find it in.

    Exit code 1 if a call is not ready, or is served by another kernel than was wanted.
    """
    options = {"OP": op, "--calls": calls, "--table": table, "--model": model}
    sources = [name for name, value in options.items() if value is not None]
    if len(sources) != 1:
        raise ConfigError(
            f"lz warmup takes one of {', '.join(options)}, got {' and '.join(sources) or 'none'}")
    check_calls_file(calls)
    workload: tuple[Call, ...]
    if table is not None:
        workload = tuple(artefact.call for artefact in Table.load(table).jit)
    elif op is not None and words:
        workload = calls_for(op, arguments=parse_call(dispatcher_of(op).op, words, dtype))
    else:
        workload = calls_for(op or calls or model or "", dtype=dtype, batch=batch, prompt=prompt,
                             context=context)
    report = warming.warmup(workload, timeout=timeout, device=device)
    show.as_json(report.to_json()) if as_json else _show(report)
    raise typer.Exit(0 if report.ok else 1)


def _show(report: warming.WarmupReport) -> None:
    show.table(("call", "state", "kernel", "compiled in", "why"), [(
        label(o.call), o.state, o.kernel, f"{o.seconds:.1f} s" if o.compiled else "",
        "; ".join(filter(None,
                         (o.why, *(f"not {kernel}: {why}" for kernel, why in o.left_out.items())))))
        for o in report.outcomes])
    show.text(str(report).splitlines()[0])
