"""The GPU libraries on a GPU, where they are installed: the contract in sizes they take, and what
only a GPU has.

A library that compiles takes tens of seconds for each kind of call, so each kernel is asked a few
here; benchmarks/gpu_libraries.py asks all.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from layerzero.backends import flash_attn, flashinfer, liger, quack, xformers
from layerzero.backends.flashinfer import paged
from layerzero.spec.kernel import Kernel
from layerzero.verify.kernel.contract import (
    call,
    case_values,
    check_case,
    formula,
    refusals,
    results_of,
)
from layerzero.verify.kernel.gradients import check_gradients, gradient_cases

pytestmark = [pytest.mark.gpu, pytest.mark.correctness]

KERNELS = tuple(k for m in (flashinfer, liger, quack, xformers, flash_attn) for k in m.KERNELS)
DENSE: dict[str, Any] = {"b": 1, "hq": 8, "hkv": 2, "d": 128}
PAGES: dict[str, Any] = {"hq": 8, "hkv": 2, "d": 128}
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "attention": ({**DENSE, "sq": 1, "sk": 700}, {**DENSE, "sq": 300, "sk": 300, "causal": True},
                  {**DENSE, "sq": 5, "sk": 99, "causal": True, "align": "bottom_right",
                   "lse": True}),
    "paged_attention": ({**PAGES, "context": (700, 0, 33)},
                        {**PAGES, "context": (90, 300), "layout": "HND"},
                        {**PAGES, "context": (700, 0, 33), "lengths_q": (30, 2, 1), "lse": True},
                        {**PAGES, "page_size": 256, "context": (3, 300)}),
    "varlen_attention": ({**PAGES, "lengths_q": (30, 1, 99), "causal": True,
                          "align": "bottom_right"}, {**PAGES}),
    "mla_paged_attention": ({"ckv": 512, "kpe": 64, "heads": 16, "context": (33, 700)},
                            {"ckv": 512, "kpe": 64, "lengths_q": (3, 0, 8), "lse": True}),
    "rope": ({"d": 128, "layout": "bshd"}, {"d": 128, "ids": "int64"}),
    "sample": ({"top_k": 5}, {"special": "ties", "top_k": 7, "scale": 2.0}),
    "mlp": ({}, {"activation": "geglu_tanh"}),
    "cross_entropy": ({"vocab": 40}, {"vocab": 5008, "rows": (3,), "ignored": "some"}),
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_kernel_keeps_the_contract_on_cuda(kernel: Kernel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [check_case(kernel, case, "bfloat16", "cuda")
                   for case in CASES.get(kernel.op.name, kernel.op.cases)]
        if kernel.differentiable:
            results += [check_gradients(kernel, case, "bfloat16", "cuda")
                        for case in gradient_cases(kernel.op)[:3]]
    ran = [r for r in results if r.status != "skipped"]
    if not ran:
        pytest.skip("; ".join(sorted({str(reason.code) for r in results for reason in r.reasons})))
    assert not [str(r) for r in ran if not r.passed]


def test_one_plan_serves_all_layers_and_follows_the_lengths() -> None:
    """The caches differ from layer to layer, the page table does not; then every sequence grows."""
    kernel = next(k for k in flashinfer.KERNELS if k.id == "flashinfer.paged_decode")
    values = case_values(kernel.op, {**PAGES, "context": (40, 7), "page_size": 16}, "bfloat16",
                         "cuda")
    for name in ("key_cache", "value_cache"):
        values[name] = torch.randn_like(values[name])
    if refusals(kernel, values):
        pytest.skip(str(refusals(kernel, values)[0]))

    def answers() -> None:
        (out,), (want,) = results_of(call(kernel, values)), formula(kernel.op, values)
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)

    answers()
    shelf = next(p for kind, p in paged.PLANS.items() if kind[0] == "decode")
    made = shelf.planned
    values["key_cache"] = torch.randn_like(values["key_cache"])
    answers()
    assert (shelf.planned, shelf.reused > 0) == (made, True)
    values["context_lens"] += 1
    answers()
    assert shelf.planned == made + 1
