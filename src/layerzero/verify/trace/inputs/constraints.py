"""Constraints of a definition, such as `len_indptr == batch_size + 1` or `total_q ==
qo_indptr[-1].item()`.

They come from a file, so they are not given to `eval`: names, whole numbers, arithmetic,
comparison, indexing, `.shape`, `.item()`, `len`, `min` and `max` are understood, and nothing else.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Div: operator.truediv}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge}
_METHODS = ("item", "max", "min", "sum")


class NotUnderstood(Exception):
    """The expression uses something else."""


class Unknown(Exception):
    """A name in it has no value yet."""


# Of what a constraint may end in: it is passed over. A tensor of several numbers is neither true
# nor false.
SKIPPED = (NotUnderstood, Unknown, LookupError, TypeError, ValueError, ArithmeticError,
           RuntimeError)


def value_of(text: str | ast.expr, known: Mapping[str, Any]) -> Any:
    """The value of an expression over sizes and tensors."""
    node = ast.parse(text, mode="eval").body if isinstance(text, str) else text
    if isinstance(node, ast.Name):
        if node.id not in known:
            raise Unknown(node.id)
        return known[node.id]
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](value_of(node.left, known), value_of(node.right, known))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand, known)
    if isinstance(node, ast.BoolOp):
        parts = [bool(value_of(v, known)) for v in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
        values = [value_of(v, known) for v in (node.left, *node.comparators)]
        return all(bool(_COMPARE[type(op)](a, b)) for op, a, b in zip(node.ops, values, values[1:]))
    if isinstance(node, ast.Subscript):
        return value_of(node.value, known)[value_of(node.slice, known)]
    if isinstance(node, ast.Attribute) and node.attr == "shape":
        return _tensor(value_of(node.value, known)).shape
    if isinstance(node, ast.Call) and not node.keywords:
        return _call(node, known)
    raise NotUnderstood(ast.unparse(node))


def _call(node: ast.Call, known: Mapping[str, Any]) -> Any:
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS and not node.args:
        return getattr(_tensor(value_of(node.func.value, known)), node.func.attr)()
    if isinstance(node.func, ast.Name) and node.func.id in ("len", "min", "max", "int"):
        functions: dict[str, Any] = {"len": len, "min": min, "max": max, "int": int}
        return functions[node.func.id](*(value_of(a, known) for a in node.args))
    raise NotUnderstood(ast.unparse(node))


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise NotUnderstood(f"{value!r} is no tensor")
    return value


def violated(constraints: Iterable[str], known: Mapping[str, Any]) -> list[str]:
    """Return the constraints that do not hold; those not understood are passed over."""
    broken = []
    for text in constraints:
        try:
            if not bool(value_of(text, known)):
                broken.append(text)
        except SKIPPED:
            continue
    return broken


def solved(constraints: Iterable[str], free: Iterable[str],
           known: Mapping[str, Any]) -> dict[str, int]:
    """Values for axes of `free` that follow from the rest: `axis == expression`, `axis > 1`."""
    values: dict[str, int] = {}
    nodes = [ast.parse(text, mode="eval").body for text in constraints]
    for _ in range(len(nodes) + 1):
        for node in nodes:
            if not isinstance(node, ast.Compare) or len(node.ops) != 1:
                continue
            for side, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
                if (isinstance(side, ast.Name) and side.id in free
                    and isinstance(node.ops[0], ast.Eq)):
                    try:
                        values[side.id] = int(value_of(other, {**known, **values}))
                    except SKIPPED:
                        continue
    return values


def total_axis(constraints: Iterable[str], tensor: str) -> str:
    """The axis a constraint makes the last entry of `tensor`: `total_q == qo_indptr[-1].item()`."""
    for text in constraints:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            sides = (node.left, node.comparators[0])
            for side, other in (sides, sides[::-1]):
                if isinstance(side, ast.Name) and f"{tensor}[-1]" in ast.unparse(other):
                    return side.id
    return ""
