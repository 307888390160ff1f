"""Attention over paged caches beyond the generated grid: page tables, bad calls, reading by pieces,
gradients, MLA.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import events_of, path_of
from torch import Tensor

import layerzero as lz
from layerzero.backends import _pages, torch_mla, torch_paged
from layerzero.backends.native import build
from layerzero.ops.formulas.paged import page_table_from_csr
from layerzero.spec.event import Fallback, HealthChanged
from layerzero.verify.kernel.contract import call, case_values

PAGED, MLA = lz.op("paged_attention"), lz.op("mla_paged_attention")
REAL = ("torch.paged_gather", "torch.paged_pieces", "torch.paged_padded",
        "reference.paged_attention")
Code = lz.Code


def values(op: Any = PAGED, dtype: str = "float32", **case: Any) -> dict[str, Any]:
    return case_values(op, case, dtype)


def kernel(name: str) -> lz.Kernel:
    return next(k for k in (*torch_paged.KERNELS, *torch_mla.KERNELS) if k.id == name)


def close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


# Page tables

def test_a_csr_page_table_becomes_a_block_table() -> None:
    indptr, indices = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([7, 3, 1, 0, 6],
                                                                                  dtype=torch.int32)
    table, lengths = page_table_from_csr(indptr, indices,
                                         torch.tensor([1, 4, 2], dtype=torch.int32), page_size=4)
    assert table.tolist() == [[7, 3, 0], [0, 0, 0], [1, 0, 6]]
    assert lengths.tolist() == [5, 0, 10]
    assert table.dtype == lengths.dtype == torch.int32


def test_without_last_page_lengths_every_page_is_full() -> None:
    table, lengths = page_table_from_csr(torch.tensor([0, 1, 4]), torch.arange(4), page_size=3)
    assert (table.tolist(), lengths.tolist()) == ([[0, 0, 0], [1, 2, 3]], [3, 9])


def test_a_csr_page_table_may_be_empty() -> None:
    table, lengths = page_table_from_csr(torch.tensor([0, 0, 0]), torch.arange(0))
    assert (tuple(table.shape), lengths.tolist()) == ((2, 0), [0, 0])
    table, lengths = page_table_from_csr(torch.tensor([0]), torch.arange(0))
    assert (tuple(table.shape), lengths.tolist()) == ((0, 0), [])


def attention_of(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One sequence, spelled out per query head; (tokens, heads, dim) and log-sum-exp in base 2."""
    out, lse = [], []
    for head in range(query.shape[1]):
        shared = head * key.shape[1] // query.shape[1]
        scores = query[:, head].double() @ key[:, shared].double().T * scale
        ahead = torch.arange(key.shape[0]) > torch.arange(query.shape[0])[:, None] + key.shape[
            0] - query.shape[0]
        scores = scores.masked_fill(ahead, -math.inf)
        out.append(torch.softmax(scores, -1) @ value[:, shared].double())
        lse.append(torch.logsumexp(scores, -1) / math.log(2.0))
    return torch.stack(out, 1), torch.stack(lse, 1)


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("queries", [(1, 1, 1), (7, 1, 30)], ids=["decode", "mixed"])
def test_a_csr_call_in_base_two(page_size: int, queries: tuple[int, ...]) -> None:
    gen = torch.Generator().manual_seed(page_size)
    context = (90, 1, 30)
    counts = [-(-n // page_size) for n in context]
    indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    pages = sum(counts) + 3
    indices = torch.randperm(pages, generator=gen)[:sum(counts)].to(torch.int32)
    last = torch.tensor([n - (c - 1) * page_size for n, c in zip(context, counts)],
                        dtype=torch.int32)
    key, value = (torch.randn(pages, page_size, 2, 16, generator=gen) for _ in range(2))
    query = torch.randn(sum(queries), 6, 16, generator=gen)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    table, lengths = page_table_from_csr(indptr, indices, last, page_size)
    out, lse = lz.paged_attention(query, key, value, table, lengths, starts, is_causal=True,
                                  scale=0.2, return_lse=True)
    for i, n in enumerate(context):
        mine = indices[indptr[i]:indptr[i + 1]].long()
        k, v = (cache[mine].reshape(-1, 2, 16)[:n] for cache in (key, value))
        want, want_lse = attention_of(query[starts[i]:starts[i + 1]], k, v, 0.2)
        close(out[starts[i]:starts[i + 1]], want)
        close(lse[starts[i]:starts[i + 1]] / math.log(2.0), want_lse)


def test_ragged_keys_are_pages_of_one_token() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(20, heads, 16, generator=gen) for heads in (4, 2, 2))
    starts = torch.tensor([0, 6, 20], dtype=torch.int32)
    table, lengths = page_table_from_csr(starts, torch.arange(20))
    out = lz.paged_attention(q, k[:, None], v[:, None], table, lengths, starts, is_causal=True)
    close(out, lz.varlen_attention(q, k, v, starts, starts, 14, 14, is_causal=True,
                                   causal_align="bottom_right"))


def test_one_mixed_batch_equals_its_sequences_one_by_one() -> None:
    inputs = values(context=(50, 33, 20), lengths_q=(50, 1, 4), lse=True)
    out, lse = lz.paged_attention(**inputs)
    for i, (a, b) in enumerate(itertools.pairwise(inputs["cu_seqlens_q"].tolist())):
        alone = lz.paged_attention(**{
            **inputs, "query": inputs["query"][a:b], "block_table": inputs["block_table"][i:i + 1],
            "context_lens": inputs["context_lens"][i:i + 1],
            "cu_seqlens_q": torch.tensor([0, b - a])})
        close(out[a:b], alone[0])
        close(lse[a:b], alone[1])


@pytest.mark.parametrize("name", REAL)
def test_both_layouts_hold_the_same(name: str) -> None:
    inputs = values(lse=True)
    turned = {n: inputs[n].transpose(1, 2).contiguous() for n in ("key_cache", "value_cache")}
    one = lz.paged_attention(**inputs, backend=name)
    other = lz.paged_attention(**{**inputs, **turned, "kv_layout": "HND"}, backend=name)
    for a, b in zip(one, other):
        close(a, b)


# Bad calls

def with_entry(name: str, where: Any, entry: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(inputs: dict[str, Any]) -> dict[str, Any]:
        t = inputs[name].clone()
        t[where] = entry
        return {name: t}

    return change


def on(name: str, fn: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inputs: {name: fn(inputs[name])}


BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], Code, str]] = {
    "page too large": (with_entry("block_table", (1, 0), 99), Code.BLOCK_TABLE_INVALID,
                       "block_table[1, 0]"),
    "page negative": (with_entry("block_table", (2, 2), -1), Code.BLOCK_TABLE_INVALID,
                      "block_table[2, 2]"),
    "context too long": (with_entry("context_lens", 1, 65), Code.KV_METADATA_INVALID,
                         "context_lens[1]"),
    "context negative": (with_entry("context_lens", 0, -2), Code.KV_METADATA_INVALID,
                         "context_lens[0]"),
    "starts too far": (with_entry("cu_seqlens_q", -1, 99), Code.KV_METADATA_INVALID,
                       "cu_seqlens_q"),
    "starts too late": (with_entry("cu_seqlens_q", 0, 1), Code.KV_METADATA_INVALID, "cu_seqlens_q"),
    "starts fall": (with_entry("cu_seqlens_q", 1, 9), Code.KV_METADATA_INVALID, "cu_seqlens_q"),
    "a boundary missing": (on("cu_seqlens_q", lambda t: t[[0, 1, 3]]), Code.KV_METADATA_INVALID,
                           "cu_seqlens_q"),
    "boundaries as a matrix": (on("cu_seqlens_q", lambda t: t[None]), Code.KV_METADATA_INVALID,
                               "cu_seqlens_q"),
    "boundaries as floats": (on("cu_seqlens_q", lambda t: t.float()), Code.KV_METADATA_INVALID,
                             "cu_seqlens_q"),
    "no boundaries": (lambda g: {"cu_seqlens_q": None}, Code.KV_METADATA_INVALID,
                      "without cu_seqlens_q there must be one query for each sequence"),
    "longest too short": (lambda g: {"max_seqlen_q": 2}, Code.VALUE_OUT_OF_RANGE, "max_seqlen_q"),
    "table as a vector": (on("block_table", lambda t: t[0]), Code.BLOCK_TABLE_INVALID,
                          "block_table"),
    "table as floats": (on("block_table", lambda t: t.float()), Code.BLOCK_TABLE_INVALID,
                        "block_table"),
    "table as shorts": (on("block_table", lambda t: t.short()), Code.BLOCK_TABLE_INVALID,
                        "block_table"),
    "lengths as a matrix": (on("context_lens", lambda t: t[None]), Code.KV_METADATA_INVALID,
                            "context_lens"),
    "a length missing": (on("context_lens", lambda t: t[:2]), Code.KV_METADATA_INVALID,
                         "context_lens"),
    "lengths as floats": (on("context_lens", lambda t: t.float()), Code.KV_METADATA_INVALID,
                          "context_lens"),
    "a flat cache": (on("key_cache", lambda t: t.flatten(0, 1)), Code.KV_CACHE_LAYOUT_MISMATCH,
                     "key_cache"),
    "two pools": (on("value_cache", lambda t: t[:-1]), Code.KV_CACHE_LAYOUT_MISMATCH,
                  "value_cache"),
    "the other layout": (lambda g: {n: g[n].transpose(1, 2) for n in ("key_cache", "value_cache")},
                         Code.KV_CACHE_LAYOUT_MISMATCH, "kv_layout"),
    "an unknown layout": (lambda g: {"kv_layout": "NDH"}, Code.LAYOUT_UNKNOWN, "kv_layout"),
    "keys of another float": (on("key_cache", lambda t: t.half()), Code.KV_CACHE_DTYPE_MISMATCH,
                              "float32"),
    "values of another float": (on("value_cache", lambda t: t.half()), Code.KV_CACHE_DTYPE_MISMATCH,
                                "float32"),
    "int8 without a scale": (on("key_cache", lambda t: t.char()), Code.KV_CACHE_DTYPE_MISMATCH,
                             "int8"),
    "an index as a cache": (lambda g: {"key_cache": g["key_cache"].int(),
                                       "key_scale": torch.ones(())},
                            Code.KV_CACHE_DTYPE_MISMATCH, "int32"),
    "a scale per token": (lambda g: {"key_scale": torch.ones(16)}, Code.SCALE_LAYOUT_MISMATCH,
                          "key_scale"),
    "an integer scale": (lambda g: {"value_scale": torch.tensor(1)}, Code.SCALE_LAYOUT_MISMATCH,
                         "int64"),
    "a window of -2": (lambda g: {"window_left": -2}, Code.VALUE_OUT_OF_RANGE, "window_left"),
    "a negative softcap": (lambda g: {"softcap": -1.0}, Code.VALUE_OUT_OF_RANGE, "softcap"),
    "another head size": (on("query", lambda t: t[..., :8]), Code.DIM_MISMATCH, "key_cache"),
    "a 4-D query": (on("query", lambda t: t[None]), Code.WRONG_NDIM, "query"),
    "heads that do not divide": (on("query", lambda t: t[:, :3]), Code.KV_CACHE_LAYOUT_MISMATCH,
                                 "KV heads"),
}


@pytest.mark.parametrize("warm", [False, True], ids=["miss", "hit"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_named(name: str, warm: bool, path: str, emitted: list[Any]) -> None:
    """Also where the same kind of call was served before, so that nothing is looked up again; no
    kernel is blamed."""
    change, code, word = BAD[name]
    run = path_of(PAGED, path)
    inputs = values(lengths_q=(3, 1, 4), hq=10)
    if warm:
        run(**inputs)
    with pytest.raises(lz.errors.InvalidCall) as caught:
        run(**{**inputs, **change(inputs)})
    assert caught.value.codes[0] == code
    assert word in str(caught.value)
    assert not events_of(HealthChanged, emitted) and not events_of(Fallback, emitted)
    run(**inputs)


@pytest.mark.parametrize("backend", REAL)
@pytest.mark.parametrize("name", ["page too large", "page negative", "context too long",
                                  "context negative"])
def test_each_kernel_checks_what_it_reads(name: str, backend: str, emitted: list[Any]) -> None:
    change, code, word = BAD[name]
    inputs = values(context=(17, 5, 40))
    lz.paged_attention(**inputs, backend=backend)
    with pytest.raises(lz.errors.InvalidCall) as caught:
        lz.paged_attention(**{**inputs, **change(inputs)}, backend=backend)
    assert caught.value.codes == (code,) and word in str(caught.value)
    assert not events_of(HealthChanged, emitted)


def test_pages_that_lie_beyond_the_pool_are_not_read_as_neighbours(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pages, "IN_PLACE_BYTES", 1)
    inputs = values(context=(40,), order="neighbours")
    lz.paged_attention(**inputs, backend="torch.paged_pieces")
    pages = inputs["key_cache"].shape[0]
    inputs["block_table"][0, :3] = torch.tensor([pages - 2, pages - 1, pages])
    with pytest.raises(lz.errors.InvalidCall, match=r"block_table\[0, 2\]"):
        lz.paged_attention(**inputs, backend="torch.paged_pieces")


def test_the_other_layout_is_recognised_where_sizes_tell() -> None:
    inputs = values(hq=16)
    with pytest.raises(lz.errors.InvalidCall, match="it looks like the other layout"):
        lz.paged_attention(**{**inputs, **{n: inputs[n].transpose(1, 2)[:, :, :3]
                                           for n in ("key_cache", "value_cache")}})


MLA_BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], Code, str]] = {
    **{n: BAD[n] for n in ("page too large", "context too long", "table as a vector",
                           "table as floats", "a length missing", "starts fall",
                           "a boundary missing", "no boundaries", "longest too short")},
    "a 4-D cache": (on("ckv_cache", lambda t: t[:, :, None]), Code.KV_CACHE_LAYOUT_MISMATCH,
                    "ckv_cache"),
    "two pools": (on("kpe_cache", lambda t: t[1:]), Code.KV_CACHE_LAYOUT_MISMATCH, "kpe_cache"),
    "another dtype": (on("ckv_cache", lambda t: t.half()), Code.KV_CACHE_DTYPE_MISMATCH, "float16"),
    "queries of two dtypes": (on("q_pe", lambda t: t.half()), Code.MIXED_DTYPES, "q_pe"),
    "another width": (on("q_pe", lambda t: t[..., :8]), Code.DIM_MISMATCH, "kpe_cache"),
}


@pytest.mark.parametrize("name", MLA_BAD)
def test_a_bad_mla_call_is_named(name: str, path: str) -> None:
    change, code, word = MLA_BAD[name]
    run = path_of(MLA, path)
    inputs = values(MLA, lengths_q=(3, 1, 4))
    run(**inputs)
    with pytest.raises(lz.errors.InvalidCall) as caught:
        run(**{**inputs, **change(inputs)})
    assert caught.value.codes[0] == code and word in str(caught.value)


def test_mla_has_no_default_scale() -> None:
    inputs = values(MLA)
    del inputs["scale"]
    with pytest.raises(TypeError, match="scale"):
        lz.mla_paged_attention(**inputs)


# Dtypes of the cache

def test_a_scale_of_one_asks_for_a_cast() -> None:
    inputs = values(dtype="bfloat16", stored="float16", scales="")
    with pytest.raises(lz.errors.InvalidCall, match="KV_CACHE_DTYPE_MISMATCH"):
        lz.paged_attention(**inputs)
    one = torch.ones(())
    out = lz.paged_attention(**{**inputs, "key_scale": one, "value_scale": one})
    same = {n: inputs[n].bfloat16() for n in ("key_cache", "value_cache")}
    close(out, lz.paged_attention(**{**inputs, **same}), 2e-2)


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("backend", REAL)
def test_a_quantized_cache_is_the_stored_value_times_its_scale(stored: str, backend: str) -> None:
    inputs = values(stored=stored, scales="head", layout="HND")
    wide = {n: inputs[n].float() * inputs[f"{n[:-6]}_scale"].reshape(-1, 1, 1)
            for n in ("key_cache", "value_cache")}
    plain = {**inputs, **wide, "key_scale": None, "value_scale": None}
    close(lz.paged_attention(**inputs, backend=backend), PAGED.reference(**plain))


def test_every_float8_is_looked_up_as_torch_converts_it() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        for wide in (torch.float32, torch.float16, torch.bfloat16):
            torch.testing.assert_close(_pages.cast_stored(every, wide), every.to(wide), rtol=0,
                                       atol=0, equal_nan=True)


# Reading by pieces

@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("order", ["shuffled", "neighbours"])
@pytest.mark.parametrize(("piece", "in_place"),
                         [(1 << 10, 1 << 30), (1 << 10, 1), (1 << 13, 1 << 12)],
                         ids=["gathered", "in place", "either"])
@pytest.mark.parametrize("case", [
    {"context": (70, 33, 1)}, {"context": (64, 64), "window": 20},
    {"context": (90, 40), "lengths_q": (5, 40)},
    {"context": (60, 50), "lengths_q": (3, 2), "causal": False},
    {"context": (60, 31), "lengths_q": (30, 31), "window": 7},
], ids=["decode", "window", "prefix and square", "not causal", "window over queries"])
def test_pieces_of_any_size_join_to_the_whole(case: dict[str, Any], piece: int, in_place: int,
                                              order: str, layout: str,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pages, "PIECE_BYTES", piece)
    monkeypatch.setattr(_pages, "IN_PLACE_BYTES", in_place)
    monkeypatch.setattr(_pages, "BLOCK", 8)
    inputs = values(**case, page_size=4, order=order, layout=layout, lse=True)
    wanted = PAGED.reference(**inputs)
    for got, want in zip(call(kernel("torch.paged_pieces"), inputs), wanted):
        close(got, want)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
@pytest.mark.parametrize(("op", "name"), [(PAGED, "torch.paged_pieces"),
                                          (MLA, "torch.mla_paged_pieces")])
def test_a_scale_that_is_not_positive(op: Any, name: str, scale: float) -> None:
    given = values(op, lengths_q=(70,), context=(16,)) | {"scale": scale}
    close(call(kernel(name), given), op.reference(**given))


def test_neighbouring_pages_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's promise is that no copy is made of them."""
    def no_copy(*args: Any) -> Any:
        raise AssertionError("pages were copied")

    monkeypatch.setattr(_pages.PagedCache, "gather", no_copy)
    for case in ({"context": (640,), "order": "neighbours"},
                 {"context": (128,), "page_size": 64, "layout": "HND"}):
        inputs = values(**case, hq=8, hkv=8, d=128)
        close(call(kernel("torch.paged_pieces"), inputs), PAGED.reference(**inputs))


# Which kernel

def test_the_cpu_gathers_unless_measured_and_says_why_others_do_not(world: None) -> None:
    inputs = values(context=(600, 90), hq=32, hkv=8, d=128)
    if build.is_built() is True:
        assert lz.which("paged_attention", **inputs) == "native.paged_attention"
    lz.configure(rules=(lz.PolicyRule.of("deny", ["native.paged_attention"], "*"),))
    assert lz.which("paged_attention", **inputs) == "torch.paged_gather"
    assert lz.which("paged_attention", **{**inputs, "softcap": 3.0}) == "torch.paged_gather"
    plan = lz.explain("paged_attention", **values(lengths_q=(2, 1, 1)))
    codes = {r.kernel: [reason.code for reason in r.reasons] for r in plan.rejected}
    assert codes["torch.paged_padded"] == [Code.SEQ_LEN_UNSUPPORTED]


def test_layout_page_size_and_dtype_are_facts() -> None:
    facts = lz.explain("paged_attention",
                       **values(layout="HND", page_size=64, stored="int8", scales="one")).facts
    assert (facts["kv_layout"], facts["page_size"], facts["key_cache.dtype"]) == ("HND", 64, "int8")


def test_a_kernel_of_one_page_size_is_refused_by_name(world: None) -> None:
    from layerzero.spec.rules import equals

    lz.register(lz.Kernel("fake.pages", PAGED, lambda: PAGED.reference, prior=1e6,
                          less_work="a test",
                          requires=(equals("page_size", 64, Code.PAGE_SIZE_UNSUPPORTED),)))
    assert lz.which("paged_attention", **values(page_size=64)) == "fake.pages"
    with pytest.raises(lz.errors.NamedKernelRefused, match="page size must be 64, got 16"):
        lz.paged_attention(**values(page_size=16), backend="fake.pages")


def test_a_growing_context_stays_on_one_entry() -> None:
    """A decode loop must not select again for every token."""
    lz.clear_cache()
    selected: list[Any] = []
    stop = lz.subscribe(selected.append)
    inputs = values(context=(17, 20, 30), page_size=16)
    for n in range(17, 30):
        lz.paged_attention(**{**inputs,
                              "context_lens": torch.tensor([n, 20, 30], dtype=torch.int32)})
    stop()
    assert [type(e).__name__ for e in selected].count("Selected") == 1


@pytest.mark.parametrize("op", [PAGED, MLA], ids=lambda op: op.name)
def test_decode_can_be_traced(op: Any) -> None:
    inputs = values(op, context=(17, 5, 40))
    inputs["max_seqlen_q"] = None
    run = getattr(lz, op.name)

    def step(**tensors: Tensor) -> Tensor:
        return run(**{**inputs, **tensors}) * 2.0

    tensors = {n: v for n, v in inputs.items() if isinstance(v, Tensor)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.compile(step, fullgraph=True, backend="aot_eager")(**tensors)
    close(traced, step(**tensors))


# Gradients

def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    return lz.attention(q, k, v, is_causal=True, causal_align="bottom_right")[0].transpose(0, 1)


@pytest.mark.parametrize("window", [-1, 5])
def test_gradients_reach_the_cache(window: int) -> None:
    inputs = values(context=(20,), lengths_q=(6,), window=window, dtype="float64")
    names = ("query", "key_cache", "value_cache")
    leaves = {n: inputs[n].nan_to_num(posinf=0.0).requires_grad_() for n in names}
    assert torch.autograd.gradcheck(
        lambda q, k, v: lz.paged_attention(**{**inputs, "query": q, "key_cache": k,
                                              "value_cache": v}),
        tuple(leaves.values()), fast_mode=True)


def test_gradients_are_those_of_dense_attention() -> None:
    inputs = values(context=(32,), lengths_q=(32,), order="neighbours")
    names = ("query", "key_cache", "value_cache")
    paged = {n: inputs[n].nan_to_num(posinf=0.0).requires_grad_() for n in names}
    plain = {n: t.detach().clone().requires_grad_() for n, t in paged.items()}
    out = lz.paged_attention(**{**inputs, **paged})
    key, value = (plain[n][:2].flatten(0, 1) for n in names[1:])
    want = dense(plain["query"], key, value)
    close(out.detach(), want.detach())
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    (want * weights).sum().backward()
    for n in names:
        close(paged[n].grad, plain[n].grad)


def test_mla_gradients() -> None:
    inputs = values(MLA, context=(9, 6), lengths_q=(4, 1), dtype="float64", ckv=8, kpe=4,
                    page_size=4)
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    leaves = tuple(inputs[n].nan_to_num(posinf=0.0).requires_grad_() for n in names)
    assert torch.autograd.gradcheck(
        lambda *t: lz.mla_paged_attention(**{**inputs, **dict(zip(names, t))}), leaves,
        fast_mode=True)


# What MLA means

@pytest.mark.parametrize("lengths_q", [(), (12, 1, 70)], ids=["decode", "mixed"])
def test_absorbed_mla_is_attention_with_the_projections_undone(lengths_q: tuple[int, ...]) -> None:
    """Keys W_k ckv and values W_v ckv per head: folding W_k into the query and W_v into the output
    changes nothing."""
    heads, dim, ckv, kpe = 3, 10, 24, 8
    context = (30, 5, 70)
    inputs = values(MLA, context=context, lengths_q=lengths_q, heads=heads, ckv=ckv, kpe=kpe,
                    dtype="float64")
    gen = torch.Generator().manual_seed(5)
    up_k, up_v = (torch.randn(heads, dim, ckv, generator=gen, dtype=torch.float64)
                  for _ in range(2))
    tokens = inputs["q_pe"].shape[0]
    plain = torch.randn(tokens, heads, dim, generator=gen, dtype=torch.float64)
    inputs["q_nope"] = torch.einsum("thd,hdc->thc", plain, up_k)
    out = torch.einsum("thc,hdc->thd", lz.mla_paged_attention(**inputs), up_v)
    starts = [0, *torch.tensor(lengths_q or (1,) * 3).cumsum(0).tolist()]
    for i, n in enumerate(context):
        rows, pages = slice(starts[i], starts[i + 1]), inputs["block_table"][i, :-(-n // 16)].long()
        latent, rotary = (inputs[c][pages].flatten(0, 1)[:n] for c in ("ckv_cache", "kpe_cache"))
        key = torch.cat((torch.einsum("nc,hdc->nhd", latent, up_k),
                         rotary[:, None].expand(-1, heads, -1)), -1)
        value = torch.einsum("nc,hdc->nhd", latent, up_v)
        query = torch.cat((plain[rows], inputs["q_pe"][rows]), -1)
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        want = lz.attention(q, k, v, is_causal=True, causal_align="bottom_right",
                            scale=inputs["scale"])
        close(out[rows], want[0].transpose(0, 1), 1e-8)


def test_mla_caches_may_be_views_of_one_buffer() -> None:
    apart, together = values(MLA), values(MLA, one_buffer=True)
    assert not together["ckv_cache"].is_contiguous()
    close(lz.mla_paged_attention(**apart), lz.mla_paged_attention(**together))
