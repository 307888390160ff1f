"""Makes failing calls again with the same integers in another order: ids, items, lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ....spec.kernel import Kernel
from ...cases.generated import if_allowed
from ...kernel.contract import CaseResult, case_values
from .calls_again import is_right, sample_failures

Values = dict[str, Any]


def explain_by_order(kernel: Kernel, failed: Sequence[CaseResult],
                     device: str) -> tuple[str, str] | None:
    """Explains calls that are right with an argument of integers in order, and wrong in each other
    order that is tried: they are taken for sorted."""
    sample = sample_failures([r for r in failed if not r.circumstance], 2)
    names = [_taken_for_sorted(kernel, r, device) for r in sample]
    if not names or not all(names):
        return None
    return "convention", f"right with the same {names[0]} in order: {failed[0].detail}"


def _taken_for_sorted(kernel: Kernel, r: CaseResult, device: str) -> str:
    values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
    for name, ordered, others in _orders(values):
        calls = [if_allowed(kernel.op, {**values, name: t}) for t in (ordered, *others)]
        if (all(v is not None for v in calls) and is_right(kernel, calls[0] or {}, r.dtype)
                and not any(is_right(kernel, v or {}, r.dtype) for v in calls[1:])):
            return name
    return ""


def argument_in_order(kernel: Kernel, values: Values, dtype: str) -> str:
    """Returns the argument of integers with which in order the call is right; "" if there is none.
    """
    for name, ordered, _ in _orders(values):
        other = if_allowed(kernel.op, {**values, name: ordered})
        if other is not None and is_right(kernel, other, dtype):
            return name
    return ""


def _orders(values: Values) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
    """Yields each argument of integers in order, if it is not, and in four other orders: the
    numbers of each row, and the rows by their first."""
    draw = torch.Generator().manual_seed(0)
    for name, t in values.items():
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64) or not t.dim():
            continue
        by_number = t.sort(-1)
        order = t.reshape(t.shape[0], -1)[:, 0].argsort(stable=True) if t.numel() else None
        for axis, ordered in ((-1, by_number.values),
                              *([(0, t[order])] if t.dim() > 1 and order is not None else [])):
            if torch.equal(ordered, t):
                continue
            mixed = (ordered.index_select(axis, torch.randperm(
                t.shape[axis], generator=draw).to(t.device)) for _ in range(12))
            others = [m for m in mixed if not torch.equal(m, ordered)][:3]
            yield name, ordered, [*others, ordered.flip(axis)]
