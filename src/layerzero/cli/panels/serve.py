"""Serving: may this machine serve, its metrics, and what a remote developer needs to look into it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options as o
from ..root import declare

PANEL = "Serve"


@declare(PANEL, "lz ready --calls calls.jsonl --strict")
def ready(
    op: o.SomeOp = None, words: o.Shapes = None, calls: o.CallsFile = None, model: o.Model = None,
    table: o.TableFile = None, lock: o.LockFile = None, capabilities: o.CapabilitiesFile = None,
    strict: Annotated[bool, typer.Option("--strict", help="a warning counts as a failure")] = False,
    dtype: o.Dtype = "bfloat16", device: o.DeviceKind = None, batch: o.Batch = 1,
    prompt: o.Prompt = 512, context: o.Context = 4096, as_json: o.Json = False,
) -> None:
    """May this machine serve? Nothing is run or written. Exit code 0: ready, 1: not ready."""
    source = o.Source(op, words or (), calls, model, dtype=dtype, batch=batch, prompt=prompt,
                      context=context).check("lz ready", needed=False)
    from ..commands.serve.ready import ready as run
    raise typer.Exit(run(source, table, lock, capabilities, device, strict, as_json))


@declare(PANEL, "lz serve-metrics --port 9400 --calls calls.jsonl", "serve-metrics",
         short="HTTP /metrics, /ready and /live of this machine.")
def serve_metrics(
    op: o.SomeOp = None, words: o.Shapes = None, calls: o.CallsFile = None, model: o.Model = None,
    host: Annotated[str, typer.Option(
        help="the address to listen on; 0.0.0.0 lets others in")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 9400,
    every: Annotated[float, typer.Option(
        min=0.0, help="seconds between two readiness checks")] = 5.0,
    table: o.TableFile = None, lock: o.LockFile = None, capabilities: o.CapabilitiesFile = None,
    dtype: o.Dtype = "bfloat16", device: o.DeviceKind = None, batch: o.Batch = 1,
    prompt: o.Prompt = 512, context: o.Context = 4096, as_json: o.Json = False,
) -> None:
    """HTTP /metrics for Prometheus, /ready (200 or 503, the report of lz ready) and /live, until
    SIGTERM.

    It speaks for this machine. A process that serves has its own: lz.serve_metrics(port). With
    --json one object, with the address, is printed when it listens.
    """
    source = o.Source(op, words or (), calls, model, dtype=dtype, batch=batch, prompt=prompt,
                      context=context).check("lz serve-metrics", needed=False)
    from ..commands.serve.metrics import serve_metrics as run
    raise typer.Exit(run(source, host, port, every, table, lock, capabilities, device, as_json))


@declare(PANEL, "lz bundle --out bundle.tar.gz --log server.log",
         short="All that is needed to look into this machine, as one archive.")
def bundle(
    out: Annotated[Path, typer.Option("--out", "-o", help="the archive, such as bundle.tar.gz")],
    table: o.TableFile = None, lock: o.LockFile = None, calls: o.CallsFile = None,
    log: Annotated[Path | None, typer.Option(
        "--log", help="a log file, whose end is added")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a file that is there")] = False,
    device: o.DeviceKind = None, as_json: o.Json = False,
) -> None:
    """Write capabilities, table, measurements, lockfile, environment, events and readiness,
    redacted, to one file."""
    o.check_file("--calls", calls, "lz record -- python app.py writes one")
    from ..commands.serve.bundle import bundle as run
    raise typer.Exit(run(out, table, lock, calls, log, force, device, as_json))
