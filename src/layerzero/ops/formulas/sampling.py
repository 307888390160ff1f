"""Random numbers, filters and the draw, shared by the sampling operations.

Random numbers are part of the contract, so that every kernel draws the same token from the same
seed. Draw j of row r is one float64 in [0, 1), computed by SplitMix64 from a counter:

    state = mix(mix(seed) + offset * GOLDEN) + (r + 1) * GOLDEN + j * STRIDE   (mod 2^64)
    u = (mix(state) >> 11) * 2^-53

`offset` is the generation step: each step has its own stream, so that no row repeats another's
numbers later. With `seed_rows` r is 0: the stream of a row does not depend on its position in the
batch. A token is drawn by inverse transform sampling in the order of token ids: the first token
whose cumulative weight, summed in float64, exceeds u times the total.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
STRIDE = 0xD1342543DE82EF95
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_WORD = (1 << 64) - 1

Number = Union[Tensor, float]                  # one for all rows, or a column with one per row


def as_int64(word: int) -> int:
    """Returns a 64-bit word as a signed int64."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def mix_int(word: int) -> int:
    """SplitMix64's finalizer on a Python int."""
    word &= _WORD
    for shift, factor in _MIX:
        word = (word ^ word >> shift) * factor & _WORD
    return word ^ word >> 31


def mix(words: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 tensors, whose products wrap; shifts are masked."""
    for shift, factor in _MIX:
        words = (words ^ (words >> shift & (1 << 64 - shift) - 1)) * as_int64(factor)
    return words ^ (words >> 31 & (1 << 33) - 1)


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Returns float64, for sums and comparisons, or float32 if the device has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def random_numbers(batch: int, draws: int, device: torch.device, uniforms: Tensor | None,
                   seed: int | None, seed_rows: Tensor | None, offset: int,
                   generator: torch.Generator | None) -> Tensor:
    """Returns (batch, draws) numbers in [0, 1): `uniforms`, or from seeds, or torch's."""
    acc_dtype = accumulator_dtype(device)
    if uniforms is not None:
        return uniforms.to(acc_dtype).reshape(batch, draws).clamp(0.0, 1.0)
    if seed is None and seed_rows is None:
        return torch.rand((batch, draws), generator=generator, device=device, dtype=acc_dtype)
    if seed_rows is not None:
        start = mix(mix(seed_rows.to(torch.int64)) + as_int64(offset * GOLDEN)) + as_int64(GOLDEN)
    else:
        first = mix_int(mix_int(int(seed or 0)) + offset * GOLDEN) + GOLDEN
        if device.type == "cpu" and batch * draws <= 16:       # faster than a dozen torch calls
            numbers = [[(mix_int(first + r * GOLDEN + j * STRIDE) >> 11) * 2.0 ** -53
                        for j in range(draws)]
                       for r in range(batch)]
            return torch.tensor(numbers, dtype=acc_dtype).reshape(batch, draws)
        start = torch.arange(batch, device=device) * as_int64(GOLDEN) + as_int64(first)
    words = mix(start[:, None] + torch.arange(draws, device=device) * as_int64(STRIDE))
    return (words >> 11 & (1 << 53) - 1).to(acc_dtype) * 2.0 ** -53


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Returns the column of each row that `uniform` (batch, 1) selects; weights are >= 0, float64,
    by token id. A column of weight zero is never selected, unless all are."""
    cumulative = weights.cumsum(-1)
    return first_beyond(weights, cumulative, uniform * cumulative[:, -1:])


def first_beyond(weights: Tensor, cumulative: Tensor, target: Tensor) -> Tensor:
    """Returns the first column of positive weight whose sum exceeds `target`, or the last."""
    # x * below is the next number below x
    below = 1.0 - torch.finfo(cumulative.dtype).eps / 2
    target = torch.minimum(target, cumulative[:, -1:] * below)
    return ((cumulative > target) & (weights > 0)).to(torch.uint8).argmax(-1, keepdim=True)


class Filters(NamedTuple):
    """The parameters of the filters, each a number for all rows or a column."""

    top_k: Number
    top_p: Number
    min_p: Number
    max_top_k: int                             # the largest top_k of any row


def make_filters(vocab: int, temperature: float, top_k: int, top_p: float, min_p: float,
                 temperature_rows: Tensor | None,
                 top_k_rows: Tensor | None, top_p_rows: Tensor | None, min_p_rows: Tensor | None,
                 acc_dtype: torch.dtype) -> Filters:
    """Returns the filters; a temperature of zero is top_k = 1, and a top_k <= 0 keeps all."""
    max_top_k = vocab if top_k_rows is not None or not 0 < top_k < vocab else top_k
    if temperature_rows is None and temperature == 0.0:
        max_top_k = 1
    k: Number = max_top_k
    if top_k_rows is not None and max_top_k > 1:
        k = torch.where(top_k_rows > 0, top_k_rows, vocab)[:, None]
    if temperature_rows is not None:
        k = torch.where(temperature_rows[:, None] > 0, k, 1)
    return Filters(k, top_p if top_p_rows is None else top_p_rows[:, None].to(acc_dtype),
                   min_p if min_p_rows is None else min_p_rows[:, None].to(acc_dtype), max_top_k)


def rank_scores(values: Tensor, temperature: float, temperature_rows: Tensor | None,
                from_probs: bool) -> Tensor:
    """Returns the scores that rank tokens, at least float32: log-weights with maximum 0, or the
    probabilities.

    There is no NaN in them: NaN and negative probabilities count as impossible, infinite logits as
    the largest number. The result is always a new tensor.
    """
    if from_probs:
        upcast = values.to(torch.promote_types(values.dtype, torch.float32))
        return upcast.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0.0)
    upcast = replace_nonfinite(values)
    top = upcast.amax(-1, keepdim=True)
    upcast = upcast.sub_(top.clamp_(min=torch.finfo(upcast.dtype).min))
    if temperature_rows is not None:
        column = temperature_rows[:, None].to(upcast.dtype)
        return upcast.div_(torch.where(column > 0, column, 1.0))
    return upcast.div_(temperature) if temperature not in (0.0, 1.0) else upcast


def replace_nonfinite(logits: Tensor) -> Tensor:
    """Returns a copy, at least float32, with NaN as -inf and +inf as the largest number."""
    upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = torch.finfo(upcast.dtype).max
    return upcast.nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)


def token_weights(scores: Tensor, from_probs: bool) -> Tensor:
    """Returns unnormalised probabilities in float64, exact copies of the float32 ones."""
    return (scores if from_probs else scores.exp()).to(accumulator_dtype(scores.device))


def keep_mask(ranked: Tensor, filters: Filters, total: Tensor | None = None) -> Tensor:
    """Returns which weights, sorted in descending order, pass top-k, then top-p, then min-p.
    `total` is the mass of all tokens, if `ranked` holds only the first of them."""
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    keep = rank < filters.top_k
    if isinstance(filters.top_p, Tensor) or filters.top_p < 1.0:
        all_inside = not isinstance(filters.top_k, Tensor) and filters.top_k >= len(rank)
        cumulative = (ranked if all_inside else torch.where(keep, ranked, 0.0)).cumsum(-1)
        before = torch.nn.functional.pad(cumulative, (1, -1))
        nucleus = before < filters.top_p * (cumulative[:, -1:] if total is None else total)
        keep = keep & (nucleus | (rank == 0))
    if isinstance(filters.min_p, Tensor) or filters.min_p > 0.0:
        keep = keep & (ranked >= filters.min_p * ranked[:, :1])
    return keep


class Penalties(NamedTuple):
    """The penalties of tokens that occurred before, each a number for all rows or a column."""

    repetition: Number
    presence: Number
    frequency: Number


def apply_penalties(logits: Tensor, history: Tensor | None, token_counts: Tensor | None,
                    penalties: Penalties) -> Tensor:
    """Returns the logits, at least float32, with penalties applied."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    history_counts = None if history is None else count_tokens(history, x.shape[-1], x.dtype)
    counts = history_counts if token_counts is None else token_counts.to(x.dtype)
    if counts is None:
        return x
    seen = counts > 0 if history_counts is None else (history_counts > 0) | (counts > 0)
    return penalize(x, seen, counts, penalties)


def penalize(x: Tensor, seen: Tensor, counts: Tensor, penalties: Penalties) -> Tensor:
    """Applies penalties elementwise; repetition divides positive logits, multiplies others."""
    repetition, presence, frequency = (p.to(x.dtype) if isinstance(p, Tensor) else p
                                       for p in penalties)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * counts - presence * (counts > 0).to(x.dtype)


def count_tokens(history: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Returns (batch, vocab), each token's count in the history; ids outside are padding."""
    counts = torch.zeros((history.shape[0], vocab + 1), dtype=dtype, device=history.device)
    return counts.scatter_add_(1, token_columns(history, vocab),
                               torch.ones_like(history, dtype=dtype))[:, :vocab]


def token_columns(tokens: Tensor, vocab: int) -> Tensor:
    """Returns token ids as columns; an extra last column takes ids outside the vocabulary."""
    return torch.where((tokens >= 0) & (tokens < vocab), tokens, vocab).to(torch.int64)


def scalar_or_column(scalar: float, rows: Tensor | None) -> Number:
    """Returns a parameter as a number for all rows, or as a column."""
    return scalar if rows is None else rows[:, None]


def distribution(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
                 min_p: float = 0.0, from_probs: bool = False) -> Tensor:
    """Returns (batch, vocab), the probabilities lz.sample draws from; zeros if none is possible."""
    scores = rank_scores(logits, temperature, None, from_probs)
    filters = make_filters(scores.shape[-1], temperature, top_k, top_p, min_p, None, None, None,
                           None, scores.dtype)
    weights = filter_weights(scores, filters, from_probs)
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total > 0, total, 1.0)).to(scores.dtype)


def filter_weights(scores: Tensor, filters: Filters, from_probs: bool) -> Tensor:
    """Returns weights by token id, zero where filtered out. Equal scores rank by token id."""
    weights = token_weights(scores, from_probs)
    if filters.max_top_k == 1:
        return one_hot(scores.argmax(-1, keepdim=True), weights) * (weights > 0)
    if (filters.max_top_k == scores.shape[-1] and not isinstance(filters.top_p, Tensor)
        and filters.top_p >= 1.0):
        return torch.where(weights >= filters.min_p * weights.amax(-1, keepdim=True), weights, 0.0)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    return torch.zeros_like(weights).scatter(1, order,
                                             torch.where(keep_mask(ranked, filters), ranked, 0.0))


# Input generators.

STEP = (1 << 16) + 5                           # an offset of more than 16 bits


def random_arguments(random: str, shape: tuple[int, ...], gen: torch.Generator, device: str,
                     seed: int) -> dict[str, Any]:
    """Returns what the random numbers (batch, ...) of a call come from. Seeds of rows have 64 bits
    or 32, and do not tell the place of a row. "wide": numbers of float64. "uniforms+seed" gives
    both, of which the first counts."""
    if "+" in random:
        return {name: v for source in random.split("+")
                for name, v in random_arguments(source, shape, gen, device, seed).items()}
    if random in ("seed_rows", "short_seed_rows"):
        seeds = mix(torch.arange(shape[0]) + seed)
        seeds = (seeds >> 32).to(torch.int32) if random == "short_seed_rows" else seeds
        return {"seed_rows": seeds.to(device), "offset": STEP}
    if random == "generator":
        return {"generator": torch.Generator(device).manual_seed(seed + 99)}
    if random == "seed":
        return {"seed": (1 << 40) + 1234 + seed, "offset": STEP}
    numbers = torch.zeros(shape) if random == "zeros" else torch.rand(
        shape, generator=gen, dtype=torch.float64 if random == "wide" else torch.float32)
    return {"uniforms": numbers.to(device)}


def with_equal_rows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call with seeds of rows with its last row equal to its first: they give the same,
    though their places differ. Other calls stay as they are."""
    if arguments.get("seed_rows") is None:
        return dict(arguments)
    return {name: torch.cat((v[:-1], v[:1])) if isinstance(v, Tensor) and len(v) > 1 else v
            for name, v in arguments.items()}


def tell_apart(history: Tensor, counts: Tensor, logits: Tensor) -> None:
    """Changes a history and counts so that of the likeliest tokens of a row the first is in the
    history alone, the next in the counts alone, the next in both, the next in neither, and again:
    whatever reads one for the other changes the result."""
    likeliest = logits.topk(min(8, logits.shape[-1])).indices
    history[(history[:, :, None] == likeliest[:, None, 1::2]).any(-1)] = -1
    first = likeliest[:, ::2][:, :history.shape[1]]
    history[:, :first.shape[1]] = first
    for place in (0, 3):
        counts.scatter_(1, likeliest[:, place::4], 0)
    for place in (1, 2):
        columns = likeliest[:, place::4]
        counts.scatter_(1, columns, counts.gather(1, columns).clamp(min=1))


# Speculative decoding.

def clean_probs(probs: Tensor, acc_dtype: torch.dtype) -> Tensor:
    """Returns probabilities with everything but positive finite numbers set to zero."""
    return probs.detach().to(acc_dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0.0)


def residual_weights(target: Tensor, draft: Tensor) -> Tensor:
    """Returns max(target - draft, 0), the target after a rejection; the target if that is 0."""
    left = (target - draft).clamp(min=0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, target)


def normalize(weights: Tensor) -> Tensor:
    """Returns weights that sum to one; rows of zeros stay zeros."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def one_hot(column: Tensor, like: Tensor) -> Tensor:
    """Returns the distribution of a deterministic draft: 1 at its token."""
    return torch.zeros_like(like).scatter(1, column, 1.0)


def equal_probs(shape: torch.Size, powers: tuple[int, int]) -> Tensor:
    """Returns distributions (batch, positions, vocab) over 2^n tokens of one probability, n from
    one position to the next the first and the second of `powers`: every sum of them is exact."""
    probs, largest = torch.zeros(shape), shape[-1].bit_length() - 1
    for i in range(shape[1]):
        power = min(powers[i % 2], largest)
        probs[:, i, :1 << power] = 0.5 ** power
    return probs
