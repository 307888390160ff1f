"""`lz bundle`: what a remote developer needs to debug this machine, as one archive."""

from __future__ import annotations

from pathlib import Path

from ....integrations.bundle import write_bundle
from ... import show


def bundle(out: Path, table: Path | None, lock: Path | None, calls: Path | None, log: Path | None,
           force: bool, device: str | None, as_json: bool) -> int:
    manifest = write_bundle(out, calls=() if calls is None else calls, device=device, table=table,
                            lock=lock, log=log, force=force)
    if as_json:
        show.as_json({"path": str(out), **manifest})
        return 0
    show.table(("file", "bytes", "sha256"), [(name, str(file["bytes"]), file["sha256"][:16])
                                             for name, file in manifest["files"].items()],
               right=("bytes",))
    for name, reason in manifest["left_out"].items():
        show.text(f"left out: {name}: {reason}")
    show.text(f"\n{out}: {'ready' if manifest['ready'] else 'not ready'}, "
              f"hidden: {', '.join(manifest['redacted']) or 'secrets only'}")
    return 0
