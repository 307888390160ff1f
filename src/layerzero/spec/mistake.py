"""A mistake that a kernel could make, as a deliberately wrong computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Values = dict[str, Any]


class Results(NamedTuple):
    """The results of the reference with a mistake in its formula."""

    values: tuple[Any, ...]


class Mistake(NamedTuple):
    """One mistake, by which verification names the cause of a wrong result.

    `apply(op, values)` returns the wrong values to call the op's reference with, or `Results` where
    the formula itself is wrong; None where the mistake makes no difference to the call.
    """

    kind: str                                  # its class, such as "scale" or "mask"
    words: str                                 # a description, such as "the scale applied twice"
    apply: Callable[[Any, Values], Values | Results | None]
