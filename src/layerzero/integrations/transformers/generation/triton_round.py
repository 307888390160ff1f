"""The small steps of a round (round_state.py) on a CUDA device, each in two launches."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .round_state import LONGEST_MATCH, SLOTS, Inputs, RoundState
from .triton_draw import BLOCK, MIN_BLOCKS, _largest_kernel

__all__ = ["accept", "choose", "lookup", "move_branch"]
PIECE = 1024               # tokens of the text that one program searches


@triton.jit
def _match_kernel(text_ptr, length_ptr, drafts_ptr, found_ptr, score_ptr, capacity, depth,
                  PIECE: tl.constexpr, LONGEST: tl.constexpr, BRANCH: tl.constexpr):
    """The best match that ends in a piece of the text: its size times the capacity, and its end.
    What follows is another token than those with which the branches before begin."""
    last = tl.load(length_ptr) - 1
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    alike = at < last
    size = tl.zeros((PIECE,), tl.int64)
    for n in tl.static_range(LONGEST):
        inside = alike & (at >= n)
        wanted = tl.load(text_ptr + tl.maximum(last - n, 0))
        token = tl.load(text_ptr + at - n, mask=inside, other=-1)
        alike = inside & (token == wanted)
        size += alike.to(tl.int64)
    if BRANCH > 0:
        following = tl.load(text_ptr + at + 1, mask=at < last, other=-1)
        for branch in tl.static_range(BRANCH):
            known = tl.load(drafts_ptr + 1 + branch * depth)
            known = tl.where(tl.load(found_ptr + branch) > 0, known, -1)
            size = tl.where(following == known, 0, size)
    score = tl.where(size > 0, size * capacity + at, -1)
    tl.store(score_ptr + tl.program_id(0), tl.max(score, 0))


@triton.jit
def _draft_kernel(text_ptr, length_ptr, score_ptr, drafts_ptr, found_ptr, capacity, pieces, depth,
                  PIECES: tl.constexpr, DEPTH: tl.constexpr, BRANCH: tl.constexpr):
    """Writes what follows the best match, from its beginning again where the text ends."""
    piece = tl.arange(0, PIECES)
    best = tl.max(tl.load(score_ptr + piece, mask=piece < pieces, other=-1), 0)
    last = tl.load(length_ptr) - 1
    match = tl.maximum(best, 0) % capacity
    number = tl.arange(0, DEPTH)
    here = number < depth
    source = match + 1 + number % tl.maximum(last - match, 1)
    token = tl.load(text_ptr + source, mask=here, other=0)
    tl.store(drafts_ptr + 1 + BRANCH * depth + number, tl.where(best >= 0, token, 0), mask=here)
    tl.store(found_ptr + BRANCH, tl.where(best >= 0, depth, 0).to(tl.int64))


def lookup(state: RoundState) -> None:
    capacity, depth = len(state.text), state.depth
    pieces = triton.cdiv(capacity, PIECE)
    scores = torch.empty(pieces, dtype=torch.int64, device=state.text.device)
    for branch in range(len(state.found)):
        _match_kernel[(pieces,)](state.text, state.length, state.rows.tokens, state.found, scores,
                                 capacity, depth, PIECE=PIECE, LONGEST=LONGEST_MATCH,
                                 BRANCH=branch, num_warps=4)
        _draft_kernel[(1,)](state.text, state.length, scores, state.rows.tokens, state.found,
                            capacity, pieces, depth, PIECES=max(2, triton.next_power_of_2(pieces)),
                            DEPTH=max(2, triton.next_power_of_2(depth)), BRANCH=branch, num_warps=1)


@triton.jit
def _best_tokens(best_ptr, where_ptr, rows, pieces, vocab, ROWS: tl.constexpr,
                 PIECES: tl.constexpr):
    """The first place of the largest logit of each row, of those of its pieces."""
    row, piece = tl.arange(0, ROWS), tl.arange(0, PIECES)
    valid = (row < rows)[:, None] & (piece < pieces)[None, :]
    offset = row[:, None] * pieces + piece[None, :]
    best = tl.load(best_ptr + offset, mask=valid, other=float("-inf"))
    where = tl.load(where_ptr + offset, mask=valid, other=vocab - 1)
    return tl.min(tl.where(best == tl.max(best, 1)[:, None], where, vocab - 1), 1)


@triton.jit
def _choose_kernel(best_ptr, where_ptr, length_ptr, draft_ptr, found_ptr, token_ptr, position_ptr,
                   span_ptr, pieces, vocab, number, PIECES: tl.constexpr):
    row = tl.arange(0, 2)
    token = _best_tokens(best_ptr, where_ptr, 1, pieces, vocab, 2, PIECES)
    length = tl.load(length_ptr)
    tl.store(draft_ptr + number + row, token, mask=row < 1)
    tl.store(token_ptr + row, token, mask=row < 1)
    tl.store(position_ptr, length + number - 1)
    tl.store(span_ptr, length + number)
    tl.store(found_ptr, tl.full((), 0, tl.int64) + number)


@triton.jit
def _follow(tokens_ptr, position_ptr, span_ptr, end, last, before, KNOWN: tl.constexpr,
            COUNT: tl.constexpr, COUNT_POW: tl.constexpr, DEPTH: tl.constexpr):
    """Inputs of COUNT rows, of which the first KNOWN are the last tokens of the text; the others
    are branches of DEPTH."""
    row = tl.arange(0, COUNT_POW)
    here = row < COUNT
    place = end - KNOWN + tl.where(row > 0, (row - 1) % DEPTH + 1, 0)
    tl.store(position_ptr + row, place, mask=here)
    tl.store(span_ptr + row, place + 1, mask=here)
    tl.store(tokens_ptr + KNOWN - 1, last)
    if KNOWN == 2:
        tl.store(tokens_ptr, before)


@triton.jit
def _accept_kernel(
    best_ptr, where_ptr, text_ptr, length_ptr, found_ptr, kept_ptr, log_ptr, slot_ptr,
    plain_ptr, plain_position_ptr, plain_span_ptr, rows_ptr, rows_position_ptr, rows_span_ptr,
    pair_ptr, pair_position_ptr, pair_span_ptr, pieces, vocab, log_row,
    COUNT: tl.constexpr, COUNT_POW: tl.constexpr, ALL: tl.constexpr, ALL_POW: tl.constexpr,
    DEPTH: tl.constexpr, BRANCHES: tl.constexpr, PAIR: tl.constexpr, PIECES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """COUNT rows were computed, of the ALL of a round that verifies."""
    row = tl.arange(0, COUNT_POW)
    token = _best_tokens(best_ptr, where_ptr, COUNT, pieces, vocab, COUNT_POW, PIECES)
    length, slot = tl.load(length_ptr), tl.load(slot_ptr)
    # the token before the last one, which an assistant may not have seen
    older = tl.load(text_ptr + length - 1)
    found, chosen, accepted = length * 0, 0, 0
    if COUNT > 1:
        # what the model chose where a draft stands: after the row before it, or the first
        number = (row - 1) % DEPTH
        parent = tl.where((row > 0) & (number > 0), row - 1, 0)
        wanted = tl.sum(tl.where(parent[:, None] == row[None, :], token[None, :], 0), 1)
        drafted = tl.load(rows_ptr + row, mask=(row > 0) & (row < COUNT), other=-1)
        for branch in tl.static_range(BRANCHES):
            here = tl.load(found_ptr + branch)
            inside = (row > branch * DEPTH) & (row <= (branch + 1) * DEPTH)
            wrong = inside & ((drafted != wanted) | (number >= here))
            count = tl.min(tl.where(wrong, number, DEPTH), 0)
            chosen = tl.where(count > accepted, branch, chosen)
            accepted = tl.maximum(count, accepted)
            found += here
        source = tl.where(row > 0, row + chosen * DEPTH, 0)
        token = tl.sum(tl.where(source[:, None] == row[None, :], token[None, :], 0), 1)
    tl.debug_barrier()         # every thread has read what is written below
    tl.store(text_ptr + length + row, token, mask=row <= accepted)
    tl.store(kept_ptr, length * 0 + chosen)
    tl.store(kept_ptr + 1, length * 0 + accepted)
    log = log_ptr + slot * log_row
    tl.store(log, found)
    tl.store(log + 1, length * 0 + accepted + 1)
    tl.store(log + 2 + row, token, mask=row <= accepted)
    last = tl.sum(tl.where(row == accepted, token, 0), 0)
    previous = tl.sum(tl.where(row == accepted - 1, token, 0), 0)
    before = tl.where(accepted > 0, previous, older)
    end = length + accepted + 1
    tl.store(length_ptr, end)
    tl.store(slot_ptr, (slot + 1) % SLOTS)
    _follow(plain_ptr, plain_position_ptr, plain_span_ptr, end, last, before, 1, 1, 2, 1)
    _follow(rows_ptr, rows_position_ptr, rows_span_ptr, end, last, before, 1, ALL, ALL_POW, DEPTH)
    if PAIR:
        _follow(pair_ptr, pair_position_ptr, pair_span_ptr, end, last, before, 2, 2, 2, 1)


@triton.jit
def _move_kernel(address_ptr, length_ptr, kept_ptr, units, DEPTH: tl.constexpr,
                 UNITS: tl.constexpr):
    """Copies a token of one buffer, in units of two bytes, from its branch to the first one."""
    buffer, number = tl.program_id(0), tl.program_id(1)
    branch, accepted = tl.load(kept_ptr), tl.load(kept_ptr + 1)
    if (branch > 0) & (number < accepted):
        place = tl.load(length_ptr) - 1 - accepted + number
        start = tl.load(address_ptr + buffer).to(tl.pointer_type(tl.int16))
        unit = tl.arange(0, UNITS)
        value = tl.load(start + (place + branch * DEPTH) * units + unit, mask=unit < units)
        tl.store(start + place * units + unit, value, mask=unit < units)


def move_branch(state: RoundState, buffers: list[tuple[Tensor, Tensor]], addresses: Tensor) -> None:
    keys = buffers[0][0]
    units = keys.stride(1) * keys.element_size() // 2
    _move_kernel[(len(addresses), state.depth)](addresses, state.length, state.kept, units,
                                                DEPTH=state.depth,
                                                UNITS=triton.next_power_of_2(units), num_warps=4)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor, int, int]:
    rows, vocab = logits.shape
    pieces = max(MIN_BLOCKS, triton.cdiv(vocab, BLOCK))
    best = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, pieces), dtype=torch.int64, device=logits.device)
    _largest_kernel[(rows, pieces)](logits, best, where, logits.stride(0), vocab, BLOCK=BLOCK,
                                    num_warps=8)
    return best, where, pieces, vocab


def choose(state: RoundState, logits: Tensor, number: int) -> None:
    best, where, pieces, vocab = _largest(logits)
    assert state.single is not None
    single = state.single
    _choose_kernel[(1,)](best, where, state.length, state.rows.tokens, state.found, single.tokens,
                         single.positions, single.lengths, pieces, vocab, number,
                         PIECES=triton.next_power_of_2(pieces), num_warps=1)


def _pointers(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.tokens, inputs.positions, inputs.lengths


def accept(state: RoundState, logits: Tensor) -> None:
    best, where, pieces, vocab = _largest(logits)
    count, whole = len(logits), len(state.rows.tokens)
    _accept_kernel[(1,)](
        best, where, state.text, state.length, state.found, state.kept, state.log, state.slot,
        *_pointers(state.plain), *_pointers(state.rows), *_pointers(state.pair or state.plain),
        pieces, vocab, state.log.stride(0), COUNT=count,
        COUNT_POW=max(2, triton.next_power_of_2(count)), ALL=whole,
        ALL_POW=max(2, triton.next_power_of_2(whole)), DEPTH=state.depth,
        BRANCHES=len(state.found), PAIR=state.pair is not None,
        PIECES=triton.next_power_of_2(pieces), SLOTS=SLOTS, num_warps=4)
