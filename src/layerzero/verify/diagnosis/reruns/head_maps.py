"""Explains a wrong result by the heads it was computed with: of attention and of states, in which
several heads share another's keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...kernel.contract import CaseResult, call, case_values, formula, results_of, upcast
from .calls_again import sample_failures

# the heads that are shared, and those that share them
_SHARED = (("kv_heads", "heads"), ("heads", "value_heads"), ("groups", "heads"))


def explain_by_heads(kernel: Kernel, failed: Sequence[CaseResult],
                     device: str) -> tuple[str, str] | None:
    """Is every wrong head of the sampled calls that of another shared head?"""
    sample = sample_failures([r for r in failed if not r.circumstance], 3)
    maps = [_other_heads(kernel, r, device) for r in sample]
    if not maps or not all(maps):
        return None
    head, (got, want) = next(iter(maps[0].items()))
    return "head map", (f"head {head} has the result of shared head {got}, not of {want}: "
                        f"{failed[0].detail}")


def _other_heads(kernel: Kernel, r: CaseResult, device: str) -> dict[int, tuple[int, int]]:
    """Returns the heads with another shared head's result, with both; none where one is wrong in
    another way."""
    op, values = kernel.op, case_values(kernel.op, r.case, r.dtype, device, r.seed)
    variant = values[op.variant] if op.variant else ""
    patterns = op.patterns[variant]
    shared, own = next(((a, b) for a, b in _SHARED if a in op.dims and b in op.dims), ("", ""))
    results = op.result_patterns[variant]
    if not shared or not results or own not in results[0]:
        return {}
    axis = results[0].index(own)
    try:
        with torch.no_grad():
            got = results_of(call(kernel, values))[0].double()
            count, heads = (_size(patterns, values, name) for name in (shared, own))
            if not 1 < count < heads:
                return {}
            want = formula(op, upcast(values))[0]
            by_head = [formula(op, upcast(_with_one(op, patterns, values, shared, own, j)))[0]
                       for j in range(count)]
    except FAULTS:                             # not every op has a result of this shape
        return {}
    rtol, atol = (8 * t for t in op.tolerance.of(r.dtype))

    def near(other: Tensor, h: int) -> bool:
        return torch.allclose(got.select(axis, h), other.select(axis, h), rtol=rtol, atol=atol,
                              equal_nan=True)

    others: dict[int, tuple[int, int]] = {}
    for h in range(heads):
        if near(want, h):
            continue
        taken = next((j for j in range(count) if near(by_head[j], h)), None)
        if taken is None:
            return {}
        others[h] = taken, h * count // heads
    return others


def _size(patterns: Mapping[str, tuple[str, ...]], values: Mapping[str, Any], name: str) -> int:
    return next(int(values[n].shape[tokens.index(name)]) for n, tokens in patterns.items()
                if isinstance(values.get(n), Tensor) and name in tokens)


def _with_one(op: Op, patterns: Mapping[str, tuple[str, ...]], values: dict[str, Any], shared: str,
              own: str, j: int) -> dict[str, Any]:
    """Returns the values with shared head j in the place of every one, as many as share them."""
    count, heads = (_size(patterns, values, name) for name in (shared, own))
    changed = {n: values[n].narrow(tokens.index(shared), j, 1).expand(
                   *(-1 if t != shared else heads for t in tokens))
               for n, tokens in patterns.items()
               if shared in tokens and isinstance(values.get(n), Tensor)}
    scales = {n: v[j].expand(heads) for n, v in values.items() if n not in patterns
              and isinstance(v, Tensor) and v.dim() == 1 and v.numel() == count > 1}
    return {**values, **changed, **scales}
