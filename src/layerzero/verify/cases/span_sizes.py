"""Sizes that meet where a kernel divides: a few queries at the end of keys that end shortly behind
a multiple of what it takes at once, and numbers that are off by default.

- `span_calls`: of the last part of the keys, or split, some of the queries see nothing, and those
  before it they see whole.
- `optional_size_calls`: a chunk, a state, a capacity, another head size for values: what is 0 by
  default is no size to other checks, and the op's cases give two or three of each.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from functools import lru_cache

from ...spec.op import Op
from ..kernel.case_sizes import numbers_of
from .drawn_sizes import arguments_of_cases, consistent, small_draw
from .generated import Case

# Queries and keys, as the input generators name them.
SPANS = (("sq", "sk"), ("lengths_q", "lengths_k"), ("lengths_q", "context"))
UNEVEN = (2, 0), (1, 2, 0), (3, 0, 0, 1)       # as many tokens as sequences
STEPS, MOST_QUERIES = (16, 64, 128, 256, 512), 8
LONGEST = 640
DRAWN = {"quick": 8}                           # of each optional size; a longer lane has 40
CAUSAL = {"causal": True, "align": "bottom_right"}


def span_calls(op: Op, lane: str, seed: int) -> list[list[Case]]:
    """Returns causal calls of a few queries, as in speculative decoding, of which the first see
    nothing of the last step, each with arguments of a case and without; and calls of as many tokens
    as sequences, not one in each."""
    defaults = inspect.signature(op.inputs).parameters
    names = next((pair for pair in SPANS if set(pair) <= defaults.keys()), None)
    if names is None or "causal" not in defaults:
        return []
    rng, options = random.Random(f"spans {op.name} {seed}"), arguments_of_cases(op)
    causal = {n: v for n, v in CAUSAL.items() if n in defaults}
    few = {n: min(d, 16) if type(d) is int else d for n, d in numbers_of(op).items()}
    calls: list[list[Case]] = []
    for step in STEPS * (1 if lane == "quick" else 3):
        queries = rng.randint(2, MOST_QUERIES)
        keys = step * rng.randint(1, max(LONGEST // step, 1)) + rng.randint(1, queries - 1)
        sizes = {names[0]: (queries, 1), names[1]: (keys, 5)} if names[0] != "sq" else {
            names[0]: queries, names[1]: keys}
        option = {n: v for n, v in rng.choice(options).items() if n not in sizes}
        calls.append([consistent(op, {**few, **extra, **sizes}) for extra in (
            {**option, **causal}, causal)])
    # it is no step of decoding, one token for each
    for lengths in UNEVEN if names[0] != "sq" else ():
        some = rng.sample(lengths, len(lengths))
        uneven = {names[0]: tuple(some), names[1]: tuple(n + rng.randint(1, 40) for n in some)}
        calls += [[consistent(op, {**few, **extra, **uneven})] for extra in (causal, {})]
    return calls


@lru_cache(maxsize=64)
def optional_sizes(op: Op) -> Mapping[str, tuple[Case, ...]]:
    """Returns the cases that give each number of the input generator that is 0 by default."""
    given = {n: tuple(case for case in op.cases if type(case.get(n)) is int) for n in _off(op)}
    return {n: cases for n, cases in given.items() if cases}


def _off(op: Op) -> list[str]:
    return [n for n, p in inspect.signature(op.inputs).parameters.items()
            if type(p.default) is int and p.default == 0 and n != "seed"]


def optional_size_calls(op: Op, lane: str, seed: int) -> list[list[Case]]:
    """Returns cases with another such number, at times one of hundreds: alone, or beside a size
    that is larger still, as the rows of a capacity."""
    rng = random.Random(f"optional sizes {op.name} {seed}")
    draw, sizes = small_draw(op, rng), numbers_of(op)
    without = set(_off(op)) - optional_sizes(op).keys()
    # making a BlockMask costs more than a call
    part = 4 if any(p.kind == "object" for p in op.params) else 1
    calls: list[list[Case]] = []
    for name, cases in optional_sizes(op).items():
        for i in range(DRAWN.get(lane, 40) // part):
            n = rng.randint(2, 130) if i % 8 else rng.randint(131, LONGEST)
            case = {**rng.choice(cases), name: n}
            larger = rng.choice([s for s in sizes if s not in case] or [name])
            size = sizes.get(larger)
            beside = {} if larger == name else {larger: 2 * n + draw(larger)} \
                if type(size) is int else {larger: (2 * n + draw(larger),)}
            roomy = {**case, **dict.fromkeys(without, 5 * n)}
            even = {**case, name: n // 16 * 16 or 16}
            calls.append([*([{**case, **beside}] if i % 8 in (0, 3) and beside else []), case,
                          *([roomy] if without else []), even])
    return calls
