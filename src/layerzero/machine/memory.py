"""How much workspace a kernel may allocate, and which ops must select again when free memory
changes.

A selection depends on the memory that is free at that moment, and is cached. The clock thread
checks free memory periodically; only ops whose selection would change select again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..selection.policy import Policy
from . import locks

FRESH_SECONDS = 0.25           # how long a reading is reused: a burst of misses queries once
# between checks while less than PLENTY times the needed memory is free
CHECK_SECONDS = 1.0
RELAXED_CHECK_SECONDS = 10.0   # between checks otherwise
PLENTY = 16                    # times the needed memory
# a kernel left out for memory returns when this many times its workspace is free
RETURN_FACTOR = 1.25
UNLIMITED = 1 << 62
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def headroom(kind: str, policy: Policy) -> int:
    """Returns the bytes a workspace may take: as configured, or a share of what is free now."""
    configured = policy.setting("memory_headroom")
    if configured is not None:
        return int(configured)
    return int(recent_free_bytes(kind) * policy.setting("memory_headroom_fraction"))


# device -> (time, free bytes) of the last query
_recent: dict[tuple[str, int], tuple[float, int]] = {}
_query_lock = threading.Lock()                 # held by the thread that queries
# device -> free bytes at the last query of the driver
_last_free: dict[int, int] = {}


def recent_free_bytes(kind: str) -> int:
    """Returns free_bytes of about FRESH_SECONDS ago: one thread queries, others read that."""
    on_gpu = kind == "cuda" and torch.cuda.is_available()
    key, now = (kind, torch.cuda.current_device() if on_gpu else 0), time.monotonic()
    queried_at, free = _recent.get(key, (-1.0, 0))
    if queried_at < 0 or (now - queried_at > FRESH_SECONDS and _query_lock.acquire(blocking=False)):
        try:
            free = free_bytes(kind)
            _recent[key] = now, free
        finally:
            if queried_at >= 0:
                _query_lock.release()
    return free


def free_bytes(kind: str) -> int:
    if kind == "cuda" and torch.cuda.is_available():
        # What torch's allocator holds but does not use is free to it as well.
        return _device_free() + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    available = _read_field(MEMINFO, "MemAvailable:")
    return min(UNLIMITED if available is None else available * 1024, cgroup_free())


def _read_field(path: Path, name: str) -> int | None:
    """Returns the number on the line that begins with `name`."""
    try:
        with open(path) as f:
            return next((int(line.split()[1]) for line in f if line.startswith(name)), None)
    except (OSError, ValueError, IndexError):
        return None


def _read_number(path: Path) -> int | None:
    """Returns the number in a file; None if there is no such file, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# (limit, usage, field of memory.stat with the reclaimable page cache), for cgroup 2, then 1
_CGROUP_FILES = (("memory.max", "memory.current", "inactive_file "),
                 ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes",
                  "total_inactive_file "))


def cgroup_free() -> int:
    """Returns the bytes the container may still take; inactive file pages count as free."""
    free = UNLIMITED
    for folder in _cgroup_folders():
        for limit_file, used_file, field in _CGROUP_FILES:
            limit, used = _read_number(folder / limit_file), _read_number(folder / used_file)
            if limit is not None and used is not None:
                cached = _read_field((folder / used_file).with_name("memory.stat"), field) or 0
                free = min(free, max(limit - max(used - cached, 0), 0))
    return free


def _cgroup_folders() -> tuple[Path, ...]:
    """Returns the cgroup of this process and its visible ancestors: each has a limit of its own."""
    own = CGROUP
    try:
        line = next((t for t in Path("/proc/self/cgroup").read_text().splitlines()
                     if t.startswith("0::")), "")
        own = CGROUP / line.removeprefix("0::").lstrip("/")
    except OSError:
        pass
    return tuple(dict.fromkeys((CGROUP, own, *(p for p in own.parents if CGROUP in p.parents))))


def _device_free() -> int:
    """Returns the bytes free on the current device, other processes counted. While a graph is
    captured the last reading is used: querying the driver would invalidate the capture."""
    index = torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        return _last_free.get(index, torch.cuda.get_device_properties(index).total_memory)
    with _outside_captures():
        free, _ = torch.cuda.mem_get_info(index)
    _last_free[index] = int(free)
    return int(free)


def _outside_captures() -> Any:
    """Returns a context in which the driver may be queried during another thread's capture."""
    if threading.current_thread() is threading.main_thread() or torch.version.hip is not None:
        return nullcontext()
    from ..backends.cuda.compiler import outside_captures  # `import layerzero` loads no backend

    return outside_captures()


# cached selections that depend on free memory

class MemoryNeed:
    """The workspaces that the cached selections of one op on one device type depend on."""

    def __init__(self) -> None:
        self.served = 0                        # largest workspace of a selected kernel
        # smallest workspace of a kernel left out for memory; 0: none
        self.lacking = 0

    def changes_with(self, headroom: int) -> bool:
        """Would a selection change with this headroom?"""
        return self.served > headroom or 0 < self.lacking * RETURN_FACTOR <= headroom


_needs: dict[tuple[str, str], MemoryNeed] = {}  # (op, device type)
_lock = locks.Lock()
_next_check: float | None = None


def record_need(op: str, kind: str, served: int, lacking: int) -> bool:
    """Records that a cached selection depends on free memory; True if no check was due."""
    global _next_check
    with _lock:
        need = _needs.setdefault((op, kind), MemoryNeed())
        need.served = max(need.served, served)
        need.lacking = min(filter(None, (need.lacking, lacking)), default=0)
        first = _next_check is None
        if first:
            _next_check = time.monotonic() + CHECK_SECONDS
    return first


def next_check() -> float | None:
    return _next_check


def ops_to_reselect(now: float, headroom_of: Callable[[str], int]) -> set[str]:
    """Returns the ops that must select again, if a check is due. Their needs are recorded anew when
    they do.

    While a kernel runs, its own workspace is not free: its op may then select again for nothing,
    once per check.
    """
    global _next_check
    with _lock:
        if _next_check is None or now < _next_check:
            return set()
        needs = dict(_needs)
    headrooms = {kind: headroom_of(kind) for _, kind in needs}
    changed = {key for key, need in needs.items() if need.changes_with(headrooms[key[1]])}
    with _lock:
        for key in list(_needs):
            if key[0] in {op for op, _ in changed}:
                _needs.pop(key, None)
        tight = any(PLENTY * max(n.served, n.lacking) > headrooms.get(kind, 0)
                    for (_, kind), n in _needs.copy().items())
        delay = CHECK_SECONDS if tight or changed else RELAXED_CHECK_SECONDS
        _next_check = now + delay if _needs or changed else None
    return {op for op, _ in changed}


def forget() -> None:
    global _next_check
    with _lock:
        _needs.clear()
        _recent.clear()
        _next_check = None


def after_fork() -> None:
    global _query_lock
    _query_lock = threading.Lock()
