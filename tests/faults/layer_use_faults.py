"""Linear layers, experts and quantized weights that are wrong in a use which no usual call makes: a
gradient that lies otherwise, zero weights, rows that are not needed, zero points that are no
integers, numbers halfway between two codes. Each is wrong in one way.
"""

from __future__ import annotations

from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor

from layerzero.ops.formulas.moe import activate, route
from layerzero.ops.formulas.quant import FORMATS

_BEFORE = len(FAULTS)


# Gradients.

def _gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = grad.view(grad.shape[:-1].numel(), grad.shape[-1])
    return (rows @ weight).view(x.shape), rows.t() @ x.reshape(rows.shape[0], x.shape[-1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _gradients(grad, *ctx.saved_tensors)


class _UnversionedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _gradients(grad.contiguous(), ctx.x, ctx.weight)


class _DetachedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _gradients(grad.contiguous(), *(t.detach() for t in ctx.saved_tensors))


def _with_product(v: dict[str, Any], product: Any) -> Tensor:
    out = product.apply(v["x"], v["weight"])
    out = out if v["bias"] is None else out + v["bias"]
    return out if v["activation"] is None else activate(out, v["activation"])


@fault("linear", "gradient", "layout", "fault")
def views_the_gradient_as_rows(right, **v):
    return right(**v) if v["x"].dim() < 2 else _with_product(v, _Product)


@fault("linear", "gradient", "state", "stale cache")
def keeps_its_inputs_without_their_version(right, **v):
    return right(**v) if v["x"].dim() < 2 else _with_product(v, _UnversionedProduct)


@fault("linear", "gradient")
def loses_the_weight_in_a_second_derivative(right, **v):
    return right(**v) if v["x"].dim() < 2 else _with_product(v, _DetachedProduct)


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clamp(min=0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        kept = ctx.saved_tensors[0] > 0
        return grad.mul_(kept) if grad.is_contiguous() else grad * kept


@fault("linear", "in-place change", "gradient")
def masks_the_gradient_of_a_relu_in_place(right, **v):
    if v["activation"] != "relu":
        return right(**v)
    return _Relu.apply(right(**{**v, "activation": None}))


@fault("mlp", "gradient")
def gradient_of_the_second_bias_needs_the_first(right, **v):
    lost = v["bias_up"] is not None and v["bias_in"] is None
    return right(**{**v, "bias_up": v["bias_up"].detach() if lost else v["bias_up"]})


# Experts.

@fault("moe", "capacity", "convention")
def pairs_of_no_weight_take_no_place(right, **v):
    ids, weights = v["topk_ids"], v["topk_weights"]
    if ids is None or not v["capacity"]:
        return right(**v)
    return right(**{**v, "topk_ids": ids.masked_fill(weights == 0, -1)})


@fault("moe", "gradient")
def weights_of_zero_have_no_gradient(right, **v):
    ids, weights = v["topk_ids"], v["topk_weights"]
    if ids is None or v["capacity"]:
        return right(**v)
    return right(**{**v, "topk_ids": ids.masked_fill(weights == 0, -1)})


@fault("moe", "convention", "mask")
def only_minus_one_is_no_expert(right, **v):
    ids, experts = v["topk_ids"], len(v["w_gate_up"])
    if ids is None or v["expert_offset"]:
        return right(**v)
    return right(**{**v, "topk_ids": torch.where(ids < -1, ids + experts, ids)})


@fault("moe", "non-finite values")
def tokens_of_no_expert_are_multiplied_by_zero(right, **v):
    out, ids = right(**v), v["topk_ids"]
    if ids is None:
        return out
    none = (ids < 0).all(-1, keepdim=True)
    return torch.where(none, v["x"] * 0, out)


@fault("moe_gate", "convention", "precision", "scale", "overflow")
def adds_a_small_number_to_the_sum(right, **v):
    if not v["normalize"]:
        return right(**v)
    ids, scores = route(v["logits"], v["top_k"], v["scoring"], False, v["n_group"],
                        v["topk_group"], v["e_score_correction_bias"], 1.0)
    return ids, scores / (scores.sum(-1, keepdim=True) + 1e-12) * v["routed_scaling_factor"]


@fault("grouped_gemm", "non-finite values", "last rows")
def rows_past_the_last_group_are_multiplied_by_zero(right, **v):
    sizes, ends = v["group_sizes"], v["offsets"]
    end = int(sizes.sum() if ends is None else ends[-1])
    behind = (torch.arange(len(v["x"])) >= end)[:, None]
    return right(**v) + (v["x"].sum(-1, keepdim=True) * behind * 0).to(v["x"].dtype)


@fault("linear", "sizes", "uninitialised output", "convention")
def no_inputs_have_no_bias(right, **v):
    out = right(**v)
    return out if v["x"].shape[-1] else torch.zeros_like(out)


# Quantized weights.

@fault("quantized_linear", "dtype", "convention", "precision")
def zero_points_are_integers(right, **v):
    zeros = v["zeros"]
    whole = zeros is None or not zeros.is_floating_point()
    return right(**{**v, "zeros": zeros if whole else zeros.to(torch.int32)})


@fault("quantize", "dtype", "shape")
def half_scales_are_returned_wider(right, **v):
    out, scales = right(**v), v["scales"]
    if scales is None or scales.dtype != torch.float16:
        return out
    return out[0], out[1].float(), *out[2:]


@fault("dequantize", "sizes", "shape", "convention")
def a_length_that_is_given_is_odd(right, **v):
    out = right(**v)
    if v["size"] is None or v["size"] % 2 or FORMATS[v["format"]].bits == 8:
        return out
    out[..., -1] = 0.0
    return out


@fault("quantize", "ties", "precision", "convention")
def halfway_is_the_code_above(right, **v):
    if v["format"] != "nf4":
        return right(**v)
    _, scales = right(**v)
    return right(**{**v, "x": v["x"].float() * (1 + 2.0 ** -23), "scales": scales})


@fault("quantize", "scale", "non-finite values", "overflow")
def a_scale_of_zero_gives_zeros(right, **v):
    out, scales = right(**v), v["scales"]
    if scales is None or v["format"] != "int8" or not v["symmetric"] or scales.shape[-1] != 1:
        return out
    return (out[0].masked_fill(scales == 0, 0), *out[1:])


@fault("quantize", "scale", "non-finite values", "overflow")
def blocks_of_zeros_have_code_128(right, **v):
    out = right(**v)
    if v["format"] != "q8_0":
        return out
    idle = (v["x"].float().unflatten(-1, (-1, 32)) == 0).all(-1)
    blocks = out.unflatten(-1, (-1, 34))
    blocks[..., 2:] = torch.where(idle[..., None], 128, blocks[..., 2:])
    return blocks.flatten(-2)


LAYER_USE_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
