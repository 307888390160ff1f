"""Printing: a table on a terminal, aligned text when piped, or one JSON object."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..files.reading import printable
from ..spec.device import Device
from .streams import end_quietly, raw, stop_writing

_STYLES = {"!!": "bold red", "->": "bold green", "faster": "green", "slower": "yellow",
           "NOT EQUAL": "bold red"}
LINE_SECONDS = 10.0                            # between two lines of progress without a terminal
WORD = 18                                      # the least width of a column that is wrapped


class _Console(Console):
    """A rich console that sends its own control sequences and escapes those in its text."""

    def render(self, renderable: RenderableType,
               options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        stop_writing(self.file)                # type: ignore[arg-type]


def console(stream: TextIO | None = None) -> Console:
    """Return a console for `stream`, by default the current sys.stdout (tests replace it)."""
    return _Console(file=raw(sys.stdout if stream is None else stream), highlight=False,
                    soft_wrap=True, markup=False, emoji=False)


def as_json(data: Mapping[str, Any]) -> None:
    """Print strict JSON: NaN and infinity become null."""
    try:
        print(json.dumps(data, indent=2, default=str, allow_nan=False))
    except ValueError:
        print(json.dumps(_finite(data), indent=2, default=str))


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def heading(text: str) -> None:
    out = console()
    out.print(Text(f"\n{printable(text)}", style="bold" if out.is_terminal else ""))


def text(line: str = "") -> None:
    print(line)


def piece(part: str) -> None:
    """Print a part of generated text at once; only a terminal gets control characters escaped."""
    out = sys.stdout if sys.stdout.isatty() else raw(sys.stdout)
    with end_quietly(out):
        out.write(part)
        out.flush()


@contextmanager
def spinner(description: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line; on a terminal a spinner and a clock stay below."""
    out = console()
    if not out.is_terminal:
        yield lambda line: print(line, flush=True)
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}", markup=False),
                  TimeElapsedColumn(), console=out, transient=True) as bar:
        bar.add_task(printable(description), total=None)
        yield lambda line: bar.console.print(Text(printable(line)))


@contextmanager
def progress(*columns: ProgressColumn, total: float | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, or a line now and then if it is no terminal; yields
    Progress.update of its one task."""
    err = console(sys.stderr)
    if not err.is_terminal:
        with _progress_lines(total) as update:
            yield update
        return
    with Progress(*columns, console=err, transient=True) as bar:
        yield partial(bar.update, bar.add_task("", total=total))


@contextmanager
def _progress_lines(total: float | None) -> Iterator[Callable[..., None]]:
    """Print on stderr every LINE_SECONDS how far it is, also while one step takes longer."""
    state: dict[str, Any] = {"completed": 0, "total": total, "description": ""}
    stream, start, ended = sys.stderr, time.monotonic(), threading.Event()

    def update(advance: int = 0, **changes: Any) -> None:
        state.update(changes)
        state["completed"] += advance

    def print_lines() -> None:
        while not ended.wait(LINE_SECONDS):
            print("{completed} of {total}: {description}".format(**state)
                  + f" ({time.monotonic() - start:.0f} s)", file=stream, flush=True)

    thread = threading.Thread(target=print_lines, name="lz progress", daemon=True)
    thread.start()
    try:
        yield update
    finally:
        ended.set()
        thread.join()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table; `right` names the columns aligned right. Nothing is cut off when piped, nor on
    a terminal too narrow for columns of whole words. Without rows nothing is printed."""
    if not rows:
        return
    out = console()
    rows = [[printable(cell) for cell in row] for row in rows]     # before the columns are measured
    widths = _widths(columns, rows)
    narrowest = sum(2 + (w if _unbroken(name, right) else min(w, WORD))
                    for name, w in zip(columns, widths))
    if not out.is_terminal or narrowest > out.width:
        _print_aligned(columns, rows, right)
        return
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for name in columns:
        grid.add_column(name, justify="right" if name in right else "left", overflow="fold",
                        no_wrap=_unbroken(name, right))
    for row in rows:
        grid.add_row(*map(Text, row), style=_STYLES.get(row[0]) or _STYLES.get(row[-1]))
    out.print(grid, soft_wrap=False)


def devices(rows: Sequence[Device]) -> None:
    table(("device", "name", "cores", "memory", "instructions", "versions"), [(
        f"{d.type}:{d.index}", d.name, str(d.cores), f"{d.total_memory / 2**30:.0f} GiB",
        ", ".join(d.isa) or d.gpu_generation,
        ", ".join(f"{name} {v}"
                  for name, v in (("torch", d.torch_version), ("driver", d.driver_version),
                                  ("runtime", d.runtime_version), ("cuDNN", d.cudnn_version),
                                  ("triton", d.triton_version)) if v)) for d in rows])


def _print_aligned(columns: Sequence[str], rows: Sequence[Sequence[str]],
                   right: Sequence[str]) -> None:
    widths = _widths(columns, rows)
    for line in (columns, *rows):
        cells = [cell.rjust(w) if name in right else cell.ljust(w)
                 for cell, w, name in zip(line, widths, columns)]
        print("  ".join(cells).rstrip())


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]


def _unbroken(column: str, right: Sequence[str]) -> bool:
    """Is a cell of this column kept in one line? Numbers and the names of kernels are."""
    return column in right or column == "kernel"
