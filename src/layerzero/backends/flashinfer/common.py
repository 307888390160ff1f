"""What all FlashInfer kernels share: the library they need, and whether it can compile here."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from ...spec.reason import Code, Reason
from ...spec.rules import Condition, device, dtypes, plain_tensors, sm, vendor

LN2 = 0.6931471805599453                       # its log-sum-exps are of base 2
HEAD_DIMS = (64, 128, 256)                     # what its attention is instantiated and tested for
HARDWARE: tuple[Condition, ...] = (device("cuda"), vendor("nvidia"), sm(at_least=80), plain_tensors())
HALF = dtypes("float16", "bfloat16")


def ready() -> bool | Reason:
    """Can its modules be made, or are they there already? Nothing is imported for that."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None or _brought_along():
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and not (Path(home) / "bin" / "nvcc").exists():
        return Reason(Code.COMPILER_MISSING, "nvcc (or the package flashinfer-jit-cache)")
    return True


def compiled() -> tuple[str, ...]:
    """The modules in FlashInfer's cache and in the package: what is not among them is compiled when first called."""
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"
    return tuple(sorted({path.stem for path in (*base.glob("*/*/cached_ops/*/*.so"), *_brought_along())}))


def _brought_along() -> list[Path]:
    """Modules that were compiled before the package was installed."""
    spec = importlib.util.find_spec("flashinfer")
    folders = (spec.submodule_search_locations if spec else None) or ()
    return [module for folder in folders for module in (Path(folder) / "data" / "aot").glob("*/*.so")]


LIBRARY: dict[str, Any] = {"package": "flashinfer", "distribution": "flashinfer-python", "version": ">=0.7,<0.8",
                           "torch": ">=2.8", "jit": True, "differentiable": False, "traceable": False,
                           "untested": True, "built": ready}
TRIED: dict[str, Any] = {**LIBRARY, "untested": False}     # by the contract, on an H200
