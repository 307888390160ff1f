"""The setting `isolation`: which kernels run in worker processes, and in which interpreter.

It is a list of `PATTERN=MODE` or `PATTERN=MODE:PYTHON`. The mode `worker` always isolates, `auto`
only where the library cannot be used in this process; a bare `auto` means `*=auto`. The first entry
that covers a kernel decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ..spec.names import kernel_patterns
from .conditions import matches_any

MODES = ("worker", "auto")
_ENTRY = re.compile(r"([a-z0-9_.*?!\[\]-]{1,200})\s*=\s*(worker|auto)(?:\s*:\s*(\S.*))?")


class Isolation(NamedTuple):
    """One entry: kernels, the mode, and the interpreter; "" for the one that runs this process."""

    patterns: tuple[str, ...]
    mode: str
    python: str

    def covers(self, kernel_id: str) -> bool:
        return matches_any(self.patterns, kernel_id)


def canonical(value: str | Iterable[str]) -> str:
    """Returns the setting as one text; ValueError for what is no entry."""
    entries = value.split(",") if isinstance(value, str) else [str(entry) for entry in value]
    words = [entry.strip() for entry in entries if entry.strip()]
    words = ["*=auto" if word == "auto" else word for word in words]
    matches = [_ENTRY.fullmatch(word) for word in words]
    if not all(matches) or any("," in word for word in words):
        raise ValueError
    return ",".join(f"{m[1]}={m[2]}" + (f":{m[3]}" if m[3] else "") for m in matches if m)


@lru_cache(maxsize=64)
def parse(text: str) -> tuple[Isolation, ...]:
    matches = (_ENTRY.fullmatch(word) for word in text.split(",") if word)
    return tuple(Isolation(tuple(kernel_patterns(m[1])), m[2], m[3] or "") for m in matches if m)
