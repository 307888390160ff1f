"""How much memory a kernel may take for itself."""

from __future__ import annotations

import torch

from ..select.policy import Policy


def headroom(kind: str, policy: Policy) -> int:
    """Bytes: configured, or a share of what is free on the device right now, other processes counted."""
    fixed = policy.setting("memory_headroom")
    if fixed is not None:
        return int(fixed)
    return int(free_bytes(kind) * policy.setting("memory_headroom_fraction"))


_last_free: dict[int, int] = {}                # device -> free bytes when last asked


def free_bytes(kind: str) -> int:
    if kind == "cuda" and torch.cuda.is_available():
        # What torch's allocator holds but does not use is free to it as well.
        return _device_free() + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62


def _device_free() -> int:
    """Free on the current device, whoever has the rest. While a graph is captured the driver is not asked: an answer
    is not worth the capture."""
    index = torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        return _last_free.get(index, torch.cuda.get_device_properties(index).total_memory)
    free, _ = torch.cuda.mem_get_info(index)
    _last_free[index] = int(free)
    return int(free)
