"""Attention over all-gathered keys, in the manner of Llama 3: zigzag or contiguous sequences.

Keys and values of some heads at a time are gathered from all ranks in one exchange, while those of
the heads before them are attended to. One lz.grouped_attention call per chunk of heads addresses
the gathered rows where they lie; nothing is rearranged. The backward gathers again, and the ranks'
gradients of keys and values are summed in float32 or wider.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...spec.errors import ConfigError
from .ranks import Exchange, Pending, Program, Ranks
from .recorded import Attention, Recorded
from .sharding import Items

# query, key, value -> out, or out and log-sum-exp
Call = Callable[[Tensor, Tensor, Tensor], Any]


def gathered_attention(ranks: Ranks, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor],
                       calls: Sequence[Call], heads_k_stride: int, return_lse: bool) -> list[Any]:
    """Returns out, or (out, lse), of each local rank; `calls` has a function for each rank."""
    kv_heads = k[0].shape[1]
    if heads_k_stride < 1 or kv_heads % heads_k_stride:
        raise ConfigError(f"heads_k_stride must divide the {kv_heads} KV heads, got "
                          f"{heads_k_stride}; 1 takes the least memory, {kv_heads} has the fewest "
                          "exchanges")
    flat = [t for rank in zip(q, k, v) for t in rank]
    record = torch.is_grad_enabled() and any(t.requires_grad for t in flat)
    results = _Gathered.apply(ranks, calls, heads_k_stride, record, *flat)
    return [results[i:i + 2] if return_lse else results[i] for i in range(0, len(results), 2)]


def grouped_calls(attention: Attention, items: Sequence[Items], return_lse: bool) -> list[Call]:
    """Returns each rank's call: one launch for all its queries."""
    def of(rank_items: Items) -> Call:
        return lambda q, k, v: attention(q, k, v, rank_items, return_lse)

    return [of(i) for i in items]


def rearranged_calls(attention: Attention, items: Sequence[Items], return_lse: bool) -> list[Call]:
    """Returns each rank's call in the manner of two kernels: the keys of early and of late queries
    are copied in order, each for a call of its own. To compare with; it reads the items on the
    host."""
    def of(rank_items: Items) -> Call:
        if rank_items not in _halves:
            halves = [_half(rank_items, slot) for slot in range(2)]
            _halves[rank_items] = halves, torch.cat([rows for rows, _, _ in halves]).argsort()
        halves, order = _halves[rank_items]

        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            parts = [attention(q[rows], k[keys], v[keys], half, return_lse)
                     for rows, keys, half in halves]
            if not return_lse:
                return torch.cat(parts)[order]
            return tuple(torch.cat(t)[order] for t in zip(*parts))

        return call

    return [of(i) for i in items]


# what rearranged_calls reads on the host, once
_halves: WeakKeyDictionary[Items, tuple[list[Any], Tensor]] = WeakKeyDictionary()


def _half(items: Items, slot: int) -> tuple[Tensor, Tensor, Items]:
    """Query rows, key rows in order, and items over both for the slot-th chunk of all sequences."""
    assert items.chunk_starts is not None and items.chunk_lengths is not None
    device, count = items.items.device, items.items.shape[0] // 2
    part = slice(slot * count, (slot + 1) * count)
    rows, keys, packed, q_end, k_end = [], [], [], 0, 0
    for (q_start, n, _, m), starts, length in zip(
            items.items[part].tolist(), items.chunk_starts[part].cpu(),
            items.chunk_lengths[part].tolist()):
        position = torch.arange(m)
        rows.append(torch.arange(q_start, q_start + n))
        keys.append(starts[position // length] + position % length)
        packed.append((q_end, n, k_end, m))
        q_end, k_end = q_end + n, k_end + m
    return (torch.cat(rows).to(device), torch.cat(keys).to(device),
            Items(torch.tensor(packed, dtype=torch.int32, device=device), items.max_seqlen_q,
                  items.max_seqlen_k))


class _Gathered(torch.autograd.Function):
    """All-gather attention of all local ranks; the tensors are query, key and value of each."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, calls: Sequence[Call], stride: int, record: bool,
                *flat: Tensor) -> Any:
        ctx.ranks, ctx.stride = ranks, stride
        ctx.set_materialize_grads(False)
        done = ranks.run([_forward(q, k, v, call, stride, record) for q, k, v, call
                          in zip(flat[0::3], flat[1::3], flat[2::3], calls)])
        ctx.records = [records for *_, records in done]
        saved = [[r.release() for r in records] for records in ctx.records]
        ctx.counts = [[len(tensors) for tensors in of_rank] for of_rank in saved]
        ctx.save_for_backward(*flat, *(t for of_rank in saved for one in of_rank for t in one))
        return tuple(t for out, lse, _ in done for t in (out, lse))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        stored, count = ctx.saved_tensors, 3 * len(ctx.records)  # checkpoints give them once only
        flat, rest = stored[:count], iter(stored[count:])
        saved = [[tuple(itertools.islice(rest, n)) for n in counts] for counts in ctx.counts]
        of_ranks = zip(flat[0::3], flat[1::3], flat[2::3], ctx.records, saved, grads[0::2],
                       grads[1::2])
        done = ctx.ranks.run([_backward(q, k, v, records, tensors, (dout, dlse), ctx.stride)
                              for q, k, v, records, tensors, dout, dlse in of_ranks])
        return None, None, None, None, *(g for of_rank in done for g in of_rank)


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call, stride: int,
             record: bool) -> Program[tuple[Tensor, Tensor | None, list[Recorded]]]:
    """Returns out, its log-sum-exp where the call gives one, and the recorded calls."""
    heads, kv_heads, dim = q.shape[1], *k.shape[1:]
    records: list[Recorded] = []
    parts: list[Sequence[Tensor]] = []
    pending = yield Exchange("all_gather", _packed(k, v, 0, stride))
    for first in range(0, kv_heads, stride):
        kv = pending.wait()
        if first + stride < kv_heads:
            pending = yield Exchange("all_gather", _packed(k, v, first + stride, stride))
        part = q[:, first * heads // kv_heads:(first + stride) * heads // kv_heads]
        if record:
            records.append(Recorded(call, part, kv, lambda t: (t[..., :dim], t[..., dim:])))
            parts.append(records[-1].results)
        else:
            results = call(part, kv[..., :dim], kv[..., dim:])
            parts.append(results if isinstance(results, tuple) else (results,))
    out, *lse = (_join(t) for t in zip(*parts))
    return out, lse[0] if lse else None, records


def _backward(q: Tensor, k: Tensor, v: Tensor, records: Sequence[Recorded],
              saved: Sequence[Sequence[Tensor]], grads: Sequence[Tensor | None],
              stride: int) -> Program[tuple[Tensor, Tensor, Tensor]]:
    heads, kv_heads, dim = q.shape[1], *k.shape[1:]
    acc_dtype = torch.promote_types(k.dtype, torch.float32)
    dqs: list[Tensor] = []
    dkvs: list[Tensor] = []
    reduced: Pending | None = None
    pending = yield Exchange("all_gather", _packed(k, v, 0, stride))
    for first, record, tensors in zip(range(0, kv_heads, stride), records, saved):
        kv = pending.wait()
        if first + stride < kv_heads:
            pending = yield Exchange("all_gather", _packed(k, v, first + stride, stride))
        part = slice(first * heads // kv_heads, (first + stride) * heads // kv_heads)
        dq, dk, dv = record.backward(tensors, kv, [None if g is None else g[:, part]
                                                   for g in grads])
        dqs.append(torch.zeros_like(q[:, part]) if dq is None else dq)
        dkv = kv.new_empty(kv.shape, dtype=acc_dtype)
        for target, grad in ((dkv[..., :dim], dk), (dkv[..., dim:], dv)):
            target.zero_() if grad is None else target.copy_(grad)
        before, reduced = reduced, (yield Exchange("reduce_scatter", dkv))
        if before is not None:                 # one sum under way beside the one that is made
            dkvs.append(before.wait().to(k.dtype))
    if reduced is not None:
        dkvs.append(reduced.wait().to(k.dtype))
    dkv = _join(dkvs)
    return _join(dqs), dkv[..., :dim], dkv[..., dim:]


def _packed(k: Tensor, v: Tensor, first: int, stride: int) -> Tensor:
    """Returns keys and values of some heads side by side, so that one exchange brings both."""
    return torch.cat((k[:, first:first + stride], v[:, first:first + stride]), -1)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)
