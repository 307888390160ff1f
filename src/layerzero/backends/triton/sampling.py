"""Launches the kernels of sampling_search.py for lz.sample."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ...ops.formulas.sampling import (
    GOLDEN,
    Penalties,
    apply_penalties,
    as_int64,
    mix_int,
    random_numbers,
    scalar_or_column,
)
from .launch import Launcher
from .machine import counters
from .sampling_search import MAX_LISTED, draw_kernel, narrow_kernel, peak_kernel

CHUNK = 16384              # tokens per program, at most 255 x 256
NARROWINGS = 3
TILE = 4096                # tokens of a program in registers at a time


_peak, _narrow, _draw = Launcher(peak_kernel), Launcher(narrow_kernel), Launcher(draw_kernel)


@lru_cache(maxsize=256)
def _reciprocal(temperature: float) -> float:
    return float(1.0 / torch.tensor(temperature, dtype=torch.float32))


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float,
           uniform: Tensor | None, word: int, from_probs: bool, chunk: int = 0, tile: int = TILE,
           warps: int = 8, narrowings: int = NARROWINGS) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (token, its weight, the total weight of the kept tokens) of each row."""
    batch, vocab = logits.shape
    device = logits.device
    token = torch.empty(batch, dtype=torch.int64, device=device)
    chosen, total = torch.empty((2, batch), dtype=torch.float64, device=device)
    if not batch:
        return token, chosen, total
    if temperature == 0.0 or top_p == 0.0:
        top_k = 1
    top_k = top_k if top_k < vocab else 0
    by_mass = top_p < 1.0 and top_k != 1
    search = top_k > 0 or by_mass
    tile = min(tile, max(16, triton.next_power_of_2(vocab)))
    chunk = max(tile, min(chunk or (CHUNK if batch > 16 else TILE), triton.next_power_of_2(vocab)))
    chunks, tiles = -(-vocab // chunk), -(-vocab // tile)
    scaled, divisor = 0, 1.0
    if temperature not in (0.0, 1.0) and not from_probs:
        # torch multiplies by the reciprocal on a GPU, and divides on the CPU.
        scaled = 1 if logits.is_cuda else 2
        divisor = _reciprocal(temperature) if scaled == 1 else temperature
    floats = torch.empty(batch * (chunks + 1), dtype=torch.float32, device=device)
    peaks, parts = floats[:batch], floats[batch:]
    integers = torch.empty(batch * (5 + 8 * chunks), dtype=torch.int32, device=device)
    whole, listed, part_counts = integers[:4 * batch], integers[4 * batch:5 * batch], integers[
        5 * batch:]
    doubles = torch.empty(batch * (1 + 2 * tiles + 8 * chunks), dtype=torch.float64, device=device)
    mass, sure, before, part_masses = doubles.split([batch, batch * tiles, batch * tiles,
                                                     8 * batch * chunks])
    count = counters(device, batch)
    shared: dict[str, Any] = {"PROBS": from_probs, "CHUNK": chunk, "TILE": tile, "num_warps": warps}
    reading: dict[str, Any] = {**shared, "SCALE": scaled, "LIBDEVICE": logits.is_cuda}
    grid, step = (chunks, batch), logits.stride(0)
    limit = 0x7FFFFFFF if from_probs else 0x7F800000
    _peak(grid, (logits, parts, peaks, whole, listed, count, step, vocab, limit),
          {"CHUNKS": triton.next_power_of_2(chunks), **shared})
    listing = places = logits
    if search:
        places = torch.empty(batch * MAX_LISTED, dtype=torch.int64, device=device)
        listing = torch.empty(batch * MAX_LISTED, dtype=torch.float32, device=device)
        for i in range(narrowings):
            _narrow(grid, (logits, peaks, part_masses, part_counts, whole, mass, count, step, vocab,
                           divisor, top_k, top_p),
                    {"FIRST": i == 0, "BY_COUNT": top_k > 0,
                     "CHUNKS": triton.next_power_of_2(chunks), **reading})
    _draw(grid, (logits, peaks, whole, mass, places, listing, listed, sure, before, count,
                 logits if uniform is None else uniform, token, chosen, total, step, vocab, divisor,
                 top_k, top_p, min_p, word),
          {"SEARCH": search, "TOP_K": top_k > 0, "TOP_P": by_mass, "MIN_P": min_p > 0.0,
           "SEEDED": uniform is None, "TILES": triton.next_power_of_2(tiles),
           "AT_ONCE": max(16, 8192 // triton.next_power_of_2(tiles)), **reading})
    return token, chosen, total


def sample(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0, *, repetition_penalty: float = 1.0, presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0, history: Tensor | None = None,
    token_counts: Tensor | None = None, repetition_penalty_rows: Tensor | None = None,
    presence_penalty_rows: Tensor | None = None, frequency_penalty_rows: Tensor | None = None,
    uniforms: Tensor | None = None, seed: int | None = None, seed_rows: Tensor | None = None,
    offset: int = 0, generator: torch.Generator | None = None, from_probs: bool = False,
    return_logprobs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    uniform, word = None, 0
    if uniforms is None and seed is not None and seed_rows is None:
        word = as_int64(mix_int(mix_int(seed) + offset * GOLDEN) + GOLDEN)
    else:
        uniform = random_numbers(len(logits), 1, logits.device, uniforms, seed, seed_rows, offset,
                                 generator).contiguous()
    if history is not None or token_counts is not None:
        logits = apply_penalties(logits, history, token_counts, Penalties(
            scalar_or_column(repetition_penalty, repetition_penalty_rows),
            scalar_or_column(presence_penalty, presence_penalty_rows),
            scalar_or_column(frequency_penalty, frequency_penalty_rows)))
    token, chosen, total = choose(logits, temperature, top_k, top_p, min_p, uniform, word,
                                  from_probs)
    if not return_logprobs:
        return token
    acc_dtype = torch.promote_types(logits.dtype, torch.float32)
    return token, torch.where(total > 0, chosen.log() - total.log(), -torch.inf).to(acc_dtype)
