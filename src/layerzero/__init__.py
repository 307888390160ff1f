"""LayerZero: for every call of a PyTorch model, the fastest kernel that is proven correct here.

    import layerzero as lz
    out = lz.attention(q, k, v, is_causal=True)
    print(lz.explain("attention", q, k, v, is_causal=True))
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from .dispatch import dispatcher as _dispatch
from .dispatch import torch_library as _torch_face
from .ops import CATALOG as _OPS
from .spec.errors import RegistrationError as _RegistrationError
from .spec.kernel import Kernel
from .spec.op import Op
from .world import catalog as _catalog
from .world import snapshot as _world

__version__ = "0.1.0"

# The public names, once: __all__, dir(), lazy loading, __init__.pyi and docs/reference/api.md all
# come from these two tables and the functions below. A name is loaded when first asked for, so
# that importing the library stays cheap.
#
# module -> names; "public=attribute" where they differ
_HOMES = {
    "integrations.auto": "auto",
    "integrations.bundle": "write_bundle",
    "integrations.diffusers": "attn_processor register_diffusers",
    "integrations.patching": "patch patched unpatch",
    "integrations.serve": "serve_metrics",
    "integrations.transformers": "register_transformers=register",
    "integrations.transformers.accelerate": "accelerate unaccelerate",
    "models.kv_cache": "kv_cache page_table_from_csr",
    "models.sampling": "sample_minp sample_topk sample_topp",
    "operate.inspection":
        "doctor explain get_config list_kernels select=select_kernel stats validate which",
    "operate.recording": "recording",
    "operate.warmup": "warmup",
    "plan.bake": "compile=compile_model",
    "plan.dryrun": "dry_run",
    "plan.readiness": "readiness_check",
    "selection.policy": "PolicyRule",
    "spec.device": "Device",
    "spec.kernel": "Kernel",
    "spec.op": "Op Tolerance",
    "spec.plan": "Plan SelectionReport",
    "spec.reason": "Code Reason",
    "tuning.tuner": "tune",
    "world.events": "subscribe",
    "world.settings": "configure disabled get_locks load_config lock prefer reload unlock",
}
_GROUPS = ("errors", "graphs", "kernels", "positions", "quant", "speculative", "tables", "testing",
           "tokens")
_PLACES = {public: (module, attribute or public) for module, names in _HOMES.items()
           for public, _, attribute in (name.partition("=") for name in names.split())}


def op(name: str) -> Op:
    """Return the declaration of an operation."""
    if name in _OPS:
        return _catalog.builtin_op(name)
    from .operate.inspection import dispatcher_of
    return dispatcher_of(name).op


def register(item: Op | Kernel) -> Any:
    """Add an operation (returns its public function, also lz.<name>) or a kernel of one."""
    if isinstance(item, Op):
        _torch_face.check(item)
    _world.register(item)
    if isinstance(item, Op):
        fn = _dispatch.public_function(item)
        try:
            _torch_face.define(item)
        except _RegistrationError:
            _world.unregister(item.name)
            raise
        return fn
    return item


def unregister(name: str) -> None:
    """Remove an operation, a kernel, all kernels of a backend, or all that a plugin brought, by
    name.
    """
    _world.unregister(name)


def clear_cache() -> None:
    """Drop every remembered choice."""
    _world.forget()


__all__ = sorted({*_PLACES, *_GROUPS, *_OPS, "clear_cache", "op", "register", "unregister"})


def __dir__() -> list[str]:
    return sorted({*__all__, *_world.current().catalog.ops, "__all__", "__doc__", "__file__",
                   "__version__"})


def _builtin(name: str) -> Any:
    """Return the public function of one of our own operations."""
    declared = _catalog.builtin_op(name)
    function = globals()[name] = _dispatch.public_function(declared)
    _torch_face.define(declared)
    return function


def _public(name: str) -> Any:
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(f"layerzero.{module}"), attribute)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        value = globals()[name] = _public(name)
        return value
    if name in _GROUPS:
        return importlib.import_module(f"layerzero.{name}")
    if name in _OPS:
        return _builtin(name)
    if not name.startswith("_") and name in _world.current().catalog.ops:
        added = _world.current().catalog.ops[name]
        function = _dispatch.public_function(added)
        _torch_face.define(added)
        return function
    raise AttributeError(f"module 'layerzero' has no attribute {name!r}")


_torch_face.install(_OPS, _builtin)
if os.environ.get("LAYERZERO_RECORD", "").strip():
    importlib.import_module("layerzero.operate.recording").from_environment()
if os.environ.get("LAYERZERO_AUTO", "").strip():
    importlib.import_module("layerzero.integrations.auto").from_environment()
