"""RMS norm over the last dimension. Accumulates in float32 or wider; the result has the input's
dtype.

`offset` is added to the weight, in float32 or wider: Gemma stores its weights minus 1 (offset=1.0).
QK-norm, the norm of each head's queries and keys, is this op over (..., head_dim).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec.mistake import Mistake, Values
from ..spec.op import Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import any_of, at_least, dtypes, equals, one_of, present
from .formulas.common import FLOATS, clear_rows, random_rows, rms_normalize
from .formulas.mistakes import NORM, change_results, eps_outside_sqrt
from .formulas.norm import NORM_CASES, NORM_STRESS, ROWS_ALONE


def reference(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *,
              offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), over the last dimension."""
    if weight is not None and offset != 0.0:
        weight = weight.to(torch.promote_types(x.dtype, torch.float32)) + offset
    return rms_normalize(x, weight, eps)


def meta(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def inputs(rows: tuple[int, ...] = (5,), hidden: int = 64, affine: bool = True, eps: float = 1e-6,
           stride: str = "", offset: float = 0.0, weight_dtype: str = "", outlier: bool = False,
           extreme: bool = False, padding: bool = False,
           dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    x = random_rows(gen, rows, hidden, stride, dtype, device, 100 if extreme else 1)
    if outlier:                                # as the first channel of some models is
        x[..., :1] = 1000.0
    if padding:
        clear_rows(x)
    weight = torch.randn(hidden, generator=gen).to(device=device,
                                                   dtype=getattr(torch, weight_dtype
                                                                 or str(dtype)[6:]))
    return {"x": x, "weight": weight if affine else None, "eps": eps, "offset": offset}


STRESS: tuple[dict[str, Any], ...] = (
    *NORM_STRESS, {"offset": 1.0}, {"offset": -0.5, "weight_dtype": "float32", "rows": (3, 2)})

GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {}, {"rows": (3, 2, 5), "hidden": 96}, {"affine": False},
    {"stride": "transposed", "rows": (6, 4)}, {"weight_dtype": "float32"}, {"rows": (0,)},
    {"eps": 1.0})


# Mistakes that a kernel for this op could make.

def _subtract_mean(op: Any, v: Values) -> Values:
    return {**v, "x": v["x"] - v["x"].mean(-1, keepdim=True)}


MISTAKES: tuple[Mistake, ...] = (
    Mistake("convention", "the mean subtracted, as layer norm does", _subtract_mean), *NORM,
    change_results("convention", "eps outside the square root", eps_outside_sqrt))

OP = Op(
    name="rms_norm", family="norm", reference=reference, meta=meta, inputs=inputs,
    cases=NORM_CASES, gradient_cases=GRADIENT_CASES, stress=STRESS, mistakes=MISTAKES,
    reference_kernel={"overhead_us": 10.0, "workspace": "8 * rows * hidden"},
    invariance_cases=ROWS_ALONE, batch_dims=("rows",), shard_dims=(),
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-6, 1e-6),
                         "float64": (1e-10, 1e-10)}),
    shapes={"x": "*rows hidden", "weight": "hidden"}, returns=("*rows hidden",), exact=("hidden",),
    requires=(dtypes(*FLOATS), one_of("weight.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
              at_least("hidden", 1), at_least("eps", 0.0, Code.VALUE_OUT_OF_RANGE),
              any_of(equals("offset", 0.0), present("weight.dtype", Code.WRONG_TYPE))),
    flops="4 * rows * hidden", bytes="2 * itemsize * rows * hidden", differentiable=("x", "weight"),
)
