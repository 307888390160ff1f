"""Intel Gaudi: the fused attention and RMS norm of habana_frameworks, whose source is closed.

Written from how vLLM's Gaudi plugin and optimum-habana call them, at release 1.22 of the software.
Graphs are compiled by the driver on first use of a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops.attention import OP as attention
from ..ops.rms_norm import OP as rms_norm
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code


def _attention() -> Callable[..., Any]:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
            dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None) -> Tensor:
        # softmax_mode "None": in the precision of the inputs; recompute: no scores are stored
        out: Tensor = FusedSDPA.apply(query, key, value, attn_mask, dropout_p, is_causal, scale,
                                      "None", True)
        return out

    return run


def _rms_norm() -> Callable[..., Any]:
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    def run(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        out: Tensor = FusedRMSNorm.apply(x.reshape(1, -1, x.shape[-1]), weight, eps)
        return out.view(x.shape)               # it takes three dimensions

    return run


_LIBRARY: dict[str, Any] = {"package": "habana_frameworks", "distribution": "habana-torch-plugin",
                            "traceable": False, "untested": True, "overhead_us": 20.0}
HARDWARE: tuple[r.Condition, ...] = (r.device("hpu"), r.plain_tensors())

KERNELS = (
    Kernel("habana.fused_sdpa", attention, _attention, variants=("bhsd",), prior=8.0,
           deterministic_backward=False, **_LIBRARY, requires=(
        *HARDWARE, r.dtypes("bfloat16", "float32"), r.at_most("head_dim", 256),
        r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
        r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("seq_q", 1, Code.EMPTY_INPUT),
        r.at_least("seq_k", 1, Code.EMPTY_INPUT), r.at_least("kv_heads", 1, Code.EMPTY_INPUT),
        r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
        r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
        r.equals("window_left", -1, Code.WINDOW_UNSUPPORTED),
        r.equals("window_right", -1, Code.WINDOW_UNSUPPORTED),
        r.off("return_lse", Code.LSE_UNSUPPORTED),
        *(r.when(r.equals("dtype", d), r.one_of("attn_mask.dtype", None, d,
                                                code=Code.MASK_DTYPE_UNSUPPORTED))
          for d in ("bfloat16", "float32")),
        r.one_of("attn_mask.ndim", None, 4, code=Code.MASK_BROADCAST_UNSUPPORTED),
        r.differs("attn_mask.requires_grad", True, Code.BACKWARD_UNSUPPORTED),
        # "causal + attn_bias is not yet supported", and no alignment is documented
        r.any_of(r.off("is_causal"), r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED)),
        r.any_of(r.off("is_causal"), r.equals("causal_offset", 0), r.one_of(
            "causal_align", None, "top_left", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)),
        r.any_of(r.off("is_causal"),
                 r.equals("causal_offset", 0, Code.CAUSAL_ALIGNMENT_UNSUPPORTED)))),
    Kernel("habana.rms_norm", rms_norm, _rms_norm, prior=4.0, **_LIBRARY, requires=(
        *HARDWARE, r.dtypes("bfloat16", "float32"), r.equals("offset", 0.0),
        r.at_least("rows", 1, Code.EMPTY_INPUT), r.at_least("hidden", 1, Code.EMPTY_INPUT),
        *(r.when(r.equals("dtype", d), r.one_of("weight.dtype", d, code=Code.DTYPE_UNSUPPORTED))
          for d in ("bfloat16", "float32")))),
)
