"""Grouped attention: several groups of queries over overlapping parts of one key buffer."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from grouped_truth import call, check, serving, truth
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import layerzero as lz
from layerzero.grouped import (
    _flash_attn_varlen_backward_grouped,
    _flash_attn_varlen_forward_grouped,
    items_from_cu_seqlens,
)


def prefixes(groups: int, rows: int = 24, keys: int = 96) -> list[tuple[int, int, int, int]]:
    """Group i has `rows` queries and sees the first (i + 1) / groups of the keys."""
    return [(i * rows, rows, 0, (i + 1) * keys // groups) for i in range(groups)]


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def separate(values: dict[str, Any]) -> Tensor:
    """torch's attention, once per item."""
    parts = []
    for q_start, n, k_start, m in values["items"].tolist():
        q, k, v = (t.transpose(0, 1)[None] for t in (
            values["query"][q_start:q_start + n], values["key"][k_start:k_start + m],
            values["value"][k_start:k_start + m]))
        hidden = torch.ones(n, m, dtype=torch.bool).tril(m - n) if values["is_causal"] else None
        parts.append(scaled_dot_product_attention(q, k, v, hidden, enable_gqa=True)[0].transpose(
            0, 1))
    return torch.cat(parts)


class TestGroupedFlashAttentionCorrectness:
    @pytest.mark.parametrize("groups", [2, 3, 4])
    def test_basic_correctness_multiple_groups(self, groups):
        check(call(prefixes(groups), is_causal=False))

    def test_with_causal_masking(self):
        check(call(prefixes(3)))
        # more queries than keys: the first rows see none
        check(call([(0, 9, 0, 4), (9, 5, 2, 30)]))

    @pytest.mark.parametrize("heads", [(32, 8), (8, 1), (4, 4)])
    def test_with_gqa(self, heads):
        check(call(prefixes(2, 7, 40), *heads))

    def test_variable_length_sequences(self):
        """Each group sees a prefix of every sequence of a shared buffer, under the names of
        flash-attention's forks."""
        lengths = [24, 80, 48]
        starts = offsets(lengths)
        rows, seen = [[3, 10, 6], [6, 20, 12]], [[n // 2 for n in lengths], lengths]
        v = call([(0, sum(map(sum, rows)), 0, sum(lengths))])
        q_list = list(v["query"].split([sum(group) for group in rows]))
        lists = ([offsets(group) for group in rows], [offsets(group) for group in seen],
                 [max(group) for group in rows], [max(group) for group in seen])
        outs, lses, _, _ = _flash_attn_varlen_forward_grouped(q_list, v["key"], v["value"], *lists,
                                                              k_starts=starts[:-1])
        items = torch.cat([items_from_cu_seqlens(offsets(rows[i]), offsets(seen[i]), starts[:-1],
                                                 i * sum(rows[0])) for i in range(2)])
        out, lse = truth({**v, "items": items})
        torch.testing.assert_close(torch.cat(outs).double(), out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.cat(lses, 1).t().double(), lse, rtol=1e-5, atol=1e-5)
        # without k_starts the second sequence of the first group begins where its prefix of the
        # first ends: other keys
        packed = _flash_attn_varlen_forward_grouped(q_list, v["key"], v["value"], *lists)[0]
        torch.testing.assert_close(packed[0][:3], outs[0][:3])
        assert not torch.allclose(packed[0][3:], outs[0][3:])

    def test_overlapping_kv_regions(self):
        """Each visible key is read exactly once: its weight is that of its index, and no other
        row's counts."""
        items = [(0, 3, 0, 40), (3, 2, 10, 25), (5, 1, 30, 34), (6, 4, 0, 64)]
        for causal in (False, True):
            v = call(items, hq=2, hkv=1, d=64, is_causal=causal, scale=1.0, return_lse=True)
            index = torch.arange(1.0, 65.0)
            v["query"].zero_()[..., 0] = 1.0
            v["key"].zero_()[:, 0, 0] = index.log()
            v["value"].copy_(torch.eye(64)[:, None])
            for name in serving(v):
                out, lse = lz.grouped_attention(**v, backend=name)
                for q_start, n, k_start, m in items:
                    for i in range(n):
                        seen = torch.zeros(64)
                        seen[k_start:k_start + (i + m - n + 1 if causal else m)] = 1.0
                        total = (index * seen).sum()
                        for head in range(2):
                            torch.testing.assert_close(out[q_start + i, head] * total, index * seen,
                                                       rtol=1e-4, atol=1e-4)
                            assert math.isclose(lse[q_start + i, head], math.log(total),
                                                rel_tol=1e-5)


class TestGroupedFlashAttentionEdgeCases:
    def test_single_token_sequence(self):
        check(call([(i, 1, i, 1) for i in range(5)]))
        check(call([(i, 1, 0, 7 * i + 1) for i in range(5)], hq=8, hkv=1))

    def test_single_group(self):
        """One group is plain packed attention."""
        starts_q, starts_k = offsets([5, 20, 1]), offsets([9, 20, 33])
        v = call([(0, 26, 0, 62)], return_lse=True)
        items = items_from_cu_seqlens(starts_q, starts_k)
        plain = lz.varlen_attention(v["query"], v["key"], v["value"], starts_q, starts_k, 20, 33,
                                    True, causal_align="bottom_right", return_lse=True)
        for name in serving(v):
            result = lz.grouped_attention(**{**v, "items": items, "max_seqlen_q": 20}, backend=name)
            torch.testing.assert_close(result, plain)

    def test_overlapping_kv_regions(self):
        """Ranges that overlap in any way, in any order, and items that are empty."""
        check(call([(9, 4, 20, 41), (0, 9, 3, 30), (13, 2, 20, 41), (15, 0, 0, 5), (15, 3, 4, 0)]))


class TestGroupedFlashAttentionBackward:
    def test_backward_correctness(self):
        items = [(0, 5, 0, 9), (5, 4, 0, 17), (9, 1, 3, 12), (10, 6, 0, 3)]
        v = call(items, d=16, dtype=torch.float64)
        names = ("query", "key", "value")
        exact = {name: v[name].clone().requires_grad_() for name in names}
        gen = torch.Generator().manual_seed(1)
        grad = torch.randn(v["query"].shape, generator=gen, dtype=torch.float64)
        want = torch.autograd.grad(truth({**v, **exact})[0], tuple(exact.values()), grad)
        asked = {**v, **exact}
        for name in serving(asked):
            out = lz.grouped_attention(**asked, backend=name)
            grads = torch.autograd.grad(out, tuple(exact.values()), grad)
            for got, expected in zip(grads, want):
                torch.testing.assert_close(got, expected, msg=lambda t, name=name: f"{name}: {t}")
        starts = [offsets([n]) for _, n, _, _ in items], [offsets([m]) for _, _, _, m in items]
        k_starts = torch.tensor([k for _, _, k, _ in items])
        dq_list, dk, dv = (torch.cat(t) if isinstance(t, list) else t for t in _each(
            v, items, starts, k_starts, grad))
        torch.testing.assert_close((dq_list, dk, dv), want)

    def test_gradients_of_shared_keys_are_added_in_float32(self):
        """Sixteen groups read the same keys. A sum in bfloat16 would have several times the error
        of one that is rounded once."""
        v = call([(i, 1, 0, 32) for i in range(16)], dtype=torch.bfloat16, is_causal=False)
        exact = {name: v[name].double().requires_grad_() for name in ("query", "key", "value")}
        rounded = {name: v[name].clone().requires_grad_() for name in exact}
        grad = torch.randn(v["query"].shape, generator=torch.Generator().manual_seed(2))
        want = torch.autograd.grad(truth({**v, **exact})[0], tuple(exact.values()), grad.double())
        for name in serving({**v, **rounded}):
            out = lz.grouped_attention(**{**v, **rounded}, backend=name)
            grads = torch.autograd.grad(out, tuple(rounded.values()), grad.bfloat16())
            for got, expected in zip(grads[1:], want[1:]):
                assert got.dtype == torch.bfloat16
                assert (got.double() - expected).norm() < 0.01 * expected.norm(), name


def _each(v: dict[str, Any], items: list[tuple[int, int, int, int]],
          starts: tuple[list[Tensor], list[Tensor]], k_starts: Tensor, grad: Tensor) -> Any:
    """The backward of the forks, one item as one group; each group has a start of its own."""
    lengths = [n for _, n, _, _ in items]
    q_list, dout_list = v["query"].split(lengths), grad.split(lengths)
    dq_list, dk, dv = [], 0, 0
    for i, (_, n, _, m) in enumerate(items):
        dq, dk_i, dv_i = _flash_attn_varlen_backward_grouped(
            [dout_list[i]], [q_list[i]], v["key"], v["value"], [], [], [starts[0][i]],
            [starts[1][i]], [n], [m], deterministic=True, k_starts=k_starts[i:i + 1])
        dq_list, dk, dv = [*dq_list, *dq], dk + dk_i, dv + dv_i
    return dq_list, dk, dv


class TestGroupedFlashAttentionPrecision:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_mixed_precision(self, dtype):
        """The error against an upcast formula is at most twice that of separate calls."""
        v = call(prefixes(3, 16, 96), hq=8, dtype=dtype)
        exact, lse = truth(v)
        allowed = 2 * (separate(v).double() - exact).abs().max()
        for name in serving({**v, "return_lse": True}):
            out, found_lse = lz.grouped_attention(**v, return_lse=True, backend=name)
            assert out.dtype == dtype and found_lse.dtype == torch.float32
            if not name.startswith("reference."):      # the formula rounds every step
                assert (out.double() - exact).abs().max() <= allowed, name
            torch.testing.assert_close(found_lse.double(), lse, rtol=1e-2, atol=1e-2)


def test_rows_of_no_item_are_zero_and_keys_of_no_item_are_never_read():
    v = call([(2, 3, 5, 9), (7, 1, 8, 12)], return_lse=True)
    for name in ("key", "value"):
        v[name][:5] = math.nan
    v["query"] = torch.cat((v["query"], v["query"][:2]))
    for name in serving(v):
        out, lse = lz.grouped_attention(**v, backend=name)
        outside = [0, 1, 5, 6, 8, 9]
        assert (out[outside] == 0).all() and (lse[outside] == -math.inf).all(), name
        assert out.isfinite().all() and lse[[2, 3, 4, 7]].isfinite().all(), name


def test_keys_in_chunks_are_read_where_they_lie():
    """The keys of two ranks, gathered one after the other: each has the chunks r and 3 - r."""
    v = call([(0, 8, 0, 16), (8, 8, 0, 32)], return_lse=True)
    want = lz.grouped_attention(**v, backend="reference.grouped_attention")
    order = [0, 3, 1, 2]                       # rank 0's chunks, then rank 1's
    starts = torch.tensor([[8 * order.index(c) for c in range(4)]] * 2, dtype=torch.int32)
    chunked = {**v, **{name: torch.cat([v[name].split(8)[c] for c in order])
                       for name in ("key", "value")},
               "chunk_starts": starts, "chunk_lengths": torch.full((2,), 8, dtype=torch.int32)}
    names = [*serving(chunked)]
    assert {"reference.grouped_attention", "torch.grouped_separate"} <= {*names}
    for name in names:
        torch.testing.assert_close(lz.grouped_attention(**chunked, backend=name), want)


@pytest.mark.parametrize(("change", "code"), [
    ({"items": torch.tensor([[0, 40, 0, 9]], dtype=torch.int32)}, "KV_METADATA_INVALID"),
    ({"items": torch.tensor([[0, 4, 90, 9]], dtype=torch.int32)}, "KV_METADATA_INVALID"),
    ({"items": torch.tensor([[0, 4, 0, 9], [3, 4, 0, 9]], dtype=torch.int32)},
     "KV_METADATA_INVALID"),
    ({"items": torch.tensor([[0, 4, 0, 9]])}, "KV_METADATA_INVALID"),
    ({"items": torch.tensor([[0, 4, 0]], dtype=torch.int32)}, "DIM_MISMATCH"),
    ({"chunk_lengths": torch.tensor([8, 8], dtype=torch.int32)}, "MISSING_METADATA"),
    ({"chunk_lengths": torch.tensor([8, 0], dtype=torch.int32),
      "chunk_starts": torch.zeros((2, 9), dtype=torch.int32)}, "KV_METADATA_INVALID"),
    ({"chunk_lengths": torch.tensor([8, 8], dtype=torch.int32),
      "chunk_starts": torch.full((2, 12), 90, dtype=torch.int32)}, "KV_METADATA_INVALID"),
    ({"max_seqlen_k": 7}, "KV_METADATA_INVALID")])
def test_a_call_that_means_nothing_is_refused(change, code):
    with pytest.raises(lz.errors.InvalidCall) as error:
        lz.grouped_attention(**{**call(prefixes(2)), **change})
    assert [c.name for c in error.value.codes] == [code]


def test_what_the_forks_take_and_grouped_attention_does_not_is_refused():
    v, starts = call([(0, 4, 0, 9)]), [offsets([4])]
    for more in ({"dropout_p": 0.1}, {"alibi_slopes": torch.ones(4)}, {"return_softmax": True}):
        with pytest.raises(lz.errors.InvalidCall, match=next(iter(more))):
            _flash_attn_varlen_forward_grouped([v["query"]], v["key"], v["value"], starts,
                                               [offsets([9])], [4], [9], **more)
    with pytest.raises(lz.errors.InvalidCall, match="cu_seqlens_k_list"):
        _flash_attn_varlen_forward_grouped([v["query"]], v["key"], v["value"], starts, [], [4], [9])


def test_parts_over_disjoint_keys_merge_to_the_whole():
    """Parts of lz.varlen_attention, of which one has no key."""
    v = call([(0, 6, 0, 40)], is_causal=False, return_lse=True)
    want = lz.grouped_attention(**v)
    cuts, starts_q = [0, 7, 7, 30, 40], offsets([6])
    parts = [lz.varlen_attention(v["query"], v["key"][a:b], v["value"][a:b], starts_q,
                                 offsets([b - a]), 6, b - a, return_lse=True)
             for a, b in pairwise(cuts)]
    merged = lz.merge_attention(torch.stack([out for out, _ in parts]),
                                torch.stack([lse for _, lse in parts]))
    torch.testing.assert_close(tuple(merged), tuple(want))
    nothing = torch.full((2, 3, 4), -math.inf)
    out, lse = lz.merge_attention(torch.full((2, 3, 4, 8), math.nan), nothing)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("kernel", [None, "torch.merge_attention", "reference.merge_attention"])
def test_parts_of_float64_merge_in_float64_whatever_the_log_sum_exps_are(kernel):
    outs, lses = torch.randn(3, 5, 2, 8, dtype=torch.float64), torch.randn(3, 5, 2)
    out, lse = lz.merge_attention(outs, lses, backend=kernel)
    weights = torch.softmax(lses.double(), 0)[..., None]
    torch.testing.assert_close(out, (weights * outs).sum(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.logsumexp(lses, 0))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("kernel", [None, "torch.per_sequence", "reference.varlen_attention"])
def test_gradients_of_sequences_without_any_key_are_zero(kernel, return_lse):
    query, key = torch.randn(3, 2, 8).requires_grad_(), torch.randn(0, 2, 8).requires_grad_()
    results = lz.varlen_attention(query, key, key, offsets([3]), offsets([0]), 3, 0,
                                  return_lse=return_lse, backend=kernel)
    out = results[0] if return_lse else results
    out.sum().backward()
    assert (out == 0).all() and (query.grad is None or (query.grad == 0).all())
