"""The conditions of a policy rule on the facts of a call, parsed from what a person writes.

Comparisons and membership become the same rules that kernels declare, because the cache key is
compiled from those; wildcards over text are matched here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Union

from ..spec.codec import Record
from ..spec.errors import PolicyValidationError
from ..spec.names import is_pattern
from ..spec.reason import Code, Reason, shown
from ..spec.rules import Facts, Rule

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*")
_COMPARISON = re.compile(r"\s*(>=|<=|!=|==|>|<)\s*(.*?)\s*", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_SET_FACTS = ("isa",)                          # facts that are sets of words
_TEXT_FACTS = ("device", "dtype", "vendor", "gpu_generation", "tensor_kind", "torch_version",
               "cuda_version")
_LARGEST = 1e300                               # a larger int may not fit a float
# a condition's code is never shown: it only decides a match
_CODE = Code.NOT_ALLOWED_BY_POLICY


@dataclass(frozen=True)
class Like(Record, names={"patterns": "like"}):
    """A text fact matches one of the wildcard patterns."""

    fact: str
    patterns: tuple[str, ...]

    def check(self, facts: Facts) -> Reason | None:
        got = facts[self.fact]
        words = got if isinstance(got, (tuple, list)) else (got,)
        if any(isinstance(word, str) and matches_any(self.patterns, word) for word in words):
            return None
        return Reason(_CODE, self.patterns, got, self.fact)

    def leaves(self) -> Iterator[Rule]:
        """Equality with each pattern: it makes the key keep the whole text of the fact."""
        for pattern in self.patterns:
            yield Rule(self.fact, "eq", pattern, _CODE)

    def __str__(self) -> str:
        return f"{self.fact} like {' or '.join(self.patterns)}"


Test = Union[Rule, Like]


def parse_when(when: Mapping[str, Any]) -> tuple[Test, ...]:
    """Parse conditions like `{"head_dim": "> 128", "dtype": ["float16"], "device": "cu*"}`."""
    if not isinstance(when, Mapping) or not all(isinstance(fact, str) for fact in when):
        raise PolicyValidationError(f"when wants a mapping of facts to values, got {shown(when)}")
    tests = tuple(test for fact in sorted(when) for test in _parse_test(fact, when[fact]))
    for test in tests:
        if isinstance(test, Rule) and test.fact.rpartition(".")[2] in _TEXT_FACTS:
            values = test.value if isinstance(test.value, tuple) else (test.value,)
            if any(isinstance(v, (int, float)) for v in values):
                raise PolicyValidationError(
                    f"{test.fact} is text and never equals a number, got {shown(when[test.fact])}; "
                    "write it in quotes, or a pattern like '2.8.*'")
    return tests


def _parse_test(fact: str, value: Any) -> Iterator[Test]:
    # `le` and `ge` let an absent value pass, which a policy must not: hence `present` before them.
    # `> n` is `>= n` and `!= n`, which holds for whole numbers and for fractions alike.
    comparison = _COMPARISON.fullmatch(value) if isinstance(value, str) else None
    span = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if span:
        low, high = (_parse_number(fact, text) for text in span.groups())
        if low > high:
            raise PolicyValidationError(
                f"{fact}: the range {shown(value)} is empty; write the smaller number first")
        yield from (Rule(fact, "present", None, _CODE), Rule(fact, "ge", low, _CODE),
                    Rule(fact, "le", high, _CODE))
    elif comparison is None or comparison[1] == "==":
        yield _parse_membership(fact, _parse_word(comparison[2]) if comparison else value)
    elif comparison[1] == "!=":
        operand = _parse_word(comparison[2])
        if (fact in _SET_FACTS or operand == ""
            or (isinstance(operand, str) and is_pattern(operand))):
            raise PolicyValidationError(f"{fact}: '!=' takes one plain value, got {shown(value)}")
        yield Rule(fact, "present" if operand is None else "ne", operand, _CODE)
    else:
        number = _parse_number(fact, comparison[2])
        yield Rule(fact, "present", None, _CODE)
        yield Rule(fact, "ge" if comparison[1].startswith(">") else "le", number, _CODE)
        if len(comparison[1]) == 1:
            yield Rule(fact, "ne", number, _CODE)


def _parse_membership(fact: str, value: Any) -> Test:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not values:
        raise PolicyValidationError(
            f"{fact}: an empty list matches nothing; name at least one value")
    for v in values:
        unknown = v is not None and not isinstance(v, (str, bool, int, float))
        if unknown or v == "" or (isinstance(v, (int, float)) and not abs(v) < _LARGEST):
            raise PolicyValidationError(
                f"{fact}: wants text, a number, true, false or null, got {shown(v)}")
        if isinstance(v, str) and (_COMPARISON.fullmatch(v) or _RANGE.fullmatch(v)):
            raise PolicyValidationError(
                f"{fact}: a list takes plain values, got {shown(v)}; write one rule for each "
                "comparison")
    words = [v for v in values if isinstance(v, str)]
    if fact in _SET_FACTS or any(map(is_pattern, words)):
        if len(words) < len(values):
            raise PolicyValidationError(
                f"{fact}: wildcards and other values do not mix, got {shown(list(values))}")
        return Like(fact, tuple(words))
    return (Rule(fact, "absent", None, _CODE) if values == (None,)
            else Rule(fact, "in", values, _CODE))


def _parse_number(fact: str, text: str) -> float:
    number = _parse_word(text)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise PolicyValidationError(
            f"{fact}: a comparison wants a number, got {shown(text)}; write it like '> 128' or "
            "'512..4096'")
    return number


def _parse_word(text: str) -> Any:
    if re.fullmatch(_NUMBER, text):
        try:
            number = int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
            return number if math.isfinite(number) else text
        except (ValueError, OverflowError):    # more digits than Python converts
            return text
    return _WORDS.get(text.lower(), text)


def matches_any(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
