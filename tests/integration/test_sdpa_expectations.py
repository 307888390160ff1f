"""What torch promises of F.scaled_dot_product_attention, asked of lz.attention in its place."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import layerzero as lz

pytestmark = pytest.mark.integration

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-5),
             torch.float16: (2e-3, 2e-3),
             torch.bfloat16: (2e-2, 2e-2)}


def stand_in(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
             enable_gqa=False):
    """lz.attention with torch's signature and torch's defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lz.errors.CausalAlignmentWarning)
        return lz.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def same(*args, **kwargs):
    want = F.scaled_dot_product_attention(*args, **kwargs)
    rtol, atol = TOLERANCE[want.dtype]
    for _ in range(2):
        got = stand_in(*args, **kwargs)
        assert got.shape == want.shape and got.dtype == want.dtype and got.device == want.device
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    return got


# dtypes, shapes, flags

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(8, 8), (1, 1), (1, 17), (17, 5), (33, 64)])
@pytest.mark.parametrize("dim", [8, 20, 64])
def test_dtypes_lengths_and_widths(dtype, causal, seq_q, seq_k, dim):
    same(rand(2, 3, seq_q, dim, dtype=dtype), rand(2, 3, seq_k, dim, dtype=dtype),
         rand(2, 3, seq_k, dim, dtype=dtype),
         is_causal=causal)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (1, 1), (2, 2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_ranks(lead, causal):
    same(rand(*lead, 7, 16), rand(*lead, 9, 16, seed=1), rand(*lead, 9, 16, seed=2),
         is_causal=causal)


@pytest.mark.parametrize("value_dim", [1, 8, 40])
def test_a_value_of_another_width(value_dim):
    same(rand(2, 2, 5, 16), rand(2, 2, 6, 16), rand(2, 2, 6, value_dim))


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 0, 4, 8), (2, 2, 0, 8)])
def test_empty(shape):
    """Torch itself divides by zero where there are no heads (x86, at least to 2.11)."""
    q = rand(*shape)
    for _ in range(2):
        got = stand_in(q, q, q)
        assert got.shape == q.shape and got.dtype == q.dtype


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_triangle_is_top_left_also_where_it_is_no_square(causal):
    q, k, v = rand(1, 1, 3, 8), rand(1, 1, 6, 8), rand(1, 1, 6, 8, seed=1)
    got = same(q, k, v, is_causal=True)
    triangle = torch.ones(3, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, triangle))
    torch.testing.assert_close(got[:, :, 0], v[:, :, 0])


# scale

@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_scale(scale, causal):
    q, k, v = (rand(2, 2, 9, 16, seed=i) for i in range(3))
    same(q, k, v, scale=scale, is_causal=causal)


@pytest.mark.parametrize("dim", [1, 16, 63])
def test_no_scale_is_one_over_the_root_of_the_width(dim):
    q, k, v = (rand(2, 2, 9, dim, seed=i) for i in range(3))
    torch.testing.assert_close(same(q, k, v), same(q, k, v, scale=1 / math.sqrt(dim)))


# masks

SHAPES = [(5, 7), (1, 7), (5, 1), (1, 1), (4, 5, 7), (1, 5, 7), (2, 4, 5, 7), (2, 1, 5, 7),
          (1, 4, 1, 7), (2, 1, 1, 7),
          (1, 1, 5, 7)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["bool", "float", "both infinities away"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(shape, kind, dtype):
    q, k, v = (rand(2, 4, n, 16, dtype=dtype, seed=i) for i, n in enumerate((5, 7, 7)))
    mask = rand(*shape, dtype=dtype, seed=9)
    if kind == "bool":
        mask = mask > -1
    elif kind != "float":
        mask = mask.masked_fill(mask > 1, -math.inf)
    same(q, k, v, mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_with_everything_masked_is_zero(dtype, kind):
    q, k, v = (rand(1, 2, 4, 8, dtype=dtype, seed=i) for i in range(3))
    seen = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    mask = seen if kind == "bool" else torch.zeros(4, 4, dtype=dtype).masked_fill(~seen, -math.inf)
    got = same(q, k, v, mask)
    assert (got[:, :, [1, 3]] == 0).all() and (got[:, :, [0, 2]] != 0).all()


def test_gradients_of_rows_with_everything_masked_are_zero_not_nan():
    q, k, v = (rand(1, 2, 4, 8, seed=i).requires_grad_() for i in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    stand_in(q, k, v, mask).sum().backward()
    assert not any(t.grad.isnan().any() for t in (q, k, v))
    assert (q.grad[:, :, 1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float64])
def test_a_mask_of_the_wrong_dtype_raises(dtype):
    q = rand(1, 1, 4, 8)
    for fn in (F.scaled_dot_product_attention, stand_in):
        with pytest.raises((RuntimeError, ValueError)):
            fn(q, q, q, torch.ones(4, 4, dtype=dtype))


def test_a_mask_beside_the_causal_flag_hides_what_either_hides():
    """As torch's fused implementations do it; where only MATH is allowed torch refuses it."""
    q, mask = rand(1, 1, 4, 8), torch.tensor([[True, False, True, True]] * 4)
    want = F.scaled_dot_product_attention(q, q, q, mask & torch.ones(4, 4, dtype=bool).tril())
    torch.testing.assert_close(stand_in(q, q, q, mask, is_causal=True), want, rtol=1e-5, atol=1e-5)
    with sdpa_kernel(SDPBackend.MATH):
        for fn in (F.scaled_dot_product_attention, stand_in):
            with pytest.raises((RuntimeError, ValueError)):
                fn(q, q, q, mask, is_causal=True)


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (2, 1, 4, 4), (1, 3, 4, 4)])
def test_a_mask_that_does_not_broadcast_raises(shape):
    q = rand(1, 2, 4, 8)
    for fn in (F.scaled_dot_product_attention, stand_in):
        with pytest.raises((RuntimeError, ValueError)):
            fn(q, q, q, torch.ones(shape, dtype=torch.bool))


# heads

@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads(heads, kv_heads, causal, dtype):
    same(rand(2, heads, 9, 16, dtype=dtype), rand(2, kv_heads, 9, 16, dtype=dtype, seed=1),
         rand(2, kv_heads, 9, 16, dtype=dtype, seed=2), is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 3), (2, 4)])
def test_unequal_heads_raise_unless_groups_are_enabled(heads, kv_heads):
    call = rand(1, heads, 4, 8), rand(1, kv_heads, 4, 8), rand(1, kv_heads, 4, 8)
    for fn in (F.scaled_dot_product_attention, stand_in):
        with pytest.raises((RuntimeError, ValueError)):
            fn(*call, enable_gqa=False)


def test_heads_that_do_not_divide_raise():
    call = rand(1, 4, 4, 8), rand(1, 3, 4, 8), rand(1, 3, 4, 8)
    for fn in (F.scaled_dot_product_attention, stand_in):
        with pytest.raises((RuntimeError, ValueError)):
            fn(*call, enable_gqa=True)


# mistakes

@pytest.mark.parametrize("call", [
    ((1, 1, 4, 8), (1, 1, 4, 9), (1, 1, 4, 8)), ((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 5, 8)),
    ((8,), (8,), (8,)), ((2, 1, 4, 8), (3, 1, 4, 8), (3, 1, 4, 8))])
def test_sizes_that_do_not_fit_raise(call):
    with pytest.raises((RuntimeError, ValueError)):    # some of these torch reads past the end for
        stand_in(*(rand(*shape) for shape in call))


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_dtypes_that_differ_raise(odd):
    tensors = [rand(1, 1, 4, 8, dtype=torch.float64 if i == odd else torch.float32)
               for i in range(3)]
    for fn in (F.scaled_dot_product_attention, stand_in):
        with pytest.raises((RuntimeError, ValueError)):
            fn(*tensors)


def test_devices_that_differ_raise():
    q = rand(1, 1, 4, 8)
    for call in ((q, q.to("meta"), q), (q, q, q.to("meta"))):
        with pytest.raises((RuntimeError, ValueError)):
            stand_in(*call)


def test_integers_raise():
    q = torch.ones(1, 1, 4, 8, dtype=torch.int64)
    for fn in (F.scaled_dot_product_attention, stand_in):
        with pytest.raises((RuntimeError, ValueError)):
            fn(q, q, q)


# strides

def views(shape):
    b, h, s, d = shape
    yield rand(*shape)
    yield rand(b, s, h, d).transpose(1, 2)
    yield rand(b, h, d, s).transpose(2, 3)
    yield rand(1, h, s, d).expand(shape)
    yield rand(b, 1, 1, d).expand(shape)
    yield rand(b, h, s, d + 3)[..., 1:-2]
    yield rand(b, h, s, 2 * d)[..., ::2]
    yield rand(b, h, 2 * s, d)[:, :, ::2]
    yield rand(b, s, h * d * 3).view(b, s, 3, h, d)[:, :, 2].transpose(1, 2)


@pytest.mark.parametrize(("i", "j"),
                         [*((i, i) for i in range(9)), *((i, (i + 4) % 9) for i in range(9))])
@pytest.mark.parametrize("causal", [False, True])
def test_expanded_transposed_and_sliced_inputs(i, j, causal):
    q, k = list(views((2, 3, 6, 8)))[i], list(views((2, 3, 6, 8)))[j]
    same(q, k, k, is_causal=causal)


def test_the_result_is_fresh_memory():
    q, k, v = (rand(1, 2, 5, 8, seed=i) for i in range(3))
    out = stand_in(q, k, v)
    before = [t.clone() for t in (q, k, v)]
    out.add_(1)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before))


# gradients

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["plain", "causal", "bool mask", "float mask", "groups", "scale",
                                  "cross"])
def test_gradients_are_those_of_the_math(dtype, form):
    seq_k = 9 if form == "cross" else 6
    kv_heads = 1 if form == "groups" else 2
    start = [rand(2, h, s, 8, dtype=torch.float64, seed=i)
             for i, (h, s) in enumerate(((2, 6), (kv_heads, seq_k), (kv_heads, seq_k)))]
    masks = {"bool mask": torch.ones(6, 6, dtype=torch.bool).tril(),
             "float mask": rand(6, 6, dtype=torch.float64)}
    mask = masks.get(form)
    options = {"causal": {"is_causal": True}, "scale": {"scale": 0.7},
               "groups": {"enable_gqa": True}}.get(form, {})

    def gradients(fn, dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in start]
        m = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
        out = fn(*leaves, m, **options)
        out.backward(rand(*out.shape, dtype=torch.float64, seed=5).to(dtype))
        return [t.grad.double() for t in leaves]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = gradients(F.scaled_dot_product_attention, torch.float64)
        eager = gradients(F.scaled_dot_product_attention, dtype)
    ours = gradients(stand_in, dtype)
    for mine, theirs, want in zip(ours, eager, exact):
        bound = 2 * (theirs - want).abs().max() + TOLERANCE[dtype][1]
        assert (mine - want).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 6), (1, 6), (2, 1, 6, 6)])
def test_a_mask_may_want_a_gradient(dtype, shape):
    q, k, v = (rand(2, 2, 6, 8, dtype=dtype, seed=i) for i in range(3))
    ours, theirs = (rand(*shape, dtype=dtype, seed=4).requires_grad_() for _ in range(2))
    upstream = rand(2, 2, 6, 8, dtype=dtype, seed=6)
    stand_in(q, k, v, ours).backward(upstream)
    F.scaled_dot_product_attention(q, k, v, theirs).backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", list(itertools.product((False, True), repeat=3)))
def test_any_of_the_three_may_want_a_gradient(which):
    tensors = [rand(1, 2, 5, 8, seed=i).requires_grad_(w) for i, w in enumerate(which)]
    out = stand_in(*tensors)
    assert out.requires_grad == any(which)
    if any(which):
        out.sum().backward()
        assert [t.grad is not None for t in tensors] == list(which)


def test_second_derivatives():
    q, k, v = (rand(1, 1, 3, 4, dtype=torch.float64, seed=i).requires_grad_() for i in range(3))
    leaves = (q, k, v)
    for fn in (F.scaled_dot_product_attention, stand_in):
        try:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                first = torch.autograd.grad(fn(*leaves).square().sum(), leaves, create_graph=True)
                torch.autograd.grad(sum(g.sum() for g in first), leaves)
        except RuntimeError as e:              # torch's own flash has none either, and says so
            assert fn is stand_in and "derivative" in str(e)


# dropout

@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_repeats_under_a_seed(p, causal):
    q, k, v = (rand(2, 2, 16, 8, seed=i) for i in range(3))
    torch.manual_seed(1)
    first = stand_in(q, k, v, dropout_p=p, is_causal=causal)
    torch.manual_seed(1)
    second = stand_in(q, k, v, dropout_p=p, is_causal=causal)
    third = stand_in(q, k, v, dropout_p=p, is_causal=causal)
    assert torch.equal(first, second) and not torch.equal(first, third)


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_a_probability_out_of_range_raises(p):
    q = rand(1, 1, 4, 8)
    for fn in (F.scaled_dot_product_attention, stand_in):
        with pytest.raises((RuntimeError, ValueError)):
            fn(q, q, q, dropout_p=p)


def test_dropout_scales_what_it_keeps():
    q, k = (rand(4, 4, 32, 8, seed=i) for i in range(2))
    v = torch.ones(4, 4, 32, 8)
    torch.manual_seed(2)
    out = stand_in(q, k, v, dropout_p=0.5)
    assert abs(out.mean().item() - 1) < 0.1


# numbers

@pytest.mark.parametrize("factor", [10, 100, 600])
def test_large_logits_in_half_precision(factor):
    q, k, v = (rand(2, 2, 16, 64, dtype=torch.float16, seed=i) for i in range(3))
    got = stand_in(q * factor, k, v)
    want = F.scaled_dot_product_attention((q * factor).double(), k.double(), v.double())
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=5e-2, atol=5e-2)


def test_equal_keys_give_the_mean_of_the_values():
    q, k, v = rand(1, 1, 3, 8), torch.ones(1, 1, 5, 8), rand(1, 1, 5, 8)
    torch.testing.assert_close(stand_in(q, k, v), v.mean(2, keepdim=True).expand(1, 1, 3, 8))


def test_a_not_a_number_stays_in_its_row():
    q, k, v = (rand(1, 1, 4, 8, seed=i) for i in range(3))
    q[0, 0, 2] = math.nan
    out = stand_in(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), equal_nan=True)
    assert out[0, 0, [0, 1, 3]].isfinite().all()


# modes

def test_modules_that_call_torch_can_call_the_stand_in(monkeypatch):
    """A transformer layer of torch with the stand-in in place of the function it calls."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x, memory = rand(2, 6, 32), rand(2, 9, 32, seed=1)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(6)
    want = layer(x, memory, tgt_mask=causal, tgt_is_causal=True)
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return stand_in(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    got = layer(x, memory, tgt_mask=causal, tgt_is_causal=True)
    assert len(calls) == 2
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = (rand(2, 2, 8, 16, seed=i) for i in range(3))
    with torch.autocast("cpu", dtype=dtype):
        same(q, k, v)
        same(q, k, v, is_causal=True)
        same(q, k, v, rand(8, 8))


def test_inference_mode_and_no_grad():
    q, k, v = (rand(1, 2, 5, 8, seed=i).requires_grad_() for i in range(3))
    with torch.inference_mode():
        assert stand_in(q, k, v).is_inference()
    with torch.no_grad():
        assert not stand_in(q, k, v).requires_grad
    assert stand_in(q, k, v).requires_grad
