"""Sampling and speculative verification with torch alone.

All kernels of lz.sample end in the same draw over the same weights, so they return the same tokens; they differ in how
they find what the filters keep. torch's full sort is slow on the CPU, and hardly ever needed: the k highest scores lie
in the k blocks with the highest maxima, and a histogram of the mass finds where top-p cuts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, threshold

from ..ops.formulas.sampling import (
    Filters,
    Penalties,
    columns_of,
    draw,
    filters,
    first_beyond,
    kept,
    normalised,
    one_hot,
    orderly,
    pay,
    penalised,
    per_row,
    possible,
    random_numbers,
    residual,
    scores_of,
    weights_of,
)
from ..ops.sample import OP as sample
from ..ops.speculative_verify import OP as speculative_verify
from ..ops.speculative_verify_tree import OP as speculative_verify_tree
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ..spec.rules import absent, any_of, at_least, at_most, device, differs, dtypes, equals, present

BLOCK = 64
FIRST_LOOK = 128               # of the highest scores, before the whole distribution
BIN_BITS = 17                  # what a bin of the histogram leaves out of a float32
BINS = 1 << 31 - BIN_BITS
ID_BITS = (1 << 29) - 1        # what the float64 of a float32 leaves free

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
    ranked, ids = best(scores, by.most, from_probs)
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
    """top-p and min-p. The highest scores usually hold all that is kept; only rows of wider spread look at the rest."""
    light = scores if from_probs else scores.exp()
    total = light.sum(-1, keepdim=True, dtype=uniform.dtype)
    ranked, ids = best(scores, FIRST_LOOK, from_probs)
    weights = weights_of(ranked, from_probs)
    pick = _draw_among(torch.where(kept(weights, by, total), weights, 0.0), ids, uniform)
    enough = (weights.sum(-1, keepdim=True) >= by.top_p * total) | (weights[:, -1:] < by.min_p * weights[:, :1])
    if not enough.all():
        top_p, min_p = (f.tolist() if isinstance(f, Tensor) else [[f]] * len(scores) for f in (by.top_p, by.min_p))
        wider = ~(enough | torch.as_tensor(by.top_k == 1))
        for row in wider[:, 0].nonzero()[:, 0].tolist():
            weights = _nucleus(scores[row], light[row], top_p[row][0], float(total[row]), min_p[row][0], from_probs)
            for whole, part in zip(pick, draw_in_blocks(weights[None], uniform[row:row + 1])):
                whole[row] = part[0]
    return pick


def _nucleus(scores: Tensor, light: Tensor, top_p: float, total: float, min_p: float, from_probs: bool) -> Tensor:
    """The weights that top-p and min-p leave of one row. The mass in each bin of scores tells where top-p cuts."""
    if top_p < 1.0:
        bits = scores.view(torch.int32) >> BIN_BITS & BINS - 1             # of the magnitude: log-weights are <= 0
        bins = BINS - 1 - bits if from_probs else bits                     # bin 0 has the highest scores
        up_to = torch.bincount(bins, light.to(torch.float64), BINS).cumsum(0)
        cut = min(int((up_to < top_p * total).sum()), BINS - 1)
        ids = (bins == cut).nonzero()[:, 0]
        ids = ids[scores[ids].sort(descending=True, stable=True).indices]
        before = pad(light[ids].cumsum(0, dtype=torch.float64), (1, 0))[:-1] + (up_to[cut - 1] if cut else 0.0)
        ids = ids[before < top_p * total]
        if from_probs:
            weights = threshold(scores, _float(((BINS - cut) << BIN_BITS) - 1), 0.0)
        else:
            weights = threshold(scores, -_float(cut << BIN_BITS), -torch.inf).exp_()
        weights[ids] = light[ids]
    else:
        weights = light
    return weights * (light >= min_p * float(light.max())) if min_p > 0.0 else weights


def _float(bits: int) -> float:
    """The float32 with these bits."""
    value: float = struct.unpack("f", struct.pack("i", bits))[0]
    return value


def by_highest(logits: Tensor, by: Filters, uniform: Tensor, from_probs: bool) -> Pick:
    """Greedy, in torch's words."""
    logits = orderly(logits)
    token = logits.argmax(-1, keepdim=True)
    return _certain(token, logits.gather(1, token), from_probs)


def by_highest_block(logits: Tensor, by: Filters, uniform: Tensor, from_probs: bool) -> Pick:
    """Greedy by the block with the highest maximum: torch's maximum is many times faster than its argmax."""
    vocab = logits.shape[-1]
    tops = _block_maxima(logits, BLOCK)
    if not (tops < torch.inf).all():
        logits = orderly(logits)
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

def best(scores: Tensor, most: int, from_probs: bool) -> tuple[Tensor, Tensor]:
    """The `most` highest scores of each row and their token ids, highest first, equal ones by token id.

    They lie in the blocks with the highest maxima, equal ones by position: whatever lies in another block has
    `most` such maxima ranked before it. So the maximum of each block and few scores are all that is looked at.
    """
    vocab = scores.shape[-1]
    width = 1 << (vocab // most).bit_length() // 2
    if width < 4:
        ids = _first(scores, torch.arange(vocab, device=scores.device), most, from_probs)
        return scores.gather(1, ids), ids
    tops = _block_maxima(scores, width)
    blocks = _first(tops, torch.arange(tops.shape[-1], device=scores.device), most, from_probs)
    ids = (blocks[..., None] * width + torch.arange(width, device=scores.device)).flatten(1)
    if vocab % width == 0:
        part = scores.gather(1, ids)
    else:                                      # a short last block: what is beyond it ranks last
        part = scores.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, 0.0 if from_probs else -torch.inf)
    ids = _first(part, ids, most, from_probs)
    return scores.gather(1, ids), ids


def _first(scores: Tensor, ids: Tensor, most: int, from_probs: bool) -> Tensor:
    """The ids of the `most` highest scores, equal ones by id.

    topk knows no order among ties, so score and id share a key: a float32 leaves the last bits of a float64 zero.
    """
    bits = scores.abs().to(torch.float64).view(torch.int64)                # log-weights are <= 0, probabilities >= 0
    if from_probs:
        return ID_BITS - ((bits | ID_BITS - ids).topk(most).values & ID_BITS)
    return (bits | ids).topk(most, largest=False).values & ID_BITS


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
    split = (pad(weights, (0, -vocab % BLOCK)) if vocab % BLOCK else weights).unflatten(1, (-1, BLOCK))
    sums = split.sum(-1, dtype=wide)
    up_to = sums.cumsum(-1)
    total = up_to[:, -1:]
    block = first_beyond(sums, up_to, uniform * total)
    inside = split.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].to(wide)
    rest = uniform * total - pad(up_to, (1, -1)).gather(1, block)
    column = first_beyond(inside, inside.cumsum(-1), rest)
    return block * BLOCK + column, inside.gather(1, column), total


# Speculative decoding.

def verify_chain(
    draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniforms: Tensor | None = None, *,
    seed: int | None = None, seed_rows: Tensor | None = None, offset: int = 0, generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All positions at once; of the distributions only the one that is drawn from is read in full."""
    batch, drafted = draft_tokens.shape
    uniform = random_numbers(batch, drafted + 1, draft_tokens.device, uniforms, seed, seed_rows, offset, generator)
    real = (draft_tokens >= 0) & (draft_tokens < target_probs.shape[-1])
    tokens = torch.where(real, draft_tokens, 0).to(torch.int64)
    chances = possible(target_probs[:, :drafted].gather(2, tokens[..., None])[..., 0], uniform.dtype)
    claims = uniform[:, :drafted]
    if draft_probs is not None:
        claims = claims * possible(draft_probs.gather(2, tokens[..., None])[..., 0], uniform.dtype)
    going = (real & (claims < chances)).to(torch.int64).cumprod(-1)
    number = going.sum(-1)
    row = torch.arange(batch, device=number.device)
    weights = possible(target_probs[row, number], uniform.dtype)
    if drafted:
        last = number.clamp(max=drafted - 1)
        rejected = ((number < drafted) & real[row, last])[:, None]
        token = tokens[row, last][:, None]
        q = one_hot(token, weights) if draft_probs is None else possible(draft_probs[row, last], uniform.dtype)
        weights = torch.where(rejected, residual(weights, q), weights)
    following, _, total = draw_in_blocks(weights, uniform[:, -1:])
    return torch.where(going > 0, tokens, -1), number, torch.where(total > 0, following, -1)[:, 0]


def verify_tree(
    draft_tokens: Tensor, parents: Tensor, draft_probs: Tensor | None, target_probs: Tensor,
    uniforms: Tensor | None = None, *, without_replacement: bool = False, seed: int | None = None,
    seed_rows: Tensor | None = None, offset: int = 0, generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each row walks down its tree: only distributions of nodes on the path are read, and few of them change."""
    batch, count = draft_tokens.shape
    vocab, wide = target_probs.shape[-1], torch.float64
    uniform = random_numbers(batch, count + 1, draft_tokens.device, uniforms, seed, seed_rows, offset, generator)
    chances = uniform.tolist()
    paths: list[list[int]] = []
    ends = []
    for row, (tokens, above) in enumerate(zip(draft_tokens.tolist(), parents.tolist())):
        path: list[int] = []
        at, p = -1, normalised(possible(target_probs[row, 0], wide))
        q = None if draft_probs is None else normalised(possible(draft_probs[row, 0], wide))
        for node in range(count):
            token = tokens[node]
            if above[node] != at or not 0 <= token < vocab:
                continue
            if chances[row][node] * (1.0 if q is None else float(q[token])) < float(p[token]):
                path.append(node)
                at, p = node, normalised(possible(target_probs[row, node + 1], wide))
                q = None if draft_probs is None else normalised(possible(draft_probs[row, node + 1], wide))
                continue
            drafted = one_hot(draft_tokens[row, node].view(1, 1).to(torch.int64), p[None])[0] if q is None else q
            p = normalised(residual(p, drafted))
            if without_replacement and q is not None:
                q[token] = 0.0
                q = normalised(q)
        paths.append(path)
        ends.append(p)
    weights = torch.stack(ends) if ends else target_probs.new_empty((0, vocab), dtype=wide)
    following, _, total = draw_in_blocks(weights, uniform[:, -1:])
    nodes = torch.tensor([path + [-1] * (count - len(path)) for path in paths], dtype=torch.int64).view(batch, count)
    accepted = torch.where(nodes >= 0, draft_tokens.to(torch.int64).gather(1, nodes.clamp(min=0)), -1)
    return accepted, nodes, (nodes >= 0).sum(-1), torch.where(total > 0, following, -1)[:, 0]


def _verify_chain() -> Callable[..., Any]:
    return verify_chain


def _verify_tree() -> Callable[..., Any]:
    return verify_tree


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
    return scores_of(logits, temperature, temperature_rows, from_probs) if from_probs else logits


def _argmax() -> Callable[..., Any]:
    return sampler(by_highest, _as_given)


def _greedy() -> Callable[..., Any]:
    return sampler(by_highest_block, _as_given)


# A score of up to 32 bits and its id fit a float64.
NARROW = (dtypes("float16", "bfloat16", "float32"), differs("device", "mps", Code.PLATFORM_MISMATCH))
GREEDY = (absent("temperature_rows.dtype"), absent("top_k_rows.dtype"),
          any_of(equals("top_k", 1), equals("temperature", 0.0)))
NO_TOP_K = (equals("top_k", 0), absent("top_k_rows.dtype"))

# Measured on a CPU, where a sort takes a hundred times as long as reading the logits.
KERNELS = (
    Kernel("torch.sample_sort", sample, _sort, prior=0.012, overhead_us=60.0, baseline=True,
           workspace="56 * batch * vocab"),
    Kernel("torch.sample_topk", sample, _top_k, prior=0.8, overhead_us=90.0, baseline=True,
           workspace="8 * batch * vocab", requires=(
        *NARROW, at_least("top_k", 1), at_most("top_k", 1024), absent("top_k_rows.dtype"))),
    Kernel("torch.sample_topk_rows", sample, _top_k_rows, prior=0.4, overhead_us=100.0, graph_safe=False,
           less_work="sorts the largest only",
           traceable=False, workspace="56 * batch * vocab", requires=(*NARROW, present("top_k_rows.dtype")),
           note="reads the largest k on the host; sorts where it is large"),
    Kernel("torch.sample_threshold", sample, _threshold, prior=0.5, overhead_us=150.0, graph_safe=False,
           less_work="sorts the largest only",
           traceable=False, workspace="32 * batch * vocab", requires=(
               device("cpu"), *NARROW, *NO_TOP_K, at_least("vocab", 4096)),
           note="how far it looks depends on the logits"),
    Kernel("torch.sample_cdf", sample, _cdf, prior=0.9, overhead_us=60.0, baseline=True,
           workspace="12 * batch * vocab", requires=(
        *NO_TOP_K, differs("temperature", 0.0), absent("temperature_rows.dtype"), equals("top_p", 1.0),
        absent("top_p_rows.dtype"), equals("min_p", 0.0), absent("min_p_rows.dtype"))),
    Kernel("torch.sample_argmax", sample, _argmax, prior=0.8, overhead_us=20.0, baseline=True,
           workspace="4 * batch * vocab", requires=GREEDY),
    Kernel("torch.sample_greedy", sample, _greedy, prior=4.0, overhead_us=25.0, graph_safe=False, traceable=False,
           less_work="one pass over the logits, and no copy in float32",
           requires=(device("cpu"), *GREEDY), note="looks for NaN and infinity on the host"),
    Kernel("torch.speculative_verify", speculative_verify, _verify_chain, prior=4.0, overhead_us=80.0, baseline=True,
           workspace="40 * batch * vocab"),
    Kernel("torch.speculative_verify_tree", speculative_verify_tree, _verify_tree, prior=4.0, overhead_us=100.0,
           baseline=True, graph_safe=False, traceable=False, workspace="40 * batch * vocab",
           requires=(device("cpu"), at_least("vocab", 4096)), note="walks each row's tree on the host"),
)
