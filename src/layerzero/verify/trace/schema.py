"""Reading JSON into typed models: every mistake of a file with its place, all at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...spec import reading
from ...spec.errors import DataError

MOST_ERRORS = 10
T = TypeVar("T")


class Fields:
    """One JSON object being read. A wrong field is noted under its path and read as a harmless value."""

    def __init__(self, data: Any, path: str, errors: list[str]) -> None:
        self.path, self.errors = path, errors
        if not isinstance(data, Mapping):
            self.wrong("", "an object", data)
            data = {}
        self.data: Mapping[str, Any] = data

    def wrong(self, name: str, want: str, got: Any) -> None:
        where = ".".join(part for part in (self.path, name) if part) or "the file"
        self.errors.append(f"{where}: must be {want}, got {_shown(got)}")

    def text(self, name: str, default: str | None = None, *, empty: bool = False) -> str:
        value = self.data.get(name, default)
        if not isinstance(value, str) or (not value and not empty):
            if name not in self.data:
                self.missing(name)
            else:
                self.wrong(name, "a text" if empty else "a text that is not empty", value)
            return ""
        return value if self.written(name, value) else ""

    def optional_text(self, name: str) -> str:
        return self.text(name, empty=True) if self.data.get(name) is not None else ""

    def number(self, name: str, default: float | None = None, *, least: float | None = None) -> float:
        value = self.data.get(name, default)
        value = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}.get(value, value) \
            if isinstance(value, str) else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.missing(name) if value is None else self.wrong(name, "a number", value)
            return 0.0
        if isinstance(value, int) and abs(value) > 10**300:    # no float holds it
            self.wrong(name, "a number", value)
            return 0.0
        if least is not None and value < least:
            self.wrong(name, f"a number >= {least:g}", value)
        return value

    def count(self, name: str) -> int:
        value = self.data.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.missing(name) if name not in self.data else self.wrong(name, "a whole number >= 0", value)
            return 0
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            self.wrong(name, "true or false", value)
            return default
        return value

    def choice(self, name: str, allowed: Collection[str], default: str | None = None) -> str:
        value = self.data.get(name, default)
        if value not in allowed:
            self.missing(name) if value is None else self.wrong(name, f"one of {', '.join(allowed)}", value)
            return next(iter(allowed))
        return str(value)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.data.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or any(not isinstance(v, str) or not v for v in value):
            self.wrong(name, "a list of texts that are not empty", value)
            return ()
        return tuple(value) if self.written(name, "".join(value)) else ()

    def inner(self, name: str) -> Fields:
        if name not in self.data:
            self.missing(name)
        return Fields(self.data.get(name, {}), self.at(name), self.errors)

    def each(self, name: str, read: Callable[[Fields], T]) -> dict[str, T]:
        """The members of an object of objects, in their order."""
        if name not in self.data:
            self.missing(name)
        members = self.data.get(name, {})
        if not isinstance(members, Mapping):
            self.wrong(name, "an object", members)
            return {}
        if "" in members:
            self.errors.append(f"{self.at(name)}: has a member without a name")
        if not self.written(name, "".join(map(str, members))):
            return {}
        return {key: read(Fields(value, f"{self.at(name)}.{key}", self.errors)) for key, value in members.items()}

    def listed(self, name: str, read: Callable[[Fields], T]) -> tuple[T, ...]:
        value = self.data.get(name)
        if not isinstance(value, list) or not value:
            self.missing(name) if value is None else self.wrong(name, "a list that is not empty", value)
            return ()
        return tuple(read(Fields(v, f"{self.at(name)}[{i}]", self.errors)) for i, v in enumerate(value))

    def written(self, name: str, text: str) -> bool:
        """Can it be written to a file? JSON may hold half of a surrogate pair, which is no character."""
        if text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text):
            return True
        self.wrong(name, "text without lone surrogates", text)
        return False

    def missing(self, name: str) -> None:
        self.errors.append(f"{self.at(name)}: is missing")

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def read(data: Any, model: Callable[[Fields], T], what: str, origin: str) -> T:
    """`data` as a model; DataError with every mistake if it is none."""
    errors: list[str] = []
    found = model(Fields(data, "", errors))
    if errors:
        more = [f"... and {len(errors) - MOST_ERRORS} more"] if len(errors) > MOST_ERRORS else []
        raise DataError("\n".join([f"{origin} is no valid {what}:",
                                   *(f"  {line}" for line in (*errors[:MOST_ERRORS], *more))]))
    return found


def read_json(path: Path) -> Any:
    return reading.read_json(path, "a readable JSON file")


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(origin, value) for each line of a JSON Lines file that is not blank."""
    for number, data in reading.read_json_lines(path, "a readable JSON Lines file"):
        yield f"{path}:{number}", data


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**80 else "a very large number"
    return text if len(text) <= 80 else text[:77] + "..."
