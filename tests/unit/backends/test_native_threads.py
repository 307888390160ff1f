"""Dispatch parity: every native kernel gives the same bits on 1, 2, 3 and 4 threads, whether its
own pool or OpenMP shares out the work; in other threads, and in a child of fork, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.backends.native import build
from layerzero.ops.formulas.ggml import random_blocks

pytestmark = pytest.mark.skipif(build.is_built() is not True,
                                reason="the CPU kernels are not built here; run: lz build")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def blocks(format: str, outputs: int, inputs: int) -> torch.Tensor:
    return random_blocks(torch.Generator().manual_seed(3), (outputs,), inputs, format)


X, WIDE = drawn(64, 1024), drawn(512, 1024)
KEYS, PAGES = drawn(2, 2, 700, 64), drawn(64, 16, 2, 64)
WEIGHTS = {"q4_k": blocks("q4_k", 300, 512), "q4_1": blocks("q4_1", 300, 512)}
ANGLES = drawn(64, 32)
# Large enough that each is shared out.
CALLS: dict[str, Callable[..., Any]] = {
    "native.linear_vector": lambda **k: lz.linear(X[:1], WIDE, **k),
    "native.linear_invariant": lambda **k: lz.linear(X, WIDE, **k),
    "native.mlp_vector": lambda **k: lz.mlp(X[:1], WIDE, drawn(1024, 256), activation="swiglu",
                                            **k),
    "native.ggml_linear": lambda **k: [
        lz.quantized_linear(X[:rows, :512], w, format=f, activations="q8", **k)
        for f, w in WEIGHTS.items() for rows in (1, 13)],
    "native.attention_decode": lambda **k: lz.attention(drawn(2, 8, 1, 64), KEYS, KEYS, **k),
    "native.paged_attention": lambda **k: lz.paged_attention(
        drawn(2, 8, 64), PAGES, PAGES, torch.arange(64, dtype=torch.int32).view(2, 32),
        torch.tensor([512, 300], dtype=torch.int32), **k),
    "native.rms_norm": lambda **k: lz.rms_norm(X, X[0], **k),
    "native.add_rms_norm": lambda **k: lz.add_rms_norm(X, X + 1, X[0], **k),
    "native.rope": lambda **k: lz.rope(drawn(1, 8, 64, 64), drawn(1, 2, 64, 64), ANGLES.cos(),
                                       ANGLES.sin(), style="rotate_half", **k),
    "native.group_norm_channels_last": lambda **k: lz.group_norm(
        drawn(2, 32, 32, 32).contiguous(memory_format=torch.channels_last), 8, **k),
    "native.moe_gate": lambda **k: lz.moe_gate(drawn(2048, 64), top_k=4, **k),
    "native.quantize": lambda **k: lz.quantize(drawn(128, 1024), format="int8", **k),
}


@pytest.fixture(autouse=True)
def as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    build.module().use_openmp(False)


def flat(result: Any) -> list[torch.Tensor]:
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [t for t in parts if isinstance(t, torch.Tensor)]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


@pytest.mark.parametrize("kernel", CALLS)
def test_threads_and_who_shares_out_change_no_bit(kernel):
    def call() -> Any:
        return CALLS[kernel](backend=kernel)

    torch.set_num_threads(1)
    try:
        want = call()
    except lz.errors.NamedKernelRefused as e:
        if not any(code in str(e) for code in ("CPU_ISA_MISSING", "MATMUL_IS_FAST",
                                               "DTYPE_UNSUPPORTED")):
            raise
        pytest.skip(f"{kernel} is made for another processor")
    for openmp in (False, True):
        build.module().use_openmp(openmp)
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            assert same(call(), want), (openmp, count)


def test_calls_of_several_threads_at_once():
    call = CALLS["native.ggml_linear"]
    want = call(backend="native.ggml_linear")
    torch.set_num_threads(3)
    with ThreadPoolExecutor(4) as threads:
        result = list(threads.map(lambda _: call(backend="native.ggml_linear"), range(24)))
    assert all(same(one, want) for one in result)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_of_fork_has_threads_of_its_own():
    torch.set_num_threads(2)

    def found() -> bytes:                      # torch's own threads do not survive a fork
        return bytes(CALLS["native.rms_norm"](backend="native.rms_norm").numpy().tobytes())

    want = found()
    child = os.fork()
    if not child:
        os._exit(0 if found() == want else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert found() == want
