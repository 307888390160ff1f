"""Packed sequences by torch: varlen attention, the aten entry below it, one call per sequence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.formulas.common import attend, position_terms
from ..ops.varlen_attention import OP as varlen_attention
from ..ops.varlen_attention import read_starts
from ..spec import rules as r
from ..spec.kernel import SDPA, Kernel
from ..spec.reason import Code
from ._pages import empty_result
from ._sequences import (
    EFFICIENT_DIM_ON_CUDA,
    HEADS_OF_A_LAUNCH,
    POSITIVE_SCALE,
    attend_rows,
    longest_query,
    sdpa,
)

NO_ALIBI = r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED)
NO_SOFTCAP = r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED)
# FlashAttention is aligned bottom-right, and lengths are only known on the device.
ALIGNED = r.one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)
BOTTOM_RIGHT: tuple[r.Condition, ...] = (
    r.any_of(r.off("is_causal"), ALIGNED), r.when(r.at_least("window_left", 0), ALIGNED),
    r.when(r.at_least("window_right", 0), ALIGNED))
SAME_HEAD_DIM = r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID)
# CUDA kernels load 16 bytes at a time: unaligned, cuDNN gives wrong results, flash crashes.
ON_16_BYTES = (r.aligned("query", 16), r.aligned("key", 16), r.aligned("value", 16))
# no gradient flows through flash's log-sum-exp
NO_GRAD_OF_LSE = r.any_of(r.off("return_lse"), r.off("grad", Code.BACKWARD_UNSUPPORTED))
FLASH: tuple[r.Condition, ...] = (
    r.device("cuda"), r.vendor("nvidia"), r.sm(at_least=80), r.sm(below=122),
    r.dtypes("float16", "bfloat16"), r.multiple_of("head_dim", 8), r.at_most("head_dim", 256),
    SAME_HEAD_DIM, POSITIVE_SCALE, r.at_least("tokens_q", 1, Code.EMPTY_INPUT),
    r.at_least("tokens_k", 1, Code.EMPTY_INPUT), r.at_least("kv_heads", 1, Code.EMPTY_INPUT),
    r.at_least("batch", 1, Code.EMPTY_INPUT),
    r.at_most("batch", 65535, Code.CUDA_BLOCK_LIMIT_EXCEEDED),
    r.unit_stride("query"), r.unit_stride("key"), r.unit_stride("value"), *ON_16_BYTES,
    r.dtypes("int32", of="cu_seqlens_q.dtype"), r.dtypes("int32", of="cu_seqlens_k.dtype"),
    r.contiguous("cu_seqlens_q"), r.contiguous("cu_seqlens_k"),
    NO_SOFTCAP, NO_ALIBI, *BOTTOM_RIGHT)


def _varlen() -> Callable[..., Any]:
    """Calls torch.nn.attention.varlen, whose later versions have a flag for grouped heads."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    missing = [name for name in ("scale", "window_size") if name not in known]
    if missing:
        raise ImportError(
            f"{' and '.join(missing)} in torch.nn.attention.varlen_attn (torch "
            f"{torch.__version__})")
    gqa_option = {"enable_gqa": True} if "enable_gqa" in known else {}

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
            max_seqlen_q: int, max_seqlen_k: int, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, window_right: int = -1) -> Tensor:
        window = (window_left, 0 if is_causal else window_right)
        max_seqlen_q = longest_query(query, cu_seqlens_q, max_seqlen_q)
        # a window that is longer than the longest keys is none to it
        return varlen_attn(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                           max(max_seqlen_q, max_seqlen_k),  # type: ignore[return-value]
                           scale=scale, window_size=window, **gqa_option)  # type: ignore[arg-type]

    return run


def _varlen_flash() -> Callable[..., Any]:
    """Returns the entry below varlen_attn, whose Python overhead exceeds a decode step."""
    flash = torch.ops.aten._flash_attention_forward

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
            max_seqlen_q: int, max_seqlen_k: int, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, dropout_p: float = 0.0, return_lse: bool = False) -> Any:
        max_seqlen_q = longest_query(query, cu_seqlens_q, max_seqlen_q)
        # a window that is longer than the longest keys is none to it
        out, lse = flash(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                         max(max_seqlen_q, max_seqlen_k), dropout_p, is_causal, False, scale=scale,
                         window_size_left=window_left, window_size_right=window_right)[:2]
        # (heads, tokens); a row without a key has +inf
        return (out, torch.where(lse == math.inf, -math.inf, lse).t()) if return_lse else out

    return run


def _per_sequence() -> Callable[..., Any]:
    return per_sequence


def per_sequence(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    is_causal: bool = False, scale: float | None = None, *, causal_align: str | None = None,
    window_left: int = -1, window_right: int = -1, dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None, return_lse: bool = False,
) -> Any:
    """Calls scaled_dot_product_attention per sequence; a mask only where is_causal will not do."""
    starts_q = read_starts(cu_seqlens_q, query, "cu_seqlens_q")
    starts_k = read_starts(cu_seqlens_k, key, "cu_seqlens_k")
    windowed = window_left >= 0 or window_right >= 0 or alibi_slopes is not None
    empty, no_lse = empty_result(query[:0], value.shape[2])
    parts, lses = [empty], [no_lse]
    for first_q, last_q, first_k, last_k in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        rows = query[first_q:last_q], key[first_k:last_k], value[first_k:last_k]
        # where there is nothing to compute torch's attention may divide by zero, which is fatal
        if first_q == last_q:
            continue
        if return_lse or first_k == last_k:
            out, lse = (attend_rows(*rows, is_causal, scale, causal_align, window_left,
                                    window_right, alibi_slopes, 0.0, True)
                        if last_k > first_k else _without_keys(*rows))
            parts.append(out)
            lses.append(lse)                   # type: ignore[arg-type]
            continue
        q, k, v = (t.transpose(0, 1)[None] for t in rows)
        shifted = is_causal and causal_align == "bottom_right" and q.shape[2] != k.shape[2]
        mask = None
        if windowed or shifted:
            bias, hidden = position_terms(q.shape[2], k.shape[2], is_causal, causal_align,
                                          window_left, window_right, alibi_slopes, query.device)
            # additive: cuDNN gives the mean, not zero, for a row hidden by a bool mask
            if hidden is not None:
                mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, -math.inf)
            if bias is not None:
                mask = bias.to(query.dtype) if mask is None else bias.to(query.dtype) + mask
        out = sdpa(q, k, v, mask, dropout_p, is_causal and mask is None, scale=scale,
                   enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return (torch.cat(parts), torch.cat(lses)) if return_lse else torch.cat(parts)


def _without_keys(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns zeros and -inf that have gradients, which are zeros too."""
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    out, lse = attend(q, k, v, None, 0.0, False, None, None, -1, -1, None, 0.0)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


ONE_LAUNCH = "one launch for all sequences, and no length is read on the host"

KERNELS = (
    Kernel("torch.varlen", varlen_attention, _varlen, sdpa_backend="FLASH_ATTENTION",
           torch=">=2.11", prior=12.0, overhead_us=20.0,
           less_work=ONE_LAUNCH, requires=(
        *FLASH, r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
        r.off("return_lse", Code.LSE_UNSUPPORTED)),
        note="before torch 2.11 it had neither scale nor window"),
    Kernel("torch.varlen_flash", varlen_attention, _varlen_flash, sdpa_backend="FLASH_ATTENTION",
           prior=12.0, overhead_us=2.0,
           less_work=ONE_LAUNCH, requires=(*FLASH, NO_GRAD_OF_LSE)),
    Kernel("torch.per_sequence", varlen_attention, _per_sequence, sdpa_backend=SDPA,
           prior=3.0, overhead_us=50.0, baseline=True,
           graph_safe=False, traceable=False, note="reads the lengths on the host",
           requires=(r.at_least("kv_heads", 1, Code.EMPTY_INPUT), NO_SOFTCAP, HEADS_OF_A_LAUNCH,
                     *EFFICIENT_DIM_ON_CUDA,
                     r.differs("alibi_slopes.requires_grad", True, Code.BACKWARD_UNSUPPORTED),
                     r.when(r.on("return_lse"),
                            r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED)),
                     *(r.when(r.device("cuda"), r.when(r.multiple_of("head_dim", 8), rule))
                       for rule in ON_16_BYTES))),
)
