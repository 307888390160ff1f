"""The items of grouped attention in plain torch: reading and checking them, and their key rows.

An item is a row (q_start, n, k_start, m) of int32: query rows q_start to q_start + n attend to the
keys at positions k_start to k_start + m. A position is a row of the key buffer itself, or, with
chunks of C rows, row chunk_starts[i, p // C] + p % C.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason

OP_NAME = "grouped_attention"


class Item(NamedTuple):
    """Query rows [q_start, q_start + n) over the keys at positions [k_start, k_start + m)."""

    q_start: int
    n: int
    k_start: int
    m: int


def read_items(items: Tensor, tokens_q: int, tokens_k: int, max_seqlen_q: int, max_seqlen_k: int,
               chunk_starts: Tensor | None = None,
               chunk_lengths: Tensor | None = None) -> list[Item]:
    """Returns the items of a call, read on the host and checked."""
    rows = [Item(*row) for row in items.tolist()]
    for i, (q_start, n, k_start, m) in enumerate(rows):
        if not (0 <= n <= max_seqlen_q and 0 <= m <= max_seqlen_k):
            raise _invalid(i, f"n from 0 to max_seqlen_q {max_seqlen_q} and m from 0 to "
                           f"max_seqlen_k {max_seqlen_k}", f"n {n} and m {m}")
        if n and not 0 <= q_start <= tokens_q - n:
            raise _invalid(i, f"within the {tokens_q} query rows",
                           f"rows {q_start} to {q_start + n}")
        if m and (k_start < 0 or (chunk_starts is None and k_start > tokens_k - m)):
            raise _invalid(i, f"within the {tokens_k} key rows", f"keys {k_start} to {k_start + m}")
    query_ranges = sorted((item.q_start, item.q_start + item.n, i) for i, item in enumerate(rows)
                   if item.n)
    for (_, last, _), (first, end, i) in pairwise(query_ranges):
        if first < last:
            raise _invalid(i, "query rows that no other item has", f"rows {first} to {end}")
    if chunk_starts is not None and chunk_lengths is not None:
        _check_chunks(rows, chunk_starts.tolist(), chunk_lengths.tolist(), tokens_k)
    return rows


def _invalid(i: int, want: str, got: str) -> InvalidCall:
    return InvalidCall.of(OP_NAME, Reason(Code.KV_METADATA_INVALID, want, got, f"items[{i}]"))


def _check_chunks(rows: list[Item], starts: list[list[int]], lengths: list[int],
                  tokens_k: int) -> None:
    """Raises InvalidCall unless every chunk that an item reads lies in the key buffer."""
    for i, (item, row, length) in enumerate(zip(rows, starts, lengths)):
        if length < 1:
            raise InvalidCall.of(OP_NAME, Reason(Code.KV_METADATA_INVALID, "at least 1", length,
                                                 f"chunk_lengths[{i}]"))
        end = item.k_start + item.m
        if item.m and end > len(row) * length:
            raise _invalid(i, f"within the {len(row)} chunks of {length} of chunk_starts[{i}]",
                           f"keys {item.k_start} to {end}")
        for c in range(item.k_start // length, -(-end // length)) if item.m else ():
            first = max(item.k_start - c * length, 0)
            last = min(end - c * length, length)
            if row[c] + first < 0 or row[c] + last > tokens_k:
                raise InvalidCall.of(OP_NAME, Reason(
                    Code.KV_METADATA_INVALID, f"a chunk within the {tokens_k} key rows",
                    f"rows {row[c] + first} to {row[c] + last}", f"chunk_starts[{i}, {c}]"))


def check_items(values: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Checks the items where they can be read: not while a graph is captured or traced."""
    if facts["tensor_kind"] != "plain" or facts["graph"] or facts["device"] == "meta":
        return
    read_items(values["items"], facts["tokens_q"], facts["tokens_k"], values["max_seqlen_q"],
               values["max_seqlen_k"], values["chunk_starts"], values["chunk_lengths"])


def key_rows(item: Item, starts: Tensor | None, length: int) -> Tensor | slice:
    """Returns where the item's keys lie in the buffer: a slice, or row numbers in its chunks.
    `starts` is the item's row of chunk_starts and `length` its chunk length."""
    if starts is None:
        return slice(item.k_start, item.k_start + item.m)
    position = torch.arange(item.k_start, item.k_start + item.m, device=starts.device)
    return starts[position // length] + position % length


def trim(item: Item, window_left: int, right: int) -> Item:
    """Returns the item without the query rows that see no key and the keys that no row sees. The
    last query stays aligned with the last key. `right`: 0 if causal, else window_right."""
    q_start, n, k_start, m = item
    hidden_rows = min(max(n - m - right, 0), n) if right >= 0 else 0
    if not m:
        hidden_rows = n
    n -= hidden_rows
    hidden_keys = max(m - n - window_left, 0) if window_left >= 0 and n else 0
    return Item(q_start + hidden_rows, n, k_start + hidden_keys, m - hidden_keys)
