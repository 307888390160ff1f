"""Do the rules of a kernel hold for every call that a row of a table covers?

Each rule is asked of the whole range at once. The answer is yes, no, or "it depends", which counts
as no: a range is widened only where every rule is known to hold from its beginning to its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Union

from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.rules import Condition, Rule
from ..spec.rules.expr import parse
from .table import Choice, Number, Span

_UNKNOWN: Any = object()
Known = Mapping[str, Union[Span, Any]]         # of a fact: its value, or the span it lies in


def proven(op: Op, kernel: Kernel, choice: Choice, known: Known) -> bool:
    """Do all rules of the kernel hold for the facts in `known` and the spans of the sizes?"""
    fixed = {target for kind, target in choice.transforms if kind == "contiguous"}
    cast = any(kind == "cast" for kind, _ in choice.transforms)

    def repaired(rule: Condition) -> bool:
        if not isinstance(rule, Rule) or not rule.repair:
            return False
        return cast if rule.repair == "cast" else rule.fact.partition(".")[0] in fixed

    return all(repaired(rule) or holds(rule, op, known) is True for rule in kernel.requires)


def holds(rule: Condition, op: Op, known: Known) -> bool | None:
    """True or False for every call; None if it depends on the call."""
    return rule.decide(lambda leaf: _leaf_holds(leaf, op, known))


def _leaf_holds(rule: Rule, op: Op, known: Known) -> bool | None:
    value = known.get(rule.fact, _UNKNOWN)
    if value is _UNKNOWN and rule.fact in op.derived:
        value = interval(op, rule.fact, known) or _UNKNOWN
    if value is _UNKNOWN:
        return None
    if not isinstance(value, Span):
        return rule.predicate.holds(value)
    low = -math.inf if value.low is None else value.low
    high = math.inf if value.high is None else value.high
    return rule.predicate.over_span(low, high, value.multiples, value.others)


def interval(op: Op, name: str, known: Known) -> Span | None:
    """Return the span of a derived number from the spans of its operands; None if it is unknown."""
    stack: list[tuple[Number, Number]] = []
    for code, value in parse(op.derived[name]).postfix:
        if code == "fact":
            ends = _ends(op, value, known)
            if ends is None:
                return None
            stack.append(ends)
        elif code == "const":
            stack.append((value, value))
        else:
            right, left = stack.pop(), stack.pop()
            combined = _combine(code, left, right)
            if combined is None:
                return None
            stack.append(combined)
    low, high = stack.pop()
    return Span(None if low == -math.inf else low, None if high == math.inf else high)


def _ends(op: Op, name: str, known: Known) -> tuple[Number, Number] | None:
    value = known.get(name, _UNKNOWN)
    if value is _UNKNOWN and name in op.derived:
        value = interval(op, name, known)
    if isinstance(value, Span):
        return (-math.inf if value.low is None else value.low,
                math.inf if value.high is None else value.high)
    return (value, value) if isinstance(value, (int, float)) else None


def _combine(code: str, a: tuple[Number, Number],
             b: tuple[Number, Number]) -> tuple[Number, Number] | None:
    """Return the interval of an operation on two intervals; None where it is not computed."""
    if code in ("lt", "le", "gt", "ge", "eq", "ne"):
        if code in ("gt", "ge"):
            a, b, code = b, a, {"gt": "lt", "ge": "le"}[code]
        if code in ("eq", "ne"):
            apart = a[1] < b[0] or b[1] < a[0]
            same = a[0] == a[1] == b[0] == b[1]
            return (int(same is (code == "eq")),) * 2 if apart or same else (0, 1)
        sure, never = (a[1] < b[0], a[0] >= b[1]) if code == "lt" else (a[1] <= b[0], a[0] > b[1])
        return (1, 1) if sure else (0, 0) if never else (0, 1)
    if code in ("max", "min"):
        pick = max if code == "max" else min
        return pick(a[0], b[0]), pick(a[1], b[1])
    if code == "add":
        return a[0] + b[0], a[1] + b[1]
    if code == "sub":
        return a[0] - b[1], a[1] - b[0]
    if any(math.isinf(n) for n in (*a, *b)):
        return None
    if code == "mul":
        corners = [x * y for x in a for y in b]
        return min(corners), max(corners)
    if code == "div" and b[0] >= 1:
        corners = [x // y for x in a for y in b]
        return min(corners), max(corners)
    if code == "mod" and b[0] >= 1:
        return (a[0] % b[0],) * 2 if a[0] == a[1] and b[0] == b[1] else (0, b[1] - 1)
    if code in ("div", "mod") and b == (0, 0):
        return 0, 0                            # as an expression has it: nothing divides by zero
    return None
