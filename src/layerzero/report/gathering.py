"""What the report shows of one device of this machine: from the world, the store and a workload."""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..machine import hardware
from ..machine.loading import installed_version
from ..operate import inspection
from ..perf.interface import StoreError
from ..perf.record import EAGER, Measurement, kind_of
from ..plan.call_facts import facts_of
from ..spec.call import Call, TensorSpec
from ..spec.device import Device
from ..spec.errors import ConfigError, LayerZeroError
from ..spec.reason import Category, Code, Reason
from ..tuning.harness import cache_bytes
from ..world import measurements, perf_loading
from ..world import snapshot as worlds
from ..world.snapshot import World
from .history import Point, Reference, Timed, times_of, trace
from .overview import (
    Overview,
    RejectedKernel,
    RejectReason,
    UnmeasuredKind,
    Usage,
    Workload,
    group_by_kind,
)
from .regret import RegretSummary
from .saved import SavedReport, compare

UNTESTED = RejectReason(
    "UNTESTED", "written for hardware it was not run on yet; never chosen unasked",
    "ask for it by name with backend=, and compare it with the reference")
COMMANDS = {Code.NOT_BUILT: "lz build", Code.BUILD_REFUSED: "lz build"}


@dataclass(frozen=True)
class Source:
    """The calls that weigh the numbers of a report."""

    name: str                                  # for people
    words: str                                 # for commands: "--model smollm2-135m"
    calls: tuple[Call, ...]


def gather(device: str | None = None, regret: RegretSummary | None = None,
           source: Source | None = None, against: Sequence[SavedReport] = ()) -> Overview:
    """Return what the report shows of one device; `against` are earlier reports, in any order."""
    kind = hardware.probe(device).type if device else hardware.main_kind()
    world, now = worlds.current(), time.time()
    place, machine = world.place(kind), world.device(kind)
    rows = [m for m in world.perf if m.place == place]
    rates = world.perf.rates.get(place)
    baselines = frozenset(kernel.id for kernel in world.catalog.kernels if kernel.baseline)
    usages, workload = _survey(source, world, kind, {(m.op, m.bucket) for m in rows})
    size = cache_bytes(kind)
    modes = sorted({m.mode for m in rows}, key=lambda mode: (mode != EAGER, mode))
    overview = Overview(
        machine.name or machine.type, place,
        created_at=datetime.fromtimestamp(now).astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        facts=_facts(machine), rates=rates,
        kinds=group_by_kind(rows, rates, baselines, usages, size), regret=regret,
        rejected=tuple(_rejected_kernels(kind)), ops=len(world.catalog.ops),
        measured_at=_time_span(rows), hidden=len(world.perf) - len(rows), at=now,
        mode=modes[0] if modes else EAGER, workload=workload, cache_bytes=size,
        torch=machine.torch_version)
    newest = max(against, key=lambda report: report.at, default=None)
    return replace(overview, history=_history(overview, rows, against, baselines, machine),
                   against=compare(newest, overview.saved) if newest is not None else None)


def _survey(source: Source | None, world: World, device: str, measured: set[tuple[str, str]],
            ) -> tuple[dict[tuple[str, str], Usage] | None, Workload | None]:
    """Return how the source makes each kind of call, and what of it is not measured here."""
    if source is None:
        return None, None
    usages: dict[tuple[str, str], Usage] = {}
    unmeasured: dict[tuple[str, str], UnmeasuredKind] = {}
    skipped: list[tuple[str, str]] = []
    for call in source.calls:
        try:
            op, facts = facts_of(call, world, device)
        except LayerZeroError as e:
            skipped.append((call.op, str(e).splitlines()[0]))
            continue
        kind, plan = kind_of(op, facts), world.plan(op, facts, None)
        key, chosen = (op.name, kind.bucket), plan.kernel or ""
        known = usages.get(key)
        usages[key] = known._replace(calls=known.calls + call.count) if known else Usage(
            call.count, chosen, _words(call))
        if key not in measured:
            calls = usages[key].calls
            each = plan.steps[0].score.total_us if plan.steps else 0.0
            label = " ".join(filter(None, (op.name, kind.family, kind.sizes_text)))
            unmeasured[key] = UnmeasuredKind(label, calls, chosen, calls * each)
    order = sorted(unmeasured.values(), key=lambda kind: -kind.expected_us)
    return usages, Workload(source.name, source.words, tuple(order), tuple(skipped))


def _words(call: Call) -> str:
    """Return the arguments of a call as lz explain takes them; "" for a case of the contract."""
    def text(value: Any) -> str:
        if isinstance(value, TensorSpec):
            return f"{'x'.join(map(str, value.shape))}:{value.dtype}"
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    return shlex.join(f"{name}={text(value)}" for name, value in call.arguments.items())


# over time

def _history(overview: Overview, rows: Sequence[Measurement], against: Iterable[SavedReport],
             baselines: frozenset[str], device: Device) -> tuple[Point, ...]:
    today = {(kind.op, kind.bucket): Reference(kind.calls, kind.used.us, kind.baseline.us)
             for kind in overview.total.kinds if kind.baseline is not None}
    times = [Timed(m.at, (m.op, m.bucket), m.kernel, m.median_us, m.kernel in baselines, torch)
             for m, torch in (*((m, device.torch_version) for m in rows),
                              *_stored(overview, device))
             if m.mode == overview.mode and m.at]
    for report in against:
        if report.device == overview.device:
            times += times_of(report, overview.mode)
    return trace(times, today)


def _stored(overview: Overview, device: Device) -> Iterator[tuple[Measurement, str]]:
    """Yield what the store of this machine holds of the same device with any software. Selection
    uses the current builds and versions only; the others are the past."""
    threads = overview.place.rpartition("-")[2]
    try:
        if not isinstance(perf_loading.location(worlds.current().policy), Path):
            return                             # a server of many machines is not read as a whole
        with measurements.open_store(read_only=True) as store:
            devices = {i: data.get("device") for i, data in store.environments().items()}
            for m in store.rows():
                there = devices.get(m.environment)
                if not isinstance(there, Mapping) or any(
                        there.get(n) != getattr(device, n) for n in ("type", "name", "cores")):
                    continue
                if device.type != "cpu" or m.place.rpartition("-")[2] == threads:
                    yield m, str(there.get("torch_version", ""))
    except (StoreError, ConfigError):          # lz doctor reports it; the page has the rest
        return


# around the numbers

def _facts(device: Device) -> dict[str, str]:
    versions = {
        "layerzero": installed_version("layerzero"), "torch": device.torch_version,
        "Python": platform.python_version(), "driver": device.driver_version,
        "runtime": device.runtime_version, "cuDNN": device.cudnn_version,
        "triton": device.triton_version}
    size = f"{device.cores} cores, {device.total_memory / 2**30:.0f} GiB"
    return {"Device": f"{device.type}, {size}",
            "Versions": ", ".join(f"{n} {v}" for n, v in versions.items() if v),
            "System": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"}


def _time_span(rows: Sequence[Measurement]) -> str:
    times = [datetime.fromtimestamp(m.at).astimezone().strftime("%Y-%m-%d %H:%M")
             for m in rows if m.at]
    if not times:
        return ""
    return min(times) if min(times) == max(times) else f"{min(times)} to {max(times)}"


def _rejected_kernels(device: str) -> list[RejectedKernel]:
    kernels = []
    for row in inspection.list_kernels(None, device):
        if row.reasons:
            reasons = tuple(_reject_reason(reason) for reason in row.reasons)
            kernels.append(RejectedKernel(row.id, row.op, reasons, row.note))
        elif row.status.startswith("untested"):
            kernels.append(RejectedKernel(row.id, row.op, (UNTESTED,), row.note))
    return kernels


def _reject_reason(reason: Reason) -> RejectReason:
    hardware_only = reason.code.category is Category.HARDWARE
    advice = "nothing: it is made for other hardware" if hardware_only else ""
    package = reason.want if reason.code is Code.NOT_INSTALLED else None
    command = f"pip install {shlex.quote(str(package))}" if package else ""
    return RejectReason(reason.code.value, reason.message, reason.code.advice or advice,
                        hardware_only, COMMANDS.get(reason.code, command))
