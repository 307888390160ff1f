"""Launches norm.cu."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import compiler

_PARAMS = struct.Struct("@5P2qi2f")


@lru_cache(maxsize=4096)
def _prepare(rows: int, hidden: int, dtype: torch.dtype, add: bool, weight: torch.dtype | None,
             processors: int, threads: int) -> tuple[Any, tuple[int, int, int]]:
    """Returns the kernel and the grid: a thread per 16 bytes, or per 32 with many rows."""
    units = -(-hidden // 8)
    threads = threads or min(1024, -(-units // (1 if rows <= 2 * processors else 2) // 32) * 32)
    macros = (("BF16", int(dtype == torch.bfloat16)), ("HIDDEN", hidden), ("THREADS", threads),
              ("ADD", int(add)), ("WEIGHT", 0 if weight is None else 1 if weight == dtype else 2))
    run = compiler.kernel("norm/norm.cu", "rms_norm", macros, threads, 2 * 4 * threads // 32)
    return run, (min(rows, processors * (2048 // threads)), 1, 1)


def launch(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float,
           threads: int = 0) -> tuple[Tensor, Tensor]:
    """Returns (normalised, sum); without a residual the sum is x. `threads` is for benchmarks."""
    hidden = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    if not out.numel():
        return out, total
    flat = x.reshape(-1, hidden)
    other = flat if residual is None else residual.reshape(-1, hidden)
    run, grid = _prepare(flat.shape[0], hidden, x.dtype, residual is not None,
                         None if weight is None else weight.dtype,
                         compiler.machine_of(x.device).processors, threads)
    run.launch(grid, _PARAMS, flat, other, weight, out, total, flat.stride(0), other.stride(0),
               flat.shape[0], eps, offset)
    return out, total


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *,
             offset: float = 0.0) -> Tensor:
    return launch(x, None, weight, eps, offset)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None,
                 eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return launch(x, residual, weight, eps, 0.0)
