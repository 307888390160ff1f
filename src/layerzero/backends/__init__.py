"""Who computes it: one file per library, each a tuple `KERNELS` of declarations.

Importing such a file imports no library: that happens in a kernel's `load`, on first selection.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..spec.errors import ConfigError

CATALOG = (
    "native",
    "torch_sdpa", "torch_varlen", "torch_flex", "torch_paged", "torch_norm", "torch_positions",
    "torch_embedding", "torch_loss", "torch_sampling", "torch_linear", "torch_upcast", "torch_quant",
    "torch_moe", "torch_compiled",
    "cuda", "triton", "zentorch", "ipex",
    "hf_tokenizers", "tiktoken", "sentencepiece", "flash_attn",
    "flashinfer", "liger", "quack", "xformers", "reference",
)


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where what we compile is kept: the folder that runtime/config.py names too; a test keeps the two alike."""
    text = environ.get("LAYERZERO_CACHE_DIR", "").strip()
    base = environ.get("XDG_CACHE_HOME", "").strip()
    try:
        if text:
            return Path(text).expanduser()
        return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "layerzero"
    except RuntimeError as e:
        raise ConfigError(f"no home folder for the cache: {e}; set LAYERZERO_CACHE_DIR to an absolute path") from e
