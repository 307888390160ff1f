"""Memory that a process shares with a worker: one file in memory, mapped by both.

Its size is the limit of what may be in transit; pages that were never written take no memory. A
result lies there until the last tensor over it is gone. The file has no name, so nothing is left
behind however the processes end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import locks
from .wire import SCRATCH, Spec, align

PAGE = mmap.PAGESIZE
MAX_RESIDENT_BYTES = 256 << 20                 # bytes of a free block whose pages are kept


class ArenaFull(MemoryError):
    """The tensors of a call do not fit in what policy lets a worker share."""


class Arena:
    """Blocks of one shared file. Only the process allocates; the worker is told positions."""

    def __init__(self, size: int) -> None:
        self.fd, self.size = _memory_file(size), size
        self.map = mmap.mmap(self.fd, size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.free: list[tuple[int, int]] = [(SCRATCH, size - SCRATCH)]     # offset, bytes; sorted
        self.lock = locks.Lock()
        # what a destructor gives back: it may run while this thread allocates
        self.returned: deque[tuple[int, int]] = deque()
        self.live: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def allocate(self, nbytes: int) -> int:
        nbytes = align(max(nbytes, 1), PAGE)
        with self.lock:
            self._take_back()
            for i, (offset, size) in enumerate(self.free):
                if size >= nbytes:
                    self.free[i:i + 1] = [(offset + nbytes, size - nbytes)] * (size > nbytes)
                    return offset
        raise ArenaFull(f"{nbytes} bytes do not fit in what is free of {self.size} shared with the "
                        "worker; raise isolation_memory, or make the call smaller")

    def release(self, offset: int, nbytes: int) -> None:
        self.returned.append((offset, align(max(nbytes, 1), PAGE)))

    def _take_back(self) -> None:
        while self.returned:
            offset, nbytes = self.returned.popleft()
            if nbytes > MAX_RESIDENT_BYTES and hasattr(mmap, "MADV_REMOVE"):
                self.map.madvise(mmap.MADV_REMOVE, offset, nbytes)
            insort(self.free, (offset, nbytes))
            merged: list[tuple[int, int]] = []
            for start, size in self.free:
                if merged and sum(merged[-1]) == start:
                    merged[-1] = merged[-1][0], merged[-1][1] + size
                else:
                    merged.append((start, size))
            self.free = merged

    def tensors(self, offset: int, nbytes: int, specs: Sequence[tuple[Spec, int]]) -> list[Tensor]:
        """Returns tensors over a block, each a spec and its offset there; the block is free again
        when the last of them is gone."""
        buffer = (ctypes.c_char * nbytes).from_buffer(self.map, offset)
        returned, live = self.returned, self.live

        def give_back(_: Any) -> None:
            live.pop(offset, None)
            returned.append((offset, align(nbytes, PAGE)))

        live[offset] = nbytes, weakref.ref(buffer, give_back)
        return [spec.view(buffer, at) for spec, at in specs]

    def position(self, address: int, nbytes: int) -> int | None:
        """Returns the offset of memory that lies in this arena."""
        offset = address - self.base
        return offset if offset >= 0 and offset + nbytes <= self.size else None

    def make_private(self) -> None:
        """Runs in a forked child: neither process may see what the other writes from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
            ctypes.c_long)
        for offset, (nbytes, _) in self.live.copy().items():
            size = align(nbytes, PAGE)
            content = os.pread(self.fd, size, offset)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10           # MAP_FIXED
            libc.mmap(self.base + offset, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            ctypes.memmove(self.base + offset, content, len(content))
        self.close()

    def close(self) -> None:
        """Closes the file; memory that results lie in stays mapped as long as they live."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _memory_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("layerzero", os.MFD_CLOEXEC)
    else:                                      # a file that is unlinked at once
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
