"""Arguments beside each other and beside sizes: a few calls with many arguments at once, chosen so
that what a kernel may do for one size, or for two arguments together, occurs in one of them.

- `sized_combinations`: every size that often has a path of its own (one, those of tiles) beside
  every value of an argument, and beside two arguments that are given together.
- `effective_cells`: every two arguments of the op in a call in which each of them changes the
  result: a window to the right shows nothing in a causal call.
- `cells_without_tensors`: pairs of argument values of an op that has no tensors.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, combinations, product
from typing import Any

import torch

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..kernel.case_sizes import relative_size
from ..kernel.contract import case_outline, case_refusals, case_tensors, case_values_to_read
from ..kernel.shared import compute_once
from .drawn_sizes import consistent, counts_of, lists_of_lengths, shares, sizes_of
from .generated import Case, affects_result, given_arguments
from .index_sizes import LOOPS
from .pairs import accepted_pool, argument_levels, pair_cases, pool_cases, small_sizes

TILES = (1, 8, 32, 64, 128)
BEYOND = range(257, 321)                       # more than a tile of 256, drawn for each call
ROWS = {"quick": 120, "full": 400, "stress": 400}
TEXTS = {"quick": 100, "full": 200, "stress": 200}
USUAL = 0.5                                    # times the size of the default call
COSTLY = ("attention",)                        # families of which fewer are run, and smaller
TRIES = 3                                      # calls that are tried for two arguments
LEVELS = 12                                    # values of one argument beside its default
EXTRA = {"quick": 6, "full": 60, "stress": 60}


def _cover(rows: Sequence[tuple[Case, int, int]], limit: int) -> list[Case]:
    """Returns cases that have most of the bits of all rows: those of the first number weigh four
    times as much as those of the second."""
    first = second = 0

    def gain(i: int) -> int:
        _, a, b = rows[i]
        return 4 * (a & ~first).bit_count() + (b & ~second).bit_count()

    # a gain only falls: the largest known one that is up to date is the largest of all
    heap, chosen = [(-gain(i), i) for i in range(len(rows))], []   # type: list[Any], list[Case]
    heapq.heapify(heap)
    while heap and len(chosen) < limit:
        known, i = heapq.heappop(heap)
        now = gain(i)
        if not now:
            continue
        if now < -known:
            heapq.heappush(heap, (-now, i))
            continue
        case, a, b = rows[i]
        first, second = first | a, second | b
        chosen.append(case)
    return chosen


class _Bits:
    """A bit for each element, in the order in which they come."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}

    def of(self, elements: Iterator[Any]) -> int:
        places = [self.places.setdefault(element, len(self.places)) for element in elements]
        bits = bytearray(len(self.places) // 8 + 1)
        for place in places:
            bits[place >> 3] |= 1 << (place & 7)
        return int.from_bytes(bits, "little")


@lru_cache(maxsize=64)
def _sized_rows(op: Op, lane: str, seed: int) -> Mapping[int, list[tuple[Case, int, int]]]:
    """Returns for each combination of arguments some calls with sizes of tiles, and which elements
    they have: the same for all kernels of the op, so that its formula is computed once."""
    rng, small = random.Random(f"sized {op.name} {seed}"), small_sizes(op)
    pairs, triples, drawn = _Bits(), _Bits(), {*sizes_of(op), *lists_of_lengths(op)}
    rows: dict[int, list[tuple[Case, int, int]]] = {}
    for i, case in enumerate(pool_cases(op, lane, seed)):
        rows[i] = []
        if "extreme" in case:                  # scores that grow with the head size, say
            continue
        options = {n: v for n, v in case.items() if n not in drawn}
        with_heads = _with_few(op, case, small)
        for name, n in product(small, (*TILES, rng.choice(BEYOND))):
            if n in BEYOND and ((op.family in COSTLY and name in counts_of(op))
                                or (op.family in LOOPS and i % 4)):
                continue
            heads = {few: 2 for _, few in shares(op)} | {many: 4 for many, _ in shares(op)}
            base = {**with_heads, **(heads if n in BEYOND else {})}
            sizes = _draw_sizes(op, rng, base, name, n)
            # beside one key, or one row, the others may show nothing
            named = {s: min(_last(v), BEYOND[0]) for s, v in sizes.items()}
            shown = [(name, 1)] if n == 1 and name in sizes else list(named.items())
            sized = consistent(op, {**base, **sizes})
            shown += [(f"share of {many}", sized[many] // sized[few]) for many, few in shares(op)
                      if many in sized and few in sized]
            rows[i].append((
                sized,
                pairs.of((s, o, repr(v)) for s in shown for o, v in options.items()),
                triples.of((s, *two) for s in shown
                           for two in combinations(sorted(options), 2))))
    return rows


@lru_cache(maxsize=256)
def sized_combinations(kernel: Kernel, device: str, lane: str,
                       seed: int) -> tuple[tuple[Case, ...], ...]:
    """Returns calls with sizes beside arguments, each with others that take its place where its
    sizes do not go together."""
    op, small, rows = kernel.op, small_sizes(kernel.op), _sized_rows(kernel.op, lane, seed)
    limit = ROWS[lane] * 2 // (3 if op.family in COSTLY else 2)
    chosen = _cover([row for i, _, _ in accepted_pool(kernel, device, lane, seed)
                     for row in rows[i]], limit)
    def others(case: Case) -> Iterator[Case]:
        for name in small:
            if _last(case[name]) in (*TILES, *BEYOND) and case[name] != small[name]:
                other = consistent(op, {**_with_few(op, case, small), name: case[name]})
                yield from () if other == case else (other,)

    return tuple((case, *others(case)) for case in chosen)


def _last(size: Any) -> int:
    return size if type(size) is int else size[-1] if size else 0


def _with_few(op: Op, case: Case, small: Case) -> dict[str, Any]:
    """Returns the case with small sizes but for its shared heads and lists of lengths, of which it
    has the last ones."""
    kept = {*chain(*shares(op)), *lists_of_lengths(op)}
    return {**case, **{n: v for n, v in small.items() if n not in kept}}


def _draw_sizes(op: Op, rng: random.Random, small: Case, first: str, size: int) -> dict[str, Any]:
    """Returns this size and some of tiles, as many as a call of a usual size may have."""
    names = [name for name in small_sizes(op) if small[name]]
    alone = size in BEYOND                     # large enough by itself
    drawn = {name: size if name == first else rng.choice(TILES[1:]) for name in names
             if name == first or (rng.random() < 0.4 and not alone)}
    sizes = {name: n if type(small[name]) is int else (*small[name][:-1], n)
             for name, n in drawn.items()}
    most = math.inf if alone else USUAL / 8 if op.family in COSTLY else USUAL
    while sizes and relative_size(op, {**small, **sizes}) > most:
        sizes.pop(rng.choice([name for name in sizes if name != first] or [first]))
    return sizes


@lru_cache(maxsize=256)
def effective_cells(kernel: Kernel, device: str, lane: str, seed: int) -> tuple[
        tuple[Case, str], ...]:
    """Returns calls for two arguments that no chosen pair of values has in effect together."""
    op, seen = kernel.op, set[tuple[str, str]]()

    def in_effect(cell: tuple[Case, str]) -> set[tuple[str, str]]:
        """Returns the pairs of a call that are new."""
        new = set(combinations(sorted(_given(op, *cell, seed)), 2)) - seen
        names = frozenset(name for name in set().union(*new)
                          if _is_effective(op, *cell, seed, name)) if new else frozenset()
        return {pair for pair in new if names.issuperset(pair)}

    for cell in pair_cases(kernel, device, lane, seed).cells:
        seen |= in_effect(cell)
    by_pair: dict[tuple[str, str], list[tuple[Case, str]]] = {}
    for _, case, dtype in accepted_pool(kernel, device, lane, seed):
        for pair in combinations(sorted(_given(op, case, dtype, seed)), 2):
            by_pair.setdefault(pair, []).append((case, dtype))
    cells: list[tuple[Case, str]] = []
    for pair in sorted(by_pair):
        for cell in sorted(by_pair[pair], key=lambda cell: len(cell[0]))[:TRIES]:
            if pair in seen or len(cells) >= EXTRA[lane]:
                break
            found = in_effect(cell)
            cells += [cell] if pair in found else []
            seen |= found
    return tuple(cells)


def _given(op: Op, case: Case, dtype: str, seed: int) -> frozenset[str]:
    return given_arguments(op, case_outline(op, case, dtype, seed=seed))


def _is_effective(op: Op, case: Case, dtype: str, seed: int, name: str) -> bool:
    """Has the call another result without the argument?"""
    key = ("effective", repr(case), dtype, seed, name)
    return bool(compute_once(op, key, lambda: affects_result(
        op, case_values_to_read(op, case, dtype, seed=seed), name)))


def wide_cells(kernel: Kernel, device: str, lane: str, seed: int) -> list[tuple[Case, str]]:
    """Returns some of the calls with several arguments in float64, of which an argument may have
    been computed in less; where one is given in less it must be."""
    op, cells = kernel.op, pair_cases(kernel, device, lane, seed).cells[seed % 3::3]

    def is_wide(case: Case) -> bool:
        try:
            tensors = case_tensors(op, case, "float64", device, seed).values()
        except FAULTS:                         # a generator may have no float64
            return False
        return {t.dtype for t in tensors if t.is_floating_point()} == {torch.float64}

    return [(case, "float64") for case, _ in cells if "float64" in op.tolerance.by_dtype
            and "extreme" not in case and is_wide(case)]


# Without tensors.

def _levels(op: Op) -> Mapping[str, list[Any]]:
    """Returns the values that the op's cases give to each name, beside what leaves it out."""
    levels: dict[str, list[Any]] = dict(argument_levels(op))
    for case in (*op.cases, *op.stress):
        for name, value in case.items():
            known = levels.setdefault(name, [None])
            known += [] if value in known else [value]
    for values in levels.values():             # where several may be given, one of them, and twice
        if any(type(v) is tuple for v in values):
            single = [v for v in values if type(v) is int]
            values += [v for i in single for v in ((i,), (i, i)) if v not in values]
    return levels


def cells_without_tensors(kernel: Kernel, device: str, lane: str,
                          seed: int) -> tuple[tuple[Case, str], ...]:
    """Returns calls with every pair of values that the contract allows, as far as a random pool
    has it."""
    dtype, accepted = kernel.op.dtypes[0], []
    for row in _rows_without_tensors(kernel.op, lane, seed):
        try:
            accepted += [] if case_refusals(kernel, row[0], dtype, device, seed) else [row]
        except FAULTS:                         # not every combination makes a call
            continue
    return tuple((case, dtype) for case in _cover(accepted, TEXTS[lane]))


@lru_cache(maxsize=8)
def _rows_without_tensors(op: Op, lane: str, seed: int) -> Sequence[tuple[Case, int, int]]:
    """Returns the random pool, and which pairs and triples of values each call has: the same for
    all kernels of the op."""
    rng = random.Random(f"cells {op.name} {seed}")
    # of very many texts some, so that other arguments meet each other
    levels = {n: [values[0], *rng.sample(values[1:], min(len(values) - 1, LEVELS))]
              for n, values in _levels(op).items()}
    pairs, triples, rows = _Bits(), _Bits(), []
    for _ in range(8 * TEXTS[lane]):
        chosen = {n: rng.choice(values[1:]) for n, values in levels.items() if rng.random() < 0.4}
        named = sorted((n, repr(chosen.get(n))) for n in levels)
        rows.append((chosen, pairs.of(iter(combinations(named, 2))),
                     triples.of(iter(combinations(named, 3)))))
    return rows
