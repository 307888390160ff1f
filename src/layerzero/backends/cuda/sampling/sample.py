"""Launches sample.cu once for all rows, each of which is a cluster of blocks."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....ops.formulas.sampling import (
    GOLDEN,
    Penalties,
    apply_penalties,
    mix_int,
    random_numbers,
    scalar_or_column,
)
from .. import compiler

PIECE = 4                  # tokens per read of a thread
MAX_BLOCKS = 16            # per cluster
SHARED_BYTES = 227 << 10   # bytes of shared memory per block on Hopper

_WORD = (1 << 64) - 1
_PARAMS = struct.Struct("@11PqQ2d7if")
_HALF = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_KINDS = {torch.float32: 1, torch.float64: 2, torch.float16: 3, torch.bfloat16: 4, torch.int32: 5,
          torch.int64: 6}


class Config(NamedTuple):
    cluster: int
    threads: int = 512
    listed: int = 2048     # tokens that can be listed to find an exact cut
    shared_bytes: int = SHARED_BYTES


class Rows(NamedTuple):
    """Parameters per row."""

    uniforms: Tensor | None = None
    seeds: Tensor | None = None
    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


NO_ROWS = Rows()


@lru_cache(maxsize=4096)
def config(batch: int, vocab: int, device: torch.device) -> Config:
    """Returns the configuration: enough blocks per row to use all multiprocessors, as long as each
    has some thousand tokens, and to keep most of a row in shared memory."""
    machine, cluster = compiler.machine_of(device), 1
    while cluster < MAX_BLOCKS and (cluster << 16 < vocab
                                    or (2 * cluster * batch <= machine.processors
                                        and cluster << 12 < vocab)):
        cluster *= 2
    return Config(cluster, shared_bytes=min(SHARED_BYTES, machine.shared))


@lru_cache(maxsize=256)
def _reciprocal(temperature: float) -> float:
    return float(1.0 / torch.tensor(temperature, dtype=torch.float32))


@lru_cache(maxsize=4096)
def _plan(half: int, probs: bool, vocab: int, cfg: Config) -> tuple[Any, int, int, int]:
    """Returns (kernel, steps, over, every): see Params in sample.cu."""
    cluster, threads, listed, shared_bytes = cfg
    warps = threads // 32
    steps = -(-(vocab + PIECE - 1) // (PIECE * 32 * warps * cluster))
    fixed, step = 80 * warps + 2816 + 8 * listed, threads * 16
    over = max(0, steps - (shared_bytes - fixed) // step)
    macros = (("THREADS", threads), ("HALF", half), ("PROBS", int(probs)), ("LIST", listed))
    kernel = compiler.kernel("sampling/sample.cu", "sample", macros, threads,
                             fixed + (steps - over) * step, cluster)
    return kernel, steps, over, steps // over if over else steps + 1


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, word: int,
           from_probs: bool, rows: Rows = NO_ROWS, weights: bool = True, logprobs: bool = False,
           chosen: Config | None = None, ) -> tuple[Tensor, Tensor | None, Tensor | None,
                                                    Tensor | None]:
    """Returns (token, its weight, total weight of kept tokens, log-probability) of each row."""
    batch, vocab = logits.shape
    device = logits.device
    token = torch.empty(batch, dtype=torch.int64, device=device)
    weight = torch.empty(batch, dtype=torch.float64, device=device) if weights else None
    total = torch.empty(batch, dtype=torch.float64, device=device) if weights else None
    logprob = torch.empty(batch, dtype=torch.float32, device=device) if logprobs else None
    if not batch:
        return token, weight, total, logprob
    cfg = chosen or config(batch, vocab, device)
    kernel, steps, over, every = _plan(_HALF[logits.dtype], from_probs, vocab, cfg)
    scaling, scale = 0, 1.0
    if rows.temperature is not None:
        scaling = 2
    elif temperature == 0.0:
        top_k, rows = 1, rows._replace(top_k=None)
    elif temperature != 1.0 and not from_probs:
        # torch multiplies by the reciprocal on a GPU, and divides on the CPU.
        scaling, scale = (1, _reciprocal(temperature)) if logits.is_cuda else (2, temperature)
    row_tensors = [None if t is None else t.contiguous() for t in rows]
    kinds = sum(_KINDS[t.dtype] << 4 * i for i, t in enumerate(row_tensors) if t is not None)
    kernel.launch((batch * cfg.cluster, 1, 1), _PARAMS, logits, *row_tensors, token, weight, total,
                  logprob, logits.stride(0) * logits.element_size(), word & _WORD, top_p, min_p,
                  vocab, min(top_k, vocab), steps, over, every, kinds, scaling, scale)
    return token, weight, total, logprob


def sample(
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
    word = offset * GOLDEN
    if uniforms is None and seed_rows is None:
        if seed is None:
            uniforms = random_numbers(len(logits), 1, logits.device, None, None, None, offset,
                                      generator)
        else:
            word = mix_int(mix_int(seed) + word) + GOLDEN
    if history is not None or token_counts is not None:
        logits = apply_penalties(logits, history, token_counts, Penalties(
            scalar_or_column(repetition_penalty, repetition_penalty_rows),
            scalar_or_column(presence_penalty, presence_penalty_rows),
            scalar_or_column(frequency_penalty, frequency_penalty_rows)))
    rows = Rows(uniforms, None if uniforms is not None else seed_rows, temperature_rows, top_k_rows,
                top_p_rows, min_p_rows)
    token, _, _, logprob = choose(logits, temperature, top_k, top_p, min_p, word, from_probs, rows,
                                  False, return_logprobs)
    return token if logprob is None else (token, logprob)
