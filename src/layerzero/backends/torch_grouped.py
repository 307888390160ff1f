"""Grouped attention by torch: one call of its attention per item."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Union

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..ops.formulas.common import attend, position_terms
from ..ops.formulas.grouped import Item, key_rows, read_items, trim
from ..ops.formulas.paged import group_heads, ungroup_heads
from ..ops.grouped_attention import OP as grouped_attention
from ..spec.kernel import SDPA, Kernel
from ._pages import HALF_OFF_CPU, ON_HOST, cpu_flash, empty_result

Rows = Union[Tensor, slice]                    # where an item's keys lie in the buffer


class KeysOfItems(torch.autograd.Function):
    """The rows of each item. Gradients of rows that items share are added in float32 or wider and
    rounded once."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, *rows: Rows) -> tuple[Tensor, ...]:
        ctx.rows, ctx.shape, ctx.dtype = rows, t.shape, t.dtype
        return tuple(t[where] for where in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=grads[0].device)
        for where, grad in zip(ctx.rows, grads):
            if isinstance(where, slice):
                total[where] += grad
            else:                              # index_add_ is not deterministic on CUDA
                total.index_put_((where,), grad.to(wide), accumulate=True)
        return total.to(ctx.dtype), *[None] * len(ctx.rows)


def keys_of_items(t: Tensor, rows: list[Rows]) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and t.requires_grad and rows:
        return KeysOfItems.apply(t, *rows)     # type: ignore[no-any-return, no-untyped-call]
    return tuple(t[where] for where in rows)


def _separate() -> Callable[..., Any]:
    return separate


def separate(
    query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
    window_right: int = -1, softcap: float = 0.0, return_lse: bool = False,
    chunk_starts: Tensor | None = None, chunk_lengths: Tensor | None = None,
) -> Any:
    """Calls torch's attention once per item: each reads its own keys."""
    right = 0 if is_causal else window_right
    lengths = [0] * items.shape[0] if chunk_lengths is None else chunk_lengths.tolist()
    kept: list[Item] = []
    where: list[Rows] = []
    for i, item in enumerate(read_items(items, query.shape[0], key.shape[0], max_seqlen_q,
                                        max_seqlen_k, chunk_starts, chunk_lengths)):
        item = trim(item, window_left, right)
        if item.n:
            kept.append(item)
            where.append(key_rows(item, None if chunk_starts is None else chunk_starts[i],
                                  lengths[i]))
    out, lse = empty_result(query, value.shape[2])
    for item, k, v in zip(kept, keys_of_items(key, where), keys_of_items(value, where)):
        rows = slice(item.q_start, item.q_start + item.n)
        part, part_lse = _attend_item(query[rows], k, v, is_causal, scale, window_left, right,
                                      softcap, return_lse)
        out[rows] = part
        if part_lse is not None:
            lse[rows] = part_lse
    return (out, lse) if return_lse else out


def _attend_item(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None,
                 left: int, right: int, softcap: float,
                 return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attention of one trimmed item, (n, heads, dim) over (m, kv_heads, dim), and its log-sum-exp
    where it was asked for."""
    n, m = query.shape[0], key.shape[0]
    flash = return_lse and _flash_gives_lse(query, key, value)
    if softcap > 0.0 or (return_lse and not flash):
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out, lse = attend(q, k, v, None, 0.0, is_causal, scale, "bottom_right", left,
                          right, None, softcap)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    q = group_heads(query, key.shape[1])       # (kv_heads, group, n, dim)
    # a single row sees all keys that are left: the heads of a group are rows that share one read
    q = q.transpose(1, 2) if n == 1 else q
    k, v = (t.transpose(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for t in (key, value))
    square = is_causal and left < 0 and n == m
    mask = None
    if n > 1 and not square:
        _, hidden = position_terms(n, m, is_causal, "bottom_right", left, right, None, query.device)
        if hidden is not None:
            mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, -math.inf)

    def by_token(t: Tensor) -> Tensor:
        return ungroup_heads(t.transpose(1, 2) if n == 1 else t)

    if not flash:
        return by_token(scaled_dot_product_attention(q, k, v, mask, 0.0, square, scale=scale)), None
    out, lse = cpu_flash()(q, k, v, 0.0, square, attn_mask=mask, scale=scale)
    return by_token(out), by_token(lse[..., None])[..., 0]


def _flash_gives_lse(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's CPU kernel can give the log-sum-exp; through it no gradient flows."""
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return query.device.type == "cpu" and query.shape[2] == value.shape[2] and not wants_grad


KERNELS = (
    Kernel("torch.grouped_separate", grouped_attention, _separate, sdpa_backend=SDPA, prior=3.0,
           overhead_us=50.0, baseline=True, graph_safe=False, traceable=False,
           requires=(HALF_OFF_CPU,), note=ON_HOST),
)
