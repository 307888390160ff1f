"""How a launcher tells what it launched, so that the call can be replayed without Python: pure data.

While a call is recorded, `watcher()` is not None, and a launcher of a kernel that is declared `replayable` tells it
every launch. A recording holds for calls of the same signature: dtypes, sizes, strides, alignment and plain values. A
launcher whose kernel takes a size or a stride at run time may say that it varies; it then promises that within the
range nothing else of the call depends on it: neither what is allocated nor which function is launched with which grid.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

Grid = tuple[int, int, int]
MOST = 2**31 - 1                               # of a number that is passed as 32 bits


class Varying(NamedTuple):
    """A size or a stride of an argument of the call that may be another, in `low` to `high` and a multiple of `step`.

    `field`: the parameter that it is passed as, times `factor`; -1 if the kernel is not told.
    """

    tensor: Any
    what: str                                  # size | stride
    axis: int
    field: int = -1
    low: int = 0
    high: int = MOST
    step: int = 1
    factor: int = 1


@dataclass(frozen=True)
class Launch:
    """One launch, as the driver got it."""

    address: int                               # of cuLaunchKernelEx
    function: int                              # CUfunction
    grid: Grid
    threads: int
    shared: int
    cluster: int
    params: bytes
    places: tuple[int, ...]                    # where in `params` each parameter of the kernel begins
    fields: tuple[tuple[int, int], ...]        # offset and size of each number and pointer in `params`
    pointers: tuple[tuple[int, Any], ...]      # field and tensor
    varying: tuple[Varying, ...]
    refused: Callable[[int, int, Grid], BaseException]     # of the driver's code, the device and the grid
    hooks: tuple[list[Any], ...] = ()          # while one of these is not empty, the launch is not to be replayed
    kept: Any = None                           # what must live as long as the function


class Watcher(Protocol):
    def launched(self, launch: Launch) -> None:
        """All that a launcher has to tell of one launch."""

    def keeps(self, tensor: Any, stream: int) -> None:
        """`tensor` belongs to this stream and outlives the call."""

    def refuse(self, why: str) -> None:
        """This call cannot be replayed."""


_watcher: ContextVar[Watcher | None] = ContextVar("layerzero_replay", default=None)
watcher: Callable[[], Watcher | None] = _watcher.get


@contextmanager
def watching(by: Watcher) -> Iterator[None]:
    token = _watcher.set(by)
    try:
        yield
    finally:
        _watcher.reset(token)


@lru_cache(maxsize=256)
def fields_of(format: str) -> tuple[tuple[int, int], ...]:
    """Offset and size of each field of a struct of the struct module with native alignment, without padding."""
    codes = expanded(format)
    return tuple((struct.calcsize("@" + "".join(codes[:i + 1])) - struct.calcsize(code), struct.calcsize(code))
                 for i, code in enumerate(codes))


def expanded(format: str) -> list[str]:
    """A code for each field: "@2Pi" gives P, P, i."""
    codes: list[str] = []
    count = ""
    for c in format.lstrip("@"):
        if c.isdigit():
            count += c
            continue
        codes += [c] * int(count or 1)
        count = ""
    return codes


def places_of(fields: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(offset for offset, _ in fields)
