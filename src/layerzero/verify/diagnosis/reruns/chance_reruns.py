"""Makes one call many times: does it give other results by chance, or by what is kept of the calls
before it?"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ....spec.kernel import Kernel
from ...kernel.contract import CaseResult, call, case_values, refusals, results_of
from ...kernel.results import are_equal

Results = tuple[Any, ...]
RUNS, FEWEST = 24, 8                           # of one call
LONGEST_PERIOD = 8                             # in which a counter comes round, in calls
LIMIT_S = 1.0                                  # of CPU time


def follows_earlier_calls(kernel: Kernel, r: CaseResult, values: dict[str, Any],
                          device: str) -> bool:
    """Does a call whose result changes follow a rule? It is the same whenever the same call came
    before, or comes round, or changes less each time, or more."""
    with torch.no_grad():
        if _repeats(kernel, r, values, device):
            return True
        runs: list[Results] = []
        end = time.process_time() + LIMIT_S
        while len(runs) < RUNS and (len(runs) < FEWEST or time.process_time() < end):
            runs.append(results_of(call(kernel, values)))
    return _comes_round(runs) or _drifts(runs)


def _repeats(kernel: Kernel, r: CaseResult, values: dict[str, Any], device: str) -> bool:
    """Is the result the same each time one call came before, and another after another?"""
    others = [case_values(kernel.op, r.case, r.dtype, device, r.seed + by) for by in (1001, 1002)]
    if any(refusals(kernel, other) for other in others):
        return False
    after: list[list[Results]] = [[], []]
    for i in (0, 1, 0, 1, 1, 0):
        call(kernel, others[i])
        after[i].append(results_of(call(kernel, values)))
    return (all(are_equal(results[0], again) for results in after for again in results)
            and not are_equal(after[0][0], after[1][0]))


def _comes_round(runs: list[Results]) -> bool:
    """Is there a period? Seen twice at least."""
    return any(all(map(are_equal, runs, runs[period:]))
               for period in range(2, min(LONGEST_PERIOD, len(runs) // 2) + 1))


def _drifts(runs: list[Results]) -> bool:
    """Do results change less and less from call to call, or as much, or more and more? Among chance
    changes one is out of order."""
    steps = [_distance(a, b) for a, b in pairwise(runs)]
    steps = steps[:FEWEST] if all(step > 0 for step in steps[:FEWEST]) else []
    return len(steps) > 4 and (all(b <= a * (1 + 1e-3) for a, b in pairwise(steps))
                               or all(b >= a * (1 - 1e-3) for a, b in pairwise(steps)))


def _distance(a: Results, b: Results) -> float:
    return max((float((x.double() - y.double()).nan_to_num().norm()) for x, y in zip(a, b)
                if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape),
               default=0.0)
