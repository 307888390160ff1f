"""The contracts themselves, run eagerly: slow, and able to do all that a contract allows, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ops.add_rms_norm import OP as add_rms_norm
from ..ops.attention import OP as attention
from ..ops.layer_norm import OP as layer_norm
from ..ops.rms_norm import OP as rms_norm
from ..ops.varlen_attention import OP as varlen_attention
from ..spec.kernel import Kernel


def _attention() -> Callable[..., Any]:
    return attention.reference


def _varlen_attention() -> Callable[..., Any]:
    return varlen_attention.reference


def _rms_norm() -> Callable[..., Any]:
    return rms_norm.reference


def _add_rms_norm() -> Callable[..., Any]:
    return add_rms_norm.reference


def _layer_norm() -> Callable[..., Any]:
    return layer_norm.reference


KERNELS = (
    Kernel("reference.attention", attention, _attention, overhead_us=20.0, variants=("bhsd", "bshd"),
           workspace="3 * itemsize * elements"),
    Kernel("reference.varlen_attention", varlen_attention, _varlen_attention, overhead_us=50.0,
           workspace="3 * itemsize * heads * max_seqlen_q * max_seqlen_k",
           graph_safe=False, traceable=False, note="reads the lengths on the host"),
    Kernel("reference.rms_norm", rms_norm, _rms_norm, overhead_us=10.0, workspace="8 * rows * hidden"),
    Kernel("reference.add_rms_norm", add_rms_norm, _add_rms_norm, overhead_us=10.0, workspace="8 * rows * hidden"),
    Kernel("reference.layer_norm", layer_norm, _layer_norm, overhead_us=12.0, workspace="12 * rows * hidden"),
)
