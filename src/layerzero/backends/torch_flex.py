"""torch's flex_attention, compiled: causality, windows, ALiBi and softcap without a mask in memory.

It is compiled once per combination of features, dtype and heads. Sequence lengths become symbolic
once they vary, and the offset of the diagonal is a tensor, so a growing KV cache does not
recompile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import OP as attention
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._flex import compiled_flex

BLOCK = 128                # of the block mask; within one block nothing is skipped


def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = compiled_flex("flex_attention")

    @lru_cache(maxsize=256)
    def diagonal(offset: int, device: torch.device) -> Tensor:
        return torch.tensor(offset, device=device)

    @lru_cache(maxsize=64)
    def block_mask_of(seq_q: int, seq_k: int, offset: int, left: int, right: int,
                      device: torch.device) -> Any:
        visible = _mask_mod(diagonal(offset, device), left, right)
        return create_block_mask(visible, None, None, seq_q, seq_k, device=str(device),
                                 BLOCK_SIZE=BLOCK)

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, causal_align: str | None = None, window_left: int = -1,
            window_right: int = -1, alibi_slopes: Tensor | None = None, softcap: float = 0.0,
            return_lse: bool = False) -> Any:
        seq_q, seq_k = query.shape[2], key.shape[2]
        offset = seq_k - seq_q if causal_align == "bottom_right" else 0
        right = 0 if is_causal else window_right
        masked = right >= 0 or window_left >= 0
        use_block_mask = masked and seq_q > BLOCK
        visible = _mask_mod(diagonal(offset, query.device), window_left,
                            right) if masked and not use_block_mask else None
        slopes = None if alibi_slopes is None else (alibi_slopes, diagonal(offset, query.device))
        attend = compiled(query.dtype, query.device.type, query.shape[1], key.shape[1],
                          query.shape[3], value.shape[3], window_left, right, use_block_mask,
                          slopes is None, softcap, return_lse, torch.is_grad_enabled())
        return attend(query, key, value, _score_mod(visible, slopes, softcap),
                      block_mask_of(seq_q, seq_k, offset, window_left, right,
                                    query.device) if use_block_mask else None,
                      scale, return_lse)

    return run


def _mask_mod(diagonal: Tensor, left: int, right: int) -> Callable[..., Tensor]:
    """Returns a mask_mod: is key k within [left, right] of query q's position on the diagonal?"""
    def both(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = k - q - diagonal
        return (distance <= right) & (distance >= -left)

    def only_right(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k - q - diagonal <= right

    def only_left(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k - q - diagonal >= -left

    return both if left >= 0 and right >= 0 else only_right if right >= 0 else only_left


def _score_mod(visible: Callable[..., Tensor] | None, slopes: tuple[Tensor, Tensor] | None,
               softcap: float) -> Callable[..., Tensor] | None:
    """Returns a score_mod in the contract's order: softcap, ALiBi, mask."""
    if visible is None and slopes is None and not softcap:
        return None

    def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[0][h] * (k - q - slopes[1]).abs()
        if visible is not None:
            score = torch.where(visible(b, h, q, k), score, -float("inf"))
        return score

    return modify


ON_CPU = r.device("cpu")
RULES: tuple[r.Condition, ...] = (
    r.device("cpu", "cuda"), r.dtypes("float16", "bfloat16", "float32"),
    r.when(r.device("cuda"), r.at_least("head_dim", 16)),
    r.when(r.device("cuda"), r.at_least("head_dim_v", 16)),
    r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("seq_q", 1, Code.EMPTY_INPUT),
    r.at_least("seq_k", 1, Code.EMPTY_INPUT), r.at_least("kv_heads", 1, Code.EMPTY_INPUT),
    r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
    r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
    r.differs("alibi_slopes.requires_grad", True, Code.BACKWARD_UNSUPPORTED),
    r.when(ON_CPU, r.off("return_lse", Code.LSE_UNSUPPORTED)),
    r.when(ON_CPU, r.off("grad", Code.BACKWARD_UNSUPPORTED)),
    r.when(ON_CPU, r.cpu_isa("avx2")),             # Inductor compiles it for no other CPU
)

KERNELS = (
    Kernel("torch.flex", attention, _flex, prior=5.0, overhead_us=40.0, variants=("bhsd",),
           jit=True, traceable=False, requires=RULES),
)
