"""A block of a model as data: its ops, the plain torch between them, and where there are several ways.

`lz.tables.plan_block` looks for the cheapest way through it; models/decoder.py runs one call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

import torch


@dataclass(frozen=True)
class Stage:
    """One op: `takes` names the value for each parameter, `gives` names its results, `fixed` are plain arguments."""

    op: str
    takes: Mapping[str, str]
    gives: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.takes.values())


@dataclass(frozen=True)
class Glue:
    """Plain torch between the ops: a view, a split, a residual. A result that is no view of an input is a copy."""

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    is_copy: bool = True                       # False: work the model has to do anyway, the same in every way


@dataclass(frozen=True)
class Either:
    """Several ways to the same results, such as a fused op and its parts; the first is the plain one."""

    ways: tuple[tuple[Part, ...], ...]


Part = Union[Stage, Glue, Either]


@dataclass(frozen=True)
class Block:
    name: str
    parts: tuple[Part, ...]
    results: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = ()       # between ops, besides that of the inputs; casting there must be allowed
