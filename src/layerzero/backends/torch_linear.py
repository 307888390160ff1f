"""Linear and feed-forward layers by torch: its own matmul, and oneDNN with a prepacked weight.

On one thread of a CPU with AVX-512 and AMX, weights from memory: prepacked bf16 weights are 1.1 to
1.6 times as fast for any number of rows, float32 ones 1.1 to 1.6 times from 4 to 128 rows and
slower for one; float16 gains nothing. For one row of bf16 torch's matrix-vector product is 1.3 to
2.8 times as fast as F.linear, and needs no second copy; for float32 it is as fast, for float16 half
as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.formulas.moe import GATED, PLAIN, activate, activate_gated
from ..ops.linear import OP as linear
from ..ops.mlp import OP as mlp
from ..spec import rules as r
from ..spec.kernel import Direct, Kernel, direct
from ..spec.reason import Code
from ._packing import PACKED

# oneDNN's names of the activations: (attr, algorithm).
POST_OPS = {None: ("none", ""), "relu": ("relu", ""), "silu": ("swish", ""),
            "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "swiglu": ("swish", ""),
            "geglu": ("gelu", "none"), "geglu_tanh": ("gelu", "tanh"), "reglu": ("relu", "")}
_PACKED_ROWS = 32          # rows that a weight is packed for; nearly as good for other numbers


def _linear() -> Direct:
    def activated(x: Tensor, weight: Tensor, bias: Tensor | None = None,
                  activation: str | None = None) -> Tensor:
        out = F.linear(x, weight, bias)
        return out if activation is None else activate(out, activation)

    return direct(F.linear, "x", "weight", "bias", otherwise=activated)


def _onednn() -> tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """Returns the linear layer, the layer times another tensor, and the packing of a weight."""
    ops = torch.ops.mkldnn
    reorder = ops._reorder_linear_weight.default

    def pack(weight: Tensor) -> Tensor:
        return reorder(weight.detach(), _PACKED_ROWS)  # type: ignore[no-any-return]

    return ops._linear_pointwise.default, ops._linear_pointwise.binary, pack


def _linear_prepacked() -> Callable[..., Any]:
    product, _, pack = _onednn()
    no_scalars: list[Any] = []

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            activation: str | None = None) -> Tensor:
        packed = PACKED.get("onednn", pack, weight)
        if packed is None:
            out = F.linear(x, weight, bias)
            return out if activation is None else activate(out, activation)
        attr, algorithm = POST_OPS[activation]
        return product(x, packed, bias, attr, no_scalars, algorithm)

    return run


def _matvec(weight: Tensor, row: Tensor, bias: Tensor | None) -> Tensor:
    if weight.stride(0) >= (1 << 31) - 1:      # more than torch's product of halves counts on x86
        weight = weight.contiguous()
    return torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)


def _linear_vector() -> Callable[..., Any]:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            activation: str | None = None) -> Tensor:
        out = _matvec(weight, x.reshape(-1), bias).view(*x.shape[:-1], -1)
        return out if activation is None else activate(out, activation)

    return run


def _mlp_vector() -> Callable[..., Any]:
    def run(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str = "swiglu", *,
            weight_up: Tensor | None = None, bias_in: Tensor | None = None,
            bias_up: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
        row = x.reshape(-1)
        inner = _matvec(weight_in, row, bias_in)
        if weight_up is not None:
            inner = activate(inner, activation) * _matvec(weight_up, row, bias_up)
        else:
            inner = (activate_gated(inner, activation, True) if activation in GATED
                     else activate(inner, activation))
        return _matvec(weight_down, inner, bias_down).view(*x.shape[:-1], -1)

    return run


def _mlp() -> Callable[..., Any]:
    """Separate matmuls for gate and up: contiguous results, which pays off for many rows."""
    silu_, is_compiling = torch._C._nn.silu_, torch.compiler.is_compiling
    functorch_level = torch._C._functorch.maybe_current_level

    def run(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str = "swiglu", *,
            weight_up: Tensor | None = None, bias_in: Tensor | None = None,
            bias_up: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
        if activation in GATED and weight_up is None:
            weight_in, weight_up = weight_in.chunk(2)
            if bias_in is not None:
                bias_in, bias_up = bias_in.chunk(2)
        inner = F.linear(x, weight_in, bias_in)
        if weight_up is None:
            inner = activate(inner, activation)
        elif torch.is_grad_enabled() or is_compiling() or functorch_level() is not None:
            inner = activate(inner, activation) * F.linear(x, weight_up, bias_up)
        else:                                  # in place, where nothing else refers to it
            inner = silu_(inner) if activation == "swiglu" else activate(inner, activation)
            inner.mul_(F.linear(x, weight_up, bias_up))
        return F.linear(inner, weight_down, bias_down)

    return run


def _mlp_fused() -> Callable[..., Any]:
    """Joins gate and up in one matmul: fewer launches, and the input is read once."""
    def run(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str = "swiglu", *,
            bias_in: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
        inner = activate_gated(F.linear(x, weight_in, bias_in), activation, True)
        return F.linear(inner, weight_down, bias_down)

    return run


def _mlp_prepacked() -> Callable[..., Any]:
    product, product_mul, pack = _onednn()
    plain = _mlp()
    no_scalars: list[Any] = []

    def run(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str = "swiglu", *,
            weight_up: Tensor | None = None, bias_in: Tensor | None = None,
            bias_up: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
        down = PACKED.get("onednn", pack, weight_down)
        up = None
        if activation in PLAIN:
            first = PACKED.get("onednn", pack, weight_in)
        else:
            if weight_up is None:
                weight_in, weight_up = weight_in.chunk(2)
                if bias_in is not None:
                    bias_in, bias_up = bias_in.chunk(2)
            first, up = PACKED.get("onednn", pack, weight_in), PACKED.get("onednn", pack, weight_up)
        if first is None or down is None or (up is None and weight_up is not None):
            return plain(
                x,
                weight_in,
                weight_down,
                activation,
                weight_up=weight_up,
                bias_in=bias_in,  # type: ignore[no-any-return]
                bias_up=bias_up,
                bias_down=bias_down,
            )
        attr, algorithm = POST_OPS[activation]
        inner = product(x, first, bias_in, attr, no_scalars, algorithm)
        if up is not None:
            inner = product_mul(x, inner, up, bias_up, "mul")
        return product(inner, down, bias_down, "none", no_scalars, "")

    return run


# Measured with AVX-512; packed float32 is slower below 4 rows, and gains nothing above 256.
PREPACKED: tuple[r.Condition, ...] = (
    r.device("cpu"), r.cpu_isa("avx512f"), r.dtypes("bfloat16", "float32"), r.plain_tensors(),
    r.any_of(r.dtypes("bfloat16"), r.at_least("rows", 4)),
    r.any_of(r.dtypes("bfloat16"), r.at_most("rows", 256)))

ONE_ROW: tuple[r.Condition, ...] = (
    r.device("cpu"), r.cpu_isa("avx512f"), r.dtypes("bfloat16"),
    r.equals("rows", 1, Code.SHAPE_UNSUPPORTED))

KERNELS = (
    Kernel("torch.linear_vector", linear, _linear_vector, torch=">=2.9", prior=9.0, overhead_us=5.0,
           requires=(*ONE_ROW, r.unit_stride("weight", repair=False),
                     r.at_least("in_features", 1, Code.EMPTY_INPUT),
                     r.at_least("out_features", 1, Code.EMPTY_INPUT))),
    Kernel("torch.mlp_vector", mlp, _mlp_vector, torch=">=2.9", prior=9.0, overhead_us=10.0,
           requires=(*ONE_ROW, r.at_least("out", 1, Code.EMPTY_INPUT),
                     *(r.unit_stride(w, repair=False)
                       for w in ("weight_in", "weight_up", "weight_down")))),
    Kernel("torch.linear", linear, _linear, prior=6.0, overhead_us=2.0, baseline=True),
    Kernel("torch.linear_prepacked", linear, _linear_prepacked, prior=7.5, overhead_us=5.0,
           differentiable=False, traceable=False, workspace="itemsize * in_features * out_features",
           # oneDNN's entry assumes a contiguous bias.
           requires=(*PREPACKED, r.contiguous("bias"),
                     r.at_least("in_features", 1, Code.EMPTY_INPUT),
                     r.at_least("out_features", 1, Code.EMPTY_INPUT)),
           note="keeps a second copy of the weight, arranged for oneDNN"),
    Kernel("torch.mlp", mlp, _mlp, prior=6.0, overhead_us=8.0, baseline=True),
    Kernel("torch.mlp_fused", mlp, _mlp_fused, prior=6.5, overhead_us=7.0,
           requires=(r.one_of("activation", *GATED), r.absent("weight_up.dtype"),
                     r.absent("bias_up.dtype"), r.any_of(r.device("cuda"), r.at_most("rows", 64)))),
    Kernel("torch.mlp_prepacked", mlp, _mlp_prepacked, prior=7.8, overhead_us=15.0,
           differentiable=False, traceable=False,
           workspace="itemsize * (hidden * wide + inner * out)",
           # Small float32 weights are in the cache: looking up packed ones costs what it gains.
           requires=(*PREPACKED, *map(r.contiguous, ("bias_in", "bias_up", "bias_down")),
                     r.at_least("out", 1, Code.EMPTY_INPUT),
                     r.any_of(r.dtypes("bfloat16"), r.at_least("hidden", 1024))),
           note="keeps a second copy of the weights, arranged for oneDNN"),
)
