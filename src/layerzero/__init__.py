"""LayerZero: for every call of a PyTorch model, the fastest kernel that is proven correct here.

    import layerzero as lz
    out = lz.attention(q, k, v, is_causal=True)
    print(lz.explain("attention", q, k, v, is_causal=True))
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from .dispatch import dispatcher as _dispatch
from .dispatch import torch_library as _torch_face
from .ops import CATALOG as _OPS
from .select.policy import PolicyRule
from .spec.device import Device
from .spec.errors import (
    AmbiguousLayoutWarning,
    CausalAlignmentWarning,
    ConfigError,
    DataError,
    DeviceLost,
    InputDamaged,
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
from .world import catalog as _catalog
from .world import snapshot as _world
from .world.events import subscribe

if TYPE_CHECKING:
    from .integrations.bundle import write_bundle
    from .integrations.patching import patch, patched, unpatch
    from .integrations.serve import serve_metrics
    from .integrations.transformers.accelerate import accelerate, unaccelerate
    from .operate.inspection import doctor, explain, get_config, list_kernels, stats, validate, which
    from .operate.recording import recording
    from .operate.warmup import warmup
    from .ops.add_rms_norm import reference as add_rms_norm
    from .ops.attention import reference as attention
    from .ops.layer_norm import reference as layer_norm
    from .ops.rms_norm import reference as rms_norm
    from .ops.varlen_attention import reference as varlen_attention
    from .plan.bake import bind
    from .plan.bake import compile_model as compile
    from .plan.block import plan_block
    from .plan.dryrun import dry_run
    from .plan.force import use_table
    from .plan.readiness import readiness_check
    from .plan.solver import solve
    from .spec.call import Call
    from .tune.regret import replay as regret
    from .tune.workload import calls_for
    from .world.capabilities import use as use_capabilities
    from .world.settings import configure, disabled, get_locks, load_config, lock, prefer, reload, unlock

__version__ = "0.1.0"

# Loaded when first asked for, so that importing the library stays cheap: name -> where it is.
_LATER = {name: module for module, names in {
    "operate.inspection": ("doctor", "explain", "get_config", "list_kernels", "stats", "validate", "which"),
    "models.positions": ("alibi_bias", "alibi_slopes", "rope_tables", "xpos_tables"),
    "models.sampling": ("sample_topk", "sample_topp", "sample_minp"),
    "models.quantization": ("choose_format", "column_shard", "quantized_shard", "row_shard"),
    "models.packing": ("forget_packed", "limit_packed", "packed_weights"),
    "models.kv_cache": ("CacheFull", "kv_cache", "page_table_from_csr"),
    "models.tokenizers": ("load_tokenizer", "prefix_memories", "forget_prefixes"),
    "world.settings": (
        "configure", "disabled", "get_locks", "load_config", "lock", "prefer", "reload", "unlock"),
    "operate.recording": ("recording",),
    "operate.warmup": ("WarmupReport", "warmup"),
    "operate.graphs": ("graph", "warmup_capture"),
    "machine.watchdog": ("run_isolated",),
    "operate.triton_kernels": ("triton_cache", "triton_kernel", "triton_kernels"),
    "verify.kernel.capture": ("is_graph_safe", "validate_graph_capture"),
    "verify.kernel.probing": ("probe",),
    "world.capabilities": ("use_capabilities",),
    "spec.call": ("Call", "TensorSpec", "read_calls", "write_calls"),
    "plan.solver": ("solve",),
    "plan.table": ("Table",),
    "plan.force": ("table_in_force", "use_table"),
    "plan.lockfile": ("check_lockfile", "use_lockfile", "write_lockfile"),
    "plan.bake": ("bind", "compile"),
    "plan.dryrun": ("dry_run",),
    "models.block": ("Block",),
    "plan.block": ("plan_block",),
    "plan.readiness": ("readiness_check",),
    "integrations.serve": ("serve_metrics",),
    "integrations.bundle": ("write_bundle",),
    "integrations.patching": ("patch", "patched", "unpatch"),
    "integrations.transformers": ("register_transformers",),
    "integrations.transformers.accelerate": ("accelerate", "unaccelerate"),
    "integrations.diffusers": ("attn_processor", "register_diffusers"),
    "integrations.hub": ("Hub", "HubError"),
    "integrations.pipeline_tokens": ("patch_tokenizer", "tokenizer_for", "unpatch_tokenizer"),
    "tune.workload": ("calls_for",),
    "tune.regret": ("regret",),
}.items() for name in names}
_OTHERWISE = {"use_capabilities": "use", "compile": "compile_model", "regret": "replay",
              "register_transformers": "register"}     # as they are named there


def _load(name: str) -> Any:
    """The public function of one of our own operations."""
    declared = _catalog.builtin_op(name)
    found = globals()[name] = _dispatch.public_function(declared)
    _torch_face.define(declared)
    return found


def select(op: Any, /, *args: Any, **kwargs: Any) -> Plan:        # also the name of a subpackage: it must be here
    """As explain, but an error if nothing can serve the call."""
    from .operate.inspection import select_kernel
    return select_kernel(op, *args, **kwargs)


importlib.import_module("layerzero.tune")       # an empty package: importing it later would take the name below


def tune(calls: Any, /, **options: Any) -> Any:
    """Time every kernel that can serve these calls, and let selection follow what was measured; see lz tune --help."""
    from .tune.tuner import tune as run
    return run(calls, **options)


def op(name: str) -> Op:
    """The declaration of an operation."""
    if name in _OPS:
        return _catalog.builtin_op(name)
    from .operate.inspection import dispatcher_of
    return dispatcher_of(name).op


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_OPS, *_world.current().catalog.ops})


def register(item: Op | Kernel) -> Any:
    """Add an operation (returns its public function, also lz.<name>) or a kernel of one."""
    if isinstance(item, Op):
        _torch_face.check(item)
    _world.register(item)
    if isinstance(item, Op):
        fn = _dispatch.public_function(item)
        try:
            _torch_face.define(item)
        except RegistrationError:
            _world.unregister(item.name)
            raise
        return fn
    return item


def unregister(name: str) -> None:
    """Remove an operation, a kernel, all kernels of a backend, or all that a plugin brought, by name."""
    _world.unregister(name)


def clear_cache() -> None:
    """Drop every remembered choice."""
    _world.forget()


def __getattr__(name: str) -> Any:
    if name == "speculative":
        return importlib.import_module("layerzero.models.speculative")
    if name in _LATER:
        module = importlib.import_module(f"layerzero.{_LATER[name]}")
        found = globals()[name] = getattr(module, _OTHERWISE.get(name, name))
        return found
    if name in _OPS:
        return _load(name)
    if not name.startswith("_") and name in _world.current().catalog.ops:
        added = _world.current().catalog.ops[name]
        fn = _dispatch.public_function(added)
        _torch_face.define(added)
        return fn
    raise AttributeError(f"module 'layerzero' has no attribute {name!r}")


_torch_face.install(_OPS, _load)
if os.environ.get("LAYERZERO_RECORD", "").strip():
    importlib.import_module("layerzero.operate.recording").from_environment()

__all__ = [
    "AmbiguousLayoutWarning", "Call", "CausalAlignmentWarning", "Code", "ConfigError", "Const", "DataError",
    "Device", "DeviceLost", "InputDamaged", "InvalidCall",
    "Kernel", "KernelFailed", "LayerZeroError", "NamedKernelRefused",
    "NoKernel", "Op", "Plan", "PolicyRule", "Reason", "RegistrationError", "SpecError", "Tolerance", "accelerate",
    "add_rms_norm", "attention", "bind", "calls_for", "clear_cache", "compile", "configure", "direct", "disabled",
    "doctor", "dry_run", "explain", "get_config", "get_locks", "layer_norm", "list_kernels", "load_config", "lock",
    "op", "patch", "patched", "plan_block", "prefer", "readiness_check", "recording", "register", "regret",
    "reload", "rms_norm", "select", "serve_metrics", "solve", "stats", "subscribe", "tune", "unaccelerate",
    "unlock", "unpatch", "unregister", "use_capabilities", "use_table", "validate", "varlen_attention", "warmup",
    "which", "write_bundle",
]
