"""The `lz` command, which prints what the library answers. Needs the extra `layerzero[cli]`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from ..spec.errors import LayerZeroError
from . import streams


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 is yes, 1 is no, 2 is an error, which is one message and no
    traceback.
    """
    with streams.escape_output():
        _main(argv)


def _main(argv: Sequence[str] | None) -> None:
    try:
        from .app import app
    except ModuleNotFoundError as e:
        library = (e.name or "").partition(".")[0]
        if library not in ("typer", "rich", "click"):
            raise
        print(f"lz needs {library}, which is not installed: pip install 'layerzero[cli]'",
              file=sys.stderr)
        raise SystemExit(2) from None
    with warnings.catch_warnings():
        warnings.showwarning = _print_warning
        try:
            app(args=argv, prog_name="lz")
        except LayerZeroError as e:
            print(f"error: {e}", file=sys.stderr)
            raise SystemExit(2) from None


def _print_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int,
                   file: TextIO | None = None, line: str | None = None) -> None:
    first, _, _ = str(message).strip().partition("\n")     # torch appends a C++ stack to some
    print(f"warning: {first}", file=sys.stderr)
