"""A block of a model as data: its ops, the plain torch between them, and the alternatives.

`lz.tables.plan_block` searches for the cheapest way through it; models/decoder.py runs one call by
call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

import torch


@dataclass(frozen=True)
class Stage:
    """One op: `takes` maps parameters to values by name, `gives` names the results, `fixed` are
    plain arguments."""

    op: str
    takes: Mapping[str, str]
    gives: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.takes.values())


@dataclass(frozen=True)
class Glue:
    """Plain torch between ops: a view, a split, a residual. A result that is no view of an input is
    a copy."""

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    is_copy: bool = True                       # False: work that every alternative does


@dataclass(frozen=True)
class Either:
    """Several ways to the same results, such as a fused op and its parts; the first is the plain
    one."""

    ways: tuple[tuple[Part, ...], ...]


Part = Union[Stage, Glue, Either]


@dataclass(frozen=True)
class Block:
    name: str
    parts: tuple[Part, ...]
    results: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = ()       # allowed between ops, besides that of the inputs
