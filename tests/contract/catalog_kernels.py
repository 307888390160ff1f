"""What the contract tests share: the kernels of the catalog, and readable names for cases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from layerzero.backends import CATALOG
from layerzero.dispatch.facts import read
from layerzero.machine import loading
from layerzero.machine.hardware import probe
from layerzero.spec.kernel import Kernel
from layerzero.spec.op import Op

# one op after the other: the inputs of a case and what the formula gives for them are kept while
# kernels of the same op follow each other
KERNELS: tuple[Kernel, ...] = tuple(sorted(
    (kernel for name in CATALOG
     for kernel in importlib.import_module(f"layerzero.backends.{name}").KERNELS),
    key=lambda kernel: kernel.op.name))


def case_id(case: Mapping[str, Any]) -> str:
    """{"hkv": 2, "causal": True} -> "hkv=2,causal"; the empty case is "plain"."""
    words = [k if v is True else f"{k}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}"
             for k, v in case.items()]
    return ",".join(words) or "plain"


def cpu_facts(op: Op, values: Mapping[str, Any]) -> dict[str, Any]:
    """What rules read of a call on this CPU: one for all kernels of an op, as they are a grid."""
    return {**probe("cpu").facts(), **read(op, values)}


def serves(kernel: Kernel, facts: Mapping[str, Any]) -> bool:
    """Would selection take it for such a call? As `refusals` of its values says."""
    return (loading.availability(kernel) is None
            and not list(kernel.op.reasons((*kernel.op.requires, *kernel.requires), facts)))
