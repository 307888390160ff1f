"""Kernels that declare themselves invariant keep their bits on a GPU, across sizes of tiles too."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.backends import CATALOG
from layerzero.machine import loading
from layerzero.verify.certification.invariance import check_invariance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(),
                                                  reason="there is no GPU")]
BOTH = {"batch_invariant": True, "tp_invariant": True}


def grid() -> list[Any]:
    kernels = [k for name in CATALOG
               for k in importlib.import_module(f"layerzero.backends.{name}").KERNELS]
    return [pytest.param(kernel, to, id=f"{kernel.id}-{to}") for kernel in kernels
            for to, declared in (("batch", kernel.batch_invariant), ("tp", kernel.tp_invariant))
            if declared and not kernel.untested and loading.availability(kernel) is None
            and kernel.backend in ("torch", "triton", "cuda") and "_each_row" not in kernel.id]


@pytest.mark.parametrize(("kernel", "to"), grid())
def test_a_part_alone_has_the_bits_it_has_in_the_whole(kernel, to):
    op = kernel.op
    results = [check_invariance(kernel, case, dtype, to, "cuda") for dtype in op.dtypes[:3]
               for case in (*op.cases[::4], *op.invariance_cases)]
    assert not [str(result) for result in results if result.status == "failed"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_keep_their_bits_at_the_sizes_of_a_model(dtype):
    gen = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=gen).to(dtype)

    x, weight = draw(300, 4096), draw(1032, 4096) / 64
    query, keys, values = draw(6, 16, 1, 128), draw(6, 4, 3000, 128), draw(6, 4, 3000, 128)
    prompt = draw(3, 16, 333, 128), draw(3, 4, 333, 128), draw(3, 4, 333, 128)
    with lz.prefer(**BOTH):
        whole = lz.linear(x, weight)
        for first, count in ((0, 1), (299, 1), (17, 64), (100, 65), (3, 128)):
            assert torch.equal(lz.linear(x[first:first + count], weight),
                               whole[first:first + count])
        assert torch.equal(lz.linear(x, weight[256:520]), whole[:, 256:520])
        decoded = lz.attention(query, keys, values)
        assert torch.equal(lz.attention(query[4:5], keys[4:5], values[4:5]), decoded[4:5])
        assert torch.equal(lz.attention(query[:, 4:8], keys[:, 1:2], values[:, 1:2]),
                           decoded[:, 4:8])
        read = lz.attention(*prompt, is_causal=True)
        assert torch.equal(lz.attention(*(t[2:] for t in prompt), is_causal=True), read[2:])
        assert torch.equal(lz.attention(*(t[:, t.shape[1] // 2:] for t in prompt),
                                        is_causal=True), read[:, 8:])
