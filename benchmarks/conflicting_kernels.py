"""Kernels of libraries that cannot be imported where a newer torch or numpy lives: two releases of
ONNX Runtime built for numpy 1 and for numpy 2, and FBGEMM built for one release of torch.

Workers import this file by itself; benchmarks/conflicts.py serves with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import layerzero as lz
from layerzero.spec import rules as r


def load_onnxruntime() -> Callable[[Tensor, Tensor], Tensor]:
    import onnxruntime
    from onnx import TensorProto, helper

    def value(name: str, *shape: str) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    product = helper.make_node("Gemm", ["x", "weight"], ["out"], transB=1)
    graph = helper.make_graph([product], "linear", [value("x", "rows", "inner"),
                              value("weight", "columns", "inner")], [value("out", "rows", "columns")])
    # the oldest format that both releases read
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options,
                                           providers=["CPUExecutionProvider"])

    def run(x: Tensor, weight: Tensor) -> Tensor:
        inputs = {"x": x.reshape(-1, x.shape[-1]).numpy(), "weight": weight.numpy()}
        out = torch.from_numpy(session.run(None, inputs)[0])
        return out.view(*x.shape[:-1], weight.shape[0])

    return run


def load_fbgemm() -> Callable[[Tensor, Tensor], Tensor]:
    import fbgemm_gpu  # noqa: F401  it registers torch.ops.fbgemm

    def run(ids: Tensor, weight: Tensor) -> Tensor:
        rows = torch.ops.fbgemm.index_select_dim0(weight, ids.reshape(-1))
        return rows.view(*ids.shape, weight.shape[1])

    return run


_LINEAR = (r.device("cpu"), r.dtypes("float32"), r.contiguous("x"), r.contiguous("weight"),
           r.absent("bias.dtype"), r.absent("activation"))
KERNELS = (
    lz.Kernel("onnxruntime.numpy1_linear", lz.op("linear"), load_onnxruntime,
              package="onnxruntime", version="<1.19", requires=_LINEAR),
    lz.Kernel("onnxruntime.numpy2_linear", lz.op("linear"), load_onnxruntime,
              package="onnxruntime", version=">=1.19", requires=_LINEAR),
    lz.Kernel("fbgemm.embedding", lz.op("embedding"), load_fbgemm, package="fbgemm_gpu",
              distribution="fbgemm_gpu-cpu", requires=(
                  r.device("cpu"), r.dtypes("float32"), r.contiguous("weight"),
                  r.equals("ids.dtype", "int64"), r.absent("padding_idx"),
                  r.equals("scale", 1.0))))
