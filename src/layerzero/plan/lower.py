"""A dispatch table as plain Python: a module of comparisons that imports nothing.

For each family of calls (those with the same conditions) one function of the sizes is written,
which halves the rows by comparisons until one is left and then asks whether the call is within it.
For each op one function finds the family of a call's facts. An answer is the number of a row, -1
for none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from ..files import codegen
from ..spec.errors import DataError
from .table import Facts, Number, Row, Span, Table

Box = tuple[int, Mapping[str, Span]]           # number of the row, and its sizes
# what the comparisons so far have shown
Path = Mapping[str, tuple["Number | None", "Number | None"]]

# of conditions in each other: Python indents no more than 100
_DEEPEST = 64
_INDENT = "    "
_WIDTH = 110


def lower(table: Table) -> str:
    """Return the source of the module."""
    _check_names(table)
    lines = [
        f'"""Which kernel serves which call: dispatch table {table.id} as plain comparisons. Made '
        'by lz solve.',
        "",
        f"For {_one_line(table.stamp.device.name)}. Each function named after an operation takes "
        "the facts of",
        'a call and gives the number of its row in KERNELS, or -1: choose at run time."""', "",
        f"TABLE = {table.id!r}", "", "# The kernels of each row, best first.", "KERNELS = ("]
    for i, row in enumerate(table.rows):
        lines += [f"    # {i}: {_one_line(row)}", f"    {tuple(c.kernel for c in row.choices)!r},"]
    lines.append(")")
    for op, rows in table.by_op.items():
        lines += _op(op, rows)
    lines += ["", "", "OPS = {" + ", ".join(f"{op!r}: {op}" for op in table.by_op) + "}", "", "",
              "def find(op, facts):", "    of_op = OPS.get(op)",
              "    return -1 if of_op is None else of_op(facts)", ""]
    return "\n".join(lines)


def compiled_find(table: Table) -> Callable[[str, Facts], int]:
    """Return the module's `find`, ready to call."""
    return module(table)["find"]  # type: ignore[no-any-return]


def module(table: Table) -> dict[str, Any]:
    """Return the namespace of the module."""
    scope: dict[str, Any] = {"__name__": f"layerzero_table_{table.id}"}
    # made above; values are written by repr
    exec(codegen.compile(lower(table), f"table {table.id}"), scope)
    return scope


def _check_names(table: Table) -> None:
    """Names of the table become names of the module, so each must be an identifier."""
    for op, rows in table.by_op.items():
        names = {op, *(identifier(n) for _, row in rows for n, _ in row.sizes)}
        unusable = sorted(n for n in names if not n.isidentifier() or iskeyword(n))
        if unusable:
            raise DataError(f"{table}: wanted names of an operation and its sizes, got "
                            f"{', '.join(map(repr, unusable))}; run lz solve again")


def _one_line(what: Any) -> str:
    """Text for a comment or a docstring: on one line, whatever the file says."""
    return "".join(c if c.isprintable() and c not in '"\\' else " " for c in str(what))


def _op(op: str, rows: Sequence[tuple[int, Row]]) -> list[str]:
    families: dict[Any, list[tuple[int, Row]]] = {}
    for i, row in rows:
        families.setdefault((row.when, tuple(n for n, _ in row.sizes)), []).append((i, row))
    functions: list[str] = []
    common = set.intersection(*(set(when) for when, _ in families))
    finder = ["", "", f"def {op}(facts):",
              *_condition("if not (", sorted(map(_equal, common)), "):", _INDENT)]
    finder += [2 * _INDENT + "return -1"] if common else []
    for k, ((when, names), members) in enumerate(families.items()):
        tests = [_equal(pair) for pair in when if pair not in common] + [f"facts[{n!r}] is not None"
                                                                         for n in names]
        arguments = ", ".join(f"facts[{n!r}]" for n in names)
        finder += [*_condition("if (", tests or ["True"], "):", _INDENT),
                   f"        row = {op}_{k}({arguments})",
                   "        if row >= 0:", "            return row"]
        boxes: list[Box] = [(i, {identifier(n): s for n, s in row.sizes}) for i, row in members]
        functions += ["", "", f"def {op}_{k}({', '.join(map(identifier, names))}):",
                      *_function(boxes)]
    return [*functions, *finder, "    return -1"]


def _equal(condition: tuple[str, Any]) -> str:
    name, value = condition
    return f"facts[{name!r}] is None" if value is None else f"facts[{name!r}] == {value!r}"


def _condition(head: str, tests: Sequence[str], tail: str, indent: str) -> list[str]:
    """Yields `head`, the tests joined by `and`, and `tail`, over as many lines as it takes."""
    lines = [indent + head + tests[0]] if tests else []
    for test in tests[1:]:
        if len(lines[-1]) + len(test) > _WIDTH:
            lines.append(f"{indent}{_INDENT}{_INDENT}and {test}")
        else:
            lines[-1] += f" and {test}"
    return [*lines[:-1], lines[-1] + tail] if lines else []


def identifier(fact: str) -> str:
    return fact.replace(".", "_")


def _function(boxes: Sequence[Box]) -> list[str]:
    """Write the body of the function of a family. Tests that all rows share come once, first."""
    first = boxes[0][1]
    common = {n: s for n, s in first.items() if all(sizes[n] == s for _, sizes in boxes)}
    tests = _tests(common, {}) if len(boxes) > 1 else []
    rest = ([(i, {n: s for n, s in sizes.items() if n not in common}) for i, sizes in boxes]
            if tests else list(boxes))
    head = ([*_condition("if not (", tests, "):", _INDENT), 2 * _INDENT + "return -1"] if tests
            else [])
    return [*head, *_tree(rest, {}, _INDENT)]


def _tree(boxes: Sequence[Box], path: Path, indent: str, depth: int = 0) -> list[str]:
    if len(boxes) == 1:
        return [indent + _leaf(*boxes[0], path)]
    cut = _cut(boxes) if depth < _DEEPEST else None
    # they interlock, or lie in one range as multiples and others
    if cut is None:
        lines = []
        for box in boxes:
            tests = _tests(box[1], path)
            lines += [f"{indent}if {' and '.join(tests) or 'True'}:",
                      f"{indent}{_INDENT}return {box[0]}"]
        return [*lines, f"{indent}return -1"]
    name, at = cut
    low, high = path.get(name, (None, None))
    left = [b for b in boxes if _end(b, name, 1) <= at]
    right = [b for b in boxes if _end(b, name, 1) > at]
    return [f"{indent}if {name} <= {at!r}:",
            *_tree(left, {**path, name: (low, at)}, indent + _INDENT, depth + 1),
            *_tree(right, {**path, name: (at, high)}, indent, depth + 1)]


def _leaf(row: int, sizes: Mapping[str, Span], path: Path) -> str:
    tests = _tests(sizes, path)
    return f"return {row} if {' and '.join(tests)} else -1" if tests else f"return {row}"


def _tests(sizes: Mapping[str, Span], path: Path) -> list[str]:
    """Returns the comparisons that the path has not made yet; lower ends are exclusive."""
    tests = []
    for name, span in sizes.items():
        over, most = path.get(name, (None, None))
        # just above the cut is where the next whole number begins; other numbers are compared again
        low = (None if over is not None and span.low is not None and span.low == _next(over)
               else span.low)
        high = (None if most is not None and span.high is not None and most <= span.high
                else span.high)
        if low is not None and low == high:
            tests.append(f"{name} == {low!r}")
        elif low is not None and high is not None:
            tests.append(f"{low!r} <= {name} <= {high!r}")
        elif low is not None:
            tests.append(f"{name} >= {low!r}")
        elif high is not None:
            tests.append(f"{name} <= {high!r}")
        tests += [f"{name} % {m} == 0" for m in span.multiples] + [f"{name} % {m} != 0"
                                                                   for m in span.others]
    return tests


def _next(n: Number) -> Number | None:
    return n + 1 if isinstance(n, int) else None


def _cut(boxes: Sequence[Box]) -> tuple[str, Number] | None:
    """Returns a size and a number that no box lies across, with boxes halved around it."""
    best: tuple[int, str, Number] | None = None
    for name in boxes[0][1]:
        lows, highs = (sorted(_end(box, name, which) for box in boxes) for which in (0, 1))
        for at in dict.fromkeys(highs):
            left, right = bisect_right(highs, at), len(boxes) - bisect_right(lows, at)
            if left + right == len(boxes) and left and right and abs(at) != float("inf"):
                worse = abs(left - right)
                if best is None or worse < best[0]:
                    best = worse, name, at
    return None if best is None else (best[1], best[2])


def _end(box: Box, name: str, which: int) -> Number:
    end = box[1][name][which]
    return (float("inf") if which else float("-inf")) if end is None else end  # type: ignore[return-value]
