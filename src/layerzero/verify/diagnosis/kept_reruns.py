"""Makes a call after another one: in the same memory with new contents, in other memory, in turn
with others. What is right by itself and wrong then is kept from the other call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ..kernel.contract import (
    CaseResult,
    bind_once,
    call,
    case_values,
    load_once,
    refusals,
)
from .memory_reruns import explain_by_memory
from .reruns import is_right, sample_failures

Call = dict[str, Any]
THREADS = 4                                    # whose calls are made in turn


def explain_by_earlier_contents(kernel: Kernel, failed: Sequence[CaseResult],
                                device: str) -> tuple[str, str] | None:
    """Explains calls that are right by themselves, and wrong after a call of the same sizes with
    other contents, each of two times: in the same memory alone, or in other memory too."""
    if not kernel.op.tensors:
        return None
    sample = sample_failures(failed, 3)
    cases = {repr((r.case, r.dtype, r.seed)): r for r in sample}
    kinds = {kind for r in cases.values() if (kind := _kept(kernel, r, device))}
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    # memory that is used again looks like something that was kept
    return explain_by_memory(kernel, failed, device) or (kind, (
        "right in memory of its own, wrong where an earlier call had other contents: "
        if kind == "stale cache" else
        "right by itself, wrong after another call of the same sizes: ") + failed[0].detail)


def _kept(kernel: Kernel, r: CaseResult, device: str) -> str:
    """Returns what a call shows of what is kept: the class, or nothing."""
    alive: list[Call] = []                     # else the next call has their addresses

    def fresh(by: int) -> Call:
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed + by)
        alive.append({n: v.clone() if isinstance(v, Tensor) and 0 not in v.stride() else v
                      for n, v in values.items()})
        return alive[-1]

    kinds = {_kind_of_kept(kernel, [fresh(by) for _ in range(4)], [fresh(by + 1) for _ in range(4)],
                           r.dtype) for by in (0, 1)}
    return kinds.pop() if len(kinds) == 1 else ""


def _kind_of_kept(kernel: Kernel, earlier: list[Call], later: list[Call], dtype: str) -> str:
    if refusals(kernel, earlier[0]) or refusals(kernel, later[0]):
        return ""

    def is_first_right(values: Call) -> bool:
        bind_once.cache_clear()
        load_once.cache_clear()
        return is_right(kernel, values, dtype)

    if not (is_first_right(earlier[0]) and is_first_right(later[0])):
        return ""
    is_first_right(earlier[1])
    if not is_right(kernel, later[1], dtype):
        return "state"
    if not all(_same_kind(earlier[2][n], later[2][n]) for n in later[2]):
        return ""
    is_first_right(earlier[2])
    is_right(kernel, earlier[2], dtype)        # some keep what comes twice
    for name, t in earlier[2].items():
        if isinstance(t, Tensor):
            t.copy_(later[2][name])
    now = {**later[2], **{n: t for n, t in earlier[2].items() if isinstance(t, Tensor)}}
    return ("stale cache" if not is_right(kernel, now, dtype)
            and is_right(kernel, later[3], dtype) else "")


def _same_kind(a: Any, b: Any) -> bool:
    """May one be written over the other?"""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return not isinstance(a, Tensor) and not isinstance(b, Tensor)
    return a.shape == b.shape and a.dtype == b.dtype and not (0 in a.stride() and a.numel() > 1)


def is_wrong_in_turn(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is a call of several threads wrong in one thread too, after those of the others?"""
    for r in sample_failures(failed, 2):
        for calls in _in_turn(kernel, r, device):
            bind_once.cache_clear()
            load_once.cache_clear()
            if not all(is_right(kernel, values, r.dtype) for _ in range(2) for values in calls):
                return True
    return False


def _in_turn(kernel: Kernel, r: CaseResult, device: str) -> Iterator[list[Call]]:
    """Yields the calls of threads: of one case, and of two."""
    op = kernel.op
    for other in (r.case, *(case for case in op.cases[:2] if case != r.case)):
        calls = [case_values(op, r.case if i % 2 else other, r.dtype, device, r.seed + i)
                 for i in range(THREADS)]
        try:
            if not any(refusals(kernel, values) for values in calls):
                with torch.no_grad():
                    call(kernel, calls[0])
                yield calls
        except FAULTS:
            continue
