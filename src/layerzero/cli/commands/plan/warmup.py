"""`lz warmup`: fill the caches of compiled code before serving processes start."""

from __future__ import annotations

from ....operate import warmup as warming
from ....tuning.report import label
from ... import show
from ...calls import calls_of
from ...options import Source


def warmup(source: Source, device: str | None, timeout: float | None, as_json: bool) -> int:
    report = warming.warmup(calls_of(source, device), timeout=timeout, device=device)
    show.as_json(report.to_json()) if as_json else _show(report)
    return 0 if report.ok else 1


def _show(report: warming.WarmupReport) -> None:
    show.table(("call", "state", "kernel", "compiled in", "why"), [(
        label(o.call), o.state, o.kernel, f"{o.seconds:.1f} s" if o.compiled else "",
        "; ".join(filter(None,
                         (o.why, *(f"not {kernel}: {why}" for kernel, why in o.left_out.items())))))
        for o in report.outcomes])
    show.text(str(report).splitlines()[0])
