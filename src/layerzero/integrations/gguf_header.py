"""Reads the metadata of a GGUF file, with a limit on everything.

The gguf library maps every string, which takes seconds, and trusts every length in the file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

from ..spec.errors import DataError

# items of an array, bytes of a string, bytes of all metadata
_MOST_ITEMS = 1 << 26
_MOST_DEPTH = 4                                # of nested arrays; real files have one level
_MOST_TENSORS = 1 << 20

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
            11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


def gguf_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a GGUF file; DataError if it is damaged or no GGUF file."""
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise DataError(
                    f"{path}: wanted a GGUF file, found one that does not begin with GGUF")
            version, tensors, count = struct.unpack("<IQQ", file.read(20))
            if version not in (2, 3):
                raise DataError(
                    f"{path}: wanted version 2 or 3 of GGUF, got {version}; write the file again "
                    "with a newer converter")
            size = os.fstat(file.fileno()).st_size
            if tensors > _MOST_TENSORS:
                raise KeyError(f"{tensors} tensors")
            return dict(_pairs(file, count, min(size, _MOST_ITEMS)))
    except DataError:
        raise
    except (struct.error, UnicodeDecodeError, KeyError) as e:
        raise DataError(
            f"{path}: wanted a GGUF file, found one that is cut short or damaged: {e!r}") from e
    except OSError as e:
        raise DataError(f"{path}: wanted a GGUF file; it cannot be read: {e.strerror or e}") from e
    except ValueError as e:                    # a null byte in the path
        raise DataError(f"{path!r}: that is no path: {e}") from e


def _pairs(file: BinaryIO, count: int, size: int) -> Iterator[tuple[str, Any]]:
    def number(kind: int) -> Any:
        form = _NUMBERS[kind]
        return struct.unpack(form, file.read(struct.calcsize(form)))[0]

    def checked(n: int) -> int:
        if n > size - file.tell() or n > size:     # a damaged length must not ask for all memory
            raise KeyError(f"{n} items in the {size} bytes that are read")
        return n

    def value(kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return file.read(checked(number(10))).decode("utf-8")
        if kind != _ARRAY:
            return number(kind)
        inner, n = number(4), checked(number(10))
        if inner in _NUMBERS:
            form = f"<{n}{_NUMBERS[inner][1]}"
            return list(struct.unpack(form, file.read(struct.calcsize(form))))
        if depth >= _MOST_DEPTH:
            raise KeyError("arrays nested too deeply")
        return [value(inner, depth + 1) for _ in range(n)]

    for _ in range(checked(count)):
        name = value(_STRING)
        yield name, value(number(4))
