"""Ulysses attention: an all-to-all gives each rank all tokens of some heads, another one gives each
rank its own tokens back.

The exchanged tokens lie rank by rank; lz.grouped_attention addresses them there. The backward is
that of the attention itself, between the two exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...spec.errors import ConfigError
from .ranks import Exchange, Program, Ranks
from .recorded import Attention
from .sharding import Sequences


def ulysses_attention_of(ranks: Ranks, q: Sequence[Tensor], k: Sequence[Tensor],
                         v: Sequence[Tensor], sequences: Sequences, attention: Attention,
                         return_lse: bool) -> list[Any]:
    """Returns out, or (out, lse), of each local rank."""
    size, (tokens, heads, dim), (_, kv_heads, dim_v) = ranks.size, q[0].shape, v[0].shape
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"Ulysses gives every rank the same number of heads: {size} ranks must divide the "
            f"{heads} query heads, and divide the {kv_heads} KV heads or be a multiple of them; "
            "take fewer ranks, or zigzag or ring attention")
    if kv_heads % size:                        # more ranks than KV heads: some share one
        k, v = ([t.repeat_interleave(size // kv_heads, 1) for t in ts] for ts in (k, v))
    widths = [heads // size * dim, k[0].shape[1] // size * dim, k[0].shape[1] // size * dim_v]
    packed = [torch.cat([_by_rank(t, size) for t in qkv], -1) for qkv in zip(q, k, v)]
    items = sequences.exchanged(tokens, attention.is_causal)
    results = []
    for exchanged in _AllToAll.apply(ranks, *packed):
        parts = exchanged.flatten(0, 1).split(widths, 1)
        query, key, value = (t.unflatten(1, (-1, d)) for t, d in zip(parts, (dim, dim, dim_v)))
        results.append(attention(query, key, value, items, return_lse))
    outs = [r[0] if return_lse else r for r in results]
    outs = _tokens_back(ranks, [t.flatten(1) for t in outs], tokens)
    outs = [t.reshape(tokens, heads, dim_v) for t in outs]
    if not return_lse:
        return outs
    return list(zip(outs, _tokens_back(ranks, [lse for _, lse in results], tokens)))


def _by_rank(t: Tensor, size: int) -> Tensor:
    """Rearranges (tokens, heads, dim) as (ranks, tokens, heads of the rank x dim)."""
    return t.unflatten(1, (size, -1)).movedim(1, 0).flatten(2)


def _tokens_back(ranks: Ranks, tensors: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Exchanges (all tokens, some columns) of each rank for (own tokens, all columns)."""
    back = _AllToAll.apply(ranks, *(t.reshape(ranks.size, tokens, -1) for t in tensors))
    return [t.movedim(0, 1).flatten(1) for t in back]


class _AllToAll(torch.autograd.Function):
    """Part r of every rank's tensor goes to rank r; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> Any:
        ctx.ranks = ranks
        return tuple(ranks.run([_exchange(t) for t in tensors]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_AllToAll.apply(ctx.ranks, *grads)


def _exchange(t: Tensor) -> Program[Tensor]:
    pending = yield Exchange("all_to_all", t.contiguous())
    return pending.wait()
