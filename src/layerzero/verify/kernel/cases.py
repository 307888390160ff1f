"""More cases than an op declares, found from its declaration: sizes one by one, and its own cases crossed.

- `sweep`: every whole number that the input generator takes, through sizes where kernels change their way: around
  powers of two, around tiles of 64 and 128, odd ones, one.
- `crossed`: two or three of the op's own cases together, with a size or two changed.
- `Op.stress`: what neither would find: long, many, far.
- `reaching`: for one kernel, cases that give an argument which it takes but none of the other cases it takes gives.

A combination that the contract refuses, or that costs too much, is dropped: the op's own checks and reference decide.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.facts import read
from ...machine.faults import FAULTS
from ...spec.expr import parse
from ...spec.kernel import Kernel
from ...spec.op import Op
from .contract import case_values, formula

Case = Mapping[str, Any]

SIZES = (1, 2, 3, 5, 7, 8, 12, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 80, 96, 100, 112, 127, 128, 129, 160,
         191, 192, 193, 224, 255, 256, 257, 320, 384, 448, 511, 512, 513, 576, 640, 704, 768, 1000, 1024,
         1025, 1536, 2048)
FEW = (1, 2, 3, 5, 16, 31, 33, 96, 127, 192, 257, 320, 512, 1025)
_UNASKED = ("enable_gqa", "dropout_p", "seed", "seed_rows", "offset")      # what torch asks for; what is random
FLOPS, ELEMENTS = 6e7, 1.2e6                   # the largest case that sweeps and crossings may make


def key(case: Case) -> str:
    return json.dumps(dict(case), sort_keys=True, default=str)


def cases_for(op: Op, lane: str, seed: int = 0) -> tuple[Case, ...]:
    """The op's own, then what the lane adds. The same for the same lane and seed."""
    return _cases(op, lane, seed)


@lru_cache(maxsize=256)
def _cases(op: Op, lane: str, seed: int) -> tuple[Case, ...]:
    found = {key(c): c for c in op.cases}
    rng = random.Random(f"{op.name} {seed}")
    sizes, crossings = {"quick": (FEW, 12), "full": (SIZES, 60), "stress": (SIZES, 150)}[lane]
    more = [c for c in op.stress if _accepted(op, c, None)]
    tried = [*more, *(c for c in _sweep(op, sizes) if _accepted(op, c)), *_crossed(op, rng, crossings, more)]
    for case in tried:
        found.setdefault(key(case), case)
    return tuple(found.values())


def unlimited(kernel: Kernel) -> list[str]:
    """The optional arguments that the kernel must heed in any call: no rule of it speaks of them."""
    spoken = {leaf.fact.partition(".")[0] for rule in kernel.requires for leaf in rule.leaves()}
    left = [p for p in kernel.op.params
            if not p.required and p.kind != "generator" and p.name not in (*spoken, *_UNASKED)]
    return [p.name for p in left if p.name != kernel.op.variant or set(kernel.variants) - {p.default}]


def given_by(op: Op, values: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that are not at their default."""
    return frozenset(p.name for p in op.params if not p.required and values[p.name] is not p.default
                     and (isinstance(values[p.name], Tensor) or values[p.name] != p.default))


class Reached(NamedTuple):
    """A case that the kernel takes and that gives the argument; or one to which it is given from another case."""

    argument: str
    case: Case
    donor: Case | None = None


def reaching(kernel: Kernel, lane: str, homes: Sequence[Mapping[str, Any]],
             seed: int = 0) -> tuple[list[Reached], set[str]]:
    """How to give the kernel what `unlimited` names and no case of the lane that it takes gives; and what cannot be.

    One of the cases that the kernel takes joined with another one, or with the argument of another one. `homes`: the
    facts of the devices it may be on.
    """
    def takes(facts: Mapping[str, Any]) -> bool:
        return any(next(kernel.reasons({**facts, **home}), None) is None for home in homes)

    op = kernel.op
    known = {dtype: known_cases(op, lane, seed, dtype) for dtype in op.dtypes}
    served = [(dtype, *row) for dtype, rows in known.items() for row in rows if takes(row[2])]
    missing = set(unlimited(kernel)).difference(*(given for _, _, given, _ in served))
    found: list[Reached] = []
    for name in sorted(missing) if served else ():
        parts = [(case, given) for case, given, _ in known[op.dtypes[0]] if name in given][:4]
        ways: list[tuple[bool, Reached]] = []
        for part, giving in parts:
            near = sorted(served, key=lambda row: -len(row[2] & giving))[:6]       # type: ignore[misc]
            ways += _ways(op, name, part, [(case, dtype) for dtype, case, _, _ in near], takes)
            if ways and ways[-1][0]:
                break
        found += [max(ways, key=lambda way: way[0])[1]] if ways else []
    return found, missing - {way.argument for way in found}


def _ways(op: Op, name: str, part: Case, bases: Sequence[tuple[Case, str]],
          takes: Callable[[Mapping[str, Any]], bool]) -> Iterator[tuple[bool, Reached]]:
    """Up to the first in which the argument makes a difference to the result, which each says of itself."""
    for base, dtype in bases:
        joined = ({**base, **part}, {**part, **base}, *({**base, word: part[word]} for word in part))
        own = _growth(op, base)                # no larger than a case that is run anyway
        ways = [Reached(name, case) for case in joined
                if _accepted(op, case, None if _growth(op, case) <= own else FLOPS)] + [Reached(name, base, part)]
        for way in ways:
            made = with_argument(op, way, dtype)
            if made is not None and name in given_by(op, made) and takes(read(op, made)):
                matters = _matters(op, made, name)
                yield matters, way
                if matters:
                    return


def _matters(op: Op, values: Mapping[str, Any], name: str) -> bool:
    """Does the result change without the argument?"""
    try:
        one, other = formula(op, values), formula(op, {**values, name: op.by_name[name].default})
    except FAULTS:                             # no call without it
        return True
    if len(one) != len(other):
        return True
    return any(not torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a != b
               for a, b in zip(one, other))


@lru_cache(maxsize=128)
def known_cases(op: Op, lane: str, seed: int,
                dtype: str) -> tuple[tuple[Case, frozenset[str], Mapping[str, Any]], ...]:
    """Every case of a lane with what it gives and its facts."""
    every = ((case, case_values(op, case, dtype)) for case in cases_for(op, lane, seed))
    return tuple((case, given_by(op, values), read(op, values)) for case, values in every)


def with_argument(op: Op, way: Reached, dtype: str, device: str = "cpu", seed: int = 0) -> dict[str, Any] | None:
    """The values; None where the argument of the donor does not fit the case."""
    values = case_values(op, way.case, dtype, device, seed)
    if way.donor is None:
        return values
    values[way.argument] = case_values(op, way.donor, dtype, device, seed)[way.argument]
    try:
        facts = read(op, values)
        if any(rule.check(facts) is not None for rule in op.requires):
            return None
        if op.extra_check is not None:
            op.extra_check(values, facts)
        op.reference(**values)
    except FAULTS:                             # of a combination nobody thought of
        return None
    return values


def small_stress(op: Op) -> list[Case]:
    """Of the op's stress cases, those that are not large."""
    return [c for c in op.stress if _growth(op, c) <= 40]


def _numbers(op: Op) -> dict[str, Any]:
    """Of the input generator's parameters, those that are whole numbers or tuples of them, with their defaults."""
    given = {n: p.default for n, p in inspect.signature(op.inputs).parameters.items() if n != "seed"}
    return {n: d for n, d in given.items() if type(d) is int or (
        isinstance(d, tuple) and d and all(type(i) is int and i > 0 for i in d))}


def _sweep(op: Op, sizes: tuple[int, ...]) -> Iterator[Case]:
    """One number at a time; where it is large, the others are small."""
    numbers = _numbers(op)
    small = {n: min(d, 8) if type(d) is int else tuple(min(i, 5) for i in d) for n, d in numbers.items()}
    for name, default in numbers.items():
        others = {n: d for n, d in small.items() if n != name and d != numbers[n]}
        for n in sizes:
            yield {**(others if n > 128 else {}), name: n if type(default) is int else (*default[:-1], n)}
        if not isinstance(default, int):
            yield from ({name: (n,)} for n in (1, 4, 9))
            yield {name: (*default, *default)}


def _crossed(op: Op, rng: random.Random, count: int, more: Sequence[Case]) -> Iterator[Case]:
    pool, numbers = [*op.cases, *more], list(_numbers(op).items())
    found = 0
    for _ in range(6 * count):
        if found == count:
            return
        case: dict[str, Any] = {}
        for part in rng.sample(pool, min(len(pool), rng.choice((1, 2, 2, 3)))):
            case.update(part)
        for name, default in rng.sample(numbers, min(len(numbers), rng.choice((0, 1, 1, 2)))):
            case[name] = rng.choice(SIZES[:30]) if type(default) is int else tuple(
                rng.choice(SIZES[:20]) for _ in range(rng.choice((1, 2, 3))))
        if _accepted(op, case):
            found += 1
            yield case


def _growth(op: Op, case: Case) -> float:
    """How many times the usual case this one may be, by its numbers alone: before anything is made."""
    def volume(n: Any) -> float:
        return math.prod(max(i, 1) for i in n) if isinstance(n, tuple) else max(n, 1)

    numbers = _numbers(op)
    given = {n: case[n] for n in numbers if type(case.get(n)) is int or isinstance(case.get(n), tuple)}
    return math.prod(volume(n) / volume(numbers[name]) for name, n in given.items())


def _accepted(op: Op, case: Case, limit: float | None = FLOPS) -> bool:
    """Does the contract allow this call, and is it cheap enough? Asked of the op itself, by trying."""
    if limit is not None and _growth(op, case) > 40:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            values = case_values(op, case, op.dtypes[0])
            facts = read(op, values)
            if any(rule.check(facts) is not None for rule in op.requires):
                return False
            if limit is not None and (_cost(op, facts, values) > limit or degenerate(op, facts)):
                return False
            if op.extra_check is not None:
                op.extra_check(values, facts)
            op.reference(**values)
        except FAULTS:                         # of a combination nobody thought of: it is no case then
            return False
    return True


def degenerate(op: Op, facts: Mapping[str, Any]) -> bool:
    """A norm of one element: nothing but rounding, divided by the root of eps."""
    return op.family == "norm" and facts.get("hidden") == 1


def _cost(op: Op, facts: Mapping[str, Any], values: Mapping[str, Any]) -> float:
    elements = sum(v.numel() for v in values.values() if isinstance(v, Tensor))
    names = parse(op.flops).names
    flops = float(parse(op.flops)(facts)) if all(facts.get(n) is not None for n in names) else 0.0
    return max(flops, elements / ELEMENTS * FLOPS)


def dtypes_for(op: Op, lane: str, case: Case) -> tuple[str, ...]:
    """Every dtype for the op's own cases; for the others the widest and the narrowest mantissa."""
    if any(key(case) == key(c) for c in op.cases) or lane == "stress":
        return op.dtypes
    return tuple(d for d in op.dtypes if d in ("float32", "bfloat16")) or op.dtypes[:1]


