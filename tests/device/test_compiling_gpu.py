"""Compiling in the background on a GPU: on a stream of its own, and no harm to a graph that is
captured meanwhile.
"""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import NVIDIA_ONLY, emitted, events_of, world

import layerzero as lz
from layerzero.dispatch.background import compiling
from layerzero.spec.event import CompileQueued, CompileSkipped, KernelRefused

__all__ = ["emitted", "world"]                # fixtures

pytestmark = NVIDIA_ONLY


def decode(keys: int, dim: int = 128) -> list[torch.Tensor]:
    return [torch.randn(1, heads, n, dim, device="cuda", dtype=torch.bfloat16)
            for heads, n in ((8, 1), (2, keys), (2, keys))]


@pytest.mark.parametrize("kernel", ["cuda.attention_decode", "triton.attention_decode"])
def test_our_kernels_take_over_when_they_are_compiled(emitted, kernel):
    if lz.validate("attention", kernel, *decode(700), backend=kernel):
        pytest.skip(f"{kernel} cannot serve here")
    values = decode(700)
    expected = torch.nn.functional.scaled_dot_product_attention(*values, enable_gqa=True)
    with lz.prefer(kernel):
        torch.testing.assert_close(lz.attention(*values), expected, rtol=2e-2, atol=2e-2)
        assert (compiling.wait(120) and not events_of(KernelRefused, emitted)
                and not events_of(CompileSkipped, emitted))
        assert lz.which("attention", *values) == kernel
        torch.testing.assert_close(lz.attention(*values), expected, rtol=2e-2, atol=2e-2)


def test_a_capture_in_another_thread_is_not_spoilt(emitted):
    """Compiling allocates memory, loads modules and waits for its stream, none of which a capture
    may see."""
    stop, captured, errors = threading.Event(), [], []
    x = torch.randn(64, 64, device="cuda")

    def capture() -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            # a thread's first product sets cuBLAS up: not in a capture
            x @ x
        side.synchronize()
        while not stop.is_set():
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=side):
                    y = x
                    for _ in range(50):
                        y = y @ x
                captured.append(graph)
            except RuntimeError as e:
                errors.append(str(e))

    # no random numbers during a capture
    calls = [decode(keys, dim) for dim in (64, 128) for keys in (300, 3000)]
    with lz.prefer(jit="never"):
        for call in calls:
            lz.attention(*call)                # what torch's own kernels set up is there before
    x @ x
    torch.cuda.synchronize()
    worker = threading.Thread(target=capture)
    worker.start()
    try:
        with lz.prefer("cuda.attention_decode", "triton.attention_decode"):
            for call in calls:
                lz.attention(*call)
            assert compiling.wait(120)
    finally:
        stop.set()
        worker.join(60)
    assert events_of(CompileQueued, emitted) and captured and not errors
