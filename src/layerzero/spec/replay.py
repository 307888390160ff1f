"""Recording of kernel launches, so that a call can be replayed without Python.

While a call is recorded, `watcher()` is not None, and the launcher of a kernel that is declared
`replayable` reports every launch to it. A recording is valid for calls of the same signature:
dtypes, sizes, strides, alignment and plain values. A launcher whose kernel takes a size or a stride
at run time may declare it as varying; it then promises that within the range nothing else of the
call depends on it: neither what is allocated nor which function is launched with which grid.
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
MAX_INT32 = 2**31 - 1                          # the largest number that is passed as 32 bits
# Functions, by their handles in the driver, that wait for what was launched before them by
# themselves (griddepcontrol.wait): in a graph they may begin before that has ended.
waiting: set[int] = set()


class Varying(NamedTuple):
    """A size or a stride of an argument that may vary, from `low` to `high` in multiples of `step`.
    It is passed as the parameter `field`, times `factor`; -1 if the kernel does not take it."""

    tensor: Any
    kind: str                                  # size | stride
    axis: int
    field: int = -1
    low: int = 0
    high: int = MAX_INT32
    step: int = 1
    factor: int = 1


@dataclass(frozen=True)
class Launch:
    """One launch, as passed to the driver."""

    address: int                               # of cuLaunchKernelEx
    function: int                              # CUfunction
    grid: Grid
    threads: int
    shared: int
    cluster: int
    params: bytes
    # where in `params` each parameter of the kernel begins
    offsets: tuple[int, ...]
    # offset and size of each number and pointer in `params`
    fields: tuple[tuple[int, int], ...]
    pointers: tuple[tuple[int, Any], ...]      # field and tensor
    varying: tuple[Varying, ...]
    # the error for a driver code, device and grid
    launch_error: Callable[[int, int, Grid], BaseException]
    hooks: tuple[list[Any], ...] = ()          # while one is not empty, the launch is not replayed
    keep_alive: Any = None                     # what must live as long as the function


class Watcher(Protocol):
    def launched(self, launch: Launch) -> None:
        """Records a launch of a kernel."""

    def keeps(self, tensor: Any, stream: int) -> None:
        """Says that the tensor belongs to this stream and outlives the call."""

    def refuse(self, why: str) -> None:
        """Says that this call cannot be replayed."""


_watcher: ContextVar[Watcher | None] = ContextVar("layerzero_replay", default=None)
watcher: Callable[[], Watcher | None] = _watcher.get


@contextmanager
def watching(recorder: Watcher) -> Iterator[None]:
    token = _watcher.set(recorder)
    try:
        yield
    finally:
        _watcher.reset(token)


@lru_cache(maxsize=256)
def fields_of(format: str) -> tuple[tuple[int, int], ...]:
    """Returns offset and size of each field of a `struct` format with native alignment."""
    codes = expand_format(format)
    return tuple((struct.calcsize("@" + "".join(codes[:i + 1])) - struct.calcsize(code),
                  struct.calcsize(code))
                 for i, code in enumerate(codes))


def expand_format(format: str) -> list[str]:
    """Returns one format character for each field: "@2Pi" gives P, P, i."""
    codes: list[str] = []
    count = ""
    for c in format.lstrip("@"):
        if c.isdigit():
            count += c
            continue
        codes += [c] * int(count or 1)
        count = ""
    return codes


def field_offsets(fields: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(offset for offset, _ in fields)
