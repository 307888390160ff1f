"""bfloat16 and float16 computed in float32, on CPUs where torch computes their matmuls one element
at a time.

On a Neoverse-N1 `F.linear` of bfloat16 takes 20 to 250 times as long as of float32, and
`scaled_dot_product_attention` 100 to 150 times. `F.linear` of float16 takes 60 to 700 times as long
until something in the process, such as a bfloat16 matmul, makes torch detect the CPU's features
(torch 2.13), then 3 to 8 times.

Casting up and back costs two passes over the data, and is more exact: intermediate results are not
rounded.

A weight is either cast in every call, which costs little if many rows share it, or once, with the
float32 copy kept as long as the weight is alive and unchanged (_packing.py): three times the
memory, for the speed of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.attention import OP as attention
from ..ops.formulas.common import position_terms
from ..ops.formulas.moe import GATED, activate
from ..ops.linear import OP as linear
from ..ops.mlp import OP as mlp
from ..spec import rules as r
from ..spec.kernel import SDPA, Kernel
from ..spec.reason import Code
from ._packing import PACKED

Cast = Callable[[Tensor], Tensor]
COPY_OVER_WEIGHT = 2                           # bytes of a float32 copy per byte of a half type


def _float32(t: Tensor) -> Tensor:
    return t.to(torch.float32)


def _cached_float32(weight: Tensor) -> Tensor:
    """Returns the cached float32 copy of a weight, or a new copy if it cannot be cached."""
    copy = PACKED.get("float32", lambda w: _float32(w.detach()), weight, growth=COPY_OVER_WEIGHT)
    return _float32(weight) if copy is None else copy


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, cast: Cast) -> Tensor:
    return F.linear(x, cast(weight), None if bias is None else _float32(bias))


def _make_linear(cast: Cast) -> Callable[..., Any]:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            activation: str | None = None) -> Tensor:
        out = _affine(_float32(x), weight, bias, cast)
        return (out if activation is None else activate(out, activation)).to(x.dtype)

    return run


def _make_mlp(cast: Cast) -> Callable[..., Any]:
    def run(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str = "swiglu", *,
            weight_up: Tensor | None = None, bias_in: Tensor | None = None,
            bias_up: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
        inner = _affine(_float32(x), weight_in, bias_in, cast)
        if weight_up is not None:
            inner = activate(inner, activation) * _affine(_float32(x), weight_up, bias_up, cast)
        elif activation in GATED:
            gate, up = inner.chunk(2, -1)
            inner = activate(gate, activation) * up
        else:
            inner = activate(inner, activation)
        return _affine(inner, weight_down, bias_down, cast).to(x.dtype)

    return run


def _linear() -> Callable[..., Any]:
    return _make_linear(_float32)


def _linear_packed() -> Callable[..., Any]:
    return _make_linear(_cached_float32)


def _mlp() -> Callable[..., Any]:
    return _make_mlp(_float32)


def _mlp_packed() -> Callable[..., Any]:
    return _make_mlp(_cached_float32)


def _sdpa() -> Callable[..., Any]:
    sdpa = F.scaled_dot_product_attention

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
            dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None) -> Tensor:
        mask = (attn_mask if attn_mask is None or attn_mask.dtype is torch.bool
                else _float32(attn_mask))
        return sdpa(_float32(query), _float32(key), _float32(value), mask, dropout_p, is_causal,
                    scale=scale, enable_gqa=True).to(query.dtype)

    return run


def _sdpa_bias() -> Callable[..., Any]:
    """Folds everything that depends on position into an additive mask."""
    sdpa = F.scaled_dot_product_attention

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
            dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, *,
            causal_align: str | None = None, window_left: int = -1, window_right: int = -1,
            alibi_slopes: Tensor | None = None) -> Tensor:
        bias, hidden = position_terms(query.shape[2], key.shape[2], is_causal, causal_align,
                                      window_left, window_right, alibi_slopes, query.device)
        mask = (torch.zeros((), dtype=torch.float32, device=query.device) if bias is None
                else _float32(bias))
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            hidden = ~attn_mask if hidden is None else hidden | ~attn_mask
        elif attn_mask is not None:
            mask = mask + _float32(attn_mask)
        if hidden is not None:
            mask = mask.expand(torch.broadcast_shapes(mask.shape, hidden.shape)).masked_fill(
                hidden, -math.inf)
        return sdpa(_float32(query), _float32(key), _float32(value),
                    mask[(None,) * (4 - mask.dim())], dropout_p,
                    scale=scale, enable_gqa=True).to(query.dtype)

    return run


SLOW_HALF = r.slow_half_matmul()
CAST_UP = "cast up once and computed in float32, where torch computes an element at a time"
FEATURES: tuple[r.Condition, ...] = (
    r.at_least("in_features", 1, Code.EMPTY_INPUT), r.at_least("out_features", 1, Code.EMPTY_INPUT))
ATTENTION: tuple[r.Condition, ...] = (
    *SLOW_HALF, r.at_least("kv_heads", 1, Code.EMPTY_INPUT),
    r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
    r.off("return_lse", Code.LSE_UNSUPPORTED))
TOP_LEFT = r.any_of(r.off("is_causal"), r.equals("causal_offset", 0),
                    r.one_of("causal_align", None, "top_left",
                             code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED))
# q, k, v and the result
CASTS = "4 * batch * (head_dim + head_dim_v) * (heads * seq_q + kv_heads * seq_k)"

# The estimate of torch's time does not include its slow half types, so the overheads here are set
# below its own to rank these kernels first. They are faster from some thousand multiplications on.
LARGE_ENOUGH = {"linear": (r.at_least("in_features", 64), r.at_least("out_features", 64)),
                "mlp": (r.at_least("hidden", 64), r.at_least("inner", 64))}

KERNELS = (
    Kernel("torch.linear_upcast", linear, _linear, (*SLOW_HALF, *FEATURES), prior=8.0,
           overhead_us=1.8, less_work=CAST_UP, less_work_when=LARGE_ENOUGH["linear"],
           workspace="4 * (in_features * out_features + rows * (in_features + out_features))",
           note="casts the weight in every call; what remains where gradients are wanted or a "
                "graph is traced"),
    Kernel("torch.linear_upcast_packed", linear, _linear_packed,
           (*SLOW_HALF, *FEATURES, r.plain_tensors()), prior=16.0,
           overhead_us=1.5, less_work=CAST_UP, less_work_when=LARGE_ENOUGH["linear"],
           differentiable=False, traceable=False,
           workspace="4 * (in_features * out_features + rows * (in_features + out_features))",
           note="keeps a float32 copy of the weight"),
    Kernel("torch.mlp_upcast", mlp, _mlp, (*SLOW_HALF, r.at_least("out", 1, Code.EMPTY_INPUT)),
           prior=8.0, overhead_us=7.5, less_work=CAST_UP, less_work_when=LARGE_ENOUGH["mlp"],
           workspace="4 * (hidden * wide + inner * out + rows * (hidden + 2 * wide + inner + out))",
           note="casts the weights in every call; what remains where gradients are wanted or a "
                "graph is traced"),
    Kernel("torch.mlp_upcast_packed", mlp, _mlp_packed,
           (*SLOW_HALF, r.at_least("out", 1, Code.EMPTY_INPUT), r.plain_tensors()), prior=16.0,
           overhead_us=7.0, less_work=CAST_UP, less_work_when=LARGE_ENOUGH["mlp"],
           differentiable=False, traceable=False,
           workspace="4 * (hidden * wide + inner * out + rows * (hidden + 2 * wide + inner + out))",
           note="keeps float32 copies of the weights"),
    Kernel("torch.sdpa_upcast", attention, _sdpa, (
        *ATTENTION, r.one_of("attn_mask.ndim", None, 2, 3, 4, code=Code.MASK_BROADCAST_UNSUPPORTED),
        r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
        r.equals("window_left", -1, Code.WINDOW_UNSUPPORTED),
        r.equals("window_right", -1, Code.WINDOW_UNSUPPORTED), TOP_LEFT,
        # Masked scores are -inf before scaling: times 0 that is NaN, times a negative number +inf.
        r.any_of(r.off("is_causal"), r.at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED))),
        prior=16.0, overhead_us=1.8, less_work=CAST_UP, workspace=CASTS, variants=("bhsd",),
           sdpa_backend=SDPA),
    Kernel("torch.sdpa_upcast_bias", attention, _sdpa_bias, (
        *ATTENTION, r.differs("alibi_slopes.requires_grad", True, Code.BACKWARD_UNSUPPORTED),
        r.any_of(r.on("is_causal"), r.at_least("window_left", 0, Code.FEATURE_UNSUPPORTED),
                 r.at_least("window_right", 0, Code.FEATURE_UNSUPPORTED),
                 r.present("alibi_slopes.dtype"),
                 r.present("attn_mask.dtype", Code.FEATURE_UNSUPPORTED))),
        prior=14.0, overhead_us=19.0, less_work=CAST_UP, workspace=f"{CASTS} + 8 * elements",
           variants=("bhsd",),
        sdpa_backend=SDPA),
)
