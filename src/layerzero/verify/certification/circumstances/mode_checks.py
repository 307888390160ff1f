"""Calls in other modes of the process, each once and compared with the eager formula."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ...cases.drawn_sizes import allowed_facts
from ...cases.generated import Case, small_stress
from ...cases.long_calls import long_calls
from ...cases.pairs import pair_cases
from ...cases.span_sizes import span_calls
from ...kernel.case_sizes import relative_size
from ...kernel.contract import (
    SMALL,
    CaseResult,
    Circumstance,
    accepts_case,
    call,
    case_contents,
    case_values,
    case_values_to_read,
    check_case,
    eager_results,
    results_of,
)
from ..calls import check_in_reverse, check_modes, failure_of, is_near, result_of
from .argument_circumstances import AllStrided
from .call_circumstances import (
    AfterAnotherCall,
    ChangedInPlace,
    InferenceMode,
    OtherDefaultDtype,
    OtherThreadCount,
    ReusedMemory,
)
from .grad_circumstances import GradMode, RecordingGradients
from .state_circumstances import ChangedInMode

MODES = InferenceMode(), GradMode()
MODES_S = 0.03                                 # of CPU time in a kernel, beside those of the op
# What a way of its own for a few hundred tokens may get wrong alone, in turn.
OF_LONG_CALLS = (AllStrided("sparse"), ChangedInPlace(), OtherThreadCount(3),
                 AllStrided("transposed part"), ReusedMemory(), RecordingGradients(),
                 AfterAnotherCall(), AllStrided("offset"))
CHANGED = ChangedInPlace(), ChangedInMode("in inference mode")
LONG_CALL_S = 0.2                              # such a call is not made again
CHANGES_S = 0.6                                # of the quick lane, for all that change
LONG = 6                                       # calls of a few hundred that are made in any case


def mode_checks(kernel: Kernel, dtype: str, device: str, lane: str,
                seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the calls of the op in each mode and others in one, all in reverse, and those of a few
    hundred tokens with another default dtype, which what a kernel makes for its parts may have, and
    strided, changed or after another call."""
    op = kernel.op
    if kernel.jit:                             # each mode would compile for itself
        return
    own = [case for case in op.cases if relative_size(op, case) <= SMALL]
    others = [case for case in (*op.stress, *(
        case for case, _ in pair_cases(kernel, device, lane, seed).cells))
        if relative_size(op, case) <= SMALL]
    limit_s = MODES_S if lane == "quick" else math.inf
    yield partial(check_modes, kernel, own, others, dtype, MODES, device, seed, limit_s)
    groups = *long_calls(op, lane, seed), *span_calls(op, lane, seed)[::3]
    allowed = (next((case for case in group if allowed_facts(op, case, dtype, seed) is not None),
                    None) for group in groups)
    long = [case for case in allowed if case is not None]
    yield partial(check_modes, kernel, long[:LONG], long[LONG:], dtype, (OtherDefaultDtype(),),
                  device, seed, limit_s)
    yield partial(check_in_reverse, kernel, own, device, seed, limit_s)
    changed = [*own, *small_stress(op)]
    yield from (partial(check_changes, kernel,
                        changed[(i + seed) % 2::2] if lane == "quick" else changed, dtype, how,
                        device, seed, CHANGES_S if lane == "quick" else math.inf)
                for i, how in enumerate(CHANGED))
    yield from (partial(check_case, kernel, case, dtype, device, seed,
                        OF_LONG_CALLS[(i + LONG * seed) % len(OF_LONG_CALLS)])
                for i, case in enumerate(long[:LONG] if lane == "quick" else long))


def check_changes(kernel: Kernel, cases: Sequence[Case], dtype: str, how: Circumstance,
                  device: str = "cpu", seed: int = 0, limit_s: float = math.inf) -> CaseResult:
    """Calls each case, again with other contents in the same tensors, and compares with the eager
    formula: what is kept beside one argument alone. What looks wrong is judged as any other is.
    Where that takes longer than `limit_s` of CPU time the rest is left out."""
    ran, began = 0, time.thread_time()
    for case in cases:
        if time.thread_time() - began > limit_s:
            break
        near = _is_near_after_a_change(kernel, case, dtype, how, device, seed)
        ran += near is not None
        failure = failure_of(near, kernel, case, dtype, device, seed, how)
        if failure is not None:
            return failure
    return result_of(kernel, {}, dtype, f"{len(cases)} cases {how.name}", seed,
                     "passed" if ran else "skipped", detail=f"{ran} calls")


def _is_near_after_a_change(kernel: Kernel, case: Case, dtype: str, how: Circumstance, device: str,
                            seed: int) -> bool | None:
    op = kernel.op
    try:
        if not all(accepts_case(kernel, case, dtype, device, by) for by in (seed, seed + 1)):
            return None
        others = case_values_to_read(op, case, dtype, device, seed + 1)
        want = eager_results(op, others, case_contents(case, dtype, device, seed + 1))
        values = case_values(op, case, dtype, device, seed)
    except FAULTS:                             # not every case makes such a call
        return None
    try:
        with torch.no_grad(), how.around(device):
            # as the tensors of a mode are made in it
            tensors = {n: t.clone() for n, t in values.items() if isinstance(t, Tensor)}
            if any(0 in t.stride() or not isinstance(others[n], Tensor)
                   or others[n].shape != t.shape for n, t in tensors.items()):
                return None
            began = time.thread_time()
            call(kernel, {**values, **tensors})
            if time.thread_time() - began > LONG_CALL_S:
                return None
            for name, t in tensors.items():
                t.copy_(others[name])
            got = results_of(call(kernel, {**others, **tensors}))
    except FAULTS:
        return False
    rtol, atol = op.tolerance.of(dtype)
    return len(got) == len(want) and all(is_near(g, w, rtol, atol) for g, w in zip(got, want))
