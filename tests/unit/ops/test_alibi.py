"""ALiBi: the slopes of the paper and of the models, and the bias they make."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import path_of, qkv

import layerzero as lz
from layerzero.models.positions import alibi_slopes

KERNELS = ("torch.alibi", "reference.alibi")


def test_slopes_for_a_power_of_two_are_the_papers():
    assert alibi_slopes(8).tolist() == [2.0 ** -i for i in range(1, 9)]
    torch.testing.assert_close(alibi_slopes(16),
                               torch.tensor([2.0 ** (-i / 2) for i in range(1, 17)]))
    assert alibi_slopes(1).tolist() == [2.0 ** -8]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 7, 8, 12, 16, 20, 32, 40, 71, 112])
def test_slopes_are_blooms(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    # at key position 1
    want = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads), want, rtol=1e-6, atol=0)


def test_slopes_take_dtype_and_refuse_no_heads():
    assert alibi_slopes(4, dtype=torch.bfloat16).dtype == torch.bfloat16
    for heads in (0, -1, 2.0, True):
        with pytest.raises(lz.errors.InvalidCall, match="heads must be an int >= 1"):
            alibi_slopes(heads)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bias_spelled_out(kernel):
    got = lz.alibi(torch.tensor([0.5, 0.25]), 2, 4, causal_align="bottom_right", backend=kernel)
    rows = torch.tensor([[-2.0, -1.0, 0.0, -1.0], [-3.0, -2.0, -1.0, 0.0]])
    assert torch.equal(got, torch.stack((rows * 0.5, rows * 0.25)))
    hidden = lz.alibi(torch.tensor([0.5]), 2, 4, causal_align="bottom_right", is_causal=True,
                      backend=kernel)
    assert hidden[0].tolist() == [[-1.0, -0.5, 0.0, -torch.inf], [-1.5, -1.0, -0.5, 0.0]]
    top_left = lz.alibi(torch.tensor([1.0]), 2, 4, causal_align="top_left", backend=kernel)
    assert top_left[0].tolist() == [[0.0, -1.0, -2.0, -3.0], [-1.0, 0.0, -1.0, -2.0]]


def test_attention_with_the_bias_is_attention_with_the_slopes():
    slopes = alibi_slopes(4)
    for sq, sk in ((8, 8), (3, 8)):
        q, k, v = qkv(sq, sk, heads=4)
        bias = lz.alibi(slopes, sq, sk, causal_align="bottom_right", is_causal=True)
        want = lz.attention(q, k, v, is_causal=True, causal_align="bottom_right",
                            alibi_slopes=slopes)
        torch.testing.assert_close(lz.attention(q, k, v, attn_mask=bias), want, rtol=1e-5,
                                   atol=1e-6)


def test_after_a_causal_softmax_it_is_blooms():
    """Bloom's bias is slope * key position: each row differs from ours by a constant, which a
    softmax does not see."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    scores = torch.randn(6, 9, 9, generator=torch.Generator().manual_seed(0))
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    theirs = (scores + bloom.build_alibi_tensor(torch.ones(1, 9), 6, torch.float32)).masked_fill(
        hidden, -torch.inf)
    ours = scores + lz.alibi(alibi_slopes(6), 9, 9, is_causal=True)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1))


@pytest.mark.parametrize("heads", [1, 8, 12, 71])
def test_the_bias_of_a_number_of_heads(heads):
    for dtype in (torch.float32, torch.bfloat16):
        got = lz.positions.alibi_bias(heads, 3, 9, causal_align="bottom_right", is_causal=True,
                                      dtype=dtype)
        want = lz.alibi(alibi_slopes(heads, dtype=dtype), 3, 9, causal_align="bottom_right",
                        is_causal=True)
        assert torch.equal(got, want) and got.shape == (heads, 3, 9) and got.dtype == dtype
    with pytest.raises(lz.errors.InvalidCall, match="heads must be an int >= 1"):
        lz.positions.alibi_bias(0, 3, 3)
    with pytest.raises(lz.errors.InvalidCall, match="seq_q must be >= 0"):
        lz.positions.alibi_bias(2, -3, 3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_learned_slopes(kernel):
    slopes = alibi_slopes(3).double().requires_grad_()
    for sq, sk in ((4, 4), (2, 5), (5, 2), (0, 3)):
        assert torch.autograd.gradcheck(
            lambda s, a=sq, b=sk: lz.alibi(s, a, b, causal_align="bottom_right", backend=kernel),
            [slopes])
    lz.alibi(slopes, 4, 4, is_causal=True, backend=kernel).nan_to_num(neginf=0.0).sum().backward()
    assert slopes.grad.tolist() == [-10.0] * 3                 # 3 ones, 2 twos, 1 three


@pytest.mark.parametrize(("changes", "code", "words"), [
    ({"seq_q": -1}, "VALUE_OUT_OF_RANGE", "seq_q must be >= 0"),
    ({"seq_k": -5}, "VALUE_OUT_OF_RANGE", "seq_k"),
    ({"slopes": torch.ones(2, 2)}, "WRONG_NDIM", "slopes must have"),
    ({"slopes": 4}, "WRONG_TYPE", "slopes must be"),
    ({"slopes": torch.ones(2).long()}, "DTYPE_UNSUPPORTED", "dtype must be"),
    ({"seq_q": 2.0}, "WRONG_TYPE", "seq_q"),
    ({"causal_align": "left"}, "VALUE_OUT_OF_RANGE",
     "causal_align must be one of top_left, bottom_right"),
])
def test_a_wrong_call_names_the_argument(path, changes, code, words):
    call = path_of("alibi", path)
    call(torch.ones(2), 3, 3)
    with pytest.raises(lz.errors.InvalidCall, match=words) as raised:
        call(**{"slopes": torch.ones(2), "seq_q": 3, "seq_k": 3, **changes})
    assert code in raised.value.codes


def test_unequal_lengths_without_an_alignment_warn():
    with pytest.warns(lz.errors.CausalAlignmentWarning, match="bottom_right"):
        lz.alibi(torch.ones(2), 3, 7001)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lz.alibi(torch.ones(2), 3, 7002, causal_align="top_left")


def test_compiled():
    compiled = torch.compile(lambda s: lz.alibi(s, 5, 5, is_causal=True), fullgraph=True,
                             backend="aot_eager")
    assert torch.equal(compiled(alibi_slopes(4)), lz.alibi(alibi_slopes(4), 5, 5, is_causal=True))


def test_a_number_of_heads_compiled():
    compiled = torch.compile(
        lambda x: x + lz.positions.alibi_bias(6, 5, 5, is_causal=True), fullgraph=True,
        backend="aot_eager")
    scores = torch.randn(6, 5, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(compiled(scores),
                               scores + lz.positions.alibi_bias(6, 5, 5, is_causal=True))
