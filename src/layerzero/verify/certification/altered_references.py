"""Explains a wrong result by the mistakes that the op declares: altered references that give
what the kernel gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.mistake import Results
from ...spec.op import Op
from ..kernel.contract import CaseResult, call, formula, results_of, upcast
from .reruns import are_close, sample_failures, values_of

MAX_RERUNS = 8                                 # failing cases that are rerun


def explain_by_mistake(kernel: Kernel, failed: Sequence[CaseResult],
                        device: str) -> tuple[str, str] | None:
    """Returns the mistake that explains most failing cases, if two thirds of those it applies
    to."""
    votes: Counter[tuple[str, str]] = Counter()
    applied: Counter[tuple[str, str]] = Counter()
    sample = sample_failures(failed, MAX_RERUNS)
    for r in sample:
        values = values_of(kernel, r, device)
        if values is None:
            continue
        try:
            with torch.no_grad():
                out, expected = results_of(call(kernel, values)), formula(kernel.op, upcast(values))
        except FAULTS:
            continue
        for mistake in kernel.op.mistakes:
            altered = _altered_results(kernel.op, mistake.apply, values)
            if altered is None or are_close(kernel.op, r.dtype, altered, expected):
                continue
            applied[mistake.kind, mistake.words] += 1
            votes[mistake.kind, mistake.words] += are_close(kernel.op, r.dtype, out, altered)
    best = max(votes, key=lambda k: (votes[k], -applied[k]), default=None)
    if best is None or not votes[best] or votes[best] * 3 < applied[best] * 2:
        return None
    return best[0], (f"it gives what the reference gives with {best[1]}, in {votes[best]} of "
                     f"{applied[best]} failing cases where that makes a difference")


def scale_mistake(kernel: Kernel, failed: Sequence[CaseResult],
                   device: str) -> tuple[str, str] | None:
    """Returns a mistake of the scale, which the sizes of a call make: those of its heads."""
    mistake = explain_by_mistake(kernel, failed, device)
    return mistake if mistake and mistake[0] == "scale" else None


def _altered_results(op: Op, alter: Any, values: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns the results of the altered reference, floats in float64; None where it does not
    apply."""
    try:
        with torch.no_grad():
            outcome = alter(op, upcast(values))
            if outcome is None:
                return None
            return outcome.values if isinstance(outcome, Results) else formula(op, outcome)
    except FAULTS:                             # the mistake makes no sense for this call
        return None
