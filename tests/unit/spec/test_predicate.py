"""For every operand of each kind of test: verdict, code, cuts, ranges and boundaries agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.spec.rules.predicate import (
    PREDICATES,
    Cuts,
    MultipleOf,
    OneOf,
    Predicate,
    above,
    below,
)

integers, floats = st.integers(-40, 40), st.floats(-40, 40)
scalar = st.one_of(st.none(), st.booleans(), integers, floats, st.sampled_from(["float32", "x{}"]))
some = st.lists(scalar, min_size=1, max_size=4).map(tuple)
operands: dict[str, st.SearchStrategy[Any]] = {
    "value": scalar, "number": integers | floats, "set": st.sampled_from(["avx2", "amx"]),
    "in": some, "not_in": some, "multiple_of": st.integers(1, 12), "present": st.none(),
    "absent": st.none()}
values: dict[str, st.SearchStrategy[Any]] = {
    "value": scalar, "number": st.none() | integers | floats,
    "set": st.one_of(st.none(), st.just(()), st.just(("avx2",)), st.just(("avx2", "amx")))}


@st.composite
def predicates(draw: st.DrawFn, names: tuple[str, ...] = tuple(PREDICATES)) -> Predicate:
    kind = PREDICATES[draw(st.sampled_from(names))]
    return kind(draw(operands.get(kind.name, operands[kind.reads])))


on_numbers = predicates(tuple(name for name, kind in PREDICATES.items() if kind.reads != "set"))


def run(test: Predicate, value: Any) -> bool:
    return bool(eval(test.code("x"), {"x": value}))


@settings(max_examples=400, deadline=None)
@given(predicates(), st.data())
def test_the_code_gives_the_verdict(test: Predicate, data: st.DataObject) -> None:
    value = data.draw(values[test.reads])
    assert type(test.holds(value)) is bool
    assert run(test, value) == test.holds(value)
    assert test.takes(test.operand), test.wanted
    assert test.text() and test.short_text()


@settings(max_examples=600, deadline=None)
@given(on_numbers, integers, integers)
def test_a_range_has_the_answer_of_all_its_numbers(test: Predicate, a: int, b: int) -> None:
    low, high = sorted((a, b))
    answers = {test.holds(n) for n in range(low, high + 1)}
    verdict = test.over_span(low, high)
    assert verdict is None or answers == {verdict}
    whole = all(isinstance(n, int) for numbers in test.cuts() for n in numbers)
    # a list may fill the range
    if whole and not isinstance(test, OneOf) and test != MultipleOf(1):
        assert (verdict is None) == (len(answers) == 2)


@settings(max_examples=400, deadline=None)
@given(on_numbers, st.integers(-40, 40) | floats, st.booleans())
def test_an_open_range_has_the_answer_far_out(test: Predicate, end: float, up: bool) -> None:
    verdict = test.over_span(*((end, math.inf) if up else (-math.inf, end)))
    if verdict is not None:
        assert all(test.holds(end + n if up else end - n) is verdict for n in (0, 1, 7, 10**6))


@given(st.integers(1, 24), st.integers(1, 24), st.booleans(), st.integers(0, 200),
       st.integers(1, 200))
def test_a_range_of_multiples(n: int, m: int, all_of: bool, low: int, size: int) -> None:
    numbers = [k for k in range(low, low + size + 1) if (k % m == 0) is all_of]
    verdict = MultipleOf(n).over_span(low, low + size, *(((m,), ()) if all_of else ((), (m,))))
    assert verdict is None or all(MultipleOf(n).holds(k) is verdict for k in numbers)


@settings(max_examples=600, deadline=None)
@given(st.lists(on_numbers, min_size=1, max_size=4), integers | floats, integers | floats)
def test_cuts_separate_the_answers(tests: list[Predicate], a: float, b: float) -> None:
    """What the cache key relies on."""
    cuts = Cuts.of(tests)
    sides = [[*(x == n for n in cuts.at | cuts.below), *(x > n for n in cuts.above | cuts.below),
              *(x % n == 0 for n in cuts.multiples)] for x in (a, b)]
    if sides[0] == sides[1]:
        assert [t.holds(a) for t in tests] == [t.holds(b) for t in tests]


@settings(max_examples=400, deadline=None)
@given(predicates())
def test_the_boundaries_lie_on_both_sides(test: Predicate) -> None:
    answers = [test.holds(v) for v in test.boundaries()]
    assert answers == [run(test, v) for v in test.boundaries()]
    assert test == MultipleOf(1) or set(answers) == {True, False}
    cuts = test.cuts()
    for n in (*cuts.at, *cuts.above, *cuts.below):
        assert isinstance(n, bool) or {n, above(n), below(n)} <= set(test.boundaries())


@pytest.mark.parametrize(("test", "operand", "text", "short"), [
    ("eq", 1, "1", "= 1"), ("eq", True, "True", "true"), ("ne", 3, "other than 3", "≠ 3"),
    ("ne", False, "other than False", "not false"), ("le", 256, "<= 256", "≤ 256"),
    ("ge", 0.5, ">= 0.5", "≥ 0.5"), ("multiple_of", 8, "a multiple of 8", "a multiple of 8"),
    ("in", ("a", None), "a or absent", "a/absent"),
    ("not_in", (1, 2), "none of 1 or 2", "not 1/2"), ("present", None, "given", "given"),
    ("absent", None, "absent", "absent"), ("has", "avx2", "avx2", "with avx2")])
def test_the_wording(test: str, operand: Any, text: str, short: str) -> None:
    predicate = PREDICATES[test](operand)
    assert (predicate.text(), predicate.short_text()) == (text, short)


@pytest.mark.parametrize(("test", "operand"), [
    ("le", "8"), ("ge", True), ("le", math.inf), ("ge", math.nan), ("multiple_of", 0),
    ("multiple_of", 2.5), ("in", ()), ("in", "float32"), ("not_in", [[1]]), ("present", 1),
    ("absent", False), ("has", 1), ("eq", [1]), ("ne", 10**400)])
def test_an_operand_of_another_kind_is_not_taken(test: str, operand: Any) -> None:
    assert not PREDICATES[test].takes(operand)
