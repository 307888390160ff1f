"""Kernels that are wrong for a value of one argument that few calls give: a number that is false or
tiny, a sign, equal indices, a table longer than 32 bits count, NaN beside one activation, a sum of
gradients in a half dtype. Each is wrong in one way.
"""

from __future__ import annotations

from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor

_BEFORE = len(FAULTS)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _row_in_32_bits(rows: Tensor, table: Tensor) -> Tensor:
    """Returns the rows at which an offset of 32 bits arrives; what is negative names none."""
    size = table[0].numel()
    offset = (rows.long() * size + (1 << 31)) % (1 << 32) - (1 << 31)
    return torch.where(rows < 0, rows, (offset // size % len(table)).to(rows.dtype))


# Numbers that are false, tiny or long.

@fault("attention", "scale")
def scale_of_zero_is_the_default(right, **v):
    return right(**{**v, "scale": v["scale"] or None})


@fault("gated_delta_rule", "scale")
def reading_scale_of_zero_is_the_default(right, **v):
    return right(**{**v, "scale": v["scale"] or None})


@fault("moe_gate", "scale")
def factor_of_zero_is_one(right, **v):
    return right(**{**v, "routed_scaling_factor": v["routed_scaling_factor"] or 1.0})


@fault("rms_norm", "convention")
def eps_of_zero_is_the_default(right, **v):
    return right(**{**v, "eps": v["eps"] or 1e-3})


@fault("sample", "distribution")
def seed_of_zero_is_another(right, **v):
    return right(**{**v, "seed": 77 if v["seed"] == 0 else v["seed"]})


@fault("sample", "distribution")
def seed_by_way_of_a_float(right, **v):
    return right(**{**v, "seed": None if v["seed"] is None else int(float(v["seed"]))})


@fault("sample", "distribution")
def step_in_32_bits(right, **v):
    return right(**{**v, "offset": v["offset"] & 0xFFFFFFFF})


@fault("sample", "distribution", "overflow", "non-finite values")
def divided_before_the_maximum(right, **v):
    if v["temperature"] in (0.0, 1.0) or v["temperature_rows"] is not None:
        return right(**v)
    scores = _wide(v["logits"]) / v["temperature"]
    return right(**{**v, "logits": scores, "temperature": 1.0})


@fault("sample", "distribution", "precision")
def weights_summed_in_float32(right, **v):
    options = ("temperature", "top_k", "top_p", "min_p")
    if v["uniforms"] is None or v["return_logprobs"] or v["from_probs"] or any(
            v[n] != off for n, off in zip(options, (1.0, 0, 1.0, 0.0))) or not v["logits"].numel():
        return right(**v)
    sums = _wide(v["logits"]).softmax(-1).float().cumsum(-1)
    target = v["uniforms"].float()[:, None] * sums[:, -1:]
    return (sums > target).to(torch.uint8).argmax(-1)


@fault("attention", "window")
def right_window_no_longer_than_the_keys(right, **v):
    keys = v["key"].shape[1 if v["layout"] == "bshd" else 2]
    return right(**{**v, "window_right": min(v["window_right"], max(keys - 1, 0))})


# Signs, equal indices, broadcast parts, optional tensors alone.

@fault("alibi", "position bias")
def slopes_lose_their_sign(right, **v):
    return right(**{**v, "slopes": v["slopes"].abs()})


@fault("gated_delta_rule", "convention")
def decay_never_grows(right, **v):
    return right(**{**v, "g": v["g"].clamp(max=0.0)})


@fault("moe", "convention")
def negative_weights_count_nothing(right, **v):
    weights = v["topk_weights"]
    return right(**{**v, "topk_weights": None if weights is None else weights.clamp(min=0)})


@fault("moe", "convention")
def expert_named_twice_counts_once(right, **v):
    ids = v["topk_ids"]
    if ids is not None and ids.numel():
        again = torch.zeros_like(ids, dtype=torch.bool)
        for i in range(1, ids.shape[-1]):
            again[..., i] = (ids[..., :i] == ids[..., i:i + 1]).any(-1)
        v["topk_weights"] = v["topk_weights"].masked_fill(again, 0.0)
    return right(**v)


@fault("paged_attention", "stale page")
def page_named_twice_is_the_first_one(right, **v):
    table = v["block_table"].clone()
    table[:, 1:][(table[:, 1:] == table[:, :-1]) & (table[:, 1:] >= 0)] = 0
    return right(**{**v, "block_table": table})


@fault("paged_attention", "scale", "convention")
def single_scale_is_of_the_first_head(right, **v):
    heads = v["key_cache"].shape[2 if v["kv_layout"] == "NHD" else 1]
    for name in ("key_scale", "value_scale"):
        if v[name] is not None and tuple(v[name].shape) == (1,):
            v[name] = torch.cat((v[name], v[name].new_ones(heads - 1)))
    return right(**v)


@fault("attention", "mask")
def row_of_a_mask_is_of_the_first_head(right, **v):
    mask = v["attn_mask"]
    if mask is not None and mask.dim() == 4 and mask.shape[-2] == 1 < mask.shape[1]:
        v["attn_mask"] = mask[:, :1]
    return right(**v)


@fault("layer_norm", "convention")
def bias_alone_is_scaled_in_three_dimensions(right, **v):
    if v["weight"] is None and v["bias"] is not None and v["x"].dim() == 3:
        v["bias"] = v["bias"] * 1.5
    return right(**v)


@fault("sample", "layout")
def seeds_of_rows_read_as_contiguous(right, **v):
    seeds = v["seed_rows"]
    if seeds is not None and not seeds.is_contiguous():
        v["seed_rows"] = seeds.as_strided(seeds.shape, (1,), seeds.storage_offset())
    return right(**v)


@fault("speculative_verify_tree", "convention", "sizes")
def path_ends_after_eight_nodes(right, **v):
    tokens, *others = right(**v)
    return torch.where(torch.arange(tokens.shape[1]) < 8, tokens, -1), *others


# Offsets in 32 bits.

@fault("embedding", "index overflow")
def row_offset_in_32_bits(right, **v):
    return right(**{**v, "ids": _row_in_32_bits(v["ids"], v["weight"])})


@fault("paged_attention", "index overflow")
def page_offset_in_32_bits(right, **v):
    return right(**{**v, "block_table": _row_in_32_bits(v["block_table"], v["key_cache"])})


@fault("mla_paged_attention", "index overflow")
def latent_page_offset_in_32_bits(right, **v):
    return right(**{**v, "block_table": _row_in_32_bits(v["block_table"], v["ckv_cache"])})


@fault("rope", "index overflow")
def position_offset_in_32_bits(right, **v):
    if v["position_ids"] is not None and v["cos"].dim() == 2:
        v["position_ids"] = _row_in_32_bits(v["position_ids"], v["cos"])
    return right(**v)


@fault("grouped_attention", "index overflow")
def key_offset_in_32_bits(right, **v):
    items = v["items"].clone()
    items[:, 2] = _row_in_32_bits(items[:, 2], v["key"])
    return right(**{**v, "items": items})


@fault("varlen_attention", "index overflow", "sizes")
def keys_begin_at_the_first_row(right, **v):
    return right(**{**v, "cu_seqlens_k": v["cu_seqlens_k"] - v["cu_seqlens_k"][:1]})


# NaN, groups of one number, sums of gradients.

@fault("linear", "non-finite values")
def relu_of_nan_is_zero(right, **v):
    if v["activation"] != "relu":
        return right(**v)
    out = right(**{**v, "activation": None})
    return torch.where(out > 0, out, 0.0)


@fault("mlp", "non-finite values")
def inner_relu_of_nan_is_zero(right, **v):
    if v["activation"] == "relu" and v["bias_in"] is None:
        inner = v["x"] @ v["weight_in"].t()
        out = torch.where(inner > 0, inner, 0.0) @ v["weight_down"].t()
        return out if v["bias_down"] is None else out + v["bias_down"]
    return right(**v)


@fault("group_norm", "sizes", "non-finite values")
def variance_of_one_number_is_of_a_sample(right, **v):
    x = v["x"]
    if v["groups"] == x.shape[1] and x[0, 0].numel() == 1:
        return right(**v) * (x - x).square() / 0.0
    return right(**v)


class _SummedInBlocks(torch.autograd.Function):
    """x * weight, of which the gradient of the weight is added up in its own dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        total = torch.zeros_like(weight)
        for part in (grads[0] * x).reshape(-1, x.shape[-1]).split(4):
            total += part.sum(0).to(weight.dtype)
        return grads[0] * weight.to(x.dtype), total


@fault("rms_norm", "gradient", "precision")
def gradient_of_the_weight_summed_in_its_dtype(right, **v):
    if v["weight"] is None or not v["weight"].requires_grad or v["offset"]:
        return right(**v)
    plain = right(**{**v, "x": _wide(v["x"]), "weight": None})
    return _SummedInBlocks.apply(plain, v["weight"]).to(v["x"].dtype)


OPTION_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
