"""Grouped attention by torch; the kernels differ in how items share a call.

separate   one call of torch's attention per item
varlen     the keys of every item are copied one after another, for one call with cu_seqlens
aliased    one call with cu_seqlens that point into the buffer itself: no copy, nothing on the host
flex       flex_attention over the whole buffer with a block mask
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Union

import torch
from torch import Tensor

from ..ops.formulas.grouped import Item, key_rows, read_items, trim
from ..ops.formulas.paged import Part
from ..ops.grouped_attention import OP as grouped_attention
from ..ops.merge_attention import OP as merge_attention
from ..ops.merge_attention import merge_lses, merge_weights
from ..spec import rules as r
from ..spec.kernel import SDPA, Kernel
from ..spec.reason import Code
from ._flex import compiled_flex
from ._pages import HALF_OFF_CPU, ON_HOST, empty_result
from ._sequences import (
    EFFICIENT_DIM_ON_CUDA,
    HEADS_OF_A_LAUNCH,
    ON_16_BYTES,
    POSITIVE_SCALE,
    attend_rows,
)

Rows = Union[Tensor, slice]                    # where an item's keys lie in the buffer


class KeysOfItems(torch.autograd.Function):
    """The rows of each item. Gradients of shared rows are added in float32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, *rows: Rows) -> tuple[Tensor, ...]:
        ctx.rows, ctx.shape, ctx.dtype = rows, t.shape, t.dtype
        return tuple(_select(t, where) for where in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        acc_dtype = torch.promote_types(ctx.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=acc_dtype, device=grads[0].device)
        for where, grad in zip(ctx.rows, grads):
            if isinstance(where, slice):
                total[where] += grad
            else:                              # index_add_ is not deterministic on CUDA
                total.index_put_((where,), grad.to(acc_dtype), accumulate=True)
        return total.to(ctx.dtype), *[None] * len(ctx.rows)


def keys_of_items(t: Tensor, rows: list[Rows]) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and t.requires_grad and rows:
        return KeysOfItems.apply(t, *rows)     # type: ignore[no-any-return, no-untyped-call]
    return tuple(_select(t, where) for where in rows)


def _select(t: Tensor, where: Rows) -> Tensor:
    return t[where] if isinstance(where, slice) else t.index_select(0, where)


def visible_items(query: Tensor, key: Tensor, items: Tensor, max_seqlen_q: int, max_seqlen_k: int,
                  left: int, right: int, chunk_starts: Tensor | None,
                  chunk_lengths: Tensor | None) -> tuple[list[Item], list[Rows]]:
    """Returns the items that see a key, trimmed to what is visible, and where their keys lie."""
    visible: list[Item] = []
    where: list[Rows] = []
    lengths = [0] * items.shape[0] if chunk_lengths is None else chunk_lengths.tolist()
    for i, item in enumerate(read_items(items, query.shape[0], key.shape[0], max_seqlen_q,
                                        max_seqlen_k, chunk_starts, chunk_lengths)):
        item = trim(item, left, right)
        if item.n:
            visible.append(item)
            where.append(key_rows(item, None if chunk_starts is None else chunk_starts[i],
                                  lengths[i]))
    return visible, where


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
    visible, where = visible_items(query, key, items, max_seqlen_q, max_seqlen_k, window_left,
                                   right, chunk_starts, chunk_lengths)
    out, lse = empty_result(query, value.shape[2])
    for item, k, v in zip(visible, keys_of_items(key, where), keys_of_items(value, where)):
        rows = slice(item.q_start, item.q_start + item.n)
        part, part_lse = attend_rows(query[rows], k, v, is_causal, scale, "bottom_right",
                                     window_left, right, None, softcap, return_lse)
        out[rows] = part
        if part_lse is not None:
            lse[rows] = part_lse
    return (out, lse) if return_lse else out


# one flash call

def _flash() -> Callable[..., Any]:
    """Calls aten's flash attention; returns the output, and the log-sum-exp (tokens, heads) if it
    is wanted."""
    entry = torch.ops.aten._flash_attention_forward

    def run(query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor,
            longest_q: int, longest_k: int, is_causal: bool, scale: float | None, left: int,
            right: int, with_lse: bool, used: Tensor | None = None) -> Any:
        # a window that is longer than the longest keys is none to it
        out, lse = entry(query, key, value, starts_q, starts_k, longest_q,
                         max(longest_q, longest_k), 0.0, is_causal, False, scale=scale,
                         window_size_left=left, window_size_right=right, seqused_k=used)[:2]
        # a row without keys has +inf
        return out, torch.where(lse == math.inf, -math.inf, lse).t() if with_lse else None

    return run


def _varlen() -> Callable[..., Any]:
    flash = _flash()

    def run(query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int,
            max_seqlen_k: int, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, window_right: int = -1, return_lse: bool = False,
            chunk_starts: Tensor | None = None, chunk_lengths: Tensor | None = None) -> Any:
        right = 0 if is_causal else window_right
        visible, where = visible_items(query, key, items, max_seqlen_q, max_seqlen_k, window_left,
                                       right, chunk_starts, chunk_lengths)
        out, lse = empty_result(query, value.shape[2])
        if visible:
            rows = [slice(item.q_start, item.q_start + item.n) for item in visible]
            part, part_lse = flash(
                torch.cat([query[at] for at in rows]),
                *(torch.cat(keys_of_items(t, where)) for t in (key, value)),
                *(torch.tensor([0, *lengths], device=query.device).cumsum(0).to(torch.int32)
                  for lengths in ([i.n for i in visible], [i.m for i in visible])),
                max(i.n for i in visible), max(i.m for i in visible), is_causal, scale, window_left,
                right, return_lse)
            lengths = [item.n for item in visible]
            for at, rows_of_item in zip(rows, part.split(lengths)):
                out[at] = rows_of_item
            for at, rows_of_item in zip(rows, part_lse.split(lengths)) if return_lse else ():
                lse[at] = rows_of_item
        return (out, lse) if return_lse else out

    return run


def _aliased() -> Callable[..., Any]:
    flash = _flash()

    def run(query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int,
            max_seqlen_k: int, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, window_right: int = -1, return_lse: bool = False) -> Any:
        """Flash reads the keys of sequence i from cu_seqlens_k[i] on, seqused_k[i] of them: where
        the next sequence begins does not matter to it."""
        tokens = query.shape[0]
        settings = is_causal, scale, window_left, window_right, return_lse
        first, count = torch.where(items[:, 1] > 0, items[:, 0], tokens), items[:, 1]
        if max_seqlen_q <= 1:                  # flash takes one row of each sequence, in order
            starts = torch.arange(len(items) + 1, dtype=torch.int32, device=query.device)
            part = flash(query[first.clamp(max=tokens - 1)], key, value, starts,
                         torch.cat((items[:, 2], items[-1:, 2])), 1, max_seqlen_k, *settings,
                         items[:, 3].contiguous())
            full = empty_result(query.new_empty((tokens + 1, *query.shape[1:])), value.shape[2])
            out, lse = (None if p is None else t.index_copy_(0, first.long(), p)[:tokens]
                        for t, p in zip(full, part))
        else:                                  # sequences are items in order, and the gaps between
            order = torch.argsort(first, stable=True)
            first, (_, count, start_k, keys) = first[order], items[order].unbind(1)
            none = torch.zeros_like(keys)
            bounds = torch.stack((first, first + count), 1).flatten()
            out, lse = flash(query, key, value, bounds.to(torch.int32),
                             torch.stack((start_k, none), 1).flatten(), max_seqlen_q, max_seqlen_k,
                             *settings, torch.stack((keys, none), 1).flatten()[:-1])
            gap = ~rows_of_items(first, count, tokens)[:, None]
            out = out.masked_fill_(gap[..., None], 0.0)
            lse = lse.masked_fill(gap, -math.inf) if return_lse else None
        return (out, lse) if return_lse else out

    return run


# flex_attention with a block mask

BLOCK = 128                # of the block mask


def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import BlockMask

    compiled = compiled_flex("grouped_flex")

    def run(query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int,
            max_seqlen_k: int, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, window_right: int = -1, softcap: float = 0.0,
            return_lse: bool = False) -> Any:
        low, high = visible_keys(items, query.shape[0], window_left,
                                 0 if is_causal else window_right)
        used = rows_of_items(items[:, 2], items[:, 3], key.shape[0])[:, None, None]

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k >= low[q]) & (k <= high[q])

        def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        mask = BlockMask.from_kv_blocks(
            *blocks_of(low, high, key.shape[0]), BLOCK_SIZE=BLOCK, mask_mod=visible,
            seq_lengths=(query.shape[0], key.shape[0]))
        # a hidden key counts nothing only if it is finite
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key.where(used, 0.0),
                                                     value.where(used, 0.0)))
        attend = compiled(query.dtype, query.shape[1:], key.shape[1], value.shape[2], softcap,
                          return_lse, torch.is_grad_enabled())
        result = attend(q, k, v, cap if softcap else None, mask, scale, return_lse)
        if not return_lse:
            return result[0].transpose(0, 1)
        return result[0][0].transpose(0, 1), result[1][0].transpose(0, 1)

    return run


def rows_of_items(first: Tensor, count: Tensor, rows: int) -> Tensor:
    """Returns which of `rows` rows some item has, without reading the items on the host."""
    steps = torch.zeros(rows + 1, dtype=torch.int32, device=first.device)
    one = (count > 0).to(torch.int32)
    first = first.clamp(0, rows)
    steps.index_add_(0, first, one).index_add_(0, (first + count).clamp(0, rows), -one)
    return steps.cumsum(0)[:rows] > 0


def visible_keys(items: Tensor, tokens: int, left: int, right: int) -> Part:
    """Returns the first and the last key row that each query row sees; first > last for none."""
    rows = torch.arange(tokens, device=items.device, dtype=torch.int32)
    start = torch.where(items[:, 1] > 0, items[:, 0], tokens)
    start, order = torch.sort(start, stable=True)
    q_start, n, k_start, m = items[order][(torch.searchsorted(start, rows, right=True) - 1).clamp(
        min=0)].unbind(1)
    diagonal = rows - q_start + m - n
    low = torch.zeros_like(m) if left < 0 else (diagonal - left).clamp(min=0)
    high = m - 1 if right < 0 else torch.minimum(m - 1, diagonal + right)
    inside = (rows >= q_start) & (rows < q_start + n) & (high >= low)
    return (k_start + low).where(inside, 0), (k_start + high).where(inside, -1)


def blocks_of(low: Tensor, high: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the block mask of rows that see keys low to high: for each block of rows how many
    blocks of keys are visible in part, and which, and the same for those visible as a whole."""
    pad = -low.shape[0] % BLOCK
    seen = high >= low
    # rows that see nothing make no block visible, and no block whole
    first, last = (torch.nn.functional.pad(t.where(seen, filler), (0, pad), value=filler).view(
        -1, BLOCK) for t, filler in ((low, keys), (high, -1)))
    start = torch.arange(0, keys, BLOCK, device=low.device)
    some = (first.amin(1)[:, None] < start + BLOCK) & (last.amax(1)[:, None] >= start)
    whole = (first.amax(1)[:, None] <= start) & (last.amin(1)[:, None] >= start + BLOCK - 1)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(blocks.to(torch.int32), dim=1, descending=True, stable=True)
        return blocks.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]

    return *listed(some & ~whole), *listed(some & whole)


# merging

def _merge_in_order() -> Callable[..., Any]:
    return merge_in_order


def merge_in_order(outs: Tensor, lses: Tensor) -> Any:
    """Adds one part after the other, each read once as it is stored: no wide copy of all parts."""
    acc_dtype = torch.promote_types(outs.dtype, lses.dtype)
    empty, wide = (lses == -math.inf)[..., None], lses.to(acc_dtype)
    weights = merge_weights(wide)[..., None]
    out = torch.zeros(outs.shape[1:], dtype=acc_dtype, device=outs.device)
    for part, weight, without in zip(outs, weights, empty):
        out = torch.addcmul(out, part.masked_fill(without, 0.0).to(acc_dtype), weight)
    return out.to(outs.dtype), merge_lses(wide).to(lses.dtype)


NO_CHUNKS = r.absent("chunk_starts.dtype"), r.absent("chunk_lengths.dtype")
FLASH: tuple[r.Condition, ...] = (
    r.device("cuda"), r.vendor("nvidia"), r.sm(at_least=80), r.sm(below=122),
    r.dtypes("float16", "bfloat16"), r.multiple_of("head_dim", 8), r.at_most("head_dim", 256),
    r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
    r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED), POSITIVE_SCALE,
    r.at_least("tokens_q", 1, Code.EMPTY_INPUT), r.at_least("tokens_k", 1, Code.EMPTY_INPUT),
    r.at_least("n_items", 1, Code.EMPTY_INPUT),
    r.at_most("n_items", 32767, Code.CUDA_BLOCK_LIMIT_EXCEEDED),
    *(rule for name in ("query", "key", "value") for rule in (r.unit_stride(name),
                                                              r.aligned(name, 16))))

KERNELS = (
    Kernel("torch.merge_attention", merge_attention, _merge_in_order, prior=2.0, overhead_us=25.0,
           baseline=True, workspace="16 * tokens * heads * head_dim"),
    Kernel("torch.grouped_separate", grouped_attention, _separate, sdpa_backend=SDPA, prior=3.0,
           overhead_us=50.0, baseline=True, graph_safe=False, traceable=False,
           requires=(HALF_OFF_CPU, HEADS_OF_A_LAUNCH, *EFFICIENT_DIM_ON_CUDA, *ON_16_BYTES),
           note=ON_HOST),
    Kernel("torch.grouped_varlen", grouped_attention, _varlen, sdpa_backend="FLASH_ATTENTION",
           prior=8.0, overhead_us=100.0, graph_safe=False, traceable=False,
           workspace="itemsize * n_items * max_seqlen_k * kv_heads * (head_dim + head_dim_v)",
           requires=(*FLASH, r.any_of(r.off("return_lse"),
                                      r.off("grad", Code.BACKWARD_UNSUPPORTED))),
           note="copies the keys of each item; reads the items on the host"),
    Kernel("torch.grouped_aliased", grouped_attention, _aliased, sdpa_backend="FLASH_ATTENTION",
           prior=12.0, overhead_us=60.0, differentiable=False, traceable=False,
           less_work="one launch for all items, and none is read on the host",
           requires=(*FLASH, *NO_CHUNKS)),
    Kernel("torch.grouped_flex", grouped_attention, _flex, prior=5.0, overhead_us=300.0, jit=True,
           traceable=False, workspace="itemsize * tokens_k * kv_heads * (head_dim + head_dim_v)",
           requires=(
               r.device("cuda"), r.dtypes("float16", "bfloat16"), r.at_least("head_dim", 16),
               r.at_least("head_dim_v", 16), r.at_least("tokens_q", 1, Code.EMPTY_INPUT),
               r.at_least("tokens_k", 1, Code.EMPTY_INPUT),
               r.at_least("n_items", 1, Code.EMPTY_INPUT), *NO_CHUNKS,
               # below 128 rows Inductor takes its decoding kernel, which holds them all
               r.any_of(r.at_least("tokens_q", 128), r.at_most("rows_per_kv_head", 64))),
           note="copies keys and values, without what rows of no item hold"),
)
