"""How far the exact result moves when the inputs are rounded once: what no kernel can be blamed
for.

The error of the eager formula is one draw among many. Where the formula is badly conditioned, as a
softmax over scores of which one is very large, that draw may be lucky: another order of the same
sum is then far outside without being wrong. The formula itself, in float64, tells how much one
rounding of float32 in each input matters, and a kernel may be off by a few of those. Where the
call is in 16 bits a kernel may round intermediate values to them, as the eager formula does: one
element may be off by what one such rounding moves it, however lucky the eager one is there.

Two things in float32 a rounding of the inputs does not show. Where a formula rounds to codes first,
nothing moves, though a sum of large products that cancel is only as exact as the products are: the
same call with other signs tells how large it is where they do not cancel. And a sum of n terms one
after another is off by the roundings of its n partial sums, sqrt(n) times those of the terms, and
the worst of many elements by more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.op import Op

DRAWS, SIGN_DRAWS = 6, 3                       # of signs
ROUNDINGS = 4.0                                # how many are allowed: by judging.py
WORST = 1.25                                   # of many sums, over what is typical of one
UNITS = {"float32": 2.0 ** -24, "float16": 2.0 ** -11, "bfloat16": 2.0 ** -8}


Compute = Callable[[Mapping[str, Any]], tuple[Any, ...]]


def rounding_budget(compute: Compute, values: Mapping[str, Any], wide: Mapping[str, Any],
                    exact: tuple[Any, ...], dtype: str = "float32",
                    op: Op | None = None) -> list[Tensor | None]:
    """Returns for each result how far a rounding of every input to the dtype moves each of its
    elements, at most over a few draws; None where that says nothing. `wide`: the values in
    float64. `op`: where `compute` is its formula, for what sums add in float32."""
    names = [n for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()
             and v.dtype.itemsize in (2, 4)]
    moved: list[Tensor | None] = [None] * len(exact)

    def add(changed: Mapping[str, Any], size_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        try:
            results = compute({**wide, **changed})
        except FAULTS:                         # the formula refuses such values
            return
        for i, (after, before) in enumerate(zip(results, exact)):
            if isinstance(after, Tensor) and after.is_floating_point() \
                    and after.shape == before.shape:
                size = size_of(after.double(), before.double()).nan_to_num(nan=0.0, posinf=0.0)
                last = moved[i]
                moved[i] = size if last is None else torch.maximum(last, size)

    for draw in range(DRAWS if names else 0):
        # in pairs of opposites: one is towards the cliff
        unit = UNITS[dtype] * (1 if draw % 2 else -1)
        gen = torch.Generator().manual_seed(draw // 2)
        add({n: wide[n] * (1 + unit * _signs(wide[n], gen)) for n in names},
            lambda after, before: (after - before).abs())
    if op is not None and dtype == "float32" and op.main_tensor in names:
        for draw in range(SIGN_DRAWS):
            main = wide[op.main_tensor]
            gen = torch.Generator().manual_seed(draw)
            add({op.main_tensor: main * _signs(main, gen)}, _uncancelled)
        moved = [t if t is None else t * max(1.0, roundings_of(op, terms) / ROUNDINGS)
                 for t, terms in zip(moved, terms_of(op, values, len(moved)))]
    return moved


def roundings_of(op: Op, terms: int) -> float:
    """Returns how many roundings a sum of so many terms may be off by."""
    return float(terms) if op.tolerance.chained else WORST * math.sqrt(terms)


def _signs(t: Tensor, gen: torch.Generator) -> Tensor:
    return (torch.randint(0, 2, t.shape, generator=gen) * 2 - 1).to(t.device)


def _uncancelled(after: Tensor, before: Tensor) -> Tensor:
    """Returns a rounding of what the elements are with other signs, none larger than the largest is
    as it is."""
    finite = before[before.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return UNITS["float32"] * after.abs().clamp(max=largest)


def terms_of(op: Op, values: Mapping[str, Any], count: int) -> list[int]:
    """Returns for each of `count` results the largest size that inputs have and it does not: what
    is summed over."""
    variant = values[op.variant] if op.variant else ""
    patterns = op.result_patterns[variant][:count]
    sizes = {token: t.shape[i - len(tokens)] for name, tokens in op.patterns[variant].items()
             if isinstance(t := values.get(name), Tensor) and t.dim() >= len(tokens)
             for i, token in enumerate(tokens)
             if not token.startswith(("*", "~")) and not any(k.startswith("*") for k in tokens[i:])}
    return [max((size for token, size in sizes.items()
                 if token not in {t.lstrip("*~") for t in tokens}), default=1)
            for tokens in patterns] + [1] * (count - len(patterns))
