"""LayerZero: for every call of a PyTorch model, the fastest kernel that is proven correct here.

    import layerzero as lz
    out = lz.attention(q, k, v, is_causal=True)
    print(lz.explain("attention", q, k, v, is_causal=True))
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from .ops import CATALOG as _OPS

__version__ = "0.1.0"

# The public names, once: __all__, dir(), lazy loading, __init__.pyi and docs/reference/api.md all
# come from these two tables. A name is loaded when first asked for, so
# that importing the library stays cheap.
#
# module -> names; "public=attribute" where they differ
_HOMES = {
    "_library": "clear_cache op register unregister",
    "integrations.auto": "auto",
    "integrations.bundle": "write_bundle",
    "integrations.gguf.model": "load_gguf",
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
_GROUPS = ("distributed", "errors", "graphs", "grouped", "kernels", "positions", "quant",
           "speculative", "tables", "testing", "tokens")
_PLACES = {public: (module, attribute or public) for module, names in _HOMES.items()
           for public, _, attribute in (name.partition("=") for name in names.split())}


def _load() -> Any:
    return importlib.import_module("layerzero._library")


__all__ = sorted({*_PLACES, *_GROUPS, *_OPS})


def __dir__() -> list[str]:
    return sorted({*__all__, *_load().worlds.current().catalog.ops, "__all__", "__doc__",
                   "__file__", "__version__"})


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
        return _load().builtin(name)
    if not name.startswith("_") and name in (ops := _load().worlds.current().catalog.ops):
        return _load().public_function(ops[name])
    raise AttributeError(f"module 'layerzero' has no attribute {name!r}")


def _is_command() -> bool:
    """Is this process `lz` or `python -m layerzero`? Then torch is loaded when a command runs."""
    program, words = (sys.argv or [""])[0], sys.orig_argv
    if program == "-m":                        # while Python looks for the module to run
        return "-m" in words and words[words.index("-m") + 1:][:1] == ["layerzero"]
    return program in words and os.path.splitext(os.path.basename(program))[0] == "lz"


if not _is_command():
    _load()
