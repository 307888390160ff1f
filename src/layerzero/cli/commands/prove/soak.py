"""`lz soak`: hours of mixed calls under faults; fails on wrong answers or growth."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ....release.soak import SoakReport, SoakSample, soak
from ....release.soak_load import WRONG, Tally
from ....spec.display import plural
from ... import show
from ...calls import device_kind
from ...root import INTERRUPTED

LINE_SECONDS = 30.0                            # between lines without a terminal


def command(requested: float, resume: Path | None, out: Path | None, *, threads: int, faults: float,
            forks: bool, ops: tuple[str, ...], device: str | None, as_json: bool) -> int:
    """Soak for `requested` seconds, or what `resume` was to run longer; returns the exit code."""
    report = SoakReport.load(resume) if resume is not None else None
    seconds = requested or (report.target_seconds - report.seconds if report is not None else 0.0)
    if report is None:
        report = SoakReport(seconds)
    elif requested:
        report.target_seconds = max(report.target_seconds, report.seconds + requested)
    path = out or resume or Path("soak.json")
    if seconds > 1:                            # else the report is complete, and only shown
        with _sigterm_as_interrupt():
            _run(report, seconds, path, as_json, device=device_kind(device), threads=threads,
                 rate=faults, forks=forks, ops=ops, seed=len(report.parts))
    if as_json:
        show.as_json(report.to_json())
    else:
        show_report(report)
        show.text(f"report: {path}" + ("" if report.complete
                                       else f"; lz soak --resume {path} goes on"))
    interrupted = bool(report.parts) and report.parts[-1].interrupted
    return 1 if not report.passed else INTERRUPTED if interrupted else 0


def _run(report: SoakReport, seconds: float, path: Path, quiet: bool, **options: Any) -> None:
    out, last_line = show.console(), [0.0]

    def wrong(tally: Tally) -> int:
        return sum(tally.counts[kind] for kind in WRONG)

    def line(sample: SoakSample, tally: Tally) -> str:
        return (f"{sample.calls} calls, {wrong(tally)} failures, RSS {sample.rss_mib:.0f} MiB, "
                f"p50 {sample.p50_us:.1f} us, p99 {sample.p99_us:.1f} us")

    if quiet or not out.is_terminal:
        def say(sample: SoakSample, tally: Tally) -> None:
            if not quiet and (sample.at - last_line[0] >= LINE_SECONDS or sample.at >= seconds):
                last_line[0] = sample.at
                print(f"{sample.at / 60:6.1f} min  {line(sample, tally)}", flush=True)

        soak(seconds, report=report, out=path, say=say, **options)
        return
    with Progress(TextColumn("soak"), BarColumn(), TimeRemainingColumn(),
                  TextColumn("{task.description}"), console=out, transient=True) as bar:
        task = bar.add_task("", total=seconds)
        soak(seconds, report=report, out=path, **options, say=lambda sample, tally: bar.update(
            task, completed=sample.at, description=line(sample, tally)))


def show_report(report: SoakReport) -> None:
    """Print the counts, each series with its slope and its bound, and the failures."""
    counts = report.counts
    show.text(
        f"{report.seconds / 60:.1f} of {report.target_seconds / 60:.1f} minutes in "
        f"{plural(len(report.parts), 'part')}: "
        + ", ".join(f"{n} {name}" for name, n in counts.items() if not name.startswith("event ")))
    events = ", ".join(f"{n} {name[6:]}" for name, n in sorted(counts.items())
                       if name.startswith("event "))
    show.text(f"events: {events or 'none'}")
    for note in dict.fromkeys(note for part in report.parts for note in part.notes):
        show.text(note)
    rows = []
    for s in report.series:
        slope = f"{s.trend.per_hour:+.3g}" if s.trend is not None else "-"
        interval = f"{s.trend.low:+.3g} to {s.trend.high:+.3g}" if s.trend is not None else "-"
        label = f"{s.name} ({s.unit})" if s.unit else s.name
        rows.append(("!!" if not s.passed else "ok" if s.judged else "--", label,
                     f"{s.first:.4g}", f"{s.last:.4g}", slope, interval, f"{s.most:.3g}",
                     "" if s.judged else "too short to judge a slope"))
    show.table(("", "series", "first", "last", "per hour", "95 % of", "at most", ""), rows,
               right=("first", "last", "per hour", "at most"))
    for text in report.failures[:10]:
        show.text(f"!!  {text}")
    show.text("passed" if report.passed else "FAILED")


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the soak as Ctrl-C does, with its report written."""
    # Python handles signals only there
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
