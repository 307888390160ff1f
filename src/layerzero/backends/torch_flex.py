"""torch's flex_attention, compiled: causality, windows, ALiBi and softcap without a mask in memory.

It is compiled once per combination of features, dtype and heads. Sequence lengths turn symbolic once they
were seen to vary, and the offset of the diagonal is a tensor: a growing KV cache does not compile anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import OP as attention
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ..spec.rules import Condition, absent, at_least, cpu_isa, device, differs, dtypes, equals, off, when

_serial = count()
BLOCK = 128                # of the block mask: below one block there is nothing to skip


def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ask = _lse_request()

    @lru_cache(maxsize=None)
    def compiled(*kind: Any) -> Callable[..., Any]:
        """One per kind of call, with a name of its own: by that torch counts recompilations, and past eight goes on
        unfused without a word. fullgraph makes it raise instead, should one kind need so many."""
        def attend(query: Tensor, key: Tensor, value: Tensor, score: Any, block_mask: Any, scale: float | None,
                   aux: dict[str, Any]) -> Any:
            return flex_attention(query, key, value, score, block_mask, scale, enable_gqa=True, **aux)

        attend.__code__ = attend.__code__.replace(co_name=f"flex_attention_{next(_serial)}")
        return torch.compile(attend, fullgraph=True)

    @lru_cache(maxsize=256)
    def diagonal(offset: int, device: torch.device) -> Tensor:
        return torch.tensor(offset, device=device)

    @lru_cache(maxsize=64)
    def blocks(seq_q: int, seq_k: int, offset: int, left: int, right: int, device: torch.device) -> Any:
        visible = _visible(diagonal(offset, device), left, right)
        return create_block_mask(visible, None, None, seq_q, seq_k, device=str(device), BLOCK_SIZE=BLOCK)

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None, *,
            causal_align: str | None = None, window_left: int = -1, window_right: int = -1,
            alibi_slopes: Tensor | None = None, softcap: float = 0.0, return_lse: bool = False) -> Any:
        seq_q, seq_k = query.shape[2], key.shape[2]
        offset = seq_k - seq_q if causal_align == "bottom_right" else 0
        right = 0 if is_causal else window_right
        hides = right >= 0 or window_left >= 0
        by_blocks = hides and seq_q > BLOCK
        visible = _visible(diagonal(offset, query.device), window_left, right) if hides and not by_blocks else None
        slopes = None if alibi_slopes is None else (alibi_slopes, diagonal(offset, query.device))
        attend = compiled(query.dtype, query.device.type, query.shape[1], key.shape[1], query.shape[3], value.shape[3],
                          window_left, right, by_blocks, slopes is None, softcap, return_lse, torch.is_grad_enabled())
        result = attend(query, key, value, _score(visible, slopes, softcap),
                        blocks(seq_q, seq_k, offset, window_left, right, query.device) if by_blocks else None,
                        scale, ask if return_lse else {})
        if not return_lse:
            return result
        lse = result[1]
        return result[0], lse if isinstance(lse, Tensor) else lse.lse

    return run


def _lse_request() -> dict[str, Any]:
    """`return_lse=True` until torch 2.8, a request object since."""
    from torch.nn.attention import flex_attention as module
    request = getattr(module, "AuxRequest", None)
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


def _visible(diagonal: Tensor, left: int, right: int) -> Callable[..., Tensor]:
    """mask_mod: is key k within [left, right] of query q's place on the diagonal."""
    def both(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = k - q - diagonal
        return (distance <= right) & (distance >= -left)

    def only_right(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k - q - diagonal <= right

    def only_left(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k - q - diagonal >= -left

    return both if left >= 0 and right >= 0 else only_right if right >= 0 else only_left


def _score(visible: Callable[..., Tensor] | None, slopes: tuple[Tensor, Tensor] | None,
           softcap: float) -> Callable[..., Tensor] | None:
    """score_mod in the contract's order: softcap, then ALiBi, then what is hidden."""
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


ON_CPU = device("cpu")
RULES: tuple[Condition, ...] = (
    device("cpu", "cuda"), dtypes("float16", "bfloat16", "float32"),
    when(device("cuda"), at_least("head_dim", 16)), when(device("cuda"), at_least("head_dim_v", 16)),
    at_least("batch", 1, Code.EMPTY_INPUT), at_least("seq_q", 1, Code.EMPTY_INPUT),
    at_least("seq_k", 1, Code.EMPTY_INPUT), at_least("kv_heads", 1, Code.EMPTY_INPUT),
    absent("attn_mask.dtype", Code.MASK_UNSUPPORTED), equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
    differs("alibi_slopes.requires_grad", True, Code.BACKWARD_UNSUPPORTED),
    when(ON_CPU, off("return_lse", Code.LSE_UNSUPPORTED)), when(ON_CPU, off("grad", Code.BACKWARD_UNSUPPORTED)),
    when(ON_CPU, cpu_isa("avx2")),             # Inductor compiles it for no other CPU
)

KERNELS = (
    Kernel("torch.flex", attention, _flex, prior=5.0, overhead_us=40.0, variants=("bhsd",), jit=True, traceable=False,
           requires=RULES),
)
