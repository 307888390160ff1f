"""vLLM's plugin: lz as a provider of vLLM's IR ops, written against vLLM 0.32.

vLLM loads it through the entry point `vllm.general_plugins` in each of its processes. That only
offers the provider; vLLM's own option asks for it:

    vllm serve MODEL --ir-op-priority.rms_norm=layerzero \\
        --ir-op-priority.fused_add_rms_norm=layerzero
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from ..operate.inspection import dispatcher_of
from ..spec.errors import ConfigError

PROVIDER = "layerzero"


def register() -> tuple[str, ...]:
    """Register lz for the IR ops it has, also when loaded twice. Returns their names."""
    try:
        registry = importlib.import_module("vllm.ir.op").IrOp.registry
        importlib.import_module("vllm.ir.ops")
    except (ImportError, AttributeError) as e:
        raise ConfigError("lz as a provider of vLLM's IR ops needs a vLLM that has them (vllm.ir, "
                          f"since 0.20): {e}") from e
    registered = []
    for name, (run, supports) in IMPLEMENTATIONS.items():
        op: Any = registry.get(name)
        if op is None:
            continue
        if PROVIDER not in op.impls:
            op.register_impl(PROVIDER, supports_args=supports)(run)
        registered.append(name)
    return tuple(registered)


# Signatures are vLLM's: it compares names, types and defaults with those of its own op.

def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float,
              variance_size: int | None = None) -> Tensor:
    out: Tensor = dispatcher_of("rms_norm").public(x, weight, epsilon)
    return out


def _rms_norm_supports(x: Tensor, weight: Tensor | None, epsilon: float,
                       variance_size: int | None = None) -> bool:
    return variance_size is None


def _fused_add_rms_norm(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float,
                        variance_size: int | None = None) -> tuple[Tensor, Tensor]:
    out, total = dispatcher_of("add_rms_norm").public(x, x_residual, weight, epsilon)
    return out, total


def _fused_add_rms_norm_supports(x: Tensor, x_residual: Tensor, weight: Tensor | None,
                                 epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None


IMPLEMENTATIONS = {"rms_norm": (_rms_norm, _rms_norm_supports),
                   "fused_add_rms_norm": (_fused_add_rms_norm, _fused_add_rms_norm_supports)}
