"""Kernels of lz.rms_norm that do their worst, for processes of their own: they hang, crash, leave.
"""

from __future__ import annotations

import ctypes
import os
import time

from layerzero.ops.rms_norm import reference


def load_hanging():
    def hang(x, weight=None, eps=1e-6):
        time.sleep(3600)

    return hang


def load_crashing():
    def crash(x, weight=None, eps=1e-6):
        ctypes.string_at(8)                    # reads an address that nobody has

    return crash


def load_exiting():
    def leave(x, weight=None, eps=1e-6):
        os._exit(7)

    return leave


def load_failing():
    def fail(x, weight=None, eps=1e-6):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    return fail


def load_sound():
    def run(x, weight=None, eps=1e-6):
        print("a kernel that talks")
        return reference(x, weight, eps)

    return run
