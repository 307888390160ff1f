"""Our CUDA C++ on a GPU: the contract's cases, larger shapes, and launching: clusters, graphs,
streams, threads.
"""

from __future__ import annotations

import struct
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.cuda import KERNELS, compiler
from layerzero.machine import faults
from layerzero.spec.kernel import Kernel
from layerzero.spec.rules.launch import LaunchRefused
from layerzero.verify.kernel.contract import case_values, check_case, refusals

pytestmark = [pytest.mark.gpu, pytest.mark.correctness]

# Larger than the op's own cases: clusters of all sizes, every tile of a kernel in use.
LARGE: dict[str, tuple[dict[str, Any], ...]] = {
    "cuda.attention_decode": (
        {"b": 2, "hq": 32, "hkv": 8, "sq": 1, "sk": 4097, "d": 128, "lse": True},
        {"b": 1, "hq": 32, "hkv": 8, "sq": 8, "sk": 3000, "d": 128, "causal": True,
         "align": "bottom_right"},
        {"b": 1, "hq": 32, "hkv": 8, "sq": 3, "sk": 3000, "d": 128},
        {"b": 1, "hq": 16, "hkv": 1, "sq": 2, "sk": 2000, "d": 64, "window": (700, -1),
         "align": "bottom_right"},
        {"b": 1, "hq": 16, "hkv": 1, "sq": 2, "sk": 2000, "d": 64, "causal": True,
         "window": (700, -1),
         "align": "bottom_right", "lse": True},
        {"b": 3, "hq": 8, "hkv": 8, "sq": 1, "sk": 1000, "d": 256},
        {"b": 70, "hq": 32, "hkv": 8, "sq": 1, "sk": 500, "d": 128},
        {"b": 1, "hq": 12, "hkv": 2, "sq": 5, "sk": 17, "d": 64, "causal": True,
         "align": "bottom_right", "lse": True},
        {"b": 1, "hq": 8, "hkv": 2, "sq": 1, "sk": 1000, "d": 128, "layout": "bshd"},
        {"b": 2, "hq": 8, "hkv": 2, "sq": 1, "sk": 1000, "d": 128, "stride": "padded"},
        {"b": 2, "hq": 8, "hkv": 2, "sq": 1, "sk": 1000, "d": 128, "stride": "transposed",
         "extreme": True}),
    "cuda.paged_attention_decode": (
        {"context": (5000, 17, 900), "hq": 32, "hkv": 8, "d": 128, "lse": True},
        {"context": (700, 3000), "lengths_q": (3, 8), "hq": 32, "hkv": 8, "d": 128,
         "layout": "HND"},
        {"context": (700, 3000, 0, 1), "hq": 32, "hkv": 8, "d": 64, "page_size": 64, "window": 300,
         "lse": True},
        {"context": (700, 3000), "hq": 8, "hkv": 1, "d": 256, "page_size": 32}),
    "cuda.paged_attention_shared": (
        {"context": (5000, 17, 900), "hq": 32, "hkv": 8, "d": 128, "lse": True},
        {"context": (700, 3000), "lengths_q": (3, 8), "hq": 32, "hkv": 8, "d": 128,
         "layout": "HND"},
        {"context": (700, 3000, 0, 1), "hq": 32, "hkv": 8, "d": 64, "page_size": 64, "window": 300,
         "lse": True},
        {"context": (700, 3000), "hq": 8, "hkv": 1, "d": 256, "page_size": 32, "softcap": 9.0},
        {"context": tuple(range(100, 500, 5)), "hq": 32, "hkv": 8, "d": 128}),
    "cuda.grouped_attention_decode": (
        {"items": tuple((i, 1, 0, 128 * (i + 1)) for i in range(64)), "hq": 32, "hkv": 8, "d": 128,
         "lse": True},
        {"items": tuple((4 * i, 4, 70 * i, 4000) for i in range(40)), "hq": 16, "hkv": 4, "d": 128,
         "lse": True},
        {"items": tuple((3 * i, 3, 5000 * (i % 3), 900 + 13 * i) for i in range(30)), "hq": 32,
         "hkv": 8, "d": 64, "softcap": 20.0, "window": (500, 0)},
        {"items": tuple((3 * i, 3, 5000 * (i % 3), 900 + 13 * i) for i in range(30)), "hq": 32,
         "hkv": 8, "d": 128, "softcap": 20.0, "window": (500, 0)},
        {"items": ((0, 2, 7, 5000), (2, 2, 0, 9000)), "hq": 8, "hkv": 2, "d": 256, "lse": True}),
    "cuda.linear_rows": (
        *({"rows": (r,), "k": 4096, "n": 3000} for r in (1, 2, 5, 8, 9, 16)),
        *({"rows": (r,), "k": 14336, "n": 520, "bias": False} for r in (3, 16)),
        {"rows": (8,), "k": 32768, "n": 40}, {"rows": (2, 4), "k": 4104, "n": 8200}),
    "cuda.quantized_linear": (
        *({"format": f, "rows": (r,), "k": 4096, "n": 3000, "group": g}
          for f in ("int4", "int8", "fp8_e4m3") for g in (0, 32, 64, 128) for r in (1, 2, 5, 16)),
        *({"format": f, "rows": (r,), "k": 14336, "n": 520, "group": 128, "symmetric": False,
           "bias": True}
          for f in ("int4", "int8") for r in (1, 7)),
        {"format": "int4", "rows": (3,), "k": 4064, "n": 1, "group": 256},
        {"format": "int8", "rows": (16,), "k": 32768, "n": 40, "group": 32,
         "scale_dtype": "float16"}),
    "cuda.rms_norm": ({"rows": (1,), "hidden": 8192}, {"rows": (700,), "hidden": 4096},
                      {"rows": (40, 32), "hidden": 128}, {"rows": (300,), "hidden": 5120},
                      {"rows": (3,), "hidden": 32768}),
    "cuda.add_rms_norm": ({"rows": (700,), "hidden": 4096}, {"rows": (1,), "hidden": 16384}),
    "cuda.sample": (
        {"batch": 5, "vocab": 128256}, {"batch": 3, "vocab": 128256, "min_p": 0.02},
        {"batch": 70, "vocab": 50257, "temperature": 0.8, "random": "seed"},
        {"batch": 3, "vocab": 128256, "probs": True}, {"batch": 1, "vocab": 151936, "top_p": 0.9},
        {"batch": 2, "vocab": 1 << 20, "top_k": 50, "random": "seed_rows"},
        {"batch": 9, "vocab": 32001, "rows": True}),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_kernel_keeps_the_contract_on_cuda(kernel: Kernel, dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [check_case(kernel, case, dtype, "cuda")
                   for case in (*kernel.op.cases, *LARGE.get(kernel.id, ()))]
    ran = [r for r in results if r.status != "skipped"]
    if not ran:
        pytest.skip("; ".join(sorted({str(reason.code) for r in results for reason in r.reasons})))
    assert all(r.passed for r in ran), "\n".join(str(r) for r in ran if not r.passed)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_the_larger_cases_are_taken(kernel: Kernel) -> None:
    """One that a rule refuses proves nothing."""
    needs_clusters()
    for case in LARGE[kernel.id]:
        assert refusals(kernel, case_values(kernel.op, case, "bfloat16", "cuda")) == (), case


# Launching

RANKS = """
#include "device.h"
struct Params { i32* out; i64 n; i32 add; };
KERNEL(ranks, Params, THREADS)
{
    u32* mine = (u32*)shared();
    if (thread() == 0) mine[0] = block_x();
    sync_cluster();
    const i32 last = (i32)cluster_read(mine, cluster_size() - 1);             // the last block of this cluster
    const i64 i = i64(block_x()) * THREADS + thread();
    if (i < p.n) p.out[i] = last * 100 + cluster_rank() + p.add;
    sync_cluster();
}
"""
PARAMS = struct.Struct("@Pqi")


def needs_clusters() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(
            "clusters need compute capability 9.0, this GPU has "
            f"{torch.cuda.get_device_capability()}")
    if compiler.ready() is not True:
        pytest.skip(str(compiler.ready()))


@pytest.fixture
def ranks(tmp_path: Path) -> str:
    needs_clusters()
    path = tmp_path / "ranks.cu"
    path.write_text(RANKS)
    return str(path)


def compile_ranks(source: str, cluster: int, shared: int = 16) -> compiler.CompiledCuda:
    return compiler.kernel(source, "ranks", (("THREADS", 32),), 32, shared, cluster)


def expected_ranks(blocks: int, cluster: int, add: int = 0) -> Tensor:
    block = torch.arange(blocks, device="cuda", dtype=torch.int32).repeat_interleave(32)
    return (block // cluster * cluster + cluster - 1) * 100 + block % cluster + add


def launch(kernel: compiler.CompiledCuda, blocks: int, add: int = 0,
           device: str = "cuda") -> Tensor:
    out = torch.full((blocks * 32,), -1, dtype=torch.int32, device=device)
    kernel.launch((blocks, 1, 1), PARAMS, out, out.numel(), add)
    return out


@pytest.mark.parametrize("shared", [16, 100 << 10])
@pytest.mark.parametrize("cluster", [1, 2, 8, 16])
def test_clusters_of_every_size_and_much_shared_memory(ranks: str, cluster: int,
                                                       shared: int) -> None:
    kernel = compile_ranks(ranks, cluster, shared)
    assert torch.equal(launch(kernel, 48, 5), expected_ranks(48, cluster, 5))
    # what was laid out before is not kept
    assert torch.equal(launch(kernel, 16, -2), expected_ranks(16, cluster, -2))


def test_more_than_the_device_has_is_refused_before_the_launch(ranks: str) -> None:
    with pytest.raises(LaunchRefused, match="shared memory"):
        launch(compile_ranks(ranks, 1, 1 << 20), 1)
    kernel = compile_ranks(ranks, 1)
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    with pytest.raises(LaunchRefused, match="grid y"):
        kernel.launch((1, 70000, 1), PARAMS, out, 32, 0)
    assert torch.equal(launch(kernel, 2),
                       expected_ranks(2, 1))                      # nothing is broken


def test_an_error_of_the_driver_is_a_fault_of_the_kernel(ranks: str) -> None:
    with pytest.raises(RuntimeError, match=r"CUDA error: .*ranks.cu:ranks") as caught:
        # 3 blocks are no clusters of 2
        launch(compile_ranks(ranks, 2), 3)
    assert faults.classify(caught.value) == "kernel"
    assert torch.equal(launch(compile_ranks(ranks, 2), 4), expected_ranks(4, 2))


def test_a_kernel_that_is_not_there_is_named(ranks: str) -> None:
    absent = compiler.kernel(ranks, "absent", (("THREADS", 32),), 32)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_NOT_FOUND.*ranks.cu:absent"):
        launch(absent, 1)


def test_a_graph_holds_the_launch_and_its_parameters(ranks: str) -> None:
    kernel = compile_ranks(ranks, 4)
    launch(kernel, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [launch(kernel, 8, add) for add in range(3)]
    # other parameters, after the capture
    launch(kernel, 4, 99)
    for out in outs:
        out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for add, out in enumerate(outs):
        assert torch.equal(out, expected_ranks(8, 4, add))


def test_a_kernel_may_be_compiled_and_loaded_while_a_graph_is_captured(ranks: str) -> None:
    torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(compile_ranks(ranks, 8), 8, 3)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected_ranks(8, 8, 3))


def test_another_thread_may_load_while_a_graph_is_captured(ranks: str) -> None:
    """Captures are jealous of the whole process: an unsafe call of any thread would end this one.
    """
    loading, graph = compile_ranks(ranks, 2), torch.cuda.CUDAGraph()
    kernel = compile_ranks(ranks, 4)
    launch(kernel, 4)
    faulty: list[BaseException] = []

    def load() -> None:
        try:
            compiler.ensure_context(0)
            loading._load(0)
        except RuntimeError as e:
            faulty.append(e)

    with torch.cuda.graph(graph):
        out = launch(kernel, 4, 1)
        other = threading.Thread(target=load)
        other.start()
        other.join()
    graph.replay()
    torch.cuda.synchronize()
    assert not faulty and torch.equal(out, expected_ranks(4, 4, 1))


def test_the_current_stream_is_used(ranks: str) -> None:
    kernel, stream = compile_ranks(ranks, 2), torch.cuda.Stream()
    launch(kernel, 2)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        out = launch(kernel, 64, 7)
        begun = stream.query()
    # it waits behind what that stream does
    assert not begun
    stream.synchronize()
    assert torch.equal(out, expected_ranks(64, 2, 7))


def test_threads_launch_the_same_kernel_at_once(ranks: str) -> None:
    """New threads, which have no context yet; each with its own grid and parameters."""
    kernel = compile_ranks(ranks, 2)
    want = {n: [expected_ranks(2 * n, 2, add) for add in range(50)] for n in range(1, 9)}
    wrong: list[Any] = []

    def work(n: int) -> None:
        try:
            outs = [launch(kernel, 2 * n, add) for add in range(50)]
            torch.cuda.synchronize()
            wrong.extend((n, add) for add, out in enumerate(outs)
                         if not torch.equal(out, want[n][add]))
        except RuntimeError as e:
            wrong.append(e)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(n,)) for n in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.multigpu
def test_a_launch_goes_where_the_memory_is(ranks: str) -> None:
    assert torch.cuda.current_device() == 0
    out = launch(compile_ranks(ranks, 2), 4, 1, "cuda:1")
    assert torch.equal(out.cpu(),
                       expected_ranks(4, 2, 1).cpu()) and torch.cuda.current_device() == 0
