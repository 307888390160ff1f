"""What all FlashInfer kernels share: requirements, and whether its modules can be compiled here."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from ...spec import rules as r
from ...spec.reason import Code, Reason

LN2 = 0.6931471805599453                       # its log-sum-exps are in base 2
HEAD_DIMS = (64, 128, 256)                     # that its attention is instantiated and tested for
HARDWARE: tuple[r.Condition, ...] = (r.device("cuda"), r.vendor("nvidia"), r.sm(at_least=80),
                                     r.plain_tensors())
HALF = r.dtypes("float16", "bfloat16")


def ready() -> bool | Reason:
    """Returns whether modules can be compiled or are already there. Nothing is imported."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None or _packaged_modules():
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and not (Path(home) / "bin" / "nvcc").exists():
        return Reason(Code.COMPILER_MISSING, "nvcc (or the package flashinfer-jit-cache)")
    return True


def compiled() -> tuple[str, ...]:
    """Returns the modules in FlashInfer's cache and package; others are compiled when called."""
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE")
                or Path.home()) / ".cache" / "flashinfer"
    return (
        tuple(sorted({path.stem for path in (*base.glob("*/*/cached_ops/*/*.so"),
                                             *_packaged_modules())})))


def _packaged_modules() -> list[Path]:
    """Returns the modules that the package contains."""
    spec = importlib.util.find_spec("flashinfer")
    folders = (spec.submodule_search_locations if spec else None) or ()
    return [module for folder in folders
            for module in (Path(folder) / "data" / "aot").glob("*/*.so")]


LIBRARY: dict[str, Any] = {"package": "flashinfer", "distribution": "flashinfer-python",
                           "version": ">=0.7,<0.8", "torch": ">=2.8", "jit": True,
                           "differentiable": False, "traceable": False, "untested": True,
                           "built": ready}
TESTED: dict[str, Any] = {**LIBRARY, "untested": False}     # contract tests passed on an H200
