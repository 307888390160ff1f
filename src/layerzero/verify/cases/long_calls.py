"""Calls of a few hundred tokens, rows or columns beside the arguments of each of the op's cases.

A kernel that goes in tiles, splits or chunks has several of them there, the last one not full, of
which a mask may hide one, or targets that are ignored; and the other sizes are at times one, where
many kernels have a path of their own.
"""

from __future__ import annotations

import random
from typing import Any

from ...spec.op import Op
from ..kernel.case_sizes import numbers_of
from .drawn_sizes import (
    arguments_of_cases,
    consistent,
    counts_of,
    lists_of_lengths,
    open_shapes,
    sizes_of,
)
from .generated import MAX_FLOPS, Case, relative_cost
from .index_sizes import LOOPS, features

MOST = {"quick": 12}                           # of a seed; a longer lane has all
SHORTEST, LONGEST = 140, 1_100
STEPS = (1, 8, 32, 64, 256)                    # of which formats and kernels demand a multiple


def long_calls(op: Op, lane: str, seed: int) -> list[list[Case]]:
    """Returns calls with one size of a few hundred, an odd number or an odd multiple of a step:
    after the first come those with a larger step, for what demands one."""
    rng, counts = random.Random(f"long {op.name} {seed}"), counts_of(op) - open_shapes(op)
    pairs = [(name, option) for name in sizes_of(op) if name not in counts
             for option in arguments_of_cases(op) if name not in option]
    rng.shuffle(pairs)
    pairs *= 1 if lane == "quick" else 2       # a size of one, and another
    calls: list[list[Case]] = []
    for name, option in pairs:
        if len(calls) == MOST.get(lane):
            break
        n = int(SHORTEST * (LONGEST / SHORTEST) ** rng.random()) // (
            8 if op.family in LOOPS else 1)
        others = {other: _small(size, 8 if other in features(op) else rng.choice((1, 3, 5)))
                  for other, size in numbers_of(op).items()}
        steps = ({**others, **option, name: _long(op, name, others[name], (n // step | 1) * step)}
                 for step in STEPS if step <= 2 * n)
        affordable: list[Case] = [consistent(op, case) for case in steps
                      if (relative_cost(op, case) or 0.0) <= MAX_FLOPS / 8]
        calls += [affordable] if affordable else []
    return calls


def _small(size: Any, most: int) -> Any:
    return min(size, most) if type(size) is int else tuple(min(i, most) for i in size)


def _long(op: Op, name: str, small: Any, n: int) -> Any:
    """Returns the size itself; of lengths one long sequence behind another, of rows the last
    dimension."""
    if type(small) is int:
        return n
    return (*small, n) if name in lists_of_lengths(op)[:1] and len(small) < 2 \
        else (*small[:-1], n)
