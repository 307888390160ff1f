"""`lz ready`: whether this machine may serve, as an exit code and a report for people."""

from __future__ import annotations

from pathlib import Path

from ....operate.readiness import OK, Readiness, ReadinessCheck, current_world
from ....plan.readiness import readiness_check
from ... import show
from ...calls import calls_of
from ...options import Source

_MARKS = {OK: "ok", "warning": "~~", "fail": "!!"}


def ready(source: Source, table: Path | None, lock: Path | None, capabilities: Path | None,
          device: str | None, strict: bool, as_json: bool) -> int:
    report = check(source, table, lock, capabilities, device)
    show.as_json(report.to_json()) if as_json else _show(report)
    return 0 if report.ok and not (strict and report.warnings) else 1


def check(source: Source, table: Path | None, lock: Path | None, capabilities: Path | None,
          device: str | None) -> Readiness:
    """Return the readiness report of `lz ready` and `lz serve-metrics`."""
    world = current_world()
    if isinstance(world, Readiness):           # the policy cannot be loaded
        return world
    return readiness_check(calls_of(source, device), device, table=table, lock=lock,
                           capabilities=capabilities)


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
