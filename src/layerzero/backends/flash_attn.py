"""FlashAttention 2, 3 and 4. Layout (batch, seq, heads, dim); causality and windows are aligned
bottom-right.

Version 3 is for Hopper. Version 4 is for Hopper and Blackwell and compiles on first use. On Hopper
it does not split the keys of a query over the device, so decoding with a long context is slow. Its
log-sum-exp over no key is +inf.
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
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._pages import half_cache_rules
from ._sequences import POSITIVE_SCALE, longest_query

NO_DROPOUT = r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED)
NO_ALIBI = r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED)
# A row without keys gets +inf, where the contract has -inf; lse has no gradient.
LSE: tuple[r.Condition, ...] = (
    r.any_of(r.off("return_lse"), r.at_least("causal_offset", 0, Code.LSE_UNSUPPORTED)),
    r.any_of(r.off("return_lse"), r.off("grad", Code.BACKWARD_UNSUPPORTED)))


def _common(vendor: str = "nvidia") -> tuple[r.Condition, ...]:
    """Returns the requirements of all three versions."""
    return (r.device("cuda"), r.vendor(vendor), r.dtypes("float16", "bfloat16"),
            r.multiple_of("head_dim", 8), r.at_most("head_dim", 256),
            r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
            r.at_least("seq_q", 1, Code.EMPTY_INPUT),
            r.at_least("seq_k", 1, Code.EMPTY_INPUT), r.at_least("batch", 1, Code.EMPTY_INPUT),
            r.at_least("kv_heads", 1, Code.EMPTY_INPUT), POSITIVE_SCALE, r.unit_stride("query"),
            r.unit_stride("key"), r.unit_stride("value"),
            r.aligned("query", 16), r.aligned("key", 16), r.aligned("value", 16), r.plain_tensors())


PAGED: tuple[r.Condition, ...] = (
    r.device("cuda"), r.vendor("nvidia"), r.dtypes("float16", "bfloat16"),
    r.multiple_of("head_dim", 8), r.at_most("head_dim", 256),
    r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID), POSITIVE_SCALE, r.plain_tensors(),
    r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("tokens", 1, Code.EMPTY_INPUT),
    r.at_least("pages", 1, Code.EMPTY_INPUT), r.at_least("max_pages", 1, Code.EMPTY_INPUT),
    *half_cache_rules("key_cache", "value_cache"),
    r.absent("key_scale.dtype", Code.SCALE_LAYOUT_MISMATCH),
    r.absent("value_scale.dtype", Code.SCALE_LAYOUT_MISMATCH), r.unit_stride("query"),
    r.aligned("query", 16), r.dtypes("int32", of="block_table.dtype"),
    r.dtypes("int32", of="context_lens.dtype"),
    r.one_of("cu_seqlens_q.dtype", None, "int32", code=Code.DTYPE_UNSUPPORTED),
    r.unit_stride("block_table"),
    r.any_of(r.absent("cu_seqlens_q.dtype"), r.present("max_seqlen_q", Code.MISSING_METADATA)))
ALIGNED = r.one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)
ALIGNED_OR_SQUARE = r.any_of(r.equals("causal_offset", 0), ALIGNED)
_DENSE: tuple[r.Condition, ...] = (
    r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
    r.any_of(r.off("is_causal"), r.equals("causal_offset", 0), ALIGNED),
    r.when(r.at_least("window_left", 0), ALIGNED_OR_SQUARE),
    r.when(r.at_least("window_right", 0), ALIGNED_OR_SQUARE), *LSE)
_PACKED: tuple[r.Condition, ...] = (
    r.any_of(r.off("is_causal"), ALIGNED),
    r.when(r.at_least("window_left", 0), ALIGNED),
    r.when(r.at_least("window_right", 0), ALIGNED), r.dtypes("int32", of="cu_seqlens_q.dtype"),
    r.dtypes("int32", of="cu_seqlens_k.dtype"), NO_ALIBI,
    r.off("return_lse", Code.LSE_UNSUPPORTED))
DENSE, PACKED = (*_common(), *_DENSE), (*_common(), *_PACKED)
# Version 2 takes a right limit of seq_k or more for none, and none beside a left one for seq_k.
KEYS_FOR_WINDOW: tuple[r.Condition, ...] = tuple(
    r.when(r.at_least(side, 0), r.any_of(
        r.on("is_causal"), r.at_least("causal_offset", 0, Code.WINDOW_UNSUPPORTED)))
    for side in ("window_left", "window_right"))
# AMD's build, by CK: it takes a softcap and ignores it.
CK: tuple[r.Condition, ...] = (
    *_common("amd"), r.generations("cdna2", "cdna3", "cdna4"),
    r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED))
V2: tuple[r.Condition, ...] = (
    r.sm(at_least=80),
    r.any_of(r.equals("softcap", 0.0), r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED)))
V3: tuple[r.Condition, ...] = (r.generations("hopper"), NO_DROPOUT)
V4: tuple[r.Condition, ...] = (
    r.generations("hopper", "blackwell"), NO_DROPOUT,
    r.any_of(r.generations("hopper"), r.at_most("head_dim", 128),
             r.equals("head_dim", 256, Code.HEAD_DIM_INVALID)),
    r.any_of(r.off("grad"), r.equals("softcap", 0.0, Code.BACKWARD_UNSUPPORTED)))


def _v2() -> Callable[..., Any]:
    from flash_attn import flash_attn_func

    def run(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, alibi_slopes: Tensor | None = None, softcap: float = 0.0,
            return_lse: bool = False) -> Any:
        result = flash_attn_func(
            query, key, value, dropout_p=dropout_p, softmax_scale=scale, causal=is_causal,
            window_size=(window_left, window_right), softcap=softcap, alibi_slopes=alibi_slopes,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            return_attn_probs=return_lse)
        return result[:2] if return_lse else result

    return run


def _v2_varlen() -> Callable[..., Any]:
    from flash_attn import flash_attn_varlen_func

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
            max_seqlen_q: int, max_seqlen_k: int, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0, dropout_p: float = 0.0) -> Any:
        max_seqlen_q = longest_query(query, cu_seqlens_q, max_seqlen_q)
        # a window that is longer than the longest keys is none to it
        return flash_attn_varlen_func(
            query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max(max_seqlen_q, max_seqlen_k), dropout_p=dropout_p, softmax_scale=scale,
            causal=is_causal, window_size=(window_left, window_right), softcap=softcap,
            deterministic=torch.are_deterministic_algorithms_enabled())

    return run


def _v3() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_func

    # Early builds always return the log-sum-exp, later ones on request.
    parameters = inspect.signature(flash_attn_func).parameters
    lse_option = {"return_attn_probs": True} if "return_attn_probs" in parameters else {}

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, window_right: int = -1,
            softcap: float = 0.0, return_lse: bool = False) -> Any:
        result = flash_attn_func(
            query, key, value, softmax_scale=scale, causal=is_causal,
            window_size=(window_left, window_right), softcap=softcap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **(lse_option if return_lse else {}))
        return _select_results(result, return_lse)

    return run


def _v3_varlen() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_varlen_func

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
            max_seqlen_q: int, max_seqlen_k: int, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0) -> Any:
        return _select_results(flash_attn_varlen_func(
            query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            softmax_scale=scale, causal=is_causal, window_size=(window_left, window_right),
            softcap=softcap, deterministic=torch.are_deterministic_algorithms_enabled()), False)

    return run


def _v4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func

    lse_option = ({"return_lse": True}
                  if "return_lse" in inspect.signature(flash_attn_func).parameters else {})

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, window_right: int = -1,
            softcap: float = 0.0, return_lse: bool = False) -> Any:
        result = flash_attn_func(query, key, value, softmax_scale=scale, causal=is_causal,
                                 window_size=_open_window(window_left, window_right),
                                 softcap=softcap, **(lse_option if return_lse else {}))
        return _select_results(result, return_lse)

    return run


def _v4_varlen() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
            max_seqlen_q: int, max_seqlen_k: int, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0) -> Any:
        return _select_results(flash_attn_varlen_func(
            query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=scale,
            causal=is_causal, window_size=_open_window(window_left, window_right), softcap=softcap),
                               False)

    return run


# Paged caches: one query per sequence, or any number if the library takes packed queries.

def _v2_paged() -> Callable[..., Any]:
    from flash_attn import flash_attn_with_kvcache

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, softcap: float = 0.0, max_seqlen_q: int | None = None,
            return_lse: bool = False) -> Any:
        result = flash_attn_with_kvcache(
            query[:, None], key_cache, value_cache, cache_seqlens=context_lens,
            block_table=block_table, softmax_scale=scale, causal=is_causal,
            window_size=(window_left, -1), softcap=softcap, return_softmax_lse=return_lse)
        return (result[0][:, 0], _fix_empty_lse(result[1][..., 0])) if return_lse else result[:, 0]

    return run


def _v3_paged() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_with_kvcache

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, softcap: float = 0.0,
            max_seqlen_q: int | None = None, return_lse: bool = False) -> Any:
        starts = _one_query_each(context_lens) if cu_seqlens_q is None else cu_seqlens_q
        result = flash_attn_with_kvcache(
            query, key_cache, value_cache, cache_seqlens=context_lens, page_table=block_table,
            cu_seqlens_q=starts, max_seqlen_q=1 if cu_seqlens_q is None else max_seqlen_q,
            softmax_scale=scale, causal=is_causal, window_size=(window_left, -1), softcap=softcap,
            return_softmax_lse=return_lse)
        return ((result[0], _fix_empty_lse(result[1].t())) if return_lse
                else _select_results(result, False))

    return run


def _v4_paged() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, softcap: float = 0.0,
            max_seqlen_q: int | None = None, return_lse: bool = False) -> Any:
        starts = _one_query_each(context_lens) if cu_seqlens_q is None else cu_seqlens_q
        result = flash_attn_varlen_func(
            query, key_cache, value_cache, cu_seqlens_q=starts, seqused_k=context_lens,
            page_table=block_table, max_seqlen_q=1 if cu_seqlens_q is None else max_seqlen_q,
            softmax_scale=scale, causal=is_causal, window_size=_open_window(window_left, -1),
            softcap=softcap, return_lse=return_lse)
        return ((result[0], _fix_empty_lse(result[1].t())) if return_lse
                else _select_results(result, False))

    return run


def _one_query_each(context_lens: Tensor) -> Tensor:
    return torch.arange(context_lens.shape[0] + 1, dtype=torch.int32, device=context_lens.device)


def _fix_empty_lse(lse: Tensor) -> Tensor:
    return torch.where(lse == torch.inf, -torch.inf, lse)


def _select_results(result: Any, with_lse: bool) -> Any:
    if with_lse:
        return result[:2]
    return result[0] if isinstance(result, tuple) else result


def _open_window(left: int, right: int) -> tuple[int | None, int | None]:
    """Returns the window as version 4 takes it, with None for -1."""
    return (None if left < 0 else left, None if right < 0 else right)


BSHD = ("bshd",)
NHD = ("NHD",)
# Found by a module that only version 2 has: version 4 has a package of the same name.
_V2: dict[str, Any] = {"sdpa_backend": "FLASH_ATTENTION",
                       "package": "flash_attn.flash_attn_interface", "distribution": "flash-attn",
                       "version": ">=2.5,<3", "prior": 12.0, "overhead_us": 10.0,
                       "traceable": False, "untested": True}
_V3: dict[str, Any] = {"sdpa_backend": "FLASH_ATTENTION",
                       "package": "flash_attn_interface", "distribution": "flash_attn_3",
                       "prior": 20.0, "overhead_us": 10.0, "traceable": False, "untested": True}
_V4: dict[str, Any] = {"sdpa_backend": "FLASH_ATTENTION",
                       "package": "flash_attn.cute", "distribution": "flash-attn-4", "prior": 22.0,
                       "overhead_us": 30.0, "traceable": False, "jit": True,
                       "deterministic_backward": False}

KERNELS = (
    Kernel("flash_attn.v2", attention, _v2, variants=BSHD, **_V2, requires=(
        *DENSE, *V2, *KEYS_FOR_WINDOW,
        r.one_of("alibi_slopes.dtype", None, "float32", code=Code.ALIBI_UNSUPPORTED),
        r.differs("alibi_slopes.requires_grad", True, Code.BACKWARD_UNSUPPORTED),
        r.when(r.present("alibi_slopes.dtype"), ALIGNED_OR_SQUARE))),
    Kernel("flash_attn.v2_varlen", varlen_attention, _v2_varlen, **_V2, requires=(*PACKED, *V2)),
    Kernel("flash_attn.v2_ck", attention, _v2, variants=BSHD, **_V2, requires=(
        *CK, *_DENSE, *KEYS_FOR_WINDOW,
        r.one_of("alibi_slopes.dtype", None, "float32", code=Code.ALIBI_UNSUPPORTED),
        r.differs("alibi_slopes.requires_grad", True, Code.BACKWARD_UNSUPPORTED),
        r.when(r.present("alibi_slopes.dtype"), ALIGNED_OR_SQUARE))),
    Kernel("flash_attn.v2_ck_varlen", varlen_attention, _v2_varlen, **_V2,
           requires=(*CK, *_PACKED)),
    Kernel("flash_attn.v3", attention, _v3, variants=BSHD, **_V3, requires=(*DENSE, *V3, NO_ALIBI)),
    Kernel("flash_attn.v3_varlen", varlen_attention, _v3_varlen, **_V3, requires=(*PACKED, *V3)),
    Kernel("flash_attn.v4", attention, _v4, variants=BSHD, **_V4, requires=(*DENSE, *V4, NO_ALIBI)),
    Kernel("flash_attn.v4_varlen", varlen_attention, _v4_varlen, **_V4, requires=(*PACKED, *V4)),
    Kernel("flash_attn.v2_paged", paged_attention, _v2_paged, variants=NHD, differentiable=False,
           **_V2, requires=(
        *PAGED, r.sm(at_least=80), r.absent("cu_seqlens_q.dtype", Code.SEQ_LEN_UNSUPPORTED),
        r.multiple_of("page_size", 256, Code.PAGE_SIZE_UNSUPPORTED))),
    Kernel("flash_attn.v3_paged", paged_attention, _v3_paged, variants=NHD, differentiable=False,
           **_V3, requires=(
        *PAGED, r.generations("hopper"))),
    Kernel("flash_attn.v4_paged", paged_attention, _v4_paged, variants=NHD, differentiable=False,
           **_V4, requires=(
        *PAGED, r.generations("hopper"), r.at_most("page_size", 32, Code.PAGE_SIZE_UNSUPPORTED)),
        note="larger pages it may load whole, and what lies beyond a sequence would spoil the "
             "result"),
)
