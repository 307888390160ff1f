"""The ops of a decoder in plain torch, written independently of the contracts: the baseline of the
ladder.

They compute in the dtype of the arguments: float64 gives the expected values, a narrower dtype
eager torch's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...models.decoder_config import DecoderConfig, activate


def rope_angles(c: DecoderConfig, device: str | torch.device = "cpu") -> tuple[Tensor,
                                                                               Tensor] | None:
    """Returns cosine and sine of every position, (positions, head_dim / 2), in float32."""
    if c.positions != "rope":
        return None
    frequencies = c.rope_base ** -(torch.arange(0, c.head_dim, 2).float() / c.head_dim)
    angles = torch.outer(torch.arange(c.max_positions).float(), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


class PlainTorch:
    """An OpCaller that computes in plain torch."""

    kernel = "plain torch"

    def __call__(self, op: str, /, **arguments: Any) -> Any:
        return _FORMULAS[op](**arguments)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return (wide * weight).to(x.dtype)


def _layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _rms_norm(total, weight, eps), total


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, style: str,
          layout: str) -> tuple[Tensor, Tensor]:
    cos, sin = (t[position_ids].unsqueeze(2) for t in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first, second = ((x[..., :half], x[..., half:]) if style == "rotate_half"
                         else (x[..., 0::2], x[..., 1::2]))
        rotated = first * cos - second * sin, second * cos + first * sin
        out = (torch.cat(rotated, -1) if style == "rotate_half"
               else torch.stack(rotated, -1).flatten(-2))
        return out.to(x.dtype)

    return rotate(q), rotate(k)


def _attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
               window_left: int = -1, layout: str = "bshd", attn_mask: Tensor | None = None,
               scale: float | None = None) -> Tensor:
    """A float mask is added to the scores; a bool mask is True where a key is attended to."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores + (attn_mask if attn_mask.is_floating_point() else torch.zeros_like(
            attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, -math.inf))
    if is_causal:
        distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(
            k.shape[2], device=q.device)
        masked = distance < 0
        if window_left >= 0:
            masked = masked | (distance > window_left)
        scores = scores.masked_fill(masked, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


def _mlp(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str,
         bias_in: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
    shape = DecoderConfig(x.shape[-1], 1, activation=activation)
    return F.linear(activate(shape, F.linear(x, weight_in, bias_in)), weight_down, bias_down)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def _embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids, weight)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


_FORMULAS: Mapping[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm, "layer_norm": _layer_norm, "add_rms_norm": _add_rms_norm, "rope": _rope,
    "attention": _attention, "mlp": _mlp, "linear": _linear, "embedding": _embedding,
    "cross_entropy": _cross_entropy, "group_norm": _group_norm}
