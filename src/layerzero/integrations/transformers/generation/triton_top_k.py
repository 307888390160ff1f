"""A draw from the few likeliest tokens on a CUDA device: top-k with a small k, then top-p, min-p,
and the draw, for every row by its own numbers.

A search for the exact cut of a filter reads all logits many times. But the k-th largest of the
maxima of a thousand groups of logits is a bound from below of the k-th largest logit, which few
logits pass: those are listed, and everything else happens among them. Where more pass than can be
listed (thousands of equal logits), the k largest are taken one by one.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, GROUP = 4096, 128   # logits of one program, and of one maximum
ROOM = 512                 # listed logits of a row
MIN_GROUPS = 2
BITS = 18                  # of a float's order that the bound is searched by


@triton.jit
def _scores(ptr, column, vocab):
    """Logits; impossible ones, NaN too, are -inf."""
    scores = tl.load(ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(scores == scores, scores, float("-inf"))


@triton.jit
def _order(scores):
    """An integer that rises with the float: of the same width, with sign."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _maxima_kernel(scores_ptr, maxima_ptr, listed_ptr, row_stride, vocab, groups,
                   BLOCK: tl.constexpr, GROUP: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here: tl.constexpr = BLOCK // GROUP
    column = (piece * BLOCK + tl.arange(0, here)[:, None] * GROUP + tl.arange(0, GROUP)[None, :])
    best = tl.max(_scores(scores_ptr + row * row_stride, column, vocab), 1)
    tl.store(maxima_ptr + row * groups + piece * here + tl.arange(0, here), best)
    if piece == 0:
        tl.store(listed_ptr + row, 0)


@triton.jit
def _list_kernel(scores_ptr, maxima_ptr, top_k_ptr, listed_ptr, values_ptr, places_ptr, row_stride,
                 vocab, groups, GROUPS: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
                 BITS: tl.constexpr):
    """List the logits that are not below the bound, in any order."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, GROUPS)
    maxima = _order(tl.load(maxima_ptr + row * groups + number, mask=number < groups,
                            other=float("-inf")))
    wanted = tl.load(top_k_ptr + row).to(tl.int32)
    # the largest bound, bit by bit, that as many maxima reach as are wanted
    bound = tl.full((), -2147483648, tl.int32)
    if tl.sum((maxima >= 0).to(tl.int32), 0) >= wanted:
        bound = tl.full((), 0, tl.int32)
    for i in tl.static_range(BITS):
        higher = bound + (1 << (30 - i))
        reach = tl.sum((maxima >= higher).to(tl.int32), 0)
        bound = tl.where(reach >= wanted, higher, bound)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    scores = _scores(scores_ptr + row * row_stride, column, vocab)
    passed = (_order(scores) >= bound) & (scores > float("-inf"))
    count = tl.sum(passed.to(tl.int32), 0)
    if count > 0:
        first = tl.atomic_add(listed_ptr + row, count)
        at = first + tl.cumsum(passed.to(tl.int32), 0) - 1
        kept = passed & (at < ROOM)
        tl.store(values_ptr + row * ROOM + at, scores, mask=kept)
        tl.store(places_ptr + row * ROOM + at, column, mask=kept)


@triton.jit
def _packed(scores, places):
    """Ranked as one integer: the score, then the place, the lowest first."""
    return (_order(scores).to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def _draw_kernel(scores_ptr, listed_ptr, values_ptr, places_ptr, uniform_ptr, temperature_ptr,
                 top_k_ptr, top_p_ptr, min_p_ptr, token_ptr, row_stride, vocab,
                 ROOM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(top_k_ptr + row).to(tl.int32)
    listed = tl.load(listed_ptr + row)
    if listed > ROOM:
        least: tl.constexpr = -9223372036854775807
        last = tl.full((), 9223372036854775807, tl.int64)
        for i in range(wanted):
            best = tl.full((), least, tl.int64)
            for start in range(0, vocab, BLOCK):
                column = start + tl.arange(0, BLOCK)
                scores = _scores(scores_ptr + row * row_stride, column, vocab)
                rank = tl.where(scores > float("-inf"), _packed(scores, column), least)
                best = tl.maximum(best, tl.max(tl.where(rank < last, rank, least), 0))
            last = best
            place = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
            is_token = best > least
            tl.store(places_ptr + row * ROOM + i, place, mask=is_token)
            tl.store(values_ptr + row * ROOM + i,
                     tl.load(scores_ptr + row * row_stride + place, mask=is_token,
                             other=float("-inf")).to(tl.float32))
        tl.debug_barrier()     # of all threads
        listed = wanted
    slot = tl.arange(0, ROOM)
    valid = slot < listed
    values = tl.load(values_ptr + row * ROOM + slot, mask=valid, other=float("-inf"))
    places = tl.load(places_ptr + row * ROOM + slot, mask=valid, other=0x7FFFFFFF)
    ranked = tl.sort(_packed(values, places), descending=True)
    order = (ranked >> 32).to(tl.int32)
    score = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
    token = 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)
    top = tl.max(score, 0)
    temperature = tl.load(temperature_ptr + row)
    possible = (slot < wanted) & (score > float("-inf"))
    distance = tl.where(possible, score - top, 0.0) / temperature
    weight = tl.where(possible, tl.exp(distance), 0.0)
    reached = tl.cumsum(weight, 0)
    total = tl.sum(weight, 0)
    kept = (reached - weight < tl.load(top_p_ptr + row) * total) | (slot == 0)
    kept = kept & (weight >= tl.load(min_p_ptr + row))
    weight = tl.where(kept, weight, 0.0)
    reached = tl.cumsum(weight, 0)
    total = tl.sum(weight, 0)
    target = tl.load(uniform_ptr + row).to(tl.float32) * total
    # the first that is over the target; by rounding the last with any weight
    over = tl.min(tl.where(kept & (reached > target), slot, ROOM), 0)
    end = tl.max(tl.where(kept, slot, 0), 0)
    chosen = tl.minimum(over, end)
    drawn = tl.sum(tl.where(slot == chosen, token, 0), 0)
    tl.store(token_ptr + row, tl.where(total > 0, drawn, -1).to(tl.int64))


def draw(scores: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
         uniforms: Tensor) -> Tensor:
    """Returns a token of each row of scores (batch, vocab) as lz.sample has it, the draw in the
    order of rank; -1 where none can be drawn. top_k is 1 to drawing.MAX_K, temperatures are above
    0."""
    batch, vocab = scores.shape
    pieces = triton.cdiv(vocab, BLOCK)
    groups, device = pieces * (BLOCK // GROUP), scores.device
    maxima = torch.empty((batch, groups), dtype=torch.float32, device=device)
    listed = torch.empty(batch, dtype=torch.int32, device=device)
    values = torch.empty((batch, ROOM), dtype=torch.float32, device=device)
    places = torch.empty((batch, ROOM), dtype=torch.int32, device=device)
    token = torch.empty(batch, dtype=torch.int64, device=device)
    _maxima_kernel[(batch, pieces)](scores, maxima, listed, scores.stride(0), vocab, groups,
                                    BLOCK=BLOCK, GROUP=GROUP, num_warps=8)
    _list_kernel[(batch, pieces)](
        scores, maxima, top_k, listed, values, places, scores.stride(0), vocab, groups,
        GROUPS=max(MIN_GROUPS, triton.next_power_of_2(groups)), BLOCK=BLOCK, ROOM=ROOM, BITS=BITS,
        num_warps=8)
    _draw_kernel[(batch,)](scores, listed, values, places, uniforms, temperature, top_k, top_p,
                           min_p, token, scores.stride(0), vocab, ROOM=ROOM, BLOCK=BLOCK,
                           num_warps=4)
    return token
