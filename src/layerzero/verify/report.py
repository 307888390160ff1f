"""What was proved, when and on what: summaries of logged verdicts."""

from __future__ import annotations

import hashlib
from pathlib import Path

# What a verdict of a kernel depends on.
_ROOMS = ("ops", "backends", "dispatch", "verify/kernel")
_SUFFIXES = (".py", ".cpp", ".h", ".cu")


def sources_digest() -> str:
    """Returns a digest of the contracts, the kernels, the call and the checks: verdicts with the
    same one are about the same code."""
    home, digest = Path(__file__).parents[1], hashlib.sha256()
    for room in _ROOMS:
        for path in sorted(p for p in (home / room).rglob("*") if p.suffix in _SUFFIXES):
            digest.update(f"{path.relative_to(home).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
