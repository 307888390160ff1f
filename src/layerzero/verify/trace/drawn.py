"""Numbers of one kind of input: the angles of a rope, probabilities with an edge."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Shares of the likeliest tokens of a row, and a top_p just beyond three of them: a filter that
# takes it for less loses the fourth, which comes often.
PEAKS, ROW, NUCLEUS = (0.3, 0.2, 0.15, 0.1, 0.08, 0.05), 2, 0.6565


def angles(name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the cosines or sines of positions, or both side by side."""
    half = shape[-1] // 2 if "cos_sin" in name else shape[-1]
    speeds = 1e4 ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
    turned = (torch.arange(math.prod(shape[:-1]), dtype=torch.float64)[:, None] * speeds).float()
    parts = (turned.cos(), turned.sin()) if "cos_sin" in name else \
        (turned.cos() if "cos" in name else turned.sin(),)
    return torch.cat(parts, -1).view(shape)


def with_peaks(probs: Tensor) -> Tensor:
    """Returns probabilities of which one row has a few likely tokens: its likeliest ones."""
    if probs.dim() != 2 or len(probs) <= ROW or probs.shape[1] <= 4 * len(PEAKS):
        return probs
    row, top = probs[ROW], probs[ROW].topk(len(PEAKS)).indices
    row = row.index_fill(0, top, 0.0)
    row = row / row.sum() * (1.0 - sum(PEAKS))
    row[top] = torch.tensor(PEAKS, dtype=row.dtype)
    return torch.cat((probs[:ROW], row[None], probs[ROW + 1:]))
