"""Which cases of a kernel a check is run on: those with most tensors, the largest, the smallest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...spec.op import Op
from ..kernel.case_sizes import numbers_of
from ..kernel.contract import case_outline, case_tensors, results_of

Cell = tuple[Mapping[str, Any], str]           # a case and a dtype


def most_tensors_first(op: Op, cells: Iterator[Cell],
                       device: str, seed: int) -> list[tuple[frozenset[tuple[str, str]], Cell]]:
    """Ranks up to 48 cells by their number of tensors, those of the op's own cases first, then by
    size, with the names, dtypes and ranks of those. After them come special numbers, of which many
    are alike; last come cells whose main tensor has a dimension of one or short rows, or with a
    tensor of one element. Strided or empty ones are left out."""
    ranked: list[tuple[bool, bool, int, bool, int, int, frozenset[tuple[str, str]], Cell]] = []
    for cell in cells:
        tensors = case_tensors(op, cell[0], cell[1], device, seed)
        if "stride" not in cell[0] and all(t.numel() for t in tensors.values()):
            main = tensors.get(op.main_tensor, next(iter(tensors.values()), None))
            flat = (main is None or (min(main.shape) < 2 or main.shape[-1] < 16  # no vectors
                                     if main.dim() > 1 else
                                     main.numel() < 2 or _has_few_results(op, cell, seed)))
            flat = flat or any(t.dim() and t.numel() < 2 for t in tensors.values())
            ranked.append((flat, "special" in cell[0], -len(tensors), cell[0] not in op.cases,
                           sum(t.numel() for t in tensors.values()), len(ranked), frozenset(
                               (n, f"{t.dtype} {t.dim()}") for n, t in tensors.items()), cell))
        if len(ranked) == 48:
            break
    return [(names, cell) for *_, names, cell in sorted(ranked, key=lambda row: row[:6])]


def with_a_size_of_one(op: Op, cells: Sequence[Cell], seed: int) -> list[Cell]:
    """Returns for each size a cell in which it is one, as the tokens of a step of decoding are: it
    often has a path of its own."""
    chosen: list[Cell] = []
    for name, default in numbers_of(op).items():
        one = 1 if type(default) is int else (*default[:-1], 1)
        having = [c for c in cells if default != one and c[0].get(name) in (1, (1,), one)]
        chosen += [c for c in having[seed % max(len(having), 1):][:1] if c not in chosen]
    return chosen


def _has_few_results(op: Op, cell: Cell, seed: int) -> bool:
    results = results_of(op.meta(**case_outline(op, *cell, seed=seed)))
    return sum(t.numel() for t in results if isinstance(t, Tensor)) < 32


def largest(op: Op, cases: Sequence[Mapping[str, Any]], dtype: str,
            device: str, seed: int, by_rows: bool = True) -> Mapping[str, Any]:
    """Returns the case with the most rows that is not large, or with the most numbers."""
    def rows(case: Mapping[str, Any]) -> int:
        main = case_tensors(op, case, dtype, device, seed).get(op.main_tensor)
        if main is None or not main.numel() or main.numel() > 1 << 16:
            return 0
        return main.numel() // (main.shape[-1] if main.dim() and by_rows else 1)

    return max(cases, key=rows)


def smallest(op: Op, cells: Sequence[Cell], device: str, seed: int) -> Cell:
    """Returns the smallest cell with more than a few elements of its main tensor."""
    def size(cell: Cell) -> int:
        tensors = case_tensors(op, cell[0], cell[1], device, seed)
        elements = sum(t.numel() for t in tensors.values())
        return elements if tensors[op.main_tensor].numel() > 1 else 1 << 40

    return min(cells, key=size)
