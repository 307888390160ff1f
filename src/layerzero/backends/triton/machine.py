"""Device properties, and counters by which the programs of a kernel find out which of them finishes
last.

The last program resets the counter, so counters are zeroed only once. Calls on one stream run in
sequence and share their counters. A captured graph may be replayed on any stream, concurrently with
anything, so each captured call has counters of its own.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import torch
from torch import Tensor

from ...spec import replay

COUNTERS_PER_STREAM = 1 << 16                  # counters of one stream
# of all captured calls of a device; beyond it a captured call zeroes its own
CAPTURED_COUNTERS = 1 << 20

_lock = threading.Lock()
_streams: dict[tuple[int, int], Tensor] = {}
_captured: dict[int, tuple[Tensor, int]] = {}  # counters of a device, and how many are in use


@lru_cache(maxsize=None)
def device_size(device: torch.device) -> tuple[int, int]:
    """Returns (multiprocessors, bytes of shared memory per program)."""
    if device.type != "cuda":
        return 8, 1 << 20                      # the interpreter
    properties = torch.cuda.get_device_properties(device)
    default = 96 << 10 if torch.version.hip is None else 64 << 10      # of AMD: local data share
    return (properties.multi_processor_count,
            getattr(properties, "shared_memory_per_block_optin", 0) or default)


def counters(device: torch.device, count: int) -> Tensor:
    """Returns `count` int32 zeros; the kernel must leave them zero."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    watcher = replay.watcher()
    if torch.cuda.is_current_stream_capturing():
        if watcher is not None:
            watcher.refuse("a captured call has counters of its own")
        return _captured_counters(index, device, count)
    stream = torch.cuda.current_stream(device).cuda_stream
    zeros = _streams.get((index, stream))
    if zeros is None or zeros.numel() < count:
        with _lock:
            # allocated here, since a capture cannot allocate persistently
            if index not in _captured:
                _captured[index] = torch.zeros(CAPTURED_COUNTERS, dtype=torch.int32,
                                               device=device), 0
            zeros = torch.zeros(max(count, COUNTERS_PER_STREAM), dtype=torch.int32, device=device)
            _streams[index, stream] = zeros
            # Other streams may use them from now on. Only this stream is synchronised: another
            # thread may be capturing.
            torch.cuda.current_stream(device).synchronize()
    if watcher is not None:
        watcher.keeps(zeros, stream)
    return zeros


def _captured_counters(index: int, device: torch.device, count: int) -> Tensor:
    with _lock:
        pool, taken = _captured.get(index, (None, 0))
        if pool is not None and taken + count <= CAPTURED_COUNTERS:
            _captured[index] = pool, taken + count
            return pool[taken:taken + count]
    # a node of the graph zeroes them
    return torch.zeros(count, dtype=torch.int32, device=device)
