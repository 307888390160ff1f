"""Kernels of lz.rms_norm that do to a GPU the worst there is, for processes of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def stray(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK).to(tl.int64)
    tl.store(x_ptr + (at + 1) * (1 << 38), 1.0)


@triton.jit
def wait(flag_ptr):
    flag = tl.load(flag_ptr, volatile=True)
    while flag == 0:
        flag = tl.load(flag_ptr, volatile=True)
    tl.store(flag_ptr + 1, flag)


def load_out_of_bounds():
    def run(x, weight=None, eps=1e-6):
        stray[(1,)](torch.zeros(128, device=x.device), BLOCK=128)
        return torch.empty_like(x)

    return run


def load_endless():
    def run(x, weight=None, eps=1e-6):
        wait[(1,)](torch.zeros(2, dtype=torch.int32, device=x.device))
        return torch.empty_like(x)

    return run
