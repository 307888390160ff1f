"""Sequences with torch alone: its attention, one packed sequence of it, and tokens cut into chunks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..ops.formulas.common import attend, position_terms
from ..ops.formulas.paged import group_heads, ungroup_heads
from ..spec import rules as r
from ..spec.reason import Code
from ._pages import cpu_flash

# FlashAttention takes the largest score before it multiplies by the scale, and so does cuDNN: times
# 0 a hidden key's -inf is NaN.
LEAST_SCALE = 1e-30
POSITIVE_SCALE = r.at_least("scale", LEAST_SCALE, Code.SCALE_UNSUPPORTED)
# On a GPU heads are an axis of the grid: more of them fail to launch, or are not computed.
HEADS_OF_A_LAUNCH = r.when(r.device("cuda"),
                           r.at_most("heads", 65535, Code.CUDA_BLOCK_LIMIT_EXCEEDED))
# Above it torch's memory-efficient kernel is not compiled, and torch chooses it all the same.
EFFICIENT_DIM = r.at_most("head_dim", 65536), r.at_most("head_dim_v", 65536)
EFFICIENT_DIM_ON_CUDA = tuple(r.when(r.device("cuda"), rule) for rule in EFFICIENT_DIM)
# On a GPU torch's kernels for such sizes read 16 bytes at once, wherever a tensor begins.
ON_16_BYTES = tuple(r.when(r.device("cuda"), r.when(r.multiple_of("head_dim", 8),
                                                   r.aligned(name, 16)))
                    for name in ("query", "key", "value"))


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
         dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
         enable_gqa: bool = False) -> Tensor:
    """Torch's attention. On CUDA it may choose cuDNN, whose backward misreads a gradient with gaps
    (torch 2.11, H200): it gets one without. And it gets a positive scale."""
    query, scale = with_positive_scale(query, scale)
    if (query.is_cuda and mask is not None and mask.requires_grad
            and not any(t.requires_grad for t in (query, key, value))):
        # torch keeps what the backward needs for one of these alone (torch 2.11)
        query = query.detach().requires_grad_(torch.is_grad_enabled())
    out = scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale=scale,
                                       enable_gqa=enable_gqa)
    return with_plain_gradient(out) if out.is_cuda else out


def with_positive_scale(query: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """Returns query and scale of the same scores, with a scale that every kernel of torch takes."""
    if scale is None or scale >= LEAST_SCALE:
        return query, scale
    return (-query, -scale) if scale <= -LEAST_SCALE else (query * scale, 1.0)


def with_plain_gradient(out: Tensor) -> Tensor:
    """Returns a result whose backward gets a contiguous gradient. Torch's compiler makes it so by
    itself, and allows no hook."""
    if out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(Tensor.contiguous)
    return out


def longest_query(query: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> int:
    """Returns what FlashAttention 2 is told: at 1 it takes a query of each sequence for granted."""
    return max_seqlen_q if query.shape[0] >= cu_seqlens_q.shape[0] - 1 else max(max_seqlen_q, 2)


def attend_rows(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None,
                causal_align: str | None, left: int, right: int, alibi_slopes: Tensor | None,
                softcap: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Returns attention of (n, heads, dim) over (m, kv_heads, dim), m > 0, and the log-sum-exp.

    Torch's attention gives no log-sum-exp but on the CPU, and no gradient flows through that one:
    elsewhere the scores are computed step by step.
    """
    query, scale = with_positive_scale(query, scale)
    n, m, kv_heads = query.shape[0], key.shape[0], key.shape[1]
    flash = return_lse and _flash_gives_lse(query, key, value)
    if softcap > 0.0 or (return_lse and not flash):
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out, lse = attend(q, k, v, None, 0.0, is_causal, scale, causal_align, left, right,
                          alibi_slopes, softcap)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    square = is_causal and left < 0 and alibi_slopes is None and (
        n == m or causal_align != "bottom_right")
    mask, dead = None, None
    if not square:
        bias, hidden = position_terms(n, m, is_causal, causal_align, left, right, alibi_slopes,
                                      query.device)
        mask, dead = _mask_of(bias, hidden, query.dtype), _dead_rows(hidden)
    if query.device.type != "cpu":             # its kernels know grouped heads, and split the keys
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out = sdpa(q, k, v, mask, 0.0, square, scale=scale, enable_gqa=True)[0].transpose(0, 1)
        return out if dead is None else out.masked_fill(dead[:, None, None], 0.0), None
    if mask is not None and mask.dim() > 2:
        mask = mask[0].unflatten(0, (kv_heads, -1))
    q = group_heads(query, kv_heads)           # (kv_heads, group, n, dim)
    # a single row that sees all keys: the heads of a group are rows, which share one read
    folded = n == 1 and mask is None and not square
    q = q.transpose(1, 2) if folded else q
    k, v = (t.transpose(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for t in (key, value))

    def by_token(t: Tensor, filler: float) -> Tensor:
        t = ungroup_heads(t.transpose(1, 2) if folded else t)
        return t if dead is None else t.masked_fill(dead[:, None, None], filler)

    if not flash:
        out = scaled_dot_product_attention(q, k, v, mask, 0.0, square, scale=scale)
        return by_token(out, 0.0), None
    out, lse = cpu_flash()(q, k, v, 0.0, square, attn_mask=mask, scale=scale)
    return by_token(out, 0.0), by_token(lse[..., None], -math.inf)[..., 0]


def _mask_of(bias: Tensor | None, hidden: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns bias and hidden keys as one mask. It is additive: for a row hidden by a bool mask
    cuDNN gives the mean, not zero."""
    if bias is not None:
        mask = bias.to(dtype)
        return mask if hidden is None else mask.masked_fill(hidden, -math.inf)
    if hidden is None or (hidden.shape[0] == 1 and not hidden.any()):
        return None
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -math.inf)


def _dead_rows(hidden: Tensor | None) -> Tensor | None:
    """Returns which rows see no key, where there can be such: torch's kernels differ on them."""
    return None if hidden is None or hidden.shape[0] <= hidden.shape[1] else hidden.all(-1)


def _flash_gives_lse(query: Tensor, key: Tensor, value: Tensor) -> bool:
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return query.device.type == "cpu" and query.shape[2] == value.shape[2] and not wants_grad


def split_chunks(t: Tensor, size: int) -> Tensor:
    """Returns (batch, seq, heads, ...) as (batch, heads, chunks, size, ...). Tokens of zeros, which
    change no state, fill the last chunk."""
    padding = (0, 0) * (t.dim() - 2) + (0, -t.shape[1] % size)
    return pad(t, padding).transpose(1, 2).unflatten(2, (-1, size))


def decay_between(steps: Tensor) -> Tensor:
    """Returns the decay (..., to, from) from each earlier token of a chunk to each token, 0 to
    those before it, for the log-decay `steps` (..., size) of single tokens, none of which is
    positive. The steps between two tokens are added: a difference of sums from the first token
    would lose digits."""
    lower = torch.ones(2 * (steps.shape[-1],), dtype=torch.bool, device=steps.device).tril()
    between = steps[..., None].masked_fill(~lower.tril(-1), 0.0).cumsum(-2)
    return between.masked_fill(~lower, -torch.inf).exp()
