"""The one codec between typed values and JSON.

`encode` turns dataclasses, named tuples, enums, tuples and mappings into what `json.dumps` takes;
`decode` reads such data back by the annotations of a type. Reading is strict: 1 is no bool, "1" is
no number, and a member that is missing or unknown is a mistake. All mistakes come in one DataError,
each with its path, what was wanted and what came.

A dataclass that derives from `Record` has `to_json` and `from_json`. Keywords of the class say
where its JSON differs from its fields. For what they cannot say there are three hooks, which any
class may have:

    to_json(self)                   the value as plain data
    read_json(cls, data, at)        the value from plain data; `at` collects the mistakes
    check_json(self, at)            mistakes in a value whose fields have the right types
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import date
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union

from .errors import DataError, LayerZeroError
from .reason import Code, Reason, shown

MAX_MISTAKES = 10                              # that an error shows
T = TypeVar("T")


class Layout(NamedTuple):
    """Describes how the JSON of a class differs from its fields."""

    # fields and properties that are written, in order; (): all fields
    members: tuple[str, ...] = ()
    # fields that are left out while they have their default
    omit: tuple[str, ...] = ()
    names: Mapping[str, str] = {}              # field -> name in JSON, where it is another one
    # members that are always the same, such as the schema
    header: Mapping[str, Any] = {}
    whole: bool = False                        # must members that have a default be there, too?
    # is null read as absent, and what is unknown passed over?
    lenient: bool = False


class Record:
    """Base of dataclasses that are read from or written to JSON.

    `json` names the fields and properties that are written, in their order, `omit` the fields that
    are left out while they have their default. `names` maps fields to their names in JSON, `header`
    holds constant members. When it is read, `whole` wants every member that is not in `omit`;
    `lenient` passes over unknown members and takes null for absent where there is a default.
    """

    json_layout: ClassVar[Layout] = Layout()

    def __init_subclass__(cls, json: str = "", omit: str = "",
                          names: Mapping[str, str] | None = None, header: Mapping[str, Any]
                          | None = None, whole: bool = False, lenient: bool = False) -> None:
        if json or omit or names or header or whole or lenient:
            cls.json_layout = Layout(tuple(json.split()), tuple(omit.split()), names or {},
                                     header or {}, whole, lenient)

    def to_json(self) -> dict[str, Any]:
        return encode_fields(self)

    @classmethod
    def from_json(cls: type[T], data: Any, what: str = "") -> T:
        return decode(cls, data, what or cls.__name__.lower())


class Check(NamedTuple):
    """A condition on plain data beyond its type: `Annotated[int, Check("a whole number > 0", lambda
    n: n > 0)]`.

    Where an annotation holds a type instead, data is read as that: `Annotated[Any, Value]`.
    """

    want: str
    holds: Callable[[Any], bool]


def one_of(choices: Iterable[str]) -> Check:
    names = tuple(choices)
    return Check(f"one of {', '.join(names)}", lambda value: value in names)


Text = Annotated[str, Check("text that is not empty", bool)]
Count = Annotated[int, Check("a whole number >= 0", lambda n: n >= 0)]


# Writing

def encode(value: Any) -> Any:
    """Returns the value as plain data for `json.dumps`."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if hasattr(value, "_fields") or is_dataclass(value):
        return encode_fields(value)
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value.isoformat() if isinstance(value, date) else value


def encode_fields(value: Any) -> dict[str, Any]:
    """Returns the members of a dataclass or named tuple, without its own `to_json`."""
    kind: Any = type(value)
    layout, members, defaults = _shape(kind)
    data = dict(layout.header)
    for key, name in members.items():
        item = getattr(value, name)
        if name not in layout.omit or item != defaults[name]:
            data[key] = encode(item)
    return data


@lru_cache(maxsize=None)
def _shape(kind: type) -> tuple[Layout, Mapping[str, str], Mapping[str, Any]]:
    """Returns a class's layout, its members (name in JSON -> attribute), and its defaults."""
    layout: Layout = getattr(kind, "json_layout", Layout())
    if is_dataclass(kind):
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory()
                    for f in fields(kind)}
    else:
        named: Any = kind
        defaults = {name: named._field_defaults.get(name, MISSING) for name in named._fields}
    members = [name for name in layout.members or defaults if name not in layout.header]
    return layout, {layout.names.get(name, name): name for name in members}, defaults


# Reading

class At:
    """A place in data that is being read; `mistakes` are those of all places."""

    def __init__(self, path: str, mistakes: list[str], reasons: list[Reason]) -> None:
        self.path, self.mistakes, self.reasons = path, mistakes, reasons

    def __truediv__(self, name: str) -> At:
        """Returns the place of a member, `at / "rows" / "[0]"`."""
        path = self.path + name if name[:1] == "[" else f"{self.path}.{name}" if self.path else name
        return At(path, self.mistakes, self.reasons)

    def mistake(self, text: str) -> Any:
        """Note a mistake at this place; returns None, the value of what cannot be read."""
        self.mistakes.append(f"{self.path}: {text}" if self.path else text)

    def wrong(self, want: str, got: Any) -> Any:
        return self.mistake(f"wanted {want}, got {shown(got, limit=120)}")


def decode(kind: type[T], data: Any, what: str, **extra: Any) -> T:
    """Reads data as a value of this type; DataError lists every mistake. `what` names what is read
    in messages; `extra` are fields of a dataclass that do not come from the data."""
    at = At("", [], [])
    value: T = read_fields(kind, data, at, **extra) if extra else read(kind, data, at)
    if at.mistakes:
        more = len(at.mistakes) - MAX_MISTAKES
        lines = at.mistakes[:MAX_MISTAKES] + ([f"... and {more} more"] if more > 0 else [])
        raise DataError("\n".join(f"{what}: {line}" for line in lines), at.reasons)
    return value


def read(kind: Any, data: Any, at: At) -> Any:
    """Reads data as a value of this type. After a mistake the value means nothing."""
    return _reader(kind).read(data, at)


def read_fields(kind: Any, data: Any, at: At, **extra: Any) -> Any:
    """Reads data as a dataclass or named tuple that has no `read_json`; None after a mistake."""
    if not isinstance(data, Mapping):
        return at.wrong("an object", data)
    (layout, members, defaults), before = _shape(kind), len(at.mistakes)
    for key, value in layout.header.items():
        if data.get(key) != value:             # of another version nothing else can be said
            at.reasons.append(Reason(Code.SCHEMA_UNKNOWN, value, data.get(key)))
            return (
                at.mistake(
                    f"wanted {key} {value}, got {shown(data.get(key))}; make it again with this "
                    "version"))
    members = {key: name for key, name in members.items() if name not in extra}
    missing = [key for key, name in members.items() if key not in data and name in defaults
               and (defaults[name] is MISSING or (layout.whole and name not in layout.omit))]
    unknown = ([] if layout.lenient
               else [str(key)[:60] for key in data if key not in {*members, *layout.header}])
    if missing or unknown:
        at.mistake(
            f"missing: {', '.join(missing) or 'nothing'}; unknown: "
            f"{', '.join(unknown) or 'nothing'}; wanted are "
            f"{', '.join((*layout.header, *members))}")
    hints = _hints(kind)
    values = {name: read(hints[name], data[key], at / key) for key, name in members.items()
              if key in data and name in defaults
              and not (layout.lenient and data[key] is None and defaults[name] is not MISSING)}
    if len(at.mistakes) > before:
        return None
    try:
        value = kind(**values, **extra)
    except (LayerZeroError, ValueError) as e:  # what the class itself refuses
        return at.mistake(str(e))
    if hasattr(value, "check_json"):
        value.check_json(at)
    return value


@lru_cache(maxsize=None)
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


class _Reader(NamedTuple):
    read: Callable[[Any, At], Any]
    want: str
    takes: tuple[type, ...]                    # of plain data, by exact type
    kind: Any = None                           # the dataclass or named tuple


@lru_cache(maxsize=None)
def _reader(kind: Any) -> _Reader:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if origin is Annotated:
        return (_checked(_reader(args[0]), args[1]) if isinstance(args[1], Check)
                else _reader(args[1]))
    if origin in (Union, types.UnionType):
        return _union([_reader(arg) for arg in args])
    if origin in (tuple, list) and (origin is list or args[1:] == (...,)):
        return _items(_reader(args[0]), origin)
    if origin is tuple:
        return _fixed(tuple(map(_reader, args)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_reader(args[1]))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    if hasattr(kind, "read_json"):
        return _Reader(kind.read_json, "an object", _SCALARS[Any].takes)
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _Reader(lambda data, at: read_fields(kind, data, at), "an object", (dict,), kind)
    raise TypeError(f"no JSON can be read as {kind!r}; give it a read_json(data, at)")


def _scalar(want: str, *takes: type) -> _Reader:
    def read(data: Any, at: At) -> Any:
        if type(data) not in takes:
            at.wrong(want, data)
        elif (type(data) is str and not data.isascii()
              and any("\ud800" <= c <= "\udfff" for c in data)):
            at.wrong("text without lone surrogates", data)     # no file can hold them
        elif type(data) is int and float in takes and abs(data) > 10**300:
            at.wrong("a number that a float can hold", data)
        return data

    return _Reader(read, want, takes)


_SCALARS: Mapping[Any, _Reader] = {
    str: _scalar("text", str), float: _scalar("a number", float, int),
    int: _scalar("a whole number", int), bool: _scalar("true or false", bool),
    type(None): _scalar("null", type(None)),
    Any: _Reader(lambda data, at: data, "any value",
                 (dict, list, str, int, float, bool, type(None)))}


def _checked(reader: _Reader, check: Check) -> _Reader:
    def read(data: Any, at: At) -> Any:
        if type(data) not in reader.takes or not check.holds(data):
            return at.wrong(check.want, data)
        return reader.read(data, at)

    return reader._replace(read=read, want=check.want)


def _union(readers: list[_Reader]) -> _Reader:
    want = " or ".join(dict.fromkeys(reader.want for reader in readers))

    def read(data: Any, at: At) -> Any:
        able = [reader for reader in readers if type(data) in reader.takes]
        if not able:
            return at.wrong(want, data)
        kinds = {reader.kind: reader for reader in able if reader.kind is not None}
        if len(kinds) < 2:
            return able[0].read(data, at)
        headers = {kind: _shape(kind)[0].header for kind in kinds}
        fitting = [kind for kind, header in headers.items() if header.items() <= data.items()]
        if not fitting:
            return at.wrong(f"an object with one of {', '.join(map(str, headers.values()))}", data)
        meant = max(fitting, key=lambda kind: sum(key in data for key in _shape(kind)[1]))
        return kinds[meant].read(data, at)     # the one that has most of the members

    return _Reader(read, want, tuple(kind for reader in readers for kind in reader.takes))


def _items(reader: _Reader, kind: type) -> _Reader:
    def read(data: Any, at: At) -> Any:
        if type(data) is not list:
            return at.wrong(f"a list of {reader.want}", data)
        return kind([reader.read(item, at / f"[{i}]") for i, item in enumerate(data)])

    return _Reader(read, f"a list of {reader.want}", (list,))


def _fixed(readers: tuple[_Reader, ...]) -> _Reader:
    want = f"a list of {', '.join(reader.want for reader in readers)}"

    def read(data: Any, at: At) -> Any:
        if type(data) is not list or len(data) != len(readers):
            return at.wrong(want, data)
        return tuple(reader.read(item, at / f"[{i}]")
                     for i, (reader, item) in enumerate(zip(readers, data)))

    return _Reader(read, want, (list,))


def _mapping(reader: _Reader) -> _Reader:
    def read(data: Any, at: At) -> Any:
        if not isinstance(data, Mapping):
            return at.wrong("an object", data)
        return {_SCALARS[str].read(key, at): reader.read(item, at / str(key))
                for key, item in data.items()}

    return _Reader(read, "an object", (dict,))


def _enum(kind: type[Enum]) -> _Reader:
    def read(data: Any, at: At) -> Any:
        try:
            return kind(data)
        except ValueError:
            return at.wrong(f"a name of {kind.__name__}", data)

    return _Reader(read, f"a name of {kind.__name__}", (str,))
