"""Grouped attention: many groups of queries over overlapping ranges of one packed key buffer.

Row i of `items` is (q_start, n, k_start, m): query rows q_start to q_start + n attend to keys
k_start to k_start + m. The query rows of two items are disjoint; their key ranges may overlap in
any way, so that ragged prefixes of one long sequence need no copy and can be read once. A query row
of no item gives zeros, and -inf as its log-sum-exp; so does a row that sees no key.

The diagonal of each item is at its bottom right: key j is kept for query i where j <= i + m - n,
and windows are relative to that. Rows of the buffer that belong to no item may hold anything, even
NaN, and are never read. Gradients of key and value are summed over the items in float32 or wider
and rounded once.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..spec.mistake import Mistake, Results, Values
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import Wording, absent, any_of, at_least, dtypes, equals, one_of, present
from .formulas.common import FLOATS, HEAD_WORDS, READS_ON_HOST, attend, empty_result
from .formulas.grouped import check_items, key_rows, read_items
from .formulas.mistakes import LSE, SCORES, SOFTCAP, WINDOW


def reference(
    query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
    window_right: int = -1, softcap: float = 0.0, return_lse: bool = False,
    chunk_starts: Tensor | None = None, chunk_lengths: Tensor | None = None,
) -> Any:
    """Attention of many groups of queries over ranges of one key buffer; see lz.attention for the
    shared arguments.

    query: (tokens_q, heads, head_dim), key and value: (tokens_k, kv_heads, head_dim), packed.
    items: (n_items, 4) int32: q_start, n, k_start, m; query rows q_start to q_start + n attend to
    keys k_start to k_start + m. Query rows are disjoint, key ranges may overlap.
    max_seqlen_q, max_seqlen_k: at least the largest n and m.
    is_causal and windows are relative to the last query, which is aligned with the last key.
    return_lse: also the log-sum-exp of each query row, (tokens_q, heads), natural log.
    chunk_starts (n_items, chunks), chunk_lengths (n_items,): int32, for keys in several places of
    the buffer: position p of item i is row chunk_starts[i, p // C] + p % C, C = chunk_lengths[i].
    """
    out, lse = compute(query, key, value, items, max_seqlen_q, max_seqlen_k, is_causal, scale,
                       window_left, window_right, softcap, chunk_starts, chunk_lengths)
    return (out, lse) if return_lse else out


def compute(
    query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool, scale: float | None, window_left: int, window_right: int, softcap: float,
    chunk_starts: Tensor | None, chunk_lengths: Tensor | None, causal_align: str = "bottom_right",
) -> tuple[Tensor, Tensor]:
    acc_dtype = torch.promote_types(query.dtype, torch.float32)
    rows = read_items(items, query.shape[0], key.shape[0], max_seqlen_q, max_seqlen_k, chunk_starts,
                      chunk_lengths)
    lengths = [0] * len(rows) if chunk_lengths is None else chunk_lengths.tolist()
    # Autograd adds the items' gradients at the upcast copies, and rounds the sum at the cast.
    key_upcast, value_upcast = key.to(acc_dtype), value.to(acc_dtype)
    out = query.new_zeros((query.shape[0], query.shape[1], value.shape[2]))
    lse = query.new_full(out.shape[:2], -math.inf, dtype=acc_dtype)
    for i, item in enumerate(rows):
        where = key_rows(item, None if chunk_starts is None else chunk_starts[i], lengths[i])
        q, k, v = (t.to(query.dtype).transpose(0, 1)[None] for t in (
            query[item.q_start:item.q_start + item.n], key_upcast[where], value_upcast[where]))
        part, part_lse = attend(q, k, v, None, 0.0, is_causal, scale, causal_align, window_left,
                                window_right, None, softcap)
        out[item.q_start:item.q_start + item.n] = part[0].transpose(0, 1)
        lse[item.q_start:item.q_start + item.n] = part_lse[0].transpose(0, 1)
    return out, lse


def meta(query: Tensor, key: Tensor, value: Tensor, *args: Any, return_lse: bool = False,
         **kwargs: Any) -> Any:
    return empty_result(query, value.shape[2], return_lse)


# two prefixes and a range of one buffer, out of order, with query rows 5 and 22 to 25 of no item
ITEMS = ((6, 16, 0, 40), (0, 5, 0, 21), (26, 1, 13, 30))


def _drawn_items(count: int, rng: Random) -> tuple[tuple[int, int, int, int], ...]:
    """Returns items of rows one after another, in any order, over ranges of a few beginnings."""
    starts, rows, items = (0, rng.randrange(1, 30)), 0, []
    for _ in range(count):
        n = rng.choice((0, 1, 1, 2, rng.randrange(1, 20)))
        items.append((rows, n, rng.choice(starts), rng.randrange(0, 50)))
        rows += n + rng.choice((0, 0, 1))
    rng.shuffle(items)
    return tuple(items)


def inputs(
    items: tuple[tuple[int, int, int, int], ...] = ITEMS, tokens_q: int = 0, tokens_k: int = 0,
    hq: int = 4, hkv: int = 2, d: int = 32, dv: int = 0, causal: bool = True,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, scale: float | None = None,
    lse: bool = False, chunk: int = 0, stride: str = "", extreme: bool = False, drawn: str = "",
    chunks: str = "", fork: bool = False, evicted: bool = False,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """Returns random arguments for one case; key rows of no item hold inf. `drawn`: so many items
    are drawn, some of which begin at the same key.

    `chunk`: keys in chunks of that length, twice that for every second item, anywhere in the
    buffer; `chunks`: of the lengths from that on, one for each item; `fork`: items share the
    first chunk with the first that has chunks as long; `evicted`: the keys before an item's first
    are gone, its first chunk begins before the buffer. `stride`: rows "padded", or "by head": the
    heads' axis is the outermost in memory.
    """
    gen = torch.Generator("cpu").manual_seed(seed)
    items = _drawn_items(int(drawn), Random(f"items {seed} {hq} {hkv} {d}")) if drawn else items
    ends = [(q + n, k + m) for q, n, k, m in items]
    tokens_q = tokens_q or max((q for q, _ in ends), default=0) + 2
    tokens_k = tokens_k or max((k for _, k in ends), default=0) + 3
    lengths = [int(chunks) + i if chunks else chunk * (1 + i % 2) for i in range(len(items))]
    chunked = bool(chunk or chunks)
    width = max((-(-k // c) for (_, k), c in zip(ends, lengths) if c), default=1)
    starts = torch.full((len(items), width), -1)
    used = torch.zeros(tokens_k, dtype=torch.bool)
    for i, (_, _, k, m) in enumerate(items):
        positions = torch.arange(k, k + m)
        if chunked:
            count = -(-(k + m) // lengths[i])
            starts[i, :count] = torch.randint(0, tokens_k - lengths[i] + 1, (count,), generator=gen)
            if fork:
                starts[i, :1] = starts[lengths.index(lengths[i]), :1]
            if evicted:
                starts[i, k // lengths[i]] = -(k % lengths[i])
            positions = starts[i][positions // lengths[i]] + positions % lengths[i]
        used[positions] = True

    def rand(rows: int, heads: int, dim: int, keep: Tensor | None = None) -> Tensor:
        t = torch.randn((rows, heads, dim), generator=gen) * (3 if extreme else 1)
        if keep is not None:
            t[~keep] = math.inf
        t = t.to(device=device, dtype=dtype)
        if stride == "by head":
            return t.transpose(0, 1).contiguous().transpose(0, 1)
        if stride == "padded":
            return torch.nn.functional.pad(t, (0, 8))[..., :dim]
        return t

    def integers(t: Tensor) -> Tensor:
        return t.to(device=device, dtype=torch.int32)

    return {"query": rand(tokens_q, hq, d), "key": rand(tokens_k, hkv, d, used),
            "value": rand(tokens_k, hkv, dv or d, used),
            "items": integers(torch.tensor(items).reshape(-1, 4)),
            "max_seqlen_q": max((n for _, n, _, _ in items), default=0),
            "max_seqlen_k": max((m for _, _, _, m in items), default=0), "is_causal": causal,
            "scale": scale, "window_left": window[0], "window_right": window[1],
            "softcap": softcap, "return_lse": lse,
            "chunk_starts": integers(starts) if chunked else None,
            "chunk_lengths": integers(torch.tensor(lengths)) if chunked else None}


# one token of each group over a longer prefix each: decode
DECODE = tuple((i, 1, 0, 9 * (i + 1)) for i in range(8))

CASES: tuple[dict[str, Any], ...] = (
    {}, {"causal": False, "lse": True}, {"items": DECODE, "hq": 8, "d": 64, "lse": True},
    {"items": DECODE[::-1], "hkv": 1, "causal": False, "d": 128},
    {"hq": 8, "hkv": 1, "d": 64, "lse": True}, {"hkv": 4, "d": 256},
    {"items": ((0, 4, 0, 9), (4, 5, 9, 30), (9, 4, 0, 14), (13, 5, 9, 40)), "lse": True},
    {"items": ((0, 0, 0, 9), (0, 3, 4, 0), (3, 9, 2, 5), (12, 1, 2, 1)), "lse": True},
    # rows in another order than items, all of them in one
    {"items": ((7, 5, 16, 40), (0, 4, 0, 20), (4, 3, 0, 33)), "tokens_q": 12},
    {"items": ((9, 2, 3, 7), (5, 4, 0, 20), (0, 5, 9, 11)), "tokens_q": 11, "causal": False,
     "lse": True},
    # samples of one prompt: the same keys, one after another
    *({"items": ((0, 3, 2, 9), (3, 2, 2, 9), (5, 4, 2, 9), (9, 1, 11, 6)), **arguments}
      for arguments in ({}, {"window": (4, 2), "causal": False, "lse": True}, {"chunk": 4},
                        {"chunk": 4, "fork": True}, {"chunk": 4, "evicted": True})),
    {"items": ()}, {"items": ((0, 3, 2, 9),)}, {"window": (6, 0), "lse": True},
    {"window": (5, 3), "causal": False},
    # a window that is longer than the keys, and more queries yet
    {"items": ((0, 24, 0, 8), (24, 3, 5, 9)), "window": (-1, 9), "causal": False, "lse": True},
    {"softcap": 5.0, "scale": 0.3}, {"stride": "padded", "d": 40, "dv": 24},
    {"stride": "by head", "hkv": 4}, {"chunk": 4, "lse": True}, {"extreme": True},
    {"extreme": True, "scale": -0.3},
    {"items": DECODE, "chunk": 8, "d": 64, "lse": True},
    {"items": ((0, 3, 10, 90), (3, 70, 0, 130)), "d": 64, "chunk": 16},
    {"drawn": "3", "lse": True}, {"drawn": "6", "causal": False}, {"drawn": "9", "chunk": 4},
    {"drawn": "5", "causal": False, "window": (5, 3), "lse": True},
)

STRESS: tuple[dict[str, Any], ...] = (
    {"items": tuple((i, 1, 0, 16 * (i + 1)) for i in range(64)), "hq": 8, "d": 64},
    {"items": tuple((2 * i, 2, 7 * i, 33) for i in range(32)), "lse": True},
    {"items": ((0, 64, 0, 64), (64, 192, 0, 320)), "d": 64},
    {"items": ((0, 7, 0, 0), (7, 9, 3, 4))}, {"items": DECODE, "window": (0, 0), "lse": True},
    {"softcap": 3.0, "scale": 0.7, "hkv": 1}, {"chunk": 1, "lse": True},
    # positions that are multiples of every length of a chunk: a float32 reciprocal divides some to
    # less
    {"items": tuple((i, 1, 0, 201) for i in range(64)), "chunks": "37", "tokens_k": 401,
     "hq": 2, "hkv": 1, "d": 8},
    # the same few keys for hundreds: their gradients are long sums
    {"items": tuple((i, 1, 0, 3) for i in range(700)), "hq": 2, "hkv": 1, "d": 8, "causal": False},
    # more than 256 items, keys beyond 2^16
    {"items": tuple((i, 1, i % 7, 5) for i in range(300)), "hq": 2, "hkv": 1, "d": 8},
    {"items": ((0, 2, 65_600, 30), (2, 1, 0, 9)), "hq": 1, "hkv": 1, "d": 8},
    # positions within an item beyond 2^15 and 2^16, with what reads them
    *({"items": ((0, 3, 2, keys), (3, 2, keys - 40, 33)), "hq": 1, "hkv": 1, "d": 8, **arguments}
      for keys, arguments in ((33_091, {}), (33_013, {"window": (70, 0)}),
                              (66_107, {"window": (-1, 40), "causal": False}),
                              (66_031, {"softcap": 5.0, "lse": True}))),
    {"items": ((0, 33_031, 0, 3), (33_031, 9, 1, 20)), "hq": 1, "hkv": 1, "d": 8},
    {"items": ((0, 128, 0, 128), (128, 128, 0, 256)), "chunk": 64, "hkv": 4, "window": (50, 0)})

GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {}, {"lse": True, "causal": False}, {"hkv": 1, "chunk": 4}, {"window": (6, 0), "softcap": 5.0},
    {"items": ((0, 0, 0, 9), (0, 3, 4, 0), (3, 9, 2, 5)), "d": 40, "dv": 24},
    {"items": ((0, 3, 2, 9), (3, 2, 2, 9), (5, 4, 2, 9)), "d": 8})


# Mistakes that a kernel for this op could make.

def _top_left(op: Any, v: Values) -> Results | None:
    if not v["is_causal"] and v["window_left"] < 0 and v["window_right"] < 0:
        return None
    names = [name for name in v if name != "return_lse"]
    out = compute(**{name: v[name] for name in names}, causal_align="top_left")
    return Results(out if v["return_lse"] else out[:1])


def _packed_keys(op: Any, v: Values) -> Values | None:
    """Takes the items' keys for packed one after another, as cu_seqlens would say."""
    items = v["items"].clone()
    items[:, 2] = items[:, 3].cumsum(0) - items[:, 3]
    outside = v["chunk_starts"] is not None or (items.numel() and bool(
        (items[:, 2] + items[:, 3] > v["key"].shape[0]).any()))
    return None if outside or torch.equal(items, v["items"]) else {**v, "items": items}


def _shorten(op: Any, v: Values) -> Values | None:
    items = v["items"].clone()
    items[:, 3] = (items[:, 3] - 1).clamp(min=0)
    return None if torch.equal(items, v["items"]) else {**v, "items": items}


def _ignore_chunks(op: Any, v: Values) -> Values | None:
    return None if v["chunk_starts"] is None else {**v, "chunk_starts": None, "chunk_lengths": None}


MISTAKES: tuple[Mistake, ...] = (
    Mistake("alignment", "the diagonal at the other corner", _top_left), *SCORES, *SOFTCAP,
    *WINDOW, *LSE,
    Mistake("mask", "the keys of the items taken one after another", _packed_keys),
    Mistake("mask", "the last key of each item left out", _shorten),
    Mistake("stale page", "the chunks ignored", _ignore_chunks))

_INT32 = Code.KV_METADATA_INVALID

OP = Op(
    name="grouped_attention", family="attention", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, gradient_cases=GRADIENT_CASES, stress=STRESS, mistakes=MISTAKES,
    reference_kernel={**READS_ON_HOST,
                      "workspace": "3 * itemsize * heads * max_seqlen_q * max_seqlen_k"},
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-5),
                         "float64": (1e-8, 1e-8)}),
    shapes={"query": "tokens_q heads head_dim", "key": "tokens_k kv_heads head_dim",
            "value": "tokens_k kv_heads head_dim_v", "items": "n_items 4",
            "chunk_starts": "n_items chunks", "chunk_lengths": "n_items"},
    returns=("tokens_q heads head_dim_v", "tokens_q heads"), same_dtype=("query", "key", "value"),
    derived={"group": "heads // kv_heads", "group_rest": "heads % kv_heads",
             "head_dim_gap": "head_dim - head_dim_v", "seq_q": "max_seqlen_q",
             "seq_k": "max_seqlen_k", "rows_per_kv_head": "tokens_q * heads // max(kv_heads, 1)"},
    words={**HEAD_WORDS, "n_items": Wording("the number of items"),
           "rows_per_kv_head": Wording("query rows per KV head", "{tokens_q} tokens, {heads} query "
                                       "heads, {kv_heads} KV heads")},
    exact=("heads", "kv_heads", "head_dim", "head_dim_v"),
    ranges={"max_seqlen_q": INT32, "max_seqlen_k": INT32, "window_left": INT32,
            "window_right": INT32},
    requires=(
        dtypes(*FLOATS), at_least("kv_heads", 1, Code.EMPTY_INPUT),
        equals("group_rest", 0, Code.HEADS_NOT_DIVISIBLE),
        one_of("items.dtype", "int32", code=_INT32),
        one_of("chunk_starts.dtype", None, "int32", code=_INT32),
        one_of("chunk_lengths.dtype", None, "int32", code=_INT32),
        any_of(absent("chunk_starts.dtype"), present("chunk_lengths.dtype")),
        any_of(absent("chunk_lengths.dtype"), present("chunk_starts.dtype")),
        at_least("max_seqlen_q", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("max_seqlen_k", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("window_left", -1, Code.VALUE_OUT_OF_RANGE),
        at_least("window_right", -1, Code.VALUE_OUT_OF_RANGE),
        at_least("softcap", 0.0, Code.VALUE_OUT_OF_RANGE),
    ),
    flops="2 * tokens_q * heads * max_seqlen_k * (head_dim + head_dim_v)",
    bytes="itemsize * (head_dim + head_dim_v) * (tokens_q * heads + tokens_k * kv_heads)",
    differentiable=("query", "key", "value"), autocast="lower", sdpa_switches=True,
    extra_check=check_items, outputs="Tensor[]",
)
