"""Layouts and strides: what order the dimensions are in, and how they lie in memory."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import ATTENTION, path_of, qkv

import layerzero as lz
from layerzero.spec.errors import AmbiguousLayoutWarning, InvalidCall
from layerzero.spec.reason import Code


def check(q, k, v, **kwargs):
    want = ATTENTION.reference(*(t.double() for t in (q, k, v)), **kwargs)
    got = lz.attention(q, k, v, **kwargs)
    for g, w in zip(*((got, want) if isinstance(got, tuple) else ([got], [want]))):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)
    return got


def bshd(*args, **kwargs):
    return qkv(*args, layout="bshd", **kwargs)


# bshd

@pytest.mark.parametrize("kwargs", [
    {}, {"is_causal": True}, {"window_left": 2}, {"softcap": 5.0}, {"return_lse": True},
    {"scale": 0.5}, {"attn_mask": torch.ones(7, 7, dtype=torch.bool).tril()},
    {"alibi_slopes": torch.tensor([1.0, 0.5, 0.25, 0.125])},
    {"dropout_p": 0.0, "enable_gqa": True}])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_bshd_is_bhsd_with_two_dimensions_swapped(kwargs, kv_heads):
    q, k, v = bshd(7, heads=4, kv_heads=kv_heads, batch=2)
    got = check(q, k, v, layout="bshd", **kwargs)
    same = lz.attention(*(t.transpose(1, 2) for t in (q, k, v)), **kwargs)
    if kwargs.get("return_lse"):
        assert got[1].shape == (2, 4, 7)
        torch.testing.assert_close(got[1], same[1])
        got, same = got[0], same[0]
    assert got.shape == (2, 7, 4, 16)
    torch.testing.assert_close(got, same.transpose(1, 2))


def test_bshd_keeps_gradients():
    leaves = [t.requires_grad_() for t in bshd(5, 9, heads=2)]
    lz.attention(*leaves, layout="bshd").square().sum().backward()
    wide = [t.detach().double().requires_grad_() for t in leaves]
    ATTENTION.reference(*wide, layout="bshd").square().sum().backward()
    for a, b in zip(leaves, wide):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


def test_the_view_is_told_and_can_be_refused(world):
    q, k, v = bshd(heads=2)
    plan = lz.explain("attention", q, k, v, layout="bshd")
    assert ([str(t) for t in plan.steps[0].transforms] == ["layout(bhsd)"]
            and plan.to_json()["transform_bytes"] == 0)
    lz.configure(strict_mode=True)
    plan = lz.explain("attention", q, k, v, layout="bshd")
    assert plan.kernel == "reference.attention" and not plan.steps[0].transforms
    assert Code.LAYOUT_UNSUPPORTED in [r.code for r in plan.why_not("torch.sdpa")]
    check(q, k, v, layout="bshd")


def test_the_layouts_have_entries_of_their_own(world, path):
    run = path_of("attention", path)
    x = torch.randn(2, 4, 4, 8)
    for _ in range(3):
        a, b = run(x, x, x), run(x, x, x, layout="bshd")
        assert not torch.allclose(a, b)
        torch.testing.assert_close(b, run(*(x.transpose(1, 2),) * 3).transpose(1, 2))


# auto

@pytest.mark.parametrize(("shapes", "layout"), [
    ([(2, 4, 8, 16), (2, 2, 9, 16), (2, 2, 9, 16)], "bhsd"),       # 8 is no multiple of 9
    ([(2, 8, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)], "bshd"),
    ([(1, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)], "bhsd"),
    ([(1, 5, 3, 8), (1, 7, 3, 8), (1, 7, 3, 8)], "bshd"),
    ([(1, 1, 5, 8), (1, 1, 7, 8), (1, 1, 7, 8)], "bhsd"),
])
def test_auto_is_decided_by_the_shapes_where_they_decide(shapes, layout):
    q, k, v = (torch.randn(s) for s in shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = lz.attention(q, k, v, layout="auto")
    torch.testing.assert_close(got, lz.attention(q, k, v, layout=layout))
    assert lz.explain("attention", q, k, v, layout="auto").facts["layout"] == layout


@pytest.mark.parametrize("shapes", [
    [(2, 4, 8, 16)] * 3, [(1, 8, 8, 16)] * 3, [(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)],
    [(1, 1, 1, 8)] * 3, [(2, 4, 8, 16), (2, 3, 5, 16), (2, 3, 5, 16)]])
def test_auto_never_guesses(shapes):
    with pytest.raises(InvalidCall) as caught:
        lz.attention(*(torch.randn(s) for s in shapes), layout="auto")
    assert caught.value.codes == (Code.LAYOUT_AMBIGUOUS,)
    assert (str(shapes[0]) in str(caught.value)
            and "layout='bhsd' or layout='bshd'" in str(caught.value))


def test_auto_takes_transposed_storage_for_bhsd_and_says_so():
    q, k, v = (torch.randn(2, 8, 4, 16).transpose(1, 2) for _ in range(3))
    with pytest.warns(AmbiguousLayoutWarning, match=r"\(2, 4, 8, 16\).*'bhsd'"):
        got = lz.attention(q, k, v, layout="auto")
    torch.testing.assert_close(got, lz.attention(q, k, v))
    with pytest.raises(InvalidCall) as caught:         # one of them is stored the other way
        lz.attention(q, k.contiguous(), v, layout="auto")
    assert caught.value.codes == (Code.LAYOUT_AMBIGUOUS,)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("shape", [(4, 8), (4, 8, 16), (1, 2, 4, 8, 16), (16,)])
def test_auto_wants_four_dimensions_of_each(odd, shape):
    tensors = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    tensors[odd] = torch.randn(shape)
    with pytest.raises(InvalidCall) as caught:
        lz.attention(*tensors, layout="auto")
    assert caught.value.codes == (Code.WRONG_NDIM,)
    assert ("query", "key", "value")[odd] in str(caught.value)


@pytest.mark.parametrize("layout", ["BHSD", "", "sbhd", "thd"])
def test_an_unknown_layout_is_named(layout):
    with pytest.raises(InvalidCall) as caught:
        lz.attention(*qkv(), layout=layout)
    assert caught.value.codes == (Code.LAYOUT_UNKNOWN,) and "bshd" in str(caught.value)


# strides

def stored(kind, shape):
    gen = torch.Generator().manual_seed(sum(shape))
    if kind == "transposed":
        return torch.randn(shape[0], shape[2], shape[1], shape[3], generator=gen).transpose(1, 2)
    if kind == "padded":
        return torch.randn(*shape[:-1], shape[-1] + 5, generator=gen)[..., :shape[-1]]
    if kind == "sparse":
        return torch.randn(*shape[:-1], 2 * shape[-1], generator=gen)[..., ::2]
    if kind == "last first":
        return torch.randn(shape[0], shape[1], shape[3], shape[2], generator=gen).transpose(2, 3)
    if kind == "spread":
        return torch.randn(1, 1, *shape[2:], generator=gen).expand(shape)
    if kind == "one element":
        return torch.randn(1, 1, 1, 1, generator=gen).expand(shape)
    if kind == "shifted":
        return torch.randn(1 + shape[0] * shape[1] * shape[2] * shape[3],
                           generator=gen)[1:].view(shape)
    if kind == "packed":                       # one projection for query, key and value
        return torch.randn(shape[0], shape[2], 3, shape[1], shape[3],
                           generator=gen)[:, :, 1].transpose(1, 2)
    return torch.randn(shape, generator=gen)


KINDS = ("plain", "transposed", "padded", "sparse", "last first", "spread", "one element",
         "shifted", "packed")


@pytest.mark.parametrize("kind_k", KINDS)
@pytest.mark.parametrize("kind_q", KINDS)
def test_any_mixture_of_strides(kind_q, kind_k):
    q, k, v = stored(kind_q, (2, 4, 7, 8)), stored(kind_k,
                                                   (2, 4, 9, 8)), stored(kind_k, (2, 4, 9, 8))
    for _ in range(2):
        check(q, k, v)
    check(q, k, v, is_causal=True, causal_align="bottom_right")


def test_gaps_in_the_last_dimension_are_closed_by_a_copy_that_is_told(world):
    q, k, v = (stored("sparse", (1, 2, 8, 16)) for _ in range(3))
    plan = lz.explain("attention", q, k, v)
    flash = next(s for s in plan.steps if s.kernel == "torch.sdpa_flash")
    assert [str(t) for t in flash.transforms] == ["contiguous(query)", "contiguous(key)",
                                                  "contiguous(value)"]
    assert sum(t.bytes for t in flash.transforms) == 3 * q.numel() * 4
    with lz.prefer("torch.sdpa_flash"):
        torch.testing.assert_close(lz.attention(q, k, v),
                                   lz.attention(*(t.contiguous() for t in (q, k, v))))
    lz.configure(strict_mode=True)
    plan = lz.explain("attention", q, k, v)
    assert {Code.STRIDE_LAST_DIM,
            Code.STRICT_TRANSFORM_REFUSED} <= {r.code for r in plan.why_not("torch.sdpa_flash")}
    check(q, k, v)


@pytest.mark.parametrize("backend", ["torch.sdpa", "torch.sdpa_math", "torch.sdpa_flash",
                                     "reference.attention"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cpu_kernel_takes_every_stride(backend, kind):
    q, k, v = (stored(kind, (2, 2, 6, 8)) for _ in range(3))
    want = ATTENTION.reference(*(t.double() for t in (q, k, v)))
    torch.testing.assert_close(lz.attention(q, k, v, backend=backend).double(), want, rtol=1e-5,
                               atol=1e-5)


def test_a_mask_with_any_strides():
    q, k, v = qkv(6, 8, heads=2, batch=2)
    for mask in (torch.randn(8, 6).T, torch.randn(2, 1, 6, 16)[..., ::2],
                 torch.randn(1, 1, 1, 8).expand(2, 2, 6, 8),
                 torch.randn(6, 9)[:, 1:]):
        want = ATTENTION.reference(*(t.double() for t in (q, k, v)), mask.double())
        torch.testing.assert_close(lz.attention(q, k, v, mask).double(), want, rtol=1e-5, atol=1e-5)


def test_empty_tensors_with_odd_strides_have_one_meaning():
    odd = torch.empty(0, 2, 4, 16)[..., ::2]
    assert odd.is_contiguous() and odd.stride(-1) == 2
    plan = lz.explain("attention", odd, odd, odd)
    assert not any(t.kind == "contiguous" for s in plan.steps for t in s.transforms)
    assert lz.attention(odd, odd, odd).shape == (0, 2, 4, 8)
