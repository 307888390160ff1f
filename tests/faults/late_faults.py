"""Kernels that are wrong where numbers leave the range of 16 bits, over many rows, in what they keep
of earlier calls, or in a second derivative."""

from __future__ import annotations

import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor

_BEFORE = len(FAULTS)


@fault("linear", "precision", "overflow")
def halves_of_a_sum_meet_in_16_bits(right, x, weight, bias=None, activation=None):
    half = x.shape[-1] // 2
    if x.dtype != torch.float16 or not half or activation is not None:
        return right(x, weight, bias, activation)
    return right(x[..., :half], weight[:, :half], bias) + right(x[..., half:], weight[:, half:])


@fault("mlp", "non-finite values", "overflow")
def infinities_are_clamped(right, **v):
    out = right(**v)
    most = torch.finfo(torch.float16).max
    return out.clamp(-most, most) if out.dtype == torch.float16 else out


class _AddedInItsDtype(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, shape: torch.Size) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.float().expand(shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        total = torch.zeros(grad.shape[-1], dtype=ctx.dtype)
        for rows in grad.reshape(-1, grad.shape[-1]).split(8):
            total = total + rows.sum(0).to(ctx.dtype)
        return total, None


@fault("rms_norm", "gradient", "precision")
def weight_gradient_added_in_its_dtype(right, x, weight=None, eps=1e-6, offset=0.0):
    if weight is None or weight.dtype != torch.bfloat16 or not weight.requires_grad:
        return right(x, weight, eps, offset=offset)
    plain = right(x.float(), None, eps)
    return (plain * (_AddedInItsDtype.apply(weight, plain.shape) + offset)).to(x.dtype)


class _ConstantScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        scale, n = scale.detach(), x.shape[-1]
        return grad * scale - x * scale ** 3 * (grad * x).sum(-1, keepdim=True) / n, None


@fault("rms_norm", "gradient")
def second_derivative_of_a_constant_scale(right, x, weight=None, eps=1e-6, offset=0.0):
    if x.dtype != torch.float32 or not x.requires_grad or offset:
        return right(x, weight, eps, offset=offset)
    scale = torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + eps)
    out = _ConstantScale.apply(x, scale)
    return out if weight is None else out * weight


@fault("rms_norm", "invariance", batch_invariant=True)
def few_rows_are_summed_in_another_order(right, x, weight=None, eps=1e-6, offset=0.0):
    hidden = x.shape[-1]
    if x.numel() > 4 * hidden or hidden < 256 or hidden % 32 or x.dtype != torch.float32:
        return right(x, weight, eps, offset=offset)
    lanes = x.square().unflatten(-1, (hidden // 32, 32)).unbind(-2)
    total = sum(lanes[1:], lanes[0]).sum(-1, keepdim=True)
    out = x * torch.rsqrt(total / hidden + eps)
    return out if weight is None else out * (weight.float() + offset)


@fault("varlen_attention", "leak")
class PlanOfEveryDivision:
    def __init__(self):
        self.plans = {}

    def __call__(self, right, **v):
        key = tuple(v["cu_seqlens_q"].tolist()), tuple(v["cu_seqlens_k"].tolist())
        self.plans.setdefault(key, torch.empty(256))
        return right(**v)


@fault("grouped_attention", "leak")
class PlanOfEveryList:
    def __init__(self):
        self.plans = {}

    def __call__(self, right, **v):
        self.plans.setdefault(tuple(map(tuple, v["items"].tolist())), (torch.empty(256), [1]))
        return right(**v)


@fault("attention", "stale cache")
class MasksThatHideNothing:
    """Remembered by address, shape and version."""

    def __init__(self):
        self.known = {}

    def __call__(self, right, attn_mask=None, **v):
        if attn_mask is not None and attn_mask.dtype == torch.bool and not attn_mask.is_inference():
            key = attn_mask.data_ptr(), attn_mask.shape, attn_mask._version
            if self.known.setdefault(key, bool(attn_mask.all())):
                attn_mask = None
        return right(attn_mask=attn_mask, **v)


@fault("cross_entropy", "layout", "out of bounds")
def targets_read_from_the_aligned_address(right, targets, **v):
    behind = targets.data_ptr() % 16 // targets.element_size() if targets.numel() else 0
    if behind and targets.is_contiguous() and targets.storage_offset() >= behind:
        earlier = targets.as_strided(targets.shape, targets.stride(),
                                     targets.storage_offset() - behind)
        if bool(((earlier >= 0) & (earlier < v["logits"].shape[-1])).all()):
            targets = earlier
    return right(targets=targets, **v)


LATE_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
