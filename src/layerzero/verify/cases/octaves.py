"""Sizes of models between those that other cases have: of every size of an op a few between each
two powers of two.

A kernel often has a path for each power of two, as for so many numbers in the registers of a
thread: 2,560, 5,120 and 7,168 are then on paths that neither 2,048 nor 20,000 is. Of each octave
there are its beginning, the quarters between, as most models have them, and drawn ones: a multiple
of 128, one of eight, an odd one. `gradient_sizes` has smaller ones for backward passes,
`bulk_calls` two large sizes at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.op import Op
from ..kernel.case_sizes import numbers_of
from ..kernel.contract import case_outline, results_of
from .drawn_sizes import (
    allowed_facts,
    arguments_of_cases,
    consistent,
    counts_of,
    lists_of_lengths,
    open_shapes,
    sizes_of,
)
from .generated import MAX_FLOPS, Case, is_costly, relative_cost
from .index_sizes import LOOPS, features, is_looped

OCTAVES, QUARTERS = range(8, 16), (4, 5, 6, 7)
BULK, BULK_PAIRS = (1_500_000, 5_300_000, 9_700_000), 3      # numbers of a tensor
BULK_FLOPS, SQUARE_FLOPS = 2e8, 2e8
ITEMS = (1_101, 301, 2_203)                    # sequences
LOOPED = 1 << 11                               # where the formula goes step by step
GRADIENT_SIZES = (8, 16, 24, 31, 32, 33, 48, 63, 64, 65, 80, 96, 127, 128, 129, 160, 192, 224, 255,
                  256, 257, 320, 384, 511, 512, 513, 640, 768, 1000, 1024, 1280, 1536, 2048, 2560,
                  3072, 4096, 5120)


def _between(rng: random.Random, octave: int) -> list[int]:
    low = 1 << octave
    drawn = (128 * rng.randrange(low // 128 + 1, low // 64), 8 * rng.randrange(low // 8, low // 4),
             rng.randrange(low + 1, 2 * low, 2))
    return [*(quarter * low // 4 for quarter in QUARTERS), *drawn]


@lru_cache(maxsize=64)
def octave_calls(op: Op, seed: int) -> tuple[tuple[Case, ...], ...]:
    """Returns calls with one such size and few of all else, plain and with arguments of the op's
    cases in turn; each with another for what demands a multiple of 256."""
    rng = random.Random(f"octaves {op.name} {seed}")
    sizes = {n: [size for octave in OCTAVES for size in _between(rng, octave)] for n in _names(op)}
    return tuple(_calls(op, rng, sizes, arguments_of_cases(op), MAX_FLOPS / 4))


@lru_cache(maxsize=64)
def gradient_sizes(op: Op, seed: int) -> tuple[tuple[Case, ...], ...]:
    """Returns smaller calls for the gradients of the op, with arguments of its gradient cases."""
    rng = random.Random(f"gradient sizes {op.name} {seed}")
    given = arguments_of_cases(op) if not op.gradient_cases else tuple(
        o for o in arguments_of_cases(op) if not o or any(
            o.items() <= case.items() for case in op.gradient_cases))
    sizes = {n: list(GRADIENT_SIZES) for n in _names(op)}
    return tuple(_calls(op, rng, sizes, given, MAX_FLOPS / 16))


def _names(op: Op) -> list[str]:
    lists = lists_of_lengths(op)
    return list(dict.fromkeys((*sizes_of(op), *lists[:1])))


def _calls(op: Op, rng: random.Random, sizes: dict[str, list[int]], options: tuple[Case, ...],
           most: float) -> Iterator[tuple[Case, ...]]:
    given = [o for o in options if o]
    for name, drawn in sizes.items():
        longest = LOOPED if op.family in LOOPS or is_looped(op, name) else max(drawn)
        turn = rng.randrange(2)
        for i, n in enumerate(drawn):
            if n > longest:
                continue
            option = rng.choice(given) if given and (i + turn) % 2 else {}
            option = {} if name in option else option
            few = _few(op, rng)
            found = [case for m in dict.fromkeys((n, max(n // 256, 1) * 256))
                     for extra in ((option, {}) if option else ({},))
                     if (case := _call(op, few, name, m, extra, most)) is not None]
            if found:
                yield tuple(found)


def _few(op: Op, rng: random.Random) -> dict[str, Any]:
    """Returns few of every size, at times one; eight of what is in a row."""
    return {n: _least(d, 8 if n in features(op) else rng.choice((1, 2, 3, 5)))
            for n, d in numbers_of(op).items()}


def _call(op: Op, few: dict[str, Any], name: str, n: int, option: Case,
          most: float) -> Case | None:
    shape = few.get(name, (2,))
    size: Any = n if type(shape) is int else (2, n, 3) if name in lists_of_lengths(op) \
        else (n,) if name in open_shapes(op) else (*shape[:-1], n)
    return _checked(op, consistent(op, {**few, **option, name: size}), most)


def _checked(op: Op, case: Case, most: float) -> Case | None:
    """Returns the case where the contract allows it and it costs no more."""
    if (relative_cost(op, case) or 0.0) > most or allowed_facts(op, case, op.dtypes[0]) is None:
        return None
    return case


def _least(size: Any, most: int) -> Any:
    return min(size, most) if type(size) is int else tuple(min(i, most) for i in size)


# Many numbers at once.

@lru_cache(maxsize=64)
def bulk_calls(op: Op, seed: int) -> tuple[tuple[Case, ...], ...]:
    """Returns calls with millions of numbers in one tensor, as activations of a model have: two
    of its sizes are large together, neither of them a power of two; and one with the arguments of
    each case. What a kernel shares among threads, or does part by part, it does for as many
    alone."""
    rng = random.Random(f"bulk {op.name} {seed}")
    names = [n for n in _factors(op) if not (op.family in LOOPS or is_looped(op, n))]
    pairs = list(combinations(names, 2))
    rng.shuffle(pairs)
    pairs.sort(key=lambda pair: not _main_grows(op, pair))     # what is called for first
    calls: list[tuple[Case, ...]] = []
    asked: list[tuple[tuple[str, str], int, Case]] = [
        (pair, elements, {}) for pair, elements in product(pairs[:BULK_PAIRS], BULK)]
    asked += [(pair, BULK[0], option) for option in arguments_of_cases(op)
              for pair in pairs[:1] if option and not option.keys() & set(pair)]
    for pair, elements, option in asked:
        found = [case for step in (1, 8, 64)
                 if (case := _bulk(op, rng, pair, elements, step, option)) is not None]
        calls += [tuple(found)] if found else []
    return tuple(calls)


@lru_cache(maxsize=64)
def item_calls(op: Op, seed: int) -> tuple[tuple[Case, ...], ...]:
    """Returns calls with hundreds and thousands of sequences of few tokens."""
    rng = random.Random(f"items {op.name} {seed}")
    calls = (consistent(op, {**_few(op, rng), name: tuple(1 + i % 3 for i in range(count))})
             for name, count in product(lists_of_lengths(op)[:1], ITEMS))
    return tuple((case,) for case in calls if _checked(op, case, BULK_FLOPS) is not None)


def _factors(op: Op) -> list[str]:
    """Returns the sizes of which there are twice as many numbers where they are twice as large."""
    def elements(name: str, n: int) -> int:
        return _elements(op, consistent(op, {**_few(op, random.Random(0)), name: _of(op, name, n)}))

    found = []
    for name in _names(op):
        try:
            found += [name] if elements(name, 64) == 2 * elements(name, 32) else []
        except FAULTS:                         # it is no call
            continue
    return found


def _main_grows(op: Op, pair: tuple[str, str]) -> bool:
    one, two = (case_outline(op, consistent(op, {
        **_few(op, random.Random(0)), **{name: _of(op, name, n) for name in pair}}),
        op.dtypes[0])[op.main_tensor].numel() for n in (16, 32))
    return two == 4 * one


def _elements(op: Op, case: Case) -> int:
    """Returns the numbers of the largest tensor or result."""
    values = case_outline(op, case, op.dtypes[0])
    results = results_of(op.meta(**values))
    return max(t.numel() for t in (*values.values(), *results) if isinstance(t, Tensor))


def _bulk(op: Op, rng: random.Random, pair: tuple[str, str], elements: int, step: int,
          option: Case) -> Case | None:
    few = {n: _least(d, 2) for n, d in numbers_of(op).items()}
    few |= {**{n: 8 for n in features(op) if n not in pair}, **option}
    first = int(math.sqrt(elements) * 2 ** rng.uniform(-2, 2)) // step * step | (step == 1)
    sizes = {pair[0]: max(first, step), pair[1]: 64}
    try:
        case = consistent(op, {**few, **{n: _of(op, n, size) for n, size in sizes.items()}})
        unit = max(_elements(op, case) / 64, first / 4)
        second = max(int(elements / unit) // step * step | (step == 1), step)
        case = consistent(op, {**case, pair[1]: _of(op, pair[1], second)})
        facts = allowed_facts(op, case, op.dtypes[0])
        if facts is None or is_costly(op, case, BULK_FLOPS):
            return None
    except FAULTS:                             # it is no call
        return None
    return case


def _of(op: Op, name: str, n: int) -> Any:
    default = sizes_of(op).get(name, (2,))
    return n if type(default) is int else (n,) if name in open_shapes(op) \
        or name in lists_of_lengths(op) else (*(1,) * (len(default) - 1), n)


@lru_cache(maxsize=64)
def square_calls(op: Op, seed: int, less: int = 1) -> tuple[tuple[Case, ...], ...]:
    """Returns calls in which all lengths are several hundred at once, or so many times `less`: as
    many queries as keys or half as many, beside the arguments of each case. Tiles that a diagonal
    or a window skips are in both directions several."""
    rng, lists = random.Random(f"squares {op.name} {seed}"), lists_of_lengths(op)
    # beside lists other lengths are those of pages
    lengths = [] if lists else [n for n in _names(op) if n not in counts_of(op)
                                and n not in features(op)]
    if len(lengths) + len(lists) < 2 or op.family in LOOPS:
        return ()
    calls: list[tuple[Case, ...]] = []
    for i, (option, part) in enumerate(product(arguments_of_cases(op), (1, 2))):
        n = rng.choice((rng.randrange(400, 700), rng.randrange(700, 1300), 512, 1024)) // less
        sizes = {**dict.fromkeys(lengths, n), **dict.fromkeys(lists, (n, 3))}
        shorter: dict[str, Any] = dict.fromkeys(lists[1:], (n // part, 2)) if lists else {
            lengths[0]: n // part}
        if option.keys() & sizes.keys() or (part == 2 and i % 4 > 1):
            continue
        found = [case for extra in ({**option, **shorter}, option) if (case := _checked(
            op, consistent(op, {**_few(op, rng), **sizes, **extra}), SQUARE_FLOPS)) is not None]
        calls += [tuple(found)] if found else []
    return tuple(calls)

