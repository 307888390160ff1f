"""Attention of items and of paged sequences by attention/grouped.h: keys that several have are read
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.formulas.grouped import read_items
from ...ops.formulas.paged import check_pages, read_spans
from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason
from . import build
from .declaration import DTYPES


def load_grouped() -> Callable[..., Any]:
    attend, threads = build.module().grouped_attention, torch.get_num_threads

    def run(query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int,
            max_seqlen_k: int, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, window_right: int = -1, softcap: float = 0.0,
            return_lse: bool = False, chunk_starts: Tensor | None = None,
            chunk_lengths: Tensor | None = None) -> Any:
        tokens, heads, dim = query.shape
        tokens_k, kv_heads, dim_v = value.shape
        out = torch.empty(tokens, heads, dim_v, dtype=query.dtype)
        lse = torch.empty(tokens, heads, dtype=torch.float32) if return_lse else None
        table = items.contiguous()
        chunks: tuple[Any, ...] = None, 0, 0
        if chunk_starts is not None and chunk_lengths is not None:
            starts, lengths = chunk_starts.contiguous(), chunk_lengths.contiguous()
            chunks = starts.data_ptr(), lengths.data_ptr(), starts.shape[1]
        invalid = attend(
            DTYPES[query.dtype], query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
            None if lse is None else lse.data_ptr(), query.shape, kv_heads, dim_v, query.stride(),
            *key.stride()[:2], *value.stride()[:2], window_left, 0 if is_causal else window_right,
            dim ** -0.5 if scale is None else scale, softcap, threads(), table.data_ptr(),
            table.shape[0], *chunks, tokens_k)
        if invalid is not None:
            read_items(items, tokens, tokens_k, max_seqlen_q, max_seqlen_k, chunk_starts,
                       chunk_lengths)          # raises what is wrong
            raise _invalid("grouped_attention", f"items[{invalid}]")
        return out if lse is None else (out, lse)

    return run


def load_paged() -> Callable[..., Any]:
    attend, threads = build.module().paged_attention, torch.get_num_threads

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, softcap: float = 0.0,
            max_seqlen_q: int | None = None, return_lse: bool = False,
            kv_layout: str = "NHD") -> Any:
        tokens, heads, dim = query.shape
        slot, head = (1, 2) if kv_layout == "NHD" else (2, 1)
        pages, page_size = key_cache.shape[0], key_cache.shape[slot]
        kv_heads = key_cache.shape[head]
        dim_v = value_cache.shape[3]
        out = torch.empty(tokens, heads, dim_v, dtype=query.dtype)
        lse = torch.empty(tokens, heads, dtype=torch.float32) if return_lse else None
        table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
        lengths = context_lens.to(table.dtype).contiguous()
        starts = None if cu_seqlens_q is None else cu_seqlens_q.to(table.dtype).contiguous()
        fault = attend(
            DTYPES[query.dtype], table.dtype is torch.int64, query.data_ptr(), key_cache.data_ptr(),
            value_cache.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr(),
            query.shape, kv_heads, dim_v, query.stride(), key_cache.stride(slot),
            key_cache.stride(head), value_cache.stride(slot), value_cache.stride(head), window_left,
            0 if is_causal else -1, dim ** -0.5 if scale is None else scale, softcap, threads(),
            table.data_ptr(), table.stride(0), *table.shape, lengths.data_ptr(),
            None if starts is None else starts.data_ptr(), pages, page_size, key_cache.stride(0),
            value_cache.stride(0))
        if fault is not None:
            name = "paged_attention"
            check_pages(name, pages, block_table, read_spans(
                name, tokens, block_table, context_lens, cu_seqlens_q, page_size, max_seqlen_q),
                page_size)                     # raises what is wrong
            raise _invalid(name, "block_table")
        return out if lse is None else (out, lse)

    return run


def _invalid(op: str, name: str) -> InvalidCall:
    return InvalidCall.of(op, Reason(Code.KV_METADATA_INVALID, "within the tensors", "outside",
                                     name))
