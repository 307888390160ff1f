"""The references of all operations as kernels: slow, and for every valid call on any device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..ops import CATALOG
from ..spec.kernel import Kernel
from ..spec.op import Op


def _loader(op: Op) -> Callable[[], Callable[..., Any]]:
    """Returns a loader of the op's reference as a global here, so that a descriptor can name it."""
    def load() -> Callable[..., Any]:
        return op.reference

    load.__name__ = load.__qualname__ = f"_{op.name}"
    globals()[load.__name__] = load
    return load


def _kernel(op: Op) -> Kernel:
    fields: dict[str, Any] = {"overhead_us": 20.0, "variants": tuple(op.patterns) if op.variant
                              else ()}
    if op.sdpa_switches:
        fields["sdpa_backend"] = "MATH"        # torch's name for attention computed step by step
    return Kernel(f"reference.{op.name}", op, _loader(op), **{**fields, **op.reference_kernel})


KERNELS = tuple(_kernel(importlib.import_module(f"layerzero.ops.{name}").OP) for name in CATALOG)
