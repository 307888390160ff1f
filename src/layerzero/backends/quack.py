"""QuACK: norms and the cross entropy in CuTe-DSL, for Hopper and later.

Compiles on first use, in a second or two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops.add_rms_norm import OP as add_rms_norm
from ..ops.cross_entropy import OP as cross_entropy
from ..ops.rms_norm import OP as rms_norm
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code


def _rms_norm() -> Callable[..., Any]:
    from quack.rmsnorm import rmsnorm

    def run(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *,
            offset: float = 0.0) -> Tensor:
        out: Tensor = rmsnorm(x, weight, eps=eps, weight_offset=offset)
        return out

    return run


def _add_rms_norm() -> Callable[..., Any]:
    from quack.rmsnorm import rmsnorm

    def run(x: Tensor, residual: Tensor, weight: Tensor,
            eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        out, total = rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)
        return out, total

    return run


def _cross_entropy() -> Callable[..., Any]:
    from quack.cross_entropy import cross_entropy as quack_cross_entropy

    def run(logits: Tensor, targets: Tensor, *, ignore_index: int = -100,
            reduction: str = "mean") -> Tensor:
        loss: Tensor = quack_cross_entropy(logits.reshape(-1, logits.shape[-1]),
                                           targets.reshape(-1),
                                           ignore_index=ignore_index, reduction=reduction)
        return loss.view(targets.shape) if reduction == "none" else loss

    return run


FLOATS = ("float16", "bfloat16", "float32")
ROWS: tuple[r.Condition, ...] = (
    r.device("cuda"), r.vendor("nvidia"), r.sm(at_least=90), r.dtypes(*FLOATS), r.plain_tensors(),
    r.at_least("rows", 1, Code.EMPTY_INPUT))
NORM: tuple[r.Condition, ...] = (
    *ROWS, r.contiguous("x"), r.aligned("x", 16), r.multiple_of("hidden", 8),
    r.at_most("hidden", 1 << 17), r.contiguous("weight"), r.aligned("weight", 16),
    r.one_of("weight.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED))
_LIBRARY: dict[str, Any] = {"package": "quack", "distribution": "quack-kernels",
                            "version": ">=0.5,<0.7", "jit": True, "traceable": False,
                            "overhead_us": 25.0}

KERNELS = (
    Kernel("quack.rms_norm", rms_norm, _rms_norm, NORM, prior=6.0, **_LIBRARY),
    Kernel("quack.add_rms_norm", add_rms_norm, _add_rms_norm, (
        *NORM, r.present("weight.dtype", Code.FEATURE_UNSUPPORTED), r.contiguous("residual"),
        r.aligned("residual", 16)),
        prior=6.0, **_LIBRARY),
    Kernel("quack.cross_entropy", cross_entropy, _cross_entropy, (
        *ROWS, r.contiguous("logits"), r.aligned("logits", 16), r.equals("label_smoothing", 0.0),
        r.at_most("vocab", 1 << 18), r.at_least("logits.ndim", 2),
        r.at_least("vocab", 8), r.any_of(r.off("grad"), r.multiple_of("vocab", 8))), prior=4.0,
           **_LIBRARY),
)
