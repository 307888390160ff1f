"""Explains codes and indices that are wrong: by numbers that lie on the boundary between two, or a
rounding beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ..kernel.contract import CaseResult, call, case_values, formula, results_of, upcast
from .reruns import are_close, sample_failures

ON_THE_BOUNDARY, A_ROUNDING = 2.0 ** -40, 2.0 ** -21   # how far numbers are moved, of their size


def explain_by_boundaries(kernel: Kernel, failed: Sequence[CaseResult],
                          device: str) -> tuple[str, str] | None:
    """Explains calls whose wrong codes are those of numbers next to the given ones in float64, or
    within a rounding of float32, though all other results are right."""
    sample = sample_failures([r for r in failed if not r.circumstance], 3)
    kinds = [_kind(kernel, r, device) for r in sample]
    for kind, text in (("ties", "wrong where a number lies on the boundary between two codes or "
                                "two numbers are equal, and nowhere else"),
                       ("precision", "its codes are those of numbers a rounding away")):
        # the rest may be equal only after a rounding
        if kinds and kinds.count(kind) * 3 >= len(kinds) * 2 \
                and all(k in (kind, "codes alone") for k in kinds):
            return kind, f"{text}: {failed[0].detail}"
    return None


def _kind(kernel: Kernel, r: CaseResult, device: str) -> str:
    op, values = kernel.op, case_values(kernel.op, r.case, r.dtype, device, r.seed)
    main = values.get(op.main_tensor)
    if (not isinstance(main, Tensor) or not main.is_floating_point() or main.dtype.itemsize == 1
            or not main.dim() or not main.numel()):
        return ""
    try:
        with torch.no_grad():
            got, want = results_of(call(kernel, values)), formula(op, upcast(values))
            codes = [i for i, t in enumerate(want) if isinstance(t, Tensor) and _is_code(got[i])]
            others = [i for i in range(len(want)) if i not in codes]
            if (not codes or any(got[i].shape != want[i].shape for i in codes)
                    or not are_close(op, r.dtype, [got[i] for i in others],
                                     [want[i] for i in others])):
                return ""
            for size, kind in ((ON_THE_BOUNDARY, "ties"), (A_ROUNDING, "precision")):
                near = [formula(op, {**upcast(values), op.main_tensor: x})
                        for x in _moved(main.double(), size)]
                if all(_is_one_of(got[i], [want[i], *(n[i] for n in near)]) for i in codes):
                    return kind
    except FAULTS:
        return ""
    return "codes alone"


def _is_code(t: Any) -> bool:
    return isinstance(t, Tensor) and (not t.is_floating_point() or t.dtype.itemsize == 1)


def _moved(x: Tensor, size: float) -> Iterator[Tensor]:
    """Yields the numbers moved by so little: away from zero, towards it, up and down with the place
    in the row, and at random."""
    place = torch.linspace(0.5, 1, x.shape[-1], device=x.device, dtype=x.dtype)
    unit = x.abs().clamp(min=1e-3)
    draw = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, (6, *x.shape), generator=draw) * 2 - 1).to(x)
    yield from (x + sign * size * unit * place for sign in (1.0, -1.0))
    yield from (x + sign * size * x for sign in (1.0, -1.0))
    yield from (x + sign * size * unit for sign in signs)


def _is_one_of(got: Tensor, others: Sequence[Tensor]) -> bool:
    """Is each number that of one of these results? Of all near ones some differ."""
    stacked = torch.stack([t.double() for t in others])
    return bool((stacked == got.double()).any(0).all())
