"""Rules compiled to plain Python: one function that says which kernels of a roster can serve.

`Rule.check` explains, and takes a microsecond for it. A miss first needs only the verdicts of some
hundred rules: here each rule becomes a comparison of local variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..files import codegen
from ..spec.rules import Condition

Verdicts = Callable[[Mapping[str, Any]], list[int]]


def compile_verdicts(groups: Sequence[Iterable[Condition]]) -> Verdicts:
    """Returns a function from facts to the indices of the groups whose conditions all hold."""
    names: dict[str, str] = {}

    def variable(fact: str) -> str:
        return names.setdefault(fact, f"x{len(names)}")

    body = []
    for i, conditions in enumerate(groups):
        test = " and ".join(c.expression(variable) for c in conditions)
        body.append(f"    if {test or 'True'}: out.append({i})")
    loads = [f"    {local} = f[{fact!r}]" for fact, local in names.items()]
    source = "\n".join(["def verdicts(f):", *loads, "    out = []", *body, "    return out"])
    return _function(source)


@lru_cache(maxsize=512)      # every change of the world asks again, mostly for the same text
def _function(source: str) -> Verdicts:
    scope: dict[str, Any] = {}
    # text from declared rules only, values by repr
    exec(codegen.compile(source, "verdicts"), scope)
    verdicts: Verdicts = scope["verdicts"]
    return verdicts
