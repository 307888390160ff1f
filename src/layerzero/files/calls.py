"""Files of calls, one call a line, such as `lz record` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Union

from ..spec.call import Call
from ..spec.errors import ConfigError
from .reading import FileLimits, read_json_lines
from .sealed import replace_output

LIMITS = FileLimits(size=256 << 20)
Calls = Union[Iterable[Call], str, "os.PathLike[str]"]


def write_calls(path: Path, calls: Iterable[Call]) -> None:
    """One call a line."""
    replace_output(path, "".join(json.dumps(call.to_json()) + "\n" for call in calls))


def read_calls(path: Path) -> tuple[Call, ...]:
    lines = read_json_lines(path, "calls as JSON lines, such as lz record writes", limits=LIMITS,
                            nan=True)
    return tuple(Call.from_json(data, f"{path}:{number}") for number, data in lines)


def load_calls(calls: Calls, wanted: str) -> tuple[Call, ...]:
    """Return the calls of an iterable, of a file, or one call; anything else is a ConfigError that
    begins with what was `wanted`."""
    if isinstance(calls, (str, os.PathLike)):
        return read_calls(Path(calls))
    workload = (calls,) if isinstance(calls, Call) else tuple(calls)
    wrong = next((c for c in workload if not isinstance(c, Call)), None)
    if wrong is not None:
        raise ConfigError(f"{wanted}, got {wrong!r:.120}")
    return workload
