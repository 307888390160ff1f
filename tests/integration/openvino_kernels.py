"""lz.linear by OpenVINO, which the worker's interpreter has and this one need not have."""

from functools import lru_cache

import torch

import layerzero as lz
from layerzero.spec import rules as r
from layerzero.spec.kernel import Kernel


def load():
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    core = ov.Core()

    @lru_cache(maxsize=32)
    def compiled(rows, inner, columns):
        x = ops.parameter([rows, inner], np.float32)
        weight = ops.parameter([columns, inner], np.float32)
        product = ops.matmul(x, weight, False, True)
        # the CPU plugin may compute in bfloat16 otherwise
        return core.compile_model(ov.Model([product], [x, weight], "linear"), "CPU",
                                  {"INFERENCE_PRECISION_HINT": "f32"})

    def run(x, weight):
        flat = x.reshape(-1, x.shape[-1])
        made = compiled(*flat.shape, weight.shape[0])
        out = made([flat.numpy(), weight.numpy()])[0]
        return torch.from_numpy(out.copy()).view(*x.shape[:-1], weight.shape[0])

    return run


KERNELS = (Kernel("openvino.linear", lz.op("linear"), load, package="openvino", requires=(
    r.device("cpu"), r.dtypes("float32"), r.contiguous("x"), r.contiguous("weight"),
    r.absent("bias.dtype"), r.absent("activation"))),)
