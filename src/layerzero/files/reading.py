"""Reading of untrusted files: their bytes, text and JSON, with a limit on everything.

A file may be hostile or damaged: larger than memory, nested deeper than Python's stack, with
numbers beyond any machine, one key twice, or half a character. All of that is refused with a
`DataError` (or the error class passed in) that names the file, what was expected and what came.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, ParamSpec, TypeVar, Union

from ..spec.errors import ConfigError, DataError

MIB = 1 << 20
Path = Union[str, "os.PathLike[str]"]
Error = Union[type[DataError], type[ConfigError]]


class FileLimits(NamedTuple):
    """The largest file that is read. Every format here stays far below."""

    size: int = 64 * MIB                       # bytes of the file
    line: int = 16 * MIB                       # bytes of one line of JSON Lines
    depth: int = 64                            # of lists and objects in each other
    digits: int = 40                           # of a whole number: any such number fits a float


LIMITS = FileLimits()
_SURROGATE = re.compile(r"\\u[dD][89abcdefABCDEF]")


def read_bytes(path: Path, expected: str, *, size: int = LIMITS.size,
               error: Error = DataError) -> bytes:
    """Returns the content of a file of at most `size` bytes; errors name what was `expected`."""
    with _open(path, expected, error) as file:
        content = file.read(size + 1)
    if len(content) > size:
        raise error(f"{path}: wanted {expected} of at most {_bytes(size)}; it is larger")
    return content


@contextmanager
def _open(path: Path, expected: str, error: Error) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", opener=_opener) as file:
            if not (stat.S_ISREG(os.fstat(file.fileno()).st_mode) or _is_shell_pipe(path)):
                raise OSError(0, "it is not a regular file")
            yield file
    except OSError as e:
        raise error(f"{path}: wanted {expected}; cannot read it: {e.strerror or e}") from e
    except (DataError, ConfigError):
        raise
    except ValueError as e:                    # a zero byte or half a character in the path
        raise error(f"{path!r}: wanted {expected}; that is no path: {e}") from e


def _opener(path: str, flags: int) -> int:
    """Open without waiting for the writer of a FIFO, except of one that the shell passed."""
    return os.open(path, flags if _is_shell_pipe(path) else flags | getattr(os, "O_NONBLOCK", 0))


def _is_shell_pipe(path: Path) -> bool:
    """Returns whether it is a pipe of the shell, like /dev/stdin and <(...)."""
    return os.fspath(path).startswith(("/dev/", "/proc/"))


def read_text(path: Path, expected: str, *, size: int = LIMITS.size,
              error: Error = DataError) -> str:
    """Returns the content as UTF-8, without a byte order mark."""
    return _decode(read_bytes(path, expected, size=size, error=error), str(path), expected, error)


def read_json(path: Path, expected: str, *, limits: FileLimits = LIMITS, nan: bool = False) -> Any:
    """Returns the JSON value in a file; see `parse_json`."""
    return parse_json(read_bytes(path, expected, size=limits.size), str(path), expected,
                      limits=limits, nan=nan)


def read_json_lines(path: Path, expected: str, *, limits: FileLimits = LIMITS,
                    nan: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) for each line that is not blank; an error names the line."""
    for number, line in read_lines(path, expected, limits=limits):
        yield number, parse_json(line, f"{path}:{number}", "one JSON value on the line",
                                 limits=limits, nan=nan)


def read_lines(path: Path, expected: str, *,
               limits: FileLimits = LIMITS) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, content) for each line that is not blank; only a line feed ends one."""
    size = number = 0
    with _open(path, expected, DataError) as file:
        while line := file.readline(limits.line + 2):
            size, number = size + len(line), number + 1
            if size > limits.size:
                raise DataError(
                    f"{path}: wanted {expected} of at most {_bytes(limits.size)}; it is larger")
            line = line.removesuffix(b"\n")
            if len(line) > limits.line:
                raise DataError(
                    f"{path}:{number}: wanted lines of at most {_bytes(limits.line)}; it is longer")
            if line.strip():
                yield number, line


def parse_json(content: bytes | str, origin: str, expected: str, *, limits: FileLimits = LIMITS,
               nan: bool = False, unique: bool = True) -> Any:
    """Returns the value of a JSON text.

    `nan` allows NaN and Infinity, which Python writes although JSON has none; `unique=False` takes
    the last of several members with one name, as other libraries do.
    """
    text = content if isinstance(content, str) else _decode(content, origin, expected, DataError)

    def parse_int(digits: str) -> int:
        if len(digits) > limits.digits:
            raise ValueError(f"a number of {len(digits)} digits; at most {limits.digits} are read")
        return int(digits)

    try:
        value = json.loads(text, parse_int=parse_int, parse_float=None if nan else _parse_finite,
                           parse_constant=None if nan else _refuse_constant,
                           object_pairs_hook=_unique_members if unique else None)
        if _SURROGATE.search(text):            # a pair of them is one character, one alone is none
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise DataError(f"{origin}: wanted {expected}; its JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise DataError(
            f"{origin}: wanted {expected}; its JSON holds half of a surrogate pair, which is no "
            "character") from None
    except ValueError as e:
        raise DataError(f"{origin}: wanted {expected}; it is not JSON: {e}") from e
    if _is_deeper(value, limits.depth):
        raise DataError(
            f"{origin}: wanted {expected}; its JSON is nested more than {limits.depth} deep")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(depth):
        if not level:
            return False
        level = [v for part in level for v in (part.values() if type(part) is dict else part)
                 if type(v) is dict or type(v) is list]
    return bool(level)


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r:.80} is given twice in one object")
    return members


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is beyond the largest number")
    return number


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _decode(content: bytes, origin: str, expected: str, error: Error) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise error(f"{origin}: wanted {expected} in UTF-8; byte {e.start} is not") from e


def _bytes(n: int) -> str:
    return f"{n // MIB} MiB" if n >= MIB else f"{n // 1024} KiB"


# Printing of untrusted text

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"             # C0, C1: ESC, CSI, OSC, CR and their kin
    # order and width of text
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\u2028\u2029\ud800-\udfff\U000e0000-\U000e007f]")


def printable(text: str) -> str:
    """Returns text for a terminal: characters that would steer it or reorder the line are
    escaped."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape",
                                                     "surrogatepass").decode("ascii"), text)


# Panics of libraries written in Rust

P = ParamSpec("P")
T = TypeVar("T")


class RustPanic(RuntimeError):
    """A library written in Rust panicked. `except Exception` does not catch its own exception."""


def no_panic(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap `function` so that a panic of a Rust library in it is raised as `RustPanic`."""
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        # each library has a class of its own, known by its name alone
        except BaseException as e:
            if type(e).__name__ != "PanicException":
                raise
            raise RustPanic(f"a Rust library panicked: {e}") from e

    return call
