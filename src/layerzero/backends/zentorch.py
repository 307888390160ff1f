"""AMD's ZenDNN through zentorch, for linear layers on the CPU. Each release works with one torch
release only.

By default it packs a weight in the caller's memory, without bumping its version, and keeps using
the packed weight after the original has changed. So it only gets a packed copy of our own, which is
made again when the weight changes. It accumulates float16 in float16, which is too coarse for the
contract, and takes no empty input.
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

POST_OPS = {None: "none", "relu": "relu", "silu": "silu", "gelu": "gelu_erf",
            "gelu_tanh": "gelu_tanh"}


def _linear() -> Callable[..., Any]:
    importlib.import_module("zentorch")    # defines torch.ops.zentorch

    product = torch.ops.zentorch.zentorch_linear_unary.default
    prepack = torch.ops.zentorch.zentorch_weight_prepack_for_linear.default

    def pack(weight: Tensor) -> Tensor:
        return prepack(weight.detach().clone())  # type: ignore[no-any-return]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            activation: str | None = None) -> Tensor:
        packed = PACKED.get("zentorch", pack, weight)
        if packed is None:
            out = F.linear(x, weight, bias)
            return out if activation is None else activate(out, activation)
        return product(x, packed, bias, is_weight_prepacked=True, post_op=POST_OPS[activation])  # type: ignore[no-any-return]

    return run


KERNELS = (
    Kernel("zentorch.linear", linear, _linear, package="zentorch", version=">=2.13,<2.14",
           torch=">=2.13,<2.14", prior=5.0, overhead_us=8.0, differentiable=False, traceable=False,
           workspace="itemsize * in_features * out_features",
           requires=(r.device("cpu"), r.cpu_isa("avx512f"), r.dtypes("bfloat16", "float32"),
                     r.plain_tensors(), r.contiguous("x"),
                     r.at_least("rows", 1, Code.EMPTY_INPUT),
                     r.at_least("in_features", 1, Code.EMPTY_INPUT),
                     r.at_least("out_features", 1, Code.EMPTY_INPUT)),
           note="made for EPYC; without AMX, so slow in bf16 on Xeons with many rows"),
)
