"""Pairs of arguments: a small set of calls in which every pair of argument values that a kernel
accepts occurs, as far as a random pool reaches it; and how much of it was run.

Values come from the op's own cases; sizes are small, since other cases vary them.
"""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import combinations, islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...machine import hardware
from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..kernel.case_sizes import numbers_of
from ..kernel.contract import case_outline, case_values_to_read, formula, results_of
from .drawn_sizes import (
    allowed_facts,
    are_lengths,
    arguments_of_cases,
    consistent,
    counts_of,
    draw_share,
    draw_sizes,
    drawn_calls,
    lists_of_lengths,
    open_shapes,
    shares,
    sizes_of,
    small_draw,
)
from .generated import (
    MAX_ELEMENTS,
    MAX_FLOPS,
    Case,
    is_accepted,
    relative_cost,
    small_stress,
)
from .index_sizes import LOOPS, index_and_rank_calls
from .long_calls import long_calls
from .span_sizes import optional_size_calls, span_calls

POOL, LIMIT = {"quick": 120, "full": 600, "stress": 600}, {"quick": 20, "full": 120, "stress": 120}
_GENERATOR = ("dtype", "device", "seed")
Pair = tuple[tuple[str, str], tuple[str, str]]
# of model_sizes; of one with all others one; of formulas that go token by token
LARGEST, LOOPED = 20_000, {"quick": 2_200, "full": 4_300, "stress": 4_300}
ALONE = {"quick": 70_000, "full": 140_000, "stress": 140_000}
HALVED = ("attention", *LOOPS)                # of what takes long a quick seed has half
SINGLE_SIZES, MORE_KEYS = 10, 23
BLOCK = 16                                     # sizes that are paired as they fall
LONE_PAIRS = {"quick": 44, "full": 400, "stress": 400}
ONES = {"quick": 220, "full": 2000, "stress": 2000}
_LEFT_OUT = ("extreme", "stride", "memory")    # of which other checks have every one
FLOATS = ("float32", "bfloat16")
# sizes, and the dtype, by another name: in cases of their own
_APART = ("large_pool", "long_table", "far", "out_dtype", "chunks")


class PairCases(NamedTuple):
    """The chosen (case, dtype)s, and how many pairs they have of those that the pool has."""

    cells: tuple[tuple[Case, str], ...]
    covered: int
    reachable: int


def argument_levels(op: Op) -> dict[str, list[Any]]:
    """Returns the values of each argument of the input generator that is no plain size, as the
    op's cases give them; the default first. A number that is 0 by default is an argument: off."""
    defaults = {n: p.default for n, p in inspect.signature(op.inputs).parameters.items()
                if n not in _GENERATOR}
    sizes = small_sizes(op)
    levels: dict[str, list[Any]] = {n: [d] for n, d in defaults.items() if n not in sizes}
    for case in (*op.cases, *op.stress):
        for name, value in case.items():
            if name in levels and value not in levels[name] and not _is_large(value):
                levels[name].append(value)
    return {name: values for name, values in levels.items()
            if len(values) > 1 and name not in _APART}


def _is_large(value: Any) -> bool:
    """Is it a size, or lengths, of a case that is there for being large?"""
    if isinstance(value, tuple):
        return len(value) > 40 or any(map(_is_large, value)) or _is_large(
            sum(n for n in value if type(n) is int))
    return type(value) is int and value > 1_000


@lru_cache(maxsize=64)
def small_sizes(op: Op) -> Mapping[str, Any]:
    """Returns the sizes of the input generator, none of them large."""
    return {n: min(d, 8) if type(d) is int else tuple(min(i, 5) for i in d)
            for n, d in numbers_of(op).items() if n not in op.by_name and d != 0}


def _sample(rng: random.Random, cases: Sequence[Case], count: int) -> list[Case]:
    return rng.sample(list(cases), min(len(cases), count))


@lru_cache(maxsize=64)
def _pool(op: Op, lane: str, seed: int) -> tuple[tuple[Case, str, Mapping[str, Any],
                                                       frozenset[Pair]], ...]:
    """Returns random combinations that the contract allows: case, dtype, facts, pairs."""
    levels, rng = _with_dtypes(argument_levels(op)), random.Random(f"pairs {op.name} {seed}")
    small, draw, lists = small_sizes(op), small_draw(op, rng), lists_of_lengths(op)
    dtypes = tuple(d for d in op.dtypes if d in ("float32", "bfloat16")) or op.dtypes[:1]
    rows = []
    for i, own in enumerate((*_sample(rng, op.cases, POOL[lane] // 2), *[{}] * POOL[lane])):
        drawn = {n: rng.choice(values[1:]) for n, values in levels.items() if rng.random() < 0.4}
        # what goes with another argument is drawn with it from a case that has both
        options = {n: own.get(n, drawn.get(n, values[0])) for n, values in levels.items()}
        given = {n: v for n, v in options.items() if v != levels[n][0]}
        sizes = draw_sizes(op, rng, draw, draw_share(rng))
        sizes = {n: v for n, v in sizes.items() if n in given or n not in lists[1:]}
        case = {**consistent(op, {**given, **sizes, **{n: v for n, v in given.items()
                                                       if n not in lists}})}
        dtype = dtypes[i % len(dtypes)]
        facts = allowed_facts(op, case, dtype, seed)
        if facts is None:                      # not all sizes go with all arguments
            case = {**small, **given}
            facts = allowed_facts(op, case, dtype, seed)
        if facts is None and own:              # it may need its own sizes, and no other argument
            options = {n: own.get(n, values[0]) for n, values in levels.items()}
            case = {**small, **own}
            facts = allowed_facts(op, case, dtype, seed)
        if facts is not None:
            named = sorted((n, repr(v) if n not in lists or v == levels[n][0] else "drawn")
                           for n, v in options.items())
            masking = {(n, repr(v)) for n, v in options.items()
                       if v != levels[n][0] and _masks(op, {**small, n: v})}
            rows.append((case, dtype, facts, frozenset(
                pair for pair in combinations(named, 2) if not masking or masking & set(pair))))
    return tuple(rows)


def _with_dtypes(levels: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Returns the levels with a wide and a narrow dtype where a case gives one of them."""
    return {n: [*values, *(d for d in FLOATS if d not in values)]
            if set(FLOATS) & {v for v in values if type(v) is str} else values
            for n, values in levels.items()}


_MASKING: dict[tuple[str, str], bool] = {}


def _masks(op: Op, case: Case) -> bool:
    """Does the formula give the same for all numbers, as a loss does of which every row is
    ignored? Beside such an argument no other one shows."""
    key = (op.name, repr(case))
    if key not in _MASKING:
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                one, other = (formula(op, case_values_to_read(op, case, op.dtypes[0], seed=seed))
                              for seed in (0, 1))
            _MASKING[key] = all(isinstance(a, Tensor) and a.shape == b.shape
                                and torch.allclose(a.double(), b.double(), equal_nan=True)
                                for a, b in zip(one, other))
        except FAULTS:                         # no call by itself
            _MASKING[key] = False
    return _MASKING[key]


@lru_cache(maxsize=256)
def _accepted(kernel: Kernel, device: str, lane: str,
              seed: int) -> tuple[tuple[int, Case, str, frozenset[Pair]], ...]:
    here = hardware.probe(device).facts()

    def takes(facts: Mapping[str, Any]) -> bool:
        return next(kernel.reasons({**here, **facts, "device": facts["device"]}), None) is None

    return tuple((i, case, dtype, pairs) for i, (case, dtype, facts, pairs)
                 in enumerate(_pool(kernel.op, lane, seed)) if takes(facts))


def pool_cases(op: Op, lane: str, seed: int) -> list[Case]:
    """Returns random combinations of arguments that the contract allows, with small sizes."""
    return [case for case, *_ in _pool(op, lane, seed)]


def accepted_pool(kernel: Kernel, device: str, lane: str, seed: int) -> list[tuple[int, Case, str]]:
    """Returns those of the pool that the kernel accepts, with their place in it and a dtype."""
    return [(i, case, dtype) for i, case, dtype, _ in _accepted(kernel, device, lane, seed)]


@lru_cache(maxsize=256)
def pair_cases(kernel: Kernel, device: str, lane: str, seed: int) -> PairCases:
    """Chooses the combinations that the kernel accepts, each for the pairs it adds."""
    accepted = [row[1:] for row in _accepted(kernel, device, lane, seed)]
    reachable = frozenset[Pair]().union(*(pairs for *_, pairs in accepted))
    missing, chosen = set(reachable), []       # type: set[Pair], list[tuple[Case, str]]
    while missing and len(chosen) < LIMIT[lane]:
        case, dtype, pairs = max(accepted, key=lambda row: len(row[2] & missing))
        missing -= pairs
        chosen.append((case, dtype))
    return PairCases(tuple(chosen), len(reachable) - len(missing), len(reachable))


def residues(op: Op, lane: str, seed: int) -> Iterator[tuple[str, list[list[Case]]]]:
    """Yields for two sizes of the op at a time cases in which both have other remainders of 128, a
    large one beside a small one; a quarter of all in the quick lane, so that four seeds meet every
    one; all up to 256 in the longer ones. After each come cases with one of the
    two alone, for sizes that do not go together. Then the calls in which all sizes are drawn, past
    16 bits, of every rank."""
    numbers = numbers_of(op)
    small: dict[str, Any] = {
        n: min(d, 4) if type(d) is int else tuple(min(i, 3) for i in d)
        for n, d in numbers.items()}
    names = list(numbers)
    for first in range(0, len(names), 2):
        group = names[first:first + 2]
        columns = _paired([_shuffled_sizes(op, name, lane, seed) for name in group],
                          random.Random(f"paired {op.name} {group} {seed}"))
        if lane == "quick" and op.family not in LOOPS:
            columns = _some_larger(columns, random.Random(f"larger {op.name} {group} {seed}"))
        changes = [{name: n if type(numbers[name]) is int else (*small[name][:-1], n)
                    for name, n in zip(group, sizes)} for sizes in zip(*columns)]
        yield " and ".join(group), [
            [{**small, **change}, *({**small, name: n} for name, n in change.items())]
            for change in changes]
    yield "one and two beside each argument", ones_beside_arguments(op, lane, seed)
    yield "two arguments alone", lone_pairs(op, lane, seed)
    yield from drawn_calls(op, lane, seed)
    yield from index_and_rank_calls(op, lane, seed)
    yield "a few hundred beside each argument", long_calls(op, lane, seed)
    yield "ends of what is taken at once", span_calls(op, lane, seed)
    yield "numbers that are off by default", optional_size_calls(op, lane, seed)


def ones_beside_arguments(op: Op, lane: str, seed: int) -> list[list[Case]]:
    """Returns calls with one value of an argument, or the arguments of one case, and one size that
    is one or two, the others small: a path for one row or one query has its own idea of what an
    argument says of positions. In the quick lane half of those with two, and of batches and heads
    half of those with one."""
    levels, rng = argument_levels(op), random.Random(f"ones {op.name} {seed}")
    small, lists = small_sizes(op), lists_of_lengths(op)
    single = [{n: v} for n, values in levels.items() if n not in (*lists, *_LEFT_OUT)
              for v in values[1:]]
    of_cases = [o for o in arguments_of_cases(op) if o and not o.keys() & {*_LEFT_OUT}]
    options = list({repr(o): o for o in (*single, *of_cases)}.values())
    calls: list[tuple[int, list[Case]]] = []   # of one and of lengths first
    for option, name, n in product(options, sizes_of(op), (1, 2)):
        is_count = name in counts_of(op) and name not in open_shapes(op)
        if name in option or name not in small or (lane == "quick" and (
                (n == 2 and is_count) or ((n == 2 or is_count) and rng.random() < 0.5))):
            continue
        size = n if type(small[name]) is int else (n,) * len(small[name])
        shared = {few: max(small[many] // 2, 1) for many, few in shares(op)
                  if many in small and few in small and len(calls) % 2}
        case = consistent(op, {**small, **shared, **option, name: size})
        # a norm of one number is no call
        if op.family != "norm" or allowed_facts(op, case, op.dtypes[0], seed) is not None:
            # of one query in each sequence, with more keys than that
            apart = [{**case, other: (MORE_KEYS,) * len(size)} for other in lists[1:]
                     if name == lists[0] and other not in case and type(size) is tuple]
            calls.append((n + is_count + (option not in single), [*apart, case]))
    rng.shuffle(calls)
    calls.sort(key=lambda call: call[0])
    # making a BlockMask costs more than a call
    most = ONES[lane] // (4 if any(p.kind == "object" for p in op.params) else 1)
    return [call for _, call in calls[:most]]


def lone_pairs(op: Op, lane: str, seed: int) -> list[list[Case]]:
    """Returns calls with two arguments and no other, of every two names at least one: what a third
    one hides shows there."""
    levels, rng = _with_dtypes(argument_levels(op)), random.Random(f"lone pairs {op.name} {seed}")
    small, draw, lists = small_sizes(op), small_draw(op, rng), lists_of_lengths(op)
    names = [n for n in levels if n not in (*lists, "extreme")]
    pairs = list(combinations(names, 2))
    rng.shuffle(pairs)
    most = LONE_PAIRS[lane] // (2 if op.family in HALVED else 1)
    calls: list[list[Case]] = []
    for pair in (pairs * 3)[:most]:
        two = {n: rng.choice(levels[n][1:]) for n in pair}
        sizes = draw_sizes(op, rng, draw, draw_share(rng), lists[:rng.choice((1, 2))])
        calls.append([consistent(op, {**sizes, **two}), {**small, **two}])
    return calls


@lru_cache(maxsize=64)
def case_by_case_sizes(op: Op, lane: str, seed: int) -> tuple[tuple[Case, ...], ...]:
    """Returns the op's own cases with one size that they do not name as one, and as that of a
    tile, the others small: a path for one row, or for one head size, has its own arguments. In the
    quick lane those that the seed draws."""
    rng, numbers = random.Random(f"sizes of cases {op.name} {seed}"), numbers_of(op)
    small = small_sizes(op)
    tiles = (32, 64, 128)
    cases = [({**small, **case, name: n if type(small[name]) is int else (n,)},)
             for case in (*op.cases, *small_stress(op)) if case.keys() - numbers.keys()
             for name in small if name not in case
             for n in (1, *((rng.choice(tiles),) if lane == "quick" else tiles))]
    if lane != "quick":
        return tuple(cases)
    # making a BlockMask costs more than a call
    most = 32 if any(p.kind == "object" for p in op.params) else 64
    rng.shuffle(cases)
    return tuple(islice((case for case in cases if (relative_cost(op, case[0]) or math.inf)
                         <= MAX_FLOPS / 8), most))


@lru_cache(maxsize=64)
def model_sizes(op: Op, seed: int, lane: str = "full") -> tuple[tuple[Case, ...], ...]:
    """Returns for each size of the op a case in which it is as large as in a model, plain and with
    the arguments of one of the op's cases, the other sizes small; one in which it is larger still,
    the others one; and some in which two are large together, or there are many lengths. After each
    come others, for what the contract or a rule does not allow."""
    rng, numbers = random.Random(f"model sizes {op.name} {seed}"), numbers_of(op)
    small, medium = ({n: min(d, most) if type(d) is int else tuple(min(i, most - 1) for i in d)
                      for n, d in numbers.items()} for most in (4, 16))
    plain = [c for c in op.cases if not {"stride", "memory", "special", "extreme"} & c.keys()]
    cases: list[tuple[Case, ...]] = []
    for name, default in numbers.items():
        largest = _affordable(op, partial(_sized, small, name), lane=lane)
        if largest:
            n = _near(rng, largest)
            drawn = [{k: v for k, v in case.items() if k not in numbers}
                     for case in rng.sample(plain, min(len(plain), 2 if lane == "quick" else 3))]
            for extra in ({}, *(options for options in drawn if options)):
                # a formula that goes token by token is slow, and so is each of these
                part = n // 16 if extra and op.family in LOOPS else n
                # with all other sizes as they are it is hundreds of times a plain call
                most = 100 * (default if type(default) is int else default[-1])
                last = min(part // 4, most) if lane == "quick" else part // 4
                # a multiple, as the widths of models are, or any number, as lengths are
                either = [(small, part), (small, part // 64 * 64)][::rng.choice((1, -1))]
                cases.append(tuple({**others, **extra, **_sized({name: default, **others}, name, m)}
                                   for others, m in (*either, (medium, part // 4), ({}, last))))
        met = largest and allowed_facts(op, _sized(small, name, largest), op.dtypes[0])
        cases += _alone(op, rng, small, name, largest if met else 0, lane)
        if type(default) is not int:
            for lengths in ((1, 2, 3) * 100, (61, 64, 67) * 45):
                many = {**small, name: lengths}
                cases += [(many,)] if are_lengths(op, small, many) else []
    return (*cases, *_areas(op, rng))


@lru_cache(maxsize=64)
def single_sizes(op: Op, seed: int) -> tuple[Case, ...]:
    """Returns for each size of the op a call in which it is as large as in a model, the others
    small; and more of them with arguments of the op's cases."""
    rng, numbers = random.Random(f"single sizes {op.name} {seed}"), numbers_of(op)
    small = {n: min(d, 4) if type(d) is int else tuple(min(i, 3) for i in d)
             for n, d in numbers.items()}
    largest = {n: _affordable(op, partial(_sized, small, n), limit=MAX_FLOPS / 16) // (
        8 if op.family in LOOPS or n in counts_of(op) else 1) for n in sizes_of(op)}
    pairs = [(n, o) for n in largest if largest[n] for o in arguments_of_cases(op)]
    rng.shuffle(pairs)
    pairs.sort(key=lambda pair: bool(pair[1]))  # without arguments first
    calls: list[Case] = []
    for name, options in pairs[:SINGLE_SIZES if op.family not in HALVED else SINGLE_SIZES // 2]:
        n = _near(rng, largest[name])
        cases = ({**_sized(small, name, m), **options} for m in (n, n // 64 * 64))
        calls += [c for c in cases if allowed_facts(op, c, op.dtypes[0]) is not None][:1]
    return tuple(calls)


def _ones(op: Op) -> dict[str, Any]:
    return {n: min(d, 1) if type(d) is int else (1,) * len(d) for n, d in numbers_of(op).items()}


def _sized(base: Case, name: str, n: int) -> dict[str, Any]:
    """Returns the case with one size changed, of several the last."""
    return {**base, name: n if type(base[name]) is int else (*base[name][:-1], n)}


def _near(rng: random.Random, largest: int) -> int:
    return max(largest - rng.randrange(1, 1 + largest // 32), 1)


def _alone(op: Op, rng: random.Random, small: Case, name: str, reached: int,
           lane: str) -> Iterator[tuple[Case, ...]]:
    """Yields one case in which a size is larger than `reached`, with another as large where it may
    not be so by itself, as groups with their channels."""
    others = [m for m, d in numbers_of(op).items() if m != name and type(d) is int]
    for base, change in product((_ones(op), small), ((), *((m,) for m in others))):
        def case(n: int, base: Case = base, change: tuple[str, ...] = change) -> dict[str, Any]:
            return {**_sized(base, name, n), **dict.fromkeys(change, n)}

        largest = _affordable(op, case, ALONE[lane], lane=lane)
        if largest > 2 * reached and allowed_facts(op, case(largest), op.dtypes[0]) is not None:
            n = _near(rng, largest)
            yield case(n), case(n // 64 * 64)
            return


def _areas(op: Op, rng: random.Random) -> Iterator[tuple[Case, ...]]:
    """Yields cases in which two sizes are large together: both of an image, and two that are
    drawn."""
    ones, left = _ones(op), 2

    def both(a: str, b: str) -> Callable[[int], dict[str, Any]]:
        return lambda n: _sized(_sized(ones, a, n), b, n)

    squares: list[Callable[[int], dict[str, Any]]] = [
        partial(_square, ones, name) for name, d in ones.items()
        if type(d) is not int and len(d) > 1
        and not are_lengths(op, ones, {**ones, name: (1, *d)})]
    pairs = [both(a, b) for a, b in combinations(ones, 2)]
    rng.shuffle(pairs)
    for case in (*squares, *pairs):
        n = _affordable(op, case, LARGEST, MAX_FLOPS, least=1.5)
        while n and _result_elements(op, case(n)) > MAX_ELEMENTS:
            n //= 2
        if n > 64 and allowed_facts(op, case(n), op.dtypes[0]) is not None:
            yield case(n), case(n // 64 * 64)
            left -= case in pairs
            if not left:
                return


def _result_elements(op: Op, case: Case) -> int:
    try:
        values = case_outline(op, case, op.dtypes[0])
        return sum(t.numel() for t in results_of(op.meta(**values)))
    except FAULTS:                             # it is no call
        return 0


def _square(ones: Case, name: str, n: int) -> dict[str, Any]:
    return {**ones, name: (*ones[name][:-2], n, n)}


def long_sums(op: Op, lane: str, seed: int) -> list[Case]:
    """Returns two calls with many rows, whose gradients are long sums; and one with each tensor
    that a call may leave out."""
    part = 12 if lane == "quick" and op.family in HALVED else 4
    plain = (group[1] for group in model_sizes(op, seed) if len(group[-1]) == 1)

    def shorter(case: Case, less: int) -> Case:
        return {n: s // part - less if type(s) is int and s > 1000 else
                tuple(i // part - less if i > 1000 else i for i in s) if isinstance(s, tuple) else s
                for n, s in case.items()}

    # rows that are left over by tiles, where the contract allows any number
    either = (next((c for less in (3, 0) if is_accepted(op, c := shorter(case, less), None, seed)),
                   None) for case in plain)
    found = list(islice((case for case in either if case is not None), 2))
    beside = (next((c for option in arguments_of_cases(op)[1:]
                    if isinstance(case_outline(op, option, op.dtypes[0])[name], Tensor)
                    and is_accepted(op, c := {**found[0], **option}, None, seed)), None)
              for name in op.differentiable if found and not op.by_name[name].required)
    unique = {repr(case): case for case in beside if case is not None}
    return found + [case for case in unique.values() if case not in found]


def _affordable(op: Op, case: Callable[[int], Case], most: int = LARGEST,
                limit: float = MAX_FLOPS / 4, least: float = 0.0, lane: str = "full") -> int:
    """Returns how large a size of the case may be, by how the cost of a call grows with it; 0 if
    it may not, or the cost grows with less than the power `least` of it."""
    low, high = relative_cost(op, case(64)), relative_cost(op, case(128))
    if low is None or high is None or not low or not high:
        return 0
    most = LOOPED[lane] if op.family in LOOPS else most
    power = max(math.log2(high / low), 0.0)
    affordable = most if power < 0.1 else 128 * (limit / high) ** (1 / power)
    return int(min(affordable, most)) if affordable > 256 and power >= least else 0


def _shuffled_sizes(op: Op, name: str, lane: str, seed: int) -> list[int]:
    order = list(range(1, 129 if lane == "quick" else 257))
    random.Random(f"residues {op.name} {name}").shuffle(order)
    return order[seed % 4::4] if lane == "quick" else order


def _paired(columns: list[list[int]], rng: random.Random) -> list[list[int]]:
    """Returns the sizes in an order in which the larger ones of one come with the smaller ones of
    the other, as far as blocks of them go: what is even of one is not always odd of the other."""
    ordered = [sorted(column, reverse=bool(i)) for i, column in enumerate(columns)]
    for column in ordered:
        for start in range(0, len(column), BLOCK):
            block = column[start:start + BLOCK]
            rng.shuffle(block)
            column[start:start + BLOCK] = block
    return ordered


def _some_larger(columns: list[list[int]], rng: random.Random) -> list[list[int]]:
    """Adds 128 to one size of some calls."""
    larger = [list(column) for column in columns]
    for i in range(len(larger[0])):
        if rng.random() < 1 / 3:
            column = rng.choice(larger)
            column[i] += 128
    return larger
