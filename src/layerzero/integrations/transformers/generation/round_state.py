"""What a speculation round reads and writes where the model is, and its small steps in plain torch.

The text, how long it is and where the next step of each model begins lie in memory that stays where
it is, so that a round can be captured once and replayed: what the last round accepted is known to
the next one without the host. The log has a row for every round, which the host reads when it gets
there. triton_round.py has the same functions in fewer launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS = 16                 # rows of the log; more than rounds can be on their way
LONGEST_MATCH = 3          # last tokens that are looked for in the text


@dataclass(frozen=True)
class Inputs:
    """Where a step of some rows reads its tokens and their places; all int64."""

    tokens: Tensor         # (rows, 1)
    positions: Tensor      # (rows,): tokens before each
    lengths: Tensor        # (rows,): and with it
    depths: Tensor         # (rows,): tokens between it and the first row; a constant


@dataclass(frozen=True)
class RoundState:
    """The text of one cache. It is one token longer than the cache: the last is not computed."""

    text: Tensor           # (capacity,)
    length: Tensor         # (1,)
    found: Tensor          # (branches,): tokens that were drafted
    kept: Tensor           # (2,): the branch of which tokens were accepted, and how many
    log: Tensor            # (SLOTS, 2 + rows): drafted, new, and the new tokens
    slot: Tensor           # (1,): the row of the next round
    plain: Inputs          # of a plain step
    rows: Inputs           # of the rows that are verified: the last token, and the drafted ones
    # of an assistant: the last two tokens, of which it may not know the first; and its plain step
    pair: Inputs | None = None
    single: Inputs | None = None

    @property
    def depth(self) -> int:
        """Returns the length of a branch."""
        return (len(self.rows.tokens) - 1) // len(self.found)

    @property
    def followers(self) -> list[tuple[Inputs, int]]:
        """Inputs that begin at the end of the text, and how many tokens of it they have."""
        return [(self.plain, 1), (self.rows, 1), *([(self.pair, 2)] if self.pair else [])]

    def start(self, ids: Tensor) -> None:
        """Begin with the text `ids` (tokens,)."""
        self.text[:len(ids)].copy_(ids)
        self.length.fill_(len(ids))
        self.slot.zero_()
        follow(self)


def make_state(capacity: int, plain: Inputs, rows: Inputs, pair: Inputs | None = None,
               single: Inputs | None = None, branches: int = 1) -> RoundState:
    device, count = rows.tokens.device, len(rows.tokens)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return RoundState(zeros(capacity), zeros(1), zeros(branches), zeros(2),
                      zeros(SLOTS, 2 + count), zeros(1), plain, rows, pair, single)


def follow(state: RoundState) -> None:
    """Let the next steps begin at the end of the text."""
    for inputs, known in state.followers:
        torch.add(inputs.depths, state.length - known, out=inputs.positions)
        torch.add(inputs.positions, 1, out=inputs.lengths)
        inputs.tokens[:known].copy_(
            state.text.index_select(0, inputs.positions[:known])[:, None])


def lookup(state: RoundState) -> None:
    """Drafts what followed the last tokens where they stood before: after the longest match, of
    these the latest. Where the text ends before the draft does, it is repeated from the match on.
    Each branch begins with another token.
    """
    text, last = state.text, state.length - 1
    order = torch.arange(len(text), device=text.device)
    size = torch.zeros_like(order)
    alike = order < last
    for n in range(LONGEST_MATCH):
        alike = alike & (order >= n) & (last >= n) & (
            text[(order - n).clamp_min(0)] == text[(last - n).clamp_min(0)])
        size = size + alike
    score = torch.where(size > 0, size * len(text) + order, -1)
    following, after = text.roll(-1), torch.arange(state.depth, device=text.device)
    for branch in range(len(state.found)):
        best = score.max(0, keepdim=True).values
        match, found = best.clamp_min(0) % len(text), best >= 0
        tokens = torch.where(found, text[match + 1 + after % (last - match).clamp_min(1)], 0)
        first = 1 + branch * state.depth
        state.rows.tokens[first:first + state.depth, 0].copy_(tokens)
        state.found[branch:branch + 1].copy_(torch.where(found, state.depth, 0))
        score = torch.where(following == tokens[:1], -1, score)


def choose(state: RoundState, logits: Tensor, number: int) -> None:
    """Write the likeliest token of an assistant's logits (1, vocab) as draft `number`, from 1 on;
    its next plain step is the one of that token."""
    token = logits.argmax(-1)
    state.rows.tokens[number].copy_(token)
    if state.single is not None:
        state.single.tokens[0].copy_(token)
        torch.add(state.length, number - 1, out=state.single.positions)
        torch.add(state.length, number, out=state.single.lengths)
    state.found.fill_(number)


def accept(state: RoundState, logits: Tensor) -> None:
    """Append what the model chose, logits (rows, vocab): of one row a token; of several those of
    the longest accepted branch, up to the first draft that is another, and the one in its place.
    """
    best, depth, text = logits.argmax(-1), state.depth, state.text
    after = torch.arange(depth, device=text.device)
    found = state.found if len(best) > 1 else torch.zeros_like(state.found)
    branch = accepted = torch.zeros_like(state.length)
    if len(best) > 1:
        drafted = state.rows.tokens[1:, 0].view(-1, depth)
        chosen = torch.cat((best[:1].expand(len(found), 1), best[1:].view(-1, depth)[:, :-1]), 1)
        same = (drafted == chosen) & (after < found[:, None])
        counts = same.to(torch.int64).cumprod(1).sum(1)
        branch = counts.argmax(0, keepdim=True)
        accepted = counts[branch]
        best = torch.cat((best[:1], best[1 + branch * depth + after]))
    state.kept.copy_(torch.cat((branch, accepted)))
    places = state.length + torch.arange(len(best), device=text.device)
    text.index_copy_(0, places, best)          # those that were not accepted are written again
    row = torch.cat((found.sum(0, keepdim=True), accepted + 1, best))
    row = torch.nn.functional.pad(row, (0, state.log.shape[1] - len(row)))
    state.log.index_copy_(0, state.slot, row[None])
    state.slot.add_(1).remainder_(SLOTS)
    state.length.add_(accepted + 1)
    follow(state)


def move_branch(state: RoundState, buffers: list[tuple[Tensor, Tensor]], addresses: Tensor) -> None:
    """Moves keys and values (1, tokens, kv_heads, dim) of the branch that was accepted to where the
    first one's are. `addresses`: of all of them."""
    branch, accepted = state.kept[:1], state.kept[1:]
    places = state.length - 1 - accepted + torch.arange(state.depth, device=state.text.device)
    for buffer in (b for pair in buffers for b in pair):
        buffer.index_copy_(1, places, buffer.index_select(1, places + branch * state.depth))
