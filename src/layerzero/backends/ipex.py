"""Intel Extension for PyTorch, for linear layers on the CPU. 2.8 is its last release and works with
torch 2.8 only.

Importing it replaces some of torch's own kernels and autocast rules in the whole process: copies of
float8 tensors fail from then on. So it runs only where it is named or untested kernels are allowed.
Its linear layer is oneDNN's with a prepacked weight, which torch has itself
(torch.linear_prepacked).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.formulas.moe import activate
from ..ops.linear import OP as linear
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._packing import PACKED


def _linear() -> Callable[..., Any]:
    importlib.import_module("intel_extension_for_pytorch")    # defines torch.ops.torch_ipex

    product = torch.ops.torch_ipex.ipex_linear.default
    prepack = torch.ops.ipex_prepack.linear_prepack

    def pack(weight: Tensor) -> tuple[Any, Tensor]:
        context = prepack(weight.detach(), None, 32)
        # the handle is valid while the context lives
        return context, context.get_data_handle()

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            activation: str | None = None) -> Tensor:
        packed = PACKED.get("ipex", pack, weight)
        if packed is None:
            out = F.linear(x, weight, bias)
        else:
            out = product(x, weight, None, packed[1], weight.shape[0])
            out = out if bias is None else out.add_(bias)
        return out if activation is None else activate(out, activation)

    return run


KERNELS = (
    Kernel("ipex.linear", linear, _linear, package="intel_extension_for_pytorch",
           distribution="intel-extension-for-pytorch", version=">=2.8,<2.9", torch=">=2.8,<2.9",
           prior=5.0, overhead_us=8.0, differentiable=False, traceable=False, untested=True,
           workspace="itemsize * in_features * out_features",
           requires=(r.device("cpu"), r.cpu_isa("avx512f"), r.dtypes("bfloat16", "float32"),
                     r.plain_tensors(), r.any_of(r.dtypes("bfloat16"), r.at_least("rows", 4)),
                     r.at_least("in_features", 1, Code.EMPTY_INPUT),
                     r.at_least("out_features", 1, Code.EMPTY_INPUT)),
           note="its import breaks copies of float8 tensors in the whole process"),
)
