"""Sizes that do not fit a narrow integer, and tensors of every rank.

- `index_calls`: every size just past 2^15 and past 2^16, the others as small as allowed: what is
  counted or indexed in 16 bits shows there. Lengths come with the arguments of the op's cases: only
  a causal mask, a window or a bias may read a position. Then cases of the op with one length past
  2^16 and all else as they say, for kernels of few queries and shared heads.
- `rank_calls`: shapes of rows with one to four dimensions, each larger than one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...machine.faults import FAULTS
from ...spec.op import Op
from ..kernel.contract import case_tensors, case_values_to_read, formula
from .drawn_sizes import (
    arguments_of_cases,
    bounds,
    consistent,
    counts_of,
    lists_of_lengths,
    open_shapes,
    shares,
    sizes_of,
)
from .generated import MAX_FLOPS, Case, relative_cost

WIDTHS = (1 << 15, 1 << 16)
PAST = 1_200                                   # at most so far past them
MOST_OF_ONE = WIDTHS[-1] + PAST
RANKS = (1, 2, 3, 4)
MOST = {"quick": 8, "full": 400, "stress": 400}       # calls with arguments
MOST_OF_CASES = {"quick": 7, "full": 64, "stress": 64}  # calls after the op's own cases
FEW = 8                                        # at most so many queries of a long context
LOOPS = ("linear_attention", "moe", "sampling")        # families of formulas that go token by token


@lru_cache(maxsize=64)
def features(op: Op) -> frozenset[str]:
    """Returns the sizes of the last dimension of the main tensor: a kernel may demand eight."""
    def last(case: Case) -> int:
        return case_tensors(op, case, op.dtypes[0])[op.main_tensor].shape[-1]

    def changes(name: str) -> bool:
        try:
            return last(_past(op, name, 16, 8)) != last(_past(op, name, 32, 8))
        except FAULTS:                         # it is no call
            return False

    return frozenset(n for n, d in sizes_of(op).items() if type(d) is int and changes(n))


def _past(op: Op, name: str, n: int, few: int, wide: int = 8,
          lists: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the sizes of a call in which one is `n`, of a list of lengths the first; of the
    others there are few, and `wide` numbers in a row."""
    is_wide = features(op) if few != wide else frozenset()
    sizes: dict[str, Any] = {
        m: 1 if m in counts_of(op) else min(d, wide if m in is_wide else few) if type(d) is int
        else (*(1,) * (len(d) - 1), min(d[-1], few)) for m, d in sizes_of(op).items()}
    sizes |= dict.fromkeys(open_shapes(op), (1,))
    # of two sequences: what the second one begins at is past it too
    of_lists = lists_of_lengths(op)
    sizes |= {m: (few, 1) for m in of_lists if m in sizes or m in (*lists, name)}
    shape = sizes[name]
    sizes[name] = n if type(shape) is int else (n, 5) if name in of_lists else (*shape[:-1], n)
    sizes |= {bound: n for size, bound in bounds(op) if size == name}
    return consistent(op, sizes)


class _Count(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **kwargs or {})


@lru_cache(maxsize=512)
def is_looped(op: Op, name: str) -> bool:
    """Does the formula go through this size step by step? It would take seconds."""
    counts = []
    for n in (16, 48):
        try:
            values = case_values_to_read(op, _past(op, name, n, 3, 8, lists_of_lengths(op)),
                                         op.dtypes[0])
            with torch.no_grad(), _Count() as counted:
                formula(op, values)
        except FAULTS:                         # it is no call
            return False
        counts.append(counted.calls)
    return counts[1] >= counts[0] + 32


@lru_cache(maxsize=1024)
def _few(op: Op, name: str, lists: tuple[str, ...]) -> tuple[int, int] | None:
    """Returns how many there may be of other sizes beside a large one, by what smaller calls cost;
    None where even the least is too much, or the cost grows with its square."""
    if is_looped(op, name):
        return None
    for few, wide in ((3, 8), (1, 8), (2, 2), (1, 1)):
        for n in (256, 250):                   # not every size is allowed
            low, high = (relative_cost(op, _past(op, name, m, few, wide, lists))
                         for m in (n, 2 * n))
            if low and high and high < 2.5 * low and high * MOST_OF_ONE / (2 * n) < MAX_FLOPS:
                return few, wide
    return None


def _with_arguments(op: Op, rng: random.Random, lengths: list[str],
                    most: int) -> list[tuple[str, Case]]:
    """Returns lengths with what a case of the op gives, so that each argument is given beside
    each length before one is given twice."""
    pairs = [(n, o) for o in arguments_of_cases(op) if o for n in lengths]
    rng.shuffle(pairs)
    chosen: list[tuple[str, Case]] = []
    seen: set[tuple[str, str]] = set()
    while pairs and len(chosen) < most:
        best = max(pairs, key=lambda pair: len({(pair[0], o) for o in pair[1]} - seen))
        seen |= {(best[0], o) for o in best[1]}
        pairs.remove(best)
        chosen.append(best)
    return chosen


def _long_cases(op: Op, most: int) -> list[tuple[str, Case]]:
    """Returns the op's own cases with few of one length beside many of another, and which one is
    long: a kernel for one query, or for heads that share keys, accepts no other. Those with the
    fewest arguments come first, each for two traits that none before it has together."""
    lengths = [n for n, d in sizes_of(op).items()
               if type(d) is int and n not in counts_of(op) and n not in features(op)]
    known = [*map(repr, arguments_of_cases(op))]
    found: list[tuple[str, Case, Case]] = []
    for case in op.cases:
        arguments = {n: v for n, v in case.items() if n not in sizes_of(op)}
        given = sorted((case[n], n) for n in lengths if n in case)
        if (len(given) > 1 and repr(arguments) in known and 0 < given[0][0] <= FEW
                and given[-1][0] > 4 * given[0][0]):
            found.append((given[-1][1], case, arguments))
    chosen: list[tuple[str, Case]] = []
    seen: set[frozenset[Any]] = set()
    for name, case, extra in sorted(found, key=lambda row: len(row[2])):
        sizes = {n: case.get(n, d) for n, d in sizes_of(op).items()}
        traits = [(n, repr(v)) for n, v in extra.items()]
        traits += [(n, sizes[n]) for n in lengths if n != name]
        traits += [(many, "shared") for many, few in shares(op) if sizes[many] > sizes[few]]
        pairs = {frozenset(pair) for pair in combinations(traits, 2)} or {frozenset(traits)}
        if not pairs <= seen and len(chosen) < most:
            seen |= pairs
            chosen.append((name, case))
    return chosen


def _lengthened(op: Op, case: Case, name: str, n: int) -> Case:
    """Returns a case with `n` of one length, as many of the others and of heads as it says, and
    rows of eight numbers."""
    kept = {m: v for m, v in case.items() if m != name and m not in features(op)}
    sizes = {**_past(op, name, n, 1), **{m: v for m, v in kept.items() if m in sizes_of(op)}}
    return {**kept, **consistent(op, {**sizes, **_heads(op, case)})}


def _heads(op: Op, case: Case) -> dict[str, int]:
    """Returns the shared heads of a case and those that share them, the defaults among them."""
    names = {n for pair in shares(op) if not {*pair}.isdisjoint(case) for n in pair}
    return {n: case.get(n, sizes_of(op)[n]) for n in names}


@lru_cache(maxsize=64)
def index_calls(op: Op, lane: str, seed: int) -> tuple[tuple[Case, ...], ...]:
    """Returns calls with one size past 2^15 or 2^16, each with others for kernels that demand
    a multiple of 256, or one query. Batches and heads, which `model_sizes` has past both, come
    last and in the longer lanes: what computes one at a time takes seconds for them."""
    rng = random.Random(f"index sizes {op.name} {seed}")
    lists, counts = lists_of_lengths(op), counts_of(op)
    names = list(dict.fromkeys((*sizes_of(op), *lists)))
    lengths = [n for n in names if n not in counts]
    # how wide a row is has little to do with arguments where there are other lengths
    positions = [n for n in lengths if n not in features(op)] or lengths
    # a BlockMask takes longer to make than its call
    has_objects = any(p.kind == "object" for p in op.params)
    most = MOST[lane] // (4 if has_objects else 2 if op.family in LOOPS else 1)
    # of each two calls with an argument one is past 2^15, the other past 2^16
    chosen: list[tuple[str, int, Case]] = [
        (n, WIDTHS[(i + seed) % 2], o)
        for i, (n, o) in enumerate(_with_arguments(op, rng, positions, most))]
    # some kernels serve calls with one switch alone, as for the log-sum-exp
    switches = [o for o in arguments_of_cases(op) if [*o.values()] == [True]]
    chosen += [(positions[-1], WIDTHS[-1], o) for o in switches if positions
               and not any(o == extra for *_, extra in chosen)]
    chosen += [(n, width, {}) for n in (*lengths, *(counts if lane != "quick" else ()))
               for width in WIDTHS]
    calls: list[tuple[Case, ...]] = []
    for i, (name, width, extra) in enumerate(chosen):
        n = width + rng.randrange(257, PAST)
        for given in (lists, ()) if i // 2 % 2 else ((), lists):
            few = _few(op, name, given)
            if few is None:
                continue
            cost = relative_cost(op, {**_past(op, name, 256, *few, given), **extra}) or 0.0
            if not extra or cost * n / 256 < 2 * MAX_FLOPS:
                calls.append(tuple({**_past(op, name, m, least, few[1], given), **extra}
                                   for m, least in ((n, few[0]), (n // 256 * 256, few[0]), (n, 1))))
            break
    for name, case in _long_cases(op, MOST_OF_CASES[lane]):
        n = WIDTHS[-1] + rng.randrange(257, PAST)
        cost = relative_cost(op, _lengthened(op, case, name, 256)) or math.inf
        if cost * n / 256 < 2 * MAX_FLOPS and not is_looped(op, name):
            calls.append(tuple(_lengthened(op, case, name, m) for m in (n, n // 256 * 256)))
    return tuple(calls)


@lru_cache(maxsize=64)
def rank_calls(op: Op, lane: str, seed: int) -> tuple[tuple[Case, ...], ...]:
    """Returns calls with rows of every rank, no dimension of them one, plain and with arguments."""
    rng, options = random.Random(f"ranks {op.name} {seed}"), arguments_of_cases(op)
    return tuple(
        ({**_past(op, name, 2, 3), **extra, name: tuple(rng.choice((2, 3)) for _ in range(rank))},)
        for name in sorted(open_shapes(op)) for rank in RANKS
        for extra in ({}, *rng.sample(options, min(len(options), 1 if lane == "quick" else 12))))


def index_and_rank_calls(op: Op, lane: str,
                         seed: int) -> Iterator[tuple[str, list[list[Case]]]]:
    """Yields the calls of this module by name."""
    for name, calls in (("indices past 16 bits", index_calls(op, lane, seed)),
                        ("every rank", rank_calls(op, lane, seed))):
        if calls:
            yield name, [list(cases) for cases in calls]
