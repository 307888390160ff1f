"""Fused residual add and RMS norm: h = x + residual; returns (rms_norm(h), h).

The sum is rounded to the input's dtype before it is normalised, as by two separate calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec.mistake import Mistake
from ..spec.op import Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import at_least, dtypes, one_of
from .formulas.common import FLOATS, clear_rows, random_rows, rms_normalize
from .formulas.mistakes import NORM, change_results, eps_outside_sqrt, replace_argument, zeros_like
from .formulas.norm import NORM_CASES, NORM_STRESS, ROWS_ALONE


def reference(x: Tensor, residual: Tensor, weight: Tensor | None = None,
              eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), over the last dimension."""
    total = x + residual
    return rms_normalize(total, weight, eps), total


def meta(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, out.new_empty(out.shape)


def inputs(rows: tuple[int, ...] = (5,), hidden: int = 64, affine: bool = True, eps: float = 1e-6,
           stride: str = "", weight_dtype: str = "", outlier: bool = False, extreme: bool = False,
           padding: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    x = random_rows(gen, rows, hidden, stride, dtype, device, 100 if extreme else 1)
    if outlier:                                # as the first channel of some models is
        x[..., :1] = 1000.0
    residual = random_rows(gen, rows, hidden, "", dtype, device)
    if padding:
        clear_rows(x)
        clear_rows(residual)
    weight = torch.randn(hidden, generator=gen).to(device=device,
                                                   dtype=getattr(torch, weight_dtype
                                                                 or str(dtype)[6:]))
    return {"x": x, "residual": residual, "weight": weight if affine else None, "eps": eps}


GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {}, {"rows": (2, 7)}, {"affine": False}, {"stride": "padded"})

MISTAKES: tuple[Mistake, ...] = (
    *NORM, change_results("convention", "eps outside the square root", eps_outside_sqrt),
    change_results("convention", "the residual returned as it came",
                   lambda v, out: (out[0], v["residual"])),
    replace_argument("convention", "the residual left out", "residual", zeros_like("residual")))

OP = Op(
    name="add_rms_norm", family="norm", reference=reference, meta=meta, inputs=inputs,
    cases=NORM_CASES, gradient_cases=GRADIENT_CASES, stress=NORM_STRESS, mistakes=MISTAKES,
    reference_kernel={"overhead_us": 10.0, "workspace": "8 * rows * hidden"},
    invariance_cases=ROWS_ALONE, batch_dims=("rows",), shard_dims=(),
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-6, 1e-6),
                         "float64": (1e-10, 1e-10)}),
    shapes={"x": "*rows hidden", "residual": "*rows hidden", "weight": "hidden"},
    returns=("*rows hidden", "*rows hidden"), same_dtype=("x", "residual"), exact=("hidden",),
    requires=(dtypes(*FLOATS), one_of("weight.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
              at_least("hidden", 1), at_least("eps", 0.0, Code.VALUE_OUT_OF_RANGE)),
    flops="5 * rows * hidden", bytes="4 * itemsize * rows * hidden",
    differentiable=("x", "residual", "weight"), outputs="Tensor[]", autocast="promote",
)
