"""Our Triton kernels on a GPU: the contract's cases, larger shapes, and what only a GPU has: graphs
and streams.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from layerzero.backends.triton import DEFAULTS, KERNELS
from layerzero.spec.kernel import Kernel
from layerzero.verify.kernel.contract import check_case

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.correctness]

# Larger than the op's own cases: many programs that meet at a counter, every tile of a kernel in
# use.
LARGE: dict[str, tuple[dict[str, Any], ...]] = {
    "triton.attention_decode": (
        {"b": 2, "hq": 32, "hkv": 8, "sq": 1, "sk": 4097, "d": 128, "lse": True},
        {"b": 1, "hq": 32, "hkv": 8, "sq": 8, "sk": 3000, "d": 128, "causal": True,
         "align": "bottom_right"},
        {"b": 1, "hq": 16, "hkv": 1, "sq": 4, "sk": 2000, "d": 64, "window": (700, 0),
         "align": "bottom_right"},
        {"b": 3, "hq": 8, "hkv": 8, "sq": 1, "sk": 1000, "d": 256, "softcap": 30.0},
        {"b": 1, "hq": 8, "hkv": 2, "sq": 1, "sk": 1000, "d": 128, "alibi": True,
         "align": "bottom_right",
         "layout": "bshd"}),
    "triton.paged_attention_decode": (
        {"context": (5000, 17, 900), "hq": 32, "hkv": 8, "d": 128, "lse": True},
        {"context": (700, 3000), "lengths_q": (3, 8), "hq": 32, "hkv": 8, "d": 128,
         "layout": "HND"},
        {"context": (2000, 100), "hq": 32, "hkv": 8, "d": 128, "stored": "float8_e4m3fn",
         "scales": "head"},
        {"context": (2000, 100), "hq": 32, "hkv": 8, "d": 128, "stored": "int8", "scales": "one"}),
    "triton.rms_norm": ({"rows": (1,), "hidden": 8192}, {"rows": (700,), "hidden": 4096},
                        {"rows": (40, 32), "hidden": 128}, {"rows": (300,), "hidden": 5120}),
    "triton.add_rms_norm": ({"rows": (700,), "hidden": 4096}, {"rows": (1,), "hidden": 16384}),
    "triton.linear_gemv": ({"rows": (1,), "k": 4096, "n": 14336},
                           {"rows": (7,), "k": 4096, "n": 1024},
                           {"rows": (16,), "k": 2048, "n": 14336}),
    "triton.quantized_linear_gemv": tuple(
        {"format": f, "rows": (r,), "k": 4096, "n": 3000, "group": g}
        for f, g in (("int8", 0), ("int4", 128), ("fp8_e4m3", 0), ("int8", 128)) for r in (1,)),
    "triton.quantized_linear_tiled": tuple(
        {"format": f, "rows": (r,), "k": 4096, "n": 3000, "group": g}
        for f, g in (("int8", 0), ("int4", 128), ("fp8_e4m3", 0), ("nf4", 64), ("mxfp4", 32),
                     ("nvfp4", 16)) for r in (5, 64)),
    "triton.quantized_linear_decoded": tuple(
        {"format": f, "rows": (130,), "k": 4096, "n": 3000, "group": g}
        for f, g in (("int8", 0), ("int4", 128), ("fp8_e4m3", 0), ("nvfp4", 16))),
    "triton.int8_dynamic_linear": (
        {"activations": "int8", "rows": (130,), "k": 4096, "n": 3072, "bias": True},),
    "triton.fp8_dynamic_linear": (
        {"format": "fp8_e4m3", "activations": "fp8", "rows": (130,), "k": 4096, "n": 3072,
         "bias": True},),
    "triton.sample": (
        {"batch": 5, "vocab": 128256}, {"batch": 3, "vocab": 128256, "min_p": 0.02},
        {"batch": 70, "vocab": 50257, "temperature": 0.8, "random": "seed"},
        {"batch": 3, "vocab": 128256, "probs": True}),
    "triton.rope": ({"b": 2, "hq": 32, "hkv": 8, "s": 300, "d": 128},
                    {"b": 1, "hq": 32, "hkv": 8, "s": 1, "d": 128}),
    "triton.mlp": ({"rows": (33,), "hidden": 512, "inner": 5000},),
    "triton.quantize": tuple({"format": f, "rows": (300,), "width": 4096, "granularity": g,
                              "block_rows": r}
                             for f in ("int8", "fp8_e4m3")
                             for g, r in (("channel", 1), ("block", 1), ("block", 128))),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if not k.untested], ids=lambda k: k.id)
def test_kernel_keeps_the_contract_on_cuda(kernel: Kernel, dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # a configuration is another launch of the same kernel: the large cases tell
        of = next(k for k in DEFAULTS if k.id in (kernel.id, kernel.id.rpartition("_")[0]))
        cases = (*(kernel.op.cases if of is kernel else ()), *LARGE.get(of.id, ()))
        results = [check_case(kernel, case, dtype, "cuda") for case in cases]
    ran = [r for r in results if r.status != "skipped"]
    if not ran:
        pytest.skip("; ".join(sorted({str(reason.code) for r in results for reason in r.reasons})))
    assert all(r.passed for r in ran), "\n".join(str(r) for r in ran if not r.passed)


def test_streams_have_counters_of_their_own() -> None:
    from layerzero.backends.triton.attention.decode import attention_decode

    q = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    want = attention_decode(q, k, v)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(attention_decode(q, k, v))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


def test_rope_may_write_where_it_reads() -> None:
    from layerzero.backends.triton.rotary import rope, rotate

    q, k = torch.randn(1, 8, 33, 64, device="cuda"), torch.randn(1, 2, 33, 64, device="cuda")
    angle = torch.rand(33, 32, device="cuda")
    for style in ("rotate_half", "interleaved"):
        want = rope(q, k, angle.cos(), angle.sin(), style=style)
        mine = q.clone(), k.clone()
        rotate(*mine, *mine, angle.cos(), angle.sin(), None, style, "bhsd")
        torch.testing.assert_close(mine, want, rtol=0, atol=0)
