"""torch's own norms. On CUDA its RMS norm is one fused kernel where input and weight share a dtype."""

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
from ..spec.kernel import Direct, Kernel, LastSize, direct
from ..spec.reason import Code
from ..spec.rules import Condition, When, any_of, contiguous, device, differs, dtypes, equals, one_of, present, when

# Each dtype by name, since a rule compares a fact with constants, not with another fact.
WEIGHT_LIKE_INPUT: tuple[Condition, ...] = tuple(
    when(equals("dtype", d), one_of("weight.dtype", None, d, code=Code.DTYPE_UNSUPPORTED)) for d in FLOATS)


def _rms_norm() -> Direct:
    def with_offset(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0) -> Tensor:
        if weight is None or offset == 0.0:
            return torch.rms_norm(x, x.shape[-1:], weight, eps)
        wide = torch.promote_types(x.dtype, torch.float32)     # a weight near 0 plus 1 would be rounded in a half type
        return torch.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide) + offset, eps).to(x.dtype)

    return direct(torch.rms_norm, "x", LastSize("x"), "weight", "eps", otherwise=with_offset)


def _fused_rms_norm() -> Direct:
    fused: Callable[..., Any] | None = getattr(torch, "_fused_rms_norm", None)
    if fused is None:
        raise ImportError(f"torch._fused_rms_norm (torch {torch.__version__})")
    return direct(fused, "x", LastSize("x"), "weight", "eps", item=0)


def _add_rms_norm() -> Callable[..., Any]:
    def run(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch.rms_norm(total, total.shape[-1:], weight, eps), total

    return run


def _layer_norm() -> Direct:
    return direct(torch.layer_norm, "x", LastSize("x"), "weight", "bias", "eps")


def _group_norm() -> Direct:
    return direct(torch.group_norm, "x", "groups", "weight", "bias", "eps")


def _parameters(dtype: str) -> tuple[Condition, ...]:
    """torch takes weight and bias like the input; for a half type on the CPU also both in float32."""
    wide = ("float32",) if dtype in ("float16", "bfloat16") else ()
    rules: list[Condition] = []
    for name in ("weight", "bias"):
        on_cpu = any_of(one_of(f"{name}.dtype", None, dtype), device("cpu"))
        allowed = one_of(f"{name}.dtype", None, dtype, *wide, code=Code.DTYPE_UNSUPPORTED)
        rules += [When(equals("dtype", dtype), on_cpu), When(equals("dtype", dtype), allowed)]
    if wide:
        both = [when(one_of("weight.dtype", w), one_of("bias.dtype", None, w, code=Code.DTYPE_UNSUPPORTED))
                for w in (dtype, *wide)]
        rules += [When(equals("dtype", dtype), rule) for rule in both]
        # Without a weight its backward takes the bias's dtype from the input.
        alone = any_of(one_of("weight.dtype", *wide), one_of("bias.dtype", None, dtype, code=Code.DTYPE_UNSUPPORTED))
        rules.append(When(equals("dtype", dtype), alone))
    return tuple(rules)


LIKE_INPUT = tuple(rule for dtype in FLOATS for rule in _parameters(dtype))

KERNELS = (
    # Fewer calls than the formula, and as many passes over the data: one and a half times as fast for a row, slower by
    # a little where the data does not fit the cache.
    Kernel("torch.rms_norm", rms_norm, _rms_norm, prior=0.98, overhead_us=3.0, baseline=True,
           note="composed of several kernels on the CPU, and wherever weight and input differ in dtype"),
    Kernel("torch.fused_rms_norm", rms_norm, _fused_rms_norm, torch=">=2.9", prior=4.0, overhead_us=2.0,
           requires=(device("cuda"), equals("offset", 0.0), *WEIGHT_LIKE_INPUT)),
    Kernel("torch.add_rms_norm", add_rms_norm, _add_rms_norm, prior=0.98, overhead_us=4.0, baseline=True),
    Kernel("torch.layer_norm", layer_norm, _layer_norm, prior=6.0, overhead_us=2.0, baseline=True,
           requires=LIKE_INPUT),
    # Fed contiguous images only: on a GPU it copies others anyway, and on the CPU its own way through channels-last
    # ones subtracts squared means, which loses the variance where the mean is large.
    Kernel("torch.group_norm", group_norm, _group_norm, prior=6.0, overhead_us=3.0, baseline=True,
           requires=(contiguous("x"), *LIKE_INPUT,
                     # On an H200 the half types lose four times the eager error where the mean is large.
                     any_of(device("cpu"), dtypes("float32", "float64")),
                     # In a half type its gradient of the weight is off by ten times the formula's at a large mean.
                     any_of(dtypes("float32", "float64"),
                            differs("weight.requires_grad", True, Code.BACKWARD_UNSUPPORTED)),
                     # Its backward of a bias without a weight ends in an error.
                     any_of(present("weight.dtype"), differs("bias.requires_grad", True, Code.BACKWARD_UNSUPPORTED)))),
)
