"""Makes failing calls again with other rows, and looks at what kind of result is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ...kernel.contract import CaseResult, call, case_values, formula, results_of, upcast
from .calls_again import are_close, is_right, sample_failures, values_of


def mixes_rows(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Does the largest row of the result change with the numbers of the others, where the formula's
    does not, and is it right where all rows are alike? In each of three drawings."""
    sample = sample_failures([r for r in failed if not r.circumstance], 3)
    return bool(sample) and all(_mixes_rows(kernel, r, r.seed + by, device)
                                for r in sample for by in (0, 1001, 1002))


def _mixes_rows(kernel: Kernel, r: CaseResult, seed: int, device: str) -> bool:
    op = kernel.op
    values = case_values(op, r.case, r.dtype, device, seed)
    main = values.get(op.main_tensor)
    if (not isinstance(main, Tensor) or main.dim() < 2 or not main.numel()
            or not main.is_floating_point() or main.dtype.itemsize == 1):
        return False
    rows = main.reshape(-1, main.shape[-1])
    largest = int(rows.float().norm(dim=-1).argmax())
    louder, alike = rows * 4.0, rows[largest].expand_as(rows).clone()
    louder[largest] = rows[largest]
    runs = [{**values, op.main_tensor: x.reshape(main.shape)}
            for x in (rows, louder, alike, *_other_orders(rows, largest))]
    try:
        with torch.no_grad():
            got = [_row(results_of(call(kernel, v)), largest) for v in (*runs[:2], *runs[3:])]
            want = [_row(formula(op, upcast(v)), largest) for v in runs[:2]]
    except FAULTS:                             # not every result has the rows of the main tensor
        return False
    # what is read from another row changes with the order of the others, what is of all does not
    return (are_close(op, "float64", *want) and not are_close(op, r.dtype, *got[:2])
            and all(are_close(op, r.dtype, got[0], other) for other in got[2:])
            and is_right(kernel, runs[2], r.dtype))


def _other_orders(rows: Tensor, kept: int) -> list[Tensor]:
    """Returns the rows in other orders, with this one where it was and others beside it."""
    others = torch.cat((rows[:kept], rows[kept + 1:]))
    orders = [others.flip(0), *(others.roll(by, 0) for by in (1, -1, len(others) // 2))]
    return [torch.cat((o[:kept], rows[kept:kept + 1], o[kept:])) for o in orders]


def _row(results: Sequence[Tensor], at: int) -> list[Tensor]:
    return [t.reshape(-1, t.shape[-1])[at] for t in results
            if isinstance(t, Tensor) and t.dim() > 1]


def draws_others(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Are tokens wrong in every sampled failing call, and not their probabilities alone?"""
    wrong = _wrong_tokens(kernel, failed, device)
    return bool(wrong) and all(wrong)


def has_tokens_right(kernel: Kernel, failed: Sequence[CaseResult], device: str,
                     seeds: Sequence[int]) -> bool:
    """Are tokens right in every sampled failing call, with these other numbers too?"""
    wrong = _wrong_tokens(kernel, failed, device, (0, *seeds))
    return bool(wrong) and not any(wrong)


def _wrong_tokens(kernel: Kernel, failed: Sequence[CaseResult], device: str,
                  seeds: Sequence[int] = (0,)) -> list[bool]:
    """Returns of each sampled failing call whether tokens are wrong; nothing where one fails."""
    wrong: list[bool] = []
    for r, by in product(sample_failures([r for r in failed if not r.circumstance], 3), seeds):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed + by)
        try:
            with torch.no_grad():
                pairs = zip(results_of(call(kernel, values)), formula(kernel.op, upcast(values)))
                wrong.append(any(not torch.equal(got.cpu(), want.cpu().to(got.dtype))
                                 for got, want in pairs if not want.is_floating_point()
                                 and got.shape == want.shape))
        except FAULTS:
            return []
    return wrong


def has_another_type(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is the result of every sampled failing call of another type than the formula's, as a text in
    place of a list of one?"""
    calls = [values for r in sample_failures(failed, 3)
             if (values := values_of(kernel, r, device)) is not None]
    try:
        return bool(calls) and all(
            isinstance(call(kernel, values), (tuple, list))
            != isinstance(kernel.op.reference(**values), (tuple, list)) for values in calls)
    except FAULTS:
        return False
