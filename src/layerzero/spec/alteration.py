"""A mistake that a kernel could make, as a deliberately wrong computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Values = dict[str, Any]


class Results(NamedTuple):
    """What a kernel with this mistake returns."""

    given: tuple[Any, ...]


class Alteration(NamedTuple):
    """`alter` takes the op and the values of a call and returns other values for the op's own reference, or `Results`
    where the formula itself has to be altered; None where the mistake does not apply."""

    kind: str
    words: str
    alter: Callable[[Any, Values], Values | Results | None]
