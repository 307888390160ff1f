"""capabilities.json: what every kernel can do, as a file.

`export` lists what the declarations say. An edited file gives kernels other limits without a change
of
code: `apply` returns a catalog with them, `use` activates it for the process. A file states limits
only: which code runs, for which op and in which layout stays as declared, and a file that differs
is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ..files import reading
from ..machine.loading import installed_version
from ..spec.codec import decode
from ..spec.errors import DataError, SpecError
from ..spec.kernel import Kernel
from ..spec.names import nearest
from ..spec.op import Op
from ..spec.reason import Code, Reason
from ..spec.rules import Condition
from ..spec.rules.expr import parse
from ..spec.rules.predicate import PREDICATES, is_number
from . import snapshot as worlds
from .registry.catalog import Catalog

SCHEMA = "layerzero.capabilities/1"
MAX_SHOWN = 20
# of any_of and when in each other; the kernels need two
_MAX_DEPTH = 16

_TOP = {"schema": str, "library": str, "kernels": list}
# What belongs to the code: stated for the reader, and refused where it differs.
_FIXED = ("op", "load", "package", "distribution", "variants", "baseline", "less_work",
          "less_work_when", "sdpa_backend")
_TYPES: Mapping[str, type] = {"str": str, "bool": bool, "float": float}
_KERNEL: Mapping[str, type] = {
    **{f.name: _TYPES[str(f.type)] for f in fields(Kernel) if str(f.type) in _TYPES
       and f.name in Kernel.json_layout.members},
    "op": str, "load": str, "variants": list, "requires": list, "less_work_when": list}
_NUMERIC_TENSOR_FACTS = ("stride_last", "alignment", "ndim")
_NUMERIC_FACTS = ("sm", "tensor_core_generation", "itemsize")
_SET_FACTS = ("isa",)
_WORDS = {str: "text", bool: "true or false", float: "a number", list: "a list", dict: "an object"}


def export(catalog: Catalog) -> dict[str, Any]:
    """Returns the descriptor of a catalog: plain data, equal for equal declarations."""
    kernels = sorted(catalog.kernels, key=lambda kernel: kernel.id)
    return {"schema": SCHEMA, "library": installed_version("layerzero") or "unknown",
            "kernels": [kernel.to_json() for kernel in kernels],
            "bounds": {kernel.id: bounds_of(kernel.op) for kernel in kernels
                       if _scales_codes(kernel.op)}}


def _scales_codes(op: Op) -> bool:
    """Returns whether an op takes or makes codes, which come with scales: of weights, or of a KV
    cache in eight bits. `scale` alone is the factor of attention's scores."""
    return any("scale" in param.name and param.name != "scale" for param in op.params)


def bounds_of(op: Op) -> dict[str, dict[str, float]]:
    """Returns how far a result of an op on quantized numbers may be from the formula over the same
    codes and scales in float64, by dtype: |error| <= atol + rtol * |result|, and no more than
    times_eager times the error of the formula at that dtype, beside a few roundings. Codes are
    equal to the formula's."""
    limits = ((dtype, op.tolerance.of(dtype)) for dtype in op.dtypes)
    return {dtype: {"rtol": rtol, "atol": atol, "times_eager": op.tolerance.times_eager}
            for dtype, (rtol, atol) in limits}


_latest: tuple[Catalog | None, str] = None, ""     # the last catalog that was hashed


def hash_of(catalog: Catalog) -> str:
    """Returns the hash of a catalog's descriptor; it takes tens of milliseconds, so once each."""
    global _latest
    known, digest = _latest
    if known is not catalog:
        digest = capabilities_hash(export(catalog))
        _latest = catalog, digest
    return digest


def capabilities_hash(data: Mapping[str, Any]) -> str:
    """Returns a hash of the content, whatever its spacing and order of keys."""
    try:
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise DataError(f"capabilities must be plain JSON data, got {type(e).__name__}: {e}") from e
    return hashlib.sha256(text.encode()).hexdigest()


def load(path: str | os.PathLike[str], catalog: Catalog | None = None) -> dict[str, Any]:
    """Reads and validates a descriptor."""
    data: dict[str, Any] = reading.read_json(path, "a capabilities file")
    validate(data, catalog)
    return data


def validate(data: Any, catalog: Catalog | None = None) -> None:
    """Raises DataError with every problem unless `data` fits the catalog (default: current)."""
    problems = list(_problems(data, catalog or worlds.current().catalog))
    if problems:
        lines = [f"  {problem.message}" for problem in problems[:MAX_SHOWN]]
        if len(problems) > MAX_SHOWN:
            lines.append(f"  ... and {len(problems) - MAX_SHOWN} more")
        raise DataError("the capabilities do not fit; nothing of them was applied:\n"
                        + "\n".join(lines), problems)


def apply(catalog: Catalog, data: Mapping[str, Any]) -> Catalog:
    """Returns the catalog with the descriptor's limits. Kernels it does not name keep their own."""
    validate(data, catalog)
    stated = {row["id"]: row for row in data["kernels"]}
    return replace(catalog, kernels=tuple(
        _constrained(kernel, stated[kernel.id]) if kernel.id in stated else kernel
        for kernel in catalog.kernels))


def _constrained(kernel: Kernel, row: Mapping[str, Any]) -> Kernel:
    if row == kernel.to_json():
        return kernel                          # the same object: it stays loaded and compiled
    changes = {name: row[name] for name in _KERNEL if name not in ("id", "requires", *_FIXED)}
    return kernel.constrained(decode(tuple[Condition, ...], row["requires"], "requires"), **changes)


def use(source: Mapping[str, Any] | str | os.PathLike[str]) -> str:
    """Activates a descriptor, or the file of one, for this process; returns its hash.

    Every cached selection is dropped. To go back, `export` before and `use` that.
    """
    data = source if isinstance(source, Mapping) else load(source)
    name = capabilities_hash(data)
    worlds.publish(lambda world: world.replace(catalog=apply(world.catalog, data)),
                   f"capabilities:{name[:16]}")
    return name


# problems: reasons whose `fact` is the place

def _problems(data: Any, catalog: Catalog) -> Iterator[Reason]:
    if not isinstance(data, Mapping):
        yield _wrong_type("capabilities", "an object", _type_name(data))
        return
    schema = data.get("schema")
    if schema != SCHEMA:
        yield Reason(Code.SCHEMA_UNKNOWN, SCHEMA, _shown(schema) if "schema" in data else "none",
                     "schema")
        return                                 # another version has other fields
    # older files have none
    faults = list(_field_problems(data, {**_TOP, "bounds": dict} if "bounds" in data else _TOP, ""))
    yield from faults
    for name, stated in data["bounds"].items() if isinstance(data.get("bounds"), dict) else ():
        kernel = catalog.by_id.get(name)
        if kernel is not None and stated != bounds_of(kernel.op):
            yield _invalid(f"bounds.{name}", f"{bounds_of(kernel.op)!r}, which the proof of "
                           f"{name} holds it to", _shown(stated))
    if any(fault.fact == "kernels" for fault in faults):
        return
    seen: set[Any] = set()
    for i, row in enumerate(data["kernels"]):
        yield from _row_problems(row, f"kernels[{i}]", catalog, seen)


def _row_problems(row: Any, at: str, catalog: Catalog, seen: set[Any]) -> Iterator[Reason]:
    if not isinstance(row, Mapping):
        yield _wrong_type(at, "an object", _type_name(row))
        return
    faults = list(_field_problems(row, _KERNEL, f"{at}."))
    yield from faults
    name = row.get("id")
    kernel = catalog.by_id.get(name) if isinstance(name, str) else None
    if kernel is None:
        if isinstance(name, str):
            yield _invalid(f"{at}.id", f"a kernel that is registered{_hint(name, catalog.by_id)}",
                           _shown(name))
        return
    if kernel.id in seen:
        yield _invalid(f"{at}.id", "given once", f"{kernel.id} again")
    seen.add(kernel.id)
    bad = {fault.fact for fault in faults}
    if f"{at}.op" not in bad and row["op"] not in catalog.ops:
        yield _invalid(f"{at}.op", f"an op that is registered{_hint(row['op'], catalog.ops)}",
                       _shown(row["op"]))
        bad.add(f"{at}.op")
    declared = kernel.to_json()
    for field in _FIXED:
        if f"{at}.{field}" not in bad and row[field] != declared[field]:
            yield _invalid(f"{at}.{field}",
                           f"{declared[field]!r}, which belongs to the code of {kernel.id}",
                           _shown(row[field]))
    for field, check in _CHECKS.items():
        if f"{at}.{field}" not in bad and (want := check(row[field], kernel.op)):
            yield _invalid(f"{at}.{field}", want, _shown(row[field]))
    if f"{at}.requires" not in bad:
        for i, rule in enumerate(row["requires"]):
            yield from _rule_problems(rule, f"{at}.requires[{i}]", kernel.op, 0)


def _rule_problems(rule: Any, at: str, op: Op, depth: int) -> Iterator[Reason]:
    if not isinstance(rule, Mapping):
        yield _wrong_type(at, "an object", _type_name(rule))
    elif depth > _MAX_DEPTH:
        yield _invalid(at, f"nested at most {_MAX_DEPTH} deep", "a deeper rule")
    elif "any_of" in rule:
        faults = list(_field_problems(rule, {"any_of": list}, f"{at}."))
        yield from faults
        if not faults:
            if not rule["any_of"]:
                yield _invalid(f"{at}.any_of", "at least one rule", "none")
            for i, inner in enumerate(rule["any_of"]):
                yield from _rule_problems(inner, f"{at}.any_of[{i}]", op, depth + 1)
    elif "when" in rule:
        faults = list(_field_problems(rule, {"when": dict, "then": dict}, f"{at}."))
        yield from faults
        for part in () if faults else ("when", "then"):
            yield from _rule_problems(rule[part], f"{at}.{part}", op, depth + 1)
    else:
        yield from _test_problems(rule, at, op)


def _test_problems(rule: Mapping[str, Any], at: str, op: Op) -> Iterator[Reason]:
    types: dict[str, type] = {"fact": str, "test": str, "value": object, "code": str}
    faults = list(_field_problems(rule, {**types, "repair": str} if "repair" in rule else types,
                                  f"{at}."))
    yield from faults
    bad = {fault.fact.rpartition(".")[2] for fault in faults}
    if "fact" not in bad and rule["fact"] not in op.fact_names:
        yield _invalid(f"{at}.fact", f"a fact of {op.name}{_hint(rule['fact'], op.fact_names)}",
                       _shown(rule["fact"]))
        bad.add("fact")
    if "test" not in bad and rule["test"] not in PREDICATES:
        yield _invalid(f"{at}.test", f"one of {', '.join(PREDICATES)}", _shown(rule["test"]))
        bad.add("test")
    if "code" not in bad and rule["code"] not in Code.__members__:
        yield _invalid(f"{at}.code", f"a reason code{_hint(rule['code'], Code.__members__)}",
                       _shown(rule["code"]))
    if bad & {"fact", "test", "value"}:
        return
    test = PREDICATES[rule["test"]]
    if test.reads == "number" and not is_numeric(rule["fact"], op):
        yield _invalid(f"{at}.test",
                       f"one for a value that is no number, as {rule['fact']} is none",
                       rule["test"])
    elif test.reads == "set" and rule["fact"] not in _SET_FACTS:
        yield _invalid(f"{at}.test", f"one for a single value, as {rule['fact']} is one",
                       rule["test"])
    elif not test.takes(rule["value"]):
        yield _invalid(f"{at}.value", test.wanted, _shown(rule["value"]))
    elif "repair" not in bad and (want := _repair_wanted(rule, op)):
        yield _invalid(f"{at}.repair", want, _shown(rule["repair"]))


def _repair_wanted(rule: Mapping[str, Any], op: Op) -> str:
    repair = rule.get("repair", "")
    if repair == "contiguous":
        return ("" if rule["fact"].partition(".")[0] in op.tensors
                else "empty: only a rule on a tensor is repaired so")
    if repair == "cast":
        first = rule["value"][0] if isinstance(rule["value"], (list, tuple)) else None
        known = isinstance(first, str) and isinstance(getattr(torch, first, None), torch.dtype)
        known = known and PREDICATES[rule["test"]](rule["value"]).holds(first)
        return "" if known else "empty: a cast needs test 'in' and a dtype as its first value"
    return "" if repair == "" else "contiguous, cast or empty"


def is_numeric(fact: str, op: Op) -> bool:
    """Is the fact a number, which can be compared?"""
    param = op.by_name.get(fact)
    # what `reads` are, only the op knows
    return (fact in (*op.dims, *op.derived, *op.reads, *_NUMERIC_FACTS)
            or (param is not None and param.kind in ("int", "float"))
            or fact.rpartition(".")[2] in _NUMERIC_TENSOR_FACTS)


def _range(value: str, op: Op) -> str:
    try:
        SpecifierSet(value)
    except InvalidSpecifier:
        return "a range of versions like '>=2.5,<3'"
    return ""


def _workspace(value: str, op: Op) -> str:
    try:
        unknown = [name for name in parse(value).names if name not in op.fact_names]
    except (SpecError, ValueError, RecursionError, MemoryError):   # the parser's own limits
        return "arithmetic over facts like '4 * batch * heads'"
    return (f"arithmetic over facts of {op.name}{_hint(unknown[0], op.fact_names)}" if unknown
            else "")


_CHECKS = {
    "version": _range, "torch": _range, "workspace": _workspace, "shared_memory": _workspace,
    "prior": lambda value, op: "" if value > 0 else "a number > 0",
    "overhead_us": lambda value, op: "" if value >= 0 else "a number >= 0"}


def _field_problems(data: Mapping[str, Any], types: Mapping[str, type],
                    at: str) -> Iterator[Reason]:
    """Yields missing fields, fields of another type and unknown fields."""
    for name, kind in types.items():
        if name not in data:
            yield Reason(Code.MISSING_METADATA, _WORDS.get(kind, "a value"), None, f"{at}{name}")
        elif kind is float:
            if not is_number(data[name]):
                yield _wrong_type(f"{at}{name}", "a number", _shown(data[name]))
        elif not isinstance(data[name], Mapping if kind is dict else (list, tuple) if kind is list
                            else kind):
            yield _wrong_type(f"{at}{name}", _WORDS[kind], _shown(data[name]))
    for name in data:
        if name not in types:
            yield _invalid(f"{at}{str(name)[:60]}", f"left out; the fields are {', '.join(types)}",
                           _shown(data[name]))


def _invalid(at: str, want: str, got: Any) -> Reason:
    return Reason(Code.VALUE_OUT_OF_RANGE, want, got, at)


def _wrong_type(at: str, want: str, got: Any) -> Reason:
    return Reason(Code.WRONG_TYPE, want, got, at)


def _hint(word: str, known: Iterable[str]) -> str:
    near = nearest(word, known)
    return f" (did you mean {near!r}?)" if near else ""


def _type_name(value: Any) -> str:
    return _WORDS.get(type(value), "null" if value is None else type(value).__name__)


def _shown(value: Any) -> str:
    """Returns a value as one short line for a message."""
    if isinstance(value, (Mapping, list, tuple)):
        return _type_name(value)
    text = (repr(value) if not isinstance(value, int) or abs(value) < 10 ** 18
            else "a very large number")
    return text if len(text) <= 60 else f"{text[:57]}..."
