"""What our own GPU kernels have to do alike, whatever they are written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerzero.backends import cuda, triton
from layerzero.ops import sample as sample_op

pytestmark = [pytest.mark.gpu, pytest.mark.correctness]


def loaded(name: str) -> Callable[..., Any]:
    if name.startswith("cuda."):
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip(
                "clusters need compute capability 9.0, this GPU has "
                f"{torch.cuda.get_device_capability()}")
        if cuda.compiler.ready() is not True:
            pytest.skip(str(cuda.compiler.ready()))
    return next(k for k in (*triton.KERNELS, *cuda.KERNELS) if k.id == name).load()


@pytest.mark.parametrize("name", ["triton.attention_decode", "cuda.attention_decode"])
def test_captured_calls_do_not_disturb_each_other(name: str) -> None:
    """Two graphs with several split calls each, replayed at the same time on two streams, again and
    again."""
    attention_decode = loaded(name)

    def inputs(seed: int) -> tuple[torch.Tensor, ...]:
        gen = torch.Generator("cuda").manual_seed(seed)
        return tuple(torch.randn(shape, generator=gen, device="cuda", dtype=torch.bfloat16)
                     for shape in ((1, 32, 1, 128), (1, 8, 4096, 128), (1, 8, 4096, 128)))

    jobs = []
    for seed in range(2):
        q, k, v = inputs(seed)
        want = attention_decode(q, k, v)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [attention_decode(q, k, v) for _ in range(4)]
        # a graph does not keep its inputs
        jobs.append((graph, outs, want, torch.cuda.Stream(), (q, k, v)))
    for _ in range(50):
        for graph, _, _, stream, _ in jobs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, outs, want, _, _ in jobs:
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("name", ["triton.sample", "cuda.sample"])
def test_sampled_tokens_are_the_formulas_for_every_seed(name: str) -> None:
    """Where the filters cut must be exact, not nearly so: many rows, many seeds, ties among them.
    """
    sample = loaded(name)
    gen = torch.Generator("cuda").manual_seed(0)
    for scale, dtype in ((3.0, torch.float32), (0.3, torch.float32), (1.0, torch.bfloat16)):
        logits = (torch.randn(64, 32000, generator=gen, device="cuda") * scale).to(dtype)
        for options in ({"top_p": 0.9}, {"top_k": 40}, {"top_k": 1000, "top_p": 0.5},
                        {"min_p": 0.05},
                        {}):
            for seed in range(5):
                got, want = (f(logits, **options, seed=seed) for f in (sample, sample_op.reference))
                assert torch.equal(got, want), (scale, dtype, options, seed)
