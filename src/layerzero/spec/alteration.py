"""A mistake that a kernel could make, as a deliberately wrong computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Values = dict[str, Any]


class Results(NamedTuple):
    """The results of a kernel with this mistake."""

    values: tuple[Any, ...]


class Alteration(NamedTuple):
    """One mistake: its class, a description, and the function that makes it.

    `alter(op, values)` returns other values to call the op's reference with, or `Results` where the
    formula itself has to be altered; None where the mistake does not apply to the call.
    """

    kind: str
    words: str
    alter: Callable[[Any, Values], Values | Results | None]
