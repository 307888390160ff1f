"""Calls that torch's CUDA kernels get wrong: those that no rule lets through, and those that the
adapters change so that they are right. Without the hardware."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import layerzero as lz
from layerzero.backends import (
    aiter,
    flash_attn,
    torch_block_sparse,
    torch_grouped,
    torch_invariant,
    torch_mamba,
    torch_paged,
    torch_sdpa,
    torch_varlen,
    xformers,
)
from layerzero.backends._sequences import with_positive_scale
from layerzero.dispatch.facts import read
from layerzero.spec.device import Device
from layerzero.spec.reason import Code
from layerzero.verify.kernel.contract import case_values

MODULES = (aiter, flash_attn, torch_block_sparse, torch_grouped, torch_invariant, torch_paged,
           torch_sdpa, torch_varlen, xformers)
KERNELS = {k.id: k for m in MODULES for k in m.KERNELS}
H200 = Device("cuda", 0, "NVIDIA H200", "nvidia", sm=90, gpu_generation="hopper",
              tensor_core_generation=4)
MI300X = Device("cuda", 0, "MI300X", "amd", arch="gfx942", gpu_generation="cdna3")
# the flash and cuDNN kernels, with a call that they take
SCALED = (("torch.sdpa", {}), ("torch.sdpa_flash_cuda", {}),
          ("torch.sdpa_flash_cuda_lse", {"lse": True}),
          ("torch.sdpa_flash_window", {"window": (8, 8), "layout": "bshd"}),
          ("torch.sdpa_cudnn", {}), ("torch.sdpa_cudnn_lse", {"lse": True}),
          ("torch.sdpa_cudnn_bias", {"mask": "float"}),
          ("torch.attention_packed", {"layout": "bshd"}),
          ("torch.varlen", {"causal": True, "align": "bottom_right"}),
          ("torch.varlen_flash", {"causal": True, "align": "bottom_right"}),
          ("torch.grouped_varlen", {}), ("torch.grouped_aliased", {}),
          ("flash_attn.v2", {"layout": "bshd"}),
          ("flash_attn.v2_varlen", {"causal": True, "align": "bottom_right"}),
          ("flash_attn.v2_paged", {"page_size": 256}), ("flash_attn.v3", {"layout": "bshd"}),
          ("flash_attn.v3_paged", {}), ("flash_attn.v4", {"layout": "bshd"}),
          ("xformers.attention", {"layout": "bshd"}),
          ("aiter.attention", {"layout": "bshd"}), ("flash_attn.v2_ck", {"layout": "bshd"}))
# those of them that know no window beyond seq_k; the packed form takes one
LONG = {"sq": 24, "sk": 8, "d": 16, "align": "bottom_right", "layout": "bshd"}
SMALL = {"b": 1, "hq": 1, "hkv": 1, "sq": 2, "sk": 2}
PAGES = {"context": (1,), "hq": 1, "hkv": 1, "page_size": 1}
WIDE = (("torch.block_sparse_rows", "float32", SMALL),
        ("torch.per_sequence", "float32", {"lengths_q": (2,), "hq": 1, "hkv": 1}),
        ("torch.paged_gather", "bfloat16", PAGES), ("torch.paged_padded", "bfloat16", PAGES),
        ("torch.grouped_separate", "bfloat16", {"hq": 1, "hkv": 1}),
        ("torch.sdpa", "float32", SMALL), ("torch.sdpa_efficient", "float32", SMALL),
        ("torch.attention_each_block", "float32", SMALL))


def codes(kernel: str, dtype: str = "bfloat16", device: Device | None = None, **case) -> set[Code]:
    declared = KERNELS[kernel]
    if device is None:
        device = MI300X if kernel.startswith("aiter") or "_ck" in kernel else H200
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts = read(declared.op, case_values(declared.op, case, dtype))
    return {reason.code for reason in declared.reasons(
        {**facts, **device.facts(), "device": device.type})}


@pytest.mark.parametrize(("kernel", "case"), SCALED, ids=[name for name, _ in SCALED])
def test_flash_and_cudnn_take_positive_scales_only(kernel, case):
    assert codes(kernel, **case) == set()
    assert codes(kernel, **case, scale=0.013) == set()
    for scale in (0.0, -0.7, 1e-38):
        assert codes(kernel, **case, scale=scale) == {Code.SCALE_UNSUPPORTED}


def test_where_torch_has_other_kernels_any_scale_is_taken():
    for scale in (0.0, -0.7):
        assert codes("torch.sdpa", "float32", scale=scale) == set()
        assert codes("torch.sdpa_efficient", scale=scale) == set()
        assert codes("torch.sdpa_bias", scale=scale, causal=True) == set()
        assert codes("torch.per_sequence", scale=scale, causal=True) == set()


@pytest.mark.parametrize("kernel", ["torch.sdpa_flash_window", "flash_attn.v2", "flash_attn.v2_ck",
                                    "aiter.attention"])
def test_a_window_needs_as_many_keys_as_queries(kernel):
    for window in ((9, 12), (-1, 12)):
        assert codes(kernel, **LONG, window=window) == {Code.WINDOW_UNSUPPORTED}
        assert codes(kernel, **{**LONG, "sk": 24}, window=window) == set()
    assert codes(kernel, **LONG, causal=True, window=(9, -1)) == set()


@pytest.mark.parametrize("kernel", ["torch.sdpa_flash_window", "flash_attn.v2"])
def test_nor_is_no_right_limit_taken_for_none_there(kernel):
    assert codes(kernel, **LONG, window=(3, -1)) == {Code.WINDOW_UNSUPPORTED}


@pytest.mark.parametrize("kernel", ["torch.attention_packed", "flash_attn.v3"])
def test_a_window_beyond_the_keys_is_taken_where_it_is_right(kernel):
    assert codes(kernel, **LONG, window=(9, 12)) == set()


@pytest.mark.parametrize(("kernel", "dtype", "case"), WIDE, ids=[name for name, *_ in WIDE])
def test_rows_that_no_efficient_kernel_is_compiled_for(kernel, dtype, case):
    cpu = Device("cpu", 0, "a CPU", "intel")
    assert Code.HEAD_DIM_TOO_LARGE not in codes(kernel, dtype, d=65536, **case)
    assert Code.HEAD_DIM_TOO_LARGE in codes(kernel, dtype, d=66024, **case)
    if kernel not in ("torch.sdpa_efficient", "torch.attention_each_block"):
        assert Code.HEAD_DIM_TOO_LARGE not in codes(kernel, dtype, cpu, d=66024, **case)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-38, -1e-38])
def test_the_adapters_give_torch_a_positive_scale(scale):
    for op, backend, case in (
            ("varlen_attention", "torch.per_sequence", {"causal": True, "align": "top_left"}),
            ("paged_attention", "torch.paged_gather", {"lengths_q": (3, 1, 5), "causal": True}),
            ("grouped_attention", "torch.grouped_separate", {"causal": True}),
            ("block_sparse_attention", "torch.block_sparse_rows", {"mask": "causal"})):
        values = case_values(lz.op(op), {**case, "scale": scale}, "float32")
        exact = {name: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                 for name, v in values.items()}
        call = getattr(lz, op)
        torch.testing.assert_close(call(**values, backend=backend).double(),
                                   call(**exact, backend="reference"), rtol=1e-5, atol=1e-5)
    query = torch.randn(3)
    assert with_positive_scale(query, None) == (query, None)
    assert with_positive_scale(query, 0.3) == (query, 0.3)


# FlashAttention 2 reads a window beyond the longest keys as none (csrc/flash_attn/flash_api.cpp).

def flash(query, key, value, starts_q, starts_k, longest_q, longest_k, dropout_p, is_causal, debug,
          *, scale=None, window_size_left=-1, window_size_right=-1, seqused_k=None):
    """Its packed entry in plain torch, with its reading of a window."""
    left, right = window_size_left, 0 if is_causal else window_size_right
    left, right = (-1 if side >= longest_k else side for side in (left, right))
    if (left < 0) != (right < 0):
        left, right = (longest_k if side < 0 else side for side in (left, right))
    out, lse = torch.zeros_like(query), torch.full(query.shape[1::-1], math.inf)
    group = query.shape[1] // key.shape[1]
    for i, (first, last) in enumerate(zip(starts_q.tolist(), starts_q.tolist()[1:])):
        start, n = int(starts_k[i]), last - first
        m = int(starts_k[i + 1]) - start if seqused_k is None else int(seqused_k[i])
        if n and m:
            k, v = (t[start:start + m].repeat_interleave(group, 1).double() for t in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query[first:last].double(), k)
            scores *= query.shape[2] ** -0.5 if scale is None else scale
            distance = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
            hidden = (distance < -left) & (left >= 0) | (distance > right) & (right >= 0)
            scores = scores.masked_fill(hidden, -math.inf)
            total = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - total.masked_fill(total == -math.inf, 0.0)[..., None])
            out[first:last] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
            lse[:, first:last] = total.where(total > -math.inf, math.inf)
    return out, lse


WINDOWS = ((9, 12), (-1, 12), (3, -1), (3, 2), (-1, 40), (30, 9), (0, 8))
LENGTHS = ((24, 8), (8, 24), (9, 8), (8, 8), (40, 1))


@pytest.fixture
def flash_entry(monkeypatch):
    monkeypatch.setattr(flash, "default", flash, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash, raising=False)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_longer_bound_keeps_the_window_of_packed_sequences(flash_entry, window):
    run = torch_varlen._varlen_flash()
    for lengths in ((LENGTHS[0],), LENGTHS[:2], LENGTHS):
        values = case_values(lz.op("varlen_attention"), {
            "lengths_q": tuple(n for n, _ in lengths), "lengths_k": tuple(m for _, m in lengths),
            "window": window, "align": "bottom_right", "lse": True}, "float32")
        want = lz.varlen_attention(**values, backend="reference")
        names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
                 "max_seqlen_k", "scale", "window_left", "window_right", "return_lse")
        torch.testing.assert_close(run(**{name: values[name] for name in names}), want,
                                   rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_longer_bound_keeps_the_window_of_items(flash_entry, window):
    items = torch.tensor([(sum(n for n, _ in LENGTHS[:i]), n, 3 * i, m)
                          for i, (n, m) in enumerate(LENGTHS)], dtype=torch.int32)
    query, key, value = (torch.randn(rows, heads, 16)
                         for rows, heads in ((89, 4), (40, 2), (40, 2)))
    for chosen in (items, items[:1], items[3:]):
        values = {"query": query, "key": key, "value": value, "items": chosen,
                  "max_seqlen_q": int(chosen[:, 1].max()), "max_seqlen_k": int(chosen[:, 3].max()),
                  "window_left": window[0], "window_right": window[1], "return_lse": True}
        want = lz.grouped_attention(**values, backend="reference")
        for load in (torch_grouped._varlen, torch_grouped._aliased):
            torch.testing.assert_close(load()(**values), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_longer_bound_keeps_the_window_of_a_batch(flash_entry, window):
    for n, m in LENGTHS:
        values = case_values(lz.op("attention"), {
            "sq": n, "sk": m, "d": 16, "align": "bottom_right", "layout": "bshd",
            "window": window}, "float32")
        got = torch_invariant._attention_packed()(
            values["query"], values["key"], values["value"], window_left=window[0],
            window_right=window[1])
        torch.testing.assert_close(got, lz.attention(**values, backend="reference"), rtol=1e-5,
                                   atol=1e-5)


def test_convolutions_that_torch_leaves_to_cudnn_are_known():
    by_cudnn = torch_mamba.by_cudnn
    assert by_cudnn(torch.empty(108, 1, 4)) and not by_cudnn(torch.empty(1, 2, 4))
    assert by_cudnn(torch.empty(1 << 7, 1 << 12, 1 << 12, device="meta"))
    assert not by_cudnn(torch.empty(1 << 7, 1 << 12, (1 << 12) - 1, device="meta"))
