"""Kernels of rms_norm that misbehave on demand: what they do is in the first element of the weight.

A worker process imports this file by itself.
"""

import time

import torch

import layerzero as lz
from layerzero.spec.kernel import Kernel

ERROR, OUTSIDER, HANG, MEMORY, SLEEP, WRITE = range(101, 107)


class Outsider(Exception):
    """An error that only the worker knows."""


def load():
    def run(x, weight=None, eps=1e-6):
        wish = 0 if weight is None else int(weight.flatten()[0])
        if wish == ERROR:
            raise ValueError("the worker dislikes this weight")
        if wish == OUTSIDER:
            raise Outsider("nobody else knows me")
        if wish == HANG:
            time.sleep(600)
        if wish == SLEEP:
            time.sleep(0.2)
        if wish == WRITE:
            x.add_(1)
        if wish == MEMORY:
            raise MemoryError("no room in the worker")
        return torch.rms_norm(x, x.shape[-1:], weight, eps)

    return run


KERNELS = (Kernel("misbehaving.rms_norm", lz.op("rms_norm"), load),)
