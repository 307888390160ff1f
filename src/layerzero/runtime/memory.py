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


def free_bytes(kind: str) -> int:
    if kind == "cuda" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        # What torch's allocator holds but does not use is free to it as well.
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62
