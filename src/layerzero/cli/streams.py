"""What `lz` writes to a terminal steers no terminal: names come from files, and files from anywhere.

For as long as a command runs, both streams are behind this one. What would move the cursor, change the title, hide or
reorder text stands there as its escape, `\\x1b`; colours are put on by rich, behind it (see show.console).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from ..spec.reading import printable


class Escaped:
    """A text stream whose `write` lets no control character through but a line feed and a tab."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        shown = printable(text)
        try:
            self.raw.write(shown)
        except UnicodeEncodeError:             # a terminal of ASCII alone
            self.raw.write(shown.encode("ascii", "backslashreplace").decode("ascii"))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextlib.contextmanager
def escaped() -> Iterator[None]:
    """In this block, sys.stdout and sys.stderr are `Escaped`."""
    with contextlib.redirect_stdout(Escaped(sys.stdout)), contextlib.redirect_stderr(Escaped(sys.stderr)):
        yield


def raw(stream: TextIO) -> TextIO:
    """The stream itself, for those who see to it that nothing harmful is written."""
    return stream.raw if isinstance(stream, Escaped) else stream
