"""KV caches: the keys and values of many sequences for one layer, and the lz call that reads them.

All kinds store pages and differ in what a page is:
    paged        small pages of a fixed pool, allocated one by one
    chunked      large pages, and a pool that grows when it is full
    contiguous   one page per sequence, of the maximum length
`attend` calls lz.paged_attention, or lz.attention where sequences of equal length are adjacent in
memory. So the kind, the page size, the layout and the dtype are facts that selection sees.

    cache = lz.kv_cache("paged", kv_heads=8, head_dim=128, pages=4096, page_size=16,
                        dtype=torch.bfloat16)
    a, b = cache.add(), cache.add()
    cache.append(k, v, (a, b), lengths=(700, 20))          # packed (720, 8, 128): the prompts
    out = cache.attend(q, (a, b), lengths=(700, 20))
    cache.append(k1, v1, (a, b))                           # one token each
    out = cache.attend(q1, (a, b))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..dispatch import dispatcher as dispatch
from ..ops.formulas.paged import page_table_from_csr as page_table_from_csr
from ..spec.errors import CacheFull, InvalidCall
from ..spec.reason import Code, Reason
from ..world.registry import catalog
from .page_pool import PagePool

LAYOUTS = ("NHD", "HND")
# The largest magnitude of each quantized dtype.
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
HEADROOM = 1.25            # over the first append's largest value, for scales derived from it


def _invalid(code: Code, want: Any, got: Any, name: str) -> InvalidCall:
    return InvalidCall.of("kv_cache", Reason(code, want, got, name))


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0


class KVCache:
    """Keys and values of many sequences, in pages. Made by lz.kv_cache; not for use by several
    threads at once."""

    kind = ""
    max_pages: int | None = None               # per sequence

    def __init__(self, *, pages: int, page_size: int, kv_heads: int, head_dim: int,
                 head_dim_v: int | None = None, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu", layout: str = "NHD",
                 key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
                 cross_len: int = 0) -> None:
        for name, size in (("pages", pages), ("page_size", page_size), ("kv_heads", kv_heads),
                           ("head_dim", head_dim)):
            if size < 1:
                raise _invalid(Code.VALUE_OUT_OF_RANGE, ">= 1", size, name)
        if layout not in LAYOUTS:
            raise _invalid(Code.LAYOUT_UNKNOWN, LAYOUTS, layout, "layout")
        if not dtype.is_floating_point and dtype not in LIMITS:
            raise _invalid(Code.KV_CACHE_DTYPE_MISMATCH, "a float, float8 or int8", str(dtype),
                           "dtype")
        self.page_size, self.kv_heads, self.layout = page_size, kv_heads, layout
        self.head_dim, self.head_dim_v = head_dim, head_dim_v or head_dim
        self.dtype, self.device, self.cross_len = dtype, torch.device(device), cross_len
        self.key_scale, self.value_scale = self._scale(key_scale, "key_scale"), self._scale(
            value_scale, "value_scale")
        self.pool = PagePool(pages)
        self.key, self.value = self._empty(pages,
                                           self.head_dim), self._empty(pages, self.head_dim_v)
        self._sequences: dict[int, _Sequence] = {}
        self._next = itertools.count()
        # dropped when a sequence gets or loses a page
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._cross: KVCache | None = None
        # set in a cross cache: the one it belongs to
        self._decoder: KVCache | None = None

    # sequences

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    def length(self, sequence: int) -> int:
        return self._get(sequence).length

    def add(self) -> int:
        """Adds an empty sequence and returns its number."""
        self._check_owner()
        sequence = next(self._next)
        self._sequences[sequence] = _Sequence()
        if self._cross is not None:
            self._cross._sequences[sequence] = _Sequence()
        return sequence

    def remove(self, sequence: int) -> None:
        """Removes a sequence; pages that no other sequence shares become free."""
        self._check_owner()
        for cache in filter(None, (self, self._cross)):
            cache.pool.release(cache._get(sequence).pages)
            del cache._sequences[sequence]
            cache._tables.clear()

    def fork(self, sequence: int) -> int:
        """Adds a copy of a sequence and returns its number; pages are copied on write."""
        self._check_owner()
        self._get(sequence)
        forked = next(self._next)
        for cache in filter(None, (self, self._cross)):
            parent = cache._get(sequence)
            cache.pool.share(parent.pages)
            cache._sequences[forked] = _Sequence(list(parent.pages), parent.length)
        return forked

    @property
    def cross(self) -> KVCache:
        """The cache of the encoder's keys and values for the same sequences. It has its own pages
        and lengths, is written once per sequence, and never causal."""
        if self._decoder is not None or not self.cross_len:
            raise _invalid(Code.MISSING_METADATA,
                           "the longest encoder output, when the decoder's cache is made", None,
                           "cross_len")
        if self._cross is None:
            self._cross = ChunkedCache(
                chunk_size=self.cross_len, kv_heads=self.kv_heads, head_dim=self.head_dim,
                head_dim_v=self.head_dim_v, dtype=self.dtype, device=self.device,
                layout=self.layout)
            self._cross.max_pages, self._cross._decoder = 1, self
            self._cross._sequences = {name: _Sequence() for name in self._sequences}
        return self._cross

    def _check_owner(self) -> None:
        if self._decoder is not None:
            raise _invalid(Code.KV_METADATA_INVALID,
                           "added, removed or forked in the decoder's cache", "a call of cross",
                           "a sequence")

    def _get(self, sequence: int) -> _Sequence:
        state = self._sequences.get(sequence)
        if state is None:
            raise _invalid(Code.KV_METADATA_INVALID, f"one of {list(self._sequences)}",
                           f"{sequence}, which was removed or never added", "sequence")
        return state

    # writing

    def append(self, key: Tensor, value: Tensor, sequences: Sequence[int] | None = None,
               lengths: Sequence[int] | None = None) -> None:
        """Appends tokens, packed (tokens, kv_heads, dim) with `lengths` per sequence (default: one
        each), or (batch, tokens, kv_heads, dim). Without room for all of them, CacheFull is raised
        and none is added."""
        names = self._chosen(sequences)
        keys, counts = self._split_rows(key, names, lengths, "key")
        values, _ = self._split_rows(value, names, counts, "value")
        for what, rows, dim in (("key", keys, self.head_dim), ("value", values, self.head_dim_v)):
            if tuple(rows.shape[1:]) != (self.kv_heads, dim):
                raise _invalid(Code.DIM_MISMATCH, f"(..., {self.kv_heads}, {dim})",
                               str(tuple(rows.shape)), what)
        if self._decoder is not None and any(self._get(n).length for n in names):
            raise _invalid(Code.KV_METADATA_INVALID, "written once for each sequence",
                           "a second append", "cross")
        self._make_room(names, counts)
        if keys.shape[0] == 0:
            return
        slots: list[int] = []
        for name, count in zip(names, counts):
            s = self._sequences[name]
            slots += [s.pages[i // self.page_size] * self.page_size + i % self.page_size
                      for i in range(s.length, s.length + count)]
            s.length += count
        if self.dtype in LIMITS:
            self.key_scale = self._scale_for(keys) if self.key_scale is None else self.key_scale
            self.value_scale = (self._scale_for(values) if self.value_scale is None
                                else self.value_scale)
        slot_index = torch.tensor(slots, device=self.device)
        self._write(self.key, slot_index, self._convert(keys, self.key_scale))
        self._write(self.value, slot_index, self._convert(values, self.value_scale))

    def _make_room(self, names: Sequence[int], counts: Sequence[int]) -> None:
        """Allocates pages for the new tokens, copies shared ones first; all or nothing."""
        requests = []
        for name, count in zip(names, counts):
            s = self._get(name)
            needed = -(-(s.length + count) // self.page_size)
            if self.max_pages is not None and needed > self.max_pages:
                raise CacheFull.of(f"sequence {name} would have {s.length + count} tokens",
                                   f"it may have {self.max_pages * self.page_size}")
            copied = count > 0 and s.length % self.page_size > 0 and self.pool.uses[s.pages[-1]] > 1
            requests.append((s, copied, needed - len(s.pages)))
        total = sum(copied + new for _, copied, new in requests)
        if total > len(self.pool.free):
            self._grow(total - len(self.pool.free))
        pages = iter(self.pool.take(total))
        for s, copied, new in requests:
            if copied:
                old, s.pages[-1] = s.pages[-1], next(pages)
                for pool in (self.key, self.value):
                    _bytes(pool)[s.pages[-1]] = _bytes(pool)[old]
                self.pool.release([old])
            s.pages += itertools.islice(pages, new)
        if total:
            self._tables.clear()

    def _grow(self, more: int) -> None:
        """Grows the pool, where it can. A fixed pool cannot: taking the pages raises CacheFull."""

    def _write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        page, offset = slots // self.page_size, slots % self.page_size
        index = (page, offset) if self.layout == "NHD" else (page, slice(None), offset)
        _bytes(pool)[index] = _bytes(rows)

    def _convert(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        rows = rows.detach().to(self.device)
        limit = LIMITS.get(self.dtype)
        if limit is None or scale is None:
            return rows.to(self.dtype)
        rows = (rows.float() / scale.reshape(-1, 1)).clamp(-limit, limit)
        return (rows.round() if self.dtype == torch.int8 else rows).to(self.dtype)

    def _scale_for(self, rows: Tensor) -> Tensor:
        """Returns scales per KV head that fit these rows with headroom; larger values clamp."""
        largest = rows.detach().to(self.device).float().abs().amax((0, 2))
        return (largest * HEADROOM / LIMITS[self.dtype]).clamp_min(torch.finfo(torch.float32).tiny)

    def _scale(self, value: float | Tensor | None, name: str) -> Tensor | None:
        if value is None:
            return None
        if self.dtype not in LIMITS:
            raise _invalid(Code.SCALE_LAYOUT_MISMATCH, f"absent for a cache of {self.dtype}",
                           "given", name)
        scale = torch.as_tensor(value, dtype=torch.float32, device=self.device)
        if tuple(scale.shape) not in ((), (1,), (self.kv_heads,)):
            raise _invalid(Code.SCALE_LAYOUT_MISMATCH,
                           f"one number or {self.kv_heads}, one per KV head",
                           f"shape {tuple(scale.shape)} for {name}", name)
        return scale

    # reading

    def block_table(self, sequences: Sequence[int] | None = None) -> Tensor:
        """Returns the pages of each sequence, (batch, max_pages) int32, padded with 0."""
        names = tuple(self._chosen(sequences))
        table = self._tables.get(names)
        if table is None:
            rows = [self._get(n).pages for n in names]
            width = max(map(len, rows), default=0)
            filled = [row + [0] * (width - len(row)) for row in rows]
            table = torch.tensor(filled, dtype=torch.int32,
                                 device=self.device).reshape(len(rows), width)
            self._tables = {names: table}
        return table

    def context_lens(self, sequences: Sequence[int] | None = None) -> Tensor:
        lengths = [self._get(n).length for n in self._chosen(sequences)]
        return torch.tensor(lengths, dtype=torch.int32, device=self.device)

    def gather(self, sequence: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Returns a dequantized copy of a sequence's keys and values, (length, kv_heads, dim)."""
        s = self._get(sequence)
        pages = torch.tensor(s.pages, dtype=torch.int64, device=self.device)
        out_dtype = dtype or (torch.float32 if self.dtype in LIMITS else self.dtype)

        def read(pool: Tensor, scale: Tensor | None) -> Tensor:
            rows = _bytes(pool)[pages].view(pool.dtype)
            rows = (rows if self.layout == "NHD" else rows.transpose(1, 2)).flatten(0, 1)[:s.length]
            return (rows.to(out_dtype) if scale is None
                    else (rows.float() * scale.reshape(-1, 1)).to(out_dtype))

        return read(self.key, self.key_scale), read(self.value, self.value_scale)

    def relayout(self, layout: str) -> None:
        """Changes the layout of the pages to "NHD" or "HND", which copies the pool once."""
        if layout not in LAYOUTS:
            raise _invalid(Code.LAYOUT_UNKNOWN, LAYOUTS, layout, "layout")
        if layout != self.layout:
            self.key, self.value = (pool.transpose(1, 2).contiguous()
                                    for pool in (self.key, self.value))
            self.layout = layout

    def attend(self, query: Tensor, sequences: Sequence[int] | None = None,
               lengths: Sequence[int] | None = None, *, is_causal: bool | None = None,
               scale: float | None = None, window_left: int = -1, softcap: float = 0.0,
               return_lse: bool = False, backend: str | None = None) -> Any:
        """Attends from the newest tokens to their whole sequence. The query is packed as in
        `append`, or (batch, tokens, heads, dim); the result has its shape. Append the keys of these
        tokens first."""
        names = self._chosen(sequences)
        rows, counts = self._split_rows(query, names, lengths, "query")
        causal = self._decoder is None if is_causal is None else is_causal
        if causal and self._decoder is not None:
            raise _invalid(Code.CAUSAL_UNSUPPORTED, False, True, "is_causal")
        for name, count in zip(names, counts):
            length = self._get(name).length
            if causal and count > length:
                raise _invalid(Code.KV_METADATA_INVALID,
                               f"at most {length}, the tokens of sequence {name}",
                               f"{count}; append the keys of these tokens first",
                               "the query's length")
        options: dict[str, Any] = {"is_causal": causal, "scale": scale, "window_left": window_left,
                                   "softcap": softcap,
                                   "return_lse": return_lse,
                                   **({"backend": backend} if backend else {})}
        result = self._attention(rows, names, counts, options)
        if query.dim() == 3:
            return result
        shape = query.shape[:2]
        return (tuple(t.unflatten(0, shape) for t in result) if return_lse
                else result.unflatten(0, shape))

    def _attention(self, query: Tensor, names: Sequence[int], counts: Sequence[int],
                   options: dict[str, Any]) -> Any:
        starts = None
        if any(count != 1 for count in counts):
            starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32,
                                  device=self.device)
        return _call("paged_attention")(
            query, self.key, self.value, self.block_table(names), self.context_lens(names), starts,
            key_scale=self.key_scale, value_scale=self.value_scale,
            max_seqlen_q=max(counts, default=0), kv_layout=self.layout, **options)

    # shared

    def _empty(self, pages: int, dim: int) -> Tensor:
        inner = ((self.page_size, self.kv_heads) if self.layout == "NHD"
                 else (self.kv_heads, self.page_size))
        return torch.empty((pages, *inner, dim), dtype=self.dtype, device=self.device)

    def _chosen(self, sequences: Sequence[int] | None) -> Sequence[int]:
        if sequences is None:
            return self.sequences
        if len(set(sequences)) != len(sequences):
            raise _invalid(Code.KV_METADATA_INVALID, "each sequence at most once",
                           str(list(sequences)), "sequences")
        return sequences

    def _split_rows(self, t: Tensor, names: Sequence[int], lengths: Sequence[int] | None,
                    name: str) -> tuple[Tensor, Sequence[int]]:
        """Returns packed rows, and how many of them belong to each sequence."""
        if t.dim() == 4:
            if t.shape[0] != len(names):
                raise _invalid(Code.DIM_MISMATCH, f"{len(names)}, one for each sequence",
                               t.shape[0], f"{name}.shape[0]")
            t, lengths = t.flatten(0, 1), [t.shape[1]] * len(names)
        elif t.dim() != 3:
            raise _invalid(Code.WRONG_NDIM, "3 (packed) or 4 (batch first)", t.dim(), name)
        if lengths is None:
            if t.shape[0] != len(names) != 1:
                raise _invalid(Code.MISSING_METADATA,
                               f"whose are {t.shape[0]} tokens for {len(names)} sequences?", None,
                               "lengths")
            lengths = [t.shape[0]] if len(names) == 1 else [1] * len(names)
        if len(lengths) != len(names) or sum(lengths) != t.shape[0] or min(lengths, default=0) < 0:
            raise _invalid(Code.KV_METADATA_INVALID,
                           f"{len(names)} numbers of sum {t.shape[0]}, the rows of {name}",
                           str(list(lengths)), "lengths")
        return t, lengths


class PagedCache(KVCache):
    """Small pages of a fixed pool: for a server with many sequences."""

    kind = "paged"

    def __init__(self, *, pages: int, page_size: int = 16, **shape: Any) -> None:
        super().__init__(pages=pages, page_size=page_size, **shape)


class ChunkedCache(KVCache):
    """Large pages, and a pool that doubles when it is full, up to `max_chunks`."""

    kind = "chunked"

    def __init__(self, *, chunk_size: int = 512, max_chunks: int | None = None,
                 **shape: Any) -> None:
        super().__init__(pages=1, page_size=chunk_size, **shape)
        self.max_chunks = max_chunks

    def _grow(self, more: int) -> None:
        old_pages = len(self.pool.uses)
        pages = max(2 * old_pages, old_pages + more)
        pages = pages if self.max_chunks is None else min(pages, self.max_chunks)
        if pages < old_pages + more:
            return                             # taking the pages raises CacheFull
        old, (self.key, self.value) = (self.key, self.value), (
            self._empty(pages, self.head_dim), self._empty(pages, self.head_dim_v))
        for old_pool, new_pool in zip(old, (self.key, self.value)):
            _bytes(new_pool)[:old_pages] = _bytes(old_pool)
        self.pool.grow(pages)


class ContiguousCache(KVCache):
    """One contiguous range per sequence; adjacent equal lengths are read by one call."""

    kind = "contiguous"
    max_pages = 1

    def __init__(self, *, sequences: int, max_len: int, **shape: Any) -> None:
        super().__init__(pages=sequences, page_size=max_len, **shape)

    def _attention(self, query: Tensor, names: Sequence[int], counts: Sequence[int],
                   options: dict[str, Any]) -> Any:
        states = [self._get(n) for n in names]
        side_by_side = bool(states) and all(
            s.length == states[0].length > 0 and s.pages[0] == states[0].pages[0] + i
            for i, s in enumerate(states))
        if not side_by_side or len(set(counts)) > 1 or self.dtype != query.dtype:
            return super()._attention(query, names, counts, options)
        first = states[0].pages[0]
        key, value = (t if self.layout == "NHD" else t.transpose(1, 2)
                      for t in (self.key, self.value))
        key, value = (t[first:first + len(states), :states[0].length] for t in (key, value))
        result = _call("attention")(query.unflatten(0, (len(states), counts[0])), key, value,
                                    causal_align="bottom_right", layout="bshd", **options)
        if not options["return_lse"]:
            return result.flatten(0, 1)
        return result[0].flatten(0, 1), result[1].transpose(1, 2).flatten(0, 1)


_KINDS: dict[str, type[KVCache]] = {kind.kind: kind
                                    for kind in (ContiguousCache, PagedCache, ChunkedCache)}


def kv_cache(kind: str, **options: Any) -> KVCache:
    """A KV cache for one layer: "paged" (pages, page_size), "chunked" (chunk_size, max_chunks) or
    "contiguous" (sequences, max_len).

    All take kv_heads, head_dim, head_dim_v, dtype (also float8 and int8), device, layout ("NHD" or
    "HND"), key_scale and value_scale (of a quantized cache: one number or one per KV head; taken
    from the first append if not given), and cross_len, the longest encoder output, for
    `cache.cross`.
    """
    cache_class = _KINDS.get(kind)
    if cache_class is None:
        raise _invalid(Code.VALUE_OUT_OF_RANGE, tuple(_KINDS), kind, "kind")
    return cache_class(**options)


def _call(op: str) -> Callable[..., Any]:
    """Returns the public function of an op, whether or not lz has loaded it by name yet."""
    return dispatch.public_function(catalog.builtin_op(op))


def _bytes(t: Tensor) -> Tensor:
    """Returns one-byte dtypes viewed as uint8: torch cannot index all of them."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t
