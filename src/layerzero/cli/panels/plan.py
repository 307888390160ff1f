"""Choosing ahead of time: dispatch tables, lockfiles, dry runs, warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options as o
from ..root import declare

PANEL = "Choose ahead of time"


@declare(PANEL, "lz dry-run --model llama-3-8b --dtype bf16", "dry-run")
def dry_run(
    op: o.SomeOp = None, words: o.Shapes = None, calls: o.CallsFile = None, model: o.Model = None,
    program: o.Program = None, dtype: o.Dtype = "bfloat16", device: o.DeviceKind = None,
    batch: o.Batch = 1, prompt: o.Prompt = 512, context: o.Context = 4096, as_json: o.Json = False,
) -> None:
    """Which kernel would serve each call, without running any. Exit code 1 if nothing can serve
    one."""
    source = o.Source(op, words or (), calls, model, program, None, dtype, batch, prompt,
                      context).check(
        "lz dry-run", "--program")
    from ..commands.plan import tables
    raise typer.Exit(tables.dry_run(source, device, as_json))


@declare(PANEL, "lz solve --calls calls.jsonl -o dispatch_table.json",
         short="Decide calls now and write them as a dispatch table.")
def solve(
    op: o.SomeOp = None, words: o.Shapes = None, calls: o.CallsFile = None, model: o.Model = None,
    program: o.Program = None, dtype: o.Dtype = "bfloat16", device: o.DeviceKind = None,
    batch: o.Batch = 1, prompt: o.Prompt = 512, context: o.Context = 4096,
    out: Annotated[Path, typer.Option("--out", "-o", help="where the table goes")] = Path(
        "dispatch_table.json"),
    python: Annotated[Path | None, typer.Option(
        "--python", help="also write it as a Python module, here")] = None,
    fill: Annotated[bool, typer.Option(
        help="also decide the sizes between those that are given")] = True,
    as_json: o.Json = False,
) -> None:
    """Decide calls now and write a dispatch table: ranges of sizes and the kernel for each."""
    source = o.Source(op, words or (), calls, model, program, None, dtype, batch, prompt,
                      context).check(
        "lz solve", "--program")
    o.check_out("--out", out)
    o.check_out("--python", python)
    from ..commands.plan import tables
    raise typer.Exit(tables.solve(source, device, out, python, fill, as_json))


@declare(PANEL, "lz lock --table dispatch_table.json",
         short="Write a lockfile: kernels, versions and builds.")
def lock(
    op: o.SomeOp = None, words: o.Shapes = None, calls: o.CallsFile = None, model: o.Model = None,
    program: o.Program = None, table: o.TableFile = None, dtype: o.Dtype = "bfloat16",
    device: o.DeviceKind = None, batch: o.Batch = 1, prompt: o.Prompt = 512,
    context: o.Context = 4096, check: Annotated[bool, typer.Option(
        "--check", help="write nothing: does this machine hold to it?")] = False,
    path: Annotated[Path, typer.Option("--file", help="the lockfile")] = Path("layerzero.lock"),
    as_json: o.Json = False,
) -> None:
    """Write a lockfile: for each range of calls the kernel, its version and build.

    --check: exit code 1 if this machine does not hold to it.
    """
    if check:
        o.check_file("--file", path, "lz lock --table dispatch_table.json writes one")
        from ..commands.plan import tables
        raise typer.Exit(tables.check_lock(path, as_json))
    source = o.Source(op, words or (), calls, model, program, table, dtype, batch, prompt,
                      context).check(
        "lz lock", "--program", "--table")
    o.check_out("--file", path)
    from ..commands.plan import tables
    raise typer.Exit(tables.lock(source, device, path, as_json))


@declare(PANEL, "lz diff laptop.json server.json")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=(
        "a dispatch table or a lockfile; or a node, a model of device or a place of the shared "
        "store, as lz perf places lists them"))],
    b: Annotated[Path, typer.Argument(metavar="B", help="another one")],
    everything: Annotated[bool, typer.Option("--all", help="also what is the same")] = False,
    as_json: o.Json = False,
) -> None:
    """Where two machines choose differently. Exit code 1 if they do anywhere."""
    from ..commands.plan import tables
    raise typer.Exit(tables.diff(a, b, everything, as_json))


@declare(PANEL, "lz warmup --calls calls.jsonl --timeout 600",
         short="Compile what these calls need before they come.")
def warmup(
    op: o.SomeOp = None, words: o.Shapes = None, calls: o.CallsFile = None, model: o.Model = None,
    table: o.TableFile = None, timeout: Annotated[float | None, typer.Option(
        min=0.0, help="seconds after which what is not ready is given up")] = None,
    dtype: o.Dtype = "bfloat16", device: o.DeviceKind = None, batch: o.Batch = 1,
    prompt: o.Prompt = 512, context: o.Context = 4096, as_json: o.Json = False,
) -> None:
    """Compile what these calls need, into caches that later processes find it in.

    Exit code 1 if a call is not ready, or is served by another kernel than was wanted.
    """
    source = o.Source(op, words or (), calls, model, None, table, dtype, batch, prompt,
                      context).check(
        "lz warmup", "--table")
    from ..commands.plan.warmup import warmup as run
    raise typer.Exit(run(source, device, timeout, as_json))
