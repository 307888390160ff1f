"""`lz ready`: whether this machine may serve, as an exit code for an orchestrator and a report for
people.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...operate.readiness import OK, Readiness, ReadinessCheck, current_world
from ...plan.readiness import readiness_check
from ...spec.call import Call
from ...spec.errors import ConfigError
from ...tuning.workload import calls_for
from .. import show
from ..options import Batch, CallsFile, Context, DeviceKind, Json, Model, Prompt, check_calls_file

TableFile = Annotated[Path | None,
                      typer.Option("--table", help="a dispatch table, as lz solve writes it")]
LockFile = Annotated[Path | None, typer.Option("--lock", help="a lockfile, as lz lock writes it")]
CapabilitiesFile = Annotated[Path | None,
                             typer.Option("--capabilities", help="a capabilities.json to be used")]
_MARKS = {OK: "ok", "warning": "~~", "fail": "!!"}


def ready(
    calls: CallsFile = None, model: Model = None, table: TableFile = None, lock: LockFile = None,
    capabilities: CapabilitiesFile = None,
    strict: Annotated[bool, typer.Option("--strict", help="a warning counts as a failure")] = False,
    dtype: Annotated[str, typer.Option(help="of --model")] = "bfloat16",
    device: DeviceKind = None, batch: Batch = 1, prompt: Prompt = 512, context: Context = 4096,
    as_json: Json = False,
) -> None:
    """May this machine serve? Nothing is run or written.

    Exit code 0: ready, 1: not ready, 2: a wrong question.
    """
    report = check(calls, model, table, lock, capabilities, device, dtype, batch, prompt, context)
    show.as_json(report.to_json()) if as_json else _show(report)
    raise typer.Exit(0 if report.ok and not (strict and report.warnings) else 1)


def check(calls: Path | None, model: str | None, table: Path | None, lock: Path | None,
          capabilities: Path | None, device: str | None, dtype: str = "bfloat16", batch: int = 1,
          prompt: int = 512, context: int = 4096) -> Readiness:
    """Return the readiness report of `lz ready` and `lz serve-metrics`."""
    if calls is not None and model is not None:
        raise ConfigError("give --calls or --model, got both")
    check_calls_file(calls)
    world = current_world()
    if isinstance(world, Readiness):           # the policy cannot be loaded
        return world
    source = calls or model
    workload: tuple[Call, ...] = (calls_for(source, dtype=dtype, batch=batch, prompt=prompt,
                                            context=context) \
         if source is not None else ())
    return readiness_check(workload, device, table=table, lock=lock, capabilities=capabilities)


def _show(report: Readiness) -> None:
    show.table(("", "check", "found", "do"), [
        (_MARKS[c.state], c.name, _result_text(c), c.hint) for c in report.checks])
    for c in report.checks:
        if c.details:
            show.heading(c.name)
            for line in c.details:
                show.text(f"  {line}")
    show.heading(str(report).splitlines()[0])


def _result_text(c: ReadinessCheck) -> str:
    return c.got if c.state == OK else f"{c.got} (wanted: {c.want})"
