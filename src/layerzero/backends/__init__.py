"""Who computes it: one file per library, each a tuple `KERNELS` of declarations.

Importing such a file imports no library: that happens in a kernel's `load`, on first selection.
"""

CATALOG = ("torch_sdpa", "torch_varlen", "torch_flex", "torch_norm", "flash_attn", "reference")
