"""Backward of every kernel that claims one, against the autograd of the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import KERNELS, case_id
from torch import Tensor

from layerzero.spec.kernel import Kernel
from layerzero.verify.contract import call, case_values, refusals, results_of, upcast

CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "attention": (
        {}, {"causal": True}, {"hkv": 2, "causal": True}, {"sq": 1, "sk": 257, "hkv": 2}, {"lse": True},
        {"sq": 1, "sk": 300, "causal": True, "align": "bottom_right"},
        {"sq": 5, "sk": 9, "causal": True, "align": "top_left"},
        {"sq": 5, "sk": 9, "causal": True, "align": "bottom_right"},
        {"sq": 9, "sk": 5, "causal": True, "align": "bottom_right"}, {"d": 72}, {"d": 80, "dv": 48}, {"mask": "float"},
        {"mask": "bool", "hkv": 2}, {"mask": "dead_rows"}, {"window": (16, 0), "causal": True},
        {"alibi": True, "causal": True}, {"softcap": 5.0}, {"scale": 0.3}, {"layout": "bshd", "causal": True},
        {"stride": "transposed"}, {"stride": "padded"}, {"sq": 8, "sk": 0}),
    "varlen_attention": (
        {}, {"causal": True, "align": "bottom_right", "hkv": 2}, {"lengths_q": (0, 12, 3)},
        {"lengths_q": (4, 9), "lengths_k": (20, 9), "window": (3, 0)}),
    "paged_attention": (
        {}, {"lse": True}, {"layout": "HND"}, {"lengths_q": (17, 1, 40)}, {"window": 6}, {"softcap": 5.0},
        {"lse": True, "lengths_q": (2, 5, 1)}, {"d": 40, "dv": 24}),
    "rms_norm": ({}, {"rows": (3, 2, 5), "hidden": 96}, {"affine": False}, {"stride": "transposed", "rows": (6, 4)},
                 {"weight_dtype": "float32"}, {"rows": (0,)}),
    "add_rms_norm": ({}, {"rows": (2, 7)}, {"affine": False}, {"stride": "padded"}),
    "layer_norm": ({}, {"rows": (3, 2, 5), "hidden": 96}, {"affine": False}, {"stride": "padded"},
                   {"weight_dtype": "float32"}),
}


def wanting_gradients(kernel: Kernel, values: dict[str, Any]) -> dict[str, Any]:
    """The same values as leaves of a graph, with the strides they had."""
    return {name: v.detach().requires_grad_() if name in kernel.op.differentiable and isinstance(v, Tensor) else v
            for name, v in values.items()}


def gradients(kernel: Kernel, values: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Of a weighted sum over all results; the weights are the same for every dtype."""
    gen = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for r in results:
        loss = loss + (r.double() * torch.randn(r.shape, generator=gen, dtype=torch.float64)).sum()
    wanted = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(wanted.items(), found)}


def rows() -> list[Any]:
    return [pytest.param(kernel, case, dtype, id=f"{kernel.id}-{dtype}-{case_id(case)}")
            for kernel in KERNELS if kernel.differentiable or not kernel.jit     # compiling for nothing takes seconds
            for dtype in ("float32", "float64")
            for case in CASES.get(kernel.op.name, kernel.op.cases[:4] if kernel.op.differentiable else ())
            if not refusals(kernel, wanting_gradients(kernel, case_values(kernel.op, case, dtype)))]


ROWS = rows()


@pytest.mark.parametrize(("kernel", "case", "dtype"), ROWS)
def test_backward(kernel: Kernel, case: dict[str, Any], dtype: str) -> None:
    op = kernel.op
    values = wanting_gradients(kernel, case_values(op, case, dtype))
    results = results_of(call(kernel, values))
    if not kernel.differentiable:              # it declines, and selection never gives it such a call
        pytest.skip(f"{kernel.id} declares no backward")
    assert all(r.grad_fn is not None for r in results), f"{kernel.id} silently loses the gradient of a result"
    exact = wanting_gradients(kernel, upcast(values))
    truth = gradients(kernel, exact, results_of(op.reference(**exact)))
    eager = gradients(kernel, values, results_of(op.reference(**values)))
    got = gradients(kernel, values, results)
    rtol, atol = op.tolerance.of(dtype)
    for name, want in truth.items():
        assert got[name].dtype == values[name].dtype
        if not want.numel():
            continue
        error, eager_error = (float((g[name].double() - want).abs().max()) for g in (got, eager))
        bound = op.tolerance.times_eager * eager_error + atol + rtol * float(want.abs().max())
        assert error <= bound, f"gradient of {name}: error {error:.3g} exceeds {bound:.3g}; eager {eager_error:.3g}"


def test_every_kernel_that_claims_a_backward_and_runs_here_was_asked_for_it() -> None:
    asked = {p.values[0].id for p in ROWS}
    served = {k.id for k in KERNELS for case in k.op.cases if not refusals(k, case_values(k.op, case, "float32"))}
    claims = {k.id for k in KERNELS if k.differentiable and k.op.differentiable and k.id in served}
    assert claims - asked <= {"torch.flex", "torch.rope_complex"}    # the rules refuse, or the first cases do not fit
