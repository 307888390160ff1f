"""Intel GPUs: torch's fused attention, which is oneDNN's, and the norms of Intel's extension.

Rules from torch's mkldnn/xpu/Attention.cpp at 2.11 and from the extension's source at 2.8.10+xpu,
its last release, which works with torch 2.8 only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import OP as attention
from ..ops.rms_norm import OP as rms_norm
from ..spec import rules as r
from ..spec.kernel import Const, Direct, Kernel, direct
from ..spec.reason import Code


def _attention() -> Direct:
    """Returns the entry that torch's own choice ends in: forward only, fewer KV heads allowed."""
    return direct(torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default, "query",
                  "key", "value", "attn_mask", Const(0.0), "is_causal", Const(False),
                  scale="scale", item=0)


def _rms_norm() -> Callable[..., Any]:
    importlib.import_module("intel_extension_for_pytorch")     # defines torch.ops.torch_ipex
    norm = torch.ops.torch_ipex.rms_norm

    def run(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        out: Tensor = norm(x, [x.shape[-1]], weight, eps)[0]
        return out

    return run


KERNELS = (
    Kernel("xpu.sdpa_onednn", attention, _attention, torch=">=2.8", prior=8.0, variants=("bhsd",),
           differentiable=False, untested=True, requires=(
        r.device("xpu"), r.dtypes("float16", "bfloat16", "float32"),
        r.at_most("head_dim", 576), r.at_most("head_dim_v", 576),
        r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("seq_q", 1, Code.EMPTY_INPUT),
        r.at_least("seq_k", 1, Code.EMPTY_INPUT), r.at_least("kv_heads", 1, Code.EMPTY_INPUT),
        r.unit_stride("query"), r.unit_stride("key"), r.unit_stride("value"),
        r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
        r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
        r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
        r.equals("window_left", -1, Code.WINDOW_UNSUPPORTED),
        r.equals("window_right", -1, Code.WINDOW_UNSUPPORTED),
        r.off("return_lse", Code.LSE_UNSUPPORTED),
        # a bias of the query's dtype, added; the entry expands nothing
        r.one_of("attn_mask.ndim", None, 4, code=Code.MASK_BROADCAST_UNSUPPORTED),
        *(r.when(r.equals("dtype", d), r.one_of("attn_mask.dtype", None, d,
                                                code=Code.MASK_DTYPE_UNSUPPORTED))
          for d in ("float16", "bfloat16", "float32")),
        r.any_of(r.off("is_causal"), r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED)),
        r.any_of(r.off("is_causal"), r.equals("causal_offset", 0),
                 r.one_of("causal_align", None, "top_left",
                          code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)))),
    Kernel("xpu.ipex_rms_norm", rms_norm, _rms_norm, package="intel_extension_for_pytorch",
           distribution="intel-extension-for-pytorch", version=">=2.8,<2.9", torch=">=2.8,<2.9",
           prior=4.0, overhead_us=6.0, differentiable=False, traceable=False, untested=True,
           requires=(r.device("xpu"), r.dtypes("float16", "bfloat16", "float32"),
                     r.plain_tensors(), r.equals("offset", 0.0), r.contiguous("x"),
                     r.at_least("rows", 1, Code.EMPTY_INPUT),
                     r.at_least("hidden", 1, Code.EMPTY_INPUT),
                     *(r.when(r.equals("dtype", d),
                              r.one_of("weight.dtype", d, "float32", code=Code.DTYPE_UNSUPPORTED))
                       for d in ("float16", "bfloat16", "float32")))),
)
