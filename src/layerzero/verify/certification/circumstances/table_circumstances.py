"""Tables of which a call reads the rows that its indices name, such as embeddings and the pages of
a cache: contiguous ones of more than 2^32 elements, so that an offset in 32 bits reads other rows.

Which tensors are tables of which indices is found by asking the formula: its result stays the same
where rows are put before those of a table and the indices are raised by their number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....machine import loading
from ....machine.faults import FAULTS, classify, reason_of
from ....spec.kernel import Kernel
from ....spec.op import Op
from ....spec.reason import Code
from ...cases.chosen_cells import Cell
from ...cases.generated import Case, given_arguments, if_allowed
from ...kernel.contract import (
    CaseResult,
    call,
    case_contents,
    case_outline,
    case_refusals,
    case_values,
    case_values_to_read,
    eager_results,
    exact_results,
    refusals,
    results_of,
)
from ...kernel.guarded import address_space, bounded_memory
from ...kernel.judging import judge_result, same
from ...kernel.shared import fingerprint

NAME = "with tables of more than 2^31 elements"
# Elements of tables that tell what a call reads, and of one that 32 bits do not count: a wrong
# offset without a sign is in the table again.
PROBES, LONG = (1 << 18, 1 << 24), 1 << 32
WHOLE_S = 0.001                                # of CPU time: a call as much longer reads all of it
MOST = 4                                       # calls of a kernel
FOR_RESULTS = 1 << 31                          # bytes that a call may take: no copy of a table


class Table(NamedTuple):
    """Tensors with the same rows, and the integers that name them: all, or one column of them."""

    tensors: tuple[str, ...]
    indices: str
    column: int | None


def tables_in(op: Op, case: Case, dtype: str, seed: int = 0) -> Table | None:
    """Returns the tables of a case; None where it has none."""
    values = case_values_to_read(op, case, dtype, seed=seed)
    shapes = {n: t.dim() for n, t in values.items() if isinstance(t, Tensor)}
    key = tuple(sorted(shapes.items())), values[op.variant] if op.variant else ""
    return _tables_like(op, key, _Hidden((case, dtype, seed)))


class _Hidden(tuple[Any, ...]):
    """The call with which the question is asked, which any other of its ranks may stand for."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=512)
def _tables_like(op: Op, key: Any, asked: _Hidden) -> Table | None:
    values = case_values_to_read(op, asked[0], asked[1], seed=asked[2])
    by_rows: dict[str, list[str]] = {}
    for name, tokens in op.patterns[key[1]].items():
        t = values[name]
        if isinstance(t, Tensor) and t.numel():
            by_rows.setdefault(_first_size(tokens, t.dim()), []).append(name)
    indices = [n for n, t in values.items() if isinstance(t, Tensor) and t.numel()
               and t.dtype in (torch.int32, torch.int64)]
    in_results = {size for sizes in op.result_patterns[key[1]] for size in sizes}
    for size, names in by_rows.items():
        if (not size or size in in_results or set(names) & set(indices)
                or min(values[n].dim() for n in names) < 2):
            continue
        for index in indices:
            t = values[index]
            for column in (None, *(range(t.shape[-1]) if t.dim() > 1 and t.shape[-1] <= 8 else ())):
                table = Table(tuple(names), index, column)
                if _follows(op, values, table):
                    return table
    return None


def _first_size(tokens: Sequence[str], rank: int) -> str:
    """Returns the name of the first size of a tensor; nothing where it has any number of them."""
    named = tokens[1:] if tokens and tokens[0].startswith("*") and rank < len(tokens) else tokens
    return "" if not named or named[0][0] in "*~" or len(named) != rank else named[0]


def _follows(op: Op, values: Mapping[str, Any], table: Table) -> bool:
    """Has the formula the same results where the rows and the indices are moved alike?"""
    return _keeps_results(op, values, table, _moved(values, table, 3, torch.zeros_like, 1))


def _keeps_results(op: Op, values: Mapping[str, Any], table: Table,
                   moved: dict[str, Any]) -> bool:
    other = if_allowed(op, moved)
    if other is None:
        return False
    with torch.no_grad():
        before, after = (eager_results(op, v, fingerprint(v)) for v in (values, other))
    return len(before) == len(after) and all(map(same, before, after))


def _moved(values: Mapping[str, Any], table: Table, rows: int,
           first: Callable[[Tensor], Tensor], every: int) -> dict[str, Any]:
    """Returns the call with so many rows of zeros before those of its tables, and before them what
    `first` makes of the table."""
    moved = {}
    for name in table.tensors:
        t = values[name].contiguous()
        codes = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        moved[name] = torch.cat((first(codes), codes.new_zeros((rows, *codes.shape[1:])),
                                 codes)).view(t.dtype)
    return {**values, **moved, table.indices: _raised(
        values[table.indices], table, rows + len(values[table.tensors[0]]), every)}


def _raised(indices: Tensor, table: Table, rows: int, every: int) -> Tensor:
    """Returns the indices with the first and every so many after it raised; what is negative names
    no row."""
    raised = indices.clone(memory_format=torch.contiguous_format)
    chosen = raised if table.column is None else raised[..., table.column]
    turn = torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape) % every == 0
    chosen += torch.where(turn & (chosen >= 0), rows, 0).to(chosen.dtype)
    return raised


def _lengthened(values: Mapping[str, Any], table: Table, elements: int,
                every: int) -> dict[str, Any] | None:
    """Returns the call with tables of at least so many elements, of which only the first and the
    last rows exist, and every so many of its indices naming one of the last; None where there is
    no memory for them."""
    first = values[table.tensors[0]]
    rows = 2 * first.shape[0] + 2 + max(
        elements // (values[n].numel() // values[n].shape[0]) for n in table.tensors)
    if rows > torch.iinfo(values[table.indices].dtype).max:
        return None
    longer: dict[str, Tensor] = {}
    for name in table.tensors:
        t = values[name]
        memory = _table(t, rows)
        if memory is None:
            return None
        if every > 1:
            memory[:len(t)].copy_(t)
        memory[-len(t):].copy_(t)
        longer[name] = memory
    return {**values, **longer, table.indices: _raised(
        values[table.indices], table, rows - len(first), every)}


def _table(like: Tensor, rows: int) -> Tensor | None:
    """Returns a contiguous table of so many rows of zeros."""
    memory = address_space(rows * like[0].numel(), like)
    return None if memory is None else memory.view(rows, *like.shape[1:])


def check_long_table(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                     seed: int = 0) -> CaseResult:
    """Compares a call whose tables are longer than 32 bits count with the same of short ones. What
    reads the whole table, as one that casts it does, is not asked."""
    op = kernel.op

    def result(status: str, kind: str = "", detail: str = "", reasons: Any = ()) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail,
                          circumstance=NAME, seed=seed, kinds=(kind,) if kind else ())

    plain, table = case_values(op, case, dtype, device, seed), tables_in(op, case, dtype, seed)
    if table is None or device != "cpu":
        return result("skipped")
    # where rows that are equal are not counted alike, as of an expert with a capacity, all move
    both_ends = _keeps_results(op, plain, table, _moved(plain, table, 3, torch.clone, 2))
    for elements in (*PROBES, LONG):
        values = _lengthened(plain, table, elements, 2 if both_ends else 1)
        reasons = () if values is None else refusals(kernel, values)
        if values is None or reasons:
            return result("skipped", detail="there is no such table", reasons=reasons)
        try:
            with torch.no_grad(), bounded_memory(FOR_RESULTS):
                if elements < LONG:
                    if _reads_all(kernel, plain, values):
                        return result("skipped", detail="it reads the whole table")
                    continue
                got = results_of(call(kernel, values))
        except loading.LoadFailed as e:
            return result("skipped", reasons=(e.reason,))
        except FAULTS as e:
            failure = reason_of(e, classify(e))
            if failure.code is Code.KERNEL_FAILED:
                return result("failed", "fault", str(failure))
            return result("skipped", reasons=(failure,))       # it has no memory for it
    key = case_contents(case, dtype, device, seed)
    with torch.no_grad():
        exact, eager = exact_results(op, plain, key), eager_results(op, plain, key)
    complaints = [c for i, parts in enumerate(zip(got, got, exact, eager))
                  for c in judge_result(op, dtype, f"result {i}", *parts).complaints]
    return result("failed" if complaints else "passed", complaints[0].kind if complaints else "",
                  "; ".join(c.text for c in complaints))


def _reads_all(kernel: Kernel, short: Mapping[str, Any], longer: Mapping[str, Any]) -> bool:
    """Takes a call longer with a longer table?"""
    def seconds(values: Mapping[str, Any]) -> float:
        began = time.process_time()
        call(kernel, values)
        return time.process_time() - began

    call(kernel, short)
    most = min(seconds(short) for _ in range(2)) + WHOLE_S
    if (first := seconds(longer)) <= most:
        return False
    again = 1 if first > 20 * most else 4      # another program may have had the caches
    return min(seconds(longer) for _ in range(again)) > most


def long_table_checks(kernel: Kernel, cells: Sequence[Cell], device: str,
                      seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields a few calls with long tables, each with other dtypes, or with most of the arguments
    that the others do not give."""
    op, seen = kernel.op, set[Any]()
    ranked: list[tuple[frozenset[Any], Cell]] = []
    for cell in cells:
        table = None if "stride" in cell[0] else tables_in(op, *cell, seed)
        if table is not None and not case_refusals(kernel, *cell, device, seed):
            values = case_outline(op, *cell, device, seed)
            traits = {*given_arguments(op, values), values[op.variant] if op.variant else ""}
            traits |= {(n, str(values[n].dtype)) for n in (*table.tensors, table.indices)}
            ranked.append((frozenset(traits), cell))
    for _ in range(min(MOST, len(ranked))):
        best, cell = max(ranked, key=lambda row: len(row[0] - seen))
        if not best - seen:
            return
        seen |= best
        yield partial(check_long_table, kernel, *cell, device, seed)
