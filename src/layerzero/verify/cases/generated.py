"""Generates more cases than an op declares: sizes swept one by one, and its own cases combined.

- `_sweep`: every integer parameter of the input generator, over sizes where kernels take other
  paths: around powers of two, around tiles of 64 and 128, odd ones, one.
- `_cross`: two or three of the op's own cases combined, with a size or two changed.
- `Op.stress`: what neither would find, such as very long or very many.
- `find_argument_cases`: for one kernel, cases with an argument that it accepts but no other
  accepted case gives.

A combination that the contract refuses, or that costs too much, is dropped: the op's own checks and
reference decide.
"""

from __future__ import annotations

import json
import math
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.facts import read
from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.rules.expr import parse
from ..kernel.case_sizes import numbers_of, relative_size
from ..kernel.contract import (
    SMALL,
    case_contents,
    case_facts,
    case_outline,
    case_tensors,
    case_values,
    case_values_to_read,
    eager_results,
)
from ..kernel.shared import Fingerprint, compute_once, fingerprint

Case = Mapping[str, Any]

SIZES = (1, 2, 3, 5, 7, 8, 12, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 80, 96, 100, 112,
         127, 128, 129, 160, 191, 192, 193, 224, 255, 256, 257, 320, 384, 448, 511, 512, 513, 576,
         640, 704, 768, 1000, 1024, 1025, 1536, 2048)
FEW_SIZES = (1, 2, 3, 16, 33, 64, 96, 128, 192, 256, 320, 512, 1025)
# only for torch's signature; random
_NOT_TESTED = ("enable_gqa", "dropout_p", "seed", "seed_rows", "offset")
HALVES = ("float16", "bfloat16")
LARGE = 40                                     # times the default sizes
MAX_FLOPS, MAX_ELEMENTS = 6e7, 1.2e6           # the largest case of sweeps and crossings


def case_key(case: Case) -> str:
    return json.dumps(dict(case), sort_keys=True, default=str)


@lru_cache(maxsize=64)
def own_keys(op: Op) -> frozenset[str]:
    """Returns the keys of the op's own cases."""
    return frozenset(map(case_key, op.cases))


def cases_for(op: Op, lane: str, seed: int = 0) -> tuple[Case, ...]:
    """Returns the op's own cases, then those the lane adds; deterministic for a lane and seed."""
    return _cases(op, lane, seed)


@lru_cache(maxsize=256)
def _cases(op: Op, lane: str, seed: int) -> tuple[Case, ...]:
    by_key = {case_key(c): c for c in op.cases}
    rng = random.Random(f"{op.name} {seed}")
    sizes, crossings = {"quick": (FEW_SIZES, 12), "full": (SIZES, 60), "stress": (SIZES, 150)}[lane]
    # as they are run: what is drawn and computed here is not drawn and computed again
    stress = [c for c in op.stress if is_accepted(op, c, None, seed)]
    candidates = [*stress, *(c for c in _sweep(op, sizes, seed) if is_accepted(op, c, seed=seed)),
                  *_cross(op, rng, crossings, stress, seed)]
    for case in candidates:
        by_key.setdefault(case_key(case), case)
    return tuple(by_key.values())


def unrestricted_arguments(kernel: Kernel) -> list[str]:
    """Returns the optional arguments that no rule of the kernel restricts: it must honour any
    value."""
    restricted = {leaf.fact.partition(".")[0] for rule in kernel.requires for leaf in rule.leaves()}
    optional = [p for p in kernel.op.params
                if not p.required and p.kind != "generator"
                and p.name not in (*restricted, *_NOT_TESTED)]
    return [p.name for p in optional if p.name != kernel.op.variant
            or set(kernel.variants) - {p.default}]


def given_arguments(op: Op, values: Mapping[str, Any]) -> frozenset[str]:
    """Returns the optional arguments that are not at their default."""
    return frozenset(p.name for p in op.params if not p.required and values[p.name] is not p.default
                     and (isinstance(values[p.name], Tensor) or values[p.name] != p.default))


class ArgumentCase(NamedTuple):
    """A case the kernel accepts with `argument` given: by the case itself, or taken from the case
    `donor`."""

    argument: str
    case: Case
    donor: Case | None = None


def find_argument_cases(kernel: Kernel, lane: str, devices: Sequence[Mapping[str, Any]],
                        seed: int = 0) -> tuple[list[ArgumentCase], set[str]]:
    """Finds cases for the `unrestricted_arguments` that no accepted case of the lane gives.

    Each joins an accepted case with another one, or with an argument of another one. Returns them,
    and the arguments for which there is none. `devices`: the facts of the devices the kernel may
    run on.
    """
    def takes(facts: Mapping[str, Any]) -> bool:
        return any(next(kernel.reasons({**facts, **device}), None) is None for device in devices)

    op = kernel.op
    missing = set(unrestricted_arguments(kernel))
    accepted: list[tuple[str, Case, frozenset[str], Mapping[str, Any]]] = []
    for dtype in op.dtypes:
        accepted += [(dtype, *row) for row in known_cases(op, lane, seed, dtype) if takes(row[2])]
        missing = missing.difference(*(given for _, _, given, _ in accepted))
        if not missing:                        # the cases of another dtype need not be generated
            return [], missing
    chosen: list[ArgumentCase] = []
    for name in sorted(missing) if accepted else ():
        donors = sorted(((case, given) for case, given, _ in known_cases(
            op, lane, seed, op.dtypes[0]) if name in given), key=lambda donor: relative_size(
                op, donor[0]) > SMALL)[:4]
        candidates: list[tuple[bool, ArgumentCase]] = []
        for donor, donor_given in donors:
            nearest = sorted(accepted, key=lambda row: (  # type: ignore[misc]
                relative_size(op, row[1]) > SMALL, -len(row[2] & donor_given),
                # in the smallest calls an argument may have no effect
                abs(math.log(relative_size(op, row[1])))))[:6]
            candidates += _combinations(op, name, donor,
                                        [(case, dtype) for dtype, case, _, _ in nearest], takes)
            if candidates and candidates[-1][0]:
                break
        chosen += [max(candidates, key=lambda candidate: candidate[0])[1]] if candidates else []
    return chosen, missing - {candidate.argument for candidate in chosen}


def _combinations(op: Op, name: str, donor: Case, bases: Sequence[tuple[Case, str]],
                  takes: Callable[[Mapping[str, Any]], bool]) -> Iterator[
                      tuple[bool, ArgumentCase]]:
    """Yields (does the argument affect the result?, case) up to the first where it does. What is
    found of a case at one dtype holds at the others."""
    taken: set[str] = set()
    for base, dtype in bases:
        if case_key(base) in taken:
            continue
        joined = ({**base, **donor}, {**donor, **base},
                  *({**base, param: donor[param]} for param in donor))
        base_size = relative_size(op, base)   # larger combinations must stay below MAX_FLOPS
        candidates = (ArgumentCase(name, case) for case in joined
                      if is_accepted(op, case, None if relative_size(op, case) <= base_size
                                     else MAX_FLOPS))
        for candidate in chain(candidates, (ArgumentCase(name, base, donor),)):
            key = ("argument", dtype, name, repr(candidate))
            facts = compute_once(op, key, partial(_facts_with, op, candidate, dtype), nbytes=0)
            if facts and takes(facts):
                taken.add(case_key(base))
                affects = bool(compute_once(op, ("affects", *key), partial(
                    _affects, op, candidate, dtype), nbytes=0))
                yield affects, candidate
                if affects:
                    return


def _facts_with(op: Op, candidate: ArgumentCase, dtype: str) -> Mapping[str, Any]:
    """Returns the facts of a call; none where it is no call or does not give the argument."""
    values = with_argument(op, candidate, dtype)
    given = values is not None and candidate.argument in given_arguments(op, values)
    return read(op, values) if values is not None and given else {}


def _affects(op: Op, candidate: ArgumentCase, dtype: str) -> bool:
    values = with_argument(op, candidate, dtype)
    return values is not None and affects_result(op, values, candidate.argument)


def affects_result(op: Op, values: Mapping[str, Any], name: str) -> bool:
    """Does the result change without the argument?"""
    try:
        with_it, without_it = (
            eager_results(op, v, fingerprint(v))
            for v in (values, {**values, name: op.by_name[name].default}))
    except FAULTS:                             # the call is invalid without it
        return True
    if len(with_it) != len(without_it):
        return True
    return any(not torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a != b
               for a, b in zip(with_it, without_it))


@lru_cache(maxsize=128)
def known_cases(op: Op, lane: str, seed: int,
                dtype: str) -> tuple[tuple[Case, frozenset[str], Mapping[str, Any]], ...]:
    """Returns every case of a lane with its given arguments and its facts."""
    return tuple((case, given_arguments(op, case_outline(op, case, dtype, seed=seed)),
                  case_facts(op, case, dtype, seed=seed)) for case in cases_for(op, lane, seed))


def with_argument(op: Op, argument_case: ArgumentCase, dtype: str, device: str = "cpu",
                  seed: int = 0) -> dict[str, Any] | None:
    """Returns the values of the case; None if the donor's argument does not fit it."""
    values = case_values(op, argument_case.case, dtype, device, seed)
    if argument_case.donor is None:
        return values
    values[argument_case.argument] = case_values(op, argument_case.donor, dtype, device,
                                                 seed)[argument_case.argument]
    return if_allowed(op, values)


def if_allowed(op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the values if the contract allows such a call, else None."""
    return values if is_allowed(op, values, fingerprint(values)) else None


def is_allowed(op: Op, values: dict[str, Any], contents: Fingerprint | None) -> bool:
    """Does the contract allow such a call? It is asked once for the same `contents`."""
    def compute() -> bool:
        try:
            facts = read(op, values)
            if any(rule.check(facts) is not None for rule in op.requires):
                return False
            if op.extra_check is not None:
                op.extra_check(values, facts)
            eager_results(op, values, contents)
        except FAULTS:                         # an invalid call may raise anything
            return False
        return True

    return bool(compute_once(op, contents and ("allowed", contents), compute, nbytes=0))


def with_small_sizes(op: Op, case: Case, most: int = 32) -> Case:
    """Returns the case with the sizes that it does not name at most so large; itself where they are
    or where that is no call."""
    return _with_sizes(op, case, {n: most if type(d) is int else tuple(min(i, most) for i in d)
                                  for n, d in numbers_of(op).items()
                                  if (d if type(d) is int else max(d)) > most})


def with_few_items(op: Op, case: Case, most: int = 16, few: int = 2) -> Case:
    """Returns the case with at most a few of what it does not name and there are not many of, such
    as heads and items of a batch; itself where that is no call."""
    return _with_sizes(op, case, {n: few for n, d in numbers_of(op).items()
                                  if type(d) is int and few < d <= most})


def _with_sizes(op: Op, case: Case, sizes: Mapping[str, Any]) -> Case:
    def compute() -> Case:
        others = {n: size for n, size in sizes.items() if n not in (*op.by_name, *case)}
        return {**case, **others} if others and is_accepted(op, {**case, **others}, None) else case

    chosen: Case = compute_once(op, ("with sizes", repr(case), repr(sizes)), compute)
    return chosen


def small_stress(op: Op) -> list[Case]:
    """Returns the op's stress cases that are not large."""
    return [c for c in op.stress if relative_size(op, c) <= LARGE]


def _sweep(op: Op, sizes: tuple[int, ...], seed: int) -> Iterator[Case]:
    """Yields cases with one number changed; where it is large, the others are small. Of few sizes
    every other one, by the seed."""
    numbers = numbers_of(op)
    small = {n: min(d, 8) if type(d) is int else tuple(min(i, 5) for i in d)
             for n, d in numbers.items()}
    for i, (name, default) in enumerate(numbers.items()):
        others = {n: d for n, d in small.items() if n != name and d != numbers[n]}
        for n in sizes if sizes is not FEW_SIZES else sizes[(i + seed) % 2::2]:
            yield {**(others if n > 128 else {}), name: n if type(default) is int
                   else (*default[:-1], n)}
        if not isinstance(default, int):
            yield from ({name: (n,)} for n in (1, 4, 9))
            yield {name: (*default, *default)}


def _cross(op: Op, rng: random.Random, count: int, stress: Sequence[Case],
           seed: int) -> Iterator[Case]:
    pool, numbers = [*op.cases, *stress], list(numbers_of(op).items())
    yielded = 0
    for _ in range(6 * count):
        if yielded == count:
            return
        case: dict[str, Any] = {}
        for part in rng.sample(pool, min(len(pool), rng.choice((1, 2, 2, 3)))):
            case.update(part)
        for name, default in rng.sample(numbers, min(len(numbers), rng.choice((0, 1, 1, 2)))):
            case[name] = rng.choice(SIZES[:30]) if type(default) is int else tuple(
                rng.choice(SIZES[:20]) for _ in range(rng.choice((1, 2, 3))))
        if is_accepted(op, case, seed=seed):
            yielded += 1
            yield case


def is_accepted(op: Op, case: Case, limit: float | None = MAX_FLOPS, seed: int = 0) -> bool:
    """Does the contract allow this call, and is it cheap enough? Tried on the op itself, once for
    all of its kernels."""
    if limit is not None and relative_size(op, case) > LARGE:
        return False
    return bool(compute_once(op, ("accepted", repr(case), limit, seed), partial(
        _is_accepted, op, case, limit, seed), nbytes=0))


def _is_accepted(op: Op, case: Case, limit: float | None, seed: int) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            facts = case_facts(op, case, op.dtypes[0], seed=seed)
            if any(rule.check(facts) is not None for rule in op.requires):
                return False
            if limit is not None and (_cost(op, case, facts, seed) > limit
                                      or is_degenerate(op, facts)):
                return False
            values = case_values_to_read(op, case, op.dtypes[0], seed=seed)
            if op.extra_check is not None:
                op.extra_check(values, facts)
            eager_results(op, values, case_contents(case, op.dtypes[0], seed=seed))
        except FAULTS:                         # an invalid combination may raise anything
            return False
    return True


def relative_cost(op: Op, case: Case) -> float | None:
    """Returns the cost of a case in FLOPs, by its tensors where they say more; None where it is no
    call."""
    try:
        return _cost(op, case, case_facts(op, case, op.dtypes[0]))
    except FAULTS:                             # an invalid combination may raise anything
        return None


def is_degenerate(op: Op, facts: Mapping[str, Any]) -> bool:
    """Is it a norm of one element? Its result is only rounding, divided by sqrt(eps)."""
    return op.family == "norm" and facts.get("hidden") == 1


def _cost(op: Op, case: Case, facts: Mapping[str, Any], seed: int = 0) -> float:
    elements = sum(t.numel() for t in case_tensors(op, case, op.dtypes[0], seed=seed).values())
    return max(_flops(op, facts), elements / MAX_ELEMENTS * MAX_FLOPS)


def _flops(op: Op, facts: Mapping[str, Any]) -> float:
    names = parse(op.flops).names
    return float(parse(op.flops)(facts)) if all(facts.get(n) is not None for n in names) else 0.0


def is_costly(op: Op, case: Case, flops: float = MAX_FLOPS) -> bool:
    """Is it more arithmetic than that, by default than a case of a sweep may be?"""
    return bool(flops < compute_once(op, ("flops", repr(case)), lambda: _flops(
        op, case_facts(op, case, op.dtypes[0]))))


def dtypes_for(op: Op, lane: str, case: Case) -> tuple[str, ...]:
    """Returns every dtype for the op's own cases, in the quick lane for two of three one of 16
    bits, and in the full lane for stress cases that cost little; for the others the widest and the
    narrowest mantissa, in the quick lane one of them."""
    if case_key(case) in own_keys(op) or lane == "stress":
        kept = (*HALVES, "")[zlib.crc32(case_key(case).encode()) % 3]
        return op.dtypes if lane != "quick" or not {*HALVES} <= {*op.dtypes} else tuple(
            d for d in op.dtypes if d == kept or d not in HALVES)
    wide_and_narrow = tuple(d for d in op.dtypes if d in ("float32", "bfloat16")) or op.dtypes[:1]
    is_large = relative_size(op, case) > LARGE
    if lane == "quick" and (case not in op.stress or is_large):        # one of the two, as it falls
        first = zlib.crc32(case_key(case).encode()) % len(wide_and_narrow)
        return wide_and_narrow[first:first + 1]
    if lane == "full" and case in op.stress and not is_costly(op, case):
        return op.dtypes
    return wide_and_narrow


