"""Liger: Triton kernels for training on a GPU, of norms, gated layers, rope and losses.

Several of its kernels write into their inputs: rope into q and k, the cross entropy into the logits
(even without a gradient), the backward of most into what the forward saved, so that a second
backward would be wrong. They only get copies, and such a backward is replaced or not offered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.add_rms_norm import OP as add_rms_norm
from ..ops.cross_entropy import OP as cross_entropy
from ..ops.layer_norm import OP as layer_norm
from ..ops.linear_cross_entropy import OP as linear_cross_entropy
from ..ops.mlp import OP as mlp
from ..ops.rms_norm import OP as rms_norm
from ..ops.rope import OP as rope
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code

MAX_WIDTH = 65536                              # a row must fit into one block


# Norms.

def _rms_norm() -> Callable[..., Any]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Norm

    def run(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *,
            offset: float = 0.0) -> Tensor:
        out: Tensor = Norm.apply(x, weight, eps, offset, "gemma",
                                 False)        # "gemma": all in float32; the gradient not in place
        return out

    return run


def _add_rms_norm() -> Callable[..., Any]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Norm

    def run(x: Tensor, residual: Tensor, weight: Tensor,
            eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        out, total = Norm.apply(x, residual, weight, eps, 0.0, "gemma", False)
        return out, total

    return run


def _layer_norm() -> Callable[..., Any]:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Norm

    def run(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
        out: Tensor = Norm.apply(x, weight, bias, eps)
        return out

    return run


def _rope() -> Callable[..., Any]:
    from liger_kernel.ops.rope import rope_forward

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *,
            style: str, layout: str = "bhsd",
            rotary_dim: int | None = None) -> tuple[Tensor, Tensor]:
        if position_ids is not None:
            cos, sin = cos[position_ids], sin[position_ids]
        cos, sin = (t.float() if t.dim() == 3 else t.float()[None] for t in (cos, sin))
        # Takes (batch, heads, seq, dim) views of (batch, seq, heads, dim), rotated in place.
        swap = layout == "bhsd"
        copies = [(t.transpose(-3, -2) if swap else t).clone(memory_format=torch.contiguous_format)
                  for t in (q, k)]
        rope_forward(*((t if t.dim() == 4 else t[None]).transpose(1, 2) for t in copies), cos, sin,
                     rotary_dim=2 * cos.shape[-1])
        return ((copies[0].transpose(-3, -2), copies[1].transpose(-3, -2)) if swap
                else (copies[0], copies[1]))

    return run


# Gated layers: torch's matmuls, and one kernel between them.

def _swiglu() -> Callable[..., Any]:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction as Fused
    from liger_kernel.ops.swiglu import swiglu_forward

    def run(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str = "swiglu", *,
            weight_up: Tensor | None = None, bias_in: Tensor | None = None,
            bias_up: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])      # its backward takes 2-D inputs only
        first = F.linear(rows, weight_in, bias_in)
        if weight_up is None:
            inner: Tensor = Fused.apply(first)
        else:
            inner = swiglu_forward(first, F.linear(rows, weight_up, bias_up))[2]
        return F.linear(inner, weight_down, bias_down).view(*x.shape[:-1], -1)

    return run


def _geglu() -> Callable[..., Any]:
    from liger_kernel.ops.geglu import geglu_forward

    def run(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str = "geglu_tanh", *,
            weight_up: Tensor | None = None, bias_in: Tensor | None = None,
            bias_up: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
        first = F.linear(x, weight_in, bias_in)
        gate, up = (first.chunk(2, -1) if weight_up is None
                    else (first, F.linear(x, weight_up, bias_up)))
        return F.linear(geglu_forward(gate.contiguous(), up.contiguous())[2], weight_down,
                        bias_down)

    return run


# Losses. The forward overwrites the logits with the gradient; the backward only scales it.

class _RowLosses(torch.autograd.Function):
    """Cross entropy of each row; the backward scales the library's gradient into a new tensor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float,
                needs_grad: bool) -> Tensor:
        from liger_kernel.ops.cross_entropy import cross_entropy_forward
        # A copy, as the library writes into it; in float32, as the losses get its dtype.
        copy = logits.detach().to(torch.float32, copy=True).requires_grad_(needs_grad)
        loss: Tensor = cross_entropy_forward(copy, targets, None, ignore_index, 0.0, smoothing,
                                             "none", None, False)[0]
        if needs_grad:
            ctx.save_for_backward(copy.detach())
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grads[0][:, None]).to(ctx.dtype), None, None, None, None


def _reduce(loss: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Reduces row losses, zero where the row is ignored; the mean over no row is NaN."""
    if reduction == "none":
        return loss.view(targets.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / (targets.long() != ignore_index).sum()


def _cross_entropy() -> Callable[..., Any]:
    import liger_kernel.ops.cross_entropy  # noqa: F401

    def run(logits: Tensor, targets: Tensor, *, ignore_index: int = -100,
            label_smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        needs_grad = torch.is_grad_enabled() and logits.requires_grad
        loss = _RowLosses.apply(  # type: ignore[no-untyped-call]
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index,
            label_smoothing, needs_grad)
        return _reduce(loss, targets, ignore_index, reduction)

    return run


class _LinearLoss(torch.autograd.Function):
    """The sum of the losses; the backward scales the library's gradients into new tensors."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None,
                ignore_index: int, smoothing: float) -> Tensor:
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward
        loss, _, _, _, *gradients = fused_linear_cross_entropy_forward(
            hidden, weight, targets, bias=bias, ignore_index=ignore_index,
            label_smoothing=smoothing, reduction="sum", accum_dtype=torch.float32,
            compute_gradients=True, weight_requires_grad=True)
        ctx.save_for_backward(*gradients)
        ctx.dtype = hidden.dtype
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias = (None if s is None else (s * grads[0]).to(ctx.dtype)
                                for s in ctx.saved_tensors)
        return hidden, weight, None, bias, None, None


def _linear_cross_entropy() -> Callable[..., Any]:
    from liger_kernel.ops.fused_linear_cross_entropy import (
        fused_linear_cross_entropy_forward as forward,
    )

    def run(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *,
            ignore_index: int = -100,
            label_smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        rows, ids = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        if (torch.is_grad_enabled()
            and any(t is not None and t.requires_grad for t in (hidden, weight, bias))):
            loss = _LinearLoss.apply(  # type: ignore[no-untyped-call]
                rows, weight, ids, bias, ignore_index, label_smoothing)
        else:
            loss = forward(rows, weight, ids, bias=bias, ignore_index=ignore_index,
                           label_smoothing=label_smoothing, reduction="none",
                           compute_gradients=False, weight_requires_grad=False)[0]
        return _reduce(loss, targets, ignore_index, reduction)

    return run


FLOATS = ("float16", "bfloat16", "float32")
HARDWARE: tuple[r.Condition, ...] = (
    r.device("cuda"), r.vendor("nvidia", "amd"), r.dtypes(*FLOATS), r.plain_tensors(),
    r.any_of(r.vendor("amd"), r.sm(at_least=80)))
ROWS: tuple[r.Condition, ...] = (*HARDWARE, r.at_least("rows", 1, Code.EMPTY_INPUT))
NORM: tuple[r.Condition, ...] = (*ROWS, r.contiguous("x"), r.at_most("hidden", MAX_WIDTH))
WEIGHT = r.one_of("weight.dtype", *FLOATS, code=Code.FEATURE_UNSUPPORTED)
_LIBRARY: dict[str, Any] = {"package": "liger_kernel", "distribution": "liger-kernel",
                            "version": ">=0.8,<0.9", "jit": True, "traceable": False,
                            "overhead_us": 30.0}
_LOSS: dict[str, Any] = {**_LIBRARY, "graph_safe": False}      # counts the rows on the host

KERNELS = (
    Kernel("liger.rms_norm", rms_norm, _rms_norm, (
        *NORM, r.one_of("weight.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED)), prior=4.0,
           **_LIBRARY),
    Kernel("liger.add_rms_norm", add_rms_norm, _add_rms_norm,
           (*NORM, WEIGHT, r.contiguous("residual")), prior=4.0, **_LIBRARY),
    Kernel("liger.layer_norm", layer_norm, _layer_norm, (
        *NORM, WEIGHT, r.one_of("bias.dtype", *FLOATS, code=Code.FEATURE_UNSUPPORTED)), prior=3.0,
           **_LIBRARY),
    Kernel("liger.rope", rope, _rope, (
        *HARDWARE, r.one_of("style", "rotate_half", code=Code.ROPE_STYLE_UNSUPPORTED),
        r.present("k.dtype", Code.FEATURE_UNSUPPORTED), r.at_least("seq", 1, Code.EMPTY_INPUT),
        r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("kv_heads", 1, Code.EMPTY_INPUT),
        r.at_most("heads", 256), r.at_most("half", 256)),
        variants=("bhsd", "bshd"), differentiable=False, prior=3.0, **_LIBRARY,
        note="it turns in place, so q and k are copied first; its backward writes into the "
             "gradient it is given"),
    Kernel("liger.swiglu", mlp, _swiglu, (
        *ROWS, r.one_of("activation", "swiglu"), r.at_most("inner", MAX_WIDTH),
        r.any_of(r.off("grad"), r.absent("weight_up.dtype", Code.BACKWARD_UNSUPPORTED))), prior=1.1,
        workspace="3 * itemsize * rows * inner", **_LIBRARY,
        note="with a separate weight_up its backward would overwrite what it saved"),
    Kernel("liger.geglu_tanh", mlp, _geglu, (*ROWS, r.one_of("activation", "geglu_tanh"),
                                             r.at_most("inner", MAX_WIDTH)),
           differentiable=False, prior=1.1, workspace="5 * itemsize * rows * inner", **_LIBRARY,
           note="its backward would overwrite what it saved"),
    Kernel("liger.cross_entropy", cross_entropy, _cross_entropy, (*ROWS,), prior=2.0,
           workspace="4 * rows * vocab", **_LOSS, note="the library writes into the logits, so "
                                                       "they are copied first"),
    Kernel("liger.linear_cross_entropy", linear_cross_entropy, _linear_cross_entropy, (
        *ROWS, r.any_of(r.off("grad"),
                        r.one_of("reduction", "mean", "sum", code=Code.BACKWARD_UNSUPPORTED))),
        prior=1.2, workspace="4 * (vocab * width + 2 * rows * width)", **_LOSS,
        note="the logits of a few rows at a time; the gradients come with the forward"),
)
