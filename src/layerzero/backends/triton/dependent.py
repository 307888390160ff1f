"""Kernels that may be launched before the one before them has ended (programmatic dependent
launch), in a graph whose edges say so (backends/cuda/graph_edges.py).

Such a kernel lets the next one be launched as soon as all of its own programs run, brings what no
other kernel writes into the L2 cache, and waits for the kernels before it. Launched in the usual
way it waits for nothing.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

PREFETCHED = 256           # bytes of one request


@lru_cache(maxsize=None)
def waits(device: torch.device) -> bool:
    """Do kernels on this device wait for those before them? Hopper and later can."""
    return (device.type == "cuda" and torch.version.hip is None
            and torch.cuda.get_device_capability(device) >= (9, 0))


def prefetched(weight: Tensor, columns: int) -> int:
    """Returns how many requests bring the first `columns` of each row into the L2 cache; 0 where
    they cannot."""
    bytes_each = columns * weight.element_size()
    aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.element_size() % 16 == 0
    return bytes_each // PREFETCHED if waits(weight.device) and aligned and (
        bytes_each % PREFETCHED == 0 and columns <= weight.shape[1]) else 0


@triton.jit
def wait_for_previous(WAIT: tl.constexpr):
    if WAIT:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 $0, $1;", "=r,r",
            [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_rows(row_ptrs, REQUESTS: tl.constexpr):
    """Brings the beginning of rows of the weight, which no kernel writes, into the L2 cache."""
    if REQUESTS > 0:
        each: tl.constexpr = 256 // (row_ptrs.dtype.element_ty.primitive_bitwidth // 8)
        at = row_ptrs[:, None] + (tl.arange(0, REQUESTS) * each)[None, :]
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;", "=r,l",
            [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
