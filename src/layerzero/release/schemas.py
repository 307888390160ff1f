"""Every kind of file that lz writes: is it read back, is its structure that of its version, is
another one refused?

The structure of each kind (its names and types) is recorded beside the baselines. A field that
comes or goes under the same version is a finding: files of users would no longer be what their
version says.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..files.calls import read_calls, write_calls
from ..machine.faults import FAULTS
from ..perf import exchange, ownership
from ..perf import schema as perf_schema
from ..perf import store as perf_store
from ..perf.record import Measurement
from ..plan import lockfile, table
from ..plan.solver import solve
from ..spec.errors import DataError, LayerZeroError
from ..tuning.workload import calls_for
from ..verify.cases.declarations import Checked, Finding
from ..verify.trace.definition import (
    Correctness,
    Environment,
    Evaluation,
    Performance,
    Trace,
    Workload,
)
from ..world import capabilities
from ..world import snapshot as worlds
from . import performance, soak

RECORD = "schemas.json"
# stands for names that are data: of kernels, ops, facts, calls
_BY_NAME = "*"


@dataclass(frozen=True)
class FileKind:
    """A kind of file: its version, how it is written and read, and where names are data."""

    version: str
    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    lines: bool = False                        # JSON lines
    # places whose names are data, as structure() writes them
    by_name: tuple[str, ...] = ()
    # places that are not looked into: what is there depends on the data
    opaque: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()             # places that some files have


def _capabilities(path: Path) -> None:
    path.write_text(json.dumps(capabilities.export(worlds.current().catalog)), encoding="utf-8")


def _table(path: Path) -> None:
    solve(calls_for("rms_norm", dtype="float32")[:2], path=path, device="cpu")


def _lockfile(path: Path) -> None:
    table_path = path.with_suffix(".table")
    _table(table_path)
    lockfile.write_lockfile(table_path, path)


def _calls(path: Path) -> None:
    write_calls(path, calls_for("rms_norm", arguments={"x": torch.ones(2, 8)}))


def _perf_export(path: Path) -> None:
    with perf_store.SqliteStore(path.with_suffix(".sqlite")) as store:
        store.put([Measurement("torch.rms_norm", "rms_norm", "float32 hidden=64", "cpu", 1.0,
                               at=1.0)], {"torch": "x"})
        store.export(path)


def _trace(path: Path) -> None:
    evaluation = Evaluation("PASSED", Environment("cpu", {"torch": str(torch.__version__)}),
                            "2026-01-01T00:00:00+00:00", "", Correctness(), Performance(1.0, 2.0))
    workload = Workload.from_json({"uuid": "one", "axes": {"n": 1},
                                   "inputs": {"x": {"type": "random"}}})
    path.write_text(json.dumps(Trace("rms_norm", workload, "lz", evaluation).to_json()) + "\n",
                    encoding="utf-8")


def _baseline(path: Path) -> None:
    timed = performance.MeasuredSpeed(1.0, 0.9, 1.1, 1.0, 1.0, 9)
    performance.Baseline("cpu-arm", "a CPU", "2.13", "2026-01-01", {"one": timed}).save(path)


def _soak(path: Path) -> None:
    samples = [soak.SoakSample(float(i), 1.0, 1, 1, 1.0, 1.0, 1.0, 1) for i in range(24)]
    soak.SoakReport(1.0, [soak.SoakPart("2026-01-01", "a CPU", "2.13", samples, {"calls": 1}, [],
                                        1.0)]).save(path)


def _read_calls(path: Path) -> Any:
    calls = read_calls(path)
    if not calls:
        raise DataError(f"{path}: no call in it")
    return calls


_ROWS = {"opaque": ("rows[].when", "rows[].sizes", "rows[].choices[].transforms"),
         "optional": ("rows[].choices[].transforms", "rows[].choices[].workspace")}
KINDS: Mapping[str, FileKind] = {
    "capabilities": FileKind(
        capabilities.SCHEMA,
        _capabilities,
        capabilities.load,
        by_name=("bounds",),
        opaque=("kernels[].requires", "kernels[].less_work_when", "kernels[].variants"),
    ),
    "table": FileKind(
        table.SCHEMA,
        _table,
        table.Table.load,
        by_name=("stamp.builds",),
        opaque=(*_ROWS["opaque"], "jit", "stamp.device.isa", "stamp.builds"),
        optional=_ROWS["optional"],
    ),
    "lockfile": FileKind(
        lockfile.SCHEMA,
        _lockfile,
        lockfile.load_lockfile,
        by_name=("kernels",),
        opaque=_ROWS["opaque"],
        optional=(*_ROWS["optional"], "kernels.*.certificate"),
    ),
    "calls": FileKind(
        "", _calls, _read_calls, lines=True, opaque=("arguments",),
        optional=("case", "dtype", "count", "grad", "name")
    ),
    "perf export": FileKind(
        exchange.SCHEMA, _perf_export, exchange.read_lines, lines=True, by_name=("data",),
        opaque=("data",)
    ),
    "trace": FileKind(
        "",
        _trace,
        Trace.load_lines,
        lines=True,
        opaque=("workload.axes", "workload.inputs", "evaluation.environment.libs"),
    ),
    "baseline": FileKind(performance.SCHEMA, _baseline, performance.Baseline.load,
                         by_name=("calls",)),
    "soak": FileKind(soak.SCHEMA, _soak, soak.SoakReport.load, opaque=("counts", "parts[].counts")),
}


def structure(data: Any, by_name: tuple[str, ...] = (), opaque: tuple[str, ...] = (),
              at: str = "") -> set[str]:
    """Returns the path of every named member of JSON data: {"rows[].op", ...}."""
    if at in opaque:
        return {at}
    if isinstance(data, Mapping):
        places = {at} if at else set()
        for name, value in data.items():
            places |= structure(value, by_name, opaque,
                                f"{at}.{_BY_NAME if at in by_name else name}".lstrip("."))
        return places
    if isinstance(data, list):
        return {at,
                *(place for value in data
                  for place in structure(value, by_name, opaque, f"{at}[]"))}
    return {at}


def check(record: Path | None) -> Iterator[Checked]:
    """Writes and reads every kind of file in a temporary folder; then the database."""
    known = _recorded(record)
    for name, kind in KINDS.items():
        started, findings = time.perf_counter(), []           # type: float, list[Finding]
        with tempfile.TemporaryDirectory(prefix="layerzero-gate-") as folder:
            try:
                findings = [Finding("files", name, text)
                            for text in _problems(name, kind, Path(folder), known)]
            # a reader that ends in anything else than its own error is a finding
            except FAULTS as e:
                findings = [Finding("files", name, f"ended in {type(e).__name__}: {e}")]
        note = "" if known is not None else "the structure is recorded in a source checkout only"
        yield Checked("files", f"{name} {kind.version}".strip()
                      + ": written, read back, as recorded, others refused",
                      1, tuple(findings), note, time.perf_counter() - started)
    yield _database()


def _problems(name: str, kind: FileKind, folder: Path,
              known: Mapping[str, Any] | None) -> Iterator[str]:
    path = folder / "file"
    kind.write(path)
    kind.read(path)
    text = path.read_text(encoding="utf-8")
    current = {"version": kind.version, "structure": _structure_of(text, kind)}
    if known is not None and known.get(name) != current:
        recorded = known.get(name) or {"version": "", "structure": []}
        added = sorted(set(current["structure"]) - set(recorded["structure"]))
        gone = sorted(set(recorded["structure"]) - set(current["structure"]))
        changes = "; ".join(filter(None, (f"new: {', '.join(added[:6])}" if added else "",
                                          f"gone: {', '.join(gone[:6])}" if gone else "")))
        same = recorded["version"] == kind.version
        yield (
            f"its structure changed under the same version {kind.version or '(none)'}: {changes}; "
            "give it a new version, or record it with lz gate --write-schemas if readers of "
            "before take it" if same else
            f"version {kind.version} is not recorded (was {recorded['version'] or 'none'}); lz "
            "gate --write-schemas")
    spoilt = {"an empty file": "", "half of it": text[:len(text) // 2], "no JSON": "\0\1\2"}
    if kind.version:
        spoilt["another version"] = text.replace(kind.version, kind.version.rpartition("/")[0]
                                                 + "/999", 1)
    for what, content in spoilt.items():
        path.write_text(content, encoding="utf-8")
        try:
            kind.read(path)
        except LayerZeroError:
            continue
        if what == "an empty file" and kind.lines and not kind.version:
            # lines without a head: none is what was recorded of no calls
            continue
        yield f"{what} was read as if it were whole"


def _structure_of(text: str, kind: FileKind) -> list[str]:
    rows = ([json.loads(line) for line in text.splitlines() if line.strip()] if kind.lines
            else [json.loads(text)])
    return sorted({place for row in rows for place in structure(row, kind.by_name, kind.opaque)}
                  - {""} - set(kind.optional))


def _database() -> Checked:
    """Checks the SQLite file: this version makes one, and refuses that of a later release."""
    started, findings = time.perf_counter(), []   # type: float, list[Finding]
    with tempfile.TemporaryDirectory(prefix="layerzero-gate-") as folder:
        path = Path(folder) / "perf.sqlite"
        with perf_store.SqliteStore(path):
            pass
        connection = sqlite3.connect(path)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        owner = connection.execute("PRAGMA application_id").fetchone()[0]
        connection.execute("PRAGMA user_version = 999")
        connection.commit()
        connection.close()
        if (version, owner) != (perf_schema.VERSION, ownership.APPLICATION_ID):
            findings.append(Finding("files", "perfdb",
                                    f"a new file has schema {version} of {owner:#x}, wanted "
                                    f"{perf_schema.VERSION} of {ownership.APPLICATION_ID:#x}"))
        try:
            perf_store.SqliteStore(path).close()
            findings.append(Finding("files", "perfdb", "a file of a later release was opened"))
        except LayerZeroError:
            pass
    return Checked("files", f"perfdb {perf_schema.VERSION}: made as it says, later ones refused", 1,
                   tuple(findings), seconds=time.perf_counter() - started)


def _recorded(record: Path | None) -> Mapping[str, Any] | None:
    if record is None or not record.is_file():
        return None
    try:
        data = json.loads(record.read_bytes())
    except (OSError, ValueError) as e:
        raise DataError(
            f"{record}: cannot read the recorded schemas: {e}; lz gate --write-schemas") from e
    if not isinstance(data, Mapping) or not all(
            isinstance(v, Mapping) and isinstance(v.get("structure"), list) and "version" in v
            for v in data.values()):
        raise DataError(
            f"{record}: wanted version and structure of each kind of file; lz gate --write-schemas")
    return data


def write_record(record: Path) -> None:
    """Record the structure of every kind as it is now."""
    structures = {}
    for name, kind in KINDS.items():
        with tempfile.TemporaryDirectory(prefix="layerzero-gate-") as folder:
            path = Path(folder) / "file"
            kind.write(path)
            structures[name] = {"version": kind.version,
                                "structure": _structure_of(path.read_text("utf-8"), kind)}
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(structures, indent=1) + "\n", encoding="utf-8")
