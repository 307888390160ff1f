"""Output gradients as losses give them: of random numbers, of a sum, of a loss that leaves rows out
or uses one of them, or one of two results, of an average over many, scaled for float16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LEFT_OUT, ONE_ROW, SPREAD, REPEATED = ("a loss without half of the rows", "a loss of the last row",
                                       "a sum over columns", "a sum over the batch")
SMALL_LOSS, LARGE_LOSS = "a loss times 2^-40", "a loss times 2^20"
HALF_LOSSES = "a loss times 2^8", "a loss times 2^12"  # as float16 is trained, and has room for
# A power of two, which changes no digit: the gradients are as many times those of 1.
SCALES: Mapping[str, float] = {SMALL_LOSS: 2.0 ** -40, LARGE_LOSS: 2.0 ** 20,
                               HALF_LOSSES[0]: 2.0 ** 8, HALF_LOSSES[1]: 2.0 ** 12}
KINDS = (LEFT_OUT, ONE_ROW, SPREAD, REPEATED, SMALL_LOSS, LARGE_LOSS)


def draw_output_grads(results: Sequence[Tensor], summed: bool,
                      of: str = "") -> list[Tensor | None]:
    """Returns random output gradients, the same for every kernel; those of a sum are expanded.
    `of`: one of KINDS. Those of SCALES are multiplied by whoever passes them on."""
    if summed:
        return [torch.full((), 0.75).to(r).expand(r.shape) if r.is_floating_point() else None
                for r in results]
    # no case uses it: a gradient parallel to the input may vanish
    gen = torch.Generator().manual_seed(987654321)
    drawn = [torch.randn(r.shape, generator=gen).to(r) if r.is_floating_point() else None
             for r in results]
    return drawn if not of or of in SCALES else [
        g if g is None or not g.numel() or not g.dim() else _of_kind(g, of) for g in drawn]


def _of_kind(grad: Tensor, of: str) -> Tensor:
    if of in (SPREAD, REPEATED):               # few digits: roundings of equal numbers add up
        first = grad[..., :1] if of == SPREAD else grad[:1]
        return ((first * 8).round() / 8).expand(grad.shape)
    # a loss of one number for each row has its rows in the last dimension
    rows = grad.reshape(-1, grad.shape[-1] if grad.dim() > 1 else 1)
    left_out = torch.arange(len(rows), device=grad.device)
    left_out = left_out < len(rows) - 1 if of == ONE_ROW else left_out % 4 < 2
    return rows.masked_fill(left_out[:, None], 0.0).view(grad.shape)


def with_earlier_grads(values: dict[str, Any]) -> dict[str, Any]:
    """Gives every leaf a gradient, as one has that was added up before: it is the caller's."""
    for t in values.values():
        if isinstance(t, Tensor) and t.requires_grad and t.is_leaf:
            t.grad = torch.full_like(t.detach(), 0.5)
    return values
