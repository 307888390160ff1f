"""Calls of lz.attention as users write them: the right answer in every form, or the right reason.
"""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from helpers import ATTENTION, nvidia, path_of, qkv

import layerzero as lz
from layerzero.spec.errors import CausalAlignmentWarning, InvalidCall
from layerzero.spec.event import Adapted
from layerzero.spec.reason import Code

F = torch.nn.functional.scaled_dot_product_attention
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def exact(q, k, v, attn_mask=None, **kwargs):
    """The contract's formula in float64, whatever the inputs are."""
    wide = [t.double() for t in (q, k, v)]
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.double()
    return ATTENTION.reference(*wide, attn_mask, **kwargs)


def check(q, k, v, attn_mask=None, **kwargs):
    """lz.attention against the formula in float64, by both ways of calling it twice."""
    want = exact(q, k, v, attn_mask, **kwargs)
    for _ in range(2):                         # once chosen, once remembered
        got = lz.attention(q, k, v, attn_mask, **kwargs)
        for g, w in zip(*((got, want) if isinstance(got, tuple) else ([got], [want]))):
            assert g.shape == w.shape
            torch.testing.assert_close(g.double(), w, rtol=TOLERANCE[q.dtype],
                                       atol=TOLERANCE[q.dtype])
    return got


def refused(*args, **kwargs):
    with pytest.raises(InvalidCall) as caught:
        lz.attention(*args, **kwargs)
    for _ in range(2):
        with pytest.raises(InvalidCall) as again:      # the same the next time
            lz.attention(*args, **kwargs)
    assert str(again.value) == str(caught.value)
    return caught.value


# heads

@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3), (12, 4)])
def test_grouped_heads(heads, kv_heads, causal):
    check(*qkv(9, heads=heads, kv_heads=kv_heads, batch=2), is_causal=causal)
    check(*qkv(1, 33, heads=heads, kv_heads=kv_heads), is_causal=causal,
          causal_align="bottom_right")


@pytest.mark.parametrize(("isa", "claims"), [(("avx2",), True), (("neon", "dotprod"), False)])
def test_packing_heads_is_claimed_to_be_less_work_where_it_is(isa, claims):
    """Since torch 2.9, whose own kernel takes fewer KV heads, it does not pay everywhere."""
    plan = lz.explain("attention", *qkv(1, 512, heads=8, kv_heads=2),
                      on=lz.Device("cpu", 0, "any", "unknown", isa=isa))
    packed = next(s for s in plan.steps if s.kernel == "torch.sdpa_flash_packed")
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
    assert (packed.score.source == "less work") is (claims or old)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (3, 2), (2, 4)])
def test_heads_that_do_not_divide_are_named(heads, kv_heads):
    error = refused(*qkv(heads=heads, kv_heads=kv_heads))
    assert Code.HEADS_NOT_DIVISIBLE in error.codes


def test_groups_can_be_forbidden():
    error = refused(*qkv(heads=4, kv_heads=2), enable_gqa=False)
    assert error.codes == (Code.GQA_UNSUPPORTED,)
    check(*qkv(heads=4, kv_heads=4), enable_gqa=False)


def test_no_kv_heads_at_all():
    q, none = torch.randn(1, 0, 4, 8), torch.randn(1, 0, 6, 8)
    assert check(q, none, none).shape == (1, 0, 4, 8)


# masks

def masks(b, h, sq, sk):
    """Every shape that broadcasts to (b, h, sq, sk)."""
    full = (b, h, sq, sk)
    for rank in range(5):
        for ones in itertools.product((False, True), repeat=rank):
            yield tuple(1 if one else n for one, n in zip(ones, full[4 - rank:]))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", sorted(set(masks(2, 4, 5, 7))))
def test_every_broadcast_of_a_mask(shape, kind):
    gen = torch.Generator().manual_seed(len(shape))
    q, k, v = qkv(5, 7, heads=4, kv_heads=2, batch=2)
    mask = torch.randn(shape, generator=gen)
    check(q, k, v, mask if kind == "float" else mask > -0.5)


@pytest.mark.parametrize("shape", [(3,), (7, 5), (2, 7), (5, 1, 7), (3, 1, 5, 7), (2, 3, 5, 7),
                                   (1, 2, 4, 5, 7), (0,),
                                   (5, 6)])
def test_a_mask_that_does_not_broadcast_is_named(shape):
    q, k, v = qkv(5, 7, heads=4, batch=2)
    check(q, k, v, torch.ones(5, 7, dtype=torch.bool))
    error = refused(q, k, v, torch.ones(shape, dtype=torch.bool))
    assert error.codes == (Code.MASK_BROADCAST_INVALID,)
    assert str(shape) in str(error) and "(2, 4, 5, 7)" in str(error)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.float64,
                                   torch.float16,
                                   torch.complex64])
def test_a_mask_of_the_wrong_type_is_named(dtype):
    q, k, v = qkv()
    error = refused(q, k, v, torch.ones(8, 8, dtype=dtype))
    assert error.codes == (Code.MASK_TYPE_INVALID,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_rows_that_see_nothing_are_zero(dtype):
    q, k, v = qkv(6, 6, dtype=dtype)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    out = check(q, k, v, mask)
    assert (out[:, :, 2] == 0).all() and not out.isnan().any()
    out, lse = check(q, k, v, mask, return_lse=True)
    assert (lse[:, :, 2] == -math.inf).all() and lse.isfinite().sum() == 10
    float_mask = torch.zeros(6, 6, dtype=dtype).masked_fill(~mask, -math.inf)
    assert (check(q, k, v, float_mask)[:, :, 2] == 0).all()
    out = check(*qkv(6, 3, dtype=dtype), is_causal=True, causal_align="bottom_right")
    assert (out[:, :, :3] == 0).all()


# numbers

@pytest.mark.parametrize("scale", [None, 1.0, 0.3, 2, 0.0, -0.5])
@pytest.mark.parametrize("causal", [False, True])
def test_scale(scale, causal):
    check(*qkv(7), scale=scale, is_causal=causal)


@pytest.mark.parametrize("softcap", [0.0, 2.0, 30.0, 5])
def test_softcap(softcap):
    q, k, v = (t * 3 for t in qkv(7))
    check(q, k, v, softcap=softcap)
    check(q, k, v, softcap=softcap, is_causal=True, window_left=2)


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (0, 0), (2, 0), (0, 3), (2, 2), (-1, 1),
                                             (1, -1), (100, 100)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_windows(left, right, causal, align):
    check(*qkv(6, 9), window_left=left, window_right=right, is_causal=causal, causal_align=align)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_alibi(align, kv_heads):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
    q, k, v = qkv(5, 9, heads=4, kv_heads=kv_heads)
    check(q, k, v, alibi_slopes=slopes, causal_align=align)
    check(q, k, v, alibi_slopes=slopes, causal_align=align, is_causal=True, window_left=3)


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(1, 4), torch.ones(())])
def test_slopes_of_the_wrong_shape_are_named(wrong):
    error = refused(*qkv(heads=4), alibi_slopes=wrong)
    assert error.codes[0] in (Code.DIM_MISMATCH, Code.WRONG_NDIM) and "alibi_slopes" in str(error)


@pytest.mark.parametrize("extra", [
    {}, {"is_causal": True}, {"window_left": 2}, {"softcap": 3.0}, {"scale": 0.2},
    {"alibi_slopes": torch.tensor([1.0, 0.5])},
    {"attn_mask": torch.randn(5, 9)}, {"causal_align": "bottom_right", "is_causal": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_log_sum_exp(extra, dtype):
    if "attn_mask" in extra:
        extra = {"attn_mask": extra["attn_mask"].to(dtype)}
    extra = {"causal_align": "top_left", **extra}
    _, lse = check(*qkv(5, 9, dtype=dtype), return_lse=True, **extra)
    assert lse.shape == (1, 2, 5) and lse.dtype == torch.float32


@pytest.mark.parametrize(("name", "value", "code"), [
    ("dropout_p", -0.1, Code.VALUE_OUT_OF_RANGE), ("dropout_p", 1.1, Code.VALUE_OUT_OF_RANGE),
    ("dropout_p", math.nan, Code.VALUE_OUT_OF_RANGE), ("window_left", -2, Code.VALUE_OUT_OF_RANGE),
    ("window_right", -5, Code.VALUE_OUT_OF_RANGE), ("softcap", -1.0, Code.VALUE_OUT_OF_RANGE),
    ("causal_align", "centre", Code.VALUE_OUT_OF_RANGE), ("layout", "sbhd", Code.LAYOUT_UNKNOWN)])
def test_a_value_out_of_range_is_named(name, value, code):
    error = refused(*qkv(), **{name: value})
    assert code in error.codes and name in str(error)


# dropout

@pytest.mark.parametrize("extra", [{}, {"is_causal": True},
                                   {"attn_mask": torch.ones(32, 32, dtype=torch.bool)}])
def test_dropout_repeats_under_a_seed_and_keeps_the_mean(extra):
    q, k, _ = qkv(32, heads=8, batch=4)
    v = torch.ones_like(k)
    torch.manual_seed(11)
    first = lz.attention(q, k, v, dropout_p=0.25, **extra)
    torch.manual_seed(11)
    assert torch.equal(lz.attention(q, k, v, dropout_p=0.25, **extra), first)
    assert not torch.equal(lz.attention(q, k, v, dropout_p=0.25, **extra), first)
    # With values of 1 a row is the sum of its kept weights over 0.75. Its mean over 1024 rows is 1
    # +- 0.03.
    assert abs(first.mean().item() - 1.0) < 0.06 and first.std() > 0.01


def test_no_dropout_and_full_dropout():
    q, k, v = qkv()
    torch.testing.assert_close(lz.attention(q, k, v, dropout_p=0.0), lz.attention(q, k, v))
    out = lz.attention(q, k, v, dropout_p=1.0)
    assert out.shape == q.shape and (out == 0).all()


# lengths

@pytest.mark.parametrize(("seq_q", "seq_k"),
                         [(1, 1), (1, 50), (50, 1), (17, 40), (40, 17), (65, 65), (128, 129)])
def test_cross_attention(seq_q, seq_k):
    check(*qkv(seq_q, seq_k))
    check(*qkv(seq_q, seq_k), is_causal=True, causal_align="top_left")
    check(*qkv(seq_q, seq_k), is_causal=True, causal_align="bottom_right")


def test_top_left_is_torch_and_bottom_right_shows_the_last_query_everything():
    q, k, v = qkv(4, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CausalAlignmentWarning)
        torch.testing.assert_close(lz.attention(q, k, v, is_causal=True),
                                   F(q, k, v, is_causal=True))
    out = lz.attention(q, k, v, is_causal=True, causal_align="bottom_right")
    torch.testing.assert_close(out[:, :, -1:], lz.attention(q[:, :, -1:], k, v))


@pytest.mark.parametrize("kwargs", [
    {"is_causal": True}, {"window_left": 2}, {"window_right": 2},
    {"alibi_slopes": torch.tensor([0.5, 0.25])}])
def test_unequal_lengths_without_an_alignment_warn_once(world, path, kwargs):
    run = path_of("attention", path)
    q, k, v = qkv(5, 9)
    with pytest.warns(CausalAlignmentWarning, match=r"5 and 9.*bottom_right") as caught:
        first = run(q, k, v, **kwargs)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert torch.equal(run(q, k, v, **kwargs), first)
        run(q, k, v, causal_align="top_left", **kwargs)
        run(*qkv(6, 6), **kwargs)
        run(q, k, v)


# ranks

@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 2), (1, 2, 3, 2), (0, 2), (2, 0, 3)])
def test_any_number_of_leading_dimensions(lead, causal):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*lead, n, 8, generator=gen) for n in (5, 5, 5))
    got = lz.attention(q, k, v, is_causal=causal)
    flat = [t.reshape(1, *t.shape) if t.dim() == 3 else t.reshape(1, 1, 5, 8) if t.dim() == 2 else
            t.reshape(-1, *t.shape[-3:]) for t in (q, k, v)]
    want = exact(*flat, is_causal=causal).reshape(got.shape)
    assert got.shape == q.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    out, lse = lz.attention(q, k, v, is_causal=causal, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]


def test_leading_dimensions_with_groups_masks_and_another_value_width():
    gen = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 3, 4, 5, 8, generator=gen), torch.randn(2, 3, 2, 7, 8, generator=gen)
    v = torch.randn(2, 3, 2, 7, 6, generator=gen)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    for shape in [(5, 7), (4, 5, 7), (3, 1, 5, 7), (2, 1, 1, 5, 7), (2, 3, 4, 5, 7),
                  (1, 3, 1, 1, 7)]:
        mask = torch.randn(shape, generator=gen)
        want = exact(*flat, mask.expand(2, 3, 4, 5, 7).flatten(0, 1)).unflatten(0, (2, 3))
        torch.testing.assert_close(lz.attention(q, k, v, mask).double(), want, rtol=1e-5, atol=1e-5)
    three = lz.attention(q[0, 0], k[0, 0], v[0, 0], mask[0, 0])
    torch.testing.assert_close(three, lz.attention(q[0, :1], k[0, :1], v[0, :1], mask[0, 0])[0])


@pytest.mark.parametrize("mask", [(7, 4, 5, 5), (2, 2, 1, 5, 5), (2, 3, 4, 5, 6),
                                  (2, 2, 3, 4, 5, 5)])
def test_a_mask_that_does_not_fit_more_dimensions_is_named(mask):
    q = torch.randn(2, 3, 4, 5, 8)
    assert refused(q, q, q,
                   torch.ones(mask, dtype=torch.bool)).codes == (Code.MASK_BROADCAST_INVALID,)


@pytest.mark.parametrize("shapes", [
    [(8,), (8,), (8,)], [(), (), ()], [(1, 2, 5, 8), (8,), (8,)], [(8,), (2, 5, 8), (2, 5, 8)]])
def test_ranks_that_do_not_fit_are_named(shapes):
    error = refused(*(torch.randn(s) for s in shapes))
    assert error.codes == (Code.WRONG_NDIM,)


@pytest.mark.parametrize(("shapes", "named"), [
    ([(1, 2, 5, 8), (1, 2, 6, 9), (1, 2, 6, 8)], "key"),
    ([(1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 7, 8)], "value"),
    ([(3, 2, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)], "key"),
    ([(1, 6, 5, 8), (1, 2, 6, 8), (1, 3, 6, 8)], "value"),
    ([(2, 1, 2, 5, 8), (3, 1, 2, 5, 8), (3, 1, 2, 5, 8)], "")])
def test_sizes_that_do_not_fit_are_named(shapes, named):
    error = refused(*(torch.randn(s) for s in shapes))
    assert error.codes[0] in (Code.DIM_MISMATCH, Code.WRONG_NDIM) and named in str(error)


# sizes that libraries stumble over

@pytest.mark.parametrize("dim", [1, 7, 8, 72, 84, 96, 256, 320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims(dim, dtype):
    check(*qkv(9, dim=dim, dtype=dtype), is_causal=True)


@pytest.mark.parametrize(("dim", "value_dim"), [(16, 8), (8, 16), (64, 1), (84, 320)])
@pytest.mark.parametrize("extra", [{}, {"is_causal": True}, {"window_left": 3},
                                   {"return_lse": True}])
def test_values_of_another_width(dim, value_dim, extra):
    q, k, _ = qkv(6, dim=dim)
    check(q, k, torch.randn(1, 2, 6, value_dim), **extra)


@pytest.mark.parametrize("shape", [(65537, 1), (1, 65537), (257, 256)])
def test_more_heads_than_a_grid_has_blocks(shape):
    gen = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(*shape, 1, 1, generator=gen) for _ in range(3))
    torch.testing.assert_close(lz.attention(q, k, v), v)
    plan = lz.explain("attention", *(t.half().expand(-1, -1, 1, 8) for t in (q, k, v)),
                      on=nvidia(90))
    assert plan.kernel is not None
    if max(shape) > 65535:
        assert Code.CUDA_BLOCK_LIMIT_EXCEEDED in [r.code
                                                  for r in plan.why_not("torch.sdpa_flash_cuda")]


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 2, 0, 8), (2, 0, 5, 8)])
def test_empty_inputs(shape):
    q = torch.randn(shape)
    assert lz.attention(q, q, q).shape == shape
    assert lz.attention(q, q, q, is_causal=True).shape == shape


def test_no_key_at_all_gives_zeros():
    q, none = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 0, 8)
    out, lse = check(q, none, none, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert (lz.attention(q, none, none) == 0).all()


def test_large_logits_stay_finite():
    q, k, v = (t.half() for t in qkv(16, dim=64))
    out = lz.attention(q * 60, k * 60, v)
    assert out.isfinite().all()


# devices and dtypes

def test_mixed_devices_are_named_also_after_a_good_call():
    q, k, v = qkv()
    for _ in range(2):
        lz.attention(q, k, v)
    for call in ([q, k.to("meta"), v], [q, k, v.to("meta")], [q.to("meta"), k, v]):
        error = refused(*call)
        assert error.codes == (Code.MIXED_DEVICES,) and "meta" in str(error)
    error = refused(q, k, v, torch.ones(8, 8, dtype=torch.bool, device="meta"))
    assert error.codes == (Code.MIXED_DEVICES,) and "attn_mask" in str(error)


def test_meta_tensors_give_meta_results():
    q, k, v = (t.to("meta") for t in qkv(5, 7))
    for kwargs in ({}, {"is_causal": True, "causal_align": "top_left"}, {"backend": "reference"}):
        out = lz.attention(q, k, v, **kwargs)
        assert out.device.type == "meta" and out.shape == (1, 2, 5, 16)
    assert lz.attention(q[0], k[0], v[0]).shape == (2, 5, 16)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_mixed_dtypes_are_named_or_cast_where_allowed(world, emitted, odd):
    q, k, v = qkv()
    lz.attention(q, k, v)
    mixed = [t.half() if i == odd else t for i, t in enumerate((q, k, v))]
    assert refused(*mixed).codes == (Code.MIXED_DTYPES,)
    lz.configure(allow_adaptation=True)
    out = lz.attention(*mixed)
    assert out.dtype == mixed[0].dtype
    torch.testing.assert_close(out.double(), exact(*(t.to(out.dtype) for t in mixed)), rtol=4e-3,
                               atol=4e-3)
    assert [e for e in emitted if isinstance(e, Adapted)]
    lz.configure(strict_mode=True)
    assert refused(*mixed).codes == (Code.MIXED_DTYPES,)
    lz.configure(strict_mode=False, allow_adaptation=False)
    assert refused(*mixed).codes == (Code.MIXED_DTYPES,)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.bool,
                                   torch.complex64,
                                   torch.float8_e4m3fn])
def test_dtypes_without_attention_are_named(dtype):
    error = refused(*(torch.ones(1, 1, 2, 8).to(dtype) for _ in range(3)))
    assert Code.DTYPE_UNSUPPORTED in error.codes and str(dtype)[6:] in str(error)


@pytest.mark.parametrize(("position", "value"),
                         [(0, None), (1, [1.0]), (2, 3), (3, "mask"), (4, "0.1"), (5, "yes"),
                                                 (6, "1"), (7, 1)])
def test_a_wrong_type_names_its_argument(position, value):
    call = [*qkv(), None, 0.0, False, None, True]
    lz.attention(*call)
    name = [p.name for p in ATTENTION.params][position]
    call[position] = value
    error = refused(*call)
    assert error.codes == (Code.WRONG_TYPE,) and f"lz.attention: {name} must be" in str(error)
    assert str(None if value is None else type(value).__name__) in str(error)


# modes of torch

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_autocast_is_that_of_torch(dtype, inputs, masked):
    q, k, v = qkv(8, dtype=inputs)
    mask = torch.randn(8, 8, dtype=inputs) if masked else None
    with torch.autocast("cpu", dtype=dtype):
        want = F(q, k, v, mask)
        for _ in range(2):
            got = lz.attention(q, k, v, mask)
            assert got.dtype == want.dtype
            # Where the CPU has no such arithmetic, ours computes in float32 and is nearer to the
            # truth than torch.
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
        with torch.autocast("cpu", enabled=False):
            assert lz.attention(q, k, v, mask).dtype == inputs
    assert lz.attention(q, k, v, mask).dtype == inputs


def test_autocast_brings_mixed_dtypes_together():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = lz.attention(q, k.bfloat16(), v), F(q, k.bfloat16(), v)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)


def test_gradients_under_autocast_come_back_in_the_dtype_of_the_leaf():
    leaves = [t.requires_grad_() for t in qkv()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lz.attention(*leaves).sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in leaves)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"window_left": 2},
                                    {"return_lse": True}])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 1, 1)])
def test_vmap(kwargs, in_dims):
    tensors = [torch.randn(3, 3, 2, 5, 8) if d is not None else torch.randn(3, 2, 5, 8)
               for d in in_dims]
    got = torch.vmap(lambda *t: lz.attention(*t, **kwargs), in_dims=in_dims)(*tensors)
    wants = [exact(*(t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims)),
                   **kwargs) for i in range(3)]
    for j, g in enumerate(got if isinstance(got, tuple) else (got,)):
        want = torch.stack([w[j] if isinstance(w, tuple) else w for w in wants])
        torch.testing.assert_close(g.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kwargs", [
    {}, {"is_causal": True}, {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
    {"attn_mask": torch.randn(6, 6)}, {"window_left": 2}, {"softcap": 4.0},
    {"alibi_slopes": torch.tensor([0.5, 0.25])}, {"scale": 0.3},
    {"layout": "bshd"}])
def test_backward_is_that_of_the_formula(kwargs):
    def leaves(dtype):
        return [t.to(dtype).requires_grad_() for t in qkv(6, layout=kwargs.get("layout", "bhsd"))]

    ours, wide = leaves(torch.float32), leaves(torch.float64)
    out = lz.attention(*ours, **kwargs)
    want = exact(*wide, **kwargs)
    gen = torch.Generator().manual_seed(3)
    upstream = torch.randn(out.shape, generator=gen)
    out.backward(upstream)
    want.backward(upstream.double())
    for a, b in zip(ours, wide):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


def test_gradients_of_masks_slopes_and_log_sum_exp():
    q, k, v = qkv(5)
    for name, start in (("attn_mask", torch.randn(5, 5)),
                        ("alibi_slopes", torch.tensor([0.5, 0.25]))):
        leaf, wide = start.clone().requires_grad_(), start.double().requires_grad_()
        lz.attention(q, k, v, **{name: leaf}).square().sum().backward()
        exact(q, k, v, **{name: wide}).square().sum().backward()
        torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)
    leaf, wide = q.clone().requires_grad_(), q.double().requires_grad_()
    lz.attention(leaf, k, v, return_lse=True)[1].sum().backward()
    exact(wide, k, v, return_lse=True)[1].sum().backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kwargs", [{}, {"return_lse": True}, {"window_left": 2},
                                    {"softcap": 5.0, "return_lse": True}], ids=str)
@pytest.mark.parametrize("kernel", [None, "reference.attention"])
def test_gradients_of_rows_that_a_float_mask_hides(kernel, kwargs):
    """They are those of a bool mask: none at all. Row 2 is hidden by the mask, row 4 by mask and
    window together."""
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen[2], seen[4, 2:] = False, False
    grads = []
    for mask in (seen, torch.zeros(6, 6).masked_fill(~seen, -math.inf).requires_grad_()):
        leaves = [t.requires_grad_() for t in qkv(6)]
        got = lz.attention(*leaves, mask, backend=kernel, **kwargs)
        out, lse = got if isinstance(got, tuple) else (got, got[:0])
        total = out.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()
        grads.append(torch.autograd.grad(total, [*leaves, *([mask] if mask.requires_grad else [])]))
    for got, want in zip(grads[1], grads[0]):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert (grads[1][0][:, :, 2] == 0).all() and (grads[1][3][2] == 0).all()


def test_only_what_wants_a_gradient_gets_one():
    q, k, v = qkv()
    leaf = v.requires_grad_()
    lz.attention(q, k, leaf).sum().backward()
    assert leaf.grad is not None and q.grad is None
    with torch.no_grad():
        assert lz.attention(q, k, leaf).grad_fn is None
    assert lz.attention(q, k, leaf).grad_fn is not None


# nested tensors

def jagged(lengths, heads=2, dim=8, seed=0):
    """(batch, ragged, heads, dim), and its parts as (1, heads, length, dim)."""
    gen = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, heads, dim, generator=gen) for n in lengths]
    return (torch.nested.nested_tensor(parts, layout=torch.jagged),
            [p.transpose(0, 1)[None] for p in parts])


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "auto"])
@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"scale": 0.2}, {"softcap": 3.0},
                                    {"window_left": 2, "causal_align": "bottom_right"}])
@pytest.mark.parametrize(("lengths_q", "lengths_k"),
                         [((3, 5), (3, 5)), ((1, 1, 1), (4, 9, 2)), ((6,), (6,))])
def test_jagged_inputs_are_served_packed(layout, kwargs, lengths_q, lengths_k):
    (q, parts_q), (k, parts_k) = jagged(lengths_q, heads=4), jagged(lengths_k, seed=1)
    v, parts_v = k * 2, [p * 2 for p in parts_k]
    if layout != "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if layout == "auto" and kwargs:
        layout = "bhsd"
    out = lz.attention(q, k, v, layout=layout, **kwargs)
    assert out.is_nested and out.shape[0] == len(lengths_q)
    got = (out if layout == "bshd" else out.transpose(1, 2)).unbind()
    for g, *parts in zip(got, parts_q, parts_k, parts_v):
        want = exact(*parts, **({"causal_align": "top_left"} | kwargs))[0].transpose(0, 1)
        torch.testing.assert_close(g.double(), want, rtol=1e-5, atol=1e-5)
    assert lz.which("attention", q, k, v, layout=layout).split(".")[0] in ("torch", "reference")
    assert lz.explain("attention", q, k, v, layout=layout).op == "varlen_attention"


def test_gradients_flow_through_jagged_inputs():
    dense = [torch.randn(n, 2, 8, requires_grad=True) for n in (3, 5)]
    nested = torch.nested.as_nested_tensor(dense, layout=torch.jagged).transpose(1, 2)
    lz.attention(nested, nested, nested).values().sum().backward()
    wide = [t.detach().double().requires_grad_() for t in dense]
    for t in wide:
        row = t.transpose(0, 1)[None]
        exact(row, row, row).sum().backward()
    for a, b in zip(dense, wide):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", [
    "mask", "lse", "alibi", "dense key", "three dimensions", "two layouts", "ragged heads",
    "ragged sequence called heads",
    "other batch", "value of other lengths", "with holes"])
def test_nested_forms_that_are_refused(case):
    base, _ = jagged((3, 5))
    q = base.transpose(1, 2)
    other, _ = jagged((5, 3), seed=2)
    calls = {
        "mask": ((q, q, q, torch.ones(5, 5)), {}), "lse": ((q, q, q), {"return_lse": True}),
        "alibi": ((q, q, q), {"alibi_slopes": torch.ones(2)}),
        "dense key": ((q, torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)), {}),
        "three dimensions": ((torch.nested.nested_tensor([torch.randn(3, 8)], layout=torch.jagged),)
                             * 3, {}),
        "two layouts": ((torch.nested.nested_tensor([torch.randn(2, 3, 8)] * 2), q, q), {}),
        "ragged heads": ((base, base, base), {"layout": "bhsd"}),
        "ragged sequence called heads": ((q, q, q), {"layout": "bshd"}),
        "other batch": ((q, jagged((3, 5, 1))[0].transpose(1, 2),
                         jagged((3, 5, 1))[0].transpose(1, 2)), {}),
        "value of other lengths": ((q, q, other.transpose(1, 2)), {}),
        "with holes": ((torch.nested.narrow(torch.randn(2, 6, 2, 8), 1, torch.tensor([0, 1]),
                                            torch.tensor([3, 5]),
                                            layout=torch.jagged).transpose(1, 2),) * 3, {}),
    }
    args, kwargs = calls[case]
    with pytest.raises(InvalidCall) as caught:
        lz.attention(*args, **kwargs)
    assert caught.value.codes[0] in (Code.RAGGED_UNSUPPORTED, Code.DIM_MISMATCH)
