"""Our CPU kernel for items and pages: shared keys give what separate ones give, on any number of
threads, and what does not fit the tensors is the caller's error.
"""

from __future__ import annotations

import pytest
import torch

from layerzero.backends.native import KERNELS, build
from layerzero.machine import loading
from layerzero.ops.grouped_attention import OP as GROUPED
from layerzero.ops.paged_attention import OP as PAGED
from layerzero.spec.errors import InvalidCall
from layerzero.verify.kernel.contract import case_values, upcast

BY_ID = {k.id: k for k in KERNELS}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
NAN = float("nan")


@pytest.fixture(scope="module", autouse=True)
def library():
    if build.is_built() is not True:
        pytest.skip("our CPU kernels are not built: lz build")


def run(id, values):
    kernel = BY_ID[id]
    function = loading.load(kernel)
    return function(**{n: values[n] for n in loading.accepted_params(id, kernel.op, function)})


def tree(dtype, layout, window=-1):
    """Five sequences: all share two pages, three of them a third, of which one ends within; one
    has a page of another in a different place."""
    gen = torch.Generator().manual_seed(3)
    table = torch.tensor([[4, 1, 7, 2], [4, 1, 7, 5], [4, 1, 7, -1], [4, 1, 0, 3], [1, 4, 6, -1]])
    lengths = torch.tensor([29, 31, 20, 27, 24])
    pages = [torch.randn((9, 8, 2, 40), generator=gen).to(dtype) for _ in "kv"]
    for cache in pages:
        cache[8] = NAN                         # of nobody
        cache[2, 5:], cache[5, 7:], cache[3, 3:] = NAN, NAN, NAN
    if layout == "HND":
        pages = [cache.transpose(1, 2).contiguous() for cache in pages]
    return {"query": torch.randn((7, 6, 40), generator=gen).to(dtype), "key_cache": pages[0],
            "value_cache": pages[1], "block_table": table.int(), "context_lens": lengths.int(),
            "cu_seqlens_q": torch.tensor([0, 1, 3, 4, 5, 7]).int(), "is_causal": True,
            "scale": None, "window_left": window, "softcap": 0.0, "key_scale": None,
            "value_scale": None, "max_seqlen_q": 2, "return_lse": True, "kv_layout": layout}


@pytest.mark.parametrize("window", [-1, 11])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sequences_that_share_pages(dtype, layout, window):
    values = tree(dtype, layout, window)
    out, lse = run("native.paged_attention", values)
    want, want_lse = PAGED.reference(**upcast(values))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-5)


def test_threads_do_not_change_a_bit():
    paged = tree(torch.float32, "NHD")
    grouped = case_values(GROUPED, {
        "items": tuple((i, 1, 0, 300 * (i + 1)) for i in range(6)), "hq": 6, "d": 64}, "float32")
    before = torch.get_num_threads()
    try:
        for id, values in (("native.paged_attention", paged), ("native.grouped_attention", grouped)):
            torch.set_num_threads(1)
            alone = run(id, values)
            torch.set_num_threads(3)
            torch.testing.assert_close(run(id, values), alone, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_not_finite_comes_out_as_in_the_formula(name, bad):
    values = case_values(GROUPED, {"items": ((0, 2, 0, 140), (3, 1, 0, 70))}, "float32")
    values[name] = values[name].clone()
    values[name][0, 0, 3] = bad
    got, want = run("native.grouped_attention", values), GROUPED.reference(**upcast(values))
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize(("row", "says"), [
    ([0, 2, 0, 99], r"items\[1\]"), ([0, 2, -1, 3], r"items\[1\]"), ([9, 2, 0, 3], r"items\[1\]")])
def test_items_outside_the_tensors_are_the_callers_error(row, says):
    values = case_values(GROUPED, {"items": ((2, 3, 0, 7), (0, 2, 0, 5))}, "float32")
    values["items"][1] = torch.tensor(row)
    with pytest.raises(InvalidCall, match=says):
        run("native.grouped_attention", {**values, "max_seqlen_k": 100})


@pytest.mark.parametrize(("name", "index", "value", "says"), [
    ("block_table", (3, 2), 9, "block_table"), ("block_table", (0, 0), -1, "block_table"),
    ("context_lens", (2,), 33, "context_lens"), ("cu_seqlens_q", (5,), 8, "cu_seqlens_q")])
def test_pages_outside_the_cache_are_the_callers_error(name, index, value, says):
    values = tree(torch.float32, "NHD")
    values[name][index] = value
    with pytest.raises(InvalidCall, match=says):
        run("native.paged_attention", values)
