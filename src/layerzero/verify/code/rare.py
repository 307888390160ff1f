"""What the code of a kernel says about the calls it is wrong in, once all of it has run: the calls
that first reached a part, the numbers it compares with, how many calls it counts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ..certification.calls import Budget, check_sizes, result_of
from ..certification.circumstances.call_circumstances import circumstances
from ..certification.circumstances.value_circumstances import value_circumstances
from ..certification.non_finite import check_non_finite, is_of_others
from ..kernel.contract import (
    CaseResult,
    bind_once,
    call,
    case_values,
    check_case,
    load_once,
    results_of,
)
from ..kernel.gradients import check_gradients
from ..kernel.judging import same
from .drawn_calls import limits_of, sized_calls
from .own_code import own_values
from .search import accepts
from .tracing import Tracer

# CPU time in a kernel for sizes about the numbers of its code, and calls for each of these.
LIMITS_S, LIMIT_CALLS = {"quick": 0.3, "full": 4.0, "stress": 30.0}, {
    "quick": 32, "full": 160, "stress": 320}
LIMIT_FLOPS = {"quick": 1e7, "full": 4e8, "stress": 4e8}
# Of the calls that first reached a part of the code: how many, how often, and for how long.
RARE_CALLS, RARE_TURNS = 16, {"quick": 24, "full": 400, "stress": 400}
RARE_S = {"quick": 1.0, "full": 6.0, "stress": 30.0}
FEWEST, MANY_CALLS = 16, 30_000                # numbers of the code that may count calls
MANY_CALLS_S = {"quick": 0.5, "full": 4.0, "stress": 4.0}


def check_rare_code(kernel: Kernel, tracer: Tracer, device: str, lane: str, seed: int,
                    limit_s: float | None = None) -> Iterator[CaseResult]:
    """Yields the results of the calls that were the first to reach a part of the code, once more
    with numbers of every kind, in other circumstances, and with their gradients: the other checks
    have those with the op's own cases, which may never reach it."""
    op, rng = kernel.op, random.Random(f"rare {kernel.id} {seed}")
    ends = time.thread_time() + (RARE_S[lane] if limit_s is None else limit_s)
    # the later a part was reached, the fewer calls reach it
    first_calls = [(case, dtype) for case, dtype in {
        repr(call): call for call in reversed(tracer.first_calls.values())}.values()
                   if accepts(kernel, case, dtype, device, seed)][:RARE_CALLS]
    every = [*circumstances(op, "full"), *value_circumstances(op)]
    of_values = [*value_circumstances(op)] * 2
    turns = [rng.sample([*of_values, *every], len(of_values) + len(every)) for _ in first_calls]
    gradients = kernel.differentiable and bool(op.differentiable)
    for turn in range(RARE_TURNS[lane]):
        for (case, dtype), others in zip(first_calls, turns):
            if time.thread_time() > ends:
                return
            if turn == 0:
                if gradients:
                    yield check_gradients(kernel, case, dtype, device, seed)
                yield check_case(kernel, case, dtype, device, seed + 1)
                if not is_of_others(kernel) and op.tensors:
                    yield check_non_finite(kernel, case, dtype, device, seed)
            elif others:
                with suppress(*FAULTS):        # a circumstance that is not for such a case
                    yield check_case(kernel, case, dtype, device, seed, others.pop())


def check_limits(kernel: Kernel, tracer: Tracer, device: str, lane: str, seed: int,
                 limit_s: float | None = None) -> Iterator[CaseResult]:
    """Yields the results of calls with sizes on both sides of each number in the kernel's code,
    until time is up: a tile, a limit or a number of splits is most often wrong there."""
    op, rng = kernel.op, random.Random(f"limits {kernel.id} {seed}")
    if not op.tensors or not tracer.code:
        return
    numbers = limits_of(own_values(kernel.load, load_once(kernel)), set())
    rng.shuffle(numbers)
    budget = Budget(LIMITS_S[lane] if limit_s is None else limit_s, 1)
    ends = time.thread_time() + 3 * budget.left        # the formula takes time too
    for number in numbers:
        calls = islice(sized_calls(op, [number], rng, LIMIT_FLOPS[lane]), LIMIT_CALLS[lane])
        for case in calls:
            left = Budget(budget.left, 1)
            yield check_sizes(kernel, f"about {number}", [[case]], op.dtypes[0], device, seed,
                              budget=left)
            budget.left = left.left
            if budget.left <= 0 or time.thread_time() > ends:
                return


def check_counts(kernel: Kernel, tracer: Tracer, device: str, lane: str,
                 seed: int) -> Iterator[CaseResult]:
    """Yields the results of calls that reach code which had not run, of as many as a number in the
    code says: loaded anew, so that what counts them begins with the first."""
    op, dtype = kernel.op, kernel.op.dtypes[0]
    if not op.tensors or tracer.complete:
        return
    numbers = limits_of(own_values(kernel.load, load_once(kernel)), tracer.conditions())
    counts = [n for n in numbers if FEWEST < n <= MANY_CALLS]
    small = [case for case in op.cases if accepts(kernel, case, dtype, device, seed)]
    if not counts or not small:
        return
    case = min(small, key=lambda c: sum(v.numel() for v in case_values(
        op, c, dtype, device, seed).values() if isinstance(v, Tensor)) or 1 << 40)
    values, before, began = (case_values(op, case, dtype, device, seed), tracer.count(),
                             time.thread_time())
    load_once.cache_clear()
    bind_once.cache_clear()
    try:
        with torch.no_grad():
            first = [r.clone() for r in results_of(call(kernel, values))]
            for done in range(2, max(counts) + 3):
                if done % 16 == 0 and time.thread_time() - began > MANY_CALLS_S[lane]:
                    break
                tracer.next_check()
                with tracer.watching():
                    results = results_of(call(kernel, values))
                if tracer.count() < before:
                    before = tracer.count()
                    if kernel.deterministic and not all(map(same, results, first)):
                        yield result_of(kernel, case, dtype, f"{done} calls", seed, "failed",
                                        "state", f"another answer in call {done}")
                        return
                    yield check_case(kernel, case, dtype, device, seed)
    except FAULTS:
        yield check_case(kernel, case, dtype, device, seed)
