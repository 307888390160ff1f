"""Explains codes and indices that are wrong: by numbers that lie on the boundary between two, or a
rounding beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ...kernel.contract import CaseResult, call, case_values, formula, results_of, upcast
from .calls_again import are_close, sample_failures, values_of

A_ROUNDING, A_LITTLE = 2.0 ** -21, 2.0 ** -10  # how far numbers are moved, of their size
MANY_CODES = 6                                 # that hardly err to one side by chance


def explain_by_boundaries(kernel: Kernel, failed: Sequence[CaseResult],
                          device: str) -> tuple[str, str] | None:
    """Explains calls of which nothing but codes is wrong: right with all numbers moved a little and
    wrong in the same places with multiples of them, or with the codes of numbers within a rounding.
    """
    sample = sample_failures([r for r in failed if not r.circumstance] or failed, 3)
    kinds = [_kind(kernel, r, device) for r in sample]
    for kind, text in (("ties", "wrong where two numbers are equal, and nowhere else"),
                       # a way to round, or too few digits
                       ("unknown", "its codes are those of numbers a rounding away, all of them "
                                   "to the same side"),
                       ("precision", "its codes are those of numbers a rounding away")):
        # the rest may be equal only after a rounding
        if kinds and kinds.count(kind) * 3 >= len(kinds) * 2 \
                and all(k in (kind, "codes alone") for k in kinds):
            return kind, f"{text}: {failed[0].detail}"
    return None


def _kind(kernel: Kernel, r: CaseResult, device: str) -> str:
    op, values = kernel.op, values_of(kernel, r, device)
    main = values.get(op.main_tensor) if values else None
    if (values is None or not isinstance(main, Tensor) or not main.is_floating_point()
            or main.dtype.itemsize == 1 or not main.dim() or not main.numel()):
        return ""
    try:
        with torch.no_grad():
            got, want = results_of(call(kernel, values)), formula(op, upcast(values))
            codes = [i for i, t in enumerate(want) if isinstance(t, Tensor) and _is_code(got[i])]
            others = [i for i in range(len(want)) if i not in codes]
            # the numbers of another token that is drawn are its own
            alone = are_close(op, r.dtype, [got[i] for i in others], [want[i] for i in others])
            if (not codes or any(got[i].shape != want[i].shape for i in codes)
                    or not (alone or op.family == "sampling")):
                return ""
            if all(torch.equal(got[i].double(), want[i].double()) for i in codes):
                return ""                      # what is wrong is no code
            # of equal numbers one has an index; what lies between two codes is rounded to one
            if (all(want[i].dtype.itemsize > 1 for i in codes)
                    and (_is_by_ties(kernel, values, codes)
                         or _is_by_ties(kernel, _in_float32(values), codes))):
                return "ties"
            if not alone:
                return ""
            near = [formula(op, {**upcast(values), op.main_tensor: x})
                    for x in _moved(main.double(), A_ROUNDING)]
            if all(_is_one_of(got[i], [want[i], *(n[i] for n in near)]) for i in codes):
                return "unknown" if _are_to_one_side(kernel, r, codes, device) else "precision"
    except FAULTS:
        return ""
    return "codes alone"


def _are_to_one_side(kernel: Kernel, r: CaseResult, codes: Sequence[int], device: str) -> bool:
    """Are the integers that are wrong, with several draws of numbers, all further from zero than
    the formula's, or all nearer, above or below? Roundings of a scale go either way."""
    sides: list[set[float]] = [set(), set()]   # of the number line, and from zero
    count = 0
    for by in range(0, 24):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed + by)
        with torch.no_grad():
            got, want = results_of(call(kernel, values)), formula(kernel.op, upcast(values))
        for i in codes:
            if want[i].dtype not in (torch.int8, torch.uint8) or got[i].shape != want[i].shape:
                return False
            away = (got[i].double() - want[i].double())
            wrong = away != 0
            count += int(wrong.sum())
            sides[0] |= set(away[wrong].sign().tolist())
            sides[1] |= set((away * (got[i].double() + want[i].double()))[wrong].sign().tolist())
    return count >= MANY_CODES and any(len(side) == 1 for side in sides)


def _is_by_ties(kernel: Kernel, values: dict[str, Any], codes: Sequence[int]) -> bool:
    """Is it right with every number moved a little, and wrong in the same places with multiples of
    all, which are as equal? A rounding goes another way there."""
    name, main = kernel.op.main_tensor, values[kernel.op.main_tensor]
    little = max(A_LITTLE, 4 * torch.finfo(main.dtype).eps)

    def wrong(x: Tensor) -> list[Tensor]:
        call_values = {**values, name: x.to(main.dtype)}
        got, want = results_of(call(kernel, call_values)), formula(kernel.op, upcast(call_values))
        return [got[i].double() != want[i].double() for i in codes]

    here = wrong(main)
    if (not any(bool(t.any()) for t in here)
            or any(bool(t.any()) for x in _apart(main.double(), little) for t in wrong(x))):
        return False
    with_multiples = [t for factor in (2.0, 3.0, 0.75) for t in wrong(main.double() * factor)]
    if kernel.op.family == "sampling":         # others are drawn of sharper or flatter ones
        return any(bool(t.any()) for t in with_multiples)
    return all(map(torch.equal, here * 3, with_multiples))


def _in_float32(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the same numbers with room between them: of 16 bits, some of many are equal again
    after they are moved."""
    return {n: v.float() if isinstance(v, Tensor) and v.dtype in (torch.float16, torch.bfloat16)
            else v for n, v in values.items()}


def _is_code(t: Any) -> bool:
    return isinstance(t, Tensor) and (not t.is_floating_point() or t.dtype.itemsize == 1)


def _apart(x: Tensor, size: float) -> Iterator[Tensor]:
    """Yields the numbers moved by a little, so that none are equal."""
    draw = torch.Generator().manual_seed(0)
    place = torch.linspace(1, 4, x.shape[-1], device=x.device, dtype=x.dtype)
    noise = torch.rand((4, *x.shape), generator=draw, dtype=x.dtype).to(x.device)
    largest = x.abs().nan_to_num(posinf=0.0).amax(-1, keepdim=True)
    unit = torch.where(largest > 0, largest, 1.0)
    yield from (x + size * unit * by for by in (place, -place, *noise, *-noise))


def _moved(x: Tensor, size: float) -> Iterator[Tensor]:
    """Yields the numbers moved by so little: away from zero and towards it, but for the largest of
    a row, which makes its scale, and at random."""
    unit = x.abs()
    smaller = (unit < unit.amax(-1, keepdim=True)).to(x)
    draw = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, (12, *x.shape), generator=draw) * 2 - 1).to(x)
    yield from (x + size * x * by for by in (smaller, -smaller))
    yield from (x + size * unit.clamp(min=1e-3) * by for by in signs)


def _is_one_of(got: Tensor, others: Sequence[Tensor]) -> bool:
    """Is each number that of one of these results? Of all near ones some differ."""
    stacked = torch.stack([t.double() for t in others])
    return bool((stacked == got.double()).any(0).all())
