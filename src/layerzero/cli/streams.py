"""Output that cannot control the terminal: names come from files, and files from anywhere.

While a command runs, stdout and stderr are wrapped. A character that would move the cursor, change
the title, hide or reorder text is printed as its escape, `\\x1b`; rich writes colours to the stream
below.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

from ..files.reading import printable

PIPE_CLOSED = 141                              # what a shell says of a program that SIGPIPE ended


class Escaped:
    """A text stream whose `write` lets no control character through but a line feed and a tab."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        shown = printable(text)
        with end_quietly(self.raw):
            try:
                self.raw.write(shown)
            except UnicodeEncodeError:         # an ASCII-only terminal
                self.raw.write(shown.encode("ascii", "backslashreplace").decode("ascii"))
        return len(text)

    def flush(self) -> None:
        with end_quietly(self.raw):
            self.raw.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextlib.contextmanager
def end_quietly(stream: TextIO) -> Iterator[None]:
    """End the command in silence if the reader of its output is gone, as with `| head`."""
    try:
        yield
    except BrokenPipeError:
        stop_writing(stream)


def stop_writing(stream: TextIO) -> NoReturn:
    """End the command. What is still in the stream's buffer goes to the null device: Python writes
    it out once more at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    raise SystemExit(PIPE_CLOSED)


def _open_missing() -> None:
    """Open on the null device what the caller closed, as `lz doctor >&-` does: the next file that
    is opened would take its number, and get what libraries print."""
    if sys.stdout is None or sys.stderr is None:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(descriptor, True)
        os.close(descriptor)
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


@contextlib.contextmanager
def escape_output() -> Iterator[None]:
    """Wrap sys.stdout and sys.stderr in `Escaped`."""
    _open_missing()
    with contextlib.redirect_stdout(Escaped(sys.stdout)), contextlib.redirect_stderr(
            Escaped(sys.stderr)):
        try:
            yield
        finally:                               # not at the end of Python, which would complain
            sys.stdout.flush()


def raw(stream: TextIO) -> TextIO:
    """Return the stream below an `Escaped`, for writers that escape text themselves."""
    return stream.raw if isinstance(stream, Escaped) else stream
