"""torch's own attention on AMD GPUs, each implementation by its name. AOTriton serves both entries,
or CK where torch.backends.cuda.preferred_rocm_fa_library says so.

Rules from torch's sdp_utils.cpp and attention.cu at 2.11 (USE_ROCM). The efficient entry aligns
causality top-left. How flash aligns it over unequal lengths changed between releases of AOTriton,
so those calls are left to torch.sdpa.
"""

from __future__ import annotations

import torch

from ..ops.attention import OP as attention
from ..spec import rules as r
from ..spec.kernel import SDPA_BACKENDS, Const, Direct, Kernel, direct
from ..spec.reason import Code

FLASH, EFFICIENT, _, _ = SDPA_BACKENDS


def _flash() -> Direct:
    return direct(torch.ops.aten._scaled_dot_product_flash_attention.default, "query", "key",
                  "value", "dropout_p", "is_causal", Const(False), scale="scale", item=0)


def _efficient() -> Direct:
    """Always computes the log-sum-exp, which backward needs."""
    return direct(torch.ops.aten._scaled_dot_product_efficient_attention.default, "query", "key",
                  "value", Const(None), Const(True), "dropout_p", "is_causal", scale="scale",
                  item=0)


# The GPUs AOTriton is built for without TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL.
COMMON: tuple[r.Condition, ...] = (
    r.device("cuda"), r.vendor("amd"), r.generations("cdna2", "cdna3", "cdna4"),
    r.multiple_of("head_dim", 8), r.at_most("head_dim", 256),
    r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID), r.at_least("batch", 1, Code.EMPTY_INPUT),
    r.at_least("seq_q", 1, Code.EMPTY_INPUT), r.at_least("seq_k", 1, Code.EMPTY_INPUT),
    r.at_least("kv_heads", 1, Code.EMPTY_INPUT), r.unit_stride("query"), r.unit_stride("key"),
    r.unit_stride("value"), r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
    r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
    r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
    r.equals("window_left", -1, Code.WINDOW_UNSUPPORTED),
    r.equals("window_right", -1, Code.WINDOW_UNSUPPORTED),
    r.off("return_lse", Code.LSE_UNSUPPORTED))
TOP_LEFT = r.any_of(r.off("is_causal"), r.equals("causal_offset", 0), r.one_of(
    "causal_align", None, "top_left", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED))

KERNELS = (
    Kernel("torch.sdpa_flash_rocm", attention, _flash, sdpa_backend=FLASH, prior=10.0,
           variants=("bhsd",), untested=True, deterministic_backward=False,
           requires=(*COMMON, r.dtypes("float16", "bfloat16"), TOP_LEFT,
                     r.any_of(r.off("is_causal"), r.equals(
                         "causal_offset", 0, Code.CAUSAL_ALIGNMENT_UNSUPPORTED)))),
    Kernel("torch.sdpa_efficient_rocm", attention, _efficient, sdpa_backend=EFFICIENT, prior=9.0,
           variants=("bhsd",), untested=True, deterministic_backward=False,
           requires=(*COMMON, r.dtypes("float16", "bfloat16", "float32"), TOP_LEFT,
                     r.equals("group", 1, Code.GQA_UNSUPPORTED))),
)
