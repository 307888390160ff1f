"""`lz report`: what was measured here, as one HTML page to keep, send or look at on a phone."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from pathlib import Path

from ... import __version__
from ...machine import hardware
from ...operate import inspection
from ...perf.record import Measurement
from ...report.overview import (
    Overview,
    RegretSummary,
    RejectedKernel,
    RejectReason,
    group_by_kind,
    read_regret,
)
from ...report.page import render
from ...spec.device import Device
from ...spec.errors import ConfigError
from ...spec.reason import Category, Reason
from ...world import snapshot as worlds
from .. import show

UNTESTED = RejectReason("UNTESTED",
                        "written for hardware it was not run on yet; never chosen unasked",
                        "ask for it by name with backend=, and compare it with the reference")


def report(out: Path = Path("report.html"), regret: Path | None = None, device: str | None = None,
           as_json: bool = False) -> int:
    """Write the page; its options are declared in panels/measure.py."""
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist; make it first")
    overview = gather(device, read_regret(regret) if regret is not None else None)
    # a lone surrogate in a plugin's note is no reason to fail
    try:
        out.write_text(render(overview), "utf-8", errors="xmlcharrefreplace")
    except OSError as e:
        raise ConfigError(
            f"--out {out}: cannot write the page: {e.strerror}; name another file") from e
    if as_json:
        show.as_json({"path": str(out), "measurements": overview.measurements,
                      "kinds": len(overview.kinds), "device": overview.device})
        return 0
    show.text(
        f"{out}: {overview.measurements} measurements of {len(overview.kinds)} kinds of call on "
        f"{overview.device}")
    if not overview.kinds:
        show.text("nothing is measured yet: run lz tune, then lz report again")
    return 0


def gather(device: str | None = None, regret: RegretSummary | None = None) -> Overview:
    """Return what the report shows of one device of this machine."""
    kind = hardware.probe(device).type if device else hardware.main_kind()
    world = worlds.current()
    place, machine = world.place(kind), world.device(kind)
    measurements = [m for m in world.perf if m.place == place]
    rates = world.perf.rates.get(place)
    baselines = frozenset(kernel.id for kernel in world.catalog.kernels if kernel.baseline)
    return Overview(
        machine.name or machine.type, place,
        created_at=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"), facts=_facts(machine),
        kinds=group_by_kind(measurements, rates, baselines), rates=rates,
        rejected=tuple(_rejected_kernels(kind)), regret=regret, ops=len(world.catalog.ops),
        measured_at=_time_span(measurements), hidden=len(world.perf) - len(measurements))


def _facts(device: Device) -> dict[str, str]:
    versions = {"layerzero": __version__, "torch": device.torch_version,
                "Python": platform.python_version(), "driver": device.driver_version,
                "runtime": device.runtime_version, "cuDNN": device.cudnn_version,
                "triton": device.triton_version}
    size = f"{device.cores} cores, {device.total_memory / 2**30:.0f} GiB"
    return {"Device": f"{device.type}, {size}",
            "Versions": ", ".join(f"{n} {v}" for n, v in versions.items() if v),
            "System": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"}


def _time_span(rows: list[Measurement]) -> str:
    times = [datetime.fromtimestamp(m.at).astimezone().strftime("%Y-%m-%d %H:%M") for m in rows
             if m.at]
    return ("" if not times else min(times) if min(times) == max(times)
            else f"{min(times)} to {max(times)}")


def _rejected_kernels(device: str) -> list[RejectedKernel]:
    kernels = []
    for row in inspection.list_kernels(None, device):
        if row.reasons:
            kernels.append(RejectedKernel(row.id, row.op, tuple(map(_reject_reason, row.reasons)),
                                          row.note))
        elif row.status.startswith("untested"):
            kernels.append(RejectedKernel(row.id, row.op, (UNTESTED,), row.note))
    return kernels


def _reject_reason(reason: Reason) -> RejectReason:
    hardware_only = ("nothing: it is made for other hardware"
                     if reason.code.category is Category.HARDWARE else "")
    return RejectReason(reason.code.value, reason.message, reason.code.advice or hardware_only)
