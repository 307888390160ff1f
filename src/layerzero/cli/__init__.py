"""The `lz` command, which prints what the library answers. Needs the extra `layerzero[cli]`."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn, TextIO

from ..spec.errors import LayerZeroError
from . import streams


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with one of `root.EXIT_CODES`; an error is one message."""
    with streams.escape_output():
        _main(argv)


def _main(argv: Sequence[str] | None) -> None:
    with warnings.catch_warnings():
        warnings.showwarning = _print_warning
        try:
            from .app import command
            command()(args=argv, prog_name="lz")
        except LayerZeroError as e:
            _stop(f"error: {e}")
        except ModuleNotFoundError as e:
            library = (e.name or "").partition(".")[0]
            if library not in ("typer", "rich", "click"):
                _fault()
            _stop(f"lz needs {library}, which is not installed: pip install 'layerzero[cli]'")
        except OSError as e:
            _stop(f"error: {e}")
        except Exception:          # the last resort: no exit code of an answer may come of a fault
            _fault()


def _stop(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2) from None


def _fault() -> NoReturn:
    traceback.print_exc()
    print("error: this is a fault of lz; please report it with the lines above and `lz doctor`",
          file=sys.stderr)
    raise SystemExit(3) from None


def _print_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int,
                   file: TextIO | None = None, line: str | None = None) -> None:
    first, _, _ = str(message).strip().partition("\n")     # torch appends a C++ stack to some
    print(f"warning: {first}", file=sys.stderr)
