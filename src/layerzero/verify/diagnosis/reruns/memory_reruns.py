"""Explains a wrong result by memory: what was not written, or is read beside an input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ...kernel.contract import CaseResult, call, formula, results_of, upcast
from ...kernel.guarded import guarded, poisoned_memory
from ...kernel.results import are_equal, has_holes
from .calls_again import are_close, is_right, sample_failures, values_of
from .chance_reruns import follows_earlier_calls

Values = dict[str, Any]
APART = 1 << 17                                # elements before and behind a copy
LONGEST = 1 << 22                              # elements that are worth a copy
_PLACES = count()


def explain_by_memory(kernel: Kernel, failed: Sequence[CaseResult],
                       device: str) -> tuple[str, str] | None:
    """Reruns failing cases over poisoned memory, between margins of NaN, and repeatedly."""
    if not kernel.op.tensors:
        return None
    for r in sample_failures(failed, 3):
        values = values_of(kernel, r, device)
        if values is None:
            continue
        try:
            with torch.no_grad():
                first = results_of(call(kernel, values))
                again = [results_of(call(kernel, values)) for _ in range(6)]
                with poisoned_memory():
                    poisoned = results_of(call(kernel, values))
                guarded_result = results_of(call(kernel, guarded(values)))
                expected = formula(kernel.op, upcast(values))
        except FAULTS:
            continue
        if not all(isinstance(t, Tensor) for t in first):
            return None
        if not are_equal(first, poisoned) and has_holes(poisoned, expected):
            return ("uninitialised output",
                    "over memory full of NaN its result has NaN: not every element is written")
        if not are_equal(first, guarded_result) and has_holes(guarded_result, expected):
            says = "with NaN on both sides of every input its result has NaN: it reads beside one"
            if r.circumstance and _is_right_when_dense(kernel, values, r.dtype):
                return "layout", f"{says} that is not contiguous"
            return "out of bounds", says
        beside = _kind_of_margins(kernel, values, r.dtype)
        if beside:
            return beside
        if any(not are_equal(first, other) for other in again):
            all_right = all(are_close(kernel.op, r.dtype, out, expected)
                            for out in (first, *again))
            if all_right or (kernel.deterministic and "non-determinism" in r.kinds
                             and not follows_earlier_calls(kernel, r, values, device)):
                return "non-determinism", "the same call gives other results from run to run"
            return "state", "the same call gives another result from run to run, and a wrong one"
    return None


def _is_right_when_dense(kernel: Kernel, values: Values, dtype: str) -> bool:
    dense = {n: v.contiguous() if isinstance(v, Tensor) else v for n, v in values.items()}
    return is_right(kernel, guarded(dense), dtype)


def _kind_of_margins(kernel: Kernel, values: Values, dtype: str) -> tuple[str, str] | None:
    """Explains a call that is right in memory of its own, and wrong each time other numbers lie on
    both sides of its inputs. Integers have no NaN to show what was read there."""
    if any(_span(v) > LONGEST for v in values.values() if isinstance(v, Tensor)):
        return None                            # rows far apart: gigabytes, if they were copied
    copies = [values, *({n: v.clone() if isinstance(v, Tensor) and 0 not in v.stride() else v
                         for n, v in values.items()} for _ in range(2))]
    between = [_between_others(values) for _ in range(3)]
    if (not all(is_right(kernel, v, dtype) for v in copies)
            or any(is_right(kernel, v, dtype) for v in between)):
        return None
    plain = {n: v.clone(memory_format=torch.contiguous_format) if isinstance(v, Tensor) else v
             for n, v in values.items()}
    strided = any(isinstance(v, Tensor) and not v.is_contiguous() for v in values.values())
    if strided and all(is_right(kernel, _between_others(plain), dtype) for _ in range(2)):
        return "layout", "right in contiguous memory, else it reads beside an input"
    return ("out of bounds",
            "with other numbers on both sides of every input it is wrong: it reads beside one")


def _span(t: Tensor) -> int:
    """Returns the number of elements from the first to the last one in memory."""
    return 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride())) if t.numel() else 0


def _between_others(values: Values) -> Values:
    """Returns copies with their strides inside large buffers, of which the rest is -1 or NaN. At
    such addresses nothing was before, in no earlier diagnosis either: what is kept by its address
    is no matter."""
    start = APART + 64 * (2 * (next(_PLACES) % 1000) + 1)

    def copy(t: Tensor) -> Tensor:
        span = _span(t)
        raw = torch.full(((2 * APART + start + span) * t.element_size(),), 0xFF, dtype=torch.uint8,
                         device=t.device)
        storage = raw.view(t.dtype)            # all bits set: NaN, -1
        storage[start:start + span].copy_(t.as_strided((span,), (1,), t.storage_offset()))
        return storage.as_strided(t.shape, t.stride(), start)

    return {n: copy(v.detach()) if isinstance(v, Tensor) else v for n, v in values.items()}
