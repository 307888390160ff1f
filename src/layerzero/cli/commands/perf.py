"""`lz perf`: show, prune, export and import the measurements."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from ...perf.ownership import SQLITE
from ...perf.record import Measurement
from ...spec.errors import DataError
from ...spec.names import names_kernel
from ...world import measurements
from ...world.perf_loading import DAY, open_location
from .. import show
from ..options import Json

app = typer.Typer(no_args_is_help=True,
                  help="What was measured on this machine: show, prune, export, import.")

Kernels = Annotated[str,
                    typer.Option("--kernel", help="only kernels whose id matches, such as torch.*")]


@app.command("show")
def show_rows(kernel: Kernels = "*",
              op: Annotated[str, typer.Option(help="only this operation")] = "*",
              everything: Annotated[bool,
                                    typer.Option("--all",
                                                 help="also rows that do not count here")] = False,
              limit: Annotated[int, typer.Option(help="at most so many rows; 0: all")] = 50,
              as_json: Json = False) -> None:
    """The measurements, and whether each still counts here: builds, drivers and toolkits change."""
    with measurements.open_store(read_only=True) as store:
        rows, environments, rates = list(store.rows(kernel=kernel,
                                                    op=op)), store.environments(), store.rates()
        name = store.name
    standing = measurements.RowStatus(environments)
    judged = [(m, standing.of(m)) for m in rows]
    counts = Counter(s for _, s in judged)
    shown = [(m, s) for m, s in judged if everything or s == "in use"]
    shown.sort(key=lambda x: (x[0].op, x[0].bucket, x[0].place, x[0].median_us))
    if as_json:
        show.as_json({"store": name, "counts": dict(counts),
                      "rates": {p: r._asdict() for p, r in rates.items()},
                      "measurements": [{**m._asdict(), "standing": s} for m, s in shown]})
        return
    show.heading(f"{name}: " + (", ".join(f"{n} {s}" for s, n in counts.most_common())
                                or "no measurements"))
    cut = shown[:limit] if limit else shown
    show.table(("op", "kind of call", "kernel", "us", "spread", "samples", "age", "standing"),
               [(m.op, m.bucket, m.kernel, f"{m.median_us:.2f}", f"{100 * m.spread:.0f}%",
                 str(m.samples), _age(m), s)
                for m, s in cut], right=("us", "spread", "samples", "age"))
    if len(cut) < len(shown):
        show.text(f"... and {len(shown) - len(cut)} more; --limit 0 shows all")


@app.command()
def prune(kernel: Kernels = "*",
          older_than: Annotated[float | None,
                                typer.Option(help="also what is older than so many days")] = None,
          everything: Annotated[bool,
                                typer.Option("--all",
                                             help="everything, of other machines too")] = False,
          dry_run: Annotated[bool,
                             typer.Option("--dry-run",
                                          help="say what would go, and remove nothing")] = False
          ) -> None:
    """Remove what does not count any more: other builds, drivers or toolkits of this machine, and
    what expired.
    """
    before = time.time() - older_than * DAY if older_than is not None else 0.0
    with measurements.open_store(read_only=dry_run) as store:
        standing = measurements.RowStatus(store.environments())

        def unwanted(m: Measurement) -> bool:
            return names_kernel(kernel, m.kernel) and (
                everything or m.at < before or standing.of(m).startswith(("stale", "expired")))

        count = sum(map(unwanted, store.rows())) if dry_run else store.prune(unwanted)
    show.text(f"{count} measurements {'would be ' if dry_run else ''}removed")


@app.command()
def export(path: Annotated[Path,
                           typer.Argument(
                               help="a file of JSON lines; replaced if it exists")]) -> None:
    """Write every measurement, its environment, and the rates of each device to a file."""
    with measurements.open_store(read_only=True) as store:
        count = store.export(path)
    show.text(f"{count} measurements written to {path}")


@app.command("import")
def import_rows(paths: Annotated[list[Path],
                                 typer.Argument(
                                     help="files of lz perf export, or other perf.sqlite")]
                ) -> None:
    """Take over the measurements of other machines.

    Of two of the same thing the better one stays, in any order.
    """
    for path in paths:
        database = _is_database(path)
        with measurements.open_store() as store:
            if database:
                with open_location(path, read_only=True) as other:
                    count = store.merge(other)
            else:
                count = store.import_(path)
        show.text(f"{count} measurements read from {path}")


def _is_database(path: Path) -> bool:
    try:
        if not path.is_file():  # opening a FIFO would block; read_lines reports it
            return False
        with path.open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError as e:
        raise DataError(f"{path}: cannot read the measurements: {e.strerror}") from e


def _age(m: Measurement) -> str:
    hours = (time.time() - m.at) / 3600
    return (f"{hours / 24:.0f} d" if hours >= 48 else f"{hours:.0f} h" if hours >= 1
            else f"{60 * hours:.0f} min")
