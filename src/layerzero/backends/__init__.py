"""Who computes it: one file per library, each a tuple `KERNELS` of declarations.

Importing such a file imports no library: that happens in a kernel's `load`, on first selection.
"""

from __future__ import annotations

CATALOG = (
    "native",
    "torch_sdpa", "torch_varlen", "torch_flex", "torch_paged", "torch_norm", "torch_positions",
    "torch_embedding", "torch_loss", "torch_sampling", "torch_linear", "torch_upcast", "torch_quant",
    "torch_moe", "torch_compiled",
    "cuda", "triton", "zentorch", "ipex",
    "hf_tokenizers", "tiktoken", "sentencepiece", "flash_attn",
    "flashinfer", "liger", "quack", "xformers", "reference",
)
