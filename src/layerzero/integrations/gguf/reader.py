"""Reads a GGUF file: metadata, and tensors as views of the mapped file, with a limit on everything.

Every count, length, dimension and offset is checked against the size of the file before anything
is allocated for it, so a damaged or hostile file gives a DataError in bounded time and memory.
Tensors are copy-on-write views: no weight is copied, and none can be written back to the file.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...spec.errors import DataError
from ...spec.reason import shown

# Limits; real files stay far below. Items count over all arrays of a file.
_MAX_ITEMS, _MAX_HEADER, _MAX_STRING = 1 << 22, 1 << 28, 1 << 26
_MAX_DEPTH, _MAX_NAME, _MAX_DIMS = 4, 1024, 4
_MIN_PAIR, _MIN_TENSOR = 13, 33                # bytes that the smallest of them takes
_ALIGNMENTS = tuple(1 << n for n in range(3, 21))

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}
_STRING, _ARRAY = 8, 9
# number of a type in the file -> (name, values of a block, bytes of a block)
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 36),
    10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292), 16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136), 24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4),
    27: ("i64", 1, 8), 28: ("f64", 1, 8), 29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66), 39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36)}
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor in the file; `shape` is torch's order, the rows last."""

    name: str
    type: str                                  # "f32", "q4_k", ...
    shape: tuple[int, ...]
    start: int                                 # in bytes, from the beginning of the file
    row_bytes: int

    @property
    def nbytes(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.row_bytes


class Texts:
    """The strings of an array, decoded from the mapped file as they are read: as objects, those of
    a vocabulary take several times their bytes."""

    def __init__(self, mapped: mmap.mmap, starts: array[int]) -> None:
        self._mapped, self._starts = mapped, starts    # each begins after its length of 8 bytes

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, i: int) -> str:
        i = range(len(self))[i]
        return self._mapped[self._starts[i]:self._starts[i + 1] - 8].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, Texts)) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """The metadata of a file, and its tensors by name; `mapped` is the whole file."""

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    mapped: mmap.mmap = field(repr=False)

    def blocks(self, name: str) -> Tensor:
        """Return a tensor's bytes, (..., row_bytes) uint8, as a view of the mapped file."""
        info = self.tensors.get(name)
        if info is None:
            raise DataError(f"{self.path}: wanted the tensor {name}, there is none; it has "
                            f"{len(self.tensors)} others. Convert the model again")
        flat = torch.frombuffer(self.mapped, dtype=torch.uint8, count=info.nbytes,
                                offset=info.start)
        return flat.view(*info.shape[:-1], info.row_bytes)

    def floats(self, name: str) -> Tensor:
        """Return a tensor of floats as a view; DataError for a quantized one."""
        blocks = self.blocks(name)
        info = self.tensors[name]
        if info.type not in FLOATS:
            raise DataError(f"{self.path}: wanted floats in the tensor {name}, got {info.type}")
        return blocks.view(FLOATS[info.type])

    def release(self, name: str = "") -> None:
        """Let the pages of a copied tensor, or of all, leave memory; views read them anew."""
        page = mmap.PAGESIZE
        start, end = ((self.tensors[name].start, self.tensors[name].start
                       + self.tensors[name].nbytes) if name else (0, len(self.mapped)))
        first, end = -(-start // page) * page, end // page * page
        if hasattr(self.mapped, "madvise") and end > first:
            self.mapped.madvise(mmap.MADV_DONTNEED, first, end - first)


def read_gguf_file(path: str | os.PathLike[str]) -> GGUFFile:
    """Map a GGUF file and check all of it but its weights; DataError if it is damaged or none."""
    try:
        with open(path, "rb", opener=_opener) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "it is not a regular file")
            if file.read(4) != b"GGUF":
                raise DataError(
                    f"{path}: wanted a GGUF file, found one that does not begin with GGUF")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except DataError:
        raise
    except OSError as e:
        raise DataError(f"{path}: wanted a GGUF file; it cannot be read: {e.strerror or e}") from e
    except ValueError as e:                    # a null byte in the path, or an empty file
        raise DataError(f"{path!r}: wanted the path of a GGUF file: {e}") from e
    header = _Header(mapped, str(path))
    try:
        metadata, tensors = header.read()
    except struct.error as e:
        raise header.error(f"the header ends at byte {len(mapped)}: {e}") from e
    return GGUFFile(str(path), metadata, tensors, mapped)


def gguf_metadata(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the metadata of a GGUF file; DataError if it is damaged or no GGUF file."""
    return read_gguf_file(path).metadata


def _opener(path: str, flags: int) -> int:
    """Open without waiting for the writer of a FIFO."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class _Header:
    """Walks over the header of a mapped file."""

    def __init__(self, mapped: mmap.mmap, path: str) -> None:
        self.mapped, self.path, self.at, self.items = mapped, path, 4, 0
        self.size = min(len(mapped), _MAX_HEADER)

    def error(self, text: str) -> DataError:
        return DataError(f"{self.path}: wanted a GGUF file, found one that is cut short or damaged "
                         f"at byte {self.at}: {text}; fetch or convert the file again")

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        version = self.number("I")
        if version not in (2, 3):
            advice = ("it was written for a big-endian machine" if version in (2 << 24, 3 << 24)
                      else "write the file again with a newer converter")
            raise DataError(f"{self.path}: wanted version 2 or 3 of GGUF, got {version}; {advice}")
        tensors, pairs = self.number("Q"), self.number("Q")
        self.fits(pairs, _MIN_PAIR, "pairs of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = self.string(_MAX_NAME)
            if name in metadata:
                raise self.error(f"the key {shown(name)} twice")
            metadata[name] = self.value(self.number("I"))
        self.fits(tensors, _MIN_TENSOR, "tensors")
        infos = [self.tensor() for _ in range(tensors)]
        return metadata, self.placed(infos, metadata.get("general.alignment", 32))

    def fits(self, count: int, each: int, what: str) -> int:
        """Check a count against the bytes that are left."""
        if count > (self.size - self.at) // each:
            raise self.error(f"{count} {what} in {self.size - self.at} bytes")
        return count

    def number(self, form: str) -> Any:
        value, = struct.unpack_from("<" + form, self.mapped, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def string(self, limit: int = _MAX_STRING) -> str:
        length = self.fits(self.number("Q"), 1, "bytes of a string")
        if length > limit:
            raise self.error(f"a string of {length} bytes, of which {limit} are allowed")
        start, self.at = self.at, self.at + length
        try:
            return self.mapped[start:self.at].decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.error(f"a string that is no UTF-8: {e}") from e

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.error(f"a value of the unknown type {kind}")
        if depth >= _MAX_DEPTH:
            raise self.error(f"arrays nested more than {_MAX_DEPTH} deep")
        inner, count = self.number("I"), self.number("Q")
        size = struct.calcsize("<" + _NUMBERS[inner]) if inner in _NUMBERS else 8
        self.fits(count, size, "items of an array")
        self.items += count
        if self.items > _MAX_ITEMS:
            raise self.error(f"arrays of {self.items} items, of which {_MAX_ITEMS} are allowed")
        if inner in _NUMBERS:
            numbers = struct.unpack_from(f"<{count}{_NUMBERS[inner]}", self.mapped, self.at)
            self.at += count * size
            return list(numbers)
        if inner == _STRING:
            return self.strings(count)
        return [self.value(inner, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> Texts:
        """Check strings one after the other; a vocabulary has hundreds of thousands."""
        at, length, mapped, end = self.at, struct.Struct("<Q").unpack_from, self.mapped, self.size
        starts = array("Q")
        for _ in range(count):
            start = at + 8
            starts.append(start)
            at = start + length(mapped, at)[0]
            if at > end:
                self.at = start
                raise self.error(f"{at - start} bytes of a string in {end - start} bytes")
            try:
                mapped[start:at].decode("utf-8")
            except UnicodeDecodeError as e:
                self.at = start
                raise self.error(f"a string that is no UTF-8: {e}") from e
        self.at = at
        starts.append(at + 8)
        return Texts(mapped, starts)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self.string(_MAX_NAME), self.number("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.error(f"a tensor {shown(name, limit=80)} of {dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(dims))
        return name, shape[::-1], self.number("I"), self.number("Q")

    def placed(self, infos: list[tuple[str, tuple[int, ...], int, int]],
               alignment: Any) -> dict[str, TensorInfo]:
        """Return the tensors by name, each within the file and none over another."""
        if alignment not in _ALIGNMENTS or type(alignment) is not int:
            raise self.error(f"wanted an alignment that is a power of two from 8 to 2^20, got "
                             f"{shown(alignment, limit=80)}")
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in infos:
            tensor, end = self.located(name, shape, kind, base + offset), len(self.mapped)
            if name in tensors:
                raise self.error(f"the tensor {shown(name)} twice")
            if offset % alignment or tensor.start + tensor.nbytes > end:
                raise self.error(
                    f"the tensor {shown(name, limit=80)}, {tensor.type} {list(shape)}, from byte "
                    f"{tensor.start} to {tensor.start + tensor.nbytes} of {end}, aligned to "
                    f"{alignment}")
            tensors[name] = tensor
        last = None
        for info in sorted(tensors.values(), key=lambda t: t.start):
            if last is not None and last.start + last.nbytes > info.start:
                raise self.error(f"the tensor {shown(info.name, limit=80)} lies over "
                                 f"{shown(last.name, limit=80)}")
            last = info
        return tensors

    def located(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
        if kind not in TYPES:
            raise self.error(f"the tensor {shown(name, limit=80)} of the unknown type {kind}")
        label, block, nbytes = TYPES[kind]
        if min(shape) < 1 or max(shape) > 8 * len(self.mapped) or shape[-1] % block:
            raise self.error(f"the tensor {shown(name, limit=80)}, {label} {list(shape)}; wanted "
                             f"rows of a multiple of {block} values, and no size of 0")
        return TensorInfo(name, label, shape, start, shape[-1] // block * nbytes)
