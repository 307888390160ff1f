"""Reading pages of a KV cache with torch alone: in pieces on the CPU, or all at full width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import Tensor

from ..ops.formulas.common import position_terms
from ..ops.formulas.paged import Part, group_heads, merge_parts, read_spans, ungroup_heads
from ..spec import rules as r
from ..spec.reason import Code

PIECE_BYTES = 1 << 21      # bytes of keys and values gathered at a time: a core's cache
IN_PLACE_BYTES = 1 << 19   # average bytes of adjacent pages that are worth a separate call
BLOCK = 512                # queries at a time under a window: keys that none sees are skipped
FEW_ROWS = 32              # query rows per KV head up to which the cache reads dominate
ON_HOST = "reads the lengths on the host"
DECODE: tuple[r.Condition, ...] = (
    r.absent("cu_seqlens_q.dtype", Code.SEQ_LEN_UNSUPPORTED),
    r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("pages", 1, Code.EMPTY_INPUT),
    r.at_least("max_pages", 1, Code.EMPTY_INPUT))
# In float32 on an H200 large logits have up to 3.5 times the eager error, more than is allowed.
HALF_OFF_CPU = r.any_of(r.device("cpu"), r.dtypes("float16", "bfloat16"))


def half_cache_rules(*names: str) -> tuple[r.Condition, ...]:
    """Returns the rules for caches in the query's half type, read 16 bytes at a time."""
    return (*(r.when(r.equals("dtype", d),
                     r.one_of(f"{n}.dtype", d, code=Code.KV_CACHE_DTYPE_MISMATCH))
              for n in names for d in ("float16", "bfloat16")),
            *(r.unit_stride(n, repair=False) for n in names), *(r.aligned(n, 16) for n in names))


def cpu_flash() -> Callable[..., Any]:
    """Torch's flash attention of the CPU. It takes every row as contiguous, and torch's own choice
    passes it over for others: those are copied."""
    flash: Callable[..., Any] | None = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu",
                                               None)
    if flash is None:
        raise ImportError(
            f"torch._scaled_dot_product_flash_attention_for_cpu (torch {torch.__version__})")
    entry = flash

    def run(query: Tensor, key: Tensor, value: Tensor, *args: Any, **rest: Any) -> Any:
        rows = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        return entry(*rows, *args, **rest)

    return run


def empty_result(query: Tensor, dim: int) -> Part:
    """Returns the result for rows that see no key."""
    lse = torch.full(query.shape[:2], -math.inf,
                     dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
    return query.new_zeros((*query.shape[:2], dim)), lse


@dataclass(frozen=True)
class PagedCache:
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
        key, value = (cast_stored(cache.index_select(0, pages), self.dtype)
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


def cast_stored(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts; float8 by a table of its 256 values, as torch's own cast is slow on the CPU."""
    if stored.dtype.itemsize > 1 or not stored.is_floating_point():
        return stored.to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(stored.dtype).to(dtype)
    return table.index_select(0, stored.view(torch.uint8).flatten().to(torch.int32)).view(
        stored.shape)


@dataclass(frozen=True)
class LatentCache:
    """MLA's cache as one KV head: key and value are (ckv, kpe), and kpe of the result is unused."""

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


Cache = Union[PagedCache, LatentCache]


def read_pieces(cache: Cache, row: Tensor, start: int, stop: int,
                 whole: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields keys and values of tokens [start, stop) of a sequence in pieces, or `whole`."""
    size = cache.page_size
    first = start // size
    pages = row[first:-(-stop // size)]
    count = pages.shape[0]
    total = count * size * cache.token_bytes
    runs: list[int] = []
    if isinstance(cache, PagedCache) and cache.readable_in_place and total >= IN_PLACE_BYTES:
        runs = _contiguous_runs(cache, pages)
    in_place = len(runs) == 1 or (bool(runs) and total >= IN_PLACE_BYTES * len(runs) and not whole)
    step = count if whole else max(PIECE_BYTES // (size * cache.token_bytes), 1)
    cuts = runs if in_place else range(0, count, step)
    for a, b in zip(cuts, [*cuts[1:], count]):
        if in_place and isinstance(cache, PagedCache):
            page = int(pages[a])
            key, value = cache.view_pages(page, page + b - a)
        else:
            key, value = cache.gather(pages[a:b])
        low, high = max(start - (first + a) * size, 0), min(stop - (first + a) * size,
                                                            (b - a) * size)
        yield key[:, :, low:high], value[:, :, low:high]


def _contiguous_runs(cache: PagedCache, pages: Tensor) -> list[int]:
    """Returns the indices in `pages` where a run of tokens contiguous in memory begins."""
    if cache.layout == "HND":                  # only the tokens of one page are contiguous
        return list(range(pages.shape[0]))
    return [0, *(1 + (pages[1:] != pages[:-1] + 1).nonzero().flatten()).tolist()]


def _attend(flash: Callable[..., Any], cache: Cache, q: Tensor, row: Tensor, length: int,
            is_causal: bool, window_left: int, scale: float | None) -> Part:
    """Attends to one sequence; q is (tokens, heads, dim), and every row sees a key.

    Keys that need no mask come first, with the query group packed into rows so that each KV head is
    read once; then the last keys with torch's is_causal. A mask is used for windows over several
    queries, for sequences so short that a second call would cost more, and for a scale that is not
    positive.
    """
    count = q.shape[0]
    short = length * cache.token_bytes <= IN_PLACE_BYTES and count < length
    # torch masks before it multiplies by the scale: times 0 that is NaN, times -1 it is +inf
    masks_first = scale is not None and scale <= 0
    heads = group_heads(q, cache.kv_heads)
    rows = heads.flatten(1, 2)[None]
    whole = rows.shape[2] > FEW_ROWS
    start = max(0, length - count - window_left) if window_left >= 0 else 0

    def shared(t: Tensor) -> Tensor:
        return t[0][:, None].expand(-1, heads.shape[1], -1, -1)

    parts: list[Part] = []
    if count > 1 and (window_left >= 0 or (is_causal and (short or masks_first))):
        _, hidden = position_terms(count, length - start, is_causal, "bottom_right", window_left,
                                   -1, None, q.device)
        assert hidden is not None
        mask = torch.zeros(hidden.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        mask = mask.masked_fill_(hidden, -math.inf)
        ((key, value),) = read_pieces(cache, row, start, length, True)
        out, lse = flash(heads, shared(key), shared(value), 0.0, False, attn_mask=mask, scale=scale)
        parts.append((out.flatten(1, 2), lse.flatten(1)))
    else:
        square = count if is_causal and count > 1 else 0
        if start < length - square:
            for key, value in read_pieces(cache, row, start, length - square, whole):
                out, lse = flash(rows, key, value, 0.0, False, scale=scale)
                parts.append((out[0], lse[0]))
        if square:
            ((key, value),) = read_pieces(cache, row, length - square, length, True)
            out, lse = flash(heads, shared(key), shared(value), 0.0, True, scale=scale)
            parts.append((out.flatten(1, 2), lse.flatten(1)))
    out, lse = merge_parts(parts)
    shape = heads.shape[1:3]
    return ungroup_heads(out.unflatten(1, shape)), ungroup_heads(
        lse.unflatten(1, shape)[..., None])[..., 0]


# the log-sum-exp by which pieces are merged has no gradient
@torch.no_grad()
def attend_by_pieces(op: str, cache: Cache, query: Tensor, block_table: Tensor,
                      context_lens: Tensor, cu_seqlens_q: Tensor | None, is_causal: bool,
                      scale: float | None, window_left: int, max_seqlen_q: int | None) -> Part:
    flash = cpu_flash()
    sequences = read_spans(op, query.shape[0], block_table, context_lens, cu_seqlens_q,
                           cache.page_size, max_seqlen_q)
    length = sequences[0].length if sequences else 0
    equal_lengths = all(s.length == length and s.last - s.first == 1 for s in sequences)
    if (equal_lengths and len(sequences) > 1 and length
        and length * cache.token_bytes <= IN_PLACE_BYTES):
        return _decode_equal_lengths(flash, cache, query, block_table, length, window_left, scale)
    out, lse = empty_result(query, query.shape[2])
    for i, s in enumerate(sequences):
        # earlier rows see no key
        first = max(s.first, s.last - s.length) if is_causal else s.first
        if s.length == 0 or first == s.last:
            continue
        step = BLOCK if is_causal and window_left >= 0 else s.last - first
        for a in range(first, s.last, step):
            b = min(a + step, s.last)
            out[a:b], lse[a:b] = _attend(flash, cache, query[a:b], block_table[i],
                                         s.length - (s.last - b), is_causal, window_left, scale)
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


def is_checkable(lengths: Tensor) -> bool:
    """Returns whether the lengths can be checked at no cost: on the CPU, and not traced."""
    return (lengths.device.type == "cpu" and type(lengths) is Tensor
            and not torch.compiler.is_compiling())


def full_width(block_table: Tensor, context_lens: Tensor, page_size: int,
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


def gather_visible(cache: Tensor, pages: Tensor, seen: Tensor) -> Tensor:
    """Gathers (batch, tokens, ...) from a (pages, page_size, ...) cache, with 0 for hidden slots,
    which may hold NaN."""
    rows = cache.index_select(0, pages).flatten(0, 1).unflatten(0, seen.shape)
    rows = rows if rows.is_floating_point() and rows.itemsize > 1 else rows.to(torch.float32)
    return rows.masked_fill(~seen.reshape(*seen.shape, *[1] * (rows.dim() - 2)), 0.0)
