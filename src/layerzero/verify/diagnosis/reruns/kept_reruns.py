"""Makes a call after another one: in the same memory with new contents, in other memory, in turn
with others. What is right by itself and wrong then is kept from the other call.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ...certification.circumstances.call_circumstances import ChangedInPlace, ReusedMemory
from ...kernel.contract import (
    CaseResult,
    bind_once,
    call,
    case_values,
    load_once,
    refusals,
    results_of,
)
from ..conditions import find_circumstance
from .calls_again import is_right, sample_failures, values_of
from .memory_reruns import explain_by_memory

Call = dict[str, Any]
APART = 1 << 17                                # elements before and behind a copy
THREADS = 4                                    # whose calls are made in turn
HELD_CALLS = 80                                # of which a cache does not keep all results


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
    copies = Copies(kernel, r, device)
    kinds = {_kind_of_kept(copies, first) for first in (3001, 3002)}
    return kinds.pop() if len(kinds) == 1 else ""


class Copies:
    """Calls of one case with tensors where hardly any were before: inside large buffers, which
    are kept, else the next one has its address."""

    def __init__(self, kernel: Kernel, r: CaseResult, device: str) -> None:
        self.kernel, self.r, self.device, self.alive = kernel, r, device, list[Call]()

    def drawn(self, by: int) -> Call:
        return self.copied(case_values(self.kernel.op, self.r.case, self.r.dtype, self.device,
                                       self.r.seed + by))

    def copied(self, values: Call) -> Call:
        start = APART + 64 * (2 * len(self.alive) + 1)

        def copy(t: Tensor) -> Tensor:
            buffer = t.new_empty(APART + start + t.numel())
            return buffer[start:start + t.numel()].view(t.shape).copy_(t)

        self.alive.append({n: copy(v) if isinstance(v, Tensor) and v.is_contiguous() else v
                           for n, v in values.items()})
        return self.alive[-1]

    def is_right(self, values: Call) -> bool:
        return is_right(self.kernel, values, self.r.dtype)

    def is_first_right(self, values: Call) -> bool:
        bind_once.cache_clear()
        load_once.cache_clear()
        return self.is_right(values)


def _kind_of_kept(copies: Copies, first: int) -> str:
    kernel, other = copies.kernel, first + 1
    if (any(refusals(kernel, copies.drawn(by)) for by in (first, other))
            or not all(copies.is_first_right(copies.drawn(by)) for by in (first, other))):
        return ""
    copies.is_first_right(copies.drawn(first))
    if not copies.is_right(copies.drawn(other)):
        return "state"
    for circumstance in (ChangedInPlace(), ReusedMemory()):
        try:
            with torch.no_grad():
                now = circumstance.before(kernel, copies.drawn(first), lambda: copies.drawn(other))
        except FAULTS:
            continue
        if now is not None and not copies.is_right(now) and copies.is_right(copies.copied(now)):
            return "stale cache"
    return ""


def keeps_all_results(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Does a result of each of many calls live on when nobody has it, in memory of its own? A cache
    has a size, and buffers are used in turn."""
    sample = sample_failures(failed, 1)
    alive: list[list[StorageWeakRef]] = []
    for r in sample * HELD_CALLS:
        values = values_of(kernel, r, device)
        if values is None or refusals(kernel, values):
            return False
        with torch.no_grad():
            results = results_of(call(kernel, values))
        alive.append([StorageWeakRef(t.untyped_storage()) for t in results
                      if isinstance(t, Tensor) and t.numel()])
        del results
    gc.collect()
    kept = [{storage.cdata for storage in storages if not storage.expired()} for storages in alive]
    return bool(kept) and all(kept) and len(set().union(*kept)) >= len(kept)


def explain_by_contents(kernel: Kernel, failed: Sequence[CaseResult],
                        device: str) -> tuple[str, str] | None:
    """Explains calls that look as if something was kept, and are wrong at the first call too."""
    if all("parts of one" in r.circumstance for r in failed) and _is_wrong_in_a_stack(
            kernel, failed, device):
        return "layout", ("wrong for parts of one tensor, whatever was called before: "
                          + failed[0].detail)
    if _is_wrong_with_these_contents(kernel, failed, device):
        return "unknown", f"wrong with these contents at the first call too: {failed[0].detail}"
    return None


def _is_wrong_with_these_contents(kernel: Kernel, failed: Sequence[CaseResult],
                                  device: str) -> bool:
    """Is a call wrong with the contents that its circumstance leaves, though they are copied and it
    is the first?"""
    for r in sample_failures(failed, 2):
        now, other = (partial(case_values, kernel.op, r.case, r.dtype, device, r.seed + by)
                      for by in range(2))
        circumstance = find_circumstance(kernel.op, r.circumstance)
        try:
            left = circumstance and circumstance.before(kernel, now(), other)
        except FAULTS:
            return False
        bind_once.cache_clear()
        load_once.cache_clear()
        if not left or is_right(kernel, {n: v.clone() if isinstance(v, Tensor) else v
                                         for n, v in left.items()}, r.dtype):
            return False
    return True


def _is_wrong_in_a_stack(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is a call wrong with tensors that lie behind those of another, though it is the first?"""
    for r in sample_failures(failed, 2):
        values, other = (case_values(kernel.op, r.case, r.dtype, device, r.seed + by)
                         for by in range(2))
        behind = {n: torch.stack((other[n], t))[1] for n, t in values.items()
                  if isinstance(t, Tensor) and t.numel() and t.is_contiguous()
                  and t.shape == other[n].shape}
        bind_once.cache_clear()
        load_once.cache_clear()
        if not is_right(kernel, {**values, **behind}, r.dtype):
            return True
    return False


def is_wrong_in_turn(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is a call of several threads wrong in one thread too, after those of the others?"""
    for r in sample_failures(failed, 2):
        for calls in _in_turn(kernel, r, device):
            bind_once.cache_clear()
            load_once.cache_clear()
            if not all(is_right(kernel, values, r.dtype) for _ in range(2) for values in calls):
                return True
    return False


def is_wrong_with_one_other(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is a call wrong after one that is right, of which one tensor alone is another?"""
    for r in sample_failures(failed, 2):
        values, others = (case_values(kernel.op, r.case, r.dtype, device, r.seed + by)
                          for by in range(2))
        for name, t in others.items():
            mine = values[name]
            if (not isinstance(t, Tensor) or not t.is_floating_point()
                    or not isinstance(mine, Tensor) or mine.shape != t.shape):
                continue
            bind_once.cache_clear()
            load_once.cache_clear()
            other = {**values, name: t}
            if is_right(kernel, values, r.dtype) and not is_right(kernel, other, r.dtype):
                bind_once.cache_clear()
                load_once.cache_clear()
                if is_right(kernel, other, r.dtype):
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
