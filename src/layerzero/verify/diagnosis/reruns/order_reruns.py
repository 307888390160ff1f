"""Makes failing calls again with the same integers in another order: ids, items, lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ....ops.formulas.block_masks import copy_block_mask, is_block_mask
from ....spec.kernel import Kernel
from ...cases.generated import if_allowed
from ...kernel.contract import CaseResult, case_values
from .calls_again import is_right, sample_failures

Values = dict[str, Any]
SEEDS = (0, 1001, 1002, 1003)                  # added to that of the case


def explain_by_order(kernel: Kernel, failed: Sequence[CaseResult],
                     device: str) -> tuple[str, str] | None:
    """Explains calls that are right with an argument of integers in order, and wrong in each other
    order that is tried, whatever the numbers: they are taken for sorted."""
    sample = sample_failures([r for r in failed if not r.circumstance], 2)
    names = [_taken_for_sorted(kernel, r, device) for r in sample]
    if not names or not all(names):
        return None
    return "convention", f"right with the same {names[0]} in order: {failed[0].detail}"


def _taken_for_sorted(kernel: Kernel, r: CaseResult, device: str) -> str:
    drawn = [case_values(kernel.op, r.case, r.dtype, device, r.seed + by) for by in SEEDS]
    common = set(drawn[0])
    asked = 0
    for values in drawn:
        found = {name: _is_mended(kernel, values, name, orders, r.dtype)
                 for name, orders in _by_name(values).items()}
        asked += any(found.values())
        # in order already: nothing to learn of it
        common = {name for name in common if found.get(name, values is not drawn[0])}
    return min(common, default="") if asked > 1 else ""


def _by_name(values: Values) -> dict[str, list[list[Tensor]]]:
    by_name: dict[str, list[list[Tensor]]] = {}
    for name, ordered, others in _orders(values):
        by_name.setdefault(name, []).append([ordered, *others])
    return by_name


def _is_mended(kernel: Kernel, values: Values, name: str, orders: Sequence[Sequence[Tensor]],
               dtype: str) -> bool:
    """Is the call right with the first of some orders, and wrong with all others?"""
    for tried in orders:
        calls = [if_allowed(kernel.op, {**values, name: t}) for t in tried]
        if (all(v is not None for v in calls) and is_right(kernel, calls[0] or {}, dtype)
                and not any(is_right(kernel, v or {}, dtype) for v in calls[1:])):
            return True
    return False


def argument_in_order(kernel: Kernel, values: Values, dtype: str) -> str:
    """Returns the argument of integers with which in order the call is right; "" if there is none.
    """
    for name, ordered, _ in _orders(values):
        other = if_allowed(kernel.op, {**values, name: ordered})
        if other is not None and is_right(kernel, other, dtype):
            return name
    for name, mask in values.items():
        if is_block_mask(mask) and is_right(kernel, {**values, name: _in_order(mask)}, dtype):
            return name
    return ""


def _in_order(mask: Any) -> Any:
    """Returns a BlockMask whose lists name the first block first."""
    ordered = copy_block_mask(mask)
    for counts, name in ((mask.kv_num_blocks, "kv_indices"),
                         (mask.full_kv_num_blocks, "full_kv_indices")):
        indices = getattr(mask, name)
        if indices is not None:
            listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
            last = torch.iinfo(indices.dtype).max
            inside = indices.masked_fill(~listed, last).sort(-1).values
            setattr(ordered, name, torch.where(listed, inside, 0))
    return ordered


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
