"""A linear layer: y = activation(x W^T + bias), weight (out_features, in_features) as in
torch.nn.Linear.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.mistake import Mistake
from ..spec.op import Op, Tolerance
from ..spec.rules import dtypes
from .formulas.common import FLOATS, random_rows
from .formulas.mistakes import ACTIVATIONS, drop_argument, replace_argument
from .formulas.moe import activate


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None,
              activation: Literal["gelu", "gelu_tanh", "silu", "relu"] | None = None) -> Tensor:
    """activation(x @ weight.T + bias), over the last dimension."""
    out = x @ weight.t()
    if bias is not None:
        out = out + bias
    return out if activation is None else activate(out, activation)


def meta(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def inputs(rows: tuple[int, ...] = (5,), k: int = 64, n: int = 48, bias: bool = True,
           activation: str | None = None, stride: str = "", transposed: bool = False,
           extreme: bool = False, dtype: torch.dtype = torch.float32,
           device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    x = random_rows(gen, rows, k, stride, dtype, device, 100 if extreme else 1)
    shape = (k, n) if transposed else (n, k)
    weight = (torch.randn(shape, generator=gen) / math.sqrt(max(k, 1))).to(device=device,
                                                                           dtype=dtype)
    bias_values = torch.randn(n, generator=gen).to(device=device, dtype=dtype) if bias else None
    return {"x": x, "weight": weight.t() if transposed else weight, "bias": bias_values,
            "activation": activation}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"bias": False}, {"rows": (1,)}, {"rows": (2, 7)}, {"rows": ()}, {"rows": (0,)},
    {"rows": (3, 2, 33), "k": 96}, {"k": 1, "n": 1}, {"k": 17, "n": 33},
    {"k": 17, "n": 33, "rows": (1,)}, {"k": 576, "n": 1536, "rows": (4,)},
    {"k": 1536, "n": 576, "rows": (1,), "bias": False}, {"n": 0}, {"k": 0},
    {"rows": (130,), "k": 256, "n": 128}, {"activation": "gelu"}, {"activation": "gelu_tanh"},
    {"activation": "silu"}, {"activation": "relu", "bias": False},
    {"activation": "silu", "rows": (40,), "k": 256, "n": 64},
    {"stride": "padded"}, {"stride": "sparse"}, {"stride": "transposed", "rows": (6, 4)},
    {"transposed": True}, {"transposed": True, "rows": (8,), "k": 128}, {"extreme": True},
    {"extreme": True, "activation": "gelu"},
)

MISTAKES: tuple[Mistake, ...] = (
    Mistake("convention", "the bias left out", drop_argument("bias")),
    replace_argument("convention", "the activation left out", "activation", None), *ACTIVATIONS[:4])

STRESS: tuple[dict[str, Any], ...] = (         # k and n beyond 2^14 and 2^15, rows beyond 2^17
    {"k": 16_411, "n": 9, "rows": (2,)}, {"k": 9, "n": 33_003, "rows": (2,)},
    {"k": 3, "n": 2, "rows": (131_077,)},
    {"k": 4096, "n": 64, "rows": (4,)})        # which may be split along k

OP = Op(
    name="linear", family="linear", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS,
    mistakes=MISTAKES,
    # In float32 torch's matmul is off by 1e-6 for some inputs; the eager error is tighter.
    batch_dims=("rows",), shard_dims=("out_features",),
    invariance_cases=({"rows": (33,), "k": 520, "n": 72}, {"rows": (130,), "k": 200, "n": 136}),
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-6, 1e-6),
                         "float64": (1e-10, 1e-10)}),
    shapes={"x": "*rows in_features", "weight": "out_features in_features", "bias": "out_features"},
    returns=("*rows out_features",), same_dtype=("x", "weight", "bias"),
    exact=("in_features", "out_features"), requires=(dtypes(*FLOATS),),
    flops="2 * rows * in_features * out_features",
    bytes="itemsize * (rows * (in_features + out_features) + in_features * out_features)",
    differentiable=("x", "weight", "bias"), autocast="lower",
)
