"""`lz solve`, `lz lock`, `lz diff`, `lz dry-run`: choose kernels ahead of time, pin, compare and
list them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ...operate import inspection
from ...plan import dryrun, lockfile
from ...plan.lower import lower
from ...plan.solver import solve as solve_calls
from ...plan.table import DEFAULT_PATH, Table
from ...spec.call import Call
from ...spec.errors import ConfigError, DataError, InvalidCall
from ...tuning.workload import calls_for
from .. import show
from ..options import CallsFile, DeviceKind, Json, Model, OpCases, check_calls_file

Program = Annotated[str | None, typer.Option(
    "--program",
    help="module:function, which gives a model and its example arguments as one tuple")]
Dtype = Annotated[str, typer.Option(help="of --model and --op")]


def solve(
    calls: CallsFile = None, model: Model = None, op: OpCases = None, program: Program = None,
    dtype: Dtype = "bfloat16",
    device: DeviceKind = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="where the table goes")] = Path(
        DEFAULT_PATH),
    python: Annotated[Path | None,
                      typer.Option("--python",
                                   help="also write it as a Python module, here")] = None,
    fill: Annotated[bool,
                    typer.Option(help="also decide the sizes between those that are given")] = True,
    as_json: Json = False,
) -> None:
    """Decide calls now and write a dispatch table: ranges of sizes and the kernel for each."""
    table = solve_calls(_read_source(calls, model, op, program, dtype), path=out, device=device,
                        fill=fill)
    if python is not None:
        try:
            python.write_text(lower(table))
        except OSError as e:
            raise DataError(f"--python {python} cannot be written: {e.strerror}") from e
    if as_json:
        show.as_json({"path": str(out), "python": str(python) if python else None, "id": table.id,
                      **table.to_json()})
        return
    show.table(("kernel", "fallback", "calls"), [(
        row.kernel, ", ".join(c.kernel for c in row.choices[1:]), str(row)) for row in table.rows])
    show.text(f"\n{table}\nwritten to {out}{f' and {python}' if python else ''}; "
              f"lz.tables.use_table({str(out)!r}) puts it in force")


def lock(
    table: Annotated[Path | None,
                     typer.Option("--table",
                                  help="a dispatch table; default: solve the calls")] = None,
    calls: CallsFile = None, model: Model = None, op: OpCases = None, program: Program = None,
    dtype: Dtype = "bfloat16",
    device: DeviceKind = None,
    check: Annotated[bool,
                     typer.Option("--check",
                                  help="write nothing: does this machine hold to it?")] = False,
    path: Annotated[Path,
                    typer.Option("--file", help="the lockfile")] = Path(lockfile.DEFAULT_PATH),
    as_json: Json = False,
) -> None:
    """Write a lockfile: for each range of calls the kernel, its version and build.

    --check: exit code 1 if not held.
    """
    if check:
        violations = lockfile.check_lockfile(path)
        if as_json:
            show.as_json({"ok": not violations, "violations": [v.to_json() for v in violations]})
        elif violations:
            show.table(("", "kernel", "what", "calls"),
                       [("!!", v.kernel, v.reason.message, v.row) for v in violations])
        else:
            show.text(f"this machine holds to {path}")
        raise typer.Exit(1 if violations else 0)
    choices = Table.load(table) if table is not None else solve_calls(
        _read_source(calls, model, op, program, dtype), device=device)
    written = lockfile.write_lockfile(choices, path)
    if as_json:
        show.as_json({"path": str(path), "id": written.id, **written.to_json()})
        return
    show.table(("kernel", "package", "version", "build", "certificate"),
               [(p.kernel, p.package, p.version, p.build, p.certificate) for p in written.pins])
    show.text(f"\n{len(written.rows)} ranges of calls, written to {path}")


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="a dispatch table or a lockfile")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another one")],
    everything: Annotated[bool, typer.Option("--all", help="also what is the same")] = False,
    as_json: Json = False,
) -> None:
    """Where two machines choose differently. Exit code 1 if they do anywhere."""
    ranges = lockfile.compare(lockfile.load_choices(a), lockfile.load_choices(b))
    differences = [d for d in ranges if d.verdict != "same"]
    shown = ranges if everything else differences
    if as_json:
        show.as_json({"same": not differences, "differences": [d.to_json() for d in shown]})
    else:
        show.table(("", "A", "B", "calls"),
                   [(d.verdict, d.a or "-", d.b or "-", d.calls) for d in shown])
        show.text(
            f"\n{len(ranges) - len(differences)} ranges are the same, {len(differences)} are not")
    raise typer.Exit(1 if differences else 0)


def dry_run(
    calls: CallsFile = None, model: Model = None, op: OpCases = None, program: Program = None,
    dtype: Dtype = "bfloat16",
    device: DeviceKind = None, as_json: Json = False,
) -> None:
    """Which kernel would serve each call, without running any.

    Exit code 1 if nothing can serve one of them.
    """
    if program is not None and (calls, model, op) == (None, None, None):
        choices = dryrun.dry_run(*_load_program(program))
    else:
        choices = dryrun.choices_for(_read_source(calls, model, op, program, dtype), device)
    if as_json:
        show.as_json(choices.to_json())
    else:
        show.table(("times", "op", "kernel", "expected", "from", "call", ""), [(
            str(row.call.count), row.call.op, row.kernel or "no kernel",
            f"{row.expected_us:.2f} us", row.source, row.shapes, row.note) for row in choices.rows],
                   right=("times", "expected"))
    raise typer.Exit(0 if all(row.kernel for row in choices.rows) else 1)


def _read_source(calls: Path | None, model: str | None, op: str | None, program: str | None,
                 dtype: str) -> tuple[Call, ...]:
    """Return the calls of the one source that was named."""
    sources = [source for source in (calls, model, op, program) if source is not None]
    if len(sources) != 1:
        raise ConfigError("give one of --calls, --model, --op and --program, got "
                          + (" and ".join(map(str, sources)) or "none"))
    if program is not None:
        return dryrun.dry_run(*_load_program(program)).calls
    check_calls_file(calls)
    if op is not None:
        inspection.dispatcher_of(op)           # raises for an unknown op
    return tuple(calls_for(sources[0], dtype=dtype))


def _load_program(name: str) -> tuple[Any, ...]:
    """Call module:function, which returns a model and its arguments."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"--program wants module:function, got {name!r}")
    # as python -m does, so that modules of this folder are found
    sys.path.insert(0, "")
    try:
        program = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"--program {name}: {e}") from e
    finally:
        sys.path.remove("")
    if not isinstance(program, tuple) or not program or not callable(program[0]):
        raise InvalidCall(
            f"--program {name} must give (model, *arguments), got {type(program).__name__}")
    return program
