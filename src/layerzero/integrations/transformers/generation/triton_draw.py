"""The end of a step on a CUDA device: the likeliest token, and everything that follows from it, in
two launches.

torch.argmax of one row of logits is one slow reduction, and the bookkeeping after it ten small
launches, each of which takes as long in a graph as reading two megabytes of weights.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_top_k import draw

__all__ = ["append", "draw"]
BLOCK = 4096               # logits of one program
MIN_BLOCKS = 2


@triton.jit
def _largest_kernel(scores_ptr, best_ptr, where_ptr, row_stride, vocab, BLOCK: tl.constexpr):
    """The largest of a piece of a row and the first place of it; NaN is larger than all."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + row * row_stride + column, mask=column < vocab,
                     other=float("-inf")).to(tl.float32)
    scores = tl.where(scores != scores, float("inf"), scores)
    best = tl.max(scores, 0)
    first = tl.min(tl.where((scores == best) & (column < vocab), column, vocab), 0)
    offset = row * tl.num_programs(1) + piece
    tl.store(best_ptr + offset, best)
    tl.store(where_ptr + offset, first.to(tl.int64))


@triton.jit
def _append_kernel(
    token_ptr, best_ptr, eos_ptr, pad_ptr, unfinished_ptr, count_ptr, row_ptr, log_ptr, input_ptr,
    batch, pieces, last, eos_count, PIECES: tl.constexpr, BATCH: tl.constexpr, EOS: tl.constexpr,
    PAD: tl.constexpr,
):
    """One program for all rows. With pieces the token is the place of the best of them."""
    row = tl.arange(0, BATCH)
    here = row < batch
    if PIECES:
        piece = tl.arange(0, PIECES)
        offset = row[:, None] * pieces + piece[None, :]
        valid = here[:, None] & (piece < pieces)[None, :]
        best = tl.load(best_ptr + offset, mask=valid, other=float("-inf"))
        where = tl.load(token_ptr + offset, mask=valid, other=last)
        top = tl.max(best, 1)
        token = tl.min(tl.where(best == top[:, None], where, last), 1)
    else:
        token = tl.load(token_ptr + row, mask=here, other=0)
    running = tl.load(unfinished_ptr + row, mask=here, other=0) != 0
    if PAD:
        token = tl.where(running, token, tl.load(pad_ptr))
    at = tl.load(row_ptr)
    tl.store(log_ptr + at * batch + row, token, mask=here)
    tl.store(input_ptr + row, tl.maximum(token, 0), mask=here)         # -1: none could be drawn
    if EOS:
        number = tl.arange(0, EOS)
        eos = tl.load(eos_ptr + number, mask=number < eos_count, other=-1)
        ended = tl.sum((token[:, None] == eos[None, :]).to(tl.int32), 1) > 0
        tl.store(unfinished_ptr + row, (running & (ended == 0)).to(tl.int8), mask=here)
    count = tl.load(count_ptr)
    tl.debug_barrier()         # every thread has read where the tokens go
    tl.store(row_ptr, at + 1)
    tl.store(count_ptr, count + 1)


def append(scores: Tensor, eos: Tensor, pad: Tensor | None, unfinished: Tensor, count: Tensor,
           row: Tensor, log: Tensor, step_input: Tensor) -> None:
    """Writes the most likely token of scores (batch, vocab), or given tokens (batch,), to row `row`
    of the log and to `step_input`, and increments `row`.

    Rows that are finished get `pad`; a token of `eos` finishes a row.
    """
    batch, tokens, best, pieces, vocab = len(step_input), scores, scores, 0, 0
    if scores.dim() == 2:
        vocab = scores.shape[1]
        pieces = max(MIN_BLOCKS, triton.cdiv(vocab, BLOCK))
        best = torch.empty((batch, pieces), dtype=torch.float32, device=scores.device)
        tokens = torch.empty((batch, pieces), dtype=torch.int64, device=scores.device)
        _largest_kernel[(batch, pieces)](scores, best, tokens, scores.stride(0), vocab, BLOCK=BLOCK,
                                         num_warps=8)
    count_of = len(eos)
    _append_kernel[(1,)](
        tokens, best, eos, eos if pad is None else pad, unfinished.view(torch.int8), count, row,
        log, step_input, batch, pieces, max(vocab - 1, 0), count_of,
        PIECES=triton.next_power_of_2(pieces) if pieces else 0,
        BATCH=max(2, triton.next_power_of_2(batch)),
        EOS=max(2, triton.next_power_of_2(count_of)) if count_of else 0, PAD=pad is not None,
        num_warps=4)
