"""Page tables in plain torch: reading, checking and gathering.

A cache is a pool of pages of `page_size` tokens each. Row i of `block_table` lists the pages of
sequence i in order, and `context_lens[i]` is its number of tokens; entries of the table and slots
of a page beyond that may be anything and are never read. The queries of sequence i are rows
cu_seqlens_q[i]:cu_seqlens_q[i+1], the last of them at the sequence's last token; without
cu_seqlens_q every sequence has one query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason
from ...spec.rules import Condition, Wording, Words, any_of, at_least, equals, one_of, present

INTEGERS = ("int32", "int64")


# attention over some of the keys: output and log-sum-exp
Part = tuple[Tensor, Tensor]


class SequenceSpan(NamedTuple):
    """One sequence: its query rows [first, last) and its number of keys."""

    first: int
    last: int
    length: int


def read_spans(op: str, tokens: int, block_table: Tensor, context_lens: Tensor,
               cu_seqlens_q: Tensor | None,
               page_size: int, max_seqlen_q: int | None) -> list[SequenceSpan]:
    """Returns the sequences of a call, read on the host and checked."""
    lengths: list[int] = context_lens.tolist()
    starts: list[int] = list(range(tokens + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    capacity = block_table.shape[1] * page_size
    if lengths and (min(lengths) < 0 or max(lengths) > capacity):
        i = next(i for i, n in enumerate(lengths) if not 0 <= n <= capacity)
        raise InvalidCall.of(op, Reason(
            Code.KV_METADATA_INVALID,
            f"from 0 to {capacity} ({block_table.shape[1]} pages of {page_size})", lengths[i],
            f"context_lens[{i}]"))
    sequences = [SequenceSpan(a, b, n) for a, b, n in zip(starts, starts[1:], lengths)]
    longest = max((s.last - s.first for s in sequences), default=0)
    if (cu_seqlens_q is not None and (len(starts) != len(lengths) + 1 or starts[0] != 0
                                      or starts[-1] != tokens
                                      or any(s.last < s.first for s in sequences))):
        raise InvalidCall.of(op, Reason(
            Code.KV_METADATA_INVALID,
            f"{len(lengths) + 1} numbers from 0 to the {tokens} query tokens, never falling",
            str(starts), "cu_seqlens_q"))
    if max_seqlen_q is not None and longest > max_seqlen_q:
        raise InvalidCall.of(op, Reason(
            Code.VALUE_OUT_OF_RANGE, f">= {longest}, the longest query", max_seqlen_q,
            "max_seqlen_q"))
    return sequences


def check_pages(op: str, pages: int, block_table: Tensor, sequences: list[SequenceSpan],
                page_size: int) -> None:
    """Raises InvalidCall unless every used entry of the table is a page of the pool."""
    for i, s in enumerate(sequences):
        row = block_table[i, :-(-s.length // page_size)]
        if not row.numel():
            continue
        low, high = (int(t) for t in torch.aminmax(row))
        if low < 0 or high >= pages:
            j = int(((row < 0) | (row >= pages)).nonzero()[0])
            raise InvalidCall.of(op, Reason(
                Code.BLOCK_TABLE_INVALID, f"from 0 to {pages - 1} (the pool has {pages} pages)",
                int(row[j]), f"block_table[{i}, {j}]"))


def check_metadata(op: str, values: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Checks the page table where it can be read: not while a graph is captured or traced."""
    if facts["tensor_kind"] != "plain" or facts["graph"] or facts["device"] == "meta":
        return
    table = values["block_table"]
    sequences = read_spans(op, facts["tokens"], table, values["context_lens"],
                           values["cu_seqlens_q"], facts["page_size"], values["max_seqlen_q"])
    check_pages(op, facts["pages"], table, sequences, facts["page_size"])


def check_shapes(op: str, values: Mapping[str, Any], layout: str, first: str, second: str) -> None:
    """Raises InvalidCall with KV cache codes for malformed caches and page tables."""
    for name in (first, second):
        if values[name].dim() != layout.count(",") + 1:
            raise InvalidCall.of(op, Reason(
                Code.KV_CACHE_LAYOUT_MISMATCH, f"{layout} for {name}",
                f"shape {tuple(values[name].shape)}", name))
    first_shape, second_shape = tuple(values[first].shape), tuple(values[second].shape)
    if first_shape[:-1] != second_shape[:-1]:
        raise InvalidCall.of(op, Reason(
            Code.KV_CACHE_LAYOUT_MISMATCH, f"that of {first}, {first_shape} but for dim",
            f"{second_shape} for {second}", second))
    table, lengths, starts = values["block_table"], values["context_lens"], values["cu_seqlens_q"]
    if table.dim() != 2:
        raise InvalidCall.of(op, Reason(
            Code.BLOCK_TABLE_INVALID, "of shape (batch, max_pages)", str(tuple(table.shape)),
            "block_table"))
    if lengths.dim() != 1 or lengths.shape[0] != table.shape[0]:
        raise InvalidCall.of(op, Reason(
            Code.KV_METADATA_INVALID,
            f"of shape ({table.shape[0]},), one length for each row of block_table",
            str(tuple(lengths.shape)), "context_lens"))
    if starts is not None and starts.dim() != 1:
        raise InvalidCall.of(op, Reason(
            Code.KV_METADATA_INVALID, f"of shape ({table.shape[0] + 1},)", str(tuple(starts.shape)),
            "cu_seqlens_q"))


# Derived sizes of the query's division into sequences; error messages show their names.
DERIVED = {
    "seq_q": "tokens // max(batch, 1)",        # the average: the true lengths are data
    "seq_k": "max_pages * page_size",          # the capacity of the table
    "query_tokens_minus_batch": "tokens - batch",
    "cu_seqlens_q_length_minus_batch": "boundaries - batch",
}

_ONE_MORE = "cu_seqlens_q must have one number more than there are sequences"
WORDS: Words = {
    "seq_q": Wording("queries per sequence", "{tokens} query tokens, {batch} sequences"),
    "seq_k": Wording("the tokens that a row of block_table has room for",
                     "{max_pages} pages of {page_size}"),
    "query_tokens_minus_batch": Wording("tokens - batch", "{tokens} queries, {batch} sequences", {
        "0": "without cu_seqlens_q there must be one query for each sequence"}),
    "cu_seqlens_q_length_minus_batch": Wording(
        "boundaries - batch", "{boundaries} numbers, {batch} sequences", {"1": _ONE_MORE}),
    "max_pages": Wording("the width of block_table"),
}

METADATA_RULES: tuple[Condition, ...] = (
    one_of("block_table.dtype", *INTEGERS, code=Code.BLOCK_TABLE_INVALID),
    one_of("context_lens.dtype", *INTEGERS, code=Code.KV_METADATA_INVALID),
    one_of("cu_seqlens_q.dtype", None, *INTEGERS, code=Code.KV_METADATA_INVALID),
    any_of(present("cu_seqlens_q.dtype"),
           equals("query_tokens_minus_batch", 0, Code.KV_METADATA_INVALID)),
    equals("cu_seqlens_q_length_minus_batch", 1, Code.KV_METADATA_INVALID),
    at_least("max_seqlen_q", 0, Code.VALUE_OUT_OF_RANGE),
    at_least("page_size", 1, Code.PAGE_SIZE_UNSUPPORTED),
)


def gather_pages(cache: Tensor, row: Tensor, length: int) -> Tensor:
    """Returns the first `length` tokens on the pages of `row`, as (length, ...)."""
    pages = -(-length // cache.shape[1])
    return cache.index_select(0, row[:pages]).flatten(0, 1)[:length]


def group_heads(q: Tensor, kv_heads: int) -> Tensor:
    """Returns (tokens, heads, dim) as (kv_heads, group, tokens, dim): KV heads are a batch."""
    return q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def ungroup_heads(t: Tensor) -> Tensor:
    return t.permute(2, 0, 1, 3).flatten(1, 2)


def merge_parts(parts: Sequence[Part]) -> Part:
    """Merges attention over parts of the keys by their log-sum-exp."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    out = torch.zeros_like(parts[0][0], dtype=lses.dtype)
    for (part, _), weight in zip(parts, torch.softmax(lses, 0)):
        out.addcmul_(part.to(lses.dtype), weight[..., None])
    return out, torch.logsumexp(lses, 0)


def page_table_from_csr(indptr: Tensor, indices: Tensor, last_page_len: Tensor | None = None,
                        page_size: int = 1) -> tuple[Tensor, Tensor]:
    """Returns (block_table, context_lens) of a page table in FlashInfer's CSR form.

    The pages of sequence i are indices[indptr[i]:indptr[i+1]]; its last page holds last_page_len[i]
    tokens, by default all. Reads the sizes on the host. Ragged keys (tokens, heads, dim) are such a
    cache with pages of one token: `page_table_from_csr(indptr, torch.arange(tokens))` and `key[:,
    None]`.
    """
    counts = indptr.diff()
    width = int(counts.max()) if counts.numel() else 0
    column = torch.arange(width, device=indices.device)
    used = column < counts[:, None]
    where = (indptr[:-1, None] + column).where(used, 0)
    table = indices[where] if indices.numel() else indices.new_zeros(where.shape)
    full = counts * page_size
    lengths = (full if last_page_len is None
               else (full - page_size + last_page_len).where(counts > 0, 0))
    return table.masked_fill(~used, 0).to(indices.dtype), lengths.to(indptr.dtype)


# Test inputs.

def random_table(gen: torch.Generator, context: tuple[int, ...], page_size: int, dtype: torch.dtype,
                 device: str, order: str = "shuffled",
                 spare: int = 2) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns (block_table, context_lens, used slots, pages). Unused entries of the table are -1.

    `order`: "shuffled" pages; "neighbours": each sequence's pages are adjacent; "shared": sequences
    begin with the full pages of the one before; "prefix": with that in which the shorter one ends
    too.
    """
    counts = [-(-n // page_size) for n in context]
    pages = sum(counts) + spare
    ids = torch.arange(pages) if order == "neighbours" else torch.randperm(pages, generator=gen)
    if spare > sum(counts):                    # of a large pool the last pages are always used
        ids = torch.cat((ids[ids >= pages - 8], ids[ids < pages - 8]))
    table = torch.full((len(context), max(counts, default=0) + 1), -1, dtype=torch.int64)
    used = torch.zeros(pages, page_size, dtype=torch.bool)
    taken = 0
    for i, (n, count) in enumerate(zip(context, counts)):
        own_pages = ids[taken:taken + count]
        taken += count
        table[i, :count] = own_pages
        if order in ("shared", "prefix") and i:
            last = page_size - 1 if order == "prefix" else 0
            common = (min(n, context[i - 1]) + last) // page_size
            table[i, :common] = table[i - 1, :common]
        filled = (torch.arange(count * page_size) < n).view(count, page_size)
        used[own_pages] = filled
        used[table[i, :count]] |= filled
    return table.to(device, dtype), torch.tensor(context, dtype=dtype, device=device), used, pages


def cu_seqlens(lengths: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, dtype)
