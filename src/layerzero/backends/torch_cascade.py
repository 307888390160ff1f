"""Grouped attention on the CPU that reads keys once: the buffer is cut where the keys of an item
begin or end, each piece is one call for the rows of all items that see it, and the results are
merged by log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..ops.formulas.common import FLOATS
from ..ops.formulas.grouped import Item, read_items, trim
from ..ops.formulas.paged import Part
from ..ops.grouped_attention import OP as grouped_attention
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._pages import ON_HOST, cpu_flash, empty_result

Span = tuple[int, int]                         # key rows [first, last)


def _cascade() -> Callable[..., Any]:
    flash = cpu_flash()

    def run(query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int,
            max_seqlen_k: int, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, window_right: int = -1, return_lse: bool = False,
            chunk_starts: Tensor | None = None, chunk_lengths: Tensor | None = None) -> Any:
        right = 0 if is_causal else window_right
        starts = [None] * len(items) if chunk_starts is None else chunk_starts.tolist()
        lengths = [0] * len(items) if chunk_lengths is None else chunk_lengths.tolist()
        visible: list[Item] = []
        spans: list[list[Span]] = []
        for i, item in enumerate(read_items(items, query.shape[0], key.shape[0], max_seqlen_q,
                                            max_seqlen_k, chunk_starts, chunk_lengths)):
            item = trim(item, window_left, right)
            if item.n:
                visible.append(item)
                spans.append([*spans_of(item, starts[i], lengths[i])])
        rows, cuts = [], [0]
        calls = [*pieces(spans)]
        for _, members in calls:
            rows += [row for i in members for row in range(visible[i].q_start,
                                                           visible[i].q_start + visible[i].n)]
            cuts.append(len(rows))
        if not rows:
            out, lse = empty_result(query, value.shape[2])
            return (out, lse) if return_lse else out
        at, group = torch.tensor(rows), query.shape[1] // key.shape[1]
        # the query heads of a KV head are rows beside those of other items
        q = query[at].unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)[None]
        k, v = (t.transpose(0, 1)[None] for t in (key, value))
        parts = [flash(q[:, :, begin * group:end * group], k[:, :, first:last],
                       v[:, :, first:last], 0.0, False, scale=scale)[:2]
                 for ((first, last), _), (begin, end) in zip(calls, pairwise(cuts))]
        out, lse = merge_rows(
            at, _by_row(torch.cat([part for part, _ in parts], 2)[0], group),
            _by_row(torch.cat([lse for _, lse in parts], 2)[0, ..., None], group)[..., 0],
            query.shape[0])
        return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)

    return run


def spans_of(item: Item, starts: list[int] | None, length: int) -> Iterator[Span]:
    """Yields where the keys of an item lie: in one piece, or chunk by chunk."""
    end = item.k_start + item.m
    if starts is None:
        yield item.k_start, end
        return
    for c in range(item.k_start // length, -(-end // length)):
        first, last = max(item.k_start - c * length, 0), min(end - c * length, length)
        yield starts[c] + first, starts[c] + last


def pieces(spans: list[list[Span]]) -> Iterator[tuple[Span, list[int]]]:
    """Yields the parts of the buffer in which no item begins or ends, each with the items that see
    it. An item that reads a part twice is in two of them."""
    bounds = sorted({bound for own in spans for span in own for bound in span})
    for piece in pairwise(bounds):
        times = [sum(first <= piece[0] and piece[1] <= last for first, last in own)
                 for own in spans]
        for count in range(max(times)):
            yield piece, [i for i, seen in enumerate(times) if seen > count]


def merge_rows(rows: Tensor, parts: Tensor, lses: Tensor, tokens: int) -> Part:
    """Merges parts by log-sum-exp: part i is attention of row rows[i] over some keys."""
    most = lses.new_full((tokens, lses.shape[1]), -math.inf).scatter_reduce_(
        0, rows[:, None].expand_as(lses), lses, "amax")
    weights = torch.exp(lses - most[rows])
    total = torch.zeros_like(most).index_add_(0, rows, weights)
    out = lses.new_zeros((tokens, *parts.shape[1:])).index_add_(
        0, rows, parts.to(lses.dtype) * weights[..., None])
    # a row of no item has neither: 0 / 1, and log 0
    return out / total.where(total > 0, 1.0)[..., None], most + total.log()


def _by_row(t: Tensor, group: int) -> Tensor:
    """Returns (kv_heads, rows * group, dim) as (rows, heads, dim)."""
    return t.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)


# rows of one item that see different keys would need a mask for each piece
SEVERAL_ROWS = r.at_least("max_seqlen_q", 2)

KERNELS = (
    Kernel("torch.grouped_cascade", grouped_attention, _cascade, prior=4.0, overhead_us=60.0,
           differentiable=False, graph_safe=False, traceable=False,
           less_work="keys that items share are read once",
           less_work_when=(r.at_most("max_seqlen_q", 1), r.at_least("n_items", 2),
                           r.at_least("max_seqlen_k", 256)),
           requires=(
               r.device("cpu"), r.dtypes(*FLOATS),
               r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
               r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
               r.when(SEVERAL_ROWS, r.off("is_causal", Code.MASK_UNSUPPORTED)),
               r.when(SEVERAL_ROWS, r.equals("window_left", -1, Code.WINDOW_UNSUPPORTED)),
               r.when(SEVERAL_ROWS, r.equals("window_right", -1, Code.WINDOW_UNSUPPORTED))),
           note=ON_HOST),
)
