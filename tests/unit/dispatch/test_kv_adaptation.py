"""A KV cache whose dtype is not the query's: refused with its reason, or cast where the policy
allows, and said so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import ATTENTION, events_of, path_of, python, qkv

import layerzero as lz
from layerzero.spec.event import Adapted, Selected
from layerzero.spec.plan import Transform
from layerzero.spec.reason import Code

pytestmark = pytest.mark.usefixtures("world")

PAGED = lz.op("paged_attention")
CACHES = ("key_cache", "value_cache")
MIXED = [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32"),
         ("bfloat16", "float32"),
         ("float64", "float16")]
each_mixture = pytest.mark.parametrize(("dtype", "stored"), MIXED,
                                       ids=[f"{s} under {d}" for d, s in MIXED])


def values(dtype: str = "float32", **case: Any) -> dict[str, Any]:
    return PAGED.inputs(**case, dtype=getattr(torch, dtype))


def bytes_read(inputs: dict[str, Any], name: str) -> int:
    page = inputs[name][0]
    return inputs["block_table"].numel() * page.numel() * inputs["query"].itemsize


@each_mixture
def test_without_leave_it_is_refused_with_advice(path, dtype, stored):
    inputs = values(dtype, stored=stored)
    with pytest.raises(lz.errors.InvalidCall) as refused:
        path_of(PAGED, path)(**inputs)
    assert set(refused.value.codes) == {Code.KV_CACHE_DTYPE_MISMATCH}
    for word in (dtype, stored, "allow_adaptation: true", "scales"):
        assert word in str(refused.value)
    with pytest.raises(lz.errors.InvalidCall, match="KV_CACHE_DTYPE_MISMATCH"):
        lz.explain("paged_attention", **inputs)


@each_mixture
@pytest.mark.parametrize("case", [{}, {"lengths_q": (3, 1, 9), "layout": "HND"},
                                  {"lse": True, "lengths_q": (2, 5, 1)}],
                         ids=["decode", "prefill", "lse"])
def test_with_leave_the_pages_are_cast_and_an_event_says_so(path, emitted, dtype, stored, case):
    inputs = values(dtype, stored=stored, **case)
    lz.configure(allow_adaptation=True)
    call = path_of(PAGED, path)
    cast = {**inputs, **{n: inputs[n].to(inputs["query"].dtype) for n in CACHES}}
    want = call(**cast)
    assert not events_of(Adapted, emitted)
    # every time, not only where a choice is made
    for _ in range(3):
        # another kernel may serve what had to be cast
        torch.testing.assert_close(call(**inputs), want, atol=1e-2, rtol=2e-2)
    events = events_of(Adapted, emitted)
    assert [(e.op, e.transforms)
            for e in events] == [("paged_attention", ("cast(key_cache)", "cast(value_cache)"))] * 3


def test_only_the_cache_that_differs_is_cast(emitted):
    inputs = values(stored="")
    inputs["value_cache"] = inputs["value_cache"].bfloat16()
    lz.configure(allow_adaptation=True)
    want = lz.paged_attention(**{**inputs, "value_cache": inputs["value_cache"].float()})
    torch.testing.assert_close(lz.paged_attention(**inputs), want)
    assert [e.transforms for e in events_of(Adapted, emitted)] == [("cast(value_cache)",)]


def test_explain_shows_the_cast_and_what_it_costs():
    inputs = values(stored="bfloat16", lengths_q=(3, 1, 9))
    fitting = {**inputs, "key_scale": torch.ones(()), "value_scale": torch.ones(())}
    lz.configure(allow_adaptation=True)
    plan, plain = (lz.explain("paged_attention", **v) for v in (inputs, fitting))
    casts = tuple(Transform("cast", n, bytes_read(inputs, n)) for n in CACHES)
    assert plan.kernel and [s.kernel for s in plan.steps] == [s.kernel for s in plain.steps]
    for step, as_given in zip(plan.steps, plain.steps):
        assert step.transforms == (*casts, *as_given.transforms)
        more = step.score.transform_us - as_given.score.transform_us
        assert more > 0 and step.score.total_us == pytest.approx(as_given.score.total_us + more)
    assert "cast(key_cache), cast(value_cache)" in str(plan)
    assert plan.to_json()["transform_bytes"] >= sum(c.bytes for c in casts)


def test_what_is_cast_are_the_pages_of_the_table_not_the_pool():
    inputs = values(stored="bfloat16", context=(20, 7))
    small = lz.explain("paged_attention", **inputs,
                       policy={"allow_adaptation": True}).steps[0].transforms
    roomy = {n: torch.cat((inputs[n], inputs[n].new_zeros((500, *inputs[n].shape[1:]))))
             for n in CACHES}
    large = lz.explain("paged_attention", **{**inputs, **roomy},
                       policy={"allow_adaptation": True}).steps[0].transforms
    assert small == large and small[0].bytes < roomy["key_cache"].nbytes


@pytest.mark.parametrize("layer", ["call", "context"])
def test_leave_may_be_given_for_one_call_or_a_block(path, emitted, layer):
    inputs = values(stored="float16")
    call = path_of(PAGED, path)
    want = call(**{**inputs, **{n: inputs[n].float() for n in CACHES}})
    if layer == "call":
        got = call(**inputs, policy={"allow_adaptation": True})
    else:
        with lz.prefer(allow_adaptation=True):
            got = call(**inputs)
    torch.testing.assert_close(got, want)
    assert len(events_of(Adapted, emitted)) == 1
    with pytest.raises(lz.errors.InvalidCall, match="KV_CACHE_DTYPE_MISMATCH"):
        call(**inputs)


def test_strict_mode_wins(path):
    lz.configure(allow_adaptation=True, strict_mode=True)
    with pytest.raises(lz.errors.InvalidCall, match="KV_CACHE_DTYPE_MISMATCH"):
        path_of(PAGED, path)(**values(stored="float16"))


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_a_quantized_cache_without_its_scales_stays_refused(path, emitted, stored):
    inputs = values(stored=stored, scales="one")
    lz.configure(allow_adaptation=True)
    path_of(PAGED, path)(**inputs)                          # with them it needs no leave
    with pytest.raises(lz.errors.InvalidCall, match="KV_CACHE_DTYPE_MISMATCH"):
        path_of(PAGED, path)(**{**inputs, "value_scale": None})
    assert not events_of(Adapted, emitted)


def test_another_mistake_beside_it_is_not_adapted(path):
    lz.configure(allow_adaptation=True)
    with pytest.raises(lz.errors.InvalidCall) as refused:
        path_of(PAGED, path)(**{**values(stored="float16"), "softcap": -1.0})
    assert set(refused.value.codes) == {Code.KV_CACHE_DTYPE_MISMATCH, Code.VALUE_OUT_OF_RANGE}


@pytest.mark.parametrize("kernel", ["torch.paged_gather", "torch.paged_pieces",
                                    "reference.paged_attention"])
def test_a_kernel_may_be_named(kernel, emitted):
    inputs = values(stored="bfloat16")
    lz.configure(allow_adaptation=True)
    want = lz.paged_attention(**{**inputs, **{n: inputs[n].float() for n in CACHES}},
                              backend=kernel)
    torch.testing.assert_close(lz.paged_attention(**inputs, backend=kernel), want)
    assert {e.kernel for e in events_of(Selected, emitted)} == {kernel}


def test_gradients_flow_to_the_cache_as_it_was_given():
    inputs = values(stored="bfloat16")
    # gaps are never read, inf or not
    inputs["key_cache"] = inputs["key_cache"].nan_to_num(posinf=0.0).requires_grad_()
    lz.configure(allow_adaptation=True)
    lz.paged_attention(**inputs).square().sum().backward()
    got = inputs["key_cache"].grad
    assert got.dtype == torch.bfloat16
    wide = inputs["key_cache"].detach().float().requires_grad_()
    lz.paged_attention(**{**inputs, "key_cache": wide,
                          "value_cache": inputs["value_cache"].float()}).square().sum(
        ).backward()
    torch.testing.assert_close(got, wide.grad.bfloat16())


@pytest.mark.parametrize("kind", [{"kind": "paged", "pages": 8, "page_size": 4},
                                  {"kind": "chunked", "chunk_size": 8},
                                  {"kind": "contiguous", "sequences": 2, "max_len": 16}],
                         ids=lambda k: k["kind"])
def test_a_cache_object_under_a_wider_query(emitted, kind):
    cache = lz.kv_cache(**kind, kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    query, keys = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    for _ in range(2):
        cache.add()
    cache.append(keys, keys)
    with pytest.raises(lz.errors.InvalidCall, match="KV_CACHE_DTYPE_MISMATCH"):
        cache.attend(query)
    with lz.prefer(allow_adaptation=True):
        got = cache.attend(query)
    stored = keys.bfloat16().float()
    want = ATTENTION.reference(query, stored, stored, is_causal=True, layout="bshd")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [e.transforms
            for e in events_of(Adapted, emitted)] == [("cast(key_cache)", "cast(value_cache)")]


def test_explain_shows_the_cast_of_mixed_dtypes_too():
    q, k, v = qkv()
    plan = lz.explain("attention", q, k.double(), v, policy={"allow_adaptation": True})
    assert plan.steps[0].transforms[0] == Transform("cast", "key", k.nbytes)


def test_mla_stays_refused(path):
    mla = lz.op("mla_paged_attention")
    lz.configure(allow_adaptation=True)
    inputs = mla.inputs()
    with pytest.raises(lz.errors.InvalidCall, match="KV_CACHE_DTYPE_MISMATCH"):
        path_of(mla, path)(**{**inputs, "ckv_cache": inputs["ckv_cache"].half()})


def test_a_cache_attends_before_anyone_names_the_operation():
    assert python("""
        import torch, layerzero as lz
        cache = lz.kv_cache("paged", kv_heads=2, head_dim=16, pages=2)
        cache.add()
        rows = torch.ones(3, 2, 16)
        cache.append(rows, rows)
        print(cache.attend(rows).sum().item())
    """) == "96.0"
