"""Speculative decoding: a draft model proposes, the target model verifies; the result is distributed as the target's.

`verify` and `verify_tree` are the operations with names on their results. `generate` is the loop over two models.
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
    tokens: Tensor             # (batch, drafted): those accepted, then -1
    counts: Tensor             # (batch,): how many were
    next_token: Tensor         # (batch,): drawn where the draft ended, or after all of it


class VerifiedTree(NamedTuple):
    tokens: Tensor             # (batch, nodes): those on the accepted path, then -1
    nodes: Tensor              # (batch, nodes): where they stand in the tree, to keep their part of the KV cache
    counts: Tensor
    next_token: Tensor


def verify(draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniforms: Tensor | None = None, *,
           seed: int | None = None, seed_rows: Tensor | None = None, offset: int = 0,
           generator: torch.Generator | None = None) -> Verified:
    """Which tokens of a draft (batch, drafted) to keep, and the one that follows. See lz.speculative_verify."""
    return Verified(*public_function(_chain)(
        draft_tokens, draft_probs, target_probs, uniforms, seed=seed, seed_rows=seed_rows, offset=offset,
        generator=generator))


def verify_tree(draft_tokens: Tensor, parents: Tensor, draft_probs: Tensor | None, target_probs: Tensor,
                uniforms: Tensor | None = None, *, without_replacement: bool = False, seed: int | None = None,
                seed_rows: Tensor | None = None, offset: int = 0,
                generator: torch.Generator | None = None) -> VerifiedTree:
    """Which path of a tree to keep, and the token that follows. See lz.speculative_verify_tree.

    `parents` (nodes,) is one tree for all rows, (batch, nodes) one for each.
    """
    if isinstance(parents, Tensor) and parents.dim() == 1 and isinstance(draft_tokens, Tensor):
        parents = parents.expand(len(draft_tokens), -1)
    return VerifiedTree(*public_function(_tree)(
        draft_tokens, parents, draft_probs, target_probs, uniforms, without_replacement=without_replacement, seed=seed,
        seed_rows=seed_rows, offset=offset, generator=generator))


def tree_attention_mask(parents: Tensor, context_len: int = 0) -> Tensor:
    """True where a node of the tree may look: at the whole context, its ancestors and itself.

    (nodes, context_len + nodes) for parents (nodes,), and (batch, 1, nodes, context_len + nodes) for (batch, nodes): an
    attn_mask of lz.attention, with the nodes as queries and the context before them in the keys.
    """
    ancestors = _ancestors("speculative.tree_attention_mask", parents)
    context = ancestors.new_ones((*ancestors.shape[:2], context_len))
    mask = torch.cat([context, ancestors], -1)
    return mask[0] if parents.dim() == 1 else mask[:, None]


def tree_positions(parents: Tensor, context_len: int = 0) -> Tensor:
    """The position of each node in its sequence: the context's length and its depth; shaped like parents."""
    depth = _ancestors("speculative.tree_positions", parents).sum(-1) - 1 + context_len
    return depth.view(parents.shape)


def _ancestors(name: str, parents: Tensor) -> Tensor:
    """(batch, nodes, nodes): which nodes lie on the way from the root to each, itself included."""
    if not isinstance(parents, Tensor):
        raise InvalidCall.of(name, Reason(Code.WRONG_TYPE, "a Tensor", type(parents).__name__, "parents"))
    if parents.dim() not in (1, 2):
        raise InvalidCall.of(name, Reason(Code.WRONG_NDIM, "1 (nodes) or 2 (batch nodes)", parents.dim(), "parents"))
    if parents.is_floating_point() or parents.is_complex() or parents.dtype == torch.bool:
        raise InvalidCall.of(name, Reason(Code.DTYPE_UNSUPPORTED, "an integer dtype", str(parents.dtype), "parents"))
    above = (parents[None] if parents.dim() == 1 else parents).to(torch.int64)
    batch, count = above.shape
    order = torch.arange(count, device=above.device)
    wrong = ((above < -1) | (above >= order)).nonzero().tolist()
    if wrong:
        row, node = wrong[0]
        raise InvalidCall.of(name, Reason(
            Code.VALUE_OUT_OF_RANGE, f">= -1 and < {node}, as a parent comes before its children",
            int(above[row, node]), f"parents[{node}]" if parents.dim() == 1 else f"parents[{row}, {node}]"))
    out = torch.zeros((batch, count, count), dtype=torch.bool, device=above.device)
    rows = torch.arange(batch, device=above.device)
    for i in range(count):
        out[:, i] = out[rows, above[:, i].clamp(min=0)] & (above[:, i:i + 1] >= 0)
        out[:, i, i] = True
    return out


class Generated(NamedTuple):
    tokens: Tensor             # (batch, longest): prompt and new tokens, padded with -1
    lengths: Tensor            # (batch,)
    rounds: int                # calls of the target model
    drafted: int               # tokens proposed, over all rows and rounds
    accepted: int              # of those


def generate(
    draft_step: DraftStep, target_step: TargetStep, prompt: Tensor, max_new_tokens: int, draft_len: int = 4, *,
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int | None = None,
    stop_token: int | None = None, lengths: Tensor | None = None,
) -> Generated:
    """Continue `prompt` (batch, length) as the target model would, in fewer calls of it.

    draft_step(tokens, lengths) returns logits (batch, vocab) of the token after the first lengths[i] of each row i;
    target_step(tokens, lengths, count) returns logits (batch, count, vocab) after each of the last `count` of these.
    Rows are padded with -1 and advance at their own pace. The two models share nothing here: each is handed its own
    copy of the tokens and keeps its own state. One that caches must drop what lies beyond the tokens it is given: what
    a row held before the last round's draft stays, the draft itself may have been replaced.
    """
    name = "speculative.generate"
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.is_floating_point() or not prompt.shape[1]:
        got = tuple(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise InvalidCall.of(name, Reason(Code.DIM_MISMATCH, "token ids (batch, length >= 1)", str(got), "prompt"))
    for argument, value in (("max_new_tokens", max_new_tokens), ("draft_len", draft_len)):
        if value < 0:
            raise InvalidCall.of(name, Reason(Code.VALUE_OUT_OF_RANGE, ">= 0", value, argument))
    batch, start = prompt.shape
    if lengths is not None and tuple(lengths.shape) != (batch,):
        raise InvalidCall.of(name, Reason(Code.DIM_MISMATCH, f"({batch},)", str(tuple(lengths.shape)), "lengths"))
    length = torch.full((batch,), start, device=prompt.device) if lengths is None else lengths.to(torch.int64).clone()
    goal = length + max_new_tokens
    tokens = torch.full((batch, start + max_new_tokens + draft_len + 1), -1, device=prompt.device)
    tokens[:, :start] = torch.where(torch.arange(start, device=prompt.device) < length[:, None], prompt, -1)
    place = torch.arange(tokens.shape[1], device=prompt.device)
    done = length >= goal
    rounds = drafted = accepted = drawn = 0
    while not bool(done.all()):
        k = min(draft_len, int((goal - length)[~done].max()) - 1)
        work, probs = tokens.clone(), []
        for j in range(k):
            logits = _checked(name, draft_step(work.clone(), length + j), (batch,), "the logits of draft_step")
            probs.append(distribution(logits, temperature, top_k, top_p, min_p))
            token = public_function(_sample)(probs[-1], from_probs=True, seed=seed, offset=drawn)
            work.scatter_(1, (length + j)[:, None], token[:, None])
            drawn += batch
        logits = target_step(work.clone(), length + k, k + 1)
        logits = _checked(name, logits, (batch, k + 1), "the logits of target_step")
        target = distribution(logits.flatten(0, 1), temperature, top_k, top_p, min_p).unflatten(0, (batch, k + 1))
        draft = torch.stack(probs, 1) if probs else target[:, :0]
        chain = work.gather(1, length[:, None] + place[:k])
        kept, counts, following = verify(chain, draft, target, seed=seed, offset=drawn)
        drawn += batch
        rounds, drafted, accepted = rounds + 1, drafted + k * int((~done).sum()), accepted + int(counts[~done].sum())
        fresh = torch.nn.functional.pad(kept, (0, 1), value=-1).scatter(1, counts[:, None], following[:, None])
        size = torch.minimum(counts + (following >= 0), goal - length)
        stopped = following < 0
        if stop_token is not None:
            before = ((fresh == stop_token).cumsum(-1) == 0).sum(-1)       # a row without one: all
            stopped |= before < size
            size = torch.minimum(size, before + 1)
        size = torch.where(done, 0, size)
        fresh = torch.where(place[:k + 1] < size[:, None], fresh, -1)
        tokens.scatter_(1, length[:, None] + place[:k + 1], fresh)
        length = length + size
        done = done | stopped | (length >= goal)
    return Generated(tokens[:, :int(length.max()) if batch else 0], length, rounds, drafted, accepted)


def _checked(name: str, logits: Tensor, lead: tuple[int, ...], what: str) -> Tensor:
    if not isinstance(logits, Tensor) or tuple(logits.shape[:-1]) != lead:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InvalidCall.of(name, Reason(Code.DIM_MISMATCH, f"({', '.join(map(str, lead))}, vocab)", str(got), what))
    return logits
