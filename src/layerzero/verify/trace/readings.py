"""What a definition says beside its schema, and how its inputs are recognised.

The schema has no place for an epsilon, a causal mask or which half of a weight is the gate: name,
tags and descriptions tell (`statements`). Where they do not, there is more than one reading, the
likeliest first; running the reference decides between these.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...spec.errors import DataError
from .definition import Definition, TensorSpec
from .statements import BASES, CAUSAL, Statement, first_choice, said


class Unmapped(DataError):
    """No lz call answers this definition; the message says which part of it has no counterpart."""


class Parts:
    """The inputs and outputs of a definition, taken one by one; none may be left over."""

    def __init__(self, definition: Definition, op: str) -> None:
        self.definition, self.op = definition, op
        self.left = dict.fromkeys(definition.inputs)

    def maybe(self, pattern: str, ndim: int | None = None) -> str:
        """Take the first input whose whole name matches; "" if there is none."""
        for name in self.left:
            if (re.fullmatch(pattern, name.lower())
                and (ndim is None or len(self.shape(name)) == ndim)):
                del self.left[name]
                return name
        return ""

    def take(self, pattern: str, what: str, ndim: int | None = None) -> str:
        name = self.maybe(pattern, ndim)
        if not name:
            rank = "" if ndim is None else f" of {ndim} dimensions"
            raise self.unmapped(f"lz.{self.op} needs {what}{rank}; none of the inputs "
                                f"{', '.join(self.definition.inputs)} is that")
        return name

    def done(self) -> None:
        if self.left:
            raise self.unmapped(f"lz.{self.op} has no counterpart of the input"
                                f"{'s' if len(self.left) > 1 else ''} {', '.join(self.left)}")

    def spec(self, name: str) -> TensorSpec:
        return self.definition.inputs[name]

    def shape(self, name: str) -> tuple[str, ...]:
        return self.spec(name).shape or ()

    def outputs(self, *roles: tuple[str, str]) -> tuple[str, ...]:
        """The outputs in the order of `wanted`, (pattern, what it is); "" for one that the
        definition lacks. The first is found by position where no name matches."""
        rest = dict.fromkeys(self.definition.outputs)
        names = []
        for pattern, _ in roles:
            name = next((n for n in rest if re.fullmatch(pattern, n.lower())), "")
            rest.pop(name, None)
            names.append(name)
        if not names[0] and rest:
            names[0] = next(iter(rest))
            del rest[names[0]]
        if rest or not names[0]:
            raise self.unmapped(
                f"lz.{self.op} gives {', '.join(what for _, what in roles)}; the output"
                f"{'s' if len(rest) > 1 else ''} {', '.join(rest)} is none of these")
        return tuple(names)

    def unmapped(self, why: str) -> Unmapped:
        return Unmapped(f"{self.definition.name} ({self.definition.op_type}): {why}")


def readings(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the options, those nearest to the first choices first."""
    ranked = [range(len(values)) for values in options.values()]
    combinations = sorted(itertools.product(*ranked), key=lambda picks: (sum(picks), picks))
    return [{name: values[i] for (name, values), i in zip(options.items(), picks)}
            for picks in combinations]


def likely(value: Any, *others: Any) -> tuple[Any, ...]:
    """Return the value, then the other values that it might have."""
    return (value, *(o for o in others if o != value))


# What the text of a definition says.

def text_of(definition: Definition) -> str:
    """Return all text of a definition in lower case."""
    descriptions = [s.description
                    for s in (*definition.inputs.values(), *definition.outputs.values())]
    parts = [definition.name, definition.description, *definition.tags, *descriptions,
             definition.reference]
    return " ".join(parts).lower()


def lse_bases(definition: Definition, lse: str) -> tuple[Statement | None, tuple[str, ...]]:
    """The base of the log-sum-exp: 2, by the schema's convention, unless the text says otherwise"""
    statement = said(definition, BASES, lse, convention="2")
    return statement, first_choice(statement, "2", "e")


def is_causal(definition: Definition) -> tuple[Statement | None, tuple[bool, ...]]:
    """Whether attention is causal: what the text says; else likelier first by the reference."""
    statement = said(definition, CAUSAL)
    masked = re.search(r"causal|masked_fill|triu|tril|\bmask\b", text_of(definition)) is not None
    return statement, first_choice(statement, masked, not masked)


def small_numbers(definition: Definition) -> tuple[float, ...]:
    """Return epsilons in the reference: numbers of 1e-12 to 1e-3, those named eps first."""
    named: list[float] = []
    others: list[float] = []
    for node in ast.walk(ast.parse(definition.reference)):
        targets: Iterable[ast.expr] = ()
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = (node.target,)
        for target in targets:
            if (isinstance(target, ast.Name) and "eps" in target.id.lower()
                and isinstance(node, (ast.Assign, ast.AnnAssign))):
                named += _numbers(node.value)
        if isinstance(node, ast.FunctionDef):
            with_default = node.args.args[len(node.args.args) - len(node.args.defaults):]
            for arg, default in zip(with_default, node.args.defaults):
                named += _numbers(default) if "eps" in arg.arg.lower() else []
        others += _numbers(node)
    written = [float(n) for n in re.findall(r"\b1e-0?\d+\b", text_of(definition))]
    return tuple(dict.fromkeys(n for n in (*named, *others, *written) if 1e-12 <= n <= 1e-3))


def _numbers(node: ast.AST | None) -> list[float]:
    value = node.value if isinstance(node, ast.Constant) else None
    return [float(value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def chunk_size(definition: Definition) -> int:
    """The largest number that the reference gives a name such as CHUNK_Q or tile; 0 if none."""
    sizes = [node.value.value for node in ast.walk(ast.parse(definition.reference))
             if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
             and type(node.value.value) is int
             and any(isinstance(t, ast.Name) and re.search(r"chunk|tile", t.id.lower())
                     for t in node.targets)]
    return max(sizes, default=0)


def skips(definition: Definition) -> bool:
    """Does the reference leave out what is empty, a sequence or a slot, and give zeros for it?"""
    loops = (node for node in ast.walk(ast.parse(definition.reference))
             if isinstance(node, ast.For))
    return "zeros" in definition.reference and any(
        isinstance(step, ast.If) and isinstance(step.body[-1], ast.Continue)
        and any(isinstance(part, ast.Compare) for part in ast.walk(step.test))
        for loop in loops for step in loop.body)


def constant(definition: Definition, pattern: str) -> int | None:
    """The whole number that the reference, or a const axis, gives a name such as TOP_K."""
    for axis, value in definition.const_axes.items():
        if re.fullmatch(pattern, axis.lower()):
            return value
    for node in ast.walk(ast.parse(definition.reference)):
        if (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            and type(node.value.value) is int):
            if any(isinstance(t, ast.Name) and re.fullmatch(pattern, t.id.lower())
                   for t in node.targets):
                return node.value.value
    return None
