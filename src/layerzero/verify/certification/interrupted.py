"""Calls in the midst of which something happens, for the longer lanes.

- `check_interrupted_backward`: another thread makes a whole forward and backward pass wherever one
  is about to call something.
- `check_interrupted_first`: another thread calls in the midst of the first call of its sizes, while
  what is kept for them is being made.
- `check_out_of_memory`: an allocation fails; what is set for the call must be put back, and the
  next call be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Waited
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...dispatch.facts import read
from ...machine import loading
from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.chosen_cells import Cell, with_a_size_of_one
from ..cases.generated import relative_cost
from ..kernel.case_sizes import numbers_of, relative_size
from ..kernel.contract import (
    CaseResult,
    call,
    case_refusals,
    case_tensors,
    check_case,
    formula,
    generate_values,
    refusals,
    results_of,
)
from ..kernel.gradients import gradient_cases, requiring_grad
from ..kernel.guarded import find_changes, snapshot
from ..kernel.judging import same
from ..kernel.process_state import ONCE, process_state, put_back
from .calls import is_near, passes_extra_check
from .circumstances.argument_circumstances import with_most_arguments
from .threads import WAIT_S, check_interrupted, interrupt, observe, quiet, run_alone, shallow_first

Case = Mapping[str, Any]
PATHS = 4                                      # calls that together give most of the arguments
QUICK_S, LONGER_S = 0.06, 0.6                  # of CPU time for the interrupted calls of a kernel
Values = dict[str, Any]
BACKWARD_S = 0.2                               # of CPU time for the points of one case
POINTS, SIZES = 40, 2                          # in a first call, and of how many of its numbers
NEW_SIZE, APART = 398, 256                     # more than any case has; between two checks


def interrupted_by_calls(kernel: Kernel, cells: Sequence[Cell], device: str, lane: str, seed: int,
                         other: Case) -> Callable[[], CaseResult]:
    """Returns the check of calls that others interrupt: a path of its own, which an argument or a
    size of one takes, comes before other sizes, what costs least first."""
    op = kernel.op
    paths = [cells[0], *with_a_size_of_one(op, cells, seed),
             *with_most_arguments(op, cells, device, seed, PATHS)]
    paths = [cell for i, cell in enumerate(paths) if cell not in paths[:i]]
    paths.sort(key=lambda cell: relative_cost(op, cell[0]) or 0.0)
    return partial(check_interrupted, kernel,
                   [*paths, *cells[1 + seed % 2::2], *cells[2 - seed % 2::2]], device, seed, other,
                   QUICK_S if lane == "quick" else LONGER_S)


def interrupted_checks(kernel: Kernel, cells: Sequence[Cell], device: str,
                       seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the checks for the cells with fewest and with most tensors."""
    op, dtype = kernel.op, cells[0][1]
    if device != "cpu" or kernel.jit or not op.tensors:
        return
    own = [case for case, of in cells if of == dtype and case in op.cases]
    if not own:
        return

    def count(case: Case) -> int:
        return len(case_tensors(op, case, dtype, device, seed))

    few, most = min(own, key=count), max(own, key=count)
    for case in (few,) if few == most else (few, most):
        yield partial(check_interrupted_first, kernel, case, dtype, device, seed)
        yield partial(check_out_of_memory, kernel, case, dtype, device, seed)
    if kernel.differentiable and op.differentiable:
        yield from (partial(check_interrupted_backward, kernel, case, dtype, device, seed)
                    for case in gradient_cases(op)[:3])


def check_interrupted_backward(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                               seed: int = 0) -> CaseResult:
    op = kernel.op

    def result(status: str, detail: str = "", reasons: Any = ()) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail, seed=seed,
                          circumstance="forward and backward interrupted by other threads",
                          kinds=("threads",) if status == "failed" else ())

    reasons = case_refusals(kernel, case, dtype, device, seed)
    if reasons:
        return result("skipped", reasons=reasons)
    mine, others = (generate_values(op, case, dtype, device, seed + i) for i in range(2))

    def run(values: Values) -> tuple[Any, ...]:
        with torch.enable_grad():
            wanting = requiring_grad(op, values)
            used = [r for r in results_of(call(kernel, wanting)) if r.requires_grad]
            leaves = [v for v in wanting.values() if isinstance(v, Tensor) and v.requires_grad]
            # other ones in each thread
            weights = [1 + r.detach().nan_to_num(0.0, 0.0, 0.0) for r in used]
            grads = torch.autograd.grad(used, leaves, weights, allow_unused=True)
        return tuple(g for g in grads if g is not None)

    rtol, atol = (8 * t for t in op.tolerance.of(dtype))
    try:
        if any(refusals(kernel, requiring_grad(op, values)) for values in (mine, others)):
            return result("skipped")
        with ThreadPoolExecutor(1) as pool, quiet():
            alone = run(mine), run(others)
            differing = interrupt(run, mine, others, pool, BACKWARD_S)
    except FAULTS as e:                        # the gradients have checks of their own
        return result("skipped", str(reason_of(e, classify(e))))
    for want, runs in zip(alone, differing):
        if any(len(got) != len(want) or not all(
                torch.allclose(g.double(), w.double(), rtol, atol, equal_nan=True)
                for g, w in zip(got, want)) for got in runs):
            return result("failed", "another gradient beside a pass of another thread")
    return result("passed")


def _new_sizes(op: Op, case: Case, seed: int, more: int = 0) -> Iterator[Iterator[Case]]:
    """Yields for each of a few numbers of a case the case in ever other sizes that no check has."""
    def sized(name: str, size: int) -> Iterator[Case]:
        return ({**case, name: size + NEW_SIZE + more + 2 * i + 64 * seed}
                for i in range(2 * POINTS))

    numbers = [(n, size) for n, d in numbers_of(op).items()
               if type(d) is int and type(size := case.get(n, d)) is int and size > 0]
    # those first that make the call least larger
    numbers.sort(key=lambda number: relative_size(op, {**case, number[0]: number[1] + NEW_SIZE}))
    return (sized(n, size) for n, size in numbers[:SIZES])


def _calls(kernel: Kernel, cases: Iterator[Case], dtype: str, device: str,
           seed: int) -> Iterator[tuple[Case, Values]]:
    """Yields those that make a call which the kernel takes."""
    for case in cases:
        try:
            values = generate_values(kernel.op, case, dtype, device, seed)
            if (not refusals(kernel, values)
                    and passes_extra_check(kernel.op, values, read(kernel.op, values))):
                yield case, values
        except FAULTS:                         # not every size makes one
            continue


def _is_right(kernel: Kernel, values: Values, got: Sequence[Any], dtype: str) -> bool:
    rtol, atol = (8 * t for t in kernel.op.tolerance.of(dtype))
    with torch.no_grad():
        want = formula(kernel.op, values)
    return len(got) == len(want) and all(is_near(g, w, rtol, atol) for g, w in zip(got, want))


def check_interrupted_first(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                            seed: int = 0) -> CaseResult:
    op = kernel.op

    def result(status: str, detail: str = "", given: Case = case) -> CaseResult:
        return CaseResult(kernel.id, given, dtype, status, detail=detail, seed=seed,
                          circumstance="first calls interrupted by other threads",
                          kinds=("threads",) if status == "failed" else ())

    ran = 0
    with ThreadPoolExecutor(1) as pool, torch.no_grad(), quiet():
        for cases in _new_sizes(op, case, seed):
            calls = _calls(kernel, cases, dtype, device, seed)
            depths: list[int] = []
            for _, values in islice(calls, 2): # the first one loads it
                depths.clear()
                observe(partial(run_alone, kernel, values), partial(_noted, depths))
            for point in sorted(shallow_first(depths, POINTS)):
                for given, mine in islice(calls, 1):
                    others = generate_values(op, given, dtype, device, seed + 1)
                    try:
                        results = _interrupted_at(kernel, point, mine, others, pool)
                    except loading.LoadFailed:
                        return result("skipped")
                    except FAULTS as e:
                        return _unless_alone(kernel, calls, dtype, device, seed) or result(
                            "failed", str(reason_of(e, classify(e))), given)
                    ran += 1
                    if not all(_is_right(kernel, v, got, dtype)
                               or all(map(same, got, run_alone(kernel, v))) for v, got in results):
                        return _unless_alone(kernel, calls, dtype, device, seed) or result(
                            "failed", "wrong beside the first call of these sizes", given)
    return result("passed" if ran else "skipped", f"{ran} calls")


def _noted(depths: list[int], depth: int) -> bool:
    depths.append(depth)
    return True


def _interrupted_at(kernel: Kernel, point: int, mine: Values, others: Values,
                    pool: ThreadPoolExecutor) -> list[tuple[Values, tuple[Any, ...]]]:
    """Returns two calls with their results, of which another thread made one within the other."""
    seen, between = [0], []                    # type: list[int], list[tuple[Any, ...]]

    def pause(_: int) -> bool:
        seen[0] += 1
        if seen[0] <= point:
            return True
        with suppress(Waited):                 # for a lock
            between.append(pool.submit(run_alone, kernel, others).result(WAIT_S))
        return False

    results = observe(partial(run_alone, kernel, mine), pause)
    return [(mine, results), *((others, r) for r in between)]


def _unless_alone(kernel: Kernel, calls: Iterator[tuple[Case, Values]], dtype: str, device: str,
                  seed: int) -> CaseResult | None:
    """Returns how another new size fails by itself; None where it is right."""
    for case, _ in islice(calls, 1):
        judged = check_case(kernel, case, dtype, device, seed)
        return judged if judged.status == "failed" else None
    return None


class _Exhausted(TorchDispatchMode):
    """Fails at one of the operations that allocate memory, or counts them."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.at, self.count = at, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False                           # what skips it imports torch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs))
                 if isinstance(t, Tensor) and t.layout == torch.strided}
        if any(isinstance(t, Tensor) and t.layout == torch.strided and t.numel()
               and t.untyped_storage().data_ptr() not in given for t in tree_leaves(results)):
            self.count += 1
            if self.count == self.at:
                raise torch.OutOfMemoryError("no memory is left")
        return results


def check_out_of_memory(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                        seed: int = 0) -> CaseResult:
    op = kernel.op

    def result(status: str, kind: str = "", detail: str = "", given: Case = case) -> CaseResult:
        return CaseResult(kernel.id, given, dtype, status, detail=detail, seed=seed,
                          circumstance="after an allocation that failed in the midst of a call",
                          kinds=(kind,) if kind else ())

    ran = 0
    with torch.no_grad(), quiet():
        for cases in _new_sizes(op, case, seed, APART):
            calls, counting = _calls(kernel, cases, dtype, device, seed), _Exhausted()
            try:
                for _, values in islice(calls, 1):
                    with counting:
                        run_alone(kernel, values)
            except FAULTS:                     # not every kernel runs where torch is observed
                return result("skipped")
            step = -(-counting.count // POINTS) or 1
            for at in range(1, counting.count + 1, step):
                for given, values in islice(calls, 1):
                    found = _find_left_behind(kernel, at, values, dtype, device)
                    ran += 1
                    if found is not None and found[0] == "state":
                        if check_case(kernel, given, dtype, device, seed).passed:
                            continue           # only just outside
                        alone = _unless_alone(kernel, calls, dtype, device, seed)
                        return alone or result("failed", *found, given)
                    if found is not None:
                        return result("failed", *found, given)
    return result("passed" if ran else "skipped", detail=f"{ran} calls")


def _find_left_behind(kernel: Kernel, at: int, values: Values, dtype: str,
                      device: str) -> tuple[str, str] | None:
    before, state = snapshot(values), process_state(device)
    try:
        with _Exhausted(at):
            run_alone(kernel, values)
    except FAULTS:                             # as it should be
        pass
    changed = [name for name in put_back(state, device) if name not in ONCE]
    if changed:
        return "global state", f"{changed[0]} is another one after an allocation that failed"
    for text in find_changes(values, before):
        return "in-place change", f"{text}, in which an allocation failed"
    try:
        got = run_alone(kernel, values)
    except FAULTS as e:
        return "state", str(reason_of(e, classify(e)))
    return (None if _is_right(kernel, values, got, dtype)
            else ("state", "wrong after a call in which an allocation failed"))
