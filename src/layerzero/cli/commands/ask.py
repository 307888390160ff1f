"""Questions about a call and about this machine: explain, which, doctor, list, kernels, config."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...files.reading import read_json
from ...machine import hardware
from ...operate import inspection
from ...operate import matrix as compatibility
from ...spec.device import Device
from ...spec.names import find_kernel, find_kernels
from ...spec.plan import Plan
from ...world import snapshot as worlds
from .. import show
from ..arguments import parse_call
from ..calls import device_kind, resolve_dtype


def doctor(deep: bool, as_json: bool) -> int:
    diagnosis = inspection.doctor(deep)
    if as_json:
        show.as_json(diagnosis.to_json())
    else:
        show.devices(diagnosis.devices)
        show.heading(", ".join(f"{name} {version}" for name, version in diagnosis.versions.items()))
        show.table(("", "check", "found", "hint"),
                   [("ok" if c.ok else "!!", c.name, c.detail, c.hint) for c in diagnosis.checks])
    return 0 if diagnosis.ok else 1


def matrix(deep: bool, as_json: bool) -> int:
    table = compatibility.matrix(deep)
    if as_json:
        show.as_json(table.to_json())
    else:
        show.heading(f"torch {table.versions['torch']}")
        columns, rows = table._cells()
        show.table(columns, [tuple(map(str, row)) for row in rows])
    return 0 if table.ok else 1


def list_kernels(op: str | None, device: str | None, as_json: bool) -> int:
    kind = device_kind(device)
    rows = inspection.list_kernels(op, kind)
    if as_json:
        show.as_json({"device": kind, "kernels": [row.to_json() for row in rows]})
    else:
        show.table(("kernel", "op", "status", "why not"),
                   [(r.id, r.op, r.status, "; ".join(reason.message for reason in r.reasons))
                    for r in rows])
    return 0


def kernels(kernel: str, device: str | None, as_json: bool) -> int:
    catalog = worlds.current().catalog
    kernel = find_kernel(kernel, catalog.op_of_kernel)
    declared, kind = catalog.by_id[kernel], device_kind(device)
    info = next(row for row in inspection.list_kernels(declared.op.name, kind) if row.id == kernel)
    data = {**declared.to_json(), "device": kind, "status": info.status,
            "reasons": [reason.to_json() for reason in info.reasons]}
    if as_json:
        show.as_json(data)
        return 0
    reasons = "; ".join(map(str, info.reasons))
    rows = [("op", declared.op.name),
            (f"status on {kind}", info.status + (f": {reasons}" if reasons else ""))]
    rows += [("requires", str(rule)) for rule in declared.requires]
    rows += [(name, str(data[name])) for name in (
        "package", "distribution", "version", "torch", "note", "workspace", "variants", "prior",
        "overhead_us")
        if data[name] not in ("", [], "0")]
    rows += [("properties", ", ".join(name for name in (
        "differentiable", "deterministic", "graph_safe", "traceable", "baseline", "jit", "untested")
                                      if data[name]))]
    show.heading(kernel)
    show.table(("field", "value"), rows)
    return 0


def generated_code(op: str, as_json: bool) -> int:
    text = inspection.generated_code(op)
    show.as_json({"op": op, "code": text}) if as_json else show.text(text)
    return 0


def explain(op: str, words: Sequence[str], dtype: str, device: str | None, backend: str | None,
            on: Path | None, as_json: bool) -> int:
    plan = _plan(op, words, dtype, device, backend, on)
    show.as_json(plan.to_json()) if as_json else show_plan(plan)
    return 0 if plan.steps else 1


def which(op: str, words: Sequence[str], dtype: str, device: str | None, backend: str | None,
          on: Path | None, as_json: bool) -> int:
    plan = _plan(op, words, dtype, device, backend, on)
    if as_json:
        show.as_json({"op": plan.op, "kernel": plan.kernel})
    elif plan.kernel is not None:
        show.text(plan.kernel)
    if plan.kernel is None:
        print(f"no kernel can serve this call\n{plan}", file=sys.stderr)
        return 1
    return 0


def config(as_json: bool) -> int:
    values = inspection.get_config()
    if as_json:
        show.as_json(values)
        return 0
    show.table(("setting", "value", "from"),
               [(name, json.dumps(value), values["source"][name])
                for name, value in values["settings"].items()])
    show.heading(f"policy {values['policy_hash']}, file: {values['policy_file'] or 'none'}")
    show.table(("layer", "rule", "written in"),
               [(r["layer"], r["text"], r["origin"]) for r in values["rules"]])
    return 0


def show_plan(plan: Plan) -> None:
    if not show.console().is_terminal:
        show.text(str(plan))
        return
    show.heading(str(plan).splitlines()[0])
    columns, rows = plan._cells()
    show.table(columns, [tuple(map(str, row)) for row in rows], right=("expected",))


def _plan(op: str, words: Sequence[str], dtype: str, device: str | None, backend: str | None,
          on: Path | None) -> Plan:
    declared = inspection.dispatcher_of(op).op
    named = () if backend is None else find_kernels(
        backend, worlds.current().catalog.op_of_kernel, op, "--backend")
    machine = _device_file(on) if on is not None else hardware.probe(device_kind(device))
    plan = inspection.explain(op, backend=backend, on=machine, **parse_call(
        declared, words, resolve_dtype(dtype, device)))
    # the reader asked about these: their reasons come first
    return replace(plan, rejected=tuple(sorted(plan.rejected, key=lambda r: r.kernel not in named)))


def _device_file(path: Path) -> Device:
    return Device.from_json(read_json(path,
                                      "a device as JSON, one of `devices` in lz doctor --json"))
