"""Kernels of two releases of one package, `clashing`: one import name with two interfaces, so no
process can have both.

A worker process imports this file by itself.
"""

import layerzero as lz
from layerzero.spec.kernel import Kernel

SOURCE = '''
import time
import torch


def {function}(x, eps):
    if eps == 0.5:
        raise ValueError("clashing {version} serves")
    if eps == 0.25:
        time.sleep(600)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
'''


def load_first():
    import clashing

    def run(x, eps=1e-6):
        return clashing.norm(x, eps)

    return run


def load_second():
    import clashing

    def run(x, eps=1e-6):
        return clashing.rms_norm(x, eps)       # its name since release 2

    return run


KERNELS = tuple(Kernel(id, lz.op("rms_norm"), load, package="clashing", version=version)
                for id, load, version in (("clashing.first", load_first, "<2"),
                                          ("clashing.second", load_second, ">=2")))
