"""Paged attention with torch alone; the kernels differ in how they read the pages.

gather   copies the pages of each sequence together for torch's attention: all the contract allows,
         on any device
pieces   on the CPU, piece by piece: adjacent pages are read in place, scattered ones gathered into
         what fits a core's cache; attention over the pieces is merged by log-sum-exp
padded   decode without reading a length on the host: all table rows at full width, masked
matmul   MLA as explicit matrix products, which are large because all heads share one key
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..ops.formulas.common import FLOATS, position_terms
from ..ops.formulas.paged import (
    Part,
    gather_pages,
    group_heads,
    merge_parts,
    read_spans,
    ungroup_heads,
)
from ..ops.mla_paged_attention import OP as mla_paged_attention
from ..ops.paged_attention import OP as paged_attention
from ..ops.paged_attention import dequantize_cache
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code

PIECE_BYTES = 1 << 21      # bytes of keys and values gathered at a time: a core's cache
IN_PLACE_BYTES = 1 << 19   # average bytes of adjacent pages that are worth a separate call
BLOCK = 512                # queries at a time under a window: keys that none sees are skipped
FEW_ROWS = 32              # query rows per KV head up to which the cache reads dominate


def _cpu_flash() -> Callable[..., Any]:
    flash: Callable[..., Any] | None = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu",
                                               None)
    if flash is None:
        raise ImportError(
            f"torch._scaled_dot_product_flash_attention_for_cpu (torch {torch.__version__})")
    return flash


def _empty_result(query: Tensor, dim: int) -> Part:
    """Returns the result for rows that see no key."""
    lse = torch.full(query.shape[:2], -math.inf,
                     dtype=torch.promote_types(query.dtype, torch.float32),
                     device=query.device)
    return query.new_zeros((*query.shape[:2], dim)), lse


# gather: any device

def _gather() -> Callable[..., Any]:
    return gather_attention


def gather_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, window_left: int = -1,
    softcap: float = 0.0, key_scale: Tensor | None = None, value_scale: Tensor | None = None,
    max_seqlen_q: int | None = None, return_lse: bool = False,
) -> Any:
    out, lse = _empty_result(query, value_cache.shape[3])
    for i, s in enumerate(read_spans("paged_attention", query.shape[0], block_table, context_lens,
                                     cu_seqlens_q,
                                     key_cache.shape[1], max_seqlen_q)):
        if s.first == s.last or s.length == 0:
            continue
        rows, count = slice(s.first, s.last), s.last - s.first
        key = dequantize_cache(gather_pages(key_cache, block_table[i], s.length), key_scale,
                               query.dtype)
        value = dequantize_cache(gather_pages(value_cache, block_table[i], s.length), value_scale,
                                 query.dtype)
        explicit = softcap > 0.0 or return_lse
        # as torch's is_causal
        square = is_causal and window_left < 0 and count == s.length and not explicit
        hidden = None
        if not square and (count > 1 or window_left >= 0):
            _, hidden = position_terms(count, s.length, is_causal, "bottom_right", window_left, -1,
                                       None, query.device)
        if explicit:
            out[rows], lse[rows] = _explicit_softmax(query[rows], key, value, hidden, scale,
                                                     softcap)
        else:
            q = group_heads(query[rows], key.shape[1])
            k, v = (t.transpose(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for t in (key, value))
            attended = scaled_dot_product_attention(q, k, v, None if hidden is None else ~hidden,
                                                    0.0, square, scale=scale)
            out[rows] = ungroup_heads(attended)
        if is_causal and count > s.length:     # torch's kernels differ on rows that see no key
            out[s.first:s.last - s.length] = 0
    return (out, lse) if return_lse else out


def _explicit_softmax(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None,
                      scale: float | None,
                      softcap: float) -> Part:
    """Computes softmax step by step, with the query heads of one KV head as rows of one matmul."""
    q = group_heads(query, key.shape[1])
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.flatten(1, 2) @ key.permute(1, 2, 0)).unflatten(1, q.shape[1:3]).to(wide)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)).to(q.dtype)
    out = (weights.flatten(1, 2) @ value.transpose(0, 1)).unflatten(1, q.shape[1:3])
    return ungroup_heads(out), ungroup_heads(lse)[..., 0]


# pieces: CPU

@dataclass(frozen=True)
class _PagedCache:
    """A paged cache of keys and values, read as (1, kv_heads, tokens, dim) each."""

    key: Tensor
    value: Tensor
    layout: str
    dtype: torch.dtype

    @property
    def page_size(self) -> int:
        return self.key.shape[1 if self.layout == "NHD" else 2]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[2 if self.layout == "NHD" else 1]

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.key.shape[3] * self.dtype.itemsize

    @property
    def readable_in_place(self) -> bool:
        return (self.key.dtype == self.value.dtype == self.dtype
                and self.key.is_contiguous() and self.value.is_contiguous())

    def gather(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (_cast(cache.index_select(0, pages), self.dtype)
                      for cache in (self.key, self.value))
        return self._by_head(key), self._by_head(value)

    def view_pages(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        if first < 0 or last > self.key.shape[0]:
            raise IndexError(f"pages {first} to {last - 1} of a pool of {self.key.shape[0]}")
        return self._by_head(self.key[first:last]), self._by_head(self.value[first:last])

    def _by_head(self, pages: Tensor) -> Tensor:
        if self.layout == "NHD":
            return pages.flatten(0, 1).transpose(0, 1)[None]
        return pages[0][None] if pages.shape[0] == 1 else pages.transpose(0, 1).flatten(1, 2)[None]


def _cast(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts; float8 by a table of its 256 values, as torch's own cast is slow on the CPU."""
    if stored.dtype.itemsize > 1 or not stored.is_floating_point():
        return stored.to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(stored.dtype).to(dtype)
    return table.index_select(0, stored.view(torch.uint8).flatten().to(torch.int32)).view(
        stored.shape)


@dataclass(frozen=True)
class _LatentCache:
    """MLA's cache as one KV head whose key and value are (ckv, kpe); the kpe part of the result is
    unused."""

    ckv: Tensor
    kpe: Tensor
    kv_heads: int = 1

    @property
    def page_size(self) -> int:
        return self.ckv.shape[1]

    @property
    def token_bytes(self) -> int:
        return (self.ckv.shape[2] + self.kpe.shape[2]) * self.ckv.dtype.itemsize

    def gather(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([cache.index_select(0, pages) for cache in (self.ckv, self.kpe)],
                         -1).flatten(0, 1)[None, None]
        return both, both


Cache = Union[_PagedCache, _LatentCache]


def _read_pieces(cache: Cache, row: Tensor, start: int, stop: int,
                 whole: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields keys and values of the tokens [start, stop) of a sequence in pieces; `whole`: in one
    piece."""
    size = cache.page_size
    first = start // size
    pages = row[first:-(-stop // size)]
    count = pages.shape[0]
    total = count * size * cache.token_bytes
    runs: list[int] = []
    if isinstance(cache, _PagedCache) and cache.readable_in_place and total >= IN_PLACE_BYTES:
        runs = _contiguous_runs(cache, pages)
    in_place = len(runs) == 1 or (bool(runs) and total >= IN_PLACE_BYTES * len(runs) and not whole)
    step = count if whole else max(PIECE_BYTES // (size * cache.token_bytes), 1)
    cuts = runs if in_place else range(0, count, step)
    for a, b in zip(cuts, [*cuts[1:], count]):
        if in_place and isinstance(cache, _PagedCache):
            page = int(pages[a])
            key, value = cache.view_pages(page, page + b - a)
        else:
            key, value = cache.gather(pages[a:b])
        low, high = max(start - (first + a) * size, 0), min(stop - (first + a) * size,
                                                            (b - a) * size)
        yield key[:, :, low:high], value[:, :, low:high]


def _contiguous_runs(cache: _PagedCache, pages: Tensor) -> list[int]:
    """Returns the indices in `pages` where a run of tokens contiguous in memory begins."""
    if cache.layout == "HND":                  # only the tokens of one page are contiguous
        return list(range(pages.shape[0]))
    return [0, *(1 + (pages[1:] != pages[:-1] + 1).nonzero().flatten()).tolist()]


def _attend(flash: Callable[..., Any], cache: Cache, q: Tensor, row: Tensor, length: int,
            is_causal: bool,
            window_left: int, scale: float | None) -> Part:
    """Attends to one sequence; q is (tokens, heads, dim), and every row sees a key.

    Keys that need no mask come first, with the query group packed into rows so that each KV head is
    read once; then the last keys with torch's is_causal. A mask is used for windows over several
    queries, and for sequences so short that a second call would cost more.
    """
    count = q.shape[0]
    short = length * cache.token_bytes <= IN_PLACE_BYTES and is_causal and count < length
    heads = group_heads(q, cache.kv_heads)
    rows = heads.flatten(1, 2)[None]
    whole = rows.shape[2] > FEW_ROWS
    start = max(0, length - count - window_left) if window_left >= 0 else 0

    def shared(t: Tensor) -> Tensor:
        return t[0][:, None].expand(-1, heads.shape[1], -1, -1)

    parts: list[Part] = []
    if count > 1 and (window_left >= 0 or short):
        _, hidden = position_terms(count, length - start, is_causal, "bottom_right", window_left,
                                   -1, None, q.device)
        assert hidden is not None
        mask = torch.zeros(hidden.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        mask = mask.masked_fill_(hidden, -math.inf)
        ((key, value),) = _read_pieces(cache, row, start, length, True)
        out, lse = flash(heads, shared(key), shared(value), 0.0, False, attn_mask=mask, scale=scale)
        parts.append((out.flatten(1, 2), lse.flatten(1)))
    else:
        square = count if is_causal and count > 1 else 0
        if start < length - square:
            for key, value in _read_pieces(cache, row, start, length - square, whole):
                out, lse = flash(rows, key, value, 0.0, False, scale=scale)
                parts.append((out[0], lse[0]))
        if square:
            ((key, value),) = _read_pieces(cache, row, length - square, length, True)
            out, lse = flash(heads, shared(key), shared(value), 0.0, True, scale=scale)
            parts.append((out.flatten(1, 2), lse.flatten(1)))
    out, lse = merge_parts(parts)
    shape = heads.shape[1:3]
    return ungroup_heads(out.unflatten(1, shape)), ungroup_heads(
        lse.unflatten(1, shape)[..., None])[..., 0]


# the log-sum-exp by which pieces are merged has no gradient
@torch.no_grad()
def _attend_by_pieces(op: str, cache: Cache, query: Tensor, block_table: Tensor,
                      context_lens: Tensor, cu_seqlens_q: Tensor | None, is_causal: bool,
                      scale: float | None, window_left: int, max_seqlen_q: int | None) -> Part:
    flash = _cpu_flash()
    sequences = read_spans(op, query.shape[0], block_table, context_lens, cu_seqlens_q,
                           cache.page_size, max_seqlen_q)
    length = sequences[0].length if sequences else 0
    equal_lengths = all(s.length == length and s.last - s.first == 1 for s in sequences)
    if (equal_lengths and len(sequences) > 1 and length
        and length * cache.token_bytes <= IN_PLACE_BYTES):
        return _decode_equal_lengths(flash, cache, query, block_table, length, window_left, scale)
    out, lse = _empty_result(query, query.shape[2])
    for i, s in enumerate(sequences):
        # earlier rows see no key
        first = max(s.first, s.last - s.length) if is_causal else s.first
        if s.length == 0 or first == s.last:
            continue
        step = BLOCK if is_causal and window_left >= 0 else s.last - first
        for a in range(first, s.last, step):
            b = min(a + step, s.last)
            out[a:b], lse[a:b] = _attend(flash, cache, query[a:b], block_table[i],
                                         s.length - (s.last - b), is_causal,
                                         window_left, scale)
    return out, lse


def _decode_equal_lengths(flash: Callable[..., Any], cache: Cache, query: Tensor,
                          block_table: Tensor, length: int,
                          window_left: int, scale: float | None) -> Part:
    """Decodes short sequences of equal length with one gather and one call."""
    batch, size = block_table.shape[0], cache.page_size
    start = max(0, length - 1 - window_left) if window_left >= 0 else 0
    first, last = start // size, -(-length // size)
    low, high = start - first * size, length - first * size
    key, value = (t[0].unflatten(1, (batch, -1)).transpose(0, 1)[:, :, low:high]
                  for t in cache.gather(block_table[:, first:last].reshape(-1)))
    out, lse = flash(query.unflatten(1, (cache.kv_heads, -1)), key, value, 0.0, False, scale=scale)
    return out.flatten(1, 2), lse.flatten(1)


def _pieces() -> Callable[..., Any]:
    _cpu_flash()

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, key_scale: Tensor | None = None,
            value_scale: Tensor | None = None, max_seqlen_q: int | None = None,
            return_lse: bool = False, kv_layout: str = "NHD") -> Any:
        cache = _PagedCache(key_cache, value_cache, kv_layout, query.dtype)
        # A scale per head commutes with both matmuls: scale query and output, not the cache.
        scaled_query = (query if key_scale is None
                        else _scale_heads(query, key_scale, cache.kv_heads))
        out, lse = _attend_by_pieces("paged_attention", cache, scaled_query, block_table,
                                     context_lens, cu_seqlens_q, is_causal,
                                     scale, window_left, max_seqlen_q)
        out = out if value_scale is None else _scale_heads(out, value_scale, cache.kv_heads)
        return (out, lse) if return_lse else out

    return run


def _scale_heads(t: Tensor, scale: Tensor, kv_heads: int) -> Tensor:
    """Returns (tokens, heads, dim) times one number, or one per KV head."""
    wide = torch.promote_types(t.dtype, torch.float32)
    return (t.unflatten(1, (kv_heads, -1)).to(wide) * scale.to(wide).reshape(-1, 1, 1)).to(
        t.dtype).flatten(1, 2)


# padded: decode on any device, nothing is read on the host

def _padded() -> Callable[..., Any]:
    return padded_decode


def padded_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, is_causal: bool = False, scale: float | None = None, *,
    window_left: int = -1, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None, max_seqlen_q: int | None = None, return_lse: bool = False,
) -> Any:
    """Decodes: one query per sequence, which sees all its keys with or without is_causal."""
    if _checkable(context_lens):
        read_spans("paged_attention", query.shape[0], block_table, context_lens, None,
                   key_cache.shape[1], max_seqlen_q)
    pages, seen = _full_width(block_table, context_lens, key_cache.shape[1], window_left)
    key, value = (_gather_visible(pool, pages, seen).transpose(1, 2).to(query.dtype)
                  for pool in (key_cache, value_cache))
    kv_heads = key_cache.shape[2]
    scaled_query = query if key_scale is None else _scale_heads(query, key_scale, kv_heads)
    q, mask = scaled_query.unflatten(1, (kv_heads, -1)), seen[:, None, None]
    lse = None
    if return_lse:
        wide = torch.zeros(mask.shape, dtype=torch.promote_types(query.dtype, torch.float32),
                           device=query.device)
        out, lse = _cpu_flash()(q, key, value, 0.0, False,
                                attn_mask=wide.masked_fill(~mask, -math.inf), scale=scale)
        lse = lse.flatten(1).masked_fill((context_lens == 0)[:, None], -math.inf)
    else:
        out = scaled_dot_product_attention(q, key, value, mask, scale=scale)
    out = out.flatten(1, 2).masked_fill((context_lens == 0)[:, None, None], 0.0).to(query.dtype)
    out = out if value_scale is None else _scale_heads(out, value_scale, kv_heads)
    return (out, lse) if return_lse else out


def _checkable(lengths: Tensor) -> bool:
    """Returns whether the lengths can be checked at no cost: on the CPU, and not traced."""
    return (lengths.device.type == "cpu" and type(lengths) is Tensor
            and not torch.compiler.is_compiling())


def _full_width(block_table: Tensor, context_lens: Tensor, page_size: int,
                window_left: int) -> tuple[Tensor, Tensor]:
    """Returns the pages of all rows (batch * max_pages,), 0 where unused, and the mask of visible
    keys (batch, tokens)."""
    lengths = context_lens[:, None]
    begins = torch.arange(0, block_table.shape[1] * page_size, page_size, device=block_table.device)
    token = torch.arange(block_table.shape[1] * page_size, device=block_table.device)
    seen = token < lengths
    if window_left >= 0:
        seen = seen & (token >= lengths - 1 - window_left)
    return block_table.where(begins < lengths, 0).flatten(), seen


def _gather_visible(cache: Tensor, pages: Tensor, seen: Tensor) -> Tensor:
    """Gathers (batch, tokens, ...) from a (pages, page_size, ...) cache, with 0 for hidden slots,
    which may hold NaN."""
    rows = cache.index_select(0, pages).flatten(0, 1).unflatten(0, seen.shape)
    rows = rows if rows.is_floating_point() and rows.itemsize > 1 else rows.to(torch.float32)
    return rows.masked_fill(~seen.reshape(*seen.shape, *[1] * (rows.dim() - 2)), 0.0)


# MLA

def _mla_matmul() -> Callable[..., Any]:
    return mla_matmul


def mla_matmul(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False, *,
    scale: float, max_seqlen_q: int | None = None,
    return_lse: bool = False,
) -> Any:
    out, lse = _empty_result(q_nope, q_nope.shape[2])
    for i, s in enumerate(read_spans("mla_paged_attention", q_nope.shape[0], block_table,
                                     context_lens, cu_seqlens_q,
                                     ckv_cache.shape[1], max_seqlen_q)):
        # earlier rows see no key
        first = max(s.first, s.last - s.length) if is_causal else s.first
        count = s.last - first
        if count <= 0 or s.length == 0:
            continue
        ckv, kpe = (gather_pages(cache, block_table[i], s.length)
                    for cache in (ckv_cache, kpe_cache))
        nope, pe = (q[first:s.last].flatten(0, 1) for q in (q_nope, q_pe))
        scores = torch.addmm(pe @ kpe.T, nope, ckv.T).to(lse.dtype) * scale
        if is_causal and count > 1:
            _, hidden = position_terms(count, s.length, True, "bottom_right", -1, -1, None,
                                       scores.device)
            assert hidden is not None
            scores = scores.unflatten(0, (count, -1)).masked_fill(hidden[:, None],
                                                                  -math.inf).flatten(0, 1)
        out[first:s.last] = (torch.softmax(scores, -1).to(ckv.dtype)
                             @ ckv).unflatten(0, (count, -1))
        if return_lse:
            lse[first:s.last] = torch.logsumexp(scores, -1).unflatten(0, (count, -1))
    return (out, lse) if return_lse else out


def _mla_pieces() -> Callable[..., Any]:
    _cpu_flash()

    def run(q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False, *,
            scale: float, max_seqlen_q: int | None = None, return_lse: bool = False) -> Any:
        out, lse = _attend_by_pieces("mla_paged_attention", _LatentCache(ckv_cache, kpe_cache),
                                     torch.cat((q_nope, q_pe), -1),
                                     block_table, context_lens, cu_seqlens_q, is_causal, scale, -1,
                                     max_seqlen_q)
        out = out[..., :q_nope.shape[2]].contiguous()
        return (out, lse) if return_lse else out

    return run


def _mla_padded() -> Callable[..., Any]:
    return mla_padded_decode


def mla_padded_decode(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, is_causal: bool = False, *, scale: float, max_seqlen_q: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Decodes: one query per sequence, which sees all its keys with or without is_causal."""
    if _checkable(context_lens):
        read_spans("mla_paged_attention", q_nope.shape[0], block_table, context_lens, None,
                   ckv_cache.shape[1], max_seqlen_q)
    pages, seen = _full_width(block_table, context_lens, ckv_cache.shape[1], -1)
    ckv, kpe = (_gather_visible(cache, pages, seen) for cache in (ckv_cache, kpe_cache))
    wide = torch.promote_types(q_nope.dtype, torch.float32)
    scores = torch.baddbmm(q_pe @ kpe.transpose(1, 2), q_nope, ckv.transpose(1, 2)).to(wide) * scale
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    weights = torch.softmax(scores, -1).masked_fill((context_lens == 0)[:, None, None], 0.0)
    out = (weights.to(ckv.dtype) @ ckv).to(q_nope.dtype)
    return (out, torch.logsumexp(scores, -1)) if return_lse else out


DECODE: tuple[r.Condition, ...] = (
    r.absent("cu_seqlens_q.dtype", Code.SEQ_LEN_UNSUPPORTED),
    r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("pages", 1, Code.EMPTY_INPUT),
    r.at_least("max_pages", 1, Code.EMPTY_INPUT))
SAME_HEAD_DIM = r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID)
NO_SOFTCAP = r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED)
ON_HOST = "reads the lengths on the host"
KEYS = "itemsize * seq_k * kv_heads * (head_dim + head_dim_v)"

# In float32 on an H200 large logits have up to 3.5 times the eager error, more than is allowed.
HALF_OFF_CPU = r.any_of(r.device("cpu"), r.dtypes("float16", "bfloat16"))

KERNELS = (
    Kernel("torch.paged_gather", paged_attention, _gather, prior=2.5, overhead_us=25.0,
           baseline=True, variants=("NHD",), graph_safe=False, traceable=False,
           workspace=f"2 * {KEYS}", requires=(HALF_OFF_CPU,),
           note=ON_HOST),
    Kernel("torch.paged_pieces", paged_attention, _pieces, prior=10.0, overhead_us=35.0,
           variants=("NHD", "HND"), less_work="reads pages where they lie, without a copy",
           differentiable=False, graph_safe=False, traceable=False, workspace=f"2 * {KEYS}",
           requires=(
               r.device("cpu"), r.dtypes(*FLOATS), SAME_HEAD_DIM, NO_SOFTCAP,
               r.unit_stride("query")),
           note=f"{ON_HOST}; reads neighbouring pages where they lie"),
    Kernel("torch.paged_padded", paged_attention, _padded, prior=2.0, overhead_us=40.0,
           variants=("NHD",),
           workspace=f"2 * batch * {KEYS}", requires=(
               *DECODE, HALF_OFF_CPU, SAME_HEAD_DIM, NO_SOFTCAP, r.unit_stride("query"),
               r.any_of(r.off("return_lse"), r.device("cpu")),
               r.any_of(r.off("return_lse"), r.off("grad", Code.BACKWARD_UNSUPPORTED))),
           note="reads every table row to its full width; no length leaves the device"),
    Kernel("torch.mla_paged_matmul", mla_paged_attention, _mla_matmul, prior=1.3, overhead_us=25.0,
           baseline=True, graph_safe=False, traceable=False,
           workspace="(itemsize + 8) * heads * tokens * seq_k", note=ON_HOST),
    Kernel("torch.mla_paged_pieces", mla_paged_attention, _mla_pieces, prior=1.8, overhead_us=45.0,
           differentiable=False, graph_safe=False, traceable=False,
           workspace="2 * itemsize * seq_k * head_dim", requires=(
               r.device("cpu"), r.dtypes(*FLOATS),
               r.at_least("seq_q", 64, Code.SEQ_LEN_UNSUPPORTED)),
           note=f"{ON_HOST}; for a few queries the matrix products are quicker"),
    Kernel("torch.mla_paged_padded", mla_paged_attention, _mla_padded, prior=0.8, overhead_us=45.0,
           workspace="2 * itemsize * batch * seq_k * head_dim", requires=(*DECODE, HALF_OFF_CPU),
           note="reads every table row to its full width; no length leaves the device"),
)
