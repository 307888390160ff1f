"""Pairs of arguments: a small set of calls in which every pair of argument values that a kernel
accepts occurs, as far as a random pool reaches it; and how much of it was run.

Values come from the op's own cases; sizes are small, since other cases vary them.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

from ...dispatch.facts import read
from ...machine import hardware
from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.op import Op
from .cases import Case, is_degenerate, numbers_of
from .contract import case_values

POOL, LIMIT = {"quick": 160, "full": 600, "stress": 600}, {"quick": 20, "full": 120, "stress": 120}
_GENERATOR = ("dtype", "device", "seed")
Pair = tuple[tuple[str, str], tuple[str, str]]


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
    return {name: values for name, values in levels.items() if len(values) > 1}


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


def _shuffled_sizes(op: Op, name: str, lane: str, seed: int) -> list[int]:
    order = list(range(1, 129 if lane == "quick" else 257))
    random.Random(f"residues {op.name} {name}").shuffle(order)
    if lane != "quick":
        return order
    rng = random.Random(f"sizes {op.name} {name} {seed}")
    return [n + 128 * rng.choice((0, 0, 1)) for n in order[seed % 2 * 64:][:64]]
