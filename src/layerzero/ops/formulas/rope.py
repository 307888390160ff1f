"""Rotary positions in plain torch: the rotation, and the frequencies.

The pair that is rotated by one angle is (x[i], x[i + rotary_dim/2]) in "rotate_half" (Llama, NeoX)
and (x[2i], x[2i+1]) in "interleaved" (GPT-J, the paper). Both preserve norms, and weights trained
for one are useless with the other, so nothing here guesses between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

STYLES = ("rotate_half", "interleaved")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotates the first 2 * cos.shape[-1] elements of rows; cos and sin broadcast over heads."""
    half = cos.shape[-1]
    upcast = x.to(torch.promote_types(x.dtype, torch.float32))
    if style == "interleaved":
        first, second = upcast[..., 0:2 * half:2], upcast[..., 1:2 * half:2]
    else:
        first, second = upcast[..., :half], upcast[..., half:2 * half]
    pairs = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pairs, -1).flatten(-2) if style == "interleaved" else torch.cat(pairs, -1)
    return torch.cat((rotated, upcast[..., 2 * half:]), -1).to(x.dtype)


def gather_angles(table: Tensor, position_ids: Tensor | None, layout: str,
                  dtype: torch.dtype) -> Tensor:
    """Returns the tokens' rows of `table`, float32 or wider, with an axis for the heads."""
    rows = table if position_ids is None else torch.nn.functional.embedding(position_ids, table)
    return rows.to(torch.promote_types(dtype, torch.float32)).unsqueeze(-3 if layout == "bhsd"
                                                                        else -2)


# The angle of pair i at position n is n * frequencies[i]. The order and dtype of the operations are
# those of the models trained with them: one bit of difference is a visible angle at position
# 100000.

def frequencies(dim: int, base: float) -> Tensor:
    """Returns base ** -(2i / dim)."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def linear_frequencies(dim: int, base: float, factor: float) -> Tensor:
    """Returns the frequencies of position interpolation: all divided by `factor`."""
    return frequencies(dim, base) / factor


def ntk_frequencies(dim: int, base: float, factor: float) -> Tensor:
    """Returns NTK-aware frequencies: a larger base divides the lowest frequency by `factor` and
    keeps the highest."""
    return frequencies(dim, base * factor ** (dim / (dim - 2)))


def dynamic_ntk_frequencies(dim: int, base: float, factor: float, original: int,
                            seq_len: int) -> Tensor:
    """Returns NTK-aware frequencies for `seq_len`; unscaled up to the original length."""
    seq_len = max(seq_len, original)
    return ntk_frequencies(dim, base, (factor * seq_len / original) - (factor - 1))


def yarn_frequencies(dim: int, base: float, factor: float, original: int, beta_fast: float,
                     beta_slow: float, truncate: bool) -> Tensor:
    """Returns YaRN frequencies: high ones kept, low ones interpolated, a ramp between."""
    def pair_with_rotations(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair_with_rotations(beta_fast), pair_with_rotations(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001                          # the ramp becomes a step
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = base ** (torch.arange(0, dim, 2).to(torch.float32) / dim)
    keep = 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep


def yarn_attention_factor(factor: float, mscale: float | None,
                          mscale_all_dim: float | None) -> float:
    """Returns YaRN's factor of cos and sin, which keeps the entropy of the softmax."""
    def mscale_of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return (mscale_of(mscale) / mscale_of(mscale_all_dim) if mscale and mscale_all_dim
            else mscale_of(1.0))


def llama3_frequencies(dim: int, base: float, factor: float, original: int, low_freq_factor: float,
                       high_freq_factor: float) -> Tensor:
    """Returns Llama 3 frequencies: long wavelengths interpolated, short kept, others blended."""
    plain = frequencies(dim, base)
    wavelength = 2 * math.pi / plain
    is_long, is_short = (wavelength > original / low_freq_factor,
                         wavelength < original / high_freq_factor)
    scaled = torch.where(is_long, plain / factor, plain)
    blend = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return torch.where(is_long | is_short, scaled, (1 - blend) * scaled / factor + blend * scaled)


def longrope_frequencies(dim: int, base: float, factors: Sequence[float]) -> Tensor:
    """Returns LongRoPE frequencies, with one factor per pair."""
    powers = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * base ** powers)


def longrope_attention_factor(factor: float, original: int) -> float:
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))


def proportional_frequencies(head_dim: int, base: float, factor: float,
                             proportion: float) -> Tensor:
    """Returns frequencies for the first `proportion` of a head's pairs, zeros for the rest."""
    rotated_pairs = int(proportion * head_dim // 2)
    rotating = 1.0 / (base ** (torch.arange(0, 2 * rotated_pairs, 2,
                                            dtype=torch.int64).to(torch.float32) / head_dim))
    return torch.cat((rotating, torch.zeros(head_dim // 2 - rotated_pairs))) / factor


def xpos_decay(dim: int, positions: Tensor, scale_base: float) -> Tensor:
    """Returns the XPos factor of a query at each position, by which a key is divided; one column
    per pair.

    Positions count from their middle: that cancels in every product of query and key and keeps the
    numbers small.
    """
    per_step = (torch.arange(0, dim, 2, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
    power = (positions - len(positions) // 2) / scale_base
    return per_step ** power[:, None]
