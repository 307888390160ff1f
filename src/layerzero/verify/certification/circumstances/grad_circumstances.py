"""Circumstances of gradients: recorded, recordable, or not recorded though inputs require them; and
long sums of numbers of one sign in a half dtype, which a sum in that dtype loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS, classify, reason_of
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.generated import Case, if_allowed
from ...cases.pairs import long_sums
from ...kernel.circumstance import Circumstance
from ...kernel.contract import (
    CaseResult,
    call,
    case_outline,
    case_refusals,
    case_values,
    formula,
    refusals,
    results_of,
    upcast,
)
from ...kernel.gradients import requiring_grad
from ..non_finite import is_of_others

TERMS = 200                                    # of a sum that a half dtype does not hold

# Ops whose gradients torch itself adds up in a half dtype.
SUMMED_BY_TORCH = ("layer_norm", "embedding", "block_sparse_attention")


class RecordingGradients(Circumstance):
    """The forward pass while gradients are recorded: a kernel may take another path there."""

    name = "recording gradients"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        if not op.differentiable:
            return None
        return {n: v.detach().requires_grad_() if n in op.differentiable and isinstance(v, Tensor)
                and v.is_floating_point() else v for n, v in values.items()}

    def around(self, device: str) -> Any:
        return torch.enable_grad()


class RecordingComputed(RecordingGradients):
    """The same of inputs that were computed, as activations are: what is made of them is made for
    others too, and nobody asks for their own gradient."""

    name, any_dtype = "recording gradients of computed inputs", True

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        leaves = super().alter(op, values)
        if leaves is None:
            return None
        with torch.enable_grad():
            return {n: v * 1.0 if isinstance(v, Tensor) and v.requires_grad and v.dtype.itemsize > 1
                    else v for n, v in leaves.items()}


class GradMode(Circumstance):
    """Grad mode as it is by default, with inputs that require no gradient."""

    name, any_dtype = "in grad mode", True

    def around(self, device: str) -> Any:
        return torch.enable_grad()


class GivenParameters(Circumstance):
    """Parameters that require gradients, where none are recorded: as a model is served."""

    name, any_dtype, records = "given parameters, recording nothing", True, False

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        names = [n for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()
                 and v.dtype.itemsize > 1]
        return {**values, **{n: torch.nn.Parameter(values[n]) for n in names}} if names else None


def long_sum_checks(kernel: Kernel, device: str, lane: str,
                    seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the calls whose gradients are long sums, at the narrowest dtype that it takes, and
    with weights of float32 beside it. Torch adds up those of a layer norm and of an embedding in
    that dtype itself, on a CPU: what is made of torch is not held to more."""
    op = kernel.op
    if (is_of_others(kernel) or op.name in SUMMED_BY_TORCH or not kernel.differentiable
            or not op.differentiable):
        return
    dtypes = [d for d in ("bfloat16", "float16") if d in op.dtypes]
    for case in (*long_sums(op, lane, seed), *op.stress):
        dtype = next((d for d in dtypes if not case_refusals(kernel, case, d, device, seed)), "")
        names = _long_sums_in(op, case_outline(op, case, dtype, device, seed)) if dtype else []
        if names:
            yield partial(check_long_sums, kernel, case, dtype, device, seed)
        if any(n != op.main_tensor and n not in op.same_dtype for n in names):
            yield partial(check_long_sums, kernel, case, dtype, device, seed, wide_weights=True)


def _long_sums_in(op: Op, values: Mapping[str, Any]) -> list[str]:
    """Returns the tensors of which each number is a term of many results."""
    elements = sum(r.numel() for r in results_of(op.meta(**values)) if r.is_floating_point())
    return [n for n in op.differentiable if isinstance(t := values[n], Tensor) and t.numel()
            and t.is_floating_point() and elements >= TERMS * t.numel()]


def _gradients(results: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of half the sum of the squares of the results, which is a sum of
    numbers of one sign for what multiplies them."""
    used = [r for r in results if r.requires_grad]
    grads = torch.autograd.grad(used, inputs, [r.detach() for r in used], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.detach() for g, t in zip(grads, inputs)]


def check_long_sums(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                    seed: int = 0, wide_weights: bool = False) -> CaseResult:
    """Compares gradients that are long sums with those of the formula in float64."""
    op = kernel.op

    def result(status: str, detail: str = "", reasons: Any = ()) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail,
                          circumstance="backward of long sums" + (
                              ", weights of float32" if wide_weights else ""), seed=seed,
                          kinds=("gradient",) if status == "failed" else ())

    values = case_values(op, case, dtype, device, seed)
    if wide_weights:
        values |= {n: values[n].float() for n in _long_sums_in(op, values)
                   if n != op.main_tensor and n not in op.same_dtype}
        if if_allowed(op, values) is None:
            return result("skipped")
    values = requiring_grad(op, values)
    reasons, names = refusals(kernel, values), _long_sums_in(op, values)
    if reasons or not names:
        return result("skipped", reasons=reasons)
    wide = {n: v.detach().requires_grad_() if n in names else v.detach()
            if isinstance(v, Tensor) else v for n, v in upcast(values).items()}
    try:
        exact = _gradients(formula(op, wide), [wide[n] for n in names])
        eager = _gradients(formula(op, values), [values[n] for n in names])
    except FAULTS:                             # not every size makes a call
        return result("skipped")
    try:
        got = _gradients(results_of(call(kernel, values)), [values[n] for n in names])
    except FAULTS as e:
        return result("failed", str(reason_of(e, classify(e))))
    rtol, atol = op.tolerance.of(dtype)
    for name, actual, want, of_eager in zip(names, got, exact, eager):
        error, eager_error = (float((t.double() - want).abs().nan_to_num(nan=torch.inf).max())
                              for t in (actual, of_eager))
        bound = op.tolerance.times_eager * eager_error + atol + 2 * rtol * float(want.abs().max())
        if error > bound:
            return result("failed", f"gradient of {name}, a long sum: error {error:.3g} exceeds "
                                    f"{bound:.3g}; eager {eager_error:.3g}")
    return result("passed")
