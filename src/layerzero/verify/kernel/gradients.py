"""Is the backward of a kernel right? Against the autograd of the float64 reference, case by case.

For each input that wants a gradient the error is at most `times_eager` x that of the eager formula's own gradient at
the same dtype, plus the op's tolerance. The gradient that comes from above is given once contiguous and once with
gaps of NaN between its elements; inputs must be unchanged afterwards; the result of the forward pass is judged too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...machine import loading
from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ...spec.op import Op
from .contract import (
    AGAIN,
    CaseResult,
    Complaint,
    call,
    case_values,
    formula,
    judge,
    maybe_luck,
    refusals,
    results_of,
    upcast,
)
from .guarded import changed, relaid, snapshot

Errors = tuple[float, float, float]            # error, that of the eager formula, error over what was allowed


def gradient_cases(op: Op) -> tuple[Mapping[str, Any], ...]:
    """Those it declares; else the first few of the op's own cases, and some from all over the rest."""
    if not op.differentiable:
        return ()
    return op.gradient_cases or (*op.cases[:4], *op.cases[4::max(len(op.cases) // 8, 1)])


def wanting_gradients(op: Op, values: Mapping[str, Any], only: str = "") -> dict[str, Any]:
    """The same values as leaves of a graph, with the strides they had; or just one of them."""
    wanted = (only,) if only else op.differentiable
    return {name: v.detach().requires_grad_() if name in wanted and isinstance(v, Tensor) and v.is_floating_point()
            and v.dtype.itemsize > 1 else v for name, v in values.items()}


def check_gradients(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu", seed: int = 0,
                    only: str = "", again: bool = True) -> CaseResult:
    """Judge one case; skipped where the kernel declares no backward or refuses the call."""
    op, circumstance = kernel.op, f"backward to {only}" if only else "backward"

    def result(status: str, complaints: Sequence[Complaint] = (), reasons: Any = (), detail: str = "",
               errors: Errors = (0.0, 0.0, 0.0)) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), *errors, detail or "; ".join(
            c.text for c in complaints), circumstance, seed, tuple(dict.fromkeys(c.kind for c in complaints)))

    if not kernel.differentiable:              # selection never gives it such a call
        return result("skipped", detail="declares no backward")
    values = wanting_gradients(op, case_values(op, case, dtype, device, seed), only)
    if not any(isinstance(v, Tensor) and v.requires_grad for v in values.values()):
        return result("skipped", detail="nothing wants a gradient")
    reasons = refusals(kernel, values)
    if reasons:
        return result("skipped", (), reasons)
    before = snapshot(values)
    try:
        results = results_of(call(kernel, values))
        eager_results = formula(op, values)
        lost = [i for i, (r, e) in enumerate(zip(results, eager_results))
                if e.requires_grad and e.numel() and not r.requires_grad]
        if lost:
            return result("failed", [Complaint("gradient", f"the gradient of result {i} is silently lost")
                                     for i in lost])
        above = weights_of(results)
        runs = [_backward(values, results, weights) for weights in (above, above, _apart(above))]
    except loading.LoadFailed as e:
        return result("skipped", (), (e.reason,))
    except FAULTS as e:
        return result("failed", [Complaint("gradient", str(reason_of(e, classify(e))))])
    complaints = [Complaint("in-place change", text) for text in changed(values, before)]
    exact = wanting_gradients(op, upcast(values), only)
    true_results = formula(op, exact)
    truth = _backward(exact, true_results, [w if w is None else w.double() for w in above])
    eager = _backward(values, eager_results, above)
    worst: Errors = (0.0, 0.0, 0.0)
    for i, parts in enumerate(zip(*(map(_plain, r) for r in (results, results, true_results, eager_results)))):
        forward = judge(op, dtype, f"result {i}", *parts)
        complaints += forward.complaints
        worst = max(worst, (forward.error, forward.eager_error, forward.ratio), key=lambda e: e[2])
    for got, how in zip(runs[1:], ("", ", given one with gaps,")):
        found, errors = _judged(op, dtype, how, got, truth, eager, values)
        complaints += found
        worst = max(worst, errors, key=lambda e: e[2])
    if kernel.deterministic_backward and any(not torch.equal(runs[0][n], runs[1][n]) for n in truth):
        complaints.append(Complaint("non-determinism", "two backward passes differ"))
    if complaints and again and {c.kind for c in complaints} <= {"gradient", "error"} and maybe_luck(results, worst[2]):
        others = [check_gradients(kernel, case, dtype, device, seed + 1000 + i, only, False) for i in range(AGAIN)]
        if sum(o.status == "failed" for o in others) < 2:
            return result("passed", detail=f"just outside once: {complaints[0].text}", errors=(*worst[:2], 1.0))
    return result("failed" if complaints else "passed", complaints, (), "", worst)


def _judged(op: Op, dtype: str, how: str, got: Mapping[str, Tensor], truth: Mapping[str, Tensor],
            eager: Mapping[str, Tensor], values: Mapping[str, Any]) -> tuple[list[Complaint], Errors]:
    """Complaints, and the errors of the worst input."""
    rtol, atol = op.tolerance.of(dtype)
    complaints: list[Complaint] = []
    worst = (0.0, 0.0, 0.0)
    for name, want in truth.items():
        if got[name].dtype != values[name].dtype or got[name].shape != want.shape:
            complaints.append(Complaint("gradient", f"gradient of {name}{how} is {tuple(got[name].shape)} "
                                                    f"{got[name].dtype}"))
            continue
        if not want.numel():
            continue
        error, eager_error = (float((g[name].double() - want).abs().nan_to_num(nan=torch.inf).max())
                              for g in (got, eager))
        bound = op.tolerance.times_eager * eager_error + atol + rtol * float(want.abs().max())
        if error > bound:
            complaints.append(Complaint("gradient", f"gradient of {name}{how}: error {error:.3g} exceeds {bound:.3g}; "
                                                    f"eager {eager_error:.3g}"))
        worst = max(worst, (error, eager_error, error / bound), key=lambda e: e[2])
    return complaints, worst


def weights_of(results: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient that comes from above: random, the same for every kernel."""
    gen = torch.Generator().manual_seed(987654321)     # no case's own: a gradient along the input may vanish
    return [torch.randn(r.shape, generator=gen).to(r) if r.is_floating_point() else None for r in results]


def _apart(weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same with NaN between the elements."""
    return [w if w is None else (w if (other := relaid(w, "sparse")) is None else other) for w in weights]


def _backward(values: Mapping[str, Any], results: Sequence[Tensor],
              above: Sequence[Tensor | None]) -> dict[str, Tensor]:
    wanted = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
    pairs = [(r, w) for r, w in zip(results, above) if w is not None and r.requires_grad]
    if not pairs:
        return {n: torch.zeros_like(v) for n, v in wanted.items()}
    found = torch.autograd.grad([r for r, _ in pairs], list(wanted.values()), [w for _, w in pairs], allow_unused=True,
                                retain_graph=True)
    return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(wanted.items(), found)}


def _plain(t: Tensor) -> Tensor:
    return t.detach()
