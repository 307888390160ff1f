"""References changed in one place each: what a definition's check must notice.

A mutant is the reference's syntax tree with one change: another operator, function, constant, axis,
bound or dtype, a term or statement left out, two arguments exchanged. What only guards or describes
(asserts, docstrings, annotations, devices) is not changed.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

# One for the other, in calls and methods.
_FUNCTIONS = {
    "silu": ("gelu", "relu"), "gelu": ("silu",), "relu": ("silu",), "sigmoid": ("tanh",),
    "softmax": ("log_softmax",), "rsqrt": ("sqrt",), "sqrt": ("abs",), "exp": ("exp2", "expm1"),
    "exp2": ("exp",), "log": ("log2",), "log2": ("log",), "logsumexp": ("amax",), "max": ("min",),
    "min": ("max",), "amax": ("amin",), "amin": ("amax",), "sum": ("mean",), "mean": ("sum",),
    "cumsum": ("cumprod",), "pow": ("mul",), "square": ("abs",), "cos": ("sin",), "sin": ("cos",),
    "zeros": ("ones",), "ones": ("zeros",), "zeros_like": ("ones_like",), "triu": ("tril",),
    "tril": ("triu",), "repeat_interleave": ("repeat",), "floor": ("ceil",), "ceil": ("floor",),
    "softplus": ("relu",), "sort": ("flip",), "argmax": ("argmin",)}
_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Mult,), ast.Pow: (ast.Mult,), ast.Mod: (ast.FloorDiv,)}
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq}
# What may be left out of a chain of calls.
_DROPPED = ("clamp", "clamp_min", "clamp_max", "sigmoid", "silu", "softmax", "rsqrt", "sqrt",
            "square", "abs", "exp", "masked_fill", "t", "transpose", "permute")
_WIDE = ("float32", "float64")
_AXES = ("dim", "axis")


@dataclass(frozen=True)
class Mutant:
    kind: str                                  # operator | constant | function | dropped term | ...
    line: int
    change: str
    code: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.kind}: {self.change}"


def mutants(code: str, limit: int = 0, seed: str = "") -> list[Mutant]:
    """Return mutants of a reference; `most` of them if that is not 0, evenly of every kind."""
    tree = ast.parse(code)
    candidates: dict[str, Mutant] = {}
    original = ast.unparse(tree)
    for site in _sites(tree):
        for kind, change, alter in _changes(site):
            twin = _copy_with(tree, site, alter)
            text = ast.unparse(twin) if twin is not None else original
            if text != original and _compiles(text):
                candidates.setdefault(text, Mutant(kind, getattr(site, "lineno", 0), change, text))
    every = list(candidates.values())
    return every if not limit or len(every) <= limit else _evenly(every, limit, seed)


def _evenly(every: list[Mutant], limit: int, seed: str) -> list[Mutant]:
    rng, by_kind = random.Random(seed), {}     # type: random.Random, dict[str, list[Mutant]]
    for m in every:
        by_kind.setdefault(m.kind, []).append(m)
    for group in by_kind.values():
        rng.shuffle(group)
    chosen: list[Mutant] = []
    while len(chosen) < limit:
        for group in by_kind.values():
            if group and len(chosen) < limit:
                chosen.append(group.pop())
    return sorted(chosen, key=lambda m: (m.line, m.kind, m.change))


def _compiles(text: str) -> bool:
    try:
        compile(text, "<mutant>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _sites(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of function bodies that compute something."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    nested = {id(f) for g in functions for f in ast.walk(g) if f is not g}
    for function in functions:
        if id(function) not in nested:
            for statement in function.body:
                yield from _walk(statement)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assert) or _is_text(node) or _is_guard(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or (name == "func" and isinstance(
                value, ast.Name)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg == "device":
                continue
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) or (isinstance(node, ast.If) and all(
        isinstance(s, ast.Raise) for s in node.body))


Alter = Callable[[Any], "ast.AST | None"]


def _copy_with(tree: ast.Module, site: ast.AST, alter: Alter) -> ast.Module | None:
    """Return the tree with `alter` applied to the twin of `site`; None where it has no effect."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(tree, memo)
    target = memo[id(site)]
    altered = alter(target)
    if altered is None:
        return None
    if altered is not target:
        _Replace(target, altered).visit(twin)
    return ast.fix_missing_locations(twin)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else super().generic_visit(node)


def _changes(node: ast.AST) -> Iterator[tuple[str, str, Alter]]:
    """Yield (kind, what changes, how)."""
    if isinstance(node, ast.BinOp):
        yield from _of_operator(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        other = _COMPARISONS[type(node.ops[0])]
        yield "comparison", f"{ast.unparse(node)} with {other.__name__}", _set("ops", [other()])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) \
            and not isinstance(node.operand, ast.Constant):
        yield "dropped term", f"the minus of {ast.unparse(node)}", lambda n: n.operand
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Attribute) and node.attr in _WIDE:
        yield "dtype", f"{node.attr} is bfloat16", _set("attr", "bfloat16")
    elif isinstance(node, ast.Slice):
        yield from _of_slice(node)
    elif isinstance(node, ast.If):
        yield "condition", f"not {ast.unparse(node.test)}", _negate
    elif isinstance(node, (ast.AugAssign, ast.Expr)):
        yield "dropped statement", ast.unparse(node), lambda n: ast.Pass()
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) \
            and len(node.targets[0].elts) == 2:
        yield ("swapped", f"{ast.unparse(node.targets[0])} the other way",
               lambda n: _swap(n, n.targets[0].elts))


def _of_operator(node: ast.BinOp) -> Iterator[tuple[str, str, Alter]]:
    text = ast.unparse(node)
    for other in _OPERATORS.get(type(node.op), ()):
        yield "operator", f"{text} with {other.__name__}", _set("op", other())
    if isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        yield "dropped term", f"of {text} the right side", lambda n: n.left
    if isinstance(node.op, (ast.Add, ast.Mult)):
        yield "dropped term", f"of {text} the left side", lambda n: n.right
    if isinstance(node.op, (ast.Sub, ast.Div, ast.MatMult, ast.FloorDiv)):
        def exchange(n: ast.BinOp) -> ast.BinOp:
            n.left, n.right = n.right, n.left
            return n
        yield "swapped", f"the sides of {text}", exchange


def _of_constant(node: ast.Constant) -> Iterator[tuple[str, str, Alter]]:
    value = node.value
    if isinstance(value, bool):
        yield "flag", f"{not value} instead of {value}", _set("value", not value)
    elif isinstance(value, int):
        yield "off by one", f"{value + 1} instead of {value}", _set("value", value + 1)
        yield "off by one", f"{value - 1} instead of {value}", _set("value", value - 1)
    elif isinstance(value, float):
        by = 10.0 if 0 < abs(value) < 1e-3 else 1.1
        yield "constant", f"{value * by:g} instead of {value:g}", _set("value", value * by)


def _of_call(node: ast.Call) -> Iterator[tuple[str, str, Alter]]:
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    for other in _FUNCTIONS.get(method, ()):
        yield "function", f"{other} instead of {method}", partial(_rename, other)
    inner = node.func.value if isinstance(node.func, ast.Attribute) else None
    of_module = isinstance(inner, ast.Name) and inner.id in ("torch", "F", "math")
    if method in _DROPPED and inner is not None and "functional" not in ast.unparse(inner):
        if not of_module:
            yield "dropped term", f".{method}()", lambda n: n.func.value
        elif len(node.args) >= 1:
            yield "dropped term", f"{method}()", lambda n: n.args[0]
    if len(node.args) == 2 and method not in ("view", "reshape", "zeros", "full", "transpose"):
        yield "swapped", f"the arguments of {ast.unparse(node)}", lambda n: _swap(n, n.args)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg in _AXES and isinstance(keyword.value, (ast.Constant, ast.UnaryOp)):
            other_axis = 0 if ast.unparse(keyword.value) != "0" else -1

            def turn(n: ast.Call, i: int = i, axis: int = other_axis) -> ast.Call:
                n.keywords[i].value = ast.Constant(axis)
                return n
            yield "axis", f"{keyword.arg}={other_axis} in {ast.unparse(node)}", turn
    if isinstance(node.func, ast.Name) and node.func.id == "range" and node.args:
        def shorten(n: ast.Call) -> ast.Call:
            last = 1 if len(n.args) > 1 else 0
            n.args[last] = ast.BinOp(n.args[last], ast.Sub(), ast.Constant(1))
            return n
        yield "off by one", f"the last of {ast.unparse(node)}", shorten


def _of_slice(node: ast.Slice) -> Iterator[tuple[str, str, Alter]]:
    text = ast.unparse(node)
    for side in ("lower", "upper"):
        bound = getattr(node, side)
        if bound is not None and not isinstance(bound, ast.Constant):
            def move(n: ast.Slice, side: str = side) -> ast.Slice:
                setattr(n, side, ast.BinOp(getattr(n, side), ast.Sub(), ast.Constant(1)))
                return n
            yield "off by one", f"{side} of [{text}]", move
    if (node.lower is None) != (node.upper is None) and node.step is None:
        def other_part(n: ast.Slice) -> ast.Slice:
            n.lower, n.upper = n.upper, n.lower
            return n
        yield "swapped", f"the other part of [{text}]", other_part


def _set(name: str, value: Any) -> Alter:
    def alter(node: ast.AST) -> ast.AST:
        setattr(node, name, value)
        return node
    return alter


def _negate(node: ast.If) -> ast.If:
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _rename(to: str, node: ast.Call) -> ast.Call:
    assert isinstance(node.func, ast.Attribute)
    node.func.attr = to
    return node


def _swap(node: ast.AST, items: list[Any]) -> ast.AST:
    items[0], items[1] = items[1], items[0]
    return node
