"""The contracts themselves, run eagerly: slow, and able to do all that a contract allows, on any device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..ops import CATALOG
from ..ops.formulas.bpe import BYTE_LEVEL_BPE, BYTE_LEVEL_DECODER
from ..spec.kernel import Kernel
from ..spec.op import Op

# What is known of a formula beyond its contract.
KNOWN: dict[str, dict[str, Any]] = {
    "attention": {"workspace": "3 * itemsize * elements"},
    "varlen_attention": {"workspace": "3 * itemsize * heads * max_seqlen_q * max_seqlen_k"},
    "rms_norm": {"overhead_us": 10.0, "workspace": "8 * rows * hidden"},
    "add_rms_norm": {"overhead_us": 10.0, "workspace": "8 * rows * hidden"},
    "sample": {"prior": 0.006, "overhead_us": 80.0, "workspace": "80 * batch * vocab"},    # it sorts the vocabulary
    "paged_attention": {"workspace": "3 * itemsize * heads * tokens * seq_k"},
    "mla_paged_attention": {"workspace": "3 * itemsize * heads * tokens * seq_k"},
    "tokenize": {"overhead_us": 5000.0, "requires": BYTE_LEVEL_BPE},
    "detokenize": {"overhead_us": 500.0, "requires": BYTE_LEVEL_DECODER},
    "layer_norm": {"overhead_us": 12.0, "workspace": "12 * rows * hidden"},
}
# These read lengths or indices on the host, so nothing can capture or trace them.
ON_THE_HOST = {"varlen_attention", "paged_attention", "mla_paged_attention", "grouped_gemm", "moe", "tokenize",
               "detokenize"}


def _loader(op: Op) -> Callable[[], Callable[..., Any]]:
    """The op's formula, by a function of this module's own, so that a descriptor can name it."""
    def load() -> Callable[..., Any]:
        return op.reference

    load.__name__ = load.__qualname__ = f"_{op.name}"
    globals()[load.__name__] = load
    return load


def _kernel(op: Op) -> Kernel:
    fields: dict[str, Any] = {"overhead_us": 20.0, "variants": tuple(op.patterns) if op.variant else ()}
    if op.sdpa_switches:
        fields["sdpa_backend"] = "MATH"        # the formula, step by step, is what torch calls its math implementation
    if op.name in ON_THE_HOST:
        fields.update(overhead_us=50.0, graph_safe=False, traceable=False, note="reads lengths on the host")
    return Kernel(f"reference.{op.name}", op, _loader(op), **{**fields, **KNOWN.get(op.name, {})})


KERNELS = tuple(_kernel(importlib.import_module(f"layerzero.ops.{name}").OP) for name in CATALOG)
