"""Every kernel that runs on CUDA against its contract, the chosen one against torch, and capture in
a graph.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.backends import CATALOG
from layerzero.spec.kernel import Kernel
from layerzero.verify.kernel.contract import check_case, upcast

pytestmark = [pytest.mark.gpu, pytest.mark.correctness]

KERNELS: tuple[Kernel, ...] = tuple(
    k for name in CATALOG for k in importlib.import_module(f"layerzero.backends.{name}").KERNELS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if not k.jit and k.op.read is None],
                         ids=lambda k: k.id)
def test_kernel_keeps_the_contract_on_cuda(kernel: Kernel, dtype: str) -> None:
    """All cases of one kernel and dtype at once: there are thousands, and a GPU is quick."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [check_case(kernel, case, dtype, "cuda") for case in kernel.op.cases]
    ran = [r for r in results if r.status != "skipped"]
    if not ran:
        pytest.skip("; ".join(sorted({str(reason.code) for r in results for reason in r.reasons})))
    assert all(r.passed for r in ran), "\n".join(str(r) for r in ran if not r.passed)


SHAPES: tuple[dict[str, Any], ...] = (
    {"sq": 512, "sk": 512, "causal": True, "hq": 8, "hkv": 2, "d": 128},
    {"sq": 1, "sk": 1000, "hq": 8, "hkv": 2, "d": 128},
    {"sq": 77, "sk": 333}, {"sq": 64, "sk": 64, "mask": "bool"},
    {"sq": 4, "sk": 130, "causal": True, "align": "bottom_right"})


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_the_chosen_kernel_agrees_with_the_upcast_formula(case: dict[str, Any]) -> None:
    values = lz.op("attention").inputs(**case, dtype=torch.bfloat16, device="cuda")
    truth = lz.op("attention").reference(**upcast(values))
    torch.testing.assert_close(lz.attention(**values).double(), truth, rtol=2e-2, atol=2e-2)


def test_a_fused_kernel_is_chosen_for_plain_half_precision() -> None:
    q = torch.randn(2, 8, 256, 128, device="cuda", dtype=torch.bfloat16)
    assert lz.which("attention", q, q, q, is_causal=True) not in ("torch.sdpa_math",
                                                                  "reference.attention")


def test_capture_in_a_graph() -> None:
    q, k, v = (torch.randn(1, 8, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    lz.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = lz.attention(q, k, v)
    for seed in range(3):
        torch.manual_seed(seed)
        q.copy_(torch.randn_like(q))
        graph.replay()
        torch.testing.assert_close(out, lz.attention(q, k, v), rtol=2e-2, atol=2e-2)


def test_mixed_devices_are_the_callers_mistake() -> None:
    q = torch.randn(1, 2, 8, 64, device="cuda")
    with pytest.raises(lz.errors.InvalidCall, match="MIXED_DEVICES"):
        lz.attention(q, q.cpu(), q)


def test_out_of_memory_walks_down_the_plan() -> None:
    def hungry(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 50, device="cuda", dtype=torch.uint8)

    events: list[Any] = []
    stop = lz.subscribe(events.append)
    lz.register(lz.Kernel("hungry.attention", lz.op("attention"), lambda: hungry, prior=1e9,
                          less_work="a test"))
    try:
        q = torch.randn(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(lz.attention(q, q, q),
                                   torch.nn.functional.scaled_dot_product_attention(q, q, q),
                                   rtol=2e-2, atol=2e-2)
        fallback = [e for e in events if e.name == "fallback"]
        assert fallback and fallback[0].reason.code is lz.Code.OUT_OF_MEMORY
        assert not any(e.name == "health" for e in events)
    finally:
        stop()
        lz.unregister("hungry.attention")


def test_compiled_on_cuda() -> None:
    q = torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, device="cuda", dtype=torch.bfloat16)

    def block(q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return lz.rms_norm(lz.attention(q, q, q, is_causal=True), w) * 2

    torch.testing.assert_close(torch.compile(block, fullgraph=True)(q, w), block(q, w), rtol=2e-2,
                               atol=2e-2)
