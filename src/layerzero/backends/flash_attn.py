"""FlashAttention 2, 3 and 4. Layout (batch, seq, heads, dim); causality and windows measure from the bottom right.

Version 3 is built for Hopper. Version 4 compiles on first use and is made for Hopper and Blackwell.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import OP as attention
from ..ops.varlen_attention import OP as varlen_attention
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.reason import Code
from ..spec.rules import (
    Condition,
    absent,
    aligned,
    any_of,
    at_least,
    at_most,
    device,
    dtypes,
    equals,
    generations,
    multiple_of,
    off,
    one_of,
    plain_tensors,
    present,
    sm,
    unit_stride,
    vendor,
    when,
)

NO_DROPOUT = equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED)
NO_ALIBI = absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED)
# A row that sees no key gets +inf here and -inf in the contract; the log-sum-exp carries no gradient.
LSE: tuple[Condition, ...] = (
    any_of(off("return_lse"), at_least("causal_offset", 0, Code.LSE_UNSUPPORTED)),
    any_of(off("return_lse"), off("grad", Code.BACKWARD_UNSUPPORTED)))


def _common(op: Op) -> tuple[Condition, ...]:
    """What all three ask for."""
    return (device("cuda"), vendor("nvidia"), dtypes("float16", "bfloat16"), multiple_of("head_dim", 8),
            at_most("head_dim", 256), equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
            at_least("seq_q", 1, Code.EMPTY_INPUT),
            at_least("seq_k", 1, Code.EMPTY_INPUT), at_least("batch", 1, Code.EMPTY_INPUT),
            at_least("kv_heads", 1, Code.EMPTY_INPUT), unit_stride("query"), unit_stride("key"), unit_stride("value"),
            aligned("query", 16), aligned("key", 16), aligned("value", 16), plain_tensors())


ALIGNED = one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)
ALIGNED_OR_SQUARE = any_of(equals("causal_offset", 0), ALIGNED)
DENSE: tuple[Condition, ...] = (
    *_common(attention), absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
    any_of(off("is_causal"), equals("causal_offset", 0), ALIGNED), when(at_least("window_left", 0), ALIGNED_OR_SQUARE),
    when(at_least("window_right", 0), ALIGNED_OR_SQUARE), *LSE)
PACKED: tuple[Condition, ...] = (
    *_common(varlen_attention), any_of(off("is_causal"), ALIGNED), when(at_least("window_left", 0), ALIGNED),
    when(at_least("window_right", 0), ALIGNED), dtypes("int32", of="cu_seqlens_q.dtype"),
    dtypes("int32", of="cu_seqlens_k.dtype"))
V2: tuple[Condition, ...] = (
    sm(at_least=80), any_of(equals("softcap", 0.0), equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED)))
V3: tuple[Condition, ...] = (generations("hopper"), NO_DROPOUT)
V4: tuple[Condition, ...] = (
    generations("hopper", "blackwell"), NO_DROPOUT,
    any_of(generations("hopper"), at_most("head_dim", 128), equals("head_dim", 256, Code.HEAD_DIM_INVALID)),
    any_of(off("grad"), equals("softcap", 0.0, Code.BACKWARD_UNSUPPORTED)))


def _v2() -> Callable[..., Any]:
    from flash_attn import flash_attn_func

    def run(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, window_right: int = -1,
            alibi_slopes: Tensor | None = None, softcap: float = 0.0, return_lse: bool = False) -> Any:
        result = flash_attn_func(
            query, key, value, dropout_p=dropout_p, softmax_scale=scale, causal=is_causal,
            window_size=(window_left, window_right), softcap=softcap, alibi_slopes=alibi_slopes,
            deterministic=torch.are_deterministic_algorithms_enabled(), return_attn_probs=return_lse)
        return result[:2] if return_lse else result

    return run


def _v2_varlen() -> Callable[..., Any]:
    from flash_attn import flash_attn_varlen_func

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
            max_seqlen_k: int, is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0, dropout_p: float = 0.0) -> Any:
        return flash_attn_varlen_func(
            query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=dropout_p,
            softmax_scale=scale, causal=is_causal, window_size=(window_left, window_right), softcap=softcap,
            deterministic=torch.are_deterministic_algorithms_enabled())

    return run


def _v3() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_func

    # Early builds return the log-sum-exp always, later ones when asked.
    ask = {"return_attn_probs": True} if "return_attn_probs" in inspect.signature(flash_attn_func).parameters else {}

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, window_right: int = -1, softcap: float = 0.0, return_lse: bool = False) -> Any:
        result = flash_attn_func(
            query, key, value, softmax_scale=scale, causal=is_causal, window_size=(window_left, window_right),
            softcap=softcap, deterministic=torch.are_deterministic_algorithms_enabled(),
            **(ask if return_lse else {}))
        return _picked(result, return_lse)

    return run


def _v3_varlen() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_varlen_func

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
            max_seqlen_k: int, is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0) -> Any:
        return _picked(flash_attn_varlen_func(
            query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=scale,
            causal=is_causal, window_size=(window_left, window_right), softcap=softcap,
            deterministic=torch.are_deterministic_algorithms_enabled()), False)

    return run


def _v4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func

    ask = {"return_lse": True} if "return_lse" in inspect.signature(flash_attn_func).parameters else {}

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, window_right: int = -1, softcap: float = 0.0, return_lse: bool = False) -> Any:
        result = flash_attn_func(query, key, value, softmax_scale=scale, causal=is_causal,
                                 window_size=_open_window(window_left, window_right), softcap=softcap,
                                 **(ask if return_lse else {}))
        return _picked(result, return_lse)

    return run


def _v4_varlen() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
            max_seqlen_k: int, is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0) -> Any:
        return _picked(flash_attn_varlen_func(
            query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, softmax_scale=scale, causal=is_causal,
            window_size=_open_window(window_left, window_right), softcap=softcap), False)

    return run


def _picked(result: Any, with_lse: bool) -> Any:
    if with_lse:
        return result[:2]
    return result[0] if isinstance(result, tuple) else result


def _open_window(left: int, right: int) -> tuple[int | None, int | None]:
    """Version 4 writes None where the others write -1."""
    return (None if left < 0 else left, None if right < 0 else right)


BSHD = ("bshd",)
_V2: dict[str, Any] = {"package": "flash_attn", "version": ">=2.5,<3", "prior": 12.0, "overhead_us": 10.0,
                       "traceable": False, "untested": True}
_V3: dict[str, Any] = {"package": "flash_attn_interface", "distribution": "flash_attn_3", "prior": 20.0,
                       "overhead_us": 10.0, "traceable": False, "untested": True}
_V4: dict[str, Any] = {"package": "flash_attn.cute", "distribution": "flash-attn-4", "prior": 22.0,
                       "overhead_us": 30.0, "traceable": False, "untested": True, "jit": True,
                       "deterministic_backward": False}

KERNELS = (
    Kernel("flash_attn.v2", attention, _v2, variants=BSHD, **_V2, requires=(
        *DENSE, *V2, one_of("alibi_slopes.dtype", None, "float32", code=Code.ALIBI_UNSUPPORTED),
        when(present("alibi_slopes.dtype"), ALIGNED_OR_SQUARE))),
    Kernel("flash_attn.v2_varlen", varlen_attention, _v2_varlen, **_V2, requires=(*PACKED, *V2)),
    Kernel("flash_attn.v3", attention, _v3, variants=BSHD, **_V3, requires=(*DENSE, *V3, NO_ALIBI)),
    Kernel("flash_attn.v3_varlen", varlen_attention, _v3_varlen, **_V3, requires=(*PACKED, *V3)),
    Kernel("flash_attn.v4", attention, _v4, variants=BSHD, **_V4, requires=(*DENSE, *V4, NO_ALIBI)),
    Kernel("flash_attn.v4_varlen", varlen_attention, _v4_varlen, **_V4, requires=(*PACKED, *V4)),
)
