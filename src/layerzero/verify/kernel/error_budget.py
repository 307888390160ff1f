"""How far the exact result moves when the inputs are rounded once: what no kernel can be blamed
for.

The error of the eager formula is one draw among many. Where the formula is badly conditioned, as a
softmax over scores of which one is very large, that draw may be lucky: another order of the same
sum is then far outside without being wrong. The formula itself, in float64, tells how much one
rounding of float32 in each input matters, and a kernel may be off by a few of those. Where the
call is in 16 bits a kernel may round intermediate values to them, as the eager formula does: one
element may be off by what one such rounding moves it, however lucky the eager one is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS

DRAWS = 6                                      # of signs
UNITS = {"float32": 2.0 ** -24, "float16": 2.0 ** -11, "bfloat16": 2.0 ** -8}


def rounding_budget(compute: Callable[[Mapping[str, Any]], tuple[Any, ...]],
                    values: Mapping[str, Any], wide: Mapping[str, Any],
                    exact: tuple[Any, ...], dtype: str = "float32") -> list[Tensor | None]:
    """Returns for each result how far a rounding of every input to the dtype moves each of its
    elements, at most over a few draws; None where that says nothing. `wide`: the values in
    float64."""
    names = [n for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()
             and v.dtype.itemsize in (2, 4)]
    moved: list[Tensor | None] = [None] * len(exact)
    for draw in range(DRAWS if names else 0):
        gen = torch.Generator().manual_seed(draw // 2)
        # in pairs of opposites: one is towards the cliff
        unit = UNITS[dtype] * (1 if draw % 2 else -1)
        rounded = {n: wide[n] * (1 + unit * (torch.randint(
            0, 2, wide[n].shape, generator=gen) * 2 - 1).to(wide[n].device)) for n in names}
        try:
            results = compute({**wide, **rounded})
        except FAULTS:                         # the formula refuses rounded values
            continue
        for i, (after, before) in enumerate(zip(results, exact)):
            if not isinstance(after, Tensor) or not after.is_floating_point() \
                    or after.shape != before.shape:
                continue
            gap = (after.double() - before.double()).abs().nan_to_num(nan=0.0, posinf=0.0)
            last = moved[i]
            moved[i] = gap if last is None else torch.maximum(last, gap)
    return moved
