"""How an answer is printed: a table on a terminal, aligned text when piped, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..spec.device import Device

_STYLES = {"!!": "bold red", "->": "bold green", "faster": "green", "slower": "yellow", "NOT EQUAL": "bold red"}


def console() -> Console:
    """Of the stdout of this moment: tests and pipes replace it."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def as_json(data: Mapping[str, Any]) -> None:
    print(json.dumps(data, indent=2, default=str))


def heading(text: str) -> None:
    out = console()
    out.print(f"\n[bold]{escape(text)}[/bold]" if out.is_terminal else f"\n{text}", markup=out.is_terminal)


def text(line: str = "") -> None:
    print(line)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Around work that reports in lines; on a terminal with a clock below them that shows it goes on."""
    out = console()
    if not out.is_terminal:
        yield lambda line: print(line, flush=True)
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=out,
                  transient=True) as bar:
        bar.add_task(what, total=None)
        yield lambda line: bar.console.print(line, markup=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """`right` names the columns of numbers. Nothing is cut off when piped."""
    out = console()
    if not out.is_terminal:
        _plain(columns, rows, right)
        return
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for name in columns:
        grid.add_column(name, justify="right" if name in right else "left", overflow="fold",
                        no_wrap=name in right or name == "kernel")
    for row in rows:
        grid.add_row(*(escape(cell) for cell in row), style=_STYLES.get(row[0]) or _STYLES.get(row[-1]))
    out.print(grid, soft_wrap=False)


def devices(found: Sequence[Device]) -> None:
    table(("device", "name", "cores", "memory", "instructions", "versions"), [(
        f"{d.type}:{d.index}", d.name, str(d.cores), f"{d.total_memory / 2**30:.0f} GiB",
        ", ".join(d.isa) or d.gpu_generation,
        ", ".join(f"{name} {v}" for name, v in (("torch", d.torch_version), ("driver", d.driver_version),
                                               ("runtime", d.runtime_version), ("cuDNN", d.cudnn_version),
                                               ("triton", d.triton_version)) if v)) for d in found])


def _plain(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [cell.rjust(w) if name in right else cell.ljust(w) for cell, w, name in zip(line, widths, columns)]
        print("  ".join(cells).rstrip())
