"""FlashAttention 2, 3 and 4. Layout (batch, seq, heads, dim); causality and windows measure from the bottom right.

Version 3 is built for Hopper. Version 4 compiles on first use and is made for Hopper and Blackwell. On Hopper it does
not split the keys of one query over the device, so long decoding is slow. A log-sum-exp over no key is +inf here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import OP as attention
from ..ops.paged_attention import OP as paged_attention
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


def _cache(*names: str) -> tuple[Condition, ...]:
    return (*(when(equals("dtype", d), one_of(f"{n}.dtype", d, code=Code.KV_CACHE_DTYPE_MISMATCH))
              for n in names for d in ("float16", "bfloat16")),
            *(unit_stride(n, repair=False) for n in names), *(aligned(n, 16) for n in names))


PAGES: tuple[Condition, ...] = (
    device("cuda"), vendor("nvidia"), dtypes("float16", "bfloat16"), multiple_of("head_dim", 8),
    at_most("head_dim", 256), equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID), plain_tensors(),
    at_least("batch", 1, Code.EMPTY_INPUT), at_least("tokens", 1, Code.EMPTY_INPUT),
    at_least("pages", 1, Code.EMPTY_INPUT), at_least("max_pages", 1, Code.EMPTY_INPUT),
    *_cache("key_cache", "value_cache"), absent("key_scale.dtype", Code.SCALE_LAYOUT_MISMATCH),
    absent("value_scale.dtype", Code.SCALE_LAYOUT_MISMATCH), unit_stride("query"), aligned("query", 16),
    dtypes("int32", of="block_table.dtype"), dtypes("int32", of="context_lens.dtype"),
    one_of("cu_seqlens_q.dtype", None, "int32", code=Code.DTYPE_UNSUPPORTED), unit_stride("block_table"),
    any_of(absent("cu_seqlens_q.dtype"), present("max_seqlen_q", Code.MISSING_METADATA)))
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


# Over a paged cache: one query for each sequence, or any number where the library takes packed queries.

def _v2_paged() -> Callable[..., Any]:
    from flash_attn import flash_attn_with_kvcache

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor,
            is_causal: bool = False, scale: float | None = None, *, window_left: int = -1, softcap: float = 0.0,
            max_seqlen_q: int | None = None, return_lse: bool = False) -> Any:
        result = flash_attn_with_kvcache(
            query[:, None], key_cache, value_cache, cache_seqlens=context_lens, block_table=block_table,
            softmax_scale=scale, causal=is_causal, window_size=(window_left, -1), softcap=softcap,
            return_softmax_lse=return_lse)
        return (result[0][:, 0], _none_seen(result[1][..., 0])) if return_lse else result[:, 0]

    return run


def _v3_paged() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_with_kvcache

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor,
            cu_seqlens_q: Tensor | None = None, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, softcap: float = 0.0, max_seqlen_q: int | None = None,
            return_lse: bool = False) -> Any:
        starts = _one_each(context_lens) if cu_seqlens_q is None else cu_seqlens_q
        result = flash_attn_with_kvcache(
            query, key_cache, value_cache, cache_seqlens=context_lens, page_table=block_table, cu_seqlens_q=starts,
            max_seqlen_q=1 if cu_seqlens_q is None else max_seqlen_q, softmax_scale=scale, causal=is_causal,
            window_size=(window_left, -1), softcap=softcap, return_softmax_lse=return_lse)
        return (result[0], _none_seen(result[1].t())) if return_lse else _picked(result, False)

    return run


def _v4_paged() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor,
            cu_seqlens_q: Tensor | None = None, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, softcap: float = 0.0, max_seqlen_q: int | None = None,
            return_lse: bool = False) -> Any:
        starts = _one_each(context_lens) if cu_seqlens_q is None else cu_seqlens_q
        result = flash_attn_varlen_func(
            query, key_cache, value_cache, cu_seqlens_q=starts, seqused_k=context_lens, page_table=block_table,
            max_seqlen_q=1 if cu_seqlens_q is None else max_seqlen_q, softmax_scale=scale, causal=is_causal,
            window_size=_open_window(window_left, -1), softcap=softcap, return_lse=return_lse)
        return (result[0], _none_seen(result[1].t())) if return_lse else _picked(result, False)

    return run


def _one_each(context_lens: Tensor) -> Tensor:
    return torch.arange(context_lens.shape[0] + 1, dtype=torch.int32, device=context_lens.device)


def _none_seen(lse: Tensor) -> Tensor:
    return torch.where(lse == torch.inf, -torch.inf, lse)


def _picked(result: Any, with_lse: bool) -> Any:
    if with_lse:
        return result[:2]
    return result[0] if isinstance(result, tuple) else result


def _open_window(left: int, right: int) -> tuple[int | None, int | None]:
    """Version 4 writes None where the others write -1."""
    return (None if left < 0 else left, None if right < 0 else right)


BSHD = ("bshd",)
NHD = ("NHD",)
# By a module that only version 2 has: version 4 brings a package of the same name.
_V2: dict[str, Any] = {"sdpa_backend": "FLASH_ATTENTION",
                       "package": "flash_attn.flash_attn_interface", "distribution": "flash-attn",
                       "version": ">=2.5,<3", "prior": 12.0, "overhead_us": 10.0, "traceable": False, "untested": True}
_V3: dict[str, Any] = {"sdpa_backend": "FLASH_ATTENTION",
                       "package": "flash_attn_interface", "distribution": "flash_attn_3", "prior": 20.0,
                       "overhead_us": 10.0, "traceable": False, "untested": True}
_V4: dict[str, Any] = {"sdpa_backend": "FLASH_ATTENTION",
                       "package": "flash_attn.cute", "distribution": "flash-attn-4", "prior": 22.0,
                       "overhead_us": 30.0, "traceable": False, "jit": True,
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
    Kernel("flash_attn.v2_paged", paged_attention, _v2_paged, variants=NHD, differentiable=False, **_V2, requires=(
        *PAGES, sm(at_least=80), absent("cu_seqlens_q.dtype", Code.SEQ_LEN_UNSUPPORTED),
        multiple_of("page_size", 256, Code.PAGE_SIZE_UNSUPPORTED))),
    Kernel("flash_attn.v3_paged", paged_attention, _v3_paged, variants=NHD, differentiable=False, **_V3, requires=(
        *PAGES, generations("hopper"))),
    Kernel("flash_attn.v4_paged", paged_attention, _v4_paged, variants=NHD, differentiable=False, **_V4, requires=(
        *PAGES, generations("hopper"), at_most("page_size", 32, Code.PAGE_SIZE_UNSUPPORTED)),
        note="larger pages it may load whole, and what lies beyond a sequence would spoil the result"),
)
