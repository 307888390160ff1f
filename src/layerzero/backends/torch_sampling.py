"""Sampling with torch alone.

All kernels end in the same draw over the same weights, so they return the same tokens; they differ in how they find
what the filters keep. torch's full sort is slow on the CPU, and hardly ever needed: the k highest scores lie in the
k blocks with the highest maxima, and a histogram of the mass finds where top-p cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops.sample import OP as sample
from ..ops.sampling_formulas import (
    Filters,
    Penalties,
    accumulator,
    columns_of,
    draw,
    filters,
    first_beyond,
    kept,
    pay,
    penalised,
    per_row,
    random_numbers,
    scores_of,
    weights_of,
)
from ..spec.kernel import Kernel
from ..spec.rules import absent, any_of, at_least, at_most, device, differs, dtypes, equals, present

BLOCK = 64
FIRST_TRIES = (64, 1024)       # how many of the highest scores to look at before the whole distribution
BIN_BITS = 17                  # what a bin of the histogram leaves out of a float32
BINS = (1 << 31 - BIN_BITS) + 1

Pick = tuple[Tensor, Tensor, Tensor]           # token, its weight, the weight of all that may be drawn: each (batch, 1)


def sampler(choose: Callable[[Tensor, Filters, Tensor, bool], Pick],
            prepare: Callable[[Tensor, float, Tensor | None, bool], Tensor] = scores_of) -> Callable[..., Any]:
    """A kernel from its heart; what comes before the choice and after it is the same for all."""
    def run(
        logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, *,
        repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
        history: Tensor | None = None, token_counts: Tensor | None = None, temperature_rows: Tensor | None = None,
        top_k_rows: Tensor | None = None, top_p_rows: Tensor | None = None, min_p_rows: Tensor | None = None,
        repetition_penalty_rows: Tensor | None = None, presence_penalty_rows: Tensor | None = None,
        frequency_penalty_rows: Tensor | None = None, uniforms: Tensor | None = None, seed: int | None = None,
        seed_rows: Tensor | None = None, offset: int = 0, generator: torch.Generator | None = None,
        from_probs: bool = False, return_logprobs: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        batch, vocab = logits.shape
        uniform = random_numbers(batch, 1, logits.device, uniforms, seed, seed_rows, offset, generator)
        logits = logits.detach()
        if history is not None or token_counts is not None:
            logits = _penalised(logits, history, token_counts, Penalties(
                per_row(repetition_penalty, repetition_penalty_rows), per_row(presence_penalty, presence_penalty_rows),
                per_row(frequency_penalty, frequency_penalty_rows)))
        by = filters(vocab, temperature, top_k, top_p, min_p, temperature_rows, top_k_rows, top_p_rows, min_p_rows,
                     uniform.dtype)
        scores = prepare(logits, temperature, temperature_rows, from_probs)
        token, chosen, total = choose(scores, by, uniform, from_probs)
        possible = total > 0
        tokens = torch.where(possible, token, -1)[:, 0]
        if not return_logprobs:
            return tokens
        logprobs = torch.where(possible, chosen.log() - total.log(), -torch.inf)[:, 0]
        return tokens, logprobs.to(torch.promote_types(logits.dtype, torch.float32))

    return run


def _penalised(logits: Tensor, history: Tensor | None, token_counts: Tensor | None, paid: Penalties) -> Tensor:
    """Where only the history counts, only its tokens are touched; one that occurs twice is written twice alike."""
    if history is None or token_counts is not None:
        return penalised(logits, history, token_counts, paid)
    vocab = logits.shape[-1]
    columns = columns_of(history, vocab)
    x = pad(logits.to(torch.promote_types(logits.dtype, torch.float32)), (0, 1))
    counts = torch.zeros_like(x).scatter_add_(1, columns, torch.ones_like(columns, dtype=x.dtype)).gather(1, columns)
    return x.scatter_(1, columns, pay(x.gather(1, columns), counts > 0, counts, paid))[:, :vocab]


# The ways to choose.

def by_sort(scores: Tensor, by: Filters, uniform: Tensor, from_probs: bool) -> Pick:
    """Everything sorted once."""
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    weights = weights_of(ranked, from_probs)
    weights = torch.zeros_like(weights).scatter(1, order, torch.where(kept(weights, by), weights, 0.0))
    token = draw(weights, uniform)
    return token, weights.gather(1, token), weights.sum(-1, keepdim=True)


def by_top_k(scores: Tensor, by: Filters, uniform: Tensor, from_probs: bool) -> Pick:
    """The k highest scores, and the other filters among them."""
    if by.most * 4 > scores.shape[-1]:
        return by_sort(scores, by, uniform, from_probs)
    ranked, ids = best(scores, by.most)
    weights = weights_of(ranked, from_probs)
    return _draw_among(torch.where(kept(weights, by), weights, 0.0), ids, uniform)


def by_top_k_rows(scores: Tensor, by: Filters, uniform: Tensor, from_probs: bool) -> Pick:
    """The same, where only the rows know their k."""
    if isinstance(by.top_k, Tensor) and len(by.top_k):
        by = by._replace(most=int(by.top_k.max()))
    return by_top_k(scores, by, uniform, from_probs)


def by_cdf(scores: Tensor, by: Filters, uniform: Tensor, from_probs: bool) -> Pick:
    """No filter: straight to the draw."""
    return draw_in_blocks(scores if from_probs else scores.exp(), uniform)


def by_mass(scores: Tensor, by: Filters, uniform: Tensor, from_probs: bool) -> Pick:
    """top-p and min-p, without sorting more than a part."""
    light = scores if from_probs else scores.exp()
    total = light.sum(-1, keepdim=True, dtype=accumulator(scores.device))
    return _by_mass(scores, light, total, by, uniform, from_probs, FIRST_TRIES)


def _by_mass(scores: Tensor, light: Tensor, total: Tensor, by: Filters, uniform: Tensor, from_probs: bool,
             tries: tuple[int, ...]) -> Pick:
    """Look at the highest scores first: only rows whose mass is spread wider must look further."""
    if not tries:
        return _by_histogram(scores, light, total, by, uniform)
    ranked, ids = best(scores, tries[0])
    weights = weights_of(ranked, from_probs)
    pick = _draw_among(torch.where(kept(weights, by, total), weights, 0.0), ids, uniform)
    enough = (weights.sum(-1, keepdim=True) >= by.top_p * total) | (weights[:, -1:] < by.min_p * weights[:, :1])
    wider = (~(enough | torch.as_tensor(by.top_k == 1)))[:, 0].nonzero()[:, 0]
    if not len(wider):
        return pick
    rest = _by_mass(scores[wider], light[wider], total[wider], _of_rows(by, wider), uniform[wider], from_probs, tries[1:])
    token, chosen, mass = (whole.index_copy_(0, wider, part) for whole, part in zip(pick, rest))
    return token, chosen, mass


def _of_rows(by: Filters, rows: Tensor) -> Filters:
    top_k, top_p, min_p = (f[rows] if isinstance(f, Tensor) else f for f in by[:3])
    return Filters(top_k, top_p, min_p, by.most)


def _by_histogram(scores: Tensor, light: Tensor, total: Tensor, by: Filters, uniform: Tensor) -> Pick:
    """The mass of each bin of scores says in which one top-p cuts; only that bin must be sorted."""
    batch = len(scores)
    rows = torch.arange(batch, device=scores.device)[:, None]
    places = ordered(scores) >> BIN_BITS
    bins = (places.amax(-1, keepdim=True) - places).to(torch.int64)                    # 0 holds the highest
    mass = torch.bincount((bins + rows * BINS).flatten(), light.flatten().to(total.dtype), batch * BINS)
    up_to = mass.view(batch, BINS).cumsum(-1)
    target = torch.where(torch.as_tensor(by.top_p >= 1.0), torch.inf, by.top_p * total)
    cut = (up_to < target).sum(-1, keepdim=True).clamp_(max=BINS - 1)
    row, column = (bins == cut).nonzero().unbind(1)
    size = torch.bincount(row, minlength=batch)
    place = torch.arange(len(row), device=row.device) - (size.cumsum(0) - size)[row]
    band = scores.new_full((batch, max(int(size.max()), 1)), -torch.inf)
    inside = torch.zeros_like(band, dtype=total.dtype)
    band[row, place], inside[row, place] = scores[row, column], light[row, column].to(total.dtype)
    order = band.sort(dim=-1, descending=True, stable=True).indices
    before = pad(inside.gather(1, order).cumsum(-1), (1, -1)) + pad(up_to, (1, -1)).gather(1, cut)
    keep = bins < cut
    keep[row, column] = torch.zeros_like(band, dtype=torch.bool).scatter_(1, order, before < target)[row, place]
    keep &= light >= by.min_p * light.amax(-1, keepdim=True).to(total.dtype)
    return draw_in_blocks(light * keep, uniform)


def by_highest(logits: Tensor, by: Filters, uniform: Tensor, from_probs: bool) -> Pick:
    """Greedy, in torch's words."""
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    token = logits.argmax(-1, keepdim=True)
    return _certain(token, logits.gather(1, token), from_probs)


def by_highest_block(logits: Tensor, by: Filters, uniform: Tensor, from_probs: bool) -> Pick:
    """Greedy by the block with the highest maximum: torch's maximum is many times faster than its argmax."""
    vocab = logits.shape[-1]
    tops = _block_maxima(logits, BLOCK)
    if tops.isnan().any():
        logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        tops = _block_maxima(logits, BLOCK)
    start = tops.argmax(-1, keepdim=True) * BLOCK
    ids = (start + torch.arange(BLOCK, device=logits.device)).clamp_(max=vocab - 1)
    token = start + logits.gather(1, ids).argmax(-1, keepdim=True)
    return _certain(token, tops.amax(-1, keepdim=True), from_probs)


def _certain(token: Tensor, value: Tensor, from_probs: bool) -> Pick:
    """A token that is drawn with probability one, if it is possible at all."""
    weight = (value > (0.0 if from_probs else -torch.inf)).to(torch.float32)
    return token, weight, weight


# Parts.

def ordered(scores: Tensor) -> Tensor:
    """int32 in the same order as the float32 scores; -0.0 is 0.0."""
    bits = (scores + 0.0).view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def best(scores: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The `most` highest scores of each row and their token ids, highest first, equal ones by token id.

    They lie in the blocks with the highest maxima, equal ones by position: whatever lies in another block has
    `most` such maxima ranked before it. So a maximum of each block and few scores are all that is looked at.
    """
    vocab = scores.shape[-1]
    width = 1 << (vocab // most).bit_length() // 2
    if width < 4:
        ids = _first(scores, torch.arange(vocab, device=scores.device), most)
        return scores.gather(1, ids), ids
    tops = _block_maxima(scores, width)
    blocks = _first(tops, torch.arange(tops.shape[-1], device=scores.device), most)
    ids = (blocks[..., None] * width + torch.arange(width, device=scores.device)).flatten(1)
    part = scores.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, -torch.inf)  # a short last block
    ids = _first(part, ids, most)
    return scores.gather(1, ids), ids


def _first(scores: Tensor, ids: Tensor, most: int) -> Tensor:
    """The ids of the `most` highest scores, equal ones by id. Score and id in one key: topk knows no order among ties."""
    keys = ordered(scores).to(torch.int64) << 32 | 0x7FFFFFFF - ids
    return 0x7FFFFFFF - (keys.topk(most).values & 0xFFFFFFFF)


def _block_maxima(x: Tensor, width: int) -> Tensor:
    """(batch, blocks); the last block may be shorter."""
    whole = x.shape[-1] // width * width
    tops = x[:, :whole].unflatten(1, (-1, width)).amax(-1)
    return tops if whole == x.shape[-1] else torch.cat([tops, x[:, whole:].amax(-1, keepdim=True)], -1)


def _draw_among(weights: Tensor, ids: Tensor, uniform: Tensor) -> Pick:
    """The draw over a few tokens, put in the order of their ids."""
    ids, order = ids.sort(dim=-1)
    weights = weights.gather(1, order)
    column = draw(weights, uniform)
    return ids.gather(1, column), weights.gather(1, column), weights.sum(-1, keepdim=True)


def draw_in_blocks(weights: Tensor, uniform: Tensor) -> Pick:
    """The draw over many tokens: first the block, then the token in it. Summed in float64, like any draw."""
    wide, vocab = uniform.dtype, weights.shape[-1]
    split = pad(weights, (0, -vocab % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = split.sum(-1, dtype=wide)
    up_to = sums.cumsum(-1)
    total = up_to[:, -1:]
    block = first_beyond(sums, up_to, uniform * total)
    inside = split.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].to(wide)
    rest = uniform * total - pad(up_to, (1, -1)).gather(1, block)
    column = first_beyond(inside, inside.cumsum(-1), rest)
    return block * BLOCK + column, inside.gather(1, column), total


# Declarations.

def _sort() -> Callable[..., Any]:
    return sampler(by_sort)


def _top_k() -> Callable[..., Any]:
    return sampler(by_top_k)


def _top_k_rows() -> Callable[..., Any]:
    return sampler(by_top_k_rows)


def _threshold() -> Callable[..., Any]:
    return sampler(by_mass)


def _cdf() -> Callable[..., Any]:
    return sampler(by_cdf)


def _as_given(logits: Tensor, temperature: float, temperature_rows: Tensor | None, from_probs: bool) -> Tensor:
    return logits


def _argmax() -> Callable[..., Any]:
    return sampler(by_highest, _as_given)


def _greedy() -> Callable[..., Any]:
    return sampler(by_highest_block, _as_given)


NARROW = dtypes("float16", "bfloat16", "float32")                       # scores of up to 32 bits fit a key with their id
GREEDY = (absent("temperature_rows.dtype"), absent("top_k_rows.dtype"),
          any_of(equals("top_k", 1), equals("temperature", 0.0)))
NO_TOP_K = (equals("top_k", 0), absent("top_k_rows.dtype"))

KERNELS = (
    Kernel("torch.sample_sort", sample, _sort, prior=1.5, overhead_us=60.0, baseline=True,
           workspace="56 * batch * vocab"),
    Kernel("torch.sample_topk", sample, _top_k, prior=20.0, overhead_us=90.0, workspace="8 * batch * vocab", requires=(
        NARROW, at_least("top_k", 1), at_most("top_k", 1024), absent("top_k_rows.dtype"))),
    Kernel("torch.sample_topk_rows", sample, _top_k_rows, prior=10.0, overhead_us=100.0, graph_safe=False,
           traceable=False, workspace="56 * batch * vocab", requires=(NARROW, present("top_k_rows.dtype")),
           note="reads the largest k on the host; sorts where it is large"),
    Kernel("torch.sample_threshold", sample, _threshold, prior=10.0, overhead_us=150.0, graph_safe=False,
           traceable=False, workspace="32 * batch * vocab", requires=(
               device("cpu"), NARROW, *NO_TOP_K, at_least("vocab", 4096)),
           note="how far it looks depends on the logits"),
    Kernel("torch.sample_cdf", sample, _cdf, prior=12.0, overhead_us=60.0, workspace="12 * batch * vocab", requires=(
        *NO_TOP_K, differs("temperature", 0.0), absent("temperature_rows.dtype"), equals("top_p", 1.0),
        absent("top_p_rows.dtype"), equals("min_p", 0.0), absent("min_p_rows.dtype"))),
    Kernel("torch.sample_argmax", sample, _argmax, prior=12.0, overhead_us=20.0, workspace="4 * batch * vocab",
           requires=GREEDY),
    Kernel("torch.sample_greedy", sample, _greedy, prior=40.0, overhead_us=25.0, graph_safe=False, traceable=False,
           requires=(device("cpu"), *GREEDY), note="looks for NaN on the host"),
)
