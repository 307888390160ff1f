"""What the contract tests share: the kernels of the catalog, and readable names for cases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from layerzero.backends import CATALOG
from layerzero.spec.kernel import Kernel

KERNELS: tuple[Kernel, ...] = tuple(
    kernel for name in CATALOG
    for kernel in importlib.import_module(f"layerzero.backends.{name}").KERNELS)


def case_id(case: Mapping[str, Any]) -> str:
    """{"hkv": 2, "causal": True} -> "hkv=2,causal"; the empty case is "plain"."""
    words = [k if v is True else f"{k}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}"
             for k, v in case.items()]
    return ",".join(words) or "plain"
