"""Layer norm over the last dimension.

Accumulates in float32 or wider; the result has the input's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec.mistake import Mistake, Values
from ..spec.op import Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import at_least, dtypes, one_of
from .formulas.common import FLOATS, clear_rows, random_rows
from .formulas.mistakes import NORM, change_results, drop_argument
from .formulas.norm import NORM_CASES, NORM_STRESS, ROWS_ALONE


def reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
              eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last dimension."""
    upcast = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = upcast - upcast.mean(-1, keepdim=True)
    upcast = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    upcast = upcast if weight is None else upcast * weight.to(upcast.dtype)
    return (upcast if bias is None else upcast + bias.to(upcast.dtype)).to(x.dtype)


def meta(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def inputs(rows: tuple[int, ...] = (5,), hidden: int = 64, affine: bool = True, eps: float = 1e-5,
           stride: str = "", weight_dtype: str = "", outlier: bool = False, extreme: bool = False,
           padding: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    x = random_rows(gen, rows, hidden, stride, dtype, device, 100 if extreme else 1)
    if outlier:                                # as the first channel of some models is
        x[..., :1] = 1000.0
    if padding:
        clear_rows(x)
    parameter_dtype = getattr(torch, weight_dtype or str(dtype)[6:])
    weight, bias = (torch.randn(hidden, generator=gen).to(device=device, dtype=parameter_dtype)
                    for _ in range(2))
    return {"x": x, "weight": weight if affine else None, "bias": bias if affine else None,
            "eps": eps}


GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {}, {"rows": (3, 2, 5), "hidden": 96}, {"affine": False}, {"stride": "padded"},
    {"weight_dtype": "float32"})


# Mistakes that a kernel for this op could make.

def _unbiased_variance(v: Values, out: tuple[Any, ...]) -> Any:
    n, bias = v["x"].shape[-1], v["bias"]
    if n < 2:
        return None
    var = v["x"].var(-1, unbiased=False, keepdim=True)
    factor = ((var + v["eps"]) / (var * n / (n - 1) + v["eps"])).sqrt()
    return out[0] * factor if bias is None else (out[0] - bias) * factor + bias


MISTAKES: tuple[Mistake, ...] = (
    *NORM, Mistake("convention", "the bias left out", drop_argument("bias")),
    change_results("convention", "the variance divided by n - 1", _unbiased_variance))

OP = Op(
    name="layer_norm", family="norm", reference=reference, meta=meta, inputs=inputs,
    cases=NORM_CASES, gradient_cases=GRADIENT_CASES, stress=NORM_STRESS, mistakes=MISTAKES,
    reference_kernel={"overhead_us": 12.0, "workspace": "12 * rows * hidden"},
    invariance_cases=ROWS_ALONE, batch_dims=("rows",), shard_dims=(),
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-6, 1e-6),
                         "float64": (1e-10, 1e-10)}),
    shapes={"x": "*rows hidden", "weight": "hidden", "bias": "hidden"}, returns=("*rows hidden",),
    exact=("hidden",),
    requires=(dtypes(*FLOATS), one_of("weight.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
              one_of("bias.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
              at_least("hidden", 1), at_least("eps", 0.0, Code.VALUE_OUT_OF_RANGE)),
    flops="8 * rows * hidden", bytes="2 * itemsize * rows * hidden",
    differentiable=("x", "weight", "bias"),
)
