"""Kernels of lz.rms_norm that do their worst, for processes of their own: they hang, crash, leave.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from layerzero.ops.rms_norm import reference


def _begin() -> None:
    """Note that a kernel was called: who waits for it can tell that from a slow start."""
    if "HOSTILE_KERNEL_BEGUN" in os.environ:
        Path(os.environ["HOSTILE_KERNEL_BEGUN"]).touch()


def load_hanging():
    def hang(x, weight=None, eps=1e-6):
        _begin()
        time.sleep(3600)

    return hang


def load_crashing():
    def crash(x, weight=None, eps=1e-6):
        _begin()
        ctypes.string_at(8)                    # reads an address that nobody has

    return crash


def load_exiting():
    def leave(x, weight=None, eps=1e-6):
        _begin()
        os._exit(7)

    return leave


def load_failing():
    def fail(x, weight=None, eps=1e-6):
        _begin()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    return fail


def load_sound():
    def run(x, weight=None, eps=1e-6):
        print("a kernel that talks")
        return reference(x, weight, eps)

    return run
