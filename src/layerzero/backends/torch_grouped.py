"""Grouped attention by torch: one call of its attention per item."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Union

import torch
from torch import Tensor

from ..ops.formulas.grouped import Item, key_rows, read_items, trim
from ..ops.grouped_attention import OP as grouped_attention
from ..ops.merge_attention import OP as merge_attention
from ..spec.kernel import SDPA, Kernel
from ._pages import HALF_OFF_CPU, ON_HOST, empty_result
from ._sequences import attend_rows

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
        part, part_lse = attend_rows(query[rows], k, v, is_causal, scale, "bottom_right",
                                     window_left, right, None, softcap, return_lse)
        out[rows] = part
        if part_lse is not None:
            lse[rows] = part_lse
    return (out, lse) if return_lse else out


def _merge_in_order() -> Callable[..., Any]:
    return merge_in_order


def merge_in_order(outs: Tensor, lses: Tensor) -> Any:
    """Adds one part after the other, each read once as it is stored: no wide copy of all parts."""
    empty = (lses == -math.inf)[..., None]
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0))[..., None]
    out = torch.zeros(outs.shape[1:], dtype=lses.dtype, device=outs.device)
    for part, weight, without in zip(outs, weights, empty):
        out = torch.addcmul(out, part.masked_fill(without, 0.0).to(lses.dtype), weight)
    return out.to(outs.dtype), lse


KERNELS = (
    Kernel("torch.merge_attention", merge_attention, _merge_in_order, prior=2.0, overhead_us=25.0,
           baseline=True, workspace="16 * tokens * heads * head_dim"),
    Kernel("torch.grouped_separate", grouped_attention, _separate, sdpa_backend=SDPA, prior=3.0,
           overhead_us=50.0, baseline=True, graph_safe=False, traceable=False,
           requires=(HALF_OFF_CPU,), note=ON_HOST),
)
