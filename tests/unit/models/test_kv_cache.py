"""KV caches: every kind holds what was appended and attends to it, whatever it does with its pages.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.dispatch import dispatcher as dispatch
from layerzero.models.kv_cache import KVCache
from layerzero.models.page_pool import PagePool
from layerzero.spec.errors import CacheFull

HEADS, KV_HEADS, DIM = 4, 2, 16
STEPS = 32
Code = lz.Code

KINDS: dict[str, dict[str, Any]] = {
    "paged 1": {"kind": "paged", "pages": 400, "page_size": 1},
    "paged 16": {"kind": "paged", "pages": 40, "page_size": 16},
    "paged 64": {"kind": "paged", "pages": 12, "page_size": 64},
    "paged 256": {"kind": "paged", "pages": 5, "page_size": 256},
    "chunked": {"kind": "chunked", "chunk_size": 24},
    "contiguous": {"kind": "contiguous", "sequences": 4, "max_len": 130},
}


def make_cache(kind: str = "paged 16", **options: Any) -> KVCache:
    return lz.kv_cache(**{"kv_heads": KV_HEADS, "head_dim": DIM, **KINDS[kind], **options})


class Stream:
    """The tokens of one sequence, and full attention over them as the truth."""

    def __init__(self, seed: int, total: int, dtype: torch.dtype = torch.float32) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (torch.randn(total, heads, DIM, generator=gen).to(dtype)
                                  for heads in (HEADS, KV_HEADS, KV_HEADS))

    def truth(self, first: int, last: int, window: int = -1, causal: bool = True) -> Tensor:
        q, k, v = (t.double().transpose(0, 1)[None]
                   for t in (self.q[first:last], self.k[:last], self.v[:last]))
        out = lz.op("attention").reference(q, k, v, is_causal=causal, causal_align="bottom_right",
                                           window_left=window)
        return out[0].transpose(0, 1)


def close(got: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompts", [(70, 9, 33), (40, 40, 40)], ids=["ragged", "equal"])
@pytest.mark.parametrize("window", [-1, 20])
def test_prefill_and_decode_equal_full_attention(kind: str, layout: str, prompts: tuple[int, ...],
                                                 window: int) -> None:
    cache = make_cache(kind, layout=layout)
    streams = [Stream(i, n + STEPS) for i, n in enumerate(prompts)]
    names = [cache.add() for _ in prompts]
    parts = list(zip(streams, prompts))
    cache.append(torch.cat([s.k[:n] for s, n in parts]), torch.cat([s.v[:n] for s, n in parts]),
                 names, prompts)
    out = cache.attend(torch.cat([s.q[:n] for s, n in parts]), names, prompts, window_left=window)
    close(out, torch.cat([s.truth(0, n, window) for s, n in parts]))
    for step in range(STEPS):
        at = [n + step for n in prompts]
        k, v, q = (torch.stack([getattr(s, t)[i] for s, i in zip(streams, at)]) for t in "kvq")
        cache.append(k, v, names)
        close(cache.attend(q, names, window_left=window),
              torch.cat([s.truth(i, i + 1, window) for s, i in zip(streams, at)]))
    assert [cache.length(n) for n in names] == [n + STEPS for n in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_some_prefill_while_others_decode(kind: str) -> None:
    cache = make_cache(kind)
    a, b = Stream(1, 60), Stream(2, 60)
    first = cache.add()
    cache.append(a.k[:30], a.v[:30])
    second = cache.add()
    cache.append(torch.cat((a.k[30:31], b.k[:25])), torch.cat((a.v[30:31], b.v[:25])),
                 (first, second), (1, 25))
    out = cache.attend(torch.cat((a.q[30:31], b.q[:25])), (first, second), (1, 25))
    close(out, torch.cat((a.truth(30, 31), b.truth(0, 25))))
    cache.append(torch.cat((b.k[25:31], a.k[31:40])), torch.cat((b.v[25:31], a.v[31:40])),
                 (second, first), (6, 9))
    out = cache.attend(torch.cat((b.q[25:31], a.q[31:40])), (second, first), (6, 9))
    close(out, torch.cat((b.truth(25, 31), a.truth(31, 40))))


@pytest.mark.parametrize("kind", KINDS)
def test_batch_first_tensors_and_the_log_sum_exp(kind: str) -> None:
    cache = make_cache(kind)
    streams = [Stream(i, 21) for i in range(3)]
    for _ in streams:
        cache.add()
    k, v, q = (torch.stack([getattr(s, t) for s in streams]) for t in "kvq")
    cache.append(k, v)
    out, lse = cache.attend(q, return_lse=True)
    assert (tuple(out.shape), tuple(lse.shape)) == ((3, 21, HEADS, DIM), (3, 21, HEADS))
    want, want_lse = lz.op("attention").reference(q, k, v, is_causal=True, return_lse=True,
                                                  layout="bshd")
    close(out, want)
    close(lse, want_lse.transpose(1, 2))


# What selection sees

def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The lz calls that are made from now on, by op and keyword arguments."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for name in ("attention", "paged_attention"):
        public = dispatch.dispatchers[name].public

        def listen(*args: Any, name: str = name, public: Any = public, **kwargs: Any) -> Any:
            calls.append((name, {**kwargs, "key": args[1]}))
            return public(*args, **kwargs)

        monkeypatch.setattr(dispatch.dispatchers[name], "public", listen)
    return calls


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_contiguous_cache_of_one_length_is_one_plain_attention(layout: str,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(monkeypatch)
    cache = make_cache("contiguous", layout=layout)
    streams = [Stream(i, 20) for i in range(3)]
    names = [cache.add() for _ in streams]
    k, v, q = (torch.stack([getattr(s, t) for s in streams]) for t in "kvq")
    cache.append(k, v)
    cache.attend(q)
    name, arguments = calls[0]
    assert name == "attention" and tuple(arguments["key"].shape) == (3, 20, KV_HEADS, DIM)
    # no copy
    assert arguments["key"].untyped_storage().data_ptr() == cache.key.untyped_storage().data_ptr()
    cache.append(streams[0].k[:1], streams[0].v[:1], names[:1])
    cache.attend(q[:, -1:].flatten(0, 1), names)
    cache.attend(q[[0, 2], -1], (names[0], names[2]))
    assert [name for name, _ in calls] == ["attention", "paged_attention", "paged_attention"]


@pytest.mark.parametrize(("kind", "page_size"), [("paged 64", 64), ("chunked", 24)])
def test_page_size_and_layout_go_with_the_call(kind: str, page_size: int,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(monkeypatch)
    cache, s = make_cache(kind, layout="HND"), Stream(0, 5)
    cache.add()
    cache.append(s.k, s.v)
    cache.attend(s.q)
    name, arguments = calls[0]
    assert (name, arguments["kv_layout"], arguments["key"].shape[2]) == ("paged_attention", "HND",
                                                                         page_size)


def test_a_kernel_may_be_named() -> None:
    cache, s = make_cache(), Stream(0, 20)
    cache.add()
    cache.append(s.k, s.v)
    close(cache.attend(s.q, backend="torch.paged_gather"), s.truth(0, 20))
    with pytest.raises(lz.errors.NamedKernelRefused):
        cache.attend(s.q, backend="torch.paged_padded")


# Pages

def test_pages_come_back_and_are_used_again() -> None:
    cache = make_cache("paged 16", pages=6)
    long, short = Stream(0, 60), Stream(1, 20)
    a, b = cache.add(), cache.add()
    cache.append(torch.cat((long.k, short.k)), torch.cat((long.v, short.v)), (a, b), (60, 20))
    assert len(cache.pool.free) == 0
    cache.remove(a)
    assert len(cache.pool.free) == 4 and cache.sequences == (b,)
    c = cache.add()
    cache.append(long.k[:50], long.v[:50], (c,))
    out = cache.attend(torch.cat((short.q[-1:], long.q[49:50])), (b, c))
    close(out, torch.cat((short.truth(19, 20), long.truth(49, 50))))


@pytest.mark.parametrize(("kind", "options", "prompt"), [
    ("paged 16", {"pages": 3}, 49), ("chunked", {"max_chunks": 2}, 49),
    ("contiguous", {"max_len": 48}, 49)])
def test_a_full_cache_says_so_and_is_as_it_was(kind: str, options: dict[str, Any],
                                               prompt: int) -> None:
    cache, s = make_cache(kind, **options), Stream(0, 60)
    name = cache.add()
    with pytest.raises(CacheFull, match="nothing was changed") as caught:
        cache.append(s.k[:prompt], s.v[:prompt])
    assert caught.value.codes == (Code.OUT_OF_MEMORY,) and isinstance(caught.value, MemoryError)
    assert cache.length(name) == 0
    cache.append(s.k[:prompt - 1], s.v[:prompt - 1])
    free = len(cache.pool.free)
    with pytest.raises(CacheFull):
        cache.append(s.k[:1], s.v[:1])
    assert cache.length(name) == prompt - 1 and len(cache.pool.free) == free
    close(cache.attend(s.q[prompt - 2:prompt - 1]), s.truth(prompt - 2, prompt - 1))


def test_no_sequence_of_a_batch_is_written_if_one_has_no_room() -> None:
    cache, s = make_cache("paged 16", pages=3), Stream(0, 40)
    a, b = cache.add(), cache.add()
    with pytest.raises(CacheFull):
        cache.append(s.k[:40], s.v[:40], (a, b), (7, 33))
    cache.append(s.k[:39], s.v[:39], (a, b), (7, 32))
    assert (cache.length(a), cache.length(b)) == (7, 32)


def test_a_page_is_not_released_twice() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    pool.release(pages)
    with pytest.raises(lz.errors.InvalidCall, match="page 0 must be in use") as caught:
        pool.release(pages)
    assert caught.value.codes == (Code.BLOCK_TABLE_INVALID,)
    assert sorted(pool.free) == [0, 1, 2, 3]


def test_a_removed_sequence_is_unknown() -> None:
    cache, s = make_cache(), Stream(0, 3)
    name = cache.add()
    cache.remove(name)
    for use in (lambda: cache.remove(name), lambda: cache.length(name), lambda: cache.fork(name),
                lambda: cache.append(s.k, s.v, (name,)), lambda: cache.attend(s.q, (name,))):
        with pytest.raises(lz.errors.InvalidCall, match="sequence must be one of"):
            use()
    assert cache.add() != name


def test_pages_of_one_sequence_tend_to_be_neighbours() -> None:
    cache, s = make_cache("paged 16"), Stream(0, 60)
    cache.add()
    for i in range(60):
        cache.append(s.k[i:i + 1], s.v[i:i + 1])
    assert cache.block_table().tolist() == [[0, 1, 2, 3]]


# Forks

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", [32, 45])
def test_a_fork_shares_its_prefix_and_goes_its_own_way(kind: str, prefix: int) -> None:
    cache = make_cache(kind)
    base, other = Stream(0, 90), Stream(1, 90)
    a = cache.add()
    cache.append(base.k[:prefix], base.v[:prefix])
    used = len(cache.pool.free)
    b = cache.fork(a)
    assert len(cache.pool.free) == used                        # nothing is copied yet
    twin = Stream(0, 90)
    for t in ("q", "k", "v"):
        getattr(twin, t)[prefix:] = getattr(other, t)[prefix:]
    for i in range(prefix, prefix + 20):
        k, v, q = (torch.stack((getattr(base, t)[i], getattr(twin, t)[i])) for t in "kvq")
        cache.append(k, v, (a, b))
        close(cache.attend(q, (a, b)), torch.cat((base.truth(i, i + 1), twin.truth(i, i + 1))))
    cache.remove(a)
    cache.append(twin.k[prefix + 20:prefix + 21], twin.v[prefix + 20:prefix + 21], (b,))
    close(cache.attend(twin.q[prefix + 20:prefix + 21], (b,)), twin.truth(prefix + 20, prefix + 21))
    cache.remove(b)
    assert not any(cache.pool.uses)


def test_full_pages_stay_shared() -> None:
    cache, s = make_cache("paged 16"), Stream(0, 40)
    a = cache.add()
    cache.append(s.k, s.v)
    b = cache.fork(a)
    cache.append(s.k[:2], s.v[:2], (a, b))
    first, second = cache.block_table((a, b)).tolist()
    assert first[:2] == second[:2] and first[2] != second[2]


# Layouts and dtypes

@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_changes_its_layout_and_keeps_what_it_holds(kind: str) -> None:
    cache, s = make_cache(kind), Stream(0, 41)
    cache.add()
    cache.append(s.k[:30], s.v[:30])
    before = cache.gather(0)
    cache.relayout("HND")
    assert cache.key.shape[1:] == (KV_HEADS, cache.page_size, DIM)
    for was, now in zip(before, cache.gather(0)):
        assert torch.equal(was, now)
    cache.append(s.k[30:], s.v[30:])
    close(cache.attend(s.q[30:]), s.truth(30, 41))
    cache.relayout("NHD")
    cache.relayout("NHD")
    for held, original in zip(cache.gather(0), (s.k, s.v)):
        assert torch.equal(held, original)


QUANTIZED = {torch.float8_e4m3fn: 0.1, torch.float8_e5m2: 0.2, torch.int8: 0.02}


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("kind", ["paged 16", "chunked", "contiguous"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_quantized_cache_comes_near(kind: str, dtype: torch.dtype, layout: str) -> None:
    cache, s = make_cache(kind, dtype=dtype, layout=layout), Stream(0, 60)
    name = cache.add()
    cache.append(s.k[:50], s.v[:50])
    assert cache.key.dtype == dtype and tuple(cache.key_scale.shape) == (KV_HEADS,)
    cache.append(s.k[50:], s.v[50:])
    key, value = cache.gather(name)
    for held, original in ((key, s.k), (value, s.v)):
        assert (held - original).abs().max() < QUANTIZED[dtype] * original.abs().max()
    out, exact = cache.attend(s.q[50:]), s.truth(50, 60)
    close(out, exact, 4 * QUANTIZED[dtype])
    # and what is stored is attended to exactly
    s.k, s.v = key, value
    close(out, s.truth(50, 60), 1e-4)


def test_given_scales_are_kept_and_what_exceeds_them_is_clamped() -> None:
    cache = make_cache(dtype=torch.int8, key_scale=0.01, value_scale=torch.tensor([0.5, 0.25]))
    cache.add()
    ones = torch.ones(1, KV_HEADS, DIM)
    cache.append(ones * 5, ones * 100)
    key, value = cache.gather(0)
    close(key, torch.full_like(key, 1.27))
    assert value[0, :, 0].tolist() == [63.5, 31.75]


def test_a_cache_of_another_float_than_the_query_is_refused() -> None:
    for kind in ("paged 16", "contiguous"):
        cache, s = make_cache(kind, dtype=torch.float16), Stream(0, 5)
        cache.add()
        cache.append(s.k, s.v)
        with pytest.raises(lz.errors.InvalidCall, match="KV_CACHE_DTYPE_MISMATCH"):
            cache.attend(s.q)
        close(cache.attend(s.q.half()), s.truth(0, 5), 5e-3)


def test_what_is_appended_leaves_no_gradient_behind() -> None:
    cache, s = make_cache(), Stream(0, 5)
    cache.add()
    cache.append(s.k.requires_grad_(), s.v)
    assert not cache.key.requires_grad


# Encoder and decoder

@pytest.mark.parametrize("kind", KINDS)
def test_the_encoders_keys_stay_apart(kind: str) -> None:
    cache = make_cache(kind, cross_len=50)
    a, b = cache.add(), cache.add()
    encoder = [Stream(5, 50), Stream(6, 50)]
    decoder = [Stream(7, 40), Stream(8, 40)]
    k, v = (torch.cat((getattr(encoder[0], t), getattr(encoder[1], t)[:13])) for t in "kv")
    cache.cross.append(k, v, (a, b), (50, 13))
    for i in range(10):
        k, v, q = (torch.stack([getattr(s, t)[i] for s in decoder]) for t in "kvq")
        cache.append(k, v)
        close(cache.attend(q), torch.cat([s.truth(i, i + 1) for s in decoder]))
        for row, (s, n) in enumerate(zip(encoder, (50, 13))):
            full = Stream(9, n)
            full.q, full.k, full.v = q[row:row + 1], s.k[:n], s.v[:n]
            want = lz.op("attention").reference(*(t.double().transpose(0, 1)[None]
                                                  for t in (full.q, full.k, full.v)))
            close(cache.cross.attend(q)[row], want[0, :, 0])
    assert (cache.length(a), cache.cross.length(a), cache.cross.length(b)) == (10, 50, 13)


def test_the_encoders_keys_are_written_once_and_belong_to_the_decoder() -> None:
    cache, s = make_cache(cross_len=20), Stream(0, 20)
    a = cache.add()
    cross = cache.cross
    cross.append(s.k, s.v)
    with pytest.raises(lz.errors.InvalidCall, match="written once"):
        cross.append(s.k[:1], s.v[:1])
    with pytest.raises(lz.errors.InvalidCall, match="CAUSAL"):
        cross.attend(s.q, is_causal=True)
    for use in (cross.add, lambda: cross.remove(a), lambda: cross.fork(a)):
        with pytest.raises(lz.errors.InvalidCall, match="decoder"):
            use()
    b = cache.fork(a)
    assert cross.length(b) == 20 and cross.block_table((a, b)).tolist() == [[0], [0]]
    cache.remove(a)
    close(cross.attend(s.q[:1], (b,)), s.truth(0, 20, causal=False)[:1])
    cache.remove(b)
    assert not any(cross.pool.uses)


def test_cross_needs_its_size() -> None:
    with pytest.raises(lz.errors.InvalidCall, match="cross_len is required"):
        _ = make_cache().cross


# Bad arguments

def test_bad_arguments_are_named() -> None:
    s = Stream(0, 12)
    with pytest.raises(lz.errors.InvalidCall,
                       match="kind must be one of contiguous, paged, chunked, got rolling"):
        lz.kv_cache("rolling", kv_heads=1, head_dim=8)
    for options, word in (({"layout": "HDN"}, "layout must be"), ({"pages": 0}, "pages must be"),
                          ({"page_size": 0}, "page_size must be"),
                          ({"dtype": torch.int32}, "dtype must be"),
                          ({"kv_heads": 0}, "kv_heads must be"),
                          ({"key_scale": 1.0}, "key_scale must be absent"),
                          ({"dtype": torch.int8, "value_scale": torch.ones(3)},
                           "value_scale must be one number or 2")):
        with pytest.raises(lz.errors.InvalidCall, match=word):
            make_cache(**options)
    with pytest.raises(TypeError, match="max_len"):
        make_cache(max_len=3)
    cache = make_cache()
    a, b = cache.add(), cache.add()
    bad: list[tuple[tuple[Any, ...], str]] = [
        ((s.k, s.v, (a, a), (6, 6)), "each sequence at most once"),
        ((s.k, s.v, (a, b)), "lengths is required"),
        ((s.k, s.v, (a, b), (6, 7)), "lengths must be 2 numbers of sum 12"),
        ((s.k, s.v, (a, b), (13, -1)), "lengths must be"),
        ((s.k, s.v[:11], (a, b), (6, 6)), "the rows of value"),
        ((s.q, s.v, (a,)), r"key must be \(\.\.\., 2, 16\)"),
        ((s.k, s.v[..., :8], (a,)), "value must be"),
        ((s.k[0], s.v, (a,)), "key must have 3 .packed. or 4"),
        ((s.k[None], s.v[None]), r"key.shape\[0\] must be 2"),
        ((s.k, s.v, (99,)), "sequence must be one of")]
    for arguments, word in bad:
        with pytest.raises(lz.errors.InvalidCall, match=word):
            cache.append(*arguments)
    assert (cache.length(a), cache.length(b), len(cache.pool.free)) == (0, 0, 40)
    with pytest.raises(lz.errors.InvalidCall, match="append the keys of these tokens first"):
        cache.attend(s.q, (a,))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_appends_and_batches(kind: str) -> None:
    cache, s = make_cache(kind), Stream(0, 5)
    assert tuple(cache.attend(s.q[:0], ()).shape) == (0, HEADS, DIM)
    a, b = cache.add(), cache.add()
    cache.append(s.k, s.v, (a, b), (5, 0))
    out = cache.attend(s.q, (a, b), (5, 0))
    close(out, s.truth(0, 5))
    assert cache.length(b) == 0 and cache.gather(b)[0].shape == (0, KV_HEADS, DIM)
