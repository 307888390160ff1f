"""The tests that a rule can make of one value, and all that follows from what such a test means.

The filter, the generated verdicts, the cache key, the proofs over ranges, `capabilities.json`, the
boundary tests and the docs ask these classes; none of them knows a test by its name.

A value of None (an absent tensor, say) passes `le`, `ge`, `eq` and `multiple_of`; the other tests
take None literally.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Union

Number = Union[int, float]


def is_number(value: Any) -> bool:
    """Returns whether it is a finite number that a double holds."""
    return type(value) in (int, float) and abs(value) < 1e300


def is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool)) or is_number(value)


def below(n: Number) -> Number:
    """Returns the whole number just below `n`, or the float if `n` is one."""
    return n - 1 if isinstance(n, int) else math.nextafter(n, -math.inf)


def above(n: Number) -> Number:
    return n + 1 if isinstance(n, int) else math.nextafter(n, math.inf) + 0.0      # not -0.0


class Cuts(NamedTuple):
    """The points on the number line where an answer may change."""

    at: frozenset[Number] = frozenset()        # between this number and all others
    above: frozenset[Number] = frozenset()     # just above this number
    below: frozenset[Number] = frozenset()     # just below this number
    multiples: frozenset[int] = frozenset()    # between the multiples of this number and the rest

    @classmethod
    def of(cls, predicates: Iterable[Predicate]) -> Cuts:
        """Returns all cuts that any of the predicates makes."""
        kinds = zip(*(p.cuts() for p in predicates))
        return cls(*(frozenset[Any]().union(*sets) for sets in kinds))


@dataclass(frozen=True)
class Predicate(ABC):
    """A test of one value against `operand`: what passes, how that is worded, where it changes."""

    operand: Any
    name: ClassVar[str]                        # in a rule and its JSON
    # `holds` in Python, of the variable {x} and operand {n}
    expression: ClassVar[str]
    phrase: ClassVar[str] = "{}"               # follows "must be" in a message
    relation: ClassVar[str] = "{}"             # follows the name of the fact in the docs
    cut: ClassVar[str] = ""                    # which of the Cuts each number in the operand is
    reads: ClassVar[str] = "value"             # or "number", "set": what the fact must be
    takes: ClassVar[staticmethod[[Any], bool]] = staticmethod(is_scalar)       # is it an operand?
    wanted: ClassVar[str] = "text, a number, true, false or null"              # which operands

    @abstractmethod
    def holds(self, value: Any) -> bool:
        """Returns whether `value` passes."""

    def code(self, x: str) -> str:
        return self.expression.format(x=x, n=repr(self.operand))

    def text(self) -> str:
        """Returns the wording in a message, as in "head_dim must be <= 256"."""
        return self.phrase.format(_joined(self.operand, " or "))

    def short_text(self) -> str:
        """Returns the wording in a table, as in "`head_dim` ≤ 256"."""
        return self.relation.format(_joined(self.operand, "/"))

    def cuts(self) -> Cuts:
        """True is a number here, as it equals 1; text and None equal none."""
        numbers: frozenset[Any] = frozenset(v for v in _listed(self.operand)
                                            if isinstance(v, (int, float)))
        return Cuts(**{self.cut: numbers}) if self.cut else Cuts()

    def over_span(self, low: Number, high: Number, multiples: Collection[int] = (),
                  others: Collection[int] = ()) -> bool | None:
        """Returns the answer for all numbers from `low` to `high`; None if they differ or cannot be
        told. All these numbers are multiples of each of `multiples` and of none of `others`."""
        at, above, below, _ = self.cuts()
        if low != high and (any(low <= n <= high for n in at) or any(low <= n < high for n in above)
                            or any(low < n <= high for n in below)):
            return None
        return self.holds(low)

    def boundaries(self) -> tuple[Any, ...]:
        """Values at the edge and next to it, the edge first, with both answers where possible."""
        return (*(near for v in _listed(self.operand) for near in _neighbours(v)), "another", None)


class Equals(Predicate):
    name, relation, cut, expression = "eq", "= {}", "at", "({x} is None or {x} == {n})"

    def holds(self, value: Any) -> bool:
        return value is None or value == self.operand

    def short_text(self) -> str:
        return str(self.operand).lower() if isinstance(self.operand, bool) else super().short_text()


class Differs(Predicate):
    name, phrase, relation, cut, expression = "ne", "other than {}", "≠ {}", "at", "{x} != {n}"

    def holds(self, value: Any) -> bool:
        return value != self.operand

    def short_text(self) -> str:
        is_bool = isinstance(self.operand, bool)
        return f"not {self.operand}".lower() if is_bool else super().short_text()


class AtMost(Predicate):
    name, phrase, relation, cut = "le", "<= {}", "≤ {}", "above"
    expression = "({x} is None or {x} <= {n})"
    reads, takes, wanted = "number", staticmethod(is_number), "a number"

    def holds(self, value: Any) -> bool:
        return value is None or value <= self.operand

    def boundaries(self) -> tuple[Any, ...]:
        return _neighbours(self.operand)


class AtLeast(AtMost):
    name, phrase, relation, cut = "ge", ">= {}", "≥ {}", "below"
    expression = "({x} is None or {x} >= {n})"

    def holds(self, value: Any) -> bool:
        return value is None or value >= self.operand


class MultipleOf(Predicate):
    name, phrase, cut = "multiple_of", "a multiple of {}", "multiples"
    expression = "({x} is None or {x} % {n} == 0)"
    relation, reads, wanted = phrase, "number", "a whole number > 0"
    takes = staticmethod(lambda n: type(n) is int and n > 0)

    def holds(self, value: Any) -> bool:
        return value is None or value % self.operand == 0

    def over_span(self, low: Number, high: Number, multiples: Collection[int] = (),
                  others: Collection[int] = ()) -> bool | None:
        if low == high:
            return self.holds(low)
        if any(m % self.operand == 0 for m in multiples):
            return True
        no_multiple = low // self.operand == high // self.operand and not self.holds(low)
        return False if no_multiple or any(self.operand % m == 0 for m in others) else None

    def boundaries(self) -> tuple[Any, ...]:
        return (2 * self.operand, 2 * self.operand + 1, 2 * self.operand - 1, self.operand)


class OneOf(Predicate):
    name, cut, expression, wanted = "in", "at", "{x} in {n}", "a list of plain values"
    takes = staticmethod(lambda n: isinstance(n, (list, tuple)) and len(n) > 0
                         and all(map(is_scalar, n)))

    def holds(self, value: Any) -> bool:
        return value in self.operand


class NoneOf(OneOf):
    name, phrase, relation, expression = "not_in", "none of {}", "not {}", "{x} not in {n}"

    def holds(self, value: Any) -> bool:
        return value not in self.operand


class Present(Predicate):
    name, phrase, relation, expression = "present", "given", "given", "{x} is not None"
    takes, wanted = staticmethod(lambda n: n is None), "null"

    def holds(self, value: Any) -> bool:
        return value is not None


class Absent(Present):
    name, phrase, relation, expression = "absent", "absent", "absent", "{x} is None"

    def holds(self, value: Any) -> bool:
        return value is None


class Has(Predicate):
    """The fact is a set of words, and the operand is among them."""

    name, relation, expression = "has", "with {}", "{n} in ({x} or ())"
    reads, takes, wanted = "set", staticmethod(lambda n: isinstance(n, str)), "text"

    def holds(self, value: Any) -> bool:
        return self.operand in (value or ())

    def over_span(self, low: Number, high: Number, multiples: Collection[int] = (),
                  others: Collection[int] = ()) -> bool | None:
        return None                            # a number is no set

    def boundaries(self) -> tuple[Any, ...]:
        return ((self.operand,), ())


PREDICATES: Mapping[str, type[Predicate]] = {kind.name: kind for kind in (
    Equals, Differs, AtMost, AtLeast, MultipleOf, OneOf, NoneOf, Present, Absent, Has)}


def _neighbours(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (value, not value)
    return (value, above(value), below(value)) if isinstance(value, (int, float)) else (value,)


def _listed(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _joined(value: Any, separator: str) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return separator.join("absent" if v is None else str(v) for v in value)
