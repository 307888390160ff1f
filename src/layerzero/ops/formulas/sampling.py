"""What sampling operations share: their random numbers, the filters, and the draw. No op of its own, and no kernel.

Random numbers are part of the contract, so that every kernel draws the same token from the same seed.
Draw j of row r is one float64 in [0, 1), made by SplitMix64 from a counter:

    state = mix(mix(seed) + offset * GOLDEN) + (r + 1) * GOLDEN + j * STRIDE   (mod 2^64)
    u = (mix(state) >> 11) * 2^-53

`offset` is the step of a generation: each has a stream of its own, so no row meets another's numbers at a
later step. With a seed for each row (`seed_rows`) r is 0: its stream does not depend on where in the batch it
stands. A token is drawn by the inverse of the cumulative distribution, in the order
of token ids: the first token whose cumulative weight, summed in float64, exceeds u times the total.
"""

from __future__ import annotations

from typing import NamedTuple, Union

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
STRIDE = 0xD1342543DE82EF95
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_WORD = (1 << 64) - 1

Number = Union[Tensor, float]                  # one for all rows, or a column with one for each


def signed(word: int) -> int:
    """A 64-bit word as torch's int64 holds it."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def mix_int(word: int) -> int:
    """SplitMix64's finalizer on a Python int."""
    word &= _WORD
    for shift, factor in _MIX:
        word = (word ^ word >> shift) * factor & _WORD
    return word ^ word >> 31


def mix(words: Tensor) -> Tensor:
    """The same on int64 tensors, whose products wrap; the mask makes their right shift a logical one."""
    for shift, factor in _MIX:
        words = (words ^ (words >> shift & (1 << 64 - shift) - 1)) * signed(factor)
    return words ^ (words >> 31 & (1 << 33) - 1)


def accumulator(device: torch.device) -> torch.dtype:
    """Sums and comparisons are in float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def random_numbers(batch: int, draws: int, device: torch.device, uniforms: Tensor | None, seed: int | None,
                   seed_rows: Tensor | None, offset: int, generator: torch.Generator | None) -> Tensor:
    """(batch, draws) numbers in [0, 1): those given, or from the seeds, or from torch's generator."""
    wide = accumulator(device)
    if uniforms is not None:
        return uniforms.to(wide).reshape(batch, draws).clamp(0.0, 1.0)
    if seed is None and seed_rows is None:
        return torch.rand((batch, draws), generator=generator, device=device, dtype=wide)
    if seed_rows is not None:
        start = mix(mix(seed_rows.to(torch.int64)) + signed(offset * GOLDEN)) + signed(GOLDEN)
    else:
        first = mix_int(mix_int(int(seed or 0)) + offset * GOLDEN) + GOLDEN
        if device.type == "cpu" and batch * draws <= 16:       # sooner done than torch's dozen of calls
            numbers = [[(mix_int(first + r * GOLDEN + j * STRIDE) >> 11) * 2.0 ** -53 for j in range(draws)]
                       for r in range(batch)]
            return torch.tensor(numbers, dtype=wide).reshape(batch, draws)
        start = torch.arange(batch, device=device) * signed(GOLDEN) + signed(first)
    words = mix(start[:, None] + torch.arange(draws, device=device) * signed(STRIDE))
    return (words >> 11 & (1 << 53) - 1).to(wide) * 2.0 ** -53


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The column of each row that `uniform` (batch, 1) picks; weights are >= 0, float64, in order of token ids.

    Never a column of weight zero, unless all are.
    """
    cumulative = weights.cumsum(-1)
    return first_beyond(weights, cumulative, uniform * cumulative[:, -1:])


def first_beyond(weights: Tensor, cumulative: Tensor, target: Tensor) -> Tensor:
    """The first column with a weight whose cumulative weight exceeds `target`, or reaches the end."""
    below = 1.0 - torch.finfo(cumulative.dtype).eps / 2                    # times a number: the next one below it
    target = torch.minimum(target, cumulative[:, -1:] * below)
    return ((cumulative > target) & (weights > 0)).to(torch.uint8).argmax(-1, keepdim=True)


class Filters(NamedTuple):
    """How many tokens, how much of the mass, how small beside the largest: each for all rows, or a column."""

    top_k: Number
    top_p: Number
    min_p: Number
    most: int                                  # no row's top_k is larger


def filters(vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, temperature_rows: Tensor | None,
            top_k_rows: Tensor | None, top_p_rows: Tensor | None, min_p_rows: Tensor | None,
            wide: torch.dtype) -> Filters:
    """A temperature of zero is top_k = 1; a top_k that is not positive keeps all."""
    most = vocab if top_k_rows is not None or not 0 < top_k < vocab else top_k
    if temperature_rows is None and temperature == 0.0:
        most = 1
    k: Number = most
    if top_k_rows is not None and most > 1:
        k = torch.where(top_k_rows > 0, top_k_rows, vocab)[:, None]
    if temperature_rows is not None:
        k = torch.where(temperature_rows[:, None] > 0, k, 1)
    return Filters(k, top_p if top_p_rows is None else top_p_rows[:, None].to(wide),
                   min_p if min_p_rows is None else min_p_rows[:, None].to(wide), most)


def scores_of(values: Tensor, temperature: float, temperature_rows: Tensor | None, from_probs: bool) -> Tensor:
    """What tokens are ranked by, at least float32: log-weights with the largest at 0, or the probabilities.

    No NaN comes out: a NaN or a negative probability counts as impossible, an infinite logit as the largest number.
    The result is always a fresh tensor.
    """
    if from_probs:
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        return wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0.0)
    wide = orderly(values)
    top = wide.amax(-1, keepdim=True)
    wide = wide.sub_(top.clamp_(min=torch.finfo(wide.dtype).min))
    if temperature_rows is not None:
        column = temperature_rows[:, None].to(wide.dtype)
        return wide.div_(torch.where(column > 0, column, 1.0))
    return wide.div_(temperature) if temperature not in (0.0, 1.0) else wide


def orderly(logits: Tensor) -> Tensor:
    """A fresh copy, at least float32: NaN is -inf, and what is infinite the largest number."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.nan_to_num(nan=-torch.inf, posinf=torch.finfo(wide.dtype).max, neginf=-torch.inf)


def weights_of(scores: Tensor, from_probs: bool) -> Tensor:
    """Unnormalised probabilities in float64: exact copies of the float32 ones the scores give."""
    return (scores if from_probs else scores.exp()).to(accumulator(scores.device))


def kept(ranked: Tensor, by: Filters, total: Tensor | None = None) -> Tensor:
    """Which of the weights, sorted from the largest, pass top-k, then top-p of what is left, then min-p.

    `total` is the mass of all tokens, where `ranked` holds only the first of them.
    """
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    keep = rank < by.top_k
    if isinstance(by.top_p, Tensor) or by.top_p < 1.0:
        all_inside = not isinstance(by.top_k, Tensor) and by.top_k >= len(rank)
        cumulative = (ranked if all_inside else torch.where(keep, ranked, 0.0)).cumsum(-1)
        before = torch.nn.functional.pad(cumulative, (1, -1))
        nucleus = before < by.top_p * (cumulative[:, -1:] if total is None else total)
        keep = keep & (nucleus | (rank == 0))
    if isinstance(by.min_p, Tensor) or by.min_p > 0.0:
        keep = keep & (ranked >= by.min_p * ranked[:, :1])
    return keep


class Penalties(NamedTuple):
    """What a token pays for having been seen; each one for all rows or a column."""

    repetition: Number
    presence: Number
    frequency: Number


def penalised(logits: Tensor, history: Tensor | None, token_counts: Tensor | None, paid: Penalties) -> Tensor:
    """The logits, at least float32, less what their tokens pay."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    times = None if history is None else occurrences(history, x.shape[-1], x.dtype)
    counts = times if token_counts is None else token_counts.to(x.dtype)
    if counts is None:
        return x
    seen = counts > 0 if times is None else (times > 0) | (counts > 0)
    return pay(x, seen, counts, paid)


def pay(x: Tensor, seen: Tensor, counts: Tensor, paid: Penalties) -> Tensor:
    """Elementwise. Repetition shrinks what is positive and grows what is negative."""
    repetition, presence, frequency = (p.to(x.dtype) if isinstance(p, Tensor) else p for p in paid)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * counts - presence * (counts > 0).to(x.dtype)


def occurrences(history: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """(batch, vocab): how often each token stands in the history; what is outside the vocabulary is padding."""
    counts = torch.zeros((history.shape[0], vocab + 1), dtype=dtype, device=history.device)
    return counts.scatter_add_(1, columns_of(history, vocab), torch.ones_like(history, dtype=dtype))[:, :vocab]


def columns_of(tokens: Tensor, vocab: int) -> Tensor:
    """Token ids as columns; one column more, the last, takes what is outside the vocabulary."""
    return torch.where((tokens >= 0) & (tokens < vocab), tokens, vocab).to(torch.int64)


def per_row(scalar: float, rows: Tensor | None) -> Number:
    """A parameter as a number for all rows, or as a column."""
    return scalar if rows is None else rows[:, None]


def distribution(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
                 min_p: float = 0.0, from_probs: bool = False) -> Tensor:
    """(batch, vocab): the probabilities lz.sample draws with, at least float32; zeros where nothing can be drawn."""
    scores = scores_of(logits, temperature, None, from_probs)
    by = filters(scores.shape[-1], temperature, top_k, top_p, min_p, None, None, None, None, scores.dtype)
    weights = filtered(scores, by, from_probs)
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total > 0, total, 1.0)).to(scores.dtype)


def filtered(scores: Tensor, by: Filters, from_probs: bool) -> Tensor:
    """Weights in the order of token ids, zero where a filter removed the token. Equal scores rank by token id."""
    weights = weights_of(scores, from_probs)
    if by.most == 1:
        return one_hot(scores.argmax(-1, keepdim=True), weights) * (weights > 0)
    if by.most == scores.shape[-1] and not isinstance(by.top_p, Tensor) and by.top_p >= 1.0:
        return torch.where(weights >= by.min_p * weights.amax(-1, keepdim=True), weights, 0.0)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    return torch.zeros_like(weights).scatter(1, order, torch.where(kept(ranked, by), ranked, 0.0))


# Of speculative decoding.

def possible(probs: Tensor, wide: torch.dtype) -> Tensor:
    """Probabilities as they can be drawn from: what is not a positive number is zero."""
    return probs.detach().to(wide).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0.0)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """What is left of the target once a token of the draft was rejected; all of it where rounding left nothing."""
    left = (target - draft).clamp(min=0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, target)


def normalised(weights: Tensor) -> Tensor:
    """Summing to one; zeros stay zeros."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def one_hot(column: Tensor, like: Tensor) -> Tensor:
    """The distribution of a draft that is certain of its token."""
    return torch.zeros_like(like).scatter(1, column, 1.0)
