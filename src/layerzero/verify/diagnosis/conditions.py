"""Where a kernel fails: the facts that distinguish its failing calls from those that pass."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...dispatch.facts import read
from ...machine.faults import FAULTS
from ...spec.op import Op
from ..certification.circumstances.argument_circumstances import NARROW
from ..certification.circumstances.call_circumstances import circumstances
from ..certification.circumstances.dtype_circumstances import OtherDtype
from ..certification.circumstances.value_circumstances import value_circumstances
from ..kernel.contract import CaseResult, Circumstance, case_values


def find_circumstance(op: Op, name: str) -> Circumstance | None:
    every = itertools.chain(circumstances(op, "full"), value_circumstances(op), (
        OtherDtype(tensor, narrow) for tensor in op.tensors for narrow in NARROW))
    return next((c for c in every if c.name == name), None)


def failing_conditions(op: Op, results: Iterable[CaseResult], device: str = "cpu") -> str:
    """Returns the one or two facts that distinguish failing cases from passing ones; "" if none
    do."""
    calls: list[tuple[bool, dict[str, Any]]] = []
    for r in results:
        if r.status == "skipped" or r.circumstance.startswith("backward"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                values = case_values(op, r.case, r.dtype, device, r.seed)
                circumstance = find_circumstance(op, r.circumstance) if r.circumstance else None
                values = ((circumstance.alter(op, values) or values) if circumstance is not None
                          else values)
                facts = {n: v for n, v in read(op, values).items()
                         if not n.endswith(("alignment", "requires_grad"))}
            except FAULTS:
                continue
        calls.append((r.status == "failed", {**facts, "circumstance": r.circumstance or None}))
    failing, passing = [f for has_failed, f in calls if has_failed], [f for has_failed, f in calls
                                                                      if not has_failed]
    if not failing or not passing:
        return ""
    tests = [(text, {i for i, f in enumerate(passing) if test(f)})
             for text, test in _candidate_tests(failing, passing)]
    single = [text for text, passing_with_it in tests if not passing_with_it]
    if single:
        return single[0]
    selective = [first for first in tests if len(first[1]) < len(passing)]
    pairs = itertools.combinations(selective, 2)
    return next((f"{first[0]} and {second[0]}" for first, second in pairs
                 if not first[1] & second[1]), "")


Test = Callable[[Mapping[str, Any]], bool]


def _candidate_tests(failing: Sequence[Mapping[str, Any]],
                     passing: Sequence[Mapping[str, Any]]) -> list[tuple[str, Test]]:
    """Returns tests that all failing cases meet, the most specific first."""
    beyond: list[tuple[str, Test]] = []
    equal: list[tuple[str, Test]] = []
    numbers: list[tuple[str, Test]] = []
    remainder: list[tuple[str, Test]] = []
    bounds: list[tuple[str, Test]] = []
    for name in failing[0]:
        values: list[Any] = [f.get(name) for f in failing]
        first = values[0]
        if all(_is_number(v) for v in values):
            passing_values = [f[name] for f in passing if _is_number(f.get(name))]
            # up to 0 or 1: something that is off there, and no size
            if (passing_values and "stride" not in name
                    and min(values) > 4 * max(passing_values) > 4):
                beyond.append(
                    (f"{name} >= {min(values):g} (it passes up to {max(passing_values):g})",
                     _between(name, min(values), math.inf)))
        if all(type(v) is type(first) and v == first for v in values):
            if first is not None and first is not False and first not in ("", -1):
                (numbers if _is_number(first)
                 else equal).append((f"{name} is {first}", _equals(name, first)))
            continue
        if all(v is not None for v in values) and isinstance(first, str):
            equal.append((f"{name} is given", lambda f, n=name: f.get(n) is not None))  # type: ignore[misc]
        if not all(_is_number(v) for v in values):
            continue
        bounds.append((f"{name} >= {min(values):g}", _between(name, min(values), math.inf)))
        bounds.append((f"{name} <= {max(values):g}", _between(name, -math.inf, max(values))))
        for divisor in (128, 64, 32, 16, 8, 4, 3, 2):
            remainders = {v % divisor for v in values}
            if len(remainders) == 1 and all(type(v) is int for v in values):
                remainder.append((f"{name} % {divisor} = {min(remainders)}",
                                  _has_remainder(name, divisor, min(remainders))))
                break
    return [*equal, *beyond, *numbers, *remainder, *bounds]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _equals(name: str, value: Any) -> Test:
    return lambda f: bool(f.get(name) == value)


def _between(name: str, low: float, high: float) -> Test:
    return lambda f: _is_number(f.get(name)) and low <= f[name] <= high


def _has_remainder(name: str, divisor: int, remainder: int) -> Test:
    return lambda f: type(f.get(name)) is int and f[name] % divisor == remainder


def named_facts(where: str) -> list[str]:
    return re.findall(r"([\w.]+) (?:>=|<=|%|is) ", where)


def speaks_of_sizes(op: Op, where: str) -> bool:
    """Does the condition name a size, and no choice of an argument, such as a format?"""
    names = named_facts(where)
    chosen = [n for n in names if n in op.by_name and op.by_name[n].choices]
    return not chosen and any(n in op.dims or n in op.derived for n in names)
