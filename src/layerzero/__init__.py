"""LayerZero: for every call of a PyTorch model, the fastest kernel that is proven correct here.

    import layerzero as lz
    out = lz.attention(q, k, v, is_causal=True)
    print(lz.explain("attention", q, k, v, is_causal=True))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .ops import CATALOG as _OPS
from .runtime import catalog as _catalog
from .runtime import dispatch as _dispatch
from .runtime import torch_face as _torch_face
from .runtime import world as _world
from .runtime.events import subscribe
from .select.policy import PolicyRule
from .spec.device import Device
from .spec.errors import (
    AmbiguousLayoutWarning,
    CausalAlignmentWarning,
    ConfigError,
    DataError,
    DeviceLost,
    InvalidCall,
    KernelFailed,
    LayerZeroError,
    NamedKernelRefused,
    NoKernel,
    RegistrationError,
    SpecError,
)
from .spec.kernel import Const, Kernel, direct
from .spec.op import Op, Tolerance
from .spec.plan import Plan
from .spec.reason import Code, Reason

if TYPE_CHECKING:
    from .ops.add_rms_norm import reference as add_rms_norm
    from .ops.attention import reference as attention
    from .ops.layer_norm import reference as layer_norm
    from .ops.rms_norm import reference as rms_norm
    from .ops.varlen_attention import reference as varlen_attention
    from .runtime.capabilities import use as use_capabilities
    from .runtime.inspection import doctor, explain, get_config, list_kernels, stats, validate, which
    from .runtime.settings import configure, disabled, get_locks, load_config, lock, prefer, reload, unlock

__version__ = "0.1.0"

# Loaded when first asked for, so that importing the library stays cheap.
_LATER = {
    **{name: ("inspection", name) for name in
       ("doctor", "explain", "get_config", "list_kernels", "stats", "validate", "which")},
    "use_capabilities": ("capabilities", "use"),
    **{name: ("positions", name) for name in ("alibi_slopes", "rope_tables", "xpos_tables")},
    **{name: ("sampling", name) for name in ("sample_topk", "sample_topp", "sample_minp")},
    **{name: ("quantization", name) for name in ("choose_format", "column_shard", "quantized_shard", "row_shard")},
    **{name: ("packing", name) for name in ("forget_packed", "limit_packed", "packed_weights")},
    "kv_cache": ("kv_cache", "kv_cache"),
    **{name: ("kv_cache", name) for name in ("CacheFull", "page_table_from_csr")},
    **{name: ("tokenizers", name) for name in ("load_tokenizer", "prefix_memories", "forget_prefixes")},
    **{name: ("settings", name) for name in
       ("configure", "disabled", "get_locks", "load_config", "lock", "prefer", "reload", "unlock")},
}



def _load(name: str) -> Any:
    """The public function of one of our own operations."""
    declared = _catalog.builtin_op(name)
    found = globals()[name] = _dispatch.function(declared)
    _torch_face.define(declared)
    return found


def select(op: Any, /, *args: Any, **kwargs: Any) -> Plan:        # also the name of a subpackage: it must be here
    """As explain, but an error if nothing can serve the call."""
    from .runtime.inspection import select_kernel
    return select_kernel(op, *args, **kwargs)


def op(name: str) -> Op:
    """The declaration of an operation."""
    if name in _OPS:
        return _catalog.builtin_op(name)
    from .runtime.inspection import dispatcher_of
    return dispatcher_of(name).op


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_OPS, *_world.current().catalog.ops})


def register(item: Op | Kernel) -> Any:
    """Add an operation (returns its public function, also lz.<name>) or a kernel of one."""
    if isinstance(item, Op):
        _torch_face.check(item)
    _world.register(item)
    if isinstance(item, Op):
        fn = _dispatch.function(item)
        try:
            _torch_face.define(item)
        except RegistrationError:
            _world.unregister(item.name)
            raise
        return fn
    return item


def unregister(name: str) -> None:
    """Remove an operation or a kernel that was registered."""
    _world.unregister(name)


def clear_cache() -> None:
    """Drop every remembered choice."""
    _world.forget()


def __getattr__(name: str) -> Any:
    if name == "speculative":
        return importlib.import_module("layerzero.runtime.speculative")
    if name in _LATER:
        module, attribute = _LATER[name]
        found = globals()[name] = getattr(importlib.import_module(f"layerzero.runtime.{module}"), attribute)
        return found
    if name in _OPS:
        return _load(name)
    if not name.startswith("_") and name in _world.current().catalog.ops:
        added = _world.current().catalog.ops[name]
        fn = _dispatch.function(added)
        _torch_face.define(added)
        return fn
    raise AttributeError(f"module 'layerzero' has no attribute {name!r}")


_torch_face.install(_OPS, _load)

__all__ = [
    "AmbiguousLayoutWarning", "CausalAlignmentWarning", "Code", "ConfigError", "Const", "DataError", "Device",
    "DeviceLost", "InvalidCall", "Kernel", "KernelFailed", "LayerZeroError", "NamedKernelRefused",
    "NoKernel", "Op", "Plan", "PolicyRule", "Reason", "RegistrationError", "SpecError", "Tolerance", "add_rms_norm",
    "attention", "clear_cache", "configure", "direct", "disabled", "doctor", "explain", "get_config", "get_locks",
    "layer_norm", "list_kernels", "load_config", "lock", "op", "prefer", "register", "reload", "rms_norm", "select",
    "stats", "subscribe", "unlock", "unregister", "use_capabilities", "validate", "varlen_attention", "which",
]
