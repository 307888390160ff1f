"""Ring attention: keys and values go from rank to rank, partial results are merged by their
log-sum-exp.

A rank holds the keys of one rank at a time, and gets the next ones while it attends to these. The
partial results are summed in float32 or wider. In the backward the gradient of each rank's keys
goes around the ring with them, in float32 or wider, and is home after the last step; the part of
each step is computed again, since keeping all of them would take the memory that the ring saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..rewiring import public
from .ranks import Exchange, Pending, Program, Ranks
from .recorded import Attention
from .sharding import Sequences

merge_attention: Callable[..., Any] = public("merge_attention")


def ring_attention_of(ranks: Ranks, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor],
                      sequences: Sequences, attention: Attention) -> list[tuple[Tensor, Tensor]]:
    """Returns out and log-sum-exp of each local rank."""
    flat = [t for rank in zip(q, k, v) for t in rank]
    results = _Ring.apply(ranks, sequences, attention, *flat)
    return [results[i:i + 2] for i in range(0, len(results), 2)]


class _Ring(torch.autograd.Function):
    """Ring attention of all local ranks; the tensors are query, key and value of each."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, sequences: Sequences, attention: Attention,
                *flat: Tensor) -> Any:
        ctx.ranks, ctx.sequences, ctx.attention = ranks, sequences, attention
        ctx.set_materialize_grads(False)
        of_ranks = zip(ranks.local, flat[0::3], flat[1::3], flat[2::3])
        done = ranks.run([_forward(rank, ranks.size, q, k, v, sequences, attention)
                          for rank, q, k, v in of_ranks])
        results = tuple(t for pair in done for t in pair)
        ctx.save_for_backward(*flat, *results)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved, count = ctx.saved_tensors, 3 * len(ctx.ranks.local)      # checkpoints give them once
        flat, results = saved[:count], saved[count:]
        of_ranks = zip(ctx.ranks.local, flat[0::3], flat[1::3], flat[2::3], results[0::2],
                       results[1::2], grads[0::2], grads[1::2])
        done = ctx.ranks.run([
            _backward(rank, ctx.ranks.size, q, k, v, out, lse, dout, dlse, ctx.sequences,
                      ctx.attention) for rank, q, k, v, out, lse, dout, dlse in of_ranks])
        return None, None, None, *(g for of_rank in done for g in of_rank)


def _forward(rank: int, size: int, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences,
             attention: Attention) -> Program[tuple[Tensor, Tensor]]:
    acc_dtype, dim, dtype = torch.promote_types(q.dtype, torch.float32), k.shape[2], q.dtype
    parts: list[Tensor] = []                   # out and log-sum-exp so far
    kv, pending = torch.cat((k, v), -1), None
    for step in range(size):
        if step + 1 < size:
            pending = yield Exchange("shift", kv)
        source = (rank - step) % size
        items = sequences.of_rank(rank, source, attention.is_causal)
        if items is not None:
            part, part_lse = attention(q, kv[..., :dim], kv[..., dim:], items, True,
                                       attention.is_causal and source == rank)
            dtype = part.dtype                 # that of autocast
            if parts:
                parts = merge_attention(torch.stack((parts[0], part.to(acc_dtype))),
                                        torch.stack((parts[1], part_lse)))
            else:
                parts = [part.to(acc_dtype), part_lse]
        if pending is not None and step + 1 < size:
            kv = pending.wait()
    return parts[0].to(dtype), parts[1]        # there are parts: a rank sees its own keys


def _backward(rank: int, size: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
              dout: Tensor | None, dlse: Tensor | None, sequences: Sequences,
              attention: Attention) -> Program[tuple[Tensor, Tensor, Tensor]]:
    acc_dtype, dim = torch.promote_types(q.dtype, torch.float32), k.shape[2]
    dout = torch.zeros_like(out) if dout is None else dout
    # what a row's log-sum-exp is to gain, less what its part of the result gains
    shared = (0 if dlse is None else dlse) - (dout.to(acc_dtype) * out.to(acc_dtype)).sum(-1)
    dq, kv = torch.zeros_like(q, dtype=acc_dtype), torch.cat((k, v), -1)
    pending: Pending | None = None
    moving: Pending | None = None              # the gradient of these keys, from the rank before
    for step in range(size):
        if step + 1 < size:
            pending = yield Exchange("shift", kv)
        source = (rank - step) % size
        items = sequences.of_rank(rank, source, attention.is_causal)
        dkv = torch.zeros_like(kv, dtype=acc_dtype)
        if items is not None:
            leaves = [t.detach().requires_grad_() for t in (q, kv[..., :dim], kv[..., dim:])]
            query, key, value = leaves
            with torch.enable_grad():
                results = attention(query, key, value, items, True,
                                    attention.is_causal and source == rank)
            part, part_lse = (t.detach() for t in results)
            share = torch.exp(part_lse - lse).masked_fill(part_lse == -math.inf, 0.0)
            gain = share * ((dout.to(acc_dtype) * part.to(acc_dtype)).sum(-1) + shared)
            grads = torch.autograd.grad(results, leaves, (
                (dout * share.unsqueeze(-1)).to(q.dtype), gain.to(lse.dtype)), allow_unused=True)
            for total, grad in zip((dq, dkv[..., :dim], dkv[..., dim:]), grads):
                if grad is not None:
                    total += grad
        moving = yield Exchange("shift", dkv if moving is None else dkv.add_(moving.wait()))
        if pending is not None and step + 1 < size:
            kv = pending.wait()
    assert moving is not None
    dkv = moving.wait().to(k.dtype)
    return dq.to(q.dtype), dkv[..., :dim], dkv[..., dim:]
