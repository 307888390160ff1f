"""Speculative decoding: a draft model proposes, the target model verifies; the result is
distributed as the target's.

`verify` and `verify_tree` are the ops with named results. `generate` is the loop over two models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch.dispatcher import public_function
from ..ops.formulas.sampling import distribution
from ..ops.sample import OP as _sample
from ..ops.speculative_verify import OP as _chain
from ..ops.speculative_verify_tree import OP as _tree
from ..spec.errors import InvalidCall
from ..spec.reason import Code, Reason

DraftStep = Callable[[Tensor, Tensor], Tensor]
TargetStep = Callable[[Tensor, Tensor, int], Tensor]


class Verified(NamedTuple):
    tokens: Tensor             # (batch, drafted): the accepted ones, then -1
    counts: Tensor             # (batch,): how many were accepted
    next_token: Tensor         # (batch,): drawn after the accepted ones


class VerifiedTree(NamedTuple):
    tokens: Tensor             # (batch, nodes): the accepted path, then -1
    # (batch, nodes): their nodes in the tree, to keep their part of the KV cache
    nodes: Tensor
    counts: Tensor
    next_token: Tensor


def verify(draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor,
           uniforms: Tensor | None = None, *, seed: int | None = None,
           seed_rows: Tensor | None = None, offset: int = 0,
           generator: torch.Generator | None = None) -> Verified:
    """Returns which tokens of a draft (batch, drafted) to keep, and the next one. See
    lz.speculative_verify."""
    return Verified(*public_function(_chain)(
        draft_tokens, draft_probs, target_probs, uniforms, seed=seed, seed_rows=seed_rows,
        offset=offset, generator=generator))


def verify_tree(draft_tokens: Tensor, parents: Tensor, draft_probs: Tensor | None,
                target_probs: Tensor, uniforms: Tensor | None = None, *,
                without_replacement: bool = False, seed: int | None = None,
                seed_rows: Tensor | None = None, offset: int = 0,
                generator: torch.Generator | None = None) -> VerifiedTree:
    """Returns which path of a tree to keep, and the next token. See lz.speculative_verify_tree.

    `parents` (nodes,) is one tree for all rows, (batch, nodes) one for each.
    """
    if isinstance(parents, Tensor) and parents.dim() == 1 and isinstance(draft_tokens, Tensor):
        parents = parents.expand(len(draft_tokens), -1)
    return VerifiedTree(*public_function(_tree)(
        draft_tokens, parents, draft_probs, target_probs, uniforms,
        without_replacement=without_replacement, seed=seed,
        seed_rows=seed_rows, offset=offset, generator=generator))


def tree_attention_mask(parents: Tensor, context_len: int = 0) -> Tensor:
    """Returns a mask, True where a node of the tree attends: the whole context, its ancestors and
    itself.

    (nodes, context_len + nodes) for parents (nodes,), and (batch, 1, nodes, context_len + nodes)
    for (batch, nodes): an attn_mask of lz.attention, with the nodes as queries and the context
    before them in the keys.
    """
    ancestors = _ancestors("speculative.tree_attention_mask", parents)
    context = ancestors.new_ones((*ancestors.shape[:2], context_len))
    mask = torch.cat([context, ancestors], -1)
    return mask[0] if parents.dim() == 1 else mask[:, None]


def tree_positions(parents: Tensor, context_len: int = 0) -> Tensor:
    """Returns the position of each node, the context's length plus its depth; shaped like
    parents."""
    depth = _ancestors("speculative.tree_positions", parents).sum(-1) - 1 + context_len
    return depth.view(parents.shape)


def _ancestors(name: str, parents: Tensor) -> Tensor:
    """Returns (batch, nodes, nodes): the nodes on the path from the root to each, itself too."""
    if not isinstance(parents, Tensor):
        raise InvalidCall.of(name, Reason(Code.WRONG_TYPE, "a Tensor", type(parents).__name__,
                                          "parents"))
    if parents.dim() not in (1, 2):
        raise InvalidCall.of(name, Reason(Code.WRONG_NDIM, "1 (nodes) or 2 (batch nodes)",
                                          parents.dim(), "parents"))
    if parents.is_floating_point() or parents.is_complex() or parents.dtype == torch.bool:
        raise InvalidCall.of(name, Reason(Code.DTYPE_UNSUPPORTED, "an integer dtype",
                                          str(parents.dtype), "parents"))
    parent = (parents[None] if parents.dim() == 1 else parents).to(torch.int64)
    batch, count = parent.shape
    order = torch.arange(count, device=parent.device)
    invalid = ((parent < -1) | (parent >= order)).nonzero().tolist()
    if invalid:
        row, node = invalid[0]
        raise InvalidCall.of(name, Reason(
            Code.VALUE_OUT_OF_RANGE, f">= -1 and < {node}, as a parent comes before its children",
            int(parent[row, node]), f"parents[{node}]" if parents.dim() == 1
            else f"parents[{row}, {node}]"))
    out = torch.zeros((batch, count, count), dtype=torch.bool, device=parent.device)
    rows = torch.arange(batch, device=parent.device)
    for i in range(count):
        out[:, i] = out[rows, parent[:, i].clamp(min=0)] & (parent[:, i:i + 1] >= 0)
        out[:, i, i] = True
    return out


class Generated(NamedTuple):
    tokens: Tensor             # (batch, longest): prompt and new tokens, padded with -1
    lengths: Tensor            # (batch,)
    rounds: int                # calls of the target model
    drafted: int               # proposed tokens, over all rows and rounds
    accepted: int              # of the drafted tokens


def generate(
    draft_step: DraftStep, target_step: TargetStep, prompt: Tensor, max_new_tokens: int,
    draft_len: int = 4, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0, seed: int | None = None, stop_token: int | None = None,
    lengths: Tensor | None = None,
) -> Generated:
    """Continue `prompt` (batch, length) as the target model would, in fewer calls of it.

    draft_step(tokens, lengths) returns logits (batch, vocab) of the token after the first
    lengths[i] of each row i; target_step(tokens, lengths, count) returns logits (batch, count,
    vocab) after each of the last `count` of these. Rows are padded with -1 and advance
    independently. The two models share nothing: each gets its own copy of the tokens and keeps its
    own state. A model with a KV cache must drop what lies beyond the tokens it is given: what a row
    held before the last round's draft is unchanged, the draft itself may have been replaced.
    """
    name = "speculative.generate"
    if (not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.is_floating_point()
        or not prompt.shape[1]):
        got = tuple(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise InvalidCall.of(name, Reason(Code.DIM_MISMATCH, "token ids (batch, length >= 1)",
                                          str(got), "prompt"))
    for argument, value in (("max_new_tokens", max_new_tokens), ("draft_len", draft_len)):
        if value < 0:
            raise InvalidCall.of(name, Reason(Code.VALUE_OUT_OF_RANGE, ">= 0", value, argument))
    batch, prompt_length = prompt.shape
    if lengths is not None and tuple(lengths.shape) != (batch,):
        raise InvalidCall.of(name, Reason(Code.DIM_MISMATCH, f"({batch},)",
                                          str(tuple(lengths.shape)), "lengths"))
    if lengths is None:
        length = torch.full((batch,), prompt_length, device=prompt.device)
    else:
        length = lengths.to(torch.int64).clone()
    target_lengths = length + max_new_tokens
    tokens = torch.full((batch, prompt_length + max_new_tokens + draft_len + 1), -1,
                        device=prompt.device)
    columns = torch.arange(tokens.shape[1], device=prompt.device)
    tokens[:, :prompt_length] = torch.where(columns[:prompt_length] < length[:, None], prompt, -1)
    done = length >= target_lengths
    rounds = drafted = accepted = drawn = 0
    while not bool(done.all()):
        k = min(draft_len, int((target_lengths - length)[~done].max()) - 1)
        draft_tokens, probs = tokens.clone(), []
        for j in range(k):
            logits = _checked(name, draft_step(draft_tokens.clone(), length + j), (batch,),
                              "the logits of draft_step")
            probs.append(distribution(logits, temperature, top_k, top_p, min_p))
            token = public_function(_sample)(probs[-1], from_probs=True, seed=seed, offset=drawn)
            draft_tokens.scatter_(1, (length + j)[:, None], token[:, None])
            drawn += batch
        logits = target_step(draft_tokens.clone(), length + k, k + 1)
        logits = _checked(name, logits, (batch, k + 1), "the logits of target_step")
        target = distribution(logits.flatten(0, 1), temperature, top_k, top_p,
                              min_p).unflatten(0, (batch, k + 1))
        draft = torch.stack(probs, 1) if probs else target[:, :0]
        chain = draft_tokens.gather(1, length[:, None] + columns[:k])
        accepted_tokens, counts, next_token = verify(chain, draft, target, seed=seed, offset=drawn)
        drawn += batch
        rounds, drafted, accepted = rounds + 1, drafted + k * int((~done).sum()), accepted + int(
            counts[~done].sum())
        padded = torch.nn.functional.pad(accepted_tokens, (0, 1), value=-1)
        new_tokens = padded.scatter(1, counts[:, None], next_token[:, None])
        new_lengths = torch.minimum(counts + (next_token >= 0), target_lengths - length)
        stopped = next_token < 0
        if stop_token is not None:
            # all, in a row without one
            before = ((new_tokens == stop_token).cumsum(-1) == 0).sum(-1)
            stopped |= before < new_lengths
            new_lengths = torch.minimum(new_lengths, before + 1)
        new_lengths = torch.where(done, 0, new_lengths)
        new_tokens = torch.where(columns[:k + 1] < new_lengths[:, None], new_tokens, -1)
        tokens.scatter_(1, length[:, None] + columns[:k + 1], new_tokens)
        length = length + new_lengths
        done = done | stopped | (length >= target_lengths)
    return Generated(tokens[:, :int(length.max()) if batch else 0], length, rounds, drafted,
                     accepted)


def _checked(name: str, logits: Tensor, leading: tuple[int, ...], what: str) -> Tensor:
    if not isinstance(logits, Tensor) or tuple(logits.shape[:-1]) != leading:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InvalidCall.of(name,
                             Reason(Code.DIM_MISMATCH, f"({', '.join(map(str, leading))}, vocab)",
                                    str(got), what))
    return logits
