"""What is done to the inputs so that a kernel can take them, and that nothing is done where it is
refused.
"""

from __future__ import annotations

import pytest
import torch
from helpers import ATTENTION, RMS_NORM, Fake, allow_only, path_of, qkv, register, rows

import layerzero as lz
from layerzero.spec.event import Adapted, Selected
from layerzero.spec.plan import Transform
from layerzero.spec.reason import Code
from layerzero.spec.rules import contiguous, dtypes, unit_stride

pytestmark = pytest.mark.usefixtures("world")


def sparse(t: torch.Tensor) -> torch.Tensor:
    """The same numbers with gaps between them."""
    return t.repeat_interleave(2, -1)[..., ::2]


def reasons(kernel, *args, **kwargs):
    return [r.code for r in lz.validate("attention", kernel, *args, **kwargs)]


# layout: a view

@pytest.mark.parametrize(("native", "inputs"),
                         [("bhsd", "bshd"), ("bshd", "bhsd"), ("bhsd", "bhsd"),
                                                ("bshd", "bshd")])
@pytest.mark.parametrize("lse", [False, True])
def test_a_kernel_of_one_layout_serves_a_call_in_the_other(path, native, inputs, lse):
    fake = Fake("fake.one", ATTENTION, variants=(native,))
    register(fake)
    q, k, v = qkv(seq_q=5, seq_k=7, heads=4, kv_heads=2, layout=inputs)
    call = path_of(ATTENTION, path)
    want = ATTENTION.reference(q, k, v, return_lse=lse, layout=inputs)
    for _ in range(2):                                     # a miss, and a hit
        got = call(q, k, v, return_lse=lse, layout=inputs)
        assert fake.got.get("layout", "bhsd") == native      # a default is not passed on
        assert fake.got["query"].shape == ((1, 4, 5, 16) if native == "bhsd" else (1, 5, 4, 16))
        torch.testing.assert_close(got, want)
    assert fake.got["query"].data_ptr() == q.data_ptr()    # no byte was moved
    step = lz.explain("attention", q, k, v, return_lse=lse, layout=inputs).steps[0]
    assert step.transforms == (() if native == inputs else (Transform("layout", native),))
    assert step.score.transform_us == 0


def test_a_mask_and_slopes_are_not_permuted_with_the_layout(path):
    fake = Fake("fake.one", ATTENTION, variants=("bhsd",))
    register(fake)
    q, k, v = qkv(seq_q=5, seq_k=7, heads=4, layout="bshd")
    mask, slopes = torch.rand(1, 4, 5, 7) > 0.3, torch.rand(4)
    got = path_of(ATTENTION, path)(q, k, v, mask, alibi_slopes=slopes, causal_align="top_left",
                                   layout="bshd")
    torch.testing.assert_close(got, ATTENTION.reference(q, k, v, mask, alibi_slopes=slopes,
                                                        layout="bshd"))
    assert fake.calls == 1 and fake.got["attn_mask"] is mask


def test_a_kernel_that_wants_contiguous_inputs_gets_them_also_after_a_change_of_layout(path):
    fake = Fake("fake.one", ATTENTION, variants=("bhsd",), requires=(contiguous("query"),))
    register(fake)
    q, k, v = qkv(seq_q=5, seq_k=7, heads=4, layout="bshd")
    got = path_of(ATTENTION, path)(q, k, v, layout="bshd")
    torch.testing.assert_close(got, ATTENTION.reference(q, k, v, layout="bshd"))
    assert fake.calls == 1 and fake.got["query"].shape == (1, 4, 5, 16)
    assert fake.got["query"].is_contiguous()


def test_strict_mode_refuses_even_a_view(path):
    fake = Fake("fake.one", ATTENTION, variants=("bhsd",))
    register(fake)
    q, k, v = qkv(layout="bshd")
    lz.configure(strict_mode=True)
    got = path_of(ATTENTION, path)(q, k, v, layout="bshd")
    torch.testing.assert_close(got, ATTENTION.reference(q, k, v, layout="bshd"))
    assert fake.calls == 0
    assert reasons("fake.one", q, k, v, layout="bshd") == [Code.LAYOUT_UNSUPPORTED]
    with pytest.raises(lz.errors.NamedKernelRefused, match="LAYOUT_UNSUPPORTED"):
        lz.attention(q, k, v, layout="bshd", backend="fake.one")


# contiguous: a copy

@pytest.mark.parametrize("rule", [unit_stride, contiguous])
def test_a_tensor_with_gaps_is_copied_for_a_kernel_that_cannot_take_it(path, rule):
    fake = Fake("fake.one", ATTENTION, requires=(rule("query"), rule("key")))
    register(fake)
    q, k, v = qkv()
    gaps = sparse(q)
    call = path_of(ATTENTION, path)
    for _ in range(2):
        torch.testing.assert_close(call(gaps, k, v), ATTENTION.reference(q, k, v))
        assert fake.got["query"].is_contiguous() and fake.got["query"].data_ptr() != gaps.data_ptr()
        assert fake.got["key"].data_ptr() == k.data_ptr()  # only what needs it
    step = lz.explain("attention", gaps, k, v).steps[0]
    assert step.transforms == (Transform("contiguous", "query", q.numel() * 4),)
    call(q, k, v)
    # another key: no copy is left over from the first
    assert fake.got["query"].data_ptr() == q.data_ptr()


def test_a_tensor_that_was_not_given_needs_no_copy(path):
    fake = Fake(requires=(contiguous("x"), contiguous("weight")))
    register(fake)
    x = sparse(rows())
    torch.testing.assert_close(path_of(RMS_NORM, path)(x), RMS_NORM.reference(x))
    assert fake.calls == 1 and fake.got["x"].is_contiguous() and fake.got.get("weight") is None


def test_a_rule_without_a_repair_refuses(path):
    fake = Fake(requires=(contiguous("x", repair=False),))
    register(fake)
    x = sparse(rows())
    torch.testing.assert_close(path_of(RMS_NORM, path)(x), RMS_NORM.reference(x))
    assert fake.calls == 0
    assert [r.code for r in lz.validate("rms_norm", "fake.one", x)] == [Code.NOT_CONTIGUOUS]


def test_strict_mode_refuses_a_copy_and_names_it():
    fake = Fake("fake.one", ATTENTION, requires=(unit_stride("query"),))
    register(fake)
    q, k, v = qkv()
    assert reasons("fake.one", sparse(q), k, v) == []
    got = lz.attention(sparse(q), k, v, policy={"strict_mode": True})
    torch.testing.assert_close(got, ATTENTION.reference(q, k, v))
    assert fake.calls == 0
    with lz.prefer(strict_mode=True):
        why = lz.validate("attention", "fake.one", sparse(q), k, v)
    assert [r.code for r in why] == [Code.STRIDE_LAST_DIM, Code.STRICT_TRANSFORM_REFUSED]
    assert "contiguous(query)" in why[1].message and "strict_mode" in why[1].message
    lz.attention(q, k, v, policy={"strict_mode": True})
    assert fake.calls == 1                                 # nothing to transform, nothing to refuse


# cast: only with leave

def test_a_cast_needs_leave_and_comes_back_in_the_callers_dtype(path, emitted):
    fake = Fake("fake.one", ATTENTION, requires=(dtypes("float32", cast=True),))
    register(fake)
    q, k, v = qkv(dtype=torch.bfloat16)
    call = path_of(ATTENTION, path)
    call(q, k, v)
    assert fake.calls == 0 and reasons("fake.one", q, k, v) == [Code.DTYPE_UNSUPPORTED]
    lz.configure(allow_adaptation=True)
    # so small a call would not be worth the cast
    allow_only("fake.one")
    for _ in range(2):
        got = call(q, k, v)
        assert [fake.got[n].dtype for n in ("query", "key", "value")] == [torch.float32] * 3
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got,
                                   ATTENTION.reference(q.float(), k.float(), v.float()).bfloat16())
    step = lz.explain("attention", q, k, v).steps[0]
    assert (step.transforms == (Transform("cast", "float32", 3 * q.numel() * 2),)
            and step.score.transform_us > 0)
    selected = [e for e in emitted if isinstance(e, Selected) and e.kernel == "fake.one"]
    assert [e.transforms for e in selected] == [("cast(float32)",)]


def test_a_cast_of_two_results_leaves_the_log_sum_exp_wide(path):
    register(Fake("fake.one", ATTENTION, requires=(dtypes("float32", cast=True),)))
    lz.configure(allow_adaptation=True)
    allow_only("fake.one")
    q, k, v = qkv(dtype=torch.float16)
    out, lse = path_of(ATTENTION, path)(q, k, v, return_lse=True)
    assert out.dtype == torch.float16 and lse.dtype == torch.float32
    torch.testing.assert_close(lse, ATTENTION.reference(q.float(), k.float(), v.float(),
                                                        return_lse=True)[1])


def test_a_float_mask_is_cast_with_the_query(path):
    fake = Fake("fake.one", ATTENTION, requires=(dtypes("float32", cast=True),))
    register(fake)
    lz.configure(allow_adaptation=True)
    allow_only("fake.one")
    q, k, v = qkv(dtype=torch.bfloat16)
    mask = torch.randn(8, 8).bfloat16()
    got = path_of(ATTENTION, path)(q, k, v, mask)
    assert fake.calls == 1 and fake.got["attn_mask"].dtype == torch.float32
    torch.testing.assert_close(got, ATTENTION.reference(q.float(), k.float(), v.float(),
                                                        mask.float()).bfloat16())


def test_strict_mode_wins_over_leave_to_cast():
    fake = Fake("fake.one", ATTENTION, requires=(dtypes("float32", cast=True),))
    register(fake)
    q, k, v = qkv(dtype=torch.bfloat16)
    lz.configure(allow_adaptation=True, strict_mode=True)
    lz.attention(q, k, v)
    assert fake.calls == 0
    assert reasons("fake.one", q, k, v) == [Code.DTYPE_UNSUPPORTED, Code.STRICT_TRANSFORM_REFUSED]


def test_all_three_at_once(path):
    fake = Fake("fake.one", ATTENTION, variants=("bhsd",),
                requires=(dtypes("float32", cast=True), contiguous("query")))
    register(fake)
    lz.configure(allow_adaptation=True)
    allow_only("fake.one")
    q, k, v = qkv(seq_q=5, seq_k=9, heads=4, dtype=torch.float16, layout="bshd")
    got = path_of(ATTENTION, path)(sparse(q), k, v, layout="bshd")
    assert (fake.calls == 1 and fake.got["query"].is_contiguous()
            and fake.got["query"].dtype == torch.float32)
    assert (fake.got["query"].shape == (1, 4, 5, 16) and got.shape == q.shape
            and got.dtype == torch.float16)
    torch.testing.assert_close(got, ATTENTION.reference(q.float(), k.float(), v.float(),
                                                        layout="bshd").half())


# mixed dtypes: the caller's mistake, unless adaptation is allowed

def test_mixed_dtypes_are_refused_or_adapted_but_never_passed_on(path, emitted):
    call = path_of(ATTENTION, path)
    q, k, v = qkv()
    with pytest.raises(lz.errors.InvalidCall) as refused:
        call(q, k.double(), v)
    assert refused.value.codes == (Code.MIXED_DTYPES,) and "allow_adaptation" in str(refused.value)
    lz.configure(allow_adaptation=True)
    torch.testing.assert_close(call(q, k.double(), v), ATTENTION.reference(q, k, v))
    assert [e.transforms for e in emitted if isinstance(e, Adapted)] == [("cast(key)",)]
    lz.configure(strict_mode=True)
    with pytest.raises(lz.errors.InvalidCall):
        call(q, k.double(), v)


def test_gradients_flow_through_every_transform(path):
    rules = (dtypes("float64", cast=True), contiguous("query"))
    register(Fake("fake.one", ATTENTION, variants=("bhsd",), requires=rules))
    lz.configure(allow_adaptation=True)
    allow_only("fake.one")
    q, k, v = (t.requires_grad_() for t in qkv(layout="bshd"))
    path_of(ATTENTION, path)(q, k, v, layout="bshd").sum().backward()
    ours = [t.grad.clone() for t in (q, k, v)]
    for t in (q, k, v):
        t.grad = None
    ATTENTION.reference(q, k, v, layout="bshd").sum().backward()
    for got, t in zip(ours, (q, k, v)):
        torch.testing.assert_close(got, t.grad, rtol=1e-4, atol=1e-5)
