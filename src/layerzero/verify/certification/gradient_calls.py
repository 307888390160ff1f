"""Gradients of many calls: the sizes and arguments that the forward pass is asked for elsewhere,
each with other tensors that want a gradient and with another output gradient.

A backward has tiles, tails and branches of its own, which are no matter of its forward pass: what
is left over of rows or columns, a tensor that is frozen beside one that is not, a row of which the
gradient is zero.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.covering import sized_combinations
from ..cases.generated import Case, is_degenerate
from ..cases.long_calls import long_calls
from ..cases.octaves import gradient_sizes, square_calls
from ..cases.pairs import case_by_case_sizes, model_sizes, pair_cases, residues
from ..kernel.circumstance import AS_DECLARED, Circumstance
from ..kernel.contract import (
    UNREPEATABLE,
    CaseResult,
    call,
    case_facts,
    case_tensors,
    case_values,
    case_values_to_read,
    formula,
    refusals,
    results_of,
)
from ..kernel.gradients import also_wanted, check_gradients, requiring_grad
from ..kernel.guarded import poisoned_memory
from ..kernel.output_grads import KINDS, SCALES, draw_output_grads
from ..kernel.shared import compute_once
from .calls import LEFT_OUT, Budget, meets_contract, passes_extra_check
from .circumstances.backward_circumstances import LAYOUTS, SomeZeros, altered_gradient_checks
from .circumstances.call_circumstances import Expanded, UnusualValues
from .circumstances.row_circumstances import OtherLayout, Shifted, ZeroRows

GRADIENT_CALLS_S = 10.0                        # of CPU time in a kernel for all calls of a seed
LARGEST_CALL = 6e6                             # elements of a call that is differentiated
NEAR = 0.25                                    # of the op's tolerance: the rest is judged
# Times what is allowed: a softmax over one key has a gradient of roundings alone, as many as terms.
FAR = 4.0
CONTENTS = (ZeroRows(), SomeZeros(), UnusualValues("zeros"), UnusualValues("small numbers"))
Gradients = dict[str, Tensor]


class GradientCall(NamedTuple):
    """One call: the tensors that want a gradient ("": all), the output gradient, which one of
    several results is used, what the tensors hold or how one lies in memory, and a tensor that
    wants a gradient beside those that have one always."""

    case: Case
    only: str
    of: str
    source: int | None
    altered: Circumstance
    also: str = ""


def gradient_call_checks(kernel: Kernel, device: str,
                         seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the calls by what they vary: two arguments beside each other first, then sizes; and
    those that are given otherwise, or under other settings."""
    op, dtype = kernel.op, kernel.op.dtypes[0]
    if not kernel.differentiable or not op.differentiable:
        return
    pairs = [[case] for case, _ in pair_cases(kernel, device, "full", seed).cells
             if "extreme" not in case]
    # of what is drawn for the quick lane, a quarter of all remainders
    groups = [("arguments", pairs), ("a few hundred", long_calls(op, "full", seed)),
              ("stress", [[case] for case in op.stress if "extreme" not in case]),
              ("a model", [[*g] for g in model_sizes(op, seed, "quick")]),
              *residues(op, "quick", seed),
              ("tiles beside arguments", [[*g] for g in sized_combinations(kernel, device, "quick",
                                                                           seed)]),
              ("each case", [[*g] for g in case_by_case_sizes(op, "quick", seed)]),
              ("one length", gradient_sizes(op, seed)), ("all lengths", square_calls(op, seed, 3))]
    budget = Budget(GRADIENT_CALLS_S, len(groups))
    yield from (partial(check_gradient_calls, kernel, name, cases, dtype, device, seed, budget)
                for name, cases in groups if cases)
    yield from altered_gradient_checks(kernel, device, seed)


def check_gradient_calls(kernel: Kernel, name: str, cases: Sequence[Sequence[Case]], dtype: str,
                         device: str = "cpu", seed: int = 0,
                         budget: Budget | None = None) -> CaseResult:
    """Differentiates each call once over poisoned memory and compares it with the eager formula;
    what looks wrong is judged as any other gradient. The result is the first that fails, or says
    how many ran."""
    ran, left, began = 0, 0, time.thread_time()
    limit_s = float("inf") if budget is None else budget.part
    for i, group in enumerate(cases):
        if time.thread_time() - began > limit_s:
            left += 1
            continue
        for case in group:
            asked = _drawn(kernel.op, case, f"{name} {i} {seed}", dtype, device, seed)
            if asked is None:
                continue
            if kernel.op.also_differentiable and i % 3 == 0 and not asked.only:
                asked = asked._replace(also=also_wanted(kernel, case, dtype, device, seed))
            right = _looks_right(kernel, asked, dtype, device, seed)
            if right is None:
                continue
            ran += 1
            if not right:
                judged = check_gradients(kernel, case, dtype, device, seed, asked.only,
                                         source=asked.source, of=asked.of,
                                         altered=asked.altered, also=asked.also)
                if judged.status == "failed" and not 0 < judged.ratio <= FAR:
                    return judged
            break
    if budget is not None:
        budget.take(time.thread_time() - began)
    return CaseResult(kernel.id, {}, dtype, "passed" if ran else "skipped", seed=seed,
                      circumstance=f"backward of {len(cases)} calls by {name}",
                      detail=f"{ran} calls" + (f"; {left} {LEFT_OUT} {limit_s:.2g} s" if left
                                               else ""))


def _drawn(op: Op, case: Case, key: str, dtype: str, device: str,
           seed: int) -> GradientCall | None:
    """Returns the call with every tensor or some of them wanting a gradient, half of the time with
    an output gradient that is not of random numbers everywhere, at times with zeros among the
    numbers or one tensor in another layout; None where the contract does not allow it."""
    # of large numbers roundings are gradients
    if "extreme" in case or not _is_call(op, case, dtype, device, seed):
        return None
    rng = random.Random(f"{op.name} {key}")
    names = [n for n in op.differentiable if rng.random() < 0.5]
    some = " and ".join(names) if rng.random() < 0.6 else ""
    of = rng.choice(KINDS) if rng.random() < 0.5 else ""
    source = rng.choice((0, 1)) if rng.random() < 0.25 else None
    altered = AS_DECLARED
    if rng.random() < 0.5:
        tensor = rng.choice(list(case_tensors(op, case, dtype, device, seed)))
        layouts = (*(OtherLayout(tensor, layout) for layout in LAYOUTS), Shifted(tensor, True),
                   Expanded(tensor, 0), Expanded(tensor, 1))
        altered = rng.choice((*CONTENTS, *layouts))
        if altered.alter(op, case_values_to_read(op, case, dtype, device, seed)) is None:
            altered = AS_DECLARED
    return GradientCall(case, some, of, source, altered)


def _is_call(op: Op, case: Case, dtype: str, device: str, seed: int) -> bool:
    """Does the contract allow the call, is it small enough, and more than a norm of one number?"""
    key = "case", repr(case), dtype, device, seed
    try:
        if is_degenerate(op, case_facts(op, case, dtype, device, seed)):
            return False
        if not compute_once(op, ("meets the contract", *key), lambda: meets_contract(
                op, case, dtype, device, seed), nbytes=0):
            return False
        if sum(t.numel() for t in case_tensors(op, case, dtype, device, seed).values()
               ) > LARGEST_CALL:
            return False
        values = case_values_to_read(op, case, dtype, device, seed)
        return bool(compute_once(op, ("extra check", *key), lambda: passes_extra_check(
            op, values, case_facts(op, case, dtype, device, seed)), nbytes=0))
    except FAULTS:                             # not every size makes a call
        return False


def _looks_right(kernel: Kernel, asked: GradientCall, dtype: str, device: str,
                 seed: int) -> bool | None:
    """Are the gradients near those of the eager formula? None where the kernel refuses the call, or
    the formula has no gradient either."""
    op = kernel.op
    key = "case", repr(asked.case), dtype, device, seed
    try:
        values = requiring_grad(op, asked.altered.alter(op, case_values(
            op, asked.case, dtype, device, seed)) or {}, asked.only, asked.also)
        if refusals(kernel, values):
            return None
        asked_for = asked.only, asked.also, asked.of, asked.source, asked.altered.name
        want: Gradients = compute_once(op, ("gradients of a call", *asked_for, *key),
                                       lambda: _gradients(partial(formula, op), values, asked))
    except FAULTS:                             # not every size makes a call
        return None
    # of zeros alone kernels may differ in whether there is a gradient at all
    if not any(bool(g.any()) for n, g in want.items() if n in values):
        return None
    try:
        with warnings.catch_warnings(), poisoned_memory():
            warnings.filterwarnings("ignore", message=UNREPEATABLE)
            got = _gradients(partial(call, kernel), values, asked)
    except FAULTS:
        return False
    rtol, atol = op.tolerance.of(dtype)
    return got.keys() == want.keys() and all(
        _is_near(got[n], want[n], NEAR * rtol, NEAR * atol) for n in want)


def _gradients(function: Callable[[Mapping[str, Any]], Any], values: Mapping[str, Any],
               asked: GradientCall) -> Gradients:
    """Returns the results and their gradients; nothing where they are not all finite, or a result
    is no number: of a mean over no rows kernels may differ in whether it has a gradient."""
    with torch.enable_grad():
        results = results_of(function(values))
        if any(bool(r.isnan().any()) for r in results):
            return {}
        source = None if asked.source is None else asked.source % len(results)
        scale = SCALES.get(asked.of, 1.0)
        # expanded as it is
        drawn = draw_output_grads(results, False, asked.of)
        pairs = [(r, g if scale == 1.0 else g * scale) for i, (r, g) in enumerate(
            zip(results, drawn)) if g is not None and r.requires_grad and source in (None, i)]
        wanted = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
        if not pairs or not wanted:
            return {}
        grads = torch.autograd.grad([r for r, _ in pairs], list(wanted.values()),
                                    [g for _, g in pairs], allow_unused=True)
    named = {n: torch.zeros_like(v) if g is None else g.detach() / scale
             for (n, v), g in zip(wanted.items(), grads)}
    if not all(bool(g.isfinite().all()) for g in named.values()):
        return {}
    return {**named, **{f"result {i}": r.detach() for i, r in enumerate(results)}}


def _is_near(got: Tensor, want: Tensor, rtol: float, atol: float) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not want.numel() or torch.equal(got, want):
        return True
    largest = float(want.abs().nan_to_num(posinf=0.0).max())
    # of a row without keys the log-sum-exp is infinite
    return bool((((got - want).abs() <= atol + rtol * largest) | (got == want)).all())


