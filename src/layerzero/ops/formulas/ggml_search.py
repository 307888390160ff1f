"""How ggml searches the scales of its K-quants and iq4 formats (ggml-quants.c, without an imatrix).

Each search takes the values of many parts at once, x (length, parts), and does for every part what
ggml's C does for one: the same float32 operations in the same order, none of them fused. Sums run
over the length one by one, as in C; what a part has not improved stays as it was.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

GROUP_MAX_EPS = 1e-15
PARTS_AT_ONCE = 32768      # of them a search holds a dozen copies
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def nearest_int(x: Tensor) -> Tensor:
    """Rounds as ggml's nearest_int, with its wrap-around beyond 2^22: int32, halves to even."""
    return ((x + 12582912.0).view(torch.int32) & 0x007FFFFF) - 0x00400000


def quotient(numerator: float, d: Tensor) -> Tensor:
    """Returns numerator / d, rounded once: torch would multiply by the reciprocal of a tensor."""
    return d.new_tensor(numerator) / d


def inverse(d: Tensor, numerator: float = 1.0) -> Tensor:
    """Returns numerator / d, and 0 where that is not finite, as ggml does for 0."""
    ratio = quotient(numerator, d)
    return torch.where(ratio.isfinite(), ratio, 0.0)


def signed_peak(x: Tensor, axis: int) -> Tensor:
    """Returns the value of the largest magnitude along the axis, which is kept: the first of
    several, 0.0 for -0.0, and NaN, which is larger than nothing in C, counts as 0."""
    x = torch.where(x.isnan(), 0.0, x)
    return x.gather(axis, x.abs().argmax(axis, keepdim=True)) + 0.0


def ordered_sum(terms: Tensor) -> Tensor:
    """Returns the sum over the first axis, added in order."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def step_factor(start: float, step: float, index: int, levels: int) -> float:
    """Returns start + step * index + levels, each operation rounded to float32."""
    f = [torch.tensor(v, dtype=torch.float32) for v in (start, step, float(index), float(levels))]
    return float(f[0] + f[1] * f[2] + f[3])


def make_qx_quants(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Returns the scale of each part and the codes, 0 .. 2 * levels - 1; weights are squares."""
    peak = signed_peak(x, 0)[0]
    weighted = x * x * x
    squares = x * x

    def attempt(factor: float) -> tuple[Tensor, Tensor, Tensor]:
        codes = nearest_int(quotient(-factor, peak) * x).clamp_(-levels, levels - 1)
        real = codes.float()
        return codes, ordered_sum(weighted * real), ordered_sum(squares * real * real)

    codes, sum_lx, sum_l2 = attempt(float(levels))
    scale = torch.where(sum_l2 == 0, 0.0, sum_lx / sum_l2)
    best = scale * sum_lx
    for index in (*range(-9, 0), *range(1, 10)):
        tried, sum_lx, sum_l2 = attempt(step_factor(0.0, 0.1, index, levels))
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        codes = torch.where(better, tried, codes)
        scale = torch.where(better, sum_lx / sum_l2, scale)
        best = torch.where(better, scale * sum_lx, best)
    empty = peak.abs() < GROUP_MAX_EPS
    return torch.where(empty, 0.0, scale), torch.where(empty, 0, codes + levels)


def make_q3_quants(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Searches as make_qx_quants, but improves one code after another, five times over."""
    peak = signed_peak(x, 0)[0]
    codes = nearest_int(quotient(-float(levels), peak) * x).clamp_(-levels, levels - 1).float()
    squares, weighted = x * x, x * x * x
    sum_lx, sum_l2 = ordered_sum(weighted * codes), ordered_sum(squares * codes * codes)
    for _ in range(5):                         # ggml stops when none changed: then none would
        for i in range(len(x)):
            old = codes[i]
            rest_lx = sum_lx - weighted[i] * old
            rest_l2 = sum_l2 - squares[i] * old * old
            new = nearest_int(x[i] * rest_l2 / rest_lx).clamp_(-levels, levels - 1).float()
            new_lx, new_l2 = rest_lx + weighted[i] * new, rest_l2 + squares[i] * new * new
            better = ((rest_lx > 0) & (new != old) & (new_l2 > 0)
                      & (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2))
            codes[i] = torch.where(better, new, old)
            sum_lx = torch.where(better, new_lx, sum_lx)
            sum_l2 = torch.where(better, new_l2, sum_l2)
    scale = torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0)
    empty = peak.abs() < GROUP_MAX_EPS
    return torch.where(empty, 0.0, scale), torch.where(empty, 0, codes.int() + levels)


def make_qkx2_quants(x: Tensor, levels: int, start: float, steps: int,
                     magnitudes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the scale of each part, its minimum negated, and the codes, 0 .. levels.

    magnitudes: errors count by their magnitude, weighted by that of the value; else by their
    square, weighted by the magnitude of the value plus the root of the mean square.
    """
    if magnitudes:
        weights = x.abs()
    else:
        weights = (ordered_sum(x * x) / x.new_tensor(float(len(x)))).sqrt() + x.abs()
    high, low = x.amax(0), x.amin(0)
    sum_w, sum_x = ordered_sum(weights), ordered_sum(weights * x)
    low = torch.where(low > 0, 0.0, low)
    flat = high == low
    flat_low = low

    def encode(factor: float) -> Tensor:
        return nearest_int(quotient(factor, high - low) * (x - low)).clamp_(0, levels)

    def error(scale: Tensor, low: Tensor, codes: Tensor) -> Tensor:
        gap = scale * codes + low - x
        return ordered_sum(weights * (gap.abs() if magnitudes else gap * gap))

    codes = encode(float(levels))
    scale = quotient(1.0, quotient(float(levels), high - low))
    best = error(scale, low, codes)
    for index in range(steps + 1):
        tried = encode(step_factor(start, 0.1, index, levels))
        real = tried.float()
        weighted = weights * real
        sum_l, sum_l2 = ordered_sum(weighted), ordered_sum(weighted * real)
        sum_xl = ordered_sum(weighted * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        positive = new_low > 0
        new_low = torch.where(positive, 0.0, new_low)
        new_scale = torch.where(positive, sum_xl / sum_l2, new_scale)
        new_error = error(new_scale, new_low, real)
        better = (determinant > 0) & (new_error < best)
        codes = torch.where(better, tried, codes)
        best = torch.where(better, new_error, best)
        scale = torch.where(better, new_scale, scale)
        low = torch.where(better, new_low, low)
    return (torch.where(flat, 0.0, scale), torch.where(flat, -flat_low, -low),
            torch.where(flat, 0, codes))


def nearest_iq4(x: Tensor) -> Tensor:
    """Returns the index of the nearest of IQ4_VALUES, as ggml's best_index_int8: the upper of two.

    Near the middle between two of them both differences are exact, so that to compare them is to
    compare with the middle.
    """
    middles = x.new_tensor([(a + b) / 2 for a, b in pairwise(IQ4_VALUES)])
    return torch.bucketize(x, middles, right=True, out_int32=True)


def make_iq4_scales(x: Tensor) -> tuple[Tensor]:
    """Returns the scale of each part for the values of iq4; weights are squares."""
    peak = signed_peak(x, 0)[0]
    values = x.new_tensor(IQ4_VALUES)
    squares = x * x

    def attempt(factor: Tensor) -> tuple[Tensor, Tensor]:
        q = values.index_select(0, nearest_iq4(factor * x).flatten()).view(x.shape)
        return ordered_sum(squares * q * x), ordered_sum(squares * q * q)

    sum_qx, sum_q2 = attempt(quotient(1.0, -peak / values[0]))
    scale = torch.where(sum_q2 > 0, sum_qx / sum_q2, 0.0)
    best = scale * sum_qx
    for index in range(-7, 8):
        sum_qx, sum_q2 = attempt(quotient(float(index + IQ4_VALUES[0]), peak))
        better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
        scale = torch.where(better, sum_qx / sum_q2, scale)
        best = torch.where(better, scale * sum_qx, best)
    return (torch.where(peak.abs() < GROUP_MAX_EPS, 0.0, scale),)


def search_parts(x: Tensor, length: int, search: Any, *options: Any) -> tuple[Tensor, ...]:
    """Runs a search over the parts of blocks x (..., n, block), some at a time. A result of a part
    gives (..., n, parts), of each value (..., n, block)."""
    pieces = x.reshape(-1, length).split(PARTS_AT_ONCE)
    results = (torch.cat(r, -1)
               for r in zip(*(search(p.t().contiguous(), *options) for p in pieces)))
    parts = x.shape[-1] // length
    return tuple(r.t().reshape(x.shape) if r.dim() > 1 else r.view(*x.shape[:-1], parts)
                 for r in results)
