"""lz.patch, lz.unpatch, lz.patched: for a model of transformers, of one's own, or a model or
pipeline of diffusers.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any


def patch(model: Any, **options: Any) -> Any:
    """Let lz compute what it recognises of `model`; returns a report of what is served, what was
    left, and why.

    Options of a module: only, skip (kinds of modules). Of diffusers: parts.
    """
    if _of_diffusers(model):
        from .diffusers import patch_diffusers
        return patch_diffusers(model, **options)
    from .transformers.patch import patch as patch_module
    return patch_module(model, **options)


def unpatch(model: Any) -> None:
    """Make it what it was before lz.patch."""
    if _of_diffusers(model):
        from .diffusers import unpatch_diffusers
        unpatch_diffusers(model)
        return
    from .transformers.patch import unpatch as unpatch_module
    unpatch_module(model)


def patched(model: Any, **options: Any) -> AbstractContextManager[Any]:
    """lz.patch for a block."""
    if _of_diffusers(model):
        from .diffusers import patched_diffusers
        return patched_diffusers(model, **options)
    from .transformers.patch import patched as patched_module
    return patched_module(model, **options)


def _of_diffusers(model: Any) -> bool:
    diffusers = sys.modules.get("diffusers")   # whoever has a model of it has imported it
    return (diffusers is not None
            and isinstance(model, (diffusers.DiffusionPipeline, diffusers.ModelMixin)))
