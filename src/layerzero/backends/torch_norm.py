"""torch's own norms.

On CUDA its RMS norm is one fused kernel where input and weight share a dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.add_rms_norm import OP as add_rms_norm
from ..ops.formulas.common import FLOATS
from ..ops.group_norm import OP as group_norm
from ..ops.layer_norm import OP as layer_norm
from ..ops.rms_norm import OP as rms_norm
from ..spec import rules as r
from ..spec.kernel import ByFact, Direct, Kernel, LastSize, direct
from ..spec.reason import Code

# One rule per dtype: a rule compares a fact with constants, not with another fact.
WEIGHT_LIKE_INPUT: tuple[r.Condition, ...] = tuple(
    r.when(r.equals("dtype", d), r.one_of("weight.dtype", None, d, code=Code.DTYPE_UNSUPPORTED))
    for d in FLOATS)


def _rms_norm() -> Direct:
    def general(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *,
                offset: float = 0.0) -> Tensor:
        if weight is None or offset == 0.0:
            return torch.rms_norm(x, x.shape[-1:], weight, eps)
        # weight + offset would be rounded in a half type
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        out = torch.rms_norm(x.to(acc_dtype), x.shape[-1:], weight.to(acc_dtype) + offset, eps)
        return out.to(x.dtype)

    return direct(torch.rms_norm, "x", LastSize("x"), "weight", "eps", otherwise=general)


def _fused_rms_norm() -> Direct:
    fused: Callable[..., Any] | None = getattr(torch, "_fused_rms_norm", None)
    if fused is None:
        raise ImportError(f"torch._fused_rms_norm (torch {torch.__version__})")
    return direct(fused, "x", LastSize("x"), "weight", "eps", item=0)


def _add_rms_norm() -> Callable[..., Any]:
    def run(x: Tensor, residual: Tensor, weight: Tensor | None = None,
            eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch.rms_norm(total, total.shape[-1:], weight, eps), total

    return run


def _layer_norm() -> Direct:
    def recorded(x: Tensor, size: tuple[int, ...], weight: Tensor | None, bias: Tensor | None,
                 eps: float) -> Tensor:
        """On a CPU torch adds the gradients of half-precision weights in their own dtype: over 4096
        rows they are off by a tenth (torch 2.13)."""
        if x.device.type != "cpu" or x.dtype.itemsize != 2:
            return torch.layer_norm(x, size, weight, bias, eps)
        weight, bias = (None if t is None else t.float() for t in (weight, bias))
        return torch.layer_norm(x.float(), size, weight, bias, eps).to(x.dtype)

    torchs_own = torch.layer_norm
    by_dtype = ByFact("dtype", "float32", torchs_own, ByFact("dtype", "float64", torchs_own,
                                                             recorded))
    return direct(ByFact("grad", False, torchs_own, by_dtype), "x", LastSize("x"), "weight", "bias",
                  "eps")


def _group_norm() -> Direct:
    return direct(torch.group_norm, "x", "groups", "weight", "bias", "eps")


def _parameter_dtypes(dtype: str) -> tuple[r.Condition, ...]:
    """Returns the rules for dtypes of weight and bias: torch takes that of the input, and float32
    too for half types on the CPU."""
    wide = ("float32",) if dtype in ("float16", "bfloat16") else ()
    rules: list[r.Condition] = []
    for name in ("weight", "bias"):
        on_cpu = r.any_of(r.one_of(f"{name}.dtype", None, dtype), r.device("cpu"))
        allowed = r.one_of(f"{name}.dtype", None, dtype, *wide, code=Code.DTYPE_UNSUPPORTED)
        rules += [r.When(r.equals("dtype", dtype), on_cpu),
                  r.When(r.equals("dtype", dtype), allowed)]
    if wide:
        both = [r.when(r.one_of("weight.dtype", w),
                       r.one_of("bias.dtype", None, w, code=Code.DTYPE_UNSUPPORTED))
                for w in (dtype, *wide)]
        rules += [r.When(r.equals("dtype", dtype), rule) for rule in both]
        # Without a weight its backward assumes that the bias has the input's dtype.
        bias_alone = r.any_of(r.one_of("weight.dtype", *wide),
                              r.one_of("bias.dtype", None, dtype, code=Code.DTYPE_UNSUPPORTED))
        rules.append(r.When(r.equals("dtype", dtype), bias_alone))
    return tuple(rules)


PARAMETER_DTYPES = tuple(rule for dtype in FLOATS for rule in _parameter_dtypes(dtype))

# One long row alone torch would sum up on several threads, in another order.
ROW_BY_ROW: tuple[r.Condition, ...] = (r.device("cpu"), r.at_most("hidden", 16384))

KERNELS = (
    # Fewer calls than the reference, and as many passes over the data: 1.5 times as fast for a row,
    # slightly slower where the data does not fit the cache.
    Kernel("torch.rms_norm", rms_norm, _rms_norm, prior=0.98, overhead_us=3.0, baseline=True,
           batch_invariant=True, invariant_when=ROW_BY_ROW,
           note="composed of several kernels on the CPU, and wherever weight and input differ in "
                "dtype"),
    Kernel("torch.fused_rms_norm", rms_norm, _fused_rms_norm, torch=">=2.9", prior=4.0,
           overhead_us=2.0,
           requires=(r.device("cuda"), r.equals("offset", 0.0), *WEIGHT_LIKE_INPUT),
           batch_invariant=True),
    Kernel("torch.add_rms_norm", add_rms_norm, _add_rms_norm, prior=0.98, overhead_us=4.0,
           baseline=True, batch_invariant=True, invariant_when=ROW_BY_ROW),
    Kernel("torch.layer_norm", layer_norm, _layer_norm, prior=6.0, overhead_us=2.0, baseline=True,
           requires=PARAMETER_DTYPES, batch_invariant=True,
           # on a GPU each row has a block of its own
           invariant_when=(r.any_of(r.device("cuda"), r.device("cpu")),
                           r.any_of(r.device("cuda"), r.at_most("hidden", 16384)))),
    # Contiguous images only: on a GPU it copies others anyway, and on the CPU its channels-last
    # path computes E[x^2] - E[x]^2, which loses the variance if the mean is large.
    Kernel("torch.group_norm", group_norm, _group_norm, prior=6.0, overhead_us=3.0, baseline=True,
           requires=(r.contiguous("x"), *PARAMETER_DTYPES,
                     # On an H200 half types have four times the eager error if the mean is large.
                     r.any_of(r.device("cpu"), r.dtypes("float32", "float64")),
                     # In a half type its weight gradient is ten times less exact at a large mean.
                     r.any_of(r.dtypes("float32", "float64"),
                              r.differs("weight.requires_grad", True, Code.BACKWARD_UNSUPPORTED)),
                     # Its backward of a bias without a weight raises.
                     r.any_of(r.present("weight.dtype"),
                              r.differs("bias.requires_grad", True, Code.BACKWARD_UNSUPPORTED)))),
)
