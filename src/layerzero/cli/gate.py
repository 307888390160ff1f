"""`lz gate`: may this be released? The declarations checked as a whole, and three families of models."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..runtime import hardware
from ..runtime import world as worlds
from ..spec.errors import ConfigError, DataError
from ..verify.gate import Checked, docs_check, static_checks
from ..verify.gate_models import FAMILIES, Cell, model_cells
from . import show
from .options import Json

_ROOT = Path(__file__).resolve().parents[3]    # of a source checkout; elsewhere there is no docs/ in it


def gate(static: Annotated[bool, typer.Option("--static", help="only the declarations; runs no kernel")] = False,
         models: Annotated[bool, typer.Option("--models", help="only the models")] = False,
         family: Annotated[list[str] | None, typer.Option(
             "--family", help=f"of the models: {', '.join(FAMILIES)}; may be repeated")] = None,
         backend: Annotated[str, typer.Option(
             "--backend", help="of the models: a kernel or library that serves wherever it can")] = "",
         full: Annotated[bool, typer.Option("--full", help="of the models: more batches and lengths")] = False,
         device: Annotated[str, typer.Option(help="of the models: cpu, cuda, ...")] = "cpu",
         out: Annotated[Path | None, typer.Option(
             "--out", metavar="DIR", help="write gate.json and gate.txt there too")] = None,
         as_json: Json = False) -> None:
    """Is every declaration complete and reachable, and are models equal to plain torch? Exit code 1 if not."""
    raise typer.Exit(run(static or not models, models or not static, family or (), "full" if full else "quick", device,
                         backend, out, as_json))


def run(static: bool = True, models: bool = True, families: Any = (), lane: str = "quick", device: str = "cpu",
        backend: str = "", out: Path | None = None, as_json: bool = False) -> int:
    """The command as a function: prints, writes, and gives the exit code."""
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out: wanted a folder, {out} is a file")
    started, lines = time.perf_counter(), []   # type: float, list[str]
    checks: list[Checked] = []
    cells: list[Cell] = []

    def say(text: str) -> None:
        lines.append(text)
        if not as_json:
            show.text(text)

    say(f"lz gate on {device}, torch {torch.__version__}")
    if static:
        for found in static_checks(worlds.current().catalog):
            checks.append(found)
            say(_told(found))
        checks.append(docs_check(_ROOT))
        say(_told(checks[-1]))
    if models:
        for cell in model_cells(families, lane=lane, device=device, named=backend):
            cells.append(cell)
            say(f"{'ok' if cell.passed else '!!'}  {cell}, {cell.seconds:.1f} s")
        say(_kernels(cells))
    passed = all(c.passed for c in checks) and all(c.passed for c in cells)
    counts = Counter([c.passed for c in checks] + [c.passed for c in cells])
    say(f"{'passed' if passed else 'FAILED'}: {counts[True]} passed, {counts[False]} failed, "
        f"{time.perf_counter() - started:.0f} s")
    report = {"passed": passed, "device": hardware.probe(device).to_json(), "torch": str(torch.__version__),
              "seconds": round(time.perf_counter() - started, 1), "static": [c.to_json() for c in checks],
              "models": [c.to_json() for c in cells]}
    if as_json:
        show.as_json(report)
    if out is not None:
        _write(out, report, lines)
    return 0 if passed else 1


def _told(found: Checked) -> str:
    mark = "!!" if not found.passed else "--" if found.note else "ok"
    head = f"{mark}  {found.name}: {found.says} ({found.note or f'{found.asked} asked'}, {found.seconds:.1f} s)"
    return "\n".join([head, *(f"      {finding}" for finding in found.findings)])


def _kernels(cells: list[Cell]) -> str:
    """Who served: a matrix in which one kernel did everything says little."""
    served: Counter[tuple[str, str]] = Counter()
    for cell in cells:
        served.update(cell.kernels)
    by_op: dict[str, list[str]] = {}
    for (op, kernel), n in sorted(served.items()):
        by_op.setdefault(op, []).append(f"{kernel} x{n}")
    return "\n".join(f"      {op}: {', '.join(names)}" for op, names in by_op.items()) or "      nothing was served"


def _write(folder: Path, report: dict[str, Any], lines: list[str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gate.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (folder / "gate.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as e:
        raise DataError(f"--out {folder}: cannot be written: {e.strerror}; give a folder that can") from e
