"""Rules compiled to plain Python: one function that says which kernels of a roster may serve a call.

`Rule.check` explains, and takes a microsecond for it. On a miss only the verdict is wanted first, of
some hundred rules: here each becomes a comparison of local variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..spec import codegen
from ..spec.rules import AnyOf, Condition, Rule, When

_TESTS = {
    "eq": "({x} is None or {x} == {v})", "ne": "{x} != {v}", "le": "({x} is None or {x} <= {v})",
    "ge": "({x} is None or {x} >= {v})", "multiple_of": "({x} is None or {x} % {v} == 0)", "in": "{x} in {v}",
    "not_in": "{x} not in {v}", "present": "{x} is not None", "absent": "{x} is None", "has": "{v} in ({x} or ())",
}

Verdicts = Callable[[Mapping[str, Any]], list[int]]


def compile_verdicts(groups: Sequence[Iterable[Condition]]) -> Verdicts:
    """A function from facts to the indices of the groups whose conditions all hold."""
    names: dict[str, str] = {}
    body = []
    for i, conditions in enumerate(groups):
        tests = [_text(c, names) for c in conditions]
        body.append(f"    if {' and '.join(tests) or 'True'}: out.append({i})")
    loads = [f"    {local} = f[{fact!r}]" for fact, local in names.items()]
    source = "\n".join(["def verdicts(f):", *loads, "    out = []", *body, "    return out"])
    return _function(source)


@lru_cache(maxsize=512)                        # every change of the world asks again, mostly for the same text
def _function(source: str) -> Verdicts:
    scope: dict[str, Any] = {}
    exec(codegen.compile(source, "verdicts"), scope)   # text made from declared rules only, values by repr
    verdicts: Verdicts = scope["verdicts"]
    return verdicts


def _text(condition: Condition, names: dict[str, str]) -> str:
    if isinstance(condition, AnyOf):
        return "(" + " or ".join(_text(c, names) for c in condition.rules) + ")"
    if isinstance(condition, When):
        return f"(not {_text(condition.condition, names)} or {_text(condition.then, names)})"
    assert isinstance(condition, Rule)
    local = names.setdefault(condition.fact, f"x{len(names)}")
    return "(" + _TESTS[condition.test].format(x=local, v=repr(condition.value)) + ")"
