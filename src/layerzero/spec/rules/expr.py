"""Small arithmetic over facts, written as text: `"batch * heads"`, `"seq_k - seq_q"`.

Text, not lambdas: the same expression is evaluated here, compiled into the Python hot path, turned
into postfix for the native one, and written to JSON.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from ..errors import SpecError

_BINARY: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add), ast.Sub: ("sub", operator.sub), ast.Mult: ("mul", operator.mul),
    ast.FloorDiv: ("div", operator.floordiv), ast.Mod: ("mod", operator.mod),
}
_COMPARE: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("eq", operator.eq), ast.NotEq: ("ne", operator.ne), ast.Lt: ("lt", operator.lt),
    ast.LtE: ("le", operator.le), ast.Gt: ("gt", operator.gt), ast.GtE: ("ge", operator.ge),
}
_CALLS: dict[str, tuple[str, Callable[..., Any]]] = {"max": ("max", max), "min": ("min", min)}

MAX_CHARACTERS = 2000                          # a longer one may be nested too deeply to walk
Postfix = tuple[tuple[str, Any], ...]


class Expr:
    """A parsed expression. `names` are the facts it reads, `postfix` its stack program."""

    __slots__ = ("_code", "names", "postfix", "source")

    def __init__(self, source: str) -> None:
        if len(source) > MAX_CHARACTERS:
            raise SpecError(
                f"expression {source[:60]!r}... has {len(source)} characters; write at most "
                f"{MAX_CHARACTERS}")
        try:
            tree = ast.parse(source, mode="eval")
            self.postfix: Postfix = tuple(_walk(tree.body, source))
            self._code = compile(tree, "<expression>", "eval")
        except SpecError:
            raise
        # a zero byte; the parser's own limits
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise SpecError(
                f"expression {source!r:.200} does not parse: {getattr(e, 'msg', '') or e}") from e
        self.source = source
        self.names: tuple[str,
                          ...] = tuple(dict.fromkeys(v for op, v in self.postfix if op == "fact"))

    def __call__(self, facts: Mapping[str, Any]) -> Any:
        try:
            # whitelisted by _walk
            return eval(self._code, {"__builtins__": {"max": max, "min": min}}, facts)
        except ZeroDivisionError:
            return 0

    def __repr__(self) -> str:
        return f"Expr({self.source!r})"


@lru_cache(maxsize=None)
def parse(source: str) -> Expr:
    return Expr(source)


def _walk(node: ast.AST, source: str) -> list[tuple[str, Any]]:
    if isinstance(node, ast.Name) and node.id not in _CALLS:
        return [("fact", node.id)]
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return [("const", node.value)]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return [*_walk(node.left, source), *_walk(node.right, source),
                (_BINARY[type(node.op)][0], None)]
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        return [*_walk(node.left, source), *_walk(node.comparators[0], source),
                (_COMPARE[type(node.ops[0])][0], None)]
    if (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS
            and len(node.args) == 2 and not node.keywords):
        return [*_walk(node.args[0], source), *_walk(node.args[1], source),
                (_CALLS[node.func.id][0], None)]
    raise SpecError(
        f"expression {source!r} uses {type(node).__name__}; allowed are facts, numbers, "
        "+ - * // %, one comparison, max(a, b), min(a, b)")
