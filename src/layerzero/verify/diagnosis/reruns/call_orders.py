"""Makes a failing call again after other calls: one that is right after some and wrong after
others depends on what the kernel keeps of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ...cases.drawn_sizes import allowed_facts
from ...kernel.case_sizes import numbers_of, relative_size
from ...kernel.contract import SMALL, CaseResult, call, case_refusals, case_values, refusals
from .calls_again import is_right, sample_failures, values_of

Call = dict[str, Any]
LIMIT_S = 1.0                                  # of CPU time


def depends_on_earlier_calls(kernel: Kernel, failed: Sequence[CaseResult],
                             results: Sequence[CaseResult], device: str) -> bool:
    """Is one of two sampled failing calls right after some calls and wrong after others, each time
    it is tried?"""
    plain = [r for r in failed if not r.circumstance]
    return any(_depends(kernel, r, results, device) for r in sample_failures(plain, 2))


def keeps_by_shape(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is the first call of new sizes right and the next of the same sizes with other numbers wrong,
    whichever numbers come first? Six times: each may be so for the sake of its numbers."""
    return any(all(_is_kept(kernel, case, r, device, (-1) ** i) for i, case in enumerate(cases))
               for r in sample_failures(failed, 2) for cases in _new_sizes(kernel, r, device))


def keeps_argument_by_shape(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is the first call of new sizes right and the next of the same sizes wrong, with an argument
    and without it, whichever comes first? Six times."""
    end = time.process_time() + LIMIT_S
    numbers = [(name, n) for name, n in numbers_of(kernel.op).items() if type(n) is int]
    for r in sample_failures(failed, 2):
        options = {n: v for n, v in r.case.items() if n not in numbers_of(kernel.op)}
        for given in _given_numbers(kernel, r, device):
            for name, _ in numbers:
                if time.process_time() > end:
                    return False
                cases = [{**options, name: 139 + by} for by in (0, 16, 4, 18, 6, 22)]
                if all(_is_argument_kept(kernel, case, r, given, device, (-1) ** i)
                       for i, case in enumerate(cases)):
                    return True
    return False


def _given_numbers(kernel: Kernel, r: CaseResult, device: str) -> list[tuple[str, Any]]:
    """Returns the optional arguments that are given and no tensors, with what is given."""
    op, values = kernel.op, values_of(kernel, r, device)
    return [(p.name, values[p.name]) for p in op.params if values is not None and not p.required
            and p.name != op.variant and not isinstance(values[p.name], Tensor)
            and values[p.name] != p.default]


def _is_argument_kept(kernel: Kernel, case: dict[str, Any], r: CaseResult, given: tuple[str, Any],
                      device: str, order: int) -> bool:
    if (relative_size(kernel.op, case) > SMALL         # pages or lists of lengths may be long
            or allowed_facts(kernel.op, case, r.dtype, r.seed) is None
            or case_refusals(kernel, case, r.dtype, device, r.seed)):
        return False
    values, (name, value) = case_values(kernel.op, case, r.dtype, device, r.seed), given
    both = [{**values, name: v} for v in (value, kernel.op.by_name[name].default)][::order]
    return [is_right(kernel, v, r.dtype) for v in both] == [True, False]


def _new_sizes(kernel: Kernel, r: CaseResult, device: str) -> Iterator[list[dict[str, Any]]]:
    """Yields cases in sizes that hardly any case has: small ones, and those nearby."""
    for name, default in numbers_of(kernel.op).items():
        size = r.case.get(name, default)
        for first in (43, size + 13) if type(size) is int else ():
            cases = [{**r.case, name: first + by} for by in (0, 16, 4, 18, 6, 22)]
            if all(allowed_facts(kernel.op, case, r.dtype, r.seed) is not None
                   and not case_refusals(kernel, case, r.dtype, device, r.seed)
                   for case in cases):
                yield cases


def _is_kept(kernel: Kernel, case: dict[str, Any], r: CaseResult, device: str, order: int) -> bool:
    both = [case_values(kernel.op, case, r.dtype, device, r.seed + by) for by in (0, 1001)][::order]
    return [is_right(kernel, v, r.dtype) for v in both] == [True, False]


def _depends(kernel: Kernel, r: CaseResult, results: Sequence[CaseResult], device: str) -> bool:
    values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
    verdicts = []
    for before in _earlier_calls(kernel, r, results, device):
        twice = {_is_right_after(kernel, before, values, r.dtype) for _ in range(2)}
        if len(twice) > 1:                     # it changes by itself
            return False
        verdicts += list(twice)
    return len(set(verdicts)) > 1


def _earlier_calls(kernel: Kernel, r: CaseResult, results: Sequence[CaseResult],
                   device: str) -> Iterator[list[Call]]:
    """Yields what may come before a call: itself, others of its sizes, those that came before it
    in the run, and calls of other sizes that were right."""
    def values(other: CaseResult, by: int = 0) -> Call:
        return case_values(kernel.op, other.case, other.dtype, device, other.seed + by)

    plain = [other for other in results if not other.circumstance and other.status != "skipped"
             and not any(type(n) is int and n > 8_000 for n in other.case.values())]
    at = next((i for i, other in enumerate(plain) if other is r), 0)
    yield [values(r), values(r)]
    yield [values(r, 1001), values(r, 1002)]
    yield [values(other) for other in plain[max(at - 2, 0):at]]
    yield [values(other) for other in plain[:2] if other.case != r.case]
    # what is kept by sizes is lost or replaced after calls of other sizes
    others = (other for other in plain if other.passed
              and _shape(kernel, other, device) != _shape(kernel, r, device))
    yield from ([values(other)] for other in islice(others, 2))


def _shape(kernel: Kernel, r: CaseResult, device: str) -> Any:
    """Returns the shape of the main tensor."""
    t = case_values(kernel.op, r.case, r.dtype, device, r.seed).get(kernel.op.main_tensor)
    return t.shape if isinstance(t, Tensor) else ()


def _is_right_after(kernel: Kernel, before: Sequence[Call], values: Call, dtype: str) -> bool:
    for earlier in before:
        try:
            if not refusals(kernel, earlier):
                with torch.no_grad():
                    call(kernel, earlier)
        except FAULTS:
            continue
    return is_right(kernel, values, dtype)
