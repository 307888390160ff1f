"""`lz solve`, `lz lock`, `lz diff`, `lz dry-run`: choose kernels ahead, pin, compare, list them."""

from __future__ import annotations

from pathlib import Path

from ....files.sealed import replace_output
from ....plan import dryrun, lockfile
from ....plan.lower import lower
from ....plan.places import compare_places
from ....plan.solver import solve as solve_calls
from ....plan.table import Table
from ....spec.display import plural
from ....spec.errors import DataError
from ....world import measurements
from ... import show
from ...calls import calls_of, load_program
from ...options import Source


def solve(source: Source, device: str | None, out: Path, python: Path | None, fill: bool,
          as_json: bool) -> int:
    table = solve_calls(calls_of(source, device), path=out, device=device, fill=fill)
    if python is not None:
        try:
            replace_output(python, lower(table))
        except OSError as e:
            raise DataError(f"--python {python} cannot be written: {e.strerror}") from e
    if as_json:
        show.as_json({"path": str(out), "python": str(python) if python else None, "id": table.id,
                      **table.to_json()})
        return 0
    show.table(("kernel", "fallback", "calls"), [(
        row.kernel, ", ".join(c.kernel for c in row.choices[1:]), str(row)) for row in table.rows])
    show.text(f"\n{table}\nwritten to {out}{f' and {python}' if python else ''}; "
              f"lz.tables.use_table({str(out)!r}) puts it in force")
    return 0


def check_lock(path: Path, as_json: bool) -> int:
    violations = lockfile.check_lockfile(path)
    if as_json:
        show.as_json({"ok": not violations, "violations": [v.to_json() for v in violations]})
    elif violations:
        show.table(("", "kernel", "what", "calls"),
                   [("!!", v.kernel, v.reason.message, v.row) for v in violations])
    else:
        show.text(f"this machine holds to {path}")
    return 1 if violations else 0


def lock(source: Source, device: str | None, path: Path, as_json: bool) -> int:
    choices = Table.load(source.table) if source.table is not None else solve_calls(
        calls_of(source, device), device=device)
    written = lockfile.write_lockfile(choices, path)
    if as_json:
        show.as_json({"path": str(path), "id": written.id, **written.to_json()})
        return 0
    show.table(("kernel", "package", "version", "build", "certificate"),
               [(p.kernel, p.package, p.version, p.build, p.certificate) for p in written.pins])
    show.text(f"\n{plural(len(written.rows), 'range')} of calls, written to {path}")
    return 0


def diff(a: Path, b: Path, everything: bool, as_json: bool) -> int:
    if a.is_file() or b.is_file():
        ranges = lockfile.compare(lockfile.load_choices(a), lockfile.load_choices(b))
    else:
        with measurements.open_store(read_only=True) as store:
            ranges = compare_places(store, str(a), str(b))
    differences = [d for d in ranges if d.verdict != "same"]
    shown = ranges if everything else differences
    if as_json:
        show.as_json({"same": not differences, "differences": [d.to_json() for d in shown]})
    else:
        show.table(("", "A", "B", "calls"),
                   [(d.verdict, d.a or "-", d.b or "-", d.calls) for d in shown])
        show.text(
            f"\n{len(ranges) - len(differences)} ranges are the same, {len(differences)} are not")
    return 1 if differences else 0


def dry_run(source: Source, device: str | None, as_json: bool) -> int:
    if source.program is not None:
        choices = dryrun.dry_run(*load_program(source.program))
    else:
        choices = dryrun.choices_for(calls_of(source, device), device)
    if as_json:
        show.as_json(choices.to_json())
    else:
        show.table(("times", "op", "kernel", "expected", "from", "shapes", "of", ""), [(
            str(row.call.count), row.call.op, row.kernel or "no kernel",
            f"{row.expected_us:.2f} us", row.source, row.shapes, row.call.name, row.note)
            for row in choices.rows], right=("times", "expected"))
    return 0 if all(row.kernel for row in choices.rows) else 1
