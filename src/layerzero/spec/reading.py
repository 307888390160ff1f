"""Reading what others wrote: one way to a file's bytes and one to its JSON, with a limit on everything.

A file may be hostile or damaged. It may be larger than memory, nested deeper than Python's stack, hold numbers
that no machine has, one key twice, or half a character; what is read here is none of that. All that goes wrong
is a `DataError` (or the error that is asked for) that names the file, what was wanted and what came.
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

from .errors import ConfigError, DataError

MIB = 1 << 20
Path = Union[str, "os.PathLike[str]"]
Error = Union[type[DataError], type[ConfigError]]


class Limits(NamedTuple):
    """How much a file may ask of its reader. Every format here stays far below."""

    size: int = 64 * MIB                       # bytes of the file
    line: int = 16 * MIB                       # bytes of one line of JSON Lines
    depth: int = 64                            # of lists and objects in each other
    digits: int = 40                           # of a whole number: any of them can be made a float


LIMITS = Limits()
_SURROGATE = re.compile(r"\\u[dD][89abcdefABCDEF]")


def read_bytes(path: Path, wanted: str, *, size: int = LIMITS.size, error: Error = DataError) -> bytes:
    """The content of a file of at most `size` bytes; `wanted` says what it should be, for the message."""
    with _opened(path, wanted, error) as file:
        content = file.read(size + 1)
    if len(content) > size:
        raise error(f"{path}: wanted {wanted} of at most {_bytes(size)}; it is larger")
    return content


@contextmanager
def _opened(path: Path, wanted: str, error: Error) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", opener=_opener) as file:
            if not (stat.S_ISREG(os.fstat(file.fileno()).st_mode) or _handed_over(path)):
                raise OSError(0, "it is not a regular file")
            yield file
    except OSError as e:
        raise error(f"{path}: wanted {wanted}; cannot read it: {e.strerror or e}") from e
    except (DataError, ConfigError):
        raise
    except ValueError as e:                    # a zero byte or half a character in the path
        raise error(f"{path!r}: wanted {wanted}; that is no path: {e}") from e


def _opener(path: str, flags: int) -> int:
    """A FIFO among the files of a folder must not be waited for."""
    return os.open(path, flags if _handed_over(path) else flags | getattr(os, "O_NONBLOCK", 0))


def _handed_over(path: Path) -> bool:
    """Is it a pipe of the shell, as /dev/stdin and <(...) are?"""
    return os.fspath(path).startswith(("/dev/", "/proc/"))


def read_text(path: Path, wanted: str, *, size: int = LIMITS.size, error: Error = DataError) -> str:
    """The content as UTF-8; a byte order mark is left out."""
    return _decoded(read_bytes(path, wanted, size=size, error=error), str(path), wanted, error)


def read_json(path: Path, wanted: str, *, limits: Limits = LIMITS, nan: bool = False, unique: bool = True,
              error: Error = DataError) -> Any:
    """A file of one JSON value; see `parse_json`."""
    return parse_json(read_bytes(path, wanted, size=limits.size, error=error), str(path), wanted, limits=limits,
                      nan=nan, unique=unique, error=error)


def read_json_lines(path: Path, wanted: str, *, limits: Limits = LIMITS, nan: bool = False, error: Error = DataError
                    ) -> Iterator[tuple[int, Any]]:
    """(number, value) of each line that is not blank; the error names the line."""
    for number, line in lines_of(path, wanted, limits=limits, error=error):
        yield number, parse_json(line, f"{path}:{number}", "one JSON value on the line", limits=limits, nan=nan,
                                 error=error)


def lines_of(path: Path, wanted: str, *, limits: Limits = LIMITS, error: Error = DataError
             ) -> Iterator[tuple[int, bytes]]:
    """(number, content) of each line that is not blank. Only a line feed ends one: JSON may hold the others."""
    read = number = 0
    with _opened(path, wanted, error) as file:
        while line := file.readline(limits.line + 2):
            read, number = read + len(line), number + 1
            if read > limits.size:
                raise error(f"{path}: wanted {wanted} of at most {_bytes(limits.size)}; it is larger")
            line = line.removesuffix(b"\n")
            if len(line) > limits.line:
                raise error(f"{path}:{number}: wanted lines of at most {_bytes(limits.line)}; it is longer")
            if line.strip():
                yield number, line


def parse_json(content: bytes | str, origin: str, wanted: str, *, limits: Limits = LIMITS, nan: bool = False,
               unique: bool = True, error: Error = DataError) -> Any:
    """The value of a JSON text.

    `nan` admits NaN and Infinity, which JSON does not have and Python writes; `unique=False` takes the last of
    several members of one name, as other libraries do.
    """
    text = content if isinstance(content, str) else _decoded(content, origin, wanted, error)

    def whole(digits: str) -> int:
        if len(digits) > limits.digits:
            raise ValueError(f"a number of {len(digits)} digits; at most {limits.digits} are read")
        return int(digits)

    try:
        value = json.loads(text, parse_int=whole, parse_float=None if nan else _finite,
                           parse_constant=None if nan else _no_constant,
                           object_pairs_hook=_unique if unique else None)
        if _SURROGATE.search(text):            # a pair of them is one character, one alone is none
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise error(f"{origin}: wanted {wanted}; its JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise error(f"{origin}: wanted {wanted}; its JSON holds half of a surrogate pair, which is no character"
                    ) from None
    except ValueError as e:
        raise error(f"{origin}: wanted {wanted}; it is not JSON: {e}") from e
    if _deeper(value, limits.depth):
        raise error(f"{origin}: wanted {wanted}; its JSON is nested more than {limits.depth} deep")
    return value


def _deeper(value: Any, depth: int) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(depth):
        if not level:
            return False
        level = [v for part in level for v in (part.values() if type(part) is dict else part)
                 if type(v) is dict or type(v) is list]
    return bool(level)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r:.80} is given twice in one object")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is beyond the largest number")
    return number


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _decoded(content: bytes, origin: str, wanted: str, error: Error) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise error(f"{origin}: wanted {wanted} in UTF-8; byte {e.start} is not") from e


def _bytes(n: int) -> str:
    return f"{n // MIB} MiB" if n >= MIB else f"{n // 1024} KiB"


# What may be shown of it

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"             # C0, C1: ESC, CSI, OSC, CR and their kin
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"    # order and width of text
    "\u2028\u2029\ud800-\udfff\U000e0000-\U000e007f]")


def printable(text: str) -> str:
    """As a terminal may be sent it: what would steer the terminal or reorder the line stands as its escape."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


# What libraries written in Rust do

P = ParamSpec("P")
T = TypeVar("T")


class Panicked(RuntimeError):
    """A library written in Rust panicked. Its own exception is none that `except Exception` catches."""


def no_panic(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with a panic of a Rust library in it raised as `Panicked`, which is an Exception."""
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as e:             # each library has a class of its own, known by its name alone
            if type(e).__name__ != "PanicException":
                raise
            raise Panicked(f"a Rust library panicked: {e}") from e

    return call
