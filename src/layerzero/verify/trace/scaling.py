"""A definition made smaller, for a machine that its constants are too large for.

A mixture of 128 experts of 5120 x 8192 is 20 billion numbers, and its reference turns them all to
float32. What it computes does not depend on these sizes, but its code names them: `H = 5120`,
`assert hidden_size == 5120`. Such bindings are rewritten in the syntax tree, together with the
axes; sizes that follow from them (twice another, blocks of another) follow again. Where a number
could mean two things, or stands anywhere else in the code, nothing is rewritten and the reason is
given. The smaller definition has another name: it is another definition.

What is summed over keeps its size where that is enough, since the error of a sum depends on it.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace
from typing import Any

from .definition import Axis, Definition

# bytes, as float32, up to which constants are left alone
ENOUGH = 1 << 28
# of matrices of 16 bits, whose product takes a CPU without such arithmetic seconds
ENOUGH_HALF = 1 << 26
# up to which a smaller definition keeps what it sums over
ENOUGH_KEPT = 1 << 25
# two blocks of every usual size and more, so that an index of a block matters; what follows from
# one is no other
SMALLER = (384, 256, 640)
MIN_AXIS = 512                                    # smaller axes are not what makes a tensor large
VOCABULARY = 1 << 14


class CannotScale(Exception):
    """Why the definition was left as it is; `axis` is what stands in the way, if one."""

    def __init__(self, why: str, axis: str = "") -> None:
        super().__init__(why)
        self.axis = axis


def too_large(definition: Definition, enough: int = ENOUGH, device: str = "cpu") -> bool:
    """Do its fixed inputs take too much memory in float32, which references compute in, or too
    much time in a product of 16 bits?"""
    known = definition.const_axes
    if device == "cpu" and _fixed_bytes(definition, ("float16", "bfloat16")) > ENOUGH_HALF:
        return True
    rows = [known[a] for s in definition.inputs.values() for a in s.shape or ()
            if known.get(a, 0) > VOCABULARY]   # of a tensor of which nothing else may be fixed
    return max(_fixed_bytes(definition), 4 * 64 * max(rows, default=0)) > enough


def _fixed_bytes(definition: Definition, matrices: tuple[str, ...] = ()) -> int:
    """Bytes of the inputs whose axes are all constant, as float32; or of the matrices of these
    dtypes among them."""
    known = definition.const_axes
    return 4 * sum(math.prod(known[a] for a in s.shape) for s in definition.inputs.values()
                   if s.shape and all(a in known for a in s.shape)
                   and (not matrices or (s.dtype in matrices and len(s.shape) > 1)))


def scaled(definition: Definition) -> tuple[Definition, dict[str, tuple[int, int]]]:
    """The smaller definition, and how axes changed; CannotScale says why not."""
    try:
        smaller, changes = _scaled(definition, _summed_axes(definition))
        if not too_large(smaller, ENOUGH_KEPT):
            return smaller, changes
    except CannotScale:
        pass                                   # with all axes it says why
    return _scaled(definition, set())


def _summed_axes(definition: Definition) -> set[str]:
    """The axes over which products with fixed matrices sum, by the order of their axes."""
    known = definition.const_axes
    return {s.shape[-1] for s in definition.inputs.values() if s.shape and len(s.shape) == 2
            and all(a in known for a in s.shape)}


def _scaled(definition: Definition,
            kept: set[str]) -> tuple[Definition, dict[str, tuple[int, int]]]:
    trouble = CannotScale("no axis of a fixed input is both large and free to shrink")
    # what stands in the way keeps its size; the others shrink
    while True:
        new = _new_sizes(definition, kept)
        if not new:
            raise trouble
        try:
            reference = _rewrite(definition, new)
            break
        except CannotScale as e:
            owner = _owner(definition, e.axis, new)
            if not owner:
                raise
            trouble = e
            kept.add(owner)
    changes = {axis: (definition.const_axes[axis], size) for axis, size in new.items()}
    axes = {n: Axis(new[n], a.description) if n in new else a for n, a in definition.axes.items()}
    name = f"{definition.name}@{','.join(f'{axis}={size}' for axis, size in new.items())}"
    return replace(definition, name=name, axes=axes, reference=reference), changes


def _owner(definition: Definition, axis: str, new: dict[str, int]) -> str:
    """The axis that `axis` follows from; itself if it is one of the large ones."""
    if "block" in axis:
        axis = _of_blocks(axis, new)
    doubles = [base for base in new if axis and _is_twice(definition, axis, base)]
    return doubles[0] if doubles else axis


def _of_blocks(axis: str, new: dict[str, int]) -> str:
    """The axis whose blocks these are: the one that shares a word."""
    return next((a for a in new if set(a.split("_")) & set(axis.split("_"))
                 - {"num", "size", "blocks"}), "")


def _new_sizes(definition: Definition, kept: set[str]) -> dict[str, int]:
    """Large axes of fixed inputs and those that follow from them; the first axis of three and more
    dimensions counts experts, which stay."""
    known = definition.const_axes
    fixed = [s.shape for s in definition.inputs.values() if s.shape and len(s.shape) > 1
             and all(a in known for a in s.shape)]
    large = dict.fromkeys([*(a for shape in fixed for a in shape[len(shape) > 2:]
                             if known[a] >= MIN_AXIS),
                           # a vocabulary
                           *(a for s in definition.inputs.values() for a in s.shape or ()
                             if known.get(a, 0) > VOCABULARY)])
    doubles = {axis: base for axis in large for base in known if _is_twice(definition, axis, base)}
    bases = [a for a in large if a not in doubles and a not in kept]
    if len(bases) > len(SMALLER):
        raise CannotScale(
            f"{len(bases)} large axes ({', '.join(bases)}) are more than this knows to keep apart")
    new = dict(zip(bases, SMALLER))
    new |= {axis: 2 * new[base] for axis, base in doubles.items() if base in new}
    for axis, value in known.items():
        if "block" in axis and axis not in new:
            owner = _of_blocks(axis, new)
            if owner and "block" not in owner:
                if known[owner] % value or new[owner] % (known[owner] // value):
                    raise CannotScale(
                        f"{axis} = {value} does not divide {owner} = {known[owner]} evenly")
                new[axis] = new[owner] // (known[owner] // value)
    return new


def _is_twice(definition: Definition, axis: str, base: str) -> bool:
    """As a constraint says of a tensor's shape, or as the name of a fused weight's outputs does."""
    if definition.const_axes[axis] != 2 * definition.const_axes[base]:
        return False
    for text in definition.constraints:
        match = re.fullmatch(rf"(\w+)\.shape\[(\d+)\] == 2 \* {re.escape(base)}", text)
        shape = (definition.inputs[match[1]].shape if match and match[1] in definition.inputs
                 else None)
        if (match and shape and shape[int(match[2])] == axis) or text == f"{axis} == 2 * {base}":
            return True
    return (re.search(r"gemm1|gate_up|fused", axis) is not None
            and re.search("inter|inner", base) is not None)


def _rewrite(definition: Definition, new: dict[str, int]) -> str:
    tree = ast.parse(definition.reference)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _whole(node.value):
            node.value = _replace(definition, new, node.value, _names(node.targets))
        elif (isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare)
              and len(node.test.ops) == 1 \
                 and isinstance(node.test.ops[0], ast.Eq)):
            test = node.test
            if _whole(test.comparators[0]):
                test.comparators[0] = _replace(definition, new, test.comparators[0],
                                               ast.unparse(test.left))
            elif _whole(test.left):
                test.left = _replace(definition, new, test.left, ast.unparse(test.comparators[0]))
    old = {definition.const_axes[a]: a for a in new if definition.const_axes[a] != new[a]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in old \
                and not getattr(node, "settled", False):
            raise CannotScale(f"line {node.lineno} of the reference has {node.value}, the size of "
                              f"{old[node.value]}, in an expression", old[node.value])
    return ast.unparse(ast.fix_missing_locations(tree))


def _whole(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _names(targets: list[ast.expr]) -> str:
    return " ".join(ast.unparse(t) for t in targets)


def _replace(definition: Definition, new: dict[str, int], node: Any, bound_to: str) -> ast.expr:
    """The literal for the axis that it is the size of; itself where it is no size that changes."""
    axes = [a for a, value in definition.const_axes.items() if value == node.value]
    named = [a for a in axes if re.search(rf"\b{re.escape(a)}\b", bound_to.lower())]
    owners = named or axes
    changed = [a for a in owners if new.get(a, node.value) != node.value]
    settled: Any = ast.Constant(node.value)
    if changed:
        if len({new.get(a, node.value) for a in owners}) > 1:
            raise CannotScale(
                f"{bound_to} = {node.value} in the reference may be {' or '.join(owners)}",
                changed[0])
        settled = ast.Constant(new[changed[0]])
    settled.settled = True
    return ast.copy_location(settled, node)
