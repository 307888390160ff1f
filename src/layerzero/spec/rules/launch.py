"""Limits of a device on kernel launches, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import LayerZeroError
from ..reason import Code, Reason

AXES = ("grid x", "grid y", "grid z")
SHARED = "shared memory of a block in bytes"


@dataclass(frozen=True)
class LaunchLimits:
    """The limits of one device; the defaults are those of all NVIDIA GPUs since SM 3.0."""

    grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    threads: int = 1024                        # of one block
    shared: int = 48 << 10                     # bytes of one block, opt-in included
    warp: int = 32


class LaunchRefused(LayerZeroError, RuntimeError):
    """A kernel was not launched, because its grid or block exceeds the limits of the device."""

    @classmethod
    def of(cls, kernel: str, reasons: Sequence[Reason]) -> LaunchRefused:
        return cls(f"{kernel} was not launched: " + "; ".join(r.message for r in reasons), reasons)


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def grid_problems(grid: Sequence[int], limits: LaunchLimits) -> tuple[Reason, ...]:
    """Reasons why the grid cannot be launched on this device."""
    if not 1 <= len(grid) <= 3:
        return (Reason(Code.CUDA_BLOCK_LIMIT_EXCEEDED, "of 1 to 3 numbers", len(grid), "the grid"),)
    return tuple(Reason(Code.CUDA_BLOCK_LIMIT_EXCEEDED, f"a whole number from 1 to {most}", n, axis)
                 for axis, n, most in zip(AXES, grid, limits.grid)
                 if type(n) is not int or not 1 <= n <= most)


def block_problems(num_warps: int, shared: int, limits: LaunchLimits) -> tuple[Reason, ...]:
    """Reasons why a block of a compiled kernel does not fit on this device."""
    needs = (("threads of a block", num_warps * limits.warp, limits.threads),
             (SHARED, shared, limits.shared))
    return tuple(Reason(Code.CUDA_BLOCK_LIMIT_EXCEEDED, f"<= {most}", got, name)
                 for name, got, most in needs if got > most)


def config_problems(meta: Mapping[str, Any], blocks: Iterable[str]) -> tuple[Reason, ...]:
    """Reasons why no device takes a configuration; block sizes and num_warps are powers of two."""
    problems = []
    for name in (*blocks, "num_warps"):
        value = meta.get(name, 1)
        if type(value) is not int or not is_power_of_two(value):
            problems.append(Reason(Code.SHAPE_UNSUPPORTED, "a power of two", value, name))
    for name in ("num_stages", "num_ctas"):
        value = meta.get(name, 1)
        if type(value) is not int or value < 1:
            problems.append(Reason(Code.SHAPE_UNSUPPORTED, "a whole number >= 1", value, name))
    return tuple(problems)
