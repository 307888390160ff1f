"""How a GPU kernel is launched, and what a device can take: pure data, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import LayerZeroError
from .reason import Code, Reason

AXES = ("grid x", "grid y", "grid z")
SHARED = "shared memory of a block in bytes"


@dataclass(frozen=True)
class LaunchLimits:
    """Of a device. The defaults hold for every NVIDIA GPU since compute capability 3.0."""

    grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    threads: int = 1024                        # of one block
    shared: int = 48 << 10                     # bytes of one block, where the kernel asks the driver for as much
    warp: int = 32


class LaunchRefused(LayerZeroError, RuntimeError):
    """A kernel did not launch, since the device cannot take it as it would be launched."""

    @classmethod
    def of(cls, kernel: str, reasons: Sequence[Reason]) -> LaunchRefused:
        return cls(f"{kernel} was not launched: " + "; ".join(r.message for r in reasons), reasons)


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def misfits(grid: Sequence[int], limits: LaunchLimits) -> tuple[Reason, ...]:
    """What is wrong with a grid on this device; nothing if it can be launched."""
    if not 1 <= len(grid) <= 3:
        return (Reason(Code.CUDA_BLOCK_LIMIT_EXCEEDED, "of 1 to 3 numbers", len(grid), "the grid"),)
    return tuple(Reason(Code.CUDA_BLOCK_LIMIT_EXCEEDED, f"a whole number from 1 to {most}", n, axis)
                 for axis, n, most in zip(AXES, grid, limits.grid)
                 if type(n) is not int or not 1 <= n <= most)


def too_large(num_warps: int, shared: int, limits: LaunchLimits) -> tuple[Reason, ...]:
    """What of a compiled kernel does not fit one block of this device."""
    asked = (("threads of a block", num_warps * limits.warp, limits.threads),
             (SHARED, shared, limits.shared))
    return tuple(Reason(Code.CUDA_BLOCK_LIMIT_EXCEEDED, f"<= {most}", got, name)
                 for name, got, most in asked if got > most)


def malformed(meta: Mapping[str, Any], blocks: Iterable[str]) -> tuple[Reason, ...]:
    """What of a configuration no device takes: block sizes and numbers of warps are powers of two."""
    found = []
    for name in (*blocks, "num_warps"):
        value = meta.get(name, 1)
        if type(value) is not int or not is_power_of_two(value):
            found.append(Reason(Code.SHAPE_UNSUPPORTED, "a power of two", value, name))
    for name in ("num_stages", "num_ctas"):
        value = meta.get(name, 1)
        if type(value) is not int or value < 1:
            found.append(Reason(Code.SHAPE_UNSUPPORTED, "a whole number >= 1", value, name))
    return tuple(found)
