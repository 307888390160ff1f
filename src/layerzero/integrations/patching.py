"""lz.patch, lz.unpatch, lz.patched: for models of transformers, diffusers or one's own."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from .diffusers import patch_diffusers, patched_diffusers, unpatch_diffusers
from .transformers import patch as patching


def patch(model: Any, **options: Any) -> Any:
    """Let lz compute what it recognises of `model`; returns a report of what is served, what was
    left, and why.

    Options of a module: only, skip (kinds of modules). Of diffusers: parts.
    """
    if _of_diffusers(model):
        return patch_diffusers(model, **options)
    return patching.patch(model, **options)


def unpatch(model: Any) -> None:
    """Make it what it was before lz.patch."""
    if _of_diffusers(model):
        unpatch_diffusers(model)
        return
    patching.unpatch(model)


def patched(model: Any, **options: Any) -> AbstractContextManager[Any]:
    """lz.patch for a block."""
    if _of_diffusers(model):
        return patched_diffusers(model, **options)
    return patching.patched(model, **options)


def _of_diffusers(model: Any) -> bool:
    diffusers = sys.modules.get("diffusers")   # whoever has a model of it has imported it
    return (diffusers is not None
            and isinstance(model, (diffusers.DiffusionPipeline, diffusers.ModelMixin)))
