"""`lz bundle`: what a remote developer needs to debug this machine, as one archive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...integrations.bundle import write_bundle
from .. import show
from ..options import CallsFile, DeviceKind, Json, check_calls_file
from .ready import LockFile, TableFile


def bundle(
    out: Annotated[Path, typer.Option("--out", "-o", help="the archive, such as bundle.tar.gz")],
    table: TableFile = None, lock: LockFile = None, calls: CallsFile = None,
    log: Annotated[Path | None,
                   typer.Option("--log", help="a log file, whose end is added")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a file that is there")] = False,
    device: DeviceKind = None, as_json: Json = False,
) -> None:
    """Write capabilities, table, measurements, lockfile, environment, events and readiness,
    redacted, to one file.
    """
    check_calls_file(calls)
    manifest = write_bundle(out, calls=() if calls is None else calls, device=device, table=table,
                            lock=lock, log=log,
                            force=force)
    if as_json:
        show.as_json({"path": str(out), **manifest})
        return
    show.table(("file", "bytes", "sha256"), [(name, str(file["bytes"]), file["sha256"][:16])
                                             for name, file in manifest["files"].items()],
               right=("bytes",))
    for name, reason in manifest["left_out"].items():
        show.text(f"left out: {name}: {reason}")
    show.text(f"\n{out}: {'ready' if manifest['ready'] else 'not ready'}, "
              f"hidden: {', '.join(manifest['redacted']) or 'secrets only'}")
