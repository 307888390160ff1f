"""Attention, norms and test inputs in plain torch, shared by several operations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...spec.rules import Wording, Words

FLOATS = ("float16", "bfloat16", "float32", "float64")

# For `Op.reference_kernel` of a formula that reads the host: it cannot be captured or traced.
READS_ON_HOST: dict[str, Any] = {
    "overhead_us": 50.0, "graph_safe": False, "traceable": False,
    "note": "reads lengths on the host"}

# For `Op.words` of attention: how messages speak of what only rules and cost formulas read.
_HEADS = "{heads} query heads, {kv_heads} KV heads"
_MULTIPLE = "the number of query heads must be a multiple of that of the KV heads"
HEAD_WORDS: Words = {
    "group": Wording("query heads per KV head", _HEADS, {
        "1": "query and key must have the same number of heads"}),
    "group_rest": Wording("heads % kv_heads", _HEADS, {"0": _MULTIPLE}),
    "head_dim_gap": Wording("head_dim - head_dim_v", "{head_dim} and {head_dim_v}", {
        "0": "query and value must have the same head dimension"})}


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, causal_align: str | None, window_left: int,
    window_right: int, alibi_slopes: Tensor | None, softcap: float,
) -> tuple[Tensor, Tensor]:
    """Returns attention over (batch, heads, seq, dim), step by step, and its log-sum-exp."""
    group = query.shape[1] // max(key.shape[1], 1)
    if group != 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    bias, hidden = position_terms(scores.shape[-2], scores.shape[-1], is_causal, causal_align,
                                  window_left, window_right, alibi_slopes, scores.device)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if attn_mask is not None:
        scores = (scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool
                  else scores + attn_mask)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    if attn_mask is not None and attn_mask.dtype != torch.bool and scores.requires_grad:
        # the gradient of such a row is NaN: masked_fill keeps it from the scores, a sum does not
        scores = scores.masked_fill(nothing, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(nothing, 0.0)
    if dropout_p > 0.0:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    lse = torch.logsumexp(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)
    lse = lse.masked_fill(nothing[..., 0], -math.inf)
    return weights @ value, lse


def position_terms(
    seq_q: int, seq_k: int, is_causal: bool, causal_align: str | None, window_left: int,
    window_right: int, alibi_slopes: Tensor | None, device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the ALiBi bias (1, heads, seq_q, seq_k) and the mask of hidden keys, or None."""
    if not is_causal and window_left < 0 and window_right < 0 and alibi_slopes is None:
        return None, None
    offset = seq_k - seq_q if causal_align == "bottom_right" else 0
    diagonal = torch.arange(seq_q, device=device)[:, None] + offset
    distance = torch.arange(seq_k, device=device)[None, :] - diagonal      # > 0: a later key
    bias = None if alibi_slopes is None else -alibi_slopes[None, :, None, None] * distance.abs()
    right = 0 if is_causal else window_right
    hidden = None
    if right >= 0:
        hidden = distance > right
    if window_left >= 0:
        hidden = distance < -window_left if hidden is None else hidden | (distance < -window_left)
    return bias, hidden


def empty_result(query: Tensor, head_dim_v: int, return_lse: bool) -> Any:
    """Returns empty tensors like the attention of packed queries, with lse if asked for."""
    out = query.new_empty((*query.shape[:2], head_dim_v))
    acc_dtype = torch.promote_types(query.dtype, torch.float32)
    return (out, query.new_empty(query.shape[:2], dtype=acc_dtype)) if return_lse else out


def rms_normalize(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last dimension, accumulated in float32 or wider, in x's dtype."""
    upcast = x.to(torch.promote_types(x.dtype, torch.float32))
    upcast = upcast * torch.rsqrt(upcast.square().mean(-1, keepdim=True) + eps)
    return (upcast if weight is None else upcast * weight.to(upcast.dtype)).to(x.dtype)


def clear_rows(t: Tensor) -> None:
    """Makes every other row zeros, as padding is."""
    if t.dim() > 1:
        rows = torch.arange(math.prod(t.shape[:-1]), device=t.device).view(*t.shape[:-1], 1)
        t.masked_fill_(rows % 2 == 0, 0.0)


def random_rows(gen: torch.Generator, rows: tuple[int, ...], hidden: int, stride: str,
                dtype: torch.dtype, device: str, magnitude: int = 1) -> Tensor:
    """Returns inputs (*rows, hidden), stored "padded", "sparse", "transposed" or contiguous."""
    def rand(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=gen).to(dtype) * magnitude).to(device)

    if stride == "padded":
        return rand(*rows, hidden + 8)[..., :hidden]
    if stride == "sparse":
        return rand(*rows, hidden * 2)[..., ::2]
    if stride == "transposed":
        return rand(rows[1], rows[0], *rows[2:], hidden).transpose(0, 1)
    return rand(*rows, hidden)
