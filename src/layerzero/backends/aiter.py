"""AITER, AMD's own kernels for Instinct GPUs: attention by CK and assembly, norms. Layout (batch,
seq, heads, dim).

Written from its source at 0.1.20; it compiles a module on first use. Causality and windows are
aligned bottom-right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.add_rms_norm import OP as add_rms_norm
from ..ops.attention import OP as attention
from ..ops.rms_norm import OP as rms_norm
from ..ops.varlen_attention import OP as varlen_attention
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._sequences import POSITIVE_SCALE


def _attention() -> Callable[..., Any]:
    from aiter import flash_attn_func

    def run(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, alibi_slopes: Tensor | None = None,
            return_lse: bool = False) -> Any:
        result = flash_attn_func(
            query, key, value, dropout_p=dropout_p, softmax_scale=scale, causal=is_causal,
            window_size=(window_left, window_right, 0), alibi_slopes=alibi_slopes,
            deterministic=torch.are_deterministic_algorithms_enabled(), return_lse=return_lse)
        return result[:2] if return_lse else result

    return run


def _varlen() -> Callable[..., Any]:
    from aiter import flash_attn_varlen_func

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
            max_seqlen_q: int, max_seqlen_k: int, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, window_right: int = -1,
            softcap: float = 0.0, dropout_p: float = 0.0) -> Any:
        # a window that is longer than the longest keys is none to it
        return flash_attn_varlen_func(
            query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max(max_seqlen_q, max_seqlen_k), dropout_p=dropout_p, softmax_scale=scale,
            logits_soft_cap=softcap, causal=is_causal, window_size=(window_left, window_right, 0),
            deterministic=torch.are_deterministic_algorithms_enabled())

    return run


def _rms_norm() -> Callable[..., Any]:
    from aiter import rms_norm as norm

    def run(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    return run


def _add_rms_norm() -> Callable[..., Any]:
    from aiter import rmsnorm2d_fwd_with_add as norm

    def run(x: Tensor, residual: Tensor, weight: Tensor,
            eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        out, total = torch.empty_like(rows), torch.empty_like(rows)
        norm(out, rows, residual.reshape(rows.shape), total, weight, eps)
        return out.view(x.shape), total.view(x.shape)

    return run


HARDWARE: tuple[r.Condition, ...] = (
    r.device("cuda"), r.vendor("amd"), r.generations("cdna3", "cdna4"), r.plain_tensors())
HEADS: tuple[r.Condition, ...] = (
    r.dtypes("float16", "bfloat16"), r.multiple_of("head_dim", 8), r.at_most("head_dim", 256),
    r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID), r.at_least("batch", 1, Code.EMPTY_INPUT),
    r.at_least("seq_q", 1, Code.EMPTY_INPUT), r.at_least("seq_k", 1, Code.EMPTY_INPUT),
    r.at_least("kv_heads", 1, Code.EMPTY_INPUT), POSITIVE_SCALE, r.unit_stride("query"),
    r.unit_stride("key"), r.unit_stride("value"))
ALIGNED = r.one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)
ALIGNED_OR_SQUARE = r.any_of(r.equals("causal_offset", 0), ALIGNED)
# its check: the weight has the dtype of the input
NORM: tuple[r.Condition, ...] = (
    *HARDWARE, r.dtypes("float16", "bfloat16", "float32"), r.at_least("rows", 1, Code.EMPTY_INPUT),
    r.at_least("hidden", 1, Code.EMPTY_INPUT), r.contiguous("x"), r.contiguous("weight"),
    *(r.when(r.equals("dtype", d), r.one_of("weight.dtype", d, code=Code.DTYPE_UNSUPPORTED))
      for d in ("float16", "bfloat16", "float32")))
_LIBRARY: dict[str, Any] = {"package": "aiter", "distribution": "amd-aiter", "version": ">=0.1.9",
                            "traceable": False, "untested": True, "overhead_us": 10.0}

KERNELS = (
    Kernel("aiter.attention", attention, _attention, variants=("bshd",), prior=14.0, **_LIBRARY,
           requires=(
        *HARDWARE, *HEADS, r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
        r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
        r.any_of(r.off("is_causal"), r.equals("causal_offset", 0), ALIGNED),
        r.when(r.at_least("window_left", 0), ALIGNED_OR_SQUARE),
        r.when(r.at_least("window_right", 0), ALIGNED_OR_SQUARE),
        # a right limit of seq_k or more is none to it
        r.when(r.at_least("window_right", 0), r.any_of(
            r.on("is_causal"), r.at_least("causal_offset", 0, Code.WINDOW_UNSUPPORTED))),
        r.one_of("alibi_slopes.dtype", None, "float32", code=Code.ALIBI_UNSUPPORTED),
        r.differs("alibi_slopes.requires_grad", True, Code.BACKWARD_UNSUPPORTED),
        r.when(r.present("alibi_slopes.dtype"), ALIGNED_OR_SQUARE),
        # a row that sees no key: its log-sum-exp is not documented
        r.any_of(r.off("return_lse"), r.at_least("causal_offset", 0, Code.LSE_UNSUPPORTED)),
        r.any_of(r.off("return_lse"), r.off("grad", Code.BACKWARD_UNSUPPORTED)))),
    Kernel("aiter.varlen", varlen_attention, _varlen, prior=14.0, **_LIBRARY, requires=(
        *HARDWARE, *HEADS, r.any_of(r.off("is_causal"), ALIGNED),
        r.when(r.at_least("window_left", 0), ALIGNED),
        r.when(r.at_least("window_right", 0), ALIGNED),
        r.dtypes("int32", of="cu_seqlens_q.dtype"), r.dtypes("int32", of="cu_seqlens_k.dtype"),
        r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
        r.any_of(r.off("grad"), r.equals("softcap", 0.0, Code.BACKWARD_UNSUPPORTED)),
        r.off("return_lse", Code.LSE_UNSUPPORTED))),
    Kernel("aiter.rms_norm", rms_norm, _rms_norm, prior=6.0, differentiable=False, **_LIBRARY,
           requires=(*NORM, r.equals("offset", 0.0))),
    Kernel("aiter.add_rms_norm", add_rms_norm, _add_rms_norm, prior=6.0, differentiable=False,
           **_LIBRARY, less_work="one pass for sum and norm",
           requires=(*NORM, r.contiguous("residual"))),
)
