"""The location of the cache folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..spec.errors import ConfigError


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the folder of measurements, certificates and compiled code, which may not exist."""
    environ = os.environ if environ is None else environ
    text = environ.get("LAYERZERO_CACHE_DIR", "").strip()
    if text:
        return expand_path(text, "LAYERZERO_CACHE_DIR")
    base = environ.get("XDG_CACHE_HOME", "").strip()
    # The XDG specification tells programs to ignore a relative path.
    home = Path(base) if os.path.isabs(base) else expand_path("~/.cache", "LAYERZERO_CACHE_DIR")
    return home / "layerzero"


def expand_path(text: str, variable: str) -> Path:
    """Returns a path with ~ expanded; an error asks the user to set `variable`."""
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"cannot expand {text!r}: {e}; set {variable} to an absolute path") from e
