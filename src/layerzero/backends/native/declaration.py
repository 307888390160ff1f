"""What the declarations of our own CPU kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...spec import rules as r
from ...spec.kernel import Kernel
from ...spec.op import Op
from . import build

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}      # as kernels.cpp numbers them
FLOATS = ("float32", "bfloat16", "float16")
CPU_RULES: tuple[r.Condition, ...] = (r.device("cpu"), r.plain_tensors())
ONE_PASS = "one pass over memory, where torch runs a kernel for each step of the formula"


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """Returns `x` and its row stride; a copy if the rows are not evenly spaced."""
    if x.is_contiguous():
        return x, x.shape[-1]
    return (x, x.stride(0)) if x.dim() == 2 else (x.contiguous(), x.shape[-1])


def empty_rows(x: Tensor) -> Tensor:
    """Returns a tensor of the shape and dtype of `x`, without gaps; torch.empty(x.shape, dtype=...)
    takes twice as long."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def declare(op: Op, load: Callable[[], Callable[..., Any]], prior: float, overhead_us: float,
            *requires: r.Condition, name: str = "", variants: tuple[str, ...] = (), note: str = "",
            less_work: str = "", floats: bool = True, **fields: Any) -> Kernel:
    """Declare a kernel of the compiled module; `floats`: its first tensor is one of FLOATS."""
    dtypes = (r.dtypes(*FLOATS),) if floats else ()
    return Kernel(f"native.{name or op.name}", op, load, (*CPU_RULES, *dtypes, *requires),
                  package="layerzero.backends.native", distribution="layerzero", prior=prior,
                  overhead_us=overhead_us, variants=variants, differentiable=False, traceable=False,
                  note=note, built=build.is_built, less_work=less_work, **fields)
