"""The one codec: typed values through JSON and back, and every mistake with its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from typing import Annotated, Any, NamedTuple, Union

import pytest

from layerzero.spec.codec import At, Check, Count, Record, Text, decode, encode, one_of, read_fields
from layerzero.spec.errors import DataError, SpecError
from layerzero.spec.reason import Code, Reason


class Color(Enum):
    RED = "red"


class Point(NamedTuple):
    x: float
    y: float = 0.0


@dataclass(frozen=True)
class Leaf(Record, omit="note", names={"id": "name"}):
    id: Text
    size: Count = 0
    note: str = ""

    def __post_init__(self) -> None:
        if self.size == 13:
            raise SpecError("13 is no size")


@dataclass(frozen=True)
class Square(Record, header={"shape": "square"}):
    side: float


@dataclass(frozen=True)
class Circle(Record, header={"shape": "circle"}):
    radius: float


@dataclass(frozen=True)
class Tree(Record, json="name total leaves by_name color points pair form on extra",
           header={"schema": "tree/1"},
           omit="extra"):
    name: str
    leaves: tuple[Leaf, ...] = ()
    by_name: Mapping[str, Leaf] = field(default_factory=dict)
    color: Color = Color.RED
    points: list[Point] = field(default_factory=list)
    pair: tuple[int, str] = (1, "a")
    form: Union[Square, Circle, None] = None
    on: bool = False
    extra: Annotated[str, one_of(("", "more"))] = ""
    hidden: Any = None

    @property
    def total(self) -> int:
        return sum(leaf.size for leaf in self.leaves)

    def check_json(self, at: At) -> None:
        if self.total > 100:
            (at / "leaves").wrong("at most 100 in all", self.total)


FULL = Tree("oak", (Leaf("a", 3), Leaf("b", 4, "old")), {"c": Leaf("c")}, Color.RED,
            [Point(1.5, 2)], (2, "b"), Circle(1.0), True, "more")


@pytest.mark.parametrize("tree", [FULL, Tree("bare")], ids=["full", "defaults"])
def test_a_record_survives_json(tree):
    assert Tree.from_json(json.loads(json.dumps(tree.to_json()))) == tree


def test_what_is_written_is_what_the_class_says():
    assert json.dumps(FULL.to_json()) == json.dumps({
        "schema": "tree/1", "name": "oak", "total": 7,
        "leaves": [{"name": "a", "size": 3}, {"name": "b", "size": 4, "note": "old"}],
        "by_name": {"c": {"name": "c", "size": 0}}, "color": "red", "points": [{"x": 1.5, "y": 2}],
        "pair": [2, "b"], "form": {"shape": "circle", "radius": 1.0}, "on": True, "extra": "more"})
    assert "extra" not in Tree("bare").to_json()
    assert encode({"day": date(2026, 1, 2), "reason": Reason(Code.LZ_DISABLED)})[
        "day"] == "2026-01-02"


@pytest.mark.parametrize(("changes", "mistake"), [
    ({"name": 3}, "tree: name: wanted text, got 3"),
    ({"name": "\ud800"}, "tree: name: wanted text without lone surrogates"),
    ({"on": 1}, "tree: on: wanted true or false, got 1"),
    ({"leaves": {}}, "tree: leaves: wanted a list of an object, got {}"),
    ({"leaves": [{"name": "a", "size": -1}]},
     "tree: leaves[0].size: wanted a whole number >= 0, got -1"),
    ({"leaves": [{"name": "a", "size": True}]},
     "tree: leaves[0].size: wanted a whole number >= 0, got True"),
    ({"leaves": [{"name": ""}]}, "tree: leaves[0].name: wanted text that is not empty, got ''"),
    ({"leaves": [{"id": "a"}]},
     "tree: leaves[0]: missing: name; unknown: id; wanted are name, size, note"),
    ({"leaves": [{"name": "a", "size": 13}]}, "tree: leaves[0]: 13 is no size"),
    ({"leaves": [{"name": "a", "size": 101}]}, "tree: leaves: wanted at most 100 in all, got 101"),
    ({"by_name": {"x": None}}, "tree: by_name.x: wanted an object, got None"),
    ({"color": "blue"}, "tree: color: wanted a name of Color, got 'blue'"),
    ({"color": []}, "tree: color: wanted a name of Color, got []"),
    ({"points": [{"x": "1"}]}, "tree: points[0].x: wanted a number, got '1'"),
    ({"points": [{"x": 10**400}]}, "tree: points[0].x: wanted a number that a float can hold"),
    ({"pair": [1]}, "tree: pair: wanted a list of a whole number, text, got [1]"),
    ({"pair": ["1", "a"]}, "tree: pair[0]: wanted a whole number, got '1'"),
    ({"form": {"shape": "line"}},
     "tree: form: wanted an object with one of {'shape': 'square'}, {'shape': 'circle'}"),
    ({"form": {"shape": "circle"}}, "tree: form: missing: radius;"),
    ({"form": 3}, "tree: form: wanted an object or null, got 3"),
    ({"extra": "less"}, "tree: extra: wanted one of , more, got 'less'"),
    ({"hidden": 1}, "tree: missing: nothing; unknown: hidden;"),
    ({"schema": "tree/2"},
     "tree: wanted schema tree/1, got 'tree/2'; make it again with this version"),
])
def test_a_mistake_is_told_with_its_path_what_was_wanted_and_what_came(changes, mistake):
    with pytest.raises(DataError) as e:
        Tree.from_json({**FULL.to_json(), **changes})
    assert str(e.value).startswith(mistake)
    assert "\n" not in str(e.value)


def test_every_mistake_is_told_at_once_and_not_without_end():
    with pytest.raises(DataError) as e:
        Tree.from_json({"schema": "tree/1", "name": 1, "on": 2}, "a.json")
    assert (str(e.value)
            == "a.json: name: wanted text, got 1\na.json: on: wanted true or false, got 2")
    with pytest.raises(DataError) as e:
        Tree.from_json({**FULL.to_json(), "leaves": [1] * 1000})
    lines = str(e.value).splitlines()
    assert len(lines) == 11 and lines[-1] == "tree: ... and 990 more"


def test_another_schema_has_its_code():
    with pytest.raises(DataError) as e:
        Tree.from_json({"schema": "tree/9"})
    assert e.value.codes == (Code.SCHEMA_UNKNOWN,)


def test_no_data_is_too_long_to_be_shown():
    with pytest.raises(DataError) as e:
        decode(Leaf, {"name": "a", "size": "x" * 10**6}, "leaf")
    assert len(str(e.value)) < 300


@dataclass(frozen=True)
class Whole(Record, omit="c", whole=True):
    a: int
    b: int = 0
    c: int = 0


@dataclass(frozen=True)
class Lenient(Record, lenient=True):
    a: int | None
    b: int = 7


def test_whole_wants_what_is_always_written_and_lenient_takes_what_others_write():
    assert Whole.from_json({"a": 1, "b": 2}) == Whole(1, 2)
    with pytest.raises(DataError, match="missing: b;"):
        Whole.from_json({"a": 1})
    assert Lenient.from_json({"a": None, "b": None, "z": [1]}) == Lenient(None, 7)
    with pytest.raises(DataError, match="missing: a;"):
        Lenient.from_json({"z": 1})


@dataclass(frozen=True)
class Seconds:
    value: float

    def to_json(self) -> str:
        return f"{self.value} s"

    @classmethod
    def read_json(cls, data: Any, at: At) -> Seconds | None:
        number, _, unit = data.partition(" ") if isinstance(data, str) else ("", "", "")
        return cls(float(number)) if unit == "s" else at.wrong("a time such as '3.0 s'", data)


class Timer(NamedTuple):
    after: Seconds
    every: Annotated[Any, Seconds] = None
    names: Annotated[tuple[str, ...],
                     Check("a list of at most 2", lambda names: len(names) <= 2)] = ()


def test_a_hook_reads_and_writes_what_annotations_cannot_say():
    timer = Timer(Seconds(3.0), Seconds(0.5), ("a",))
    assert encode(timer) == {"after": "3.0 s", "every": "0.5 s", "names": ["a"]}
    assert decode(Timer, encode(timer), "timer") == timer
    with pytest.raises(DataError, match=r"timer: after: wanted a time such as '3.0 s', got 3"):
        decode(Timer, {"after": 3}, "timer")
    with pytest.raises(DataError, match="names: wanted a list of at most 2"):
        decode(Timer, {"after": "1 s", "names": ["a", "b", "c"]}, "timer")


def test_fields_may_come_from_elsewhere():
    assert decode(Leaf, {"size": 2}, "leaf", id="x") == Leaf("x", 2)
    at = At("", [], [])
    assert read_fields(Leaf, {"size": "2"}, at, id="x") is None
    assert at.mistakes == ["size: wanted a whole number >= 0, got '2'"]


def test_a_type_that_no_json_is_read_as_says_so():
    with pytest.raises(TypeError, match="no JSON can be read as"):
        decode(complex, 1, "number")
