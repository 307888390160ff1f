"""Calls drawn from the code of a kernel: sizes and numbers beside the constants that it compares
with, and its op's arguments and contents crossed at random.

They are for code that no other call has reached: what a kernel does beyond 700 tokens is met by a
call of 701, and 700 stands in its code.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, permutations, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec.op import Op
from ..cases.drawn_sizes import allowed_facts, arguments_of_cases, consistent, lists_of_lengths
from ..cases.generated import Case, if_allowed, relative_cost
from ..cases.pairs import argument_levels, small_sizes
from ..kernel.case_sizes import numbers_of
from ..kernel.circumstance import AS_DECLARED, Circumstance

MOST_NUMBERS, MOST_NUMBER, MOST_DEPTH = 48, 1 << 31, 3
FLOPS, ELEMENTS = 4e8, 1 << 25                 # the largest call
LISTS_OF = 4096                                # sequences in a call


class Probe(NamedTuple):
    """A call that may reach what others have not."""

    case: Case
    dtype: str
    circumstance: Circumstance = AS_DECLARED
    records: bool = False                      # gradients, of its forward and its backward


def numbers_in(values: Iterable[Any]) -> list[int]:
    """Returns the whole numbers among constants that may be a limit, in order."""
    found: dict[int, None] = {}
    left = [(value, 0) for value in values]
    while left:
        value, depth = left.pop(0)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int and 1 < abs(value) < MOST_NUMBER:
            found[abs(value)] = None
        elif isinstance(value, (tuple, list, set, frozenset)) and depth < MOST_DEPTH:
            left += [(v, depth + 1) for v in islice(value, MOST_NUMBERS)]
        elif isinstance(value, dict) and depth < MOST_DEPTH:
            left += [(v, depth + 1) for v in islice(value.values(), MOST_NUMBERS)]
    return sorted(found)[:MOST_NUMBERS]


def limits_of(named: Iterable[tuple[str, Any]], beside: set[Any]) -> list[int]:
    """Returns the numbers that conditions speak of, their products where they are few, and then the
    others of the code."""
    named = list(named)
    first = numbers_in([*(v for name, v in named if name and name in beside),
                        *(v for v in beside if not isinstance(v, str))])
    few = [n for n in first if n > 2][:6]
    products = [a * b for a in few for b in few if a < b and a * b < MOST_NUMBER]
    return list(dict.fromkeys([*first, *products, *numbers_in(v for _, v in named)]))


def sized_calls(op: Op, numbers: Sequence[int], rng: random.Random,
                flops: float = FLOPS) -> Iterator[Case]:
    """Yields calls in which one size, or a product of two, is just above, at or just below a number
    of the code, with no argument and with those of a case of the op."""
    small = small_sizes(op)
    options = [o for o in arguments_of_cases(op) if o]
    by_number = [_changes(op, number, rng) for number in numbers]
    if len(numbers) > 1:                       # two sizes, each beside a number of its own
        names, pairs = list(numbers_of(op)), []
        for _ in range(8 * len(names)):
            near = [max(rng.choice(numbers[:8]) + rng.choice((0, 1)), 1) for _ in range(2)]
            pairs.append({name: n if type(numbers_of(op)[name]) is int else (n,)
                          for name, n in zip(rng.sample(names, min(len(names), 2)), near)})
        by_number.append(pairs)
    for changes in by_number:                  # what costs little first
        rng.shuffle(changes)
        changes.sort(key=_volume)
    for change in chain.from_iterable(zip_longest(*by_number)):
        for option in ({}, *rng.sample(options, min(len(options), 2))) if change else ():
            case = consistent(op, {**small, **option, **change})
            if is_affordable(op, case, flops):
                yield case


def _changes(op: Op, number: int, rng: random.Random) -> list[dict[str, Any]]:
    """Returns sizes beside one number."""
    changes: list[dict[str, Any]] = []
    small, lists = small_sizes(op), lists_of_lengths(op)
    for n in (number + 1, number, number - 1, 2 * number + 1):
        for name, default in numbers_of(op).items():
            if type(default) is int:
                changes.append({name: n})
            else:
                changes += [{name: (*default[:-1], n)}, {name: (n,)}]
            if name in lists and 2 < n <= LISTS_OF:
                changes.append({name: (1, 2, 3) * (n // 3) + (1,) * (n % 3)})
    names = [n for n, d in small.items() if type(d) is int]
    for a, b in permutations(names if number > 64 else (), 2):
        part = rng.choice((3, 8, 16, 64))
        changes.append({a: part, b: number // part + 1})
    return changes


def _volume(case: Case) -> int:
    volume = 1
    for n in case.values():
        volume *= max(n if type(n) is int else max(sum(n), 1), 1)
    return volume.bit_length()


def is_affordable(op: Op, case: Case, flops: float = FLOPS) -> bool:
    """Is it a call, and none that takes gigabytes or seconds? Asked of its numbers before any
    tensor is made."""
    numbers: dict[str, Any] = {name: n for name, n in case.items() if type(n) is int or (
        isinstance(n, tuple) and all(type(i) is int for i in n))}
    sums = [n if type(n) is int else sum(n) for n in numbers.values()]
    most = max(int(ELEMENTS * flops / FLOPS), 1)
    if max(sums, default=0) > ELEMENTS or _volume(numbers) > most.bit_length() + 3:
        return False
    cost = relative_cost(op, case)
    return cost is not None and cost <= flops


def crossed_calls(op: Op, numbers: Sequence[int], rng: random.Random,
                  seeds: Sequence[Case]) -> Iterator[Case | None]:
    """Yields without end calls in which arguments and sizes of the op's cases, of numbers of the
    code, and of the `seeds` are crossed; None for those that the contract does not allow."""
    levels, sizes = argument_levels(op), numbers_of(op)
    cases = [*op.cases, *op.stress]
    near = [n + d for n in numbers[:12] if n <= 1 << 16 for d in (-1, 0, 1)] or [5]
    while True:
        base: dict[str, Any] = dict(rng.choice(seeds)) if seeds and rng.random() < 0.6 else {}
        if not base or rng.random() < 0.5:
            for part in rng.sample(cases, min(len(cases), rng.choice((1, 2, 2, 3)))):
                base = {**base, **part}
        for name in rng.sample(list(levels), min(len(levels), rng.choice((0, 0, 1, 2)))):
            base[name] = rng.choice(levels[name])
        for name in rng.sample(list(sizes), min(len(sizes), rng.choice((0, 1, 2)))):
            def draw() -> int:
                return rng.choice((1, 2, 3, rng.randrange(1, 40), rng.choice(near),
                                   1 << rng.randrange(10)))
            default = sizes[name]
            base[name] = draw() if type(default) is int else tuple(
                draw() for _ in range(rng.choice((len(default), 1, 2, 3))))
        case = consistent(op, base)
        yield case if is_affordable(op, case) and allowed_facts(
            op, case, op.dtypes[0]) is not None else None


# Contents

class Drawn(Circumstance):
    """Values that may be no call: the contract is asked when they are judged."""

    def change(self, op: Op, values: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        return if_allowed(op, self.change(op, values))


class GivenNumber(Drawn):
    """A scalar argument at a number of the code, or beside it."""

    def __init__(self, argument: str, number: float) -> None:
        self.argument, self.number = argument, number
        self.name = f"given {argument} = {number:g}"

    def change(self, op: Op, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, self.argument: self.number}


def given_numbers(op: Op, params: Sequence[Any], numbers: Sequence[int],
                  rng: random.Random) -> Iterator[Circumstance]:
    """Yields each scalar among the arguments at and beside each number of the code."""
    names = [p for p in params if p.kind in ("int", "float") and p.name != op.variant]
    each = [(p, n + d) for p in names for n in numbers for d in (0, 1, -1)]
    rng.shuffle(each)
    for param, n in each:
        yield GivenNumber(param.name, float(n) if param.kind == "float" else n)


class OtherContents(Drawn):
    """One argument with other contents, drawn by a seed: integers that are equal, in order or at an
    end of their range, masks with a pattern, a scalar near a number of the code, none at all."""

    even, alike = False, True

    def __init__(self, seed: int, numbers: tuple[int, ...] = (),
                 names: tuple[str, ...] = ()) -> None:
        self.seed, self.numbers, self.names = seed, numbers, names
        self.name = f"filled with other contents {seed}"

    def change(self, op: Op, values: dict[str, Any]) -> dict[str, Any]:
        rng = random.Random(self.seed)
        changed = dict(values)
        for _ in range(rng.choice((1, 1, 2))):
            # what is counted, looked up or hidden more often than numbers
            tensors = [p for p in op.params if isinstance(t := changed[p.name], Tensor)
                       and t.dtype in (torch.bool, torch.int32, torch.int64)]
            some = tensors if tensors and rng.random() < 0.4 else op.params
            param = rng.choice([p for p in op.params if p.name in self.names] or some)
            value = changed[param.name]
            if param.name == op.variant:
                continue
            if isinstance(value, Tensor):
                other = _other_tensor(value, rng, self.numbers)
                if not param.required and rng.random() < 0.1:
                    other = param.default
            else:
                other = _other_scalar(value, param, rng, self.numbers)
            changed[param.name] = other
        return changed


def _other_scalar(value: Any, param: Any, rng: random.Random, numbers: Sequence[int]) -> Any:
    if type(value) is bool:
        return not value
    near = rng.choice(numbers) + rng.choice((-1, 0, 1)) if numbers else rng.randrange(1, 9)
    if type(value) is int:
        return rng.choice((0, 1, -1, value + 1, value - 1, near, rng.randrange(1, 9)))
    if type(value) is float:
        return rng.choice((0.0, 1.0, value * 2, value / 2, -value, float(near), 1e-8, 100.0))
    return param.default if not param.required else value


def _other_tensor(t: Tensor, rng: random.Random, numbers: Sequence[int]) -> Tensor:
    if not t.numel() or (t.dtype.itemsize == 1 and t.dtype not in (torch.bool, torch.int8,
                                                                  torch.uint8)):
        return t
    n = t.numel()
    flat = t.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    places = torch.arange(n)
    at = rng.randrange(n)
    if t.dtype == torch.bool:
        patterns: tuple[Tensor, ...] = (
            torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool),
            places % 2 == 0, places != at, places == at, places < at, places >= at, ~flat,
            _rows(t, flat, rng), _triangle(t, rng))
        return rng.choice(patterns).reshape(t.shape)
    if t.is_floating_point():
        one = flat.clone()
        one[at] = rng.choice((0.0, -1.0, 1.0, 4.0))
        patterns = (torch.zeros_like(flat), torch.ones_like(flat), -flat, flat.abs(), flat.round(),
                    flat.sort().values, _rows(t, flat, rng), one, flat * 0.5, flat + 1.0,
                    flat[:1].expand(n).clone(), _rows(t, flat, rng))
        return rng.choice(patterns).reshape(t.shape).to(t.dtype)
    low, high = int(flat.min()), int(flat.max())
    near = rng.choice(numbers) + rng.choice((-1, 0, 1)) if numbers else high
    one, other = flat.clone(), flat.clone()
    one[at] = rng.choice((low, high, 0, -1, int(flat[0]), near if near < 1 << 15 else high))
    other[at] = flat[rng.randrange(n)]
    patterns = (flat[:1].expand(n).clone(), flat.sort().values, flat.sort(descending=True).values,
                flat.flip(0), torch.full_like(flat, low), torch.full_like(flat, high), one, other,
                other, other,
                _rows(t, flat, rng), (places % (high - low + 1) + low).to(t.dtype),
                flat[torch.randperm(n, generator=torch.Generator().manual_seed(rng.randrange(99)))],
                _rows(t, flat, rng), flat.roll(1), _ends(flat))
    return rng.choice(patterns).reshape(t.shape)


def _ends(flat: Tensor) -> Tensor:
    """Returns the numbers with the last one as the first."""
    changed = flat.clone()
    changed[-1] = changed[0]
    return changed


def _rows(t: Tensor, flat: Tensor, rng: random.Random) -> Tensor:
    """Returns rows of which one is like another, along any dimension."""
    if t.dim() < 1:
        return flat
    dim = rng.randrange(t.dim())
    size = t.shape[dim]
    changed = flat.reshape(t.shape).clone()
    to, source = rng.randrange(size), rng.randrange(size)
    if rng.random() < 0.5:
        changed.narrow(dim, to, 1).copy_(changed.narrow(dim, source, 1).clone())
    else:
        changed.copy_(changed.narrow(dim, source, 1).clone().expand_as(changed))
    return changed.reshape(-1)


def _triangle(t: Tensor, rng: random.Random) -> Tensor:
    if t.dim() < 2:
        return t.reshape(-1)
    ones = torch.ones(t.shape, dtype=torch.bool)
    return (ones.tril(rng.choice((-1, 0, 1, t.shape[-1] - t.shape[-2]))) if rng.random() < 0.7
            else ones.triu(rng.choice((0, 1)))).reshape(-1)
