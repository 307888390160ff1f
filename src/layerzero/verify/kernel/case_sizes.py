"""How large a case is, by the sizes that it names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ...spec.op import Op


@lru_cache(maxsize=64)
def numbers_of(op: Op) -> Mapping[str, Any]:
    """Returns the input generator's integer and integer-tuple parameters with their defaults."""
    defaults = {n: p.default for n, p in inspect.signature(op.inputs).parameters.items()
                if n != "seed"}
    return {n: d for n, d in defaults.items() if type(d) is int or (
        isinstance(d, tuple) and d and all(type(i) is int and i > 0 for i in d))}


@lru_cache(maxsize=64)
def _volumes(op: Op) -> Mapping[str, tuple[Any, float]]:
    """Returns the numbers of an op with the volume of each."""
    return {name: (default, _volume(default, default)) for name, default in numbers_of(op).items()}


def _volume(n: Any, default: Any) -> float:
    if not isinstance(n, tuple):
        return max(n, 1)
    # the lengths of packed sequences, or the sizes of dimensions
    are_lengths = isinstance(default, tuple) and len(default) > 2
    return max(sum(n), 1) if are_lengths else math.prod(max(i, 1) for i in n)


def relative_size(op: Op, case: Mapping[str, Any]) -> float:
    """Returns the size of a case relative to the default one, by its numbers alone: no tensor is
    created."""
    size, volumes = 1.0, _volumes(op)
    for name, n in case.items():               # often, and fewer than the op has
        if name in volumes and (type(n) is int or isinstance(n, tuple)):
            default, volume = volumes[name]
            size *= (max(n, 1) if type(n) is int else _volume(n, default)) / volume
    return size
