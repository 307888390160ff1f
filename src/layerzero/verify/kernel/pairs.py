"""Pairs of arguments: a small set of calls in which every pair of argument values that a kernel
accepts occurs, as far as a random pool reaches it; and how much of it was run.

Values come from the op's own cases; sizes are small, since other cases vary them.
"""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import combinations, islice
from typing import Any, NamedTuple

from ...dispatch.facts import read
from ...machine import hardware
from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.op import Op
from .cases import MAX_FLOPS, Case, is_accepted, is_degenerate, numbers_of, relative_cost
from .contract import case_values

POOL, LIMIT = {"quick": 160, "full": 600, "stress": 600}, {"quick": 20, "full": 120, "stress": 120}
_GENERATOR = ("dtype", "device", "seed")
Pair = tuple[tuple[str, str], tuple[str, str]]
LARGEST, LOOPED = 20_000, 4_300                # of model_sizes; of formulas that go token by token
_LOOPS = ("linear_attention", "moe", "sampling")
_LARGE = ("large_pool", "long_table", "far")   # sizes by another name, in cases of their own


class PairCases(NamedTuple):
    """The chosen (case, dtype)s, and how many pairs they have of those that the pool has."""

    cells: tuple[tuple[Case, str], ...]
    covered: int
    reachable: int


def argument_levels(op: Op) -> dict[str, list[Any]]:
    """Returns the values of each argument of the input generator that is no plain size, as the
    op's cases give them; the default first."""
    defaults = {n: p.default for n, p in inspect.signature(op.inputs).parameters.items()
                if n not in _GENERATOR}
    sizes = {n for n in numbers_of(op) if n not in op.by_name}
    levels: dict[str, list[Any]] = {n: [d] for n, d in defaults.items() if n not in sizes}
    for case in (*op.cases, *op.stress):
        for name, value in case.items():
            if name in levels and value not in levels[name]:
                levels[name].append(value)
    return {name: values for name, values in levels.items()
            if len(values) > 1 and name not in _LARGE}


@lru_cache(maxsize=64)
def _pool(op: Op, lane: str, seed: int) -> tuple[tuple[Case, str, Mapping[str, Any],
                                                       frozenset[Pair]], ...]:
    """Returns random combinations that the contract allows: case, dtype, facts, pairs."""
    levels, rng = argument_levels(op), random.Random(f"pairs {op.name} {seed}")
    small = {n: min(d, 8) if type(d) is int else tuple(min(i, 5) for i in d)
             for n, d in numbers_of(op).items() if n not in op.by_name}
    dtypes = tuple(d for d in op.dtypes if d in ("float32", "bfloat16")) or op.dtypes[:1]
    rows = []
    for i in range(POOL[lane]):
        given = {n: rng.choice(values[1:]) if rng.random() < 0.4 else values[0]
                 for n, values in levels.items()}
        case = {**small, **{n: v for n, v in given.items() if v != levels[n][0]}}
        dtype = dtypes[i % len(dtypes)]
        facts = _allowed_facts(op, case, dtype)
        if facts is not None:
            named = sorted((n, repr(v)) for n, v in given.items())
            rows.append((case, dtype, facts, frozenset(combinations(named, 2))))
    return tuple(rows)


def _allowed_facts(op: Op, case: Case, dtype: str) -> Mapping[str, Any] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            values = case_values(op, case, dtype)
            facts = read(op, values)
            if any(rule.check(facts) is not None for rule in op.requires) or is_degenerate(op,
                                                                                          facts):
                return None
            if op.extra_check is not None:
                op.extra_check(values, facts)
        except FAULTS:                         # an invalid combination may raise anything
            return None
    return facts


def pair_cases(kernel: Kernel, device: str, lane: str, seed: int) -> PairCases:
    """Chooses the combinations that the kernel accepts, each for the pairs it adds."""
    here = hardware.probe(device).facts()
    accepted = [(case, dtype, pairs) for case, dtype, facts, pairs in _pool(kernel.op, lane, seed)
                if next(kernel.reasons({**here, **facts, "device": facts["device"]}), None) is None]
    reachable = frozenset[Pair]().union(*(pairs for *_, pairs in accepted))
    missing, chosen = set(reachable), []       # type: set[Pair], list[tuple[Case, str]]
    while missing and len(chosen) < LIMIT[lane]:
        case, dtype, pairs = max(accepted, key=lambda row: len(row[2] & missing))
        missing -= pairs
        chosen.append((case, dtype))
    return PairCases(tuple(chosen), len(reachable) - len(missing), len(reachable))


def residues(op: Op, lane: str, seed: int) -> Iterator[tuple[str, list[list[Case]]]]:
    """Yields for two sizes of the op at a time cases in which both have other remainders of 128:
    half of all in the quick lane, so that two seeds meet every one; all up to 256 in the longer
    ones. After each come cases with one of the two alone, for sizes that do not go together."""
    numbers = numbers_of(op)
    small: dict[str, Any] = {
        n: min(d, 4) if type(d) is int else tuple(min(i, 3) for i in d)
        for n, d in numbers.items()}
    names = list(numbers)
    for first in range(0, len(names), 2):
        group = names[first:first + 2]
        columns = [_shuffled_sizes(op, name, lane, seed) for name in group]
        changes = [{name: n if type(numbers[name]) is int else (*small[name][:-1], n)
                    for name, n in zip(group, sizes)} for sizes in zip(*columns)]
        yield " and ".join(group), [
            [{**small, **change}, *({**small, name: n} for name, n in change.items())]
            for change in changes]


@lru_cache(maxsize=64)
def model_sizes(op: Op, seed: int) -> tuple[tuple[Case, ...], ...]:
    """Returns for each size of the op a case in which it is as large as in a model, plain and with
    the arguments of one of the op's cases, the other sizes small; and for lengths many of them.
    After each come smaller ones, for what the contract does not allow."""
    rng, numbers = random.Random(f"model sizes {op.name} {seed}"), numbers_of(op)
    small: dict[str, Any] = {n: min(d, 4) if type(d) is int else tuple(min(i, 3) for i in d)
                             for n, d in numbers.items()}
    plain = [c for c in op.cases if not {"stride", "memory", "special", "extreme"} & c.keys()]
    cases: list[tuple[Case, ...]] = []
    for name, default in numbers.items():
        largest = _affordable(op, small, name)
        if not largest:
            continue
        n = max(largest - rng.randrange(1, 1 + largest // 32), 1)
        drawn = [{k: v for k, v in case.items() if k not in numbers}
                 for case in rng.sample(plain, min(len(plain), 3))]
        for extra in ({}, *(given for given in drawn if given)):
            cases.append(tuple({**others, **extra, name: m if type(default) is int
                                else (*others.get(name, default)[:-1], m)}
                               for others, m in ((small, n), (small, n // 64 * 64), ({}, n // 4))))
        if type(default) is not int:
            many = {**small, name: (1, 2, 3) * 100}
            cases += [(many,)] if _are_lengths(op, small, many) else []
    return tuple(cases)


def long_sums(op: Op, seed: int) -> list[Case]:
    """Returns two calls with many rows, whose gradients are long sums."""
    plain = (group[-2] for group in model_sizes(op, seed) if len(group[-1]) == 1)
    shorter = ({n: s // 4 if type(s) is int and s > 1000 else
                tuple(i // 4 if i > 1000 else i for i in s) if isinstance(s, tuple) else s
                for n, s in case.items()} for case in plain)
    return list(islice((case for case in shorter if is_accepted(op, case, None)), 2))


def _are_lengths(op: Op, small: Case, many: Case) -> bool:
    """Does a longer tuple make more sequences, and not a tensor of more dimensions?"""
    try:
        few, more = (case_values(op, case, op.dtypes[0])[op.main_tensor].dim()
                     for case in (small, many))
    except FAULTS:
        return False
    return few == more


def _affordable(op: Op, small: Mapping[str, Any], name: str) -> int:
    """Returns how large one size may be, by how the cost of a call grows with it; 0 if it may not.
    """
    def cost(n: int) -> float | None:
        return relative_cost(op, {**small, name: n if type(small[name]) is int
                                  else (*small[name][:-1], n)})

    low, high = cost(64), cost(128)
    if low is None or high is None or not low or not high:
        return 0
    most = LOOPED if op.family in _LOOPS else LARGEST
    power = max(math.log2(high / low), 0.0)
    affordable = most if power < 0.1 else 128 * (MAX_FLOPS / 4 / high) ** (1 / power)
    return int(min(affordable, most)) if affordable > 256 else 0


def _shuffled_sizes(op: Op, name: str, lane: str, seed: int) -> list[int]:
    order = list(range(1, 129 if lane == "quick" else 257))
    random.Random(f"residues {op.name} {name}").shuffle(order)
    if lane != "quick":
        return order
    rng = random.Random(f"sizes {op.name} {name} {seed}")
    return [n + 128 * rng.choice((0, 0, 1)) for n in order[seed % 2 * 64:][:64]]
