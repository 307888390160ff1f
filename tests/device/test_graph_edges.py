"""Kernels of a captured chain begin while the one before ends, and read what it wrote."""

from __future__ import annotations

import pytest
import torch

from layerzero.backends.cuda import graph_edges
from layerzero.backends.cuda.attention import token
from layerzero.backends.cuda.linear import rows as products
from layerzero.backends.cuda.norm import norm
from layerzero.operate import graphs
from layerzero.spec import replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip)
                       or torch.cuda.get_device_capability() < (9, 0),
                       reason="needs an NVIDIA GPU of compute capability 9.0")]
LAYERS, REPLAYS = 12, 50


@pytest.mark.parametrize("rows", [1, 5])
def test_a_chain_of_kernels_that_depend_on_each_other(rows: int,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of a small model, where launches are most of the time, and large weights now and
    then, so that both long and short kernels come before and after each other."""
    pytest.importorskip("triton")
    from layerzero.backends.triton import gemv
    from layerzero.backends.triton.gated import gate
    counts: list[int] = []
    overlap = graph_edges.overlap
    monkeypatch.setattr(graph_edges, "overlap",
                        lambda *args: counts.append(overlap(*args)) or counts[-1])
    torch.manual_seed(0)
    hidden = 1024

    def weight(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16) * size[1] ** -0.5

    inners = [8192 if n % 4 == 3 else 512 for n in range(LAYERS)]
    layers = [(weight(2 * inner, hidden), weight(hidden, inner)) for inner in inners]
    gain = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    x = torch.empty((rows, hidden), device="cuda", dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        residual = x
        for into, down in layers:
            y = norm.launch(residual, None, gain, 1e-6, 0.0)[0]
            y = gate(*gemv.linear(y, into).chunk(2, -1), "swiglu")
            residual = norm.launch(gemv.linear(y, down), residual, gain, 1e-6, 0.0)[1]
        return residual

    trial = graphs.attempt(run, overlap=True)
    assert not trial.problems
    assert counts and counts[0] >= 4 * LAYERS - 2
    assert replay.waiting
    for _ in range(REPLAYS):
        x.copy_(torch.randn_like(x))
        trial.graph.replay()
        got = trial.result.clone()
        assert torch.equal(got, run())


@pytest.mark.parametrize("batch, position", [(8, 0), (8, 517), (2, 1500), (17, 300)])
def test_attention_between_products_that_stream_ahead(batch: int, position: int) -> None:
    """Keys are read, and rings filled, before the product in front has ended. The position and the
    cache change between replays, as tokens come."""
    torch.manual_seed(0)
    heads, kv_heads, dim, room = 8, 2, 128, position + 64
    hidden = heads * dim

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    layers = [(drawn((heads + 2 * kv_heads) * dim, hidden) * hidden ** -0.5,
               drawn(hidden, hidden) * hidden ** -0.5,
               drawn(batch, room, kv_heads, dim), drawn(batch, room, kv_heads, dim))
              for _ in range(LAYERS)]
    before = [tuple(cache.clone() for cache in layer[2:]) for layer in layers]
    angles, at = drawn(room, 2 * dim), torch.tensor([position], device="cuda")
    x = drawn(batch, 1, hidden)
    product = products.launch if batch <= 16 else torch.nn.functional.linear

    def run() -> torch.Tensor:
        y = x
        for qkv, out, keys, values in layers:
            joined = product(y, qkv, None).view(batch, 1, -1, dim)
            attended = token.attend(joined[:, :, :-kv_heads], joined[:, :, -kv_heads:], angles, at,
                                    keys, values, dim ** -0.5)
            y = product(attended.flatten(1).unsqueeze(1), out, None)
        return y

    trial = graphs.attempt(run, overlap=True)
    assert not trial.problems

    def steps(step: object) -> list[torch.Tensor]:
        for layer, old in zip(layers, before):
            for cache, copy in zip(layer[2:], old):
                cache.copy_(copy)
        at.fill_(position)
        found = []
        for _ in range(40):
            found.append(step().clone())           # type: ignore[operator]
            at.add_(1)
        return found

    def replayed() -> torch.Tensor:
        trial.graph.replay()
        return trial.result                        # type: ignore[no-any-return]

    assert all(torch.equal(a, b) for a, b in zip(steps(replayed), steps(run)))
