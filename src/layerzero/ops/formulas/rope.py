"""Rotary positions in plain torch: the rotation, which convention a result follows, and the frequencies.

The pair that turns by one angle is (x[i], x[i + rotary_dim/2]) in "rotate_half" (Llama, NeoX) and
(x[2i], x[2i+1]) in "interleaved" (GPT-J, the paper). Both keep every norm, and weights trained for one are
worthless with the other, so nothing here guesses between them. `detect_style` tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

STYLES = ("rotate_half", "interleaved")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Turn the first 2 * cos.shape[-1] elements of each row of `x`; cos and sin broadcast over the heads."""
    half = cos.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if style == "interleaved":
        first, second = wide[..., 0:2 * half:2], wide[..., 1:2 * half:2]
    else:
        first, second = wide[..., :half], wide[..., half:2 * half]
    turned = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(turned, -1).flatten(-2) if style == "interleaved" else torch.cat(turned, -1)
    return torch.cat((rotated, wide[..., 2 * half:]), -1).to(x.dtype)


def per_token(table: Tensor, position_ids: Tensor | None, layout: str, dtype: torch.dtype) -> Tensor:
    """The rows of `table` that the tokens want, in at least float32, with an axis of one for the heads."""
    rows = table if position_ids is None else torch.nn.functional.embedding(position_ids, table)
    return rows.to(torch.promote_types(dtype, torch.float32)).unsqueeze(-3 if layout == "bhsd" else -2)


def detect_style(
    output: Tensor, q: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *, layout: str = "bhsd",
) -> Literal["rotate_half", "interleaved", "both", "neither"]:
    """Which convention `output` follows as a rotation of `q`. "both" where they agree, as at position 0."""
    cos, sin = (per_token(t, position_ids, layout, q.dtype) for t in (cos, sin))
    scale = max(float(q.abs().max()), 1e-30) if q.numel() else 1.0
    # A few roundings of the output: what two conventions differ by is of the size of q itself.
    close = 4 * torch.finfo(output.dtype).eps * scale
    fits = [s for s in STYLES if not q.numel() or _furthest(output, rotate(q, cos, sin, s)) <= close]
    return "both" if len(fits) == 2 else fits[0] if fits else "neither"  # type: ignore[return-value]


def _furthest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# The angle of pair i at position n is n * frequencies[i]. Same formulas, in the same order and dtype, as the models
# that were trained with them: a last bit here is a visible angle at position 100000.

def frequencies(dim: int, base: float) -> Tensor:
    """The plain ones: base ** -(2i / dim)."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def linear_frequencies(dim: int, base: float, factor: float) -> Tensor:
    """Position interpolation: all angles shrink alike."""
    return frequencies(dim, base) / factor


def ntk_frequencies(dim: int, base: float, factor: float) -> Tensor:
    """NTK-aware: a larger base, so that the slowest pair turns `factor` times slower and the fastest as before."""
    return frequencies(dim, base * factor ** (dim / (dim - 2)))


def dynamic_ntk_frequencies(dim: int, base: float, factor: float, original: int, seq_len: int) -> Tensor:
    """NTK-aware with the factor that `seq_len` needs; plain up to the original length."""
    seq_len = max(seq_len, original)
    return ntk_frequencies(dim, base, (factor * seq_len / original) - (factor - 1))


def yarn_frequencies(dim: int, base: float, factor: float, original: int, beta_fast: float, beta_slow: float,
                     truncate: bool) -> Tensor:
    """YaRN: pairs that turn often in the original length stay, those that hardly turn are interpolated."""
    def pair_that_turns(times: float) -> float:
        return (dim * math.log(original / (times * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001                          # the ramp becomes a step
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = base ** (torch.arange(0, dim, 2).to(torch.float32) / dim)
    stay = 1 - ramp
    return 1.0 / (factor * powers) * (1 - stay) + 1.0 / powers * stay


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What YaRN multiplies cos and sin by, so that the softmax stays as sharp as it was."""
    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)


def llama3_frequencies(dim: int, base: float, factor: float, original: int, low_freq_factor: float,
                       high_freq_factor: float) -> Tensor:
    """Llama 3: long waves are interpolated, short ones stay, those between are blended."""
    plain = frequencies(dim, base)
    wavelength = 2 * math.pi / plain
    is_long, is_short = wavelength > original / low_freq_factor, wavelength < original / high_freq_factor
    scaled = torch.where(is_long, plain / factor, plain)
    blend = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return torch.where(is_long | is_short, scaled, (1 - blend) * scaled / factor + blend * scaled)


def longrope_frequencies(dim: int, base: float, factors: Sequence[float]) -> Tensor:
    """LongRoPE: a factor of its own for every pair."""
    powers = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * base ** powers)


def longrope_attention_factor(factor: float, original: int) -> float:
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))


def proportional_frequencies(head_dim: int, base: float, factor: float, proportion: float) -> Tensor:
    """The first `proportion` of the pairs of a whole head turn, the others stand still."""
    turning = int(proportion * head_dim // 2)
    turns = 1.0 / (base ** (torch.arange(0, 2 * turning, 2, dtype=torch.int64).to(torch.float32) / head_dim))
    return torch.cat((turns, torch.zeros(head_dim // 2 - turning))) / factor


def xpos_decay(dim: int, positions: Tensor, scale_base: float) -> Tensor:
    """XPos: what a query at each position is multiplied by, and a key divided by; one column for each pair.

    Positions count from their middle, which cancels in every product of query and key and keeps the numbers small.
    """
    per_step = (torch.arange(0, dim, 2, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
    power = (positions - len(positions) // 2) / scale_base
    return per_step ** power[:, None]
