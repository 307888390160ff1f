"""Sampling and speculative verification with torch alone.

All kernels of lz.sample end in the same draw over the same weights, so they return the same tokens;
they differ in how they find what the filters keep. torch's full sort is slow on the CPU, and rarely
needed: the k highest scores are in the k blocks with the highest maxima, and a histogram of the
mass finds the cut of top-p.
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
    apply_penalties,
    clean_probs,
    draw,
    first_beyond,
    keep_mask,
    make_filters,
    normalize,
    one_hot,
    penalize,
    random_numbers,
    rank_scores,
    replace_nonfinite,
    residual_weights,
    scalar_or_column,
    token_columns,
    token_weights,
)
from ..ops.sample import OP as sample
from ..ops.speculative_verify import OP as speculative_verify
from ..ops.speculative_verify_tree import OP as speculative_verify_tree
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code

BLOCK = 64
FIRST_LOOK = 128               # highest scores that are tried before the whole distribution
BIN_BITS = 17                  # low bits of a float32 that a bin of the histogram ignores
BINS = 1 << 31 - BIN_BITS
ID_BITS = (1 << 29) - 1        # bits of a float64 that a float32 leaves zero

# token, its weight, the total weight: each (batch, 1)
Selection = tuple[Tensor, Tensor, Tensor]


def make_sampler(choose: Callable[[Tensor, Filters, Tensor, bool], Selection],
                 prepare: Callable[[Tensor, float, Tensor | None, bool],
                                   Tensor] = rank_scores) -> Callable[..., Any]:
    """Returns a kernel that selects tokens by `choose`; the steps before and after are shared."""
    def run(
        logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, *, repetition_penalty: float = 1.0, presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0, history: Tensor | None = None,
        token_counts: Tensor | None = None, temperature_rows: Tensor | None = None,
        top_k_rows: Tensor | None = None, top_p_rows: Tensor | None = None,
        min_p_rows: Tensor | None = None, repetition_penalty_rows: Tensor | None = None,
        presence_penalty_rows: Tensor | None = None, frequency_penalty_rows: Tensor | None = None,
        uniforms: Tensor | None = None, seed: int | None = None,
        seed_rows: Tensor | None = None, offset: int = 0, generator: torch.Generator | None = None,
        from_probs: bool = False, return_logprobs: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        batch, vocab = logits.shape
        uniform = random_numbers(batch, 1, logits.device, uniforms, seed, seed_rows, offset,
                                 generator)
        logits = logits.detach()
        if history is not None or token_counts is not None:
            logits = _apply_penalties(logits, history, token_counts, Penalties(
                scalar_or_column(repetition_penalty, repetition_penalty_rows),
                scalar_or_column(presence_penalty, presence_penalty_rows),
                scalar_or_column(frequency_penalty, frequency_penalty_rows)))
        filters = make_filters(vocab, temperature, top_k, top_p, min_p, temperature_rows,
                               top_k_rows, top_p_rows, min_p_rows, uniform.dtype)
        scores = prepare(logits, temperature, temperature_rows, from_probs)
        token, chosen, total = choose(scores, filters, uniform, from_probs)
        is_possible = total > 0
        tokens = torch.where(is_possible, token, -1)[:, 0]
        if not return_logprobs:
            return tokens
        logprobs = torch.where(is_possible, chosen.log() - total.log(), -torch.inf)[:, 0]
        return tokens, logprobs.to(torch.promote_types(logits.dtype, torch.float32))

    return run


def _apply_penalties(logits: Tensor, history: Tensor | None, token_counts: Tensor | None,
                     penalties: Penalties) -> Tensor:
    """Applies penalties; a history alone touches only its tokens (duplicates write one value)."""
    if history is None or token_counts is not None:
        return apply_penalties(logits, history, token_counts, penalties)
    vocab = logits.shape[-1]
    columns = token_columns(history, vocab)
    x = pad(logits.to(torch.promote_types(logits.dtype, torch.float32)), (0, 1))
    counts = torch.zeros_like(x).scatter_add_(1, columns,
                                              torch.ones_like(columns, dtype=x.dtype)).gather(
                                                  1, columns)
    return x.scatter_(1, columns, penalize(x.gather(1, columns), counts > 0, counts, penalties))[
        :, :vocab]


# Selection.

def select_by_sort(scores: Tensor, filters: Filters, uniform: Tensor,
                   from_probs: bool) -> Selection:
    """Selects by a full sort."""
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    weights = token_weights(ranked, from_probs)
    weights = torch.zeros_like(weights).scatter(1, order,
                                                torch.where(keep_mask(weights, filters), weights,
                                                            0.0))
    token = draw(weights, uniform)
    return token, weights.gather(1, token), weights.sum(-1, keepdim=True)


def select_top_k(scores: Tensor, filters: Filters, uniform: Tensor, from_probs: bool) -> Selection:
    """Selects among the k highest scores."""
    if filters.max_top_k * 4 > scores.shape[-1]:
        return select_by_sort(scores, filters, uniform, from_probs)
    ranked, ids = top_scores(scores, filters.max_top_k, from_probs)
    weights = token_weights(ranked, from_probs)
    return _draw_among(torch.where(keep_mask(weights, filters), weights, 0.0), ids, uniform)


def select_top_k_rows(scores: Tensor, filters: Filters, uniform: Tensor,
                      from_probs: bool) -> Selection:
    """Selects among the k highest scores, with one k per row."""
    if isinstance(filters.top_k, Tensor) and len(filters.top_k):
        filters = filters._replace(max_top_k=int(filters.top_k.max()))
    return select_top_k(scores, filters, uniform, from_probs)


def draw_unfiltered(scores: Tensor, filters: Filters, uniform: Tensor,
                    from_probs: bool) -> Selection:
    """Draws without a filter."""
    return draw_in_blocks(scores if from_probs else scores.exp(), uniform)


def select_by_mass(scores: Tensor, filters: Filters, uniform: Tensor,
                   from_probs: bool) -> Selection:
    """Selects by top-p and min-p among the highest scores; flatter rows use the histogram."""
    probs = scores if from_probs else scores.exp()
    total = probs.sum(-1, keepdim=True, dtype=uniform.dtype)
    ranked, ids = top_scores(scores, FIRST_LOOK, from_probs)
    weights = token_weights(ranked, from_probs)
    selection = _draw_among(torch.where(keep_mask(weights, filters, total), weights, 0.0), ids,
                            uniform)
    has_top_p = weights.sum(-1, keepdim=True) >= filters.top_p * total
    enough = has_top_p | (weights[:, -1:] < filters.min_p * weights[:, :1])
    if not enough.all():
        top_p, min_p = (f.tolist() if isinstance(f, Tensor) else [[f]] * len(scores)
                        for f in (filters.top_p, filters.min_p))
        wider = ~(enough | torch.as_tensor(filters.top_k == 1))
        for row in wider[:, 0].nonzero()[:, 0].tolist():
            weights = _nucleus(scores[row], probs[row], top_p[row][0], float(total[row]),
                               min_p[row][0], from_probs)
            for column, row_value in zip(selection,
                                         draw_in_blocks(weights[None], uniform[row:row + 1])):
                column[row] = row_value[0]
    return selection


def _nucleus(scores: Tensor, probs: Tensor, top_p: float, total: float, min_p: float,
             from_probs: bool) -> Tensor:
    """Returns a row's weights that top-p and min-p keep; a histogram of mass finds top-p's cut."""
    if top_p < 1.0:
        # of the magnitude, as log-weights are <= 0
        bits = scores.view(torch.int32) >> BIN_BITS & BINS - 1
        # bin 0 has the highest scores
        bins = BINS - 1 - bits if from_probs else bits
        cumulative = torch.bincount(bins, probs.to(torch.float64), BINS).cumsum(0)
        cut = min(int((cumulative < top_p * total).sum()), BINS - 1)
        ids = (bins == cut).nonzero()[:, 0]
        ids = ids[scores[ids].sort(descending=True, stable=True).indices]
        before = pad(probs[ids].cumsum(0, dtype=torch.float64),
                     (1, 0))[:-1] + (cumulative[cut - 1] if cut else 0.0)
        ids = ids[before < top_p * total]
        if from_probs:
            weights = threshold(scores, _float_from_bits(((BINS - cut) << BIN_BITS) - 1), 0.0)
        else:
            weights = threshold(scores, -_float_from_bits(cut << BIN_BITS), -torch.inf).exp_()
        weights[ids] = probs[ids]
    else:
        weights = probs
    return weights * (probs >= min_p * float(probs.max())) if min_p > 0.0 else weights


def _float_from_bits(bits: int) -> float:
    """Returns the float32 with these bits."""
    value: float = struct.unpack("f", struct.pack("i", bits))[0]
    return value


def select_argmax(logits: Tensor, filters: Filters, uniform: Tensor, from_probs: bool) -> Selection:
    """Selects the highest logit by torch's argmax."""
    logits = replace_nonfinite(logits)
    token = logits.argmax(-1, keepdim=True)
    return _certain_token(token, logits.gather(1, token), from_probs)


def select_argmax_by_block(logits: Tensor, filters: Filters, uniform: Tensor,
                           from_probs: bool) -> Selection:
    """Selects the highest logit in the block of the highest maximum: amax is faster than argmax."""
    vocab = logits.shape[-1]
    tops = _block_maxima(logits, BLOCK)
    if not (tops < torch.inf).all():
        logits = replace_nonfinite(logits)
        tops = _block_maxima(logits, BLOCK)
    start = tops.argmax(-1, keepdim=True) * BLOCK
    ids = (start + torch.arange(BLOCK, device=logits.device)).clamp_(max=vocab - 1)
    token = start + logits.gather(1, ids).argmax(-1, keepdim=True)
    return _certain_token(token, tops.amax(-1, keepdim=True), from_probs)


def _certain_token(token: Tensor, value: Tensor, from_probs: bool) -> Selection:
    """Returns a token of probability one, or of weight 0 if it is impossible."""
    weight = (value > (0.0 if from_probs else -torch.inf)).to(torch.float32)
    return token, weight, weight


# Parts of the selections.

def top_scores(scores: Tensor, k: int, from_probs: bool) -> tuple[Tensor, Tensor]:
    """Returns the `k` highest scores of each row and their token ids, in descending order, ties by
    token id.

    They are in the `k` blocks with the highest maxima, ties by position: any score in another block
    has `k` such maxima ranked before it. So only the maxima of the blocks and a few scores are
    compared.
    """
    vocab = scores.shape[-1]
    width = 1 << (vocab // k).bit_length() // 2
    if width < 4:
        ids = _top_ids(scores, torch.arange(vocab, device=scores.device), k, from_probs)
        return scores.gather(1, ids), ids
    tops = _block_maxima(scores, width)
    blocks = _top_ids(tops, torch.arange(tops.shape[-1], device=scores.device), k, from_probs)
    ids = (blocks[..., None] * width + torch.arange(width, device=scores.device)).flatten(1)
    if vocab % width == 0:
        part = scores.gather(1, ids)
    else:                                      # a short last block: padding ranks last
        part = scores.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab,
                                                                       0.0 if from_probs
                                                                       else -torch.inf)
    ids = _top_ids(part, ids, k, from_probs)
    return scores.gather(1, ids), ids


def _top_ids(scores: Tensor, ids: Tensor, k: int, from_probs: bool) -> Tensor:
    """Returns the ids of the `k` highest scores, ties by id. topk does not order ties, so score and
    id are combined in one key: a float32 leaves the low bits of a float64 zero."""
    # log-weights are <= 0, probabilities >= 0
    bits = scores.abs().to(torch.float64).view(torch.int64)
    if from_probs:
        return ID_BITS - ((bits | ID_BITS - ids).topk(k).values & ID_BITS)
    return (bits | ids).topk(k, largest=False).values & ID_BITS


def _block_maxima(x: Tensor, width: int) -> Tensor:
    """Returns (batch, blocks) maxima; the last block may be shorter."""
    whole = x.shape[-1] // width * width
    tops = x[:, :whole].unflatten(1, (-1, width)).amax(-1)
    return (tops if whole == x.shape[-1] else torch.cat([tops, x[:, whole:].amax(-1, keepdim=True)],
                                                        -1))


def _draw_among(weights: Tensor, ids: Tensor, uniform: Tensor) -> Selection:
    """Draws among a few tokens, in the order of their ids."""
    ids, order = ids.sort(dim=-1)
    weights = weights.gather(1, order)
    column = draw(weights, uniform)
    return ids.gather(1, column), weights.gather(1, column), weights.sum(-1, keepdim=True)


def draw_in_blocks(weights: Tensor, uniform: Tensor) -> Selection:
    """Draws among many tokens: first the block, then the token in it, with sums in float64."""
    acc_dtype, vocab = uniform.dtype, weights.shape[-1]
    split = (pad(weights, (0, -vocab % BLOCK)) if vocab % BLOCK
             else weights).unflatten(1, (-1, BLOCK))
    sums = split.sum(-1, dtype=acc_dtype)
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1:]
    block = first_beyond(sums, cumulative, uniform * total)
    inside = split.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].to(acc_dtype)
    rest = uniform * total - pad(cumulative, (1, -1)).gather(1, block)
    column = first_beyond(inside, inside.cumsum(-1), rest)
    return block * BLOCK + column, inside.gather(1, column), total


# Speculative decoding.

def verify_chain(
    draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor,
    uniforms: Tensor | None = None, *, seed: int | None = None, seed_rows: Tensor | None = None,
    offset: int = 0, generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verifies all positions at once; only the distribution that is drawn from is read in full."""
    batch, drafted = draft_tokens.shape
    uniform = random_numbers(batch, drafted + 1, draft_tokens.device, uniforms, seed, seed_rows,
                             offset, generator)
    in_vocab = (draft_tokens >= 0) & (draft_tokens < target_probs.shape[-1])
    tokens = torch.where(in_vocab, draft_tokens, 0).to(torch.int64)
    target_p = clean_probs(target_probs[:, :drafted].gather(2, tokens[..., None])[..., 0],
                           uniform.dtype)
    thresholds = uniform[:, :drafted]
    if draft_probs is not None:
        thresholds = thresholds * clean_probs(draft_probs.gather(2, tokens[..., None])[..., 0],
                                              uniform.dtype)
    accepted = (in_vocab & (thresholds < target_p)).to(torch.int64).cumprod(-1)
    number = accepted.sum(-1)
    row = torch.arange(batch, device=number.device)
    weights = clean_probs(target_probs[row, number], uniform.dtype)
    if drafted:
        last = number.clamp(max=drafted - 1)
        rejected = ((number < drafted) & in_vocab[row, last])[:, None]
        token = tokens[row, last][:, None]
        q = (one_hot(token, weights) if draft_probs is None
             else clean_probs(draft_probs[row, last], uniform.dtype))
        weights = torch.where(rejected, residual_weights(weights, q), weights)
    following, _, total = draw_in_blocks(weights, uniform[:, -1:])
    return torch.where(accepted > 0, tokens, -1), number, torch.where(total > 0, following,
                                                                      -1)[:, 0]


def verify_tree(
    draft_tokens: Tensor, parents: Tensor, draft_probs: Tensor | None, target_probs: Tensor,
    uniforms: Tensor | None = None, *, without_replacement: bool = False, seed: int | None = None,
    seed_rows: Tensor | None = None, offset: int = 0, generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walks down each row's tree; only distributions of nodes on the path are read."""
    batch, count = draft_tokens.shape
    vocab, acc_dtype = target_probs.shape[-1], torch.float64
    uniform = random_numbers(batch, count + 1, draft_tokens.device, uniforms, seed, seed_rows,
                             offset, generator)
    uniforms_of_rows = uniform.tolist()
    paths: list[list[int]] = []
    ends = []
    for row, (tokens, parents_of_row) in enumerate(zip(draft_tokens.tolist(), parents.tolist())):
        path: list[int] = []
        last_node, p = -1, normalize(clean_probs(target_probs[row, 0], acc_dtype))
        q = None if draft_probs is None else normalize(clean_probs(draft_probs[row, 0], acc_dtype))
        for node in range(count):
            token = tokens[node]
            if parents_of_row[node] != last_node or not 0 <= token < vocab:
                continue
            if uniforms_of_rows[row][node] * (1.0 if q is None
                                              else float(q[token])) < float(p[token]):
                path.append(node)
                last_node, p = node, normalize(clean_probs(target_probs[row, node + 1], acc_dtype))
                q = (None if draft_probs is None
                     else normalize(clean_probs(draft_probs[row, node + 1], acc_dtype)))
                continue
            drafted = (one_hot(draft_tokens[row, node].view(1, 1).to(torch.int64), p[None])[0]
                       if q is None else q)
            p = normalize(residual_weights(p, drafted))
            if without_replacement and q is not None:
                q[token] = 0.0
                q = normalize(q)
        paths.append(path)
        ends.append(p)
    weights = torch.stack(ends) if ends else target_probs.new_empty((0, vocab), dtype=acc_dtype)
    following, _, total = draw_in_blocks(weights, uniform[:, -1:])
    nodes = torch.tensor([path + [-1] * (count - len(path)) for path in paths],
                         dtype=torch.int64).view(batch, count)
    accepted = torch.where(nodes >= 0, draft_tokens.to(torch.int64).gather(1, nodes.clamp(min=0)),
                           -1)
    return accepted, nodes, (nodes >= 0).sum(-1), torch.where(total > 0, following, -1)[:, 0]


def _verify_chain() -> Callable[..., Any]:
    return verify_chain


def _verify_tree() -> Callable[..., Any]:
    return verify_tree


# Loaders.

def _sort() -> Callable[..., Any]:
    return make_sampler(select_by_sort)


def _top_k() -> Callable[..., Any]:
    return make_sampler(select_top_k)


def _top_k_rows() -> Callable[..., Any]:
    return make_sampler(select_top_k_rows)


def _threshold() -> Callable[..., Any]:
    return make_sampler(select_by_mass)


def _cdf() -> Callable[..., Any]:
    return make_sampler(draw_unfiltered)


def _keep_logits(logits: Tensor, temperature: float, temperature_rows: Tensor | None,
                 from_probs: bool) -> Tensor:
    return rank_scores(logits, temperature, temperature_rows, from_probs) if from_probs else logits


def _argmax() -> Callable[..., Any]:
    return make_sampler(select_argmax, _keep_logits)


def _greedy() -> Callable[..., Any]:
    return make_sampler(select_argmax_by_block, _keep_logits)


# A score of up to 32 bits and its id fit into a float64.
NARROW = (r.dtypes("float16", "bfloat16", "float32"),
          r.differs("device", "mps", Code.PLATFORM_MISMATCH))
GREEDY = (r.absent("temperature_rows.dtype"), r.absent("top_k_rows.dtype"),
          r.any_of(r.equals("top_k", 1), r.equals("temperature", 0.0)))
NO_TOP_K = (r.equals("top_k", 0), r.absent("top_k_rows.dtype"))

# Priors measured on a CPU, where a sort takes a hundred times as long as reading the logits.
KERNELS = (
    Kernel("torch.sample_sort", sample, _sort, prior=0.012, overhead_us=60.0, baseline=True,
           workspace="56 * batch * vocab"),
    Kernel("torch.sample_topk", sample, _top_k, prior=0.8, overhead_us=90.0, baseline=True,
           workspace="8 * batch * vocab", requires=(
        *NARROW, r.at_least("top_k", 1), r.at_most("top_k", 1024), r.absent("top_k_rows.dtype"))),
    Kernel("torch.sample_topk_rows", sample, _top_k_rows, prior=0.4, overhead_us=100.0,
           graph_safe=False, less_work="sorts the largest only",
           less_work_when=(r.at_least("vocab", 4096),),
           traceable=False, workspace="56 * batch * vocab",
           requires=(*NARROW, r.present("top_k_rows.dtype")),
           note="reads the largest k on the host; sorts where it is large"),
    Kernel("torch.sample_threshold", sample, _threshold, prior=0.5, overhead_us=150.0,
           graph_safe=False, less_work="sorts the largest only",
           traceable=False, workspace="32 * batch * vocab", requires=(
               r.device("cpu"), *NARROW, *NO_TOP_K, r.at_least("vocab", 4096)),
           note="how far it looks depends on the logits"),
    Kernel("torch.sample_cdf", sample, _cdf, prior=0.9, overhead_us=60.0, baseline=True,
           workspace="12 * batch * vocab", requires=(
        *NO_TOP_K, r.differs("temperature", 0.0), r.absent("temperature_rows.dtype"),
        r.equals("top_p", 1.0), r.absent("top_p_rows.dtype"), r.equals("min_p", 0.0),
        r.absent("min_p_rows.dtype"))),
    Kernel("torch.sample_argmax", sample, _argmax, prior=0.8, overhead_us=20.0, baseline=True,
           workspace="4 * batch * vocab", requires=GREEDY),
    Kernel("torch.sample_greedy", sample, _greedy, prior=4.0, overhead_us=25.0, graph_safe=False,
           traceable=False,
           less_work="one pass over the logits, and no copy in float32",
           # some more calls of torch; the copy of a smaller vocabulary takes less time than those
           less_work_when=(r.at_least("vocab", 32000),),
           requires=(r.device("cpu"), *GREEDY), note="looks for NaN and infinity on the host"),
    Kernel("torch.speculative_verify", speculative_verify, _verify_chain, prior=4.0,
           overhead_us=80.0, baseline=True, workspace="40 * batch * vocab"),
    Kernel("torch.speculative_verify_tree", speculative_verify_tree, _verify_tree, prior=4.0,
           overhead_us=100.0, baseline=True, graph_safe=False, traceable=False,
           workspace="40 * batch * vocab", requires=(r.device("cpu"), r.at_least("vocab", 4096)),
           note="walks each row's tree on the host"),
)
