"""What the launchers share: the size of the device, and counters by which programs find out who finishes last.

A kernel whose programs meet at the end counts them, and the last one sets the counter back to zero, so counters are
zeroed once and for all. Calls on one stream follow each other and share theirs. A captured graph may be replayed on
any stream beside anything, so each captured call keeps counters that no other call ever uses.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import torch
from torch import Tensor

from ...spec import replay

ROOM = 1 << 16             # counters of one stream
CAPTURED_ROOM = 1 << 20    # of all captured calls of a device; beyond it a captured call clears its own

_lock = threading.Lock()
_streams: dict[tuple[int, int], Tensor] = {}
_captured: dict[int, tuple[Tensor, int]] = {}  # counters of a device, and how many of them are taken


@lru_cache(maxsize=None)
def size_of(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory a program may have)."""
    if device.type != "cuda":
        return 8, 1 << 20                      # the interpreter
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 96 << 10)


def counters(device: torch.device, count: int) -> Tensor:
    """`count` zeros (int32), to be left as zeros."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    watcher = replay.watcher()
    if torch.cuda.is_current_stream_capturing():
        if watcher is not None:
            watcher.refuse("a captured call has counters of its own")
        return _for_graph(index, device, count)
    stream = torch.cuda.current_stream(device).cuda_stream
    found = _streams.get((index, stream))
    if found is None or found.numel() < count:
        with _lock:
            if index not in _captured:         # here, since nothing can be set aside while a graph is captured
                _captured[index] = torch.zeros(CAPTURED_ROOM, dtype=torch.int32, device=device), 0
            found = torch.zeros(max(count, ROOM), dtype=torch.int32, device=device)
            _streams[index, stream] = found
            # Other streams may use them from now on. Not the whole device: another thread may be capturing.
            torch.cuda.current_stream(device).synchronize()
    if watcher is not None:
        watcher.keeps(found, stream)
    return found


def _for_graph(index: int, device: torch.device, count: int) -> Tensor:
    with _lock:
        whole, taken = _captured.get(index, (None, 0))
        if whole is not None and taken + count <= CAPTURED_ROOM:
            _captured[index] = whole, taken + count
            return whole[taken:taken + count]
    return torch.zeros(count, dtype=torch.int32, device=device)            # a node of the graph clears them
