"""Calls in other modes of the process, each once and compared with the eager formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from ....spec.kernel import Kernel
from ...cases.drawn_sizes import allowed_facts
from ...cases.long_calls import long_calls
from ...cases.pairs import pair_cases
from ...cases.span_sizes import span_calls
from ...kernel.case_sizes import relative_size
from ...kernel.contract import SMALL, CaseResult, check_case
from ..calls import check_in_reverse, check_modes
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

MODES = InferenceMode(), GradMode()
MODES_S = 0.03                                 # of CPU time in a kernel, beside those of the op
# What a way of its own for a few hundred tokens may get wrong alone, in turn.
OF_LONG_CALLS = (AllStrided("sparse"), ChangedInPlace(), OtherThreadCount(3),
                 AllStrided("transposed part"), ReusedMemory(), RecordingGradients(),
                 AfterAnotherCall(), AllStrided("offset"))
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
    yield from (partial(check_case, kernel, case, dtype, device, seed,
                        OF_LONG_CALLS[(i + LONG * seed) % len(OF_LONG_CALLS)])
                for i, case in enumerate(long[:LONG] if lane == "quick" else long))
