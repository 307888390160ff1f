"""More cases than an op declares, found from its declaration: sizes one by one, and its own cases crossed.

- `sweep`: every whole number that the input generator takes, through sizes where kernels change their way: around
  powers of two, around tiles of 64 and 128, odd ones, one.
- `crossed`: two or three of the op's own cases together, with a size or two changed.
- `STRESS`: what neither would find, by op: long, many, far.
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

_NORMS: tuple[dict[str, Any], ...] = (
    {"hidden": 16384, "rows": (2,), "extreme": True}, {"rows": (3000,), "hidden": 8}, {"eps": 1.0}, {"eps": 0.0},
    {"hidden": 65, "rows": (3, 3)}, {"rows": (70000,), "hidden": 1})
STRESS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "attention": (
        {"b": 8200, "hq": 8, "hkv": 8, "sq": 1, "sk": 2, "d": 8},
        {"b": 8200, "hq": 8, "hkv": 4, "sq": 1, "sk": 2, "d": 8},
        {"b": 1, "hq": 65540, "hkv": 1, "sq": 1, "sk": 2, "d": 8},
        {"sq": 192, "sk": 192, "mask": "bool"}, {"sq": 64, "sk": 192, "mask": "float", "hkv": 1},
        {"mask": "minus_inf", "hkv": 2}, {"mask": "lowest", "sq": 33, "sk": 65}, {"mask": "lowest", "sq": 1, "sk": 130},
        {"sq": 320, "sk": 320, "mask": "padding", "b": 3}, {"sq": 3, "sk": 70, "causal": True, "align": "bottom_right"},
        {"sq": 70, "sk": 3, "causal": True, "align": "top_left"}, {"hq": 6, "hkv": 3, "b": 3, "sq": 17, "sk": 33},
        {"hq": 12, "hkv": 4, "causal": True, "sq": 1, "sk": 130, "align": "bottom_right", "b": 3},
        {"softcap": 3.0, "scale": 0.7}, {"softcap": 3.0, "scale": 0.7, "hkv": 2, "causal": True, "lse": True},
        {"alibi": True, "hkv": 2, "lse": True},
        {"alibi": True, "sq": 9, "sk": 30, "align": "bottom_right", "causal": True},
        {"window": (1, 0), "causal": True}, {"window": (0, 1)}, {"window": (3, 2), "sq": 9, "sk": 20},
        {"window": (64, -1), "sq": 130, "sk": 130}, {"window": (-1, 3), "sq": 7, "sk": 40, "align": "bottom_right"},
        {"extreme": True, "mask": "bool"}, {"extreme": True, "lse": True, "hkv": 2}, {"sq": 2, "sk": 4096, "b": 1},
        {"sq": 1, "sk": 8192, "b": 1, "hq": 2, "hkv": 1}, {"mask": "dead_rows", "lse": True, "hkv": 2},
        {"layout": "bshd", "sq": 9, "sk": 40, "causal": True, "align": "bottom_right", "hkv": 1},
        {"layout": "bshd", "window": (16, 0), "causal": True, "sq": 64, "sk": 64, "d": 64},
        {"b": 3, "sq": 0, "sk": 0}, {"sq": 4, "sk": 0, "lse": True}, {"stride": "sparse", "hkv": 2, "causal": True}),
    "varlen_attention": (
        {"lengths_q": (0, 0, 5)}, {"lengths_q": (5, 0), "lengths_k": (7, 3)}, {"lengths_q": (3,), "lengths_k": (0,)},
        {"lengths_q": (64, 192), "causal": True, "align": "top_left"}, {"lengths_q": (1,) * 40, "hkv": 1},
        {"lengths_q": (4, 9), "lengths_k": (9, 4), "causal": True, "align": "bottom_right"},
        {"softcap": 3.0, "scale": 0.7, "hkv": 2}, {"window": (2, 1), "lengths_q": (9, 20), "lengths_k": (30, 20),
                                                  "align": "bottom_right"}),
    "paged_attention": (
        {"context": (16, 32, 48)}, {"context": (15, 33, 1)}, {"page_size": 5, "context": (21, 4, 5)},
        {"context": (64, 192), "page_size": 64, "hq": 6, "hkv": 3}, {"context": (33,) * 9, "order": "neighbours"},
        {"softcap": 3.0, "scale": 0.7}, {"window": 1, "lengths_q": (3, 2, 5)}, {"window": 0},
        {"lengths_q": (3, 0, 9), "causal": False, "hkv": 4}, {"context": (2000, 3), "page_size": 16},
        {"layout": "HND", "hkv": 4, "page_size": 4, "lengths_q": (2, 5, 7)},
        {"stored": "int8", "scales": "head", "layout": "HND", "hkv": 4, "hq": 8}),
    "mla_paged_attention": (
        {"context": (16, 32, 48)}, {"page_size": 5, "context": (21, 4, 5)}, {"lengths_q": (3, 0, 9), "causal": False}),
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm"), _NORMS),
    "rms_norm": (*_NORMS, {"offset": 1.0}, {"offset": -0.5, "weight_dtype": "float32", "rows": (3, 2)}),
    "sample": (
        {"random": "generator"}, {"random": "generator", "top_k": 5}, {"random": "generator", "top_p": 0.9},
        {"batch": 64, "vocab": 33, "top_p": 0.5, "scale": 1.0},
        {"batch": 64, "vocab": 33, "top_k": 3}, {"batch": 200, "vocab": 12, "scale": 1.0},
        {"batch": 200, "vocab": 12, "scale": 1.0, "random": "generator"}, {"batch": 64, "vocab": 50, "min_p": 0.3},
        {"batch": 64, "vocab": 33, "temperature": 2.5}, {"batch": 64, "vocab": 33, "special": "ties", "top_k": 2},
        {"penalties": "history"}, {"penalties": "history", "temperature": 0.0},
        {"vocab": 9001, "top_p": 0.9, "penalties": "history"}),
    "rope": (
        {"far": True, "s": 3, "ids": "int64"}, {"b": 3, "ids": "int64", "batched": False, "layout": "bshd", "hkv": 1},
        {"b": 5, "s": 4097, "hq": 1, "hkv": 1, "d": 2}),
    "quantized_linear": (
        {"n": 64, "k": 64, "group": 1, "rows": (3,)}, {"n": 32, "k": 512, "group": 16, "format": "int4"}),
    "dequantize": (
        {"rows": (8,), "width": 64, "granularity": "block", "block_size": 8, "format": "int8"},
        {"rows": (4,), "width": 64, "granularity": "block", "block_size": 16, "format": "int4"}),
    "tokenize": (
        {"random": 40, "return_offsets": True}, {"random": 40, "parse_special": False, "return_offsets": True}),
}


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
    more = [c for c in STRESS.get(op.name, ()) if _accepted(op, c, None)]
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
    """Of STRESS, what is not large."""
    return [c for c in STRESS.get(op.name, ()) if _growth(op, c) <= 40]


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


