"""Calls for which a kernel may take a short way: rows of a table that lie one after another, a
call that records gradients after one in inference mode, draws from a generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS, classify, reason_of
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.chosen_cells import Cell
from ...cases.generated import Case, given_arguments, is_accepted
from ...kernel.case_sizes import numbers_of, relative_size
from ...kernel.circumstance import Circumstance
from ...kernel.contract import (
    SMALL,
    CaseResult,
    bind_call,
    call,
    case_refusals,
    case_tensors,
    case_values,
    check_case,
    formula,
    refusals,
    results_of,
)
from ...kernel.gradients import check_gradients, gradient_cases, requiring_grad
from ...kernel.judging import same
from .row_circumstances import if_finite
from .table_circumstances import Table, tables_in

Values = dict[str, Any]
INFERENCE_CASES = 3
GENERATOR, DRAWING_CASES, SEED = "generator", 2, 20_241
RANDOM_NUMBERS = ("uniforms", "seed", "seed_rows")     # which come before a generator
LARGER_SEED = 50                               # of which no check has the sizes
NEW_CONTENTS = 7_001                           # added to a seed: no other check has the numbers
NEW_SIZE, NEW_SIZES = 291, 2                    # more than a case has; how many of a case are tried


class RowsInOrder(Circumstance):
    """Indices that name the rows of a table one after another, or all of its rows: a kernel may
    return a part of the table, or the table itself."""

    def __init__(self, table: Table, whole: bool = False) -> None:
        self.table, self.whole = table, whole
        self.name = f"given {table.indices} 0, 1, 2 and so on" + (" to the last row" * whole)

    def alter(self, op: Op, values: Values) -> Values | None:
        t, rows = values[self.table.indices], len(values[self.table.tensors[0]])
        if self.whole:
            if not 0 < t.numel() <= rows or bool((t < 0).any()):
                return None
            values = {**values, **{n: values[n][:t.numel()] for n in self.table.tensors}}
            rows = t.numel()
        order = torch.arange(t.numel(), device=t.device, dtype=t.dtype).view(t.shape) % max(rows, 1)
        # what lies behind the length of a page may be anything
        return if_finite(op, {**values, self.table.indices: torch.where(t < 0, t, order)})


def rows_in_order_checks(kernel: Kernel, cells: Sequence[Cell], device: str,
                         seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the plainest case for each rank of the indices of a table, of several if there are."""
    op = kernel.op
    plainest: dict[int, tuple[tuple[int, int], Case, Table]] = {}
    for case, dtype in cells:
        if (dtype != op.dtypes[0] or relative_size(op, case) > SMALL
                or case_refusals(kernel, case, dtype, device, seed)):
            continue
        table = tables_in(op, case, dtype, seed)
        if table is None or table.column is not None:
            continue
        indices = case_tensors(op, case, dtype, device, seed)[table.indices]
        order = int(indices.numel() < 2), len(case)
        if ((indices.dim() not in plainest or order < plainest[indices.dim()][0])
                and _reads_named_rows(op, case_values(op, case, dtype, device, seed), table)):
            plainest[indices.dim()] = order, case, table
    yield from (partial(check_case, kernel, case, op.dtypes[0], device, seed,
                        RowsInOrder(table, whole))
                for _, case, table in plainest.values() for whole in (False, True))


def _reads_named_rows(op: Op, values: Values, table: Table) -> bool:
    """Are the rows that no index names no matter? Those of a chunk that begins at one are."""
    count = len(values[table.tensors[0]])
    named = values[table.indices].long().clamp(min=0).unique()
    unnamed = torch.ones(count, dtype=torch.bool, device=named.device)
    unnamed[named[named < count]] = False
    if not bool(unnamed.any()):
        return False
    others = dict(values)
    for name in table.tensors:
        t = values[name].clone(memory_format=torch.contiguous_format)
        (t.view(torch.uint8) if t.dtype.itemsize == 1 else t)[unnamed] = 7
        others[name] = t
    with torch.no_grad():
        return all(map(same, formula(op, values), formula(op, others)))


def generator_checks(kernel: Kernel, device: str,
                     seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the first cases that can draw from a generator. Those of a library are its own."""
    op = kernel.op
    if not any(p.name == GENERATOR for p in op.params) or kernel.package or device != "cpu":
        return
    drawing = (case for case in op.cases if relative_size(op, case) <= SMALL
               and not case_refusals(kernel, case, op.dtypes[0], device, seed) and _draw(partial(
                   _reference, op), _drawing(case_values(op, case, op.dtypes[0], device, seed)))[1])
    yield from (partial(check_generator, kernel, case, op.dtypes[0], device, seed)
                for case in islice(drawing, DRAWING_CASES))


def _reference(op: Op, values: Values) -> Any:
    return op.reference(**values)              # with the generator itself, not a copy


def _drawing(values: Values) -> Values:
    return {**values, **{n: None for n in RANDOM_NUMBERS if n in values}}


def _draw(function: Callable[[Values], Any], values: Values,
          given: bool = True) -> tuple[tuple[Any, ...], bool]:
    """Returns what is drawn from a generator, the caller's or torch's own, and whether that is in
    another state afterwards."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(SEED)
        generator = torch.Generator().manual_seed(SEED) if given else torch.default_generator
        before = generator.get_state()
        results = results_of(function({**values, GENERATOR: generator if given else None}))
        return results, not torch.equal(before, generator.get_state())


def check_generator(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                    seed: int = 0) -> CaseResult:
    """Checks that what is drawn from a generator is drawn from that one: else the next call has
    the same numbers, or nobody can repeat it."""
    op = kernel.op
    values = _drawing(case_values(op, case, dtype, device, seed))

    def result(status: str, detail: str = "", reasons: Any = ()) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail, seed=seed,
                          circumstance="drawing from a generator",
                          kinds=("distribution",) if status == "failed" else ())

    def run(values: Values) -> Any:
        return bind_call(kernel, values)(*(values[p.name] for p in op.params))

    reasons = refusals(kernel, {**values, GENERATOR: torch.Generator()})
    if reasons:
        return result("skipped", reasons=reasons)
    for given in (True, False):
        try:
            want, _ = _draw(partial(_reference, op), values, given)
            got, draws = _draw(run, values, given)
        except FAULTS as e:
            return result("failed", str(reason_of(e, classify(e))))
        if not draws:
            return result("failed", "the generator is as it was: the next call has its numbers")
        if not same(got[0], want[0]):
            return result("failed", "other tokens than the formula draws from "
                                    f"{'this' if given else 'the default'} generator")
    return result("passed")


def after_inference_checks(kernel: Kernel, device: str, lane: str,
                           seed: int) -> Iterator[Callable[[], CaseResult]]:
    op = kernel.op
    if kernel.differentiable and op.differentiable:
        # what is kept by contents or by size is then made in inference mode
        cases = (*((case, seed + NEW_CONTENTS) for case in gradient_cases(op)[:INFERENCE_CASES]),
                 *((case, seed) for case in _new_sizes(op, lane, seed)))
        yield from (partial(check_after_inference, kernel, case, op.dtypes[0], device, at)
                    for case, at in cases)
        # weights of 16 bits may be kept in 32
        yield from (partial(check_after_inference, kernel, case, "bfloat16", device,
                            seed + NEW_CONTENTS)
                    for case in gradient_cases(op)[:1] if "bfloat16" in op.dtypes)


def _new_sizes(op: Op, lane: str, seed: int) -> list[Case]:
    """Returns the cases with fewest and with most tensors, each with one size that no other check
    asks for. Beyond the quick lane every case
    that gives other arguments, with each of its sizes."""
    def tensors(case: Case) -> int:
        return len(case_tensors(op, case, op.dtypes[0]))

    cases = gradient_cases(op)
    found: list[Case] = []
    bases = {"fewest": min(cases, key=tensors), "most": max(cases, key=tensors)}
    if lane != "quick":
        bases |= {str(sorted(given_arguments(op, case_values(op, case, op.dtypes[0])))): case
                  for case in reversed(cases)}
    for i, base in enumerate(bases.values()):
        sized = ({**base, n: base.get(n, d) + NEW_SIZE + 2 * seed + 4 * i}
                 for n, d in numbers_of(op).items()
                 if type(d) is int and type(base.get(n, d)) is int and base.get(n, d) > 0)
        found += list(islice((case for case in sized if is_accepted(op, case, seed=seed)),
                             NEW_SIZES if lane == "quick" else None))
    return found


def check_after_inference(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                          seed: int = 0) -> CaseResult:
    """Records a gradient of the main tensor after a call in inference mode with the same tensors,
    as where a served model trains an adapter: what is kept of that call autograd refuses."""
    op = kernel.op
    name = op.main_tensor if op.main_tensor in op.differentiable else op.differentiable[0]

    def result(status: str, detail: str = "", reasons: Any = ()) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail,
                          circumstance="recording gradients after a call in inference mode",
                          seed=seed, kinds=("mode",) if status == "failed" else ())

    def copies() -> Values:
        return {n: v.clone() if isinstance(v, Tensor) and 0 not in v.stride() else v
                for n, v in case_values(op, case, dtype, device, seed).items()}

    reasons = refusals(kernel, requiring_grad(op, copies(), name))
    if reasons:
        return result("skipped", reasons=reasons)
    try:
        want, values = _gradient(partial(formula, op), op, copies(), name), copies()
    except FAULTS:                             # no matter of an earlier call
        return result("skipped", "has no gradient")
    try:
        with torch.inference_mode():
            call(kernel, values)
        after = _gradient(partial(call, kernel), op, values, name)
    except FAULTS as e:
        return (_failure_without_it(kernel, case, dtype, device, seed, name)
                or result("failed", str(reason_of(e, classify(e)))))
    rtol, atol = (8 * t for t in op.tolerance.of(dtype))
    same = (want is after if want is None or after is None
            else torch.allclose(after, want, rtol=rtol, atol=atol, equal_nan=True))
    # it may be another one within what is allowed
    if same or check_gradients(kernel, case, dtype, device, seed, name).passed:
        return result("passed")
    return (_failure_without_it(kernel, case, dtype, device, seed, name)
            or result("failed", f"another gradient of {name}"))


def _failure_without_it(kernel: Kernel, case: Case, dtype: str, device: str, seed: int,
                        name: str) -> CaseResult | None:
    """Returns how the gradient fails with other new sizes or numbers, where no call was in
    inference mode: then that mode is no matter of it."""
    size = next((n for n in numbers_of(kernel.op) if type(case.get(n)) is int
                 and case[n] > NEW_SIZE), "")
    other = {**case, size: case[size] + 2 * LARGER_SEED} if size else case
    if not is_accepted(kernel.op, other, seed=seed):
        return None
    judged = check_gradients(kernel, other, dtype, device, seed if size else 2 * seed, name)
    return judged if judged.status == "failed" else None


def _gradient(function: Callable[[Values], Any], op: Op, values: Values,
              name: str) -> Tensor | None:
    wanting = requiring_grad(op, values, name)
    with torch.enable_grad():
        used = [r for r in results_of(function(wanting)) if isinstance(r, Tensor)
                and r.requires_grad]
        if not used or not isinstance(wanting[name], Tensor):
            return None
        return torch.autograd.grad(used, [wanting[name]], [torch.ones_like(r) for r in used],
                                   allow_unused=True)[0]
