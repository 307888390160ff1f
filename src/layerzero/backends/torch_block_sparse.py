"""Attention under a BlockMask, by torch.

torch.block_sparse_rows    torch's scaled_dot_product_attention for each block of queries, over the
                           keys of the blocks that it sees
torch.block_sparse_flex    flex_attention, compiled
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..ops.block_sparse_attention import OP as block_sparse_attention
from ..ops.formulas.block_masks import dense_mask, listed_blocks, visible_keys
from ..spec import rules as r
from ..spec.kernel import SDPA, Kernel
from ..spec.reason import Code
from ._flex import compiled_flex
from ._sequences import EFFICIENT_DIM_ON_CUDA, HEADS_OF_A_LAUNCH, ON_16_BYTES, sdpa

# Bytes of a mask that is made as a whole: asking the mask_mod per block takes milliseconds.
AT_ONCE = 1 << 24


def _rows() -> Callable[..., Any]:
    def run(query: Tensor, key: Tensor, value: Tensor, block_mask: Any,
            scale: float | None = None) -> Tensor:
        (seq_q, seq_k), (size_q, size_k) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
        blocks = listed_blocks(block_mask)
        dense = (dense_mask(block_mask)
                 if math.prod(block_mask.shape) <= AT_ONCE and blocks.partial.any() else None)
        # read on the host at once: what any batch or head sees, and what all see as a whole
        seen = (blocks.partial | blocks.full).any(1).any(0).tolist()
        whole = blocks.full.all(1).all(0).tolist()
        parts = []
        for row, (some, full) in enumerate(zip(seen, whole)):
            first, last = row * size_q, min((row + 1) * size_q, seq_q)
            columns = [column for column, visible in enumerate(some) if visible]
            if not columns:
                parts.append(query.new_zeros((*query.shape[:2], last - first, value.shape[3])))
                continue
            start, end = columns[0] * size_k, min((columns[-1] + 1) * size_k, seq_k)
            keys: range | Tensor = range(start, end)
            if len(columns) == columns[-1] - columns[0] + 1:   # neighbours: nothing is copied
                k, v = key[:, :, start:end], value[:, :, start:end]
            else:
                keys = torch.cat([torch.arange(c * size_k, min((c + 1) * size_k, seq_k))
                                  for c in columns]).to(query.device)
                k, v = key.index_select(2, keys), value.index_select(2, keys)
            bias = None
            if not all(full[column] for column in columns):
                visible = (visible_keys(block_mask, blocks, range(first, last), keys)
                           if dense is None else dense[..., first:last, start:end]
                           if isinstance(keys, range)
                           else dense[..., first:last, :].index_select(-1, keys))
                # not as bool: cuDNN gives the mean of all values for a row that sees none
                bias = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible,
                                                                                 -math.inf)
            parts.append(sdpa(query[:, :, first:last], k, v, bias, scale=scale, enable_gqa=True))
        return torch.cat(parts, 2)

    return run


def _flex() -> Callable[..., Any]:
    compiled = compiled_flex("block_sparse_flex")

    def run(query: Tensor, key: Tensor, value: Tensor, block_mask: Any,
            scale: float | None = None, *, softcap: float = 0.0, return_lse: bool = False) -> Any:
        def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        own = tuple(block_mask.shape[i] == query.shape[i] for i in range(2))
        attend = compiled(query.dtype, query.shape[1], query.shape[3], key.shape[1],
                          value.shape[3], softcap, return_lse, torch.is_grad_enabled(), own,
                          getattr(block_mask.mask_mod, "__code__", block_mask.mask_mod))
        return attend(query, key, value, cap if softcap else None, asked_of_its_own(
            block_mask, *own), scale, return_lse)

    return run


def asked_of_its_own(block_mask: Any, own_batch: bool, own_heads: bool) -> Any:
    """Returns a mask whose mask_mod is asked for batch or head 0 where the mask has one for all:
    flex_attention asks for the query's."""
    if own_batch and own_heads:
        return block_mask
    mask_mod, shared = block_mask.mask_mod, copy(block_mask)
    shared.mask_mod = lambda b, h, q, k: mask_mod(b if own_batch else b * 0,
                                                  h if own_heads else h * 0, q, k)
    return shared


ON_CPU = r.device("cpu")

KERNELS = (
    Kernel("torch.block_sparse_rows", block_sparse_attention, _rows, sdpa_backend=SDPA, prior=5.0,
           overhead_us=300.0, baseline=True, graph_safe=False, traceable=False,
           workspace="8 * 128 * batch * heads * seq_k",          # of one block of queries
           less_work="skips the blocks that the mask hides",
           requires=(r.device("cpu", "cuda"), r.at_least("batch", 1, Code.EMPTY_INPUT),
                     r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
                     r.off("return_lse", Code.LSE_UNSUPPORTED), HEADS_OF_A_LAUNCH,
                     *EFFICIENT_DIM_ON_CUDA, *ON_16_BYTES),
           note="reads the block lists on the host"),
    Kernel("torch.block_sparse_flex", block_sparse_attention, _flex, prior=8.0, overhead_us=60.0,
           jit=True, traceable=False, untested=True,
           requires=(
               r.device("cpu", "cuda"), r.dtypes("float16", "bfloat16", "float32"),
               r.when(r.device("cuda"), r.at_least("head_dim", 16)),
               r.when(r.device("cuda"), r.at_least("head_dim_v", 16)),
               r.at_least("batch", 1, Code.EMPTY_INPUT),
               # Inductor's tiles lie within blocks
               r.multiple_of("block_q", 128), r.multiple_of("block_k", 128),
               r.when(ON_CPU, r.off("return_lse", Code.LSE_UNSUPPORTED)),
               r.when(ON_CPU, r.off("grad", Code.BACKWARD_UNSUPPORTED)),
               r.when(ON_CPU, r.cpu_isa("avx2")))),     # Inductor compiles it for no other CPU
)
