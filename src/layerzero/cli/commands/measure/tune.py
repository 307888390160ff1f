"""`lz tune`: time the kernels that may serve; selection uses the measurements from then on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ....tuning import fleet, tuner
from ....tuning.report import Tuned, TuneReport, label
from ... import show
from ...calls import calls_of
from ...options import Source
from ...root import INTERRUPTED


def tune(source: Source, *, device: str | None = None, seconds: float | None = None,
         again: bool = False, mode: Sequence[str] | None = None, cold: bool = False,
         compiling: bool = True, rounds: int | None = None, ray: str | None = None,
         as_json: bool = False) -> int:
    # the devices of a cluster are not those of this machine
    workload = calls_of(source, None if ray else device, "standard")
    on_cluster = {"address": ray} if ray else {}
    columns = (TextColumn("{task.description:<50.50}", markup=False), BarColumn(),
               MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with show.progress(*columns) as update:
        def progress(done: int, total: int, description: str) -> None:
            update(completed=done, total=total, description=description)

        run: Any = fleet.tune_fleet if ray else tuner.tune
        report: TuneReport = run(
            workload, device=device, seconds=seconds, again=again, mode=mode, cold=cold,
            rounds=tuner.ROUNDS if rounds is None else rounds, compile=compiling,
            progress=progress, **on_cluster)
    show.as_json(report.to_json()) if as_json else _show(report)
    if report.stopped == "interrupted":
        return INTERRUPTED
    return 0 if report.tuned or report.already or report.left else 1


def _show(report: TuneReport) -> None:
    if report.tuned:
        show.table(("kernel", "us", "over torch", "roofline", "how sure", "before", "call"),
                   [_row(t) for t in report.tuned], right=("us", "over torch", "roofline"))
    if any(t.roofline is not None and t.roofline > 1.0 for t in report.tuned):
        show.text("A roofline above 100%: the data came from a cache, or other programs kept the "
                  "device busy while its peak was measured.")
    for t in report.tuned:
        for kernel, reason in t.failed.items():
            show.text(f"{kernel} failed for {t.label}: {reason.message}")
        if t.no_time_for:
            show.text(f"{t.label}: no time for {', '.join(t.no_time_for)}; tune again, with "
                      "more --seconds if it has to be compiled")
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
    on_fleet = isinstance(report, fleet.FleetReport)
    for place, rates in report.rates.items():
        gflops = rates.flops_per_us / 1e3
        compute = f"{gflops / 1e3:.1f} TFLOP/s" if gflops >= 1e3 else f"{gflops:.0f} GFLOP/s"
        show.text(f"{place if on_fleet else 'This device'} at best: {compute}, "
                  f"{rates.bytes_per_us / 1e3:.1f} GB/s.")
    if isinstance(report, fleet.FleetReport):
        show.table(("node", "device", "place", "tuned", ""), [
            (m.node, m.device, m.place, str(m.tuned), m.problem) for m in report.machines],
            right=("tuned",))
    show.text(report.closing + ".")


def _row(t: Tuned) -> tuple[str, ...]:
    gain = "" if t.gain is None else "itself" if t.baseline == t.best else str(t.gain)
    return (t.best, f"{t.winner.summary.median:.2f}", gain, "" if t.roofline is None
            else f"{t.roofline:.0%}", "tie" if t.tied else t.certainty,
            "same" if t.before == t.chosen else t.before or "none",
            f"{t.call.op} {t.family} {t.sizes}")
