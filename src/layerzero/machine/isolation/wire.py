"""What travels between a process and its worker: frames, and tensors by their position in shared
memory.

Both sides use this file, each with its own torch, so a frame is plain: a header of two integers,
then a struct or JSON. Every frame from the process is answered by one frame before the next call,
except those that only announce something (a form, a segment).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEADER = struct.Struct("<II")                  # kind of frame, bytes of its body
CALL = struct.Struct("<IQQ")                   # form; position and bytes of the room for results
NUMBER = struct.Struct("<Q")
FORM_ID = struct.Struct("<I")
# from the process, then from the worker
WAKE, LOAD, FORM, RUN, PLACE, SEGMENT, DROP, CUDA, CUDA_HANDLES, STAGE = range(10)
READY, LOADED, RESULT, NEED, FAULT = range(11, 16)

SEGMENT_SHIFT = 48                             # a position is segment << 48 | offset
OFFSET_MASK = (1 << SEGMENT_SHIFT) - 1
ALIGNMENT = 64
# The arena begins with room for small tensors, which are copied in and out.
SMALL = 64 << 10
INPUTS_END = 448 << 10
RESULTS_END = CONTROL = 512 << 10
PAGE = 4 << 10                                 # of frames that do not go through the pipes
SCRATCH = CONTROL + PAGE
MAX_FORMS = 512                                # descriptions of calls that both sides remember
SPINS = 1000                                   # looks, about 0.1 us each, before sleeping
MAX_SPINS = 10 * SPINS                         # of a worker that is woken again soon, on 4 cores
SOON = 0.002                                   # seconds
NAP_MS = 200                                   # of a sleeper that looks again by itself
# words of a direction: frames posted, bytes of the last, whether the reader sleeps, frames piped;
# each in a cache line of its own, but for the CPU that the writer was last seen on
POSTED, LENGTH, CPU, ASLEEP, PIPED = 0, 8, 9, 16, 24
BODY, ROOM = 256, PAGE // 2 - 256              # where a posted frame lies, and its most bytes
MAX_FRAME = 64 << 20                           # bytes; forms and errors are much shorter


# of reading what is no answer
UNREADABLE = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError,
              struct.error)


class Closed(Exception):
    """The other end of the pipe is gone."""


class Late(Exception):
    """No frame came in time."""


class Garbled(Exception):
    """Raised where bytes are no frame, or none that can be read."""


_cpu = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)
_receiving: set[Link] = set()                  # links of this process that wait for a frame


class Link:
    """One end of a connection: a page of shared memory for short frames, and a pair of pipes.

    A frame is posted by writing it into the page and then counting it there; the other side looks
    for a while, since to be woken takes longer than most calls, then says that it sleeps, and is
    woken through the pipe. It sleeps at once where to look would only keep a CPU from who is to
    answer: both were on one CPU, or other threads of this process wait too and need the
    interpreter. Long frames go through the pipe, and are counted in the page too.
    """

    def __init__(self, reading: int, writing: int, page: memoryview, first: bool) -> None:
        self.reading, self.writing = reading, writing
        self.poll = select.poll()
        self.poll.register(reading, select.POLLIN)
        self.rest = b""
        halves = page[:PAGE // 2], page[PAGE // 2:PAGE]
        out, back = halves if first else halves[::-1]
        self.out, self.out_body = out[:BODY].cast("Q"), out[BODY:]
        self.back, self.back_body = back[:BODY].cast("Q"), back[BODY:]
        self.posted = self.piped = self.seen = self.taken = 0
        self.spins = SPINS
        self.most_spins = SPINS if first or (os.cpu_count() or 1) < 4 else MAX_SPINS
        self.lock = threading.Lock()

    def fence(self) -> None:
        """Orders what this thread wrote and read before with what follows: stores of the first
        pair are done before its release, and nothing after the second acquire comes before it."""
        acquire, release = self.lock.acquire, self.lock.release
        acquire()
        release()
        acquire()
        release()

    def send(self, kind: int, body: bytes = b"") -> None:
        self.post(HEADER.pack(kind, len(body)) + body)

    def post(self, frame: bytes) -> None:
        size = len(frame)
        if size > ROOM:
            self._pipe(frame)
            return
        out = self.out
        self.out_body[:size] = frame
        out[LENGTH], out[CPU] = size, _cpu() + 1
        self.fence()
        self.posted += 1
        out[POSTED] = self.posted
        self.fence()
        if out[ASLEEP]:
            self._write(HEADER.pack(WAKE, 0))

    def announce(self, kind: int, body: bytes) -> None:
        """Sends a frame that is not answered: another one may follow before it is read."""
        self._pipe(HEADER.pack(kind, len(body)) + body)

    def _pipe(self, frame: bytes) -> None:
        """Counts a frame, then writes it: who was woken by it must find it counted."""
        self.piped += 1
        self.out[PIPED] = self.piped
        self.fence()
        self._write(frame)

    def _write(self, frame: bytes) -> None:
        try:
            sent = os.write(self.writing, frame)
            while sent < len(frame):
                sent += os.write(self.writing, frame[sent:])
        except OSError as e:
            raise Closed(str(e)) from e

    def receive(self, seconds: float | None = None) -> tuple[int, bytes]:
        """Returns the next frame; those of the pipe come first."""
        _receiving.add(self)
        try:
            return self._receive(seconds)
        finally:
            _receiving.discard(self)

    def _receive(self, seconds: float | None) -> tuple[int, bytes]:
        back, end = self.back, None
        while True:
            self.out[CPU] = cpu = _cpu() + 1   # 0: nobody can say
            crowded = len(_receiving) > 1 or cpu == back[CPU] != 0
            for _ in range(1 if crowded else self.spins):
                if back[PIPED] != self.taken:
                    return self._piped(_deadline(seconds) if end is None else end)
                if back[POSTED] != self.seen:
                    self.fence()
                    # both may have come since the look above, a form and then its call
                    if back[PIPED] == self.taken:
                        return self._posted()
            if end is None:
                end = _deadline(seconds)
            back[ASLEEP] = 1
            self.fence()
            if back[PIPED] == self.taken and back[POSTED] == self.seen:
                left = (end - time.monotonic()) * 1e3
                if left <= 0:
                    back[ASLEEP] = 0
                    raise Late
                start = time.monotonic()
                if self.poll.poll(min(left, NAP_MS)):
                    self._read()
                soon = time.monotonic() - start < SOON
                self.spins = min(2 * self.spins, self.most_spins) if soon else SPINS
            back[ASLEEP] = 0

    def _posted(self) -> tuple[int, bytes]:
        self.fence()
        self.seen += 1
        size = self.back[LENGTH]
        if not HEADER.size <= size <= ROOM:
            raise Garbled(f"a frame of {size} bytes in a place for {HEADER.size} to {ROOM}")
        frame = bytes(self.back_body[:size])
        return HEADER.unpack_from(frame)[0], frame[HEADER.size:]

    def _piped(self, deadline: float) -> tuple[int, bytes]:
        while True:
            while len(self.rest) >= HEADER.size:
                kind, size = HEADER.unpack_from(self.rest)
                if size > MAX_FRAME:
                    raise Garbled(f"a frame of {size} bytes, at most {MAX_FRAME} are taken")
                end = HEADER.size + size
                if len(self.rest) < end:
                    break
                body, self.rest = self.rest[HEADER.size:end], self.rest[end:]
                if kind != WAKE:
                    self.taken += 1
                    return kind, body
            # the rest of a frame that has begun may never come
            left = (deadline - time.monotonic()) * 1e3
            if left <= 0:
                raise Late
            if self.poll.poll(min(left, NAP_MS)):
                self._read()

    def _read(self) -> None:
        more = os.read(self.reading, 1 << 16)
        if not more:
            raise Closed
        # what only woke us need not be kept
        if self.rest or more != _WAKE:
            self.rest += more

    def close(self) -> None:
        _receiving.discard(self)               # of another thread, before a fork
        if self.reading >= 0:
            os.close(self.reading)
            os.close(self.writing)
            self.reading = self.writing = -1


_WAKE = HEADER.pack(WAKE, 0)


def _deadline(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds


class Spec(NamedTuple):
    """A tensor without its memory: what the other side needs to see it there."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int                                # from its first element to the end of its last

    @classmethod
    def of(cls, t: Tensor) -> Spec:
        shape, strides = tuple(t.shape), _packed(t.shape, t.stride())
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if t.numel() else 0
        return cls(str(t.dtype)[6:], shape, strides, extent * t.element_size())

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Spec:
        dtype, shape, strides, nbytes = data
        spec = cls(dtype, tuple(shape), tuple(strides), nbytes)
        spec.check()
        return spec

    def check(self) -> None:
        """Raises Garbled unless the tensor lies within the bytes that it says it takes."""
        dtype = getattr(torch, str(self.dtype), None)
        sizes = (*self.shape, *self.strides, self.nbytes)
        if (not isinstance(dtype, torch.dtype) or len(self.shape) != len(self.strides)
            or not all(type(n) is int and 0 <= n < 1 << SEGMENT_SHIFT for n in sizes)):
            raise Garbled(f"no tensor is {self}"[:300])
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides))
        if self.nbytes != (extent * dtype.itemsize if 0 not in self.shape else 0):
            raise Garbled(f"{self} takes another number of bytes"[:300])

    def view(self, memory: Any, offset: int) -> Tensor:
        """Returns the tensor at `offset` of a buffer, or of bytes, which it keeps alive."""
        dtype = getattr(torch, self.dtype)
        device = memory.device if isinstance(memory, Tensor) else None
        # a view made in inference mode could not be written outside it
        with torch.inference_mode(False):
            if not self.nbytes:
                return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)
            if device is not None:
                flat = memory[offset:offset + self.nbytes].view(dtype)
            else:
                flat = torch.frombuffer(memory, dtype=dtype, count=self.nbytes // dtype.itemsize,
                                        offset=offset)
            return flat.as_strided(self.shape, self.strides)


def _packed(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a copy: the same, unless the tensor overlaps itself or is a thin slice
    of its memory; then those of a dense tensor with the axes in the same order. An expanded axis
    stays one."""
    axes = sorted((i for i, (n, s) in enumerate(zip(shape, strides)) if n > 1 and s > 0),
                  key=lambda i: strides[i])
    extent = count = 1
    dense, overlaps = dict.fromkeys(axes, 1), False
    for i in axes:
        overlaps |= strides[i] < extent
        extent += (shape[i] - 1) * strides[i]
        dense[i] = count
        count *= shape[i]
    if not overlaps and extent <= 2 * count + ALIGNMENT:
        return tuple(strides)
    return tuple(dense.get(i, s if n > 1 else 1) for i, (n, s) in enumerate(zip(shape, strides)))


def unexpanded(t: Tensor) -> Tensor:
    """Returns the tensor with size 1 along each expanded axis, as a copy is written."""
    if 0 not in t.stride():
        return t
    shape = [1 if s == 0 and n > 1 else n for n, s in zip(t.shape, t.stride())]
    return t.as_strided(shape, t.stride(), t.storage_offset())


def align(offset: int, to: int = ALIGNMENT) -> int:
    return -(-offset // to) * to


class Results(NamedTuple):
    """The form of a result: one tensor, or a tuple or list of tensors and plain values."""

    kind: str                                  # tensor | tuple | list
    items: tuple[Any, ...]                     # a Spec, or a plain value in a tuple
    offsets: tuple[int, ...]                   # of each tensor in the block; 0 for a value
    nbytes: int                                # of the block

    @classmethod
    def of(cls, kind: str, items: Sequence[Any]) -> Results:
        end, offsets = 0, []
        for item in items:
            offsets.append(end)
            end = align(end + item.nbytes) if isinstance(item, Spec) else end
        return cls(kind, tuple(items), tuple(offsets), end)

    def to_json(self) -> str:
        return json.dumps([self.kind, [{"tensor": item} if isinstance(item, Spec)
                                       else {"value": item[0]} for item in self.items]])

    @classmethod
    def from_json(cls, text: str | bytes) -> Results:
        kind, items = json.loads(text)
        if kind not in ("tensor", "tuple", "list"):
            raise Garbled(f"a result is a tensor, tuple or list, got {kind!r}"[:300])
        return cls.of(kind, [Spec.from_json(item["tensor"]) if "tensor" in item
                             else (item["value"],) for item in items])

    def tensors(self) -> list[tuple[Spec, int]]:
        return [(item, at) for item, at in zip(self.items, self.offsets)
                if isinstance(item, Spec)]

    def assemble(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the result of these tensors, one for each Spec among the items."""
        if self.kind == "tensor":
            return tensors[0]
        left = iter(tensors)
        values = [next(left) if isinstance(item, Spec) else item[0] for item in self.items]
        return tuple(values) if self.kind == "tuple" else values


def state() -> tuple[int, bool, str]:
    """Returns what a kernel reads of the process beside its arguments: threads, whether results
    must be deterministic, precision of float32 products."""
    return (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision())


def adopt(state: Sequence[Any]) -> None:
    """Makes the state of another process that of this one."""
    threads, deterministic, precision = state
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)
