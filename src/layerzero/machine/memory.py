"""How much memory a kernel may take for itself, and which choices to make anew when that changes.

A choice is made by the memory that is free at that moment, and remembered. The clock thread looks again every so often,
and the ops whose choices would no longer be the same choose anew: those of the others stay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..select.policy import Policy

FRESH = 0.25                   # seconds that an answer serves others: a burst of misses asks once
SOON, LATER = 1.0, 10.0        # seconds between looks: where memory is short of `PLENTY` times what is needed, and else
PLENTY = 16
RELIEF = 1.25                  # what was left out returns when there is this much more than it needs
UNLIMITED = 1 << 62
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def headroom(kind: str, policy: Policy) -> int:
    """Bytes: configured, or a share of what is free on the device right now, other processes counted."""
    fixed = policy.setting("memory_headroom")
    if fixed is not None:
        return int(fixed)
    return int(recent_free_bytes(kind) * policy.setting("memory_headroom_fraction"))


_recent: dict[tuple[str, int], tuple[float, int]] = {}     # device -> when it was asked, and its answer
_asking = threading.Lock()                     # held by the one who asks
_last_free: dict[int, int] = {}                # device -> free bytes when last asked


def recent_free_bytes(kind: str) -> int:
    """As free_bytes, about FRESH seconds ago at most: one thread asks, the others go by the answer before."""
    on_gpu = kind == "cuda" and torch.cuda.is_available()
    key, now = (kind, torch.cuda.current_device() if on_gpu else 0), time.monotonic()
    asked, free = _recent.get(key, (-1.0, 0))
    if asked < 0 or (now - asked > FRESH and _asking.acquire(blocking=False)):
        try:
            free = free_bytes(kind)
            _recent[key] = now, free
        finally:
            if asked >= 0:
                _asking.release()
    return free


def free_bytes(kind: str) -> int:
    if kind == "cuda" and torch.cuda.is_available():
        # What torch's allocator holds but does not use is free to it as well.
        return _device_free() + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    available = _field(MEMINFO, "MemAvailable:")
    return min(UNLIMITED if available is None else available * 1024, cgroup_free())


def _field(path: Path, name: str) -> int | None:
    """The number after a word at the beginning of a line."""
    try:
        with open(path) as f:
            return next((int(line.split()[1]) for line in f if line.startswith(name)), None)
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    """None: there is no such file, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# limit, what is used, where what the kernel could drop is told, and the word there: cgroup 2, then 1
_FILES = (("memory.max", "memory.current", "inactive_file "),
          ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file "))


def cgroup_free() -> int:
    """What a container may still take. Pages of files that nobody has used lately are given up before it is full."""
    free = UNLIMITED
    for folder in _cgroups():
        for limit_file, used_file, word in _FILES:
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and used is not None:
                cached = _field((folder / used_file).with_name("memory.stat"), word) or 0
                free = min(free, max(limit - max(used - cached, 0), 0))
    return free


def _cgroups() -> tuple[Path, ...]:
    """The group of this process and those above it, as far as they are shown: each has a limit of its own."""
    own = CGROUP
    try:
        line = next((t for t in Path("/proc/self/cgroup").read_text().splitlines() if t.startswith("0::")), "")
        own = CGROUP / line.removeprefix("0::").lstrip("/")
    except OSError:
        pass
    return tuple(dict.fromkeys((CGROUP, own, *(p for p in own.parents if CGROUP in p.parents))))


def _device_free() -> int:
    """Free on the current device, whoever has the rest. While a graph is captured the driver is not asked: an answer
    is not worth the capture."""
    index = torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        return _last_free.get(index, torch.cuda.get_device_properties(index).total_memory)
    with _beside_captures():
        free, _ = torch.cuda.mem_get_info(index)
    _last_free[index] = int(free)
    return int(free)


def _beside_captures() -> Any:
    """The clock asks while another thread may be capturing, which it must not spoil."""
    if threading.current_thread() is threading.main_thread() or torch.version.hip is not None:
        return nullcontext()
    from ..backends.cuda.compiler import outside_captures  # `import layerzero` reads no backend

    return outside_captures()


# remembered choices that depend on it

class Need:
    """What the remembered choices of one op on one kind of device were made by."""

    def __init__(self) -> None:
        self.served = 0                        # the largest workspace of a kernel that serves
        self.lacking = 0                       # the smallest of one that was left out for it; 0: none was

    def moves(self, room: int) -> bool:
        """Would a choice be another with this headroom?"""
        return self.served > room or 0 < self.lacking * RELIEF <= room


_needs: dict[tuple[str, str], Need] = {}       # (op, kind of device)
_lock = threading.Lock()
_next: float | None = None


def note(op: str, kind: str, served: int, lacking: int) -> bool:
    """A choice was remembered that depends on free memory. Did nobody look at it before?"""
    global _next
    with _lock:
        need = _needs.setdefault((op, kind), Need())
        need.served = max(need.served, served)
        need.lacking = min(filter(None, (need.lacking, lacking)), default=0)
        first = _next is None
        if first:
            _next = time.monotonic() + SOON
    return first


def next_look() -> float | None:
    return _next


def look(now: float, room_on: Callable[[str], int]) -> set[str]:
    """The ops that must choose anew, if it is time to look. What they need is noted again when they have chosen.

    While a kernel runs, its own workspace is not free: its op may then choose anew for nothing, once in a look.
    """
    global _next
    with _lock:
        if _next is None or now < _next:
            return set()
        known = dict(_needs)
    rooms = {kind: room_on(kind) for _, kind in known}
    moved = {key for key, need in known.items() if need.moves(rooms[key[1]])}
    with _lock:
        for key in list(_needs):
            if key[0] in {op for op, _ in moved}:
                del _needs[key]
        tight = any(PLENTY * max(n.served, n.lacking) > rooms.get(kind, 0) for (_, kind), n in _needs.items())
        _next = now + (SOON if tight or moved else LATER) if _needs or moved else None
    return {op for op, _ in moved}


def forget() -> None:
    global _next
    with _lock:
        _needs.clear()
        _recent.clear()
        _next = None


def after_fork() -> None:
    global _asking, _lock
    _lock = threading.Lock()
    _asking = threading.Lock()
