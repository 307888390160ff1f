"""Sizes of a call, all drawn at once: the sizes of a call bound each other, and a kernel may be
wrong for a share of heads, or where no size is a multiple of what it goes in steps of.

- `shares`: of which size another one is a multiple, as query heads of KV heads; `bounds`: which
  size may not exceed another. Both are found by asking the contract.
- `draw_sizes`: sizes that keep to both; lists of lengths are independent of each other.
- `odd_calls`, `shared_calls`: calls of every op with such sizes and arguments of its cases.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import permutations
from typing import Any

from ...machine.faults import FAULTS
from ...spec.op import Op
from ..kernel.case_sizes import numbers_of
from ..kernel.contract import case_facts, case_outline, case_tensors
from .generated import Case, is_degenerate

SHARES = (1, 2, 3, 4, 5, 6, 7, 8, 12)          # heads that read one shared head
ODD = {"quick": 16, "full": 48, "stress": 48}
Draw = Callable[[str], int]


def allowed_facts(op: Op, case: Case, dtype: str, seed: int = 0) -> Mapping[str, Any] | None:
    """Returns the facts of a call; None where the contract does not allow it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            facts = case_facts(op, case, dtype, seed=seed)
            if any(rule.check(facts) is not None for rule in op.requires) or is_degenerate(op,
                                                                                          facts):
                return None
            if op.extra_check is not None:
                op.extra_check(case_outline(op, case, dtype, seed=seed), facts)
        except FAULTS:                         # an invalid combination may raise anything
            return None
    return facts


def are_lengths(op: Op, few: Case, more: Case) -> bool:
    """Does a longer tuple make more sequences, and not a tensor of more dimensions?"""
    try:
        a, b = (case_tensors(op, case, op.dtypes[0])[op.main_tensor].dim() for case in (few, more))
    except FAULTS:
        return False
    return a == b


# What the sizes of an op have to do with each other.

@lru_cache(maxsize=64)
def sizes_of(op: Op) -> Mapping[str, Any]:
    """Returns the sizes of the input generator that are not off by default."""
    return {n: d for n, d in numbers_of(op).items() if type(d) is tuple or d > 0}


def _ones(op: Op) -> dict[str, Any]:
    return {n: 1 if type(d) is int else (1,) * len(d) for n, d in sizes_of(op).items()}


def _has_objects(op: Op) -> bool:
    return any(p.kind == "object" for p in op.params)


@lru_cache(maxsize=64)
def shares(op: Op) -> tuple[tuple[str, str], ...]:
    """Returns (many, few) for sizes of which the first must be a multiple of the second."""
    # making a BlockMask takes long, and it has nothing to do with heads
    names = [n for n, d in sizes_of(op).items() if type(d) is int
             and (d <= 8 or not _has_objects(op))]

    def allows(many: str, few: str, a: int, b: int) -> bool:
        return allowed_facts(op, {**_ones(op), many: a, few: b}, op.dtypes[0]) is not None

    return tuple((many, few) for many, few in permutations(names, 2)
                 if not allows(many, few, 6, 4) and allows(many, few, 6, 3)
                 and allows(many, few, 6, 2) and not allows(many, few, 3, 6))


@lru_cache(maxsize=64)
def bounds(op: Op) -> tuple[tuple[str, str], ...]:
    """Returns (size, bound) for sizes of which the first may not exceed the second."""
    names = [n for n, d in sizes_of(op).items() if type(d) is int and not _has_objects(op)]

    def allows(size: str, bound: str, a: int, b: int) -> bool:
        case = {**_ones(op), size: a, bound: b}
        multiples = {many: 12 for many, few in shares(op) if few in (size, bound)}
        return allowed_facts(op, {**case, **multiples}, op.dtypes[0]) is not None

    return tuple((size, bound) for size, bound in permutations(names, 2)
                 if (size, bound) not in shares(op) and (bound, size) not in shares(op)
                 and not allows(size, bound, 6, 4) and allows(size, bound, 6, 6)
                 and allows(size, bound, 4, 6))


@lru_cache(maxsize=64)
def lists_of_lengths(op: Op) -> tuple[str, ...]:
    """Returns the lists of lengths, one for each sequence, those first that every call has: of
    queries, and of keys where a case gives them apart."""
    ones, defaults = _ones(op), inspect.signature(op.inputs).parameters
    tuples = {n: ones.get(n, p.default) for n, p in defaults.items()
              if n not in op.by_name and _are_numbers(p.default)}
    always = [n for n, d in tuples.items() if are_lengths(op, ones, {**ones, n: (*d, 1)})]
    apart = dict.fromkeys(n for case in op.cases for n, v in case.items()
                          if n not in numbers_of(op) and n not in op.by_name and _are_numbers(v))
    return (*always, *(n for n in apart if always and allowed_facts(
        op, {**ones, always[0]: (2, 2, 2), n: (1, 3, 2)}, op.dtypes[0]) is not None
        and allowed_facts(op, {**ones, always[0]: (2, 2, 2), n: (1, 3)}, op.dtypes[0]) is None))


@lru_cache(maxsize=64)
def counts_of(op: Op) -> frozenset[str]:
    """Returns the sizes of which there are few: batches, heads, rows."""
    return open_shapes(op) | {n for n, d in sizes_of(op).items() if type(d) is int and d <= 8}


@lru_cache(maxsize=64)
def open_shapes(op: Op) -> frozenset[str]:
    """Returns the tuples that may have any number of dimensions, as rows."""
    ones, lists = _ones(op), lists_of_lengths(op)
    # a norm of one number is no call
    bases = ones, {n: 2 if type(d) is int else d for n, d in ones.items()}
    return frozenset(n for n, d in ones.items() if type(d) is tuple and len(d) == 1
                     and n not in lists and any(allowed_facts(
                         op, {**base, n: (2, 2, 2)}, op.dtypes[0]) is not None for base in bases))


def _are_numbers(value: Any) -> bool:
    return type(value) is tuple and bool(value) and all(type(i) is int and i >= 0 for i in value)


# Drawing.

def draw_sizes(op: Op, rng: random.Random, draw: Draw,
               share: Callable[[str], int] = lambda many: 1,
               lists: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Returns all sizes of a call as they are drawn, but that a multiple is `share` times what it
    is a multiple of and no size exceeds its bound; `lists`: of lengths, by default all."""
    lists = lists_of_lengths(op) if lists is None else lists
    sequences = rng.choice((1, 2, 3, 4))
    sizes: dict[str, Any] = {
        n: draw(n) if type(d) is int else tuple(draw(n) for _ in d) if n not in open_shapes(op)
        else _draw_shape(rng, draw(n)) for n, d in sizes_of(op).items()}
    sizes.update({n: tuple(draw(n) for _ in range(sequences)) for n in lists})
    return consistent(op, sizes, share)


def _draw_shape(rng: random.Random, size: int) -> tuple[int, ...]:
    """Returns one dimension, at times with one or two small ones before it."""
    return (*(rng.choice((1, 2, 3)) for _ in range(rng.choice((0, 0, 0, 1, 2)))), size)


def consistent(op: Op, sizes: Mapping[str, Any],
               share: Callable[[str], int] | None = None) -> dict[str, Any]:
    """Returns the sizes with multiples and bounds put right; a multiple is rounded up where there
    is no `share`."""
    fixed = dict(sizes)
    for many, few in shares(op):
        if many in fixed and few in fixed:
            fixed[many] = (fixed[few] * share(many) if share is not None
                           else -(-fixed[many] // fixed[few]) * fixed[few])
    for size, bound in bounds(op):
        if size in fixed and bound in fixed:
            fixed[size] = min(fixed[size], fixed[bound])
    return fixed


def draw_share(rng: random.Random) -> Callable[[str], int]:
    return lambda many: rng.choice(SHARES)


def small_draw(op: Op, rng: random.Random) -> Draw:
    """Returns how sizes of a small call are drawn: two or three shared heads, at times five to
    nine; a length from one to a few dozen; the others up to about twenty."""
    fews = {few for _, few in shares(op)}
    lengths = lists_of_lengths(op)

    def draw(name: str) -> int:
        if name in fews:
            return rng.choice((1, 2, 2, 3, 3, 5, 6, 9))
        if name in lengths:
            return rng.choice((rng.randrange(3), rng.randrange(1, 12), rng.randrange(12, 41)))
        default = sizes_of(op).get(name, 8)
        # sizes of which there are few are batches and heads
        if type(default) is int and default <= 4:
            return rng.choice((1, 2, 3, 5))
        return rng.choice((rng.randrange(2, 9), 8, rng.randrange(9, 20)))

    return draw


@lru_cache(maxsize=64)
def arguments_of_cases(op: Op) -> tuple[Case, ...]:
    """Returns what the op's cases give beside sizes, nothing first; no strides and the like, which
    other checks have, and no numbers so large that sums differ."""
    sizes, left_out = sizes_of(op), ("stride", "memory", "extreme", "large_pool", "far",
                                     "long_table")
    lists = lists_of_lengths(op)
    options = ({n: v for n, v in case.items() if n not in sizes and n not in lists}
               for case in ({}, *op.cases))
    unique = {repr(o): o for o in options if not set(left_out) & o.keys()}
    return tuple(unique.values())


@lru_cache(maxsize=64)
def _of_superblocks(op: Op) -> frozenset[str]:
    """Returns the sizes that cases of a format have as a multiple of 256, which it demands."""
    return frozenset(n for n in sizes_of(op) for case in op.cases
                     if type(case.get(n)) is int and "format" in case and case[n] % 256 == 0)


def odd_calls(op: Op, lane: str, seed: int) -> list[list[Case]]:
    """Returns calls in which no size is even or below nine, half of them with arguments. After
    each come others with a size that is a multiple of eight, for kernels that demand one."""
    rng, names = random.Random(f"odd {op.name} {seed}"), list(sizes_of(op))
    calls: list[list[Case]] = []
    options = list(arguments_of_cases(op))
    for i in range(ODD[lane] // (2 if op.family == "attention" else 1) if names else 0):
        longest = rng.choice([n for n in names if n not in counts_of(op)] or names)

        def draw(name: str, longest: str = longest) -> int:
            if name in counts_of(op):
                return rng.choice((9, 11, 13))
            return rng.randrange(21, 62, 2) if name == longest else rng.randrange(9, 18, 2)

        extra = rng.choice(options) if i % 2 else {}
        sizes = draw_sizes(op, rng, draw, lambda many: rng.choice((1, 3)),
                           lists_of_lengths(op)[:None if i % 4 else 1])
        case = {**sizes, **extra}
        rounded = ({**case, **consistent(op, {**sizes, name: sizes[name] // step * step + step})}
                   for name in names if type(sizes[name]) is int
                   for step in (8, *((256,) if name in _of_superblocks(op) else ())))
        calls.append([case, *rounded] if not extra else [case, *rounded, sizes])
    return calls


def shared_calls(op: Op, lane: str, seed: int) -> list[list[Case]]:
    """Returns calls with every number of heads that read a shared one, of two or three shared ones
    and of more, each with arguments of a case; after each come the sizes alone."""
    if not shares(op):
        return []
    rng, options = random.Random(f"shared {op.name} {seed}"), list(arguments_of_cases(op))
    draw, fews = small_draw(op, rng), {few for _, few in shares(op)}

    def call(share: int, few: int) -> list[Case]:
        sizes = draw_sizes(op, rng, lambda n: few if n in fews else draw(n), lambda many: share)
        return [{**sizes, **rng.choice(options)}, sizes]

    return [call(share, few) for _ in range(1 if lane == "quick" else 3) for share in SHARES
            for few in (rng.choice((2, 3)), rng.choice((5, 6, 7, 9, 10)))]


def drawn_calls(op: Op, lane: str, seed: int) -> Iterator[tuple[str, list[list[Case]]]]:
    """Yields the calls of this module by name."""
    for name, calls in (("all sizes odd", odd_calls(op, lane, seed)),
                        ("shared heads", shared_calls(op, lane, seed))):
        if calls:
            yield name, calls
