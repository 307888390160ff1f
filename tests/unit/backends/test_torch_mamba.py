"""Mamba-2 with torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

import layerzero as lz
from layerzero.ops import causal_conv1d


def test_convolutions_of_the_same_sizes_on_several_threads_at_once():
    """torch's own mixes them up on ARM."""
    def call(seed):
        values = causal_conv1d.inputs(c=1025, s=8, seed=seed)
        want = lz.causal_conv1d(**values, backend="reference")
        return all(torch.allclose(lz.causal_conv1d(**values, backend="torch.causal_conv1d"), want,
                                  rtol=1e-4, atol=1e-5) for _ in range(30))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))
