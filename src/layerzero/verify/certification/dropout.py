"""Dropout of attention: which weights are dropped, what is left of the others, and the gradient,
in the plain call and beside each of the op's arguments.

With the identity as values the result is the attention weights: each must be zero, or 1 / (1 - p)
times itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.drawn_sizes import arguments_of_cases, shares
from ..cases.generated import Case
from ..kernel.contract import (
    CaseResult,
    call,
    case_values,
    check_case,
    refusals,
    results_of,
    upcast,
)
from ..kernel.gradients import requiring_grad

DROPOUT_P = 0.3
VISIBLE = 1e-5                                 # a smaller weight may be zero by itself
COMPARABLE = 64                                # weights that tell whether two parts are alike
NOT_FINITE = "the result is not finite where every weight is dropped"


def dropout_checks(kernel: Kernel, dtype: str, device: str, lane: str,
                   seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the plain call, one head of keys, and the arguments of the op's cases: in the quick
    lane each of them once, with a value that the seed chooses."""
    op = kernel.op
    if not op.dropout_case:
        return
    options = [o for o in arguments_of_cases(op)[1:] if not o.keys() & op.dropout_case.keys()]
    shared = [{few: 1} for _, few in shares(op)]
    if lane == "quick":
        single: dict[str, list[Case]] = {}
        for option in options:
            for name in option if len(option) == 1 else ():
                single.setdefault(name, []).append(option)
        options = [values[seed % len(values)] for values in single.values()]
    yield partial(check_dropout, kernel, op.dropout_case, dtype, device, seed)
    yield from (partial(check_dropout, kernel, {**op.dropout_case, **extra}, dtype, device, seed,
                        others=False) for extra in (*shared, *options))


def _by_key(op: Op, values: Mapping[str, Any]) -> int:
    """Returns the dimension of the keys in `value`."""
    tokens = op.patterns[values[op.variant] if op.variant else ""]["value"]
    return next((i for i, size in enumerate(tokens) if size == "seq_k"), 0)


def _with_identity(op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the call with the identity as values of each head; None if it is not square."""
    value, keys = values["value"], _by_key(op, values)
    if value.shape[keys] != value.shape[-1]:
        return None
    identity = torch.eye(value.shape[-1], device=value.device, dtype=value.dtype)
    identity = identity.view(-1, *(1,) * (value.dim() - 2 - keys), value.shape[-1])
    return {**values, "value": identity.expand(value.shape).contiguous()}


def check_dropout(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                  seed: int = 0, others: bool = True) -> CaseResult:
    """Checks one call with dropout, and unless told otherwise others after it; what is wrong
    without dropout is no matter of it."""
    op = kernel.op
    details: dict[str, Any] = {"circumstance": f"dropout {DROPOUT_P}", "seed": seed}
    values = _with_identity(op, {**case_values(op, case, dtype, device, seed),
                                 "dropout_p": DROPOUT_P})
    reasons = () if values is None else refusals(kernel, values)
    if values is None or reasons:
        return CaseResult(kernel.id, case, dtype, "skipped", reasons, **details)
    try:
        kind, problem = "distribution", next(chain(
            _problems(kernel, values, seed), _of_other_calls(kernel, values, seed) if others
            else ()), "")
        kind = "non-finite values" if problem == NOT_FINITE else kind
    except FAULTS as e:
        kind, problem = "fault", str(reason_of(e, classify(e)))
    if problem:
        plain = check_case(kernel, case, dtype, device, seed)
        if plain.status == "failed":
            return plain
    return CaseResult(kernel.id, case, dtype, "failed" if problem else "passed", detail=problem,
                      kinds=(kind,) if problem else (), **details)


def _problems(kernel: Kernel, values: dict[str, Any], seed: int) -> Iterator[str]:
    """Yields what is wrong with one call."""
    op = kernel.op
    with torch.no_grad(), torch.random.fork_rng(enabled=True):
        torch.manual_seed(seed)
        expected, *lse = results_of(op.reference(**{**upcast(values), "dropout_p": 0.0}))
        got, *got_lse = results_of(call(kernel, values))
    yield from _distribution(got.double(), expected / (1 - DROPOUT_P))
    if any(not torch.allclose(a.double(), b, rtol=1e-4, atol=1e-4) for a, b in zip(got_lse, lse)):
        yield "the log-sum-exp is that of other weights where some are dropped"
    if kernel.differentiable:
        yield from _gradient(kernel, values, seed)


def _of_other_calls(kernel: Kernel, values: dict[str, Any], seed: int) -> Iterator[str]:
    """Yields what is wrong with calls one after another, and with one that drops everything."""
    with torch.no_grad(), torch.random.fork_rng(enabled=True):
        torch.manual_seed(seed)
        first, second = (results_of(call(kernel, values))[0] for _ in range(2))
        torch.manual_seed(seed)
        again = results_of(call(kernel, values))[0]
        if torch.equal(first, second):
            yield "two calls dropped the same weights"
        if not torch.equal(first, again):
            yield "other weights are dropped after the same torch.manual_seed"
        # some libraries for GPUs refuse to drop everything
        left = first[:0] if first.device.type != "cpu" else results_of(
            call(kernel, {**values, "dropout_p": 1.0}))[0]
        if not bool(left.isfinite().all()):
            yield NOT_FINITE
        if bool(left.any()):
            yield "something is left where every weight is dropped"


def _distribution(result: Tensor, expected: Tensor) -> Iterator[str]:
    visible, dropped = expected > VISIBLE, result == 0
    count = int(visible.sum())
    if not count:
        return
    share = float((dropped & visible).sum()) / count
    if abs(share - DROPOUT_P) > 6 * (DROPOUT_P * (1 - DROPOUT_P) / count) ** 0.5:
        yield f"{share:.3f} of the weights were dropped, not {DROPOUT_P}"
    left = visible & ~dropped
    deviation = ((result - expected).abs() / expected)[left]
    if deviation.numel() and float(deviation.max()) > 1e-5:
        yield f"what is left of a weight is off by up to {float(deviation.max()):.3g} of it"
    for d in range(dropped.dim() - 1):
        both = visible & visible.narrow(d, 0, 1)
        both.narrow(d, 0, 1).fill_(False)      # itself
        if int(both.sum()) >= COMPARABLE and bool((dropped == dropped.narrow(d, 0, 1))[both].all()):
            yield f"the same weights were dropped all along dimension {d}"


def _gradient(kernel: Kernel, values: Mapping[str, Any], seed: int) -> Iterator[str]:
    """Yields that the backward drops other weights than the forward pass did: the result tells
    which ones that dropped."""
    op = kernel.op
    calls = requiring_grad(op, values)
    if refusals(kernel, calls):
        return
    names = ("query", "key")
    with torch.random.fork_rng(enabled=True), torch.enable_grad():
        torch.manual_seed(seed)
        weights = results_of(call(kernel, calls))[0]
        chosen = torch.randn(weights.shape).to(weights)
        grad_value, = torch.autograd.grad(weights, [calls["value"]], torch.ones_like(weights),
                                          retain_graph=True)
        grads = torch.autograd.grad(weights, [calls[n] for n in names], chosen)
        wide = {n: v.detach().requires_grad_() if n in names else v
                for n, v in upcast(values).items()}
        plain = results_of(op.reference(**{**wide, "dropout_p": 0.0}))[0]
        kept = (weights.detach() != 0).double() / (1 - DROPOUT_P)
        exact = torch.autograd.grad(plain, [wide[n] for n in names], chosen.double() * kept)
    # key j has its weights in column j of the result, and its gradient in row j
    columns = weights.detach().double().flatten(0, -2).sum(0)
    rows = grad_value.double()[..., 0].movedim(_by_key(op, values), 0).flatten(1).sum(1)
    pairs = (("value", rows, columns), *zip(names, (g.double() for g in grads), exact))
    for name, got, want in pairs:
        if not torch.allclose(got, want, rtol=1e-3, atol=1e-4):
            yield (f"the backward drops other weights than the forward pass: see the gradient of "
                   f"{name}")
