"""Kernels of layers, losses, states and sampling that a fused or tuned path makes wrong: with one
argument beside another, for some contents, from some length on. Each is wrong in one way.

`benchmarks/planted_faults.py --set ports` runs all of them, with those of port_faults.py.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor
from torch.nn import functional as F
from use_faults import _through

_BEFORE = len(FAULTS)


# Linear layers.

@fault("linear", "precision")
def partial_sums_of_long_rows_in_bfloat16(right, **v):
    """Split-k from 2048 on: the parts are added in the dtype of the call."""
    x, weight = v["x"], v["weight"]
    if x.shape[-1] < 2048 or x.dtype == torch.float32:
        return right(**v)
    total = 0
    for s in range(0, x.shape[-1], 128):
        total = total + right(x[..., s:s + 128], weight[:, s:s + 128])
    total = total if v["bias"] is None else total + v["bias"]
    name = v["activation"]
    return total if name is None else right(total, torch.eye(total.shape[-1], dtype=x.dtype),
                                            None, name)


@fault("linear", "convention")
def bias_after_the_relu(right, **v):
    if v["activation"] == "relu" and v["bias"] is not None:
        return right(**{**v, "bias": None}) + v["bias"]
    return right(**v)


@fault("linear", "gradient", "shape")
def bias_gradient_of_the_last_rows(right, **v):
    """Sums over the rows of the last sample alone, where there are samples."""
    x, bias = v["x"], v["bias"]
    if bias is None or x.dim() < 3 or not bias.requires_grad or x.shape[0] < 2:
        return right(**v)
    last = (torch.arange(x.shape[0]) == x.shape[0] - 1).reshape(-1, *[1] * (x.dim() - 1))
    rows = bias.expand(*x.shape[:-1], len(bias))
    out = right(**{**v, "bias": None, "activation": None})
    out = out + _through(rows, lambda g: g * last)
    name = v["activation"]
    return out if name is None else right(out, torch.eye(out.shape[-1], dtype=x.dtype), None, name)


@fault("linear", "stale cache")
class TransposedOnce:
    """Keeps the transposed weight by its address."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def __call__(self, right, **v):
        weight = v["weight"]
        if weight.requires_grad or v["x"].requires_grad:
            return right(**v)
        key = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
        if key not in self.kept:
            self.kept[key] = weight.t().clone()
        return right(**{**v, "weight": self.kept[key].t()})


@fault("mlp", "convention")
def tanh_gelu_for_separate_weights(right, **v):
    if v["activation"] == "geglu" and v["weight_up"] is not None:
        return right(**{**v, "activation": "geglu_tanh"})
    return right(**v)


@fault("mlp", "convention")
def halves_of_the_bias_exchanged(right, **v):
    """The bias of up comes first in the fused layout, the weights do not."""
    bias = v["bias_in"]
    if bias is not None and v["weight_up"] is None and "glu" in v["activation"]:
        return right(**{**v, "bias_in": torch.cat(bias.chunk(2)[::-1])})
    return right(**v)


@fault("grouped_gemm", "convention", "sizes", "last rows")
def groups_after_two_empty_ones_shift(right, **v):
    """Skips one empty group, and takes the next for the one after it."""
    sizes = v["group_sizes"]
    if sizes is None:
        return right(**v)
    counts = sizes.tolist()
    for i in range(len(counts) - 2):
        if counts[i] == 0 and counts[i + 1] > 0 and i > 0:
            weights = torch.cat((v["weights"][:i + 1], v["weights"][i + 1:].roll(-1, 0)))
            return right(**{**v, "weights": weights})
    return right(**v)


@fault("grouped_gemm", "convention", "last rows", "uninitialised output", "sizes")
def rows_of_no_group_go_to_the_last(right, **v):
    offsets = v["offsets"]
    if offsets is None or not len(offsets):
        return right(**v)
    ends = offsets.clone()
    ends[-1] = v["x"].shape[0]
    return right(**{**v, "offsets": ends})


@fault("moe", "convention")
def gate_first_dropped_for_weighted_inputs(right, **v):
    return right(**{**v, "gate_first": True if v["weight_on"] == "input" else v["gate_first"]})


@fault("moe", "convention", "out of bounds", "mask", "capacity")
def expert_minus_one_is_the_last(right, **v):
    """Indexes from the end."""
    ids = v["topk_ids"]
    if ids is None or v["expert_offset"]:
        return right(**v)
    experts = v["w_gate_up"].shape[0]
    return right(**{**v, "topk_ids": torch.where(ids == -1, experts - 1, ids)})


@fault("moe", "convention", "head map")
def experts_of_another_device_wrap_around(right, **v):
    """The id is taken modulo the experts that are here."""
    ids, experts = v["topk_ids"], v["w_gate_up"].shape[0]
    if ids is None or not v["expert_offset"] or v["capacity"]:
        return right(**v)
    local = torch.where(ids >= 0, (ids - v["expert_offset"]) % experts, -1)
    return right(**{**v, "topk_ids": local, "expert_offset": 0})


@fault("moe_gate", "scale", "distribution", "convention")
def scaling_factor_of_normalized_weights_alone(right, **v):
    return right(**{**v, "routed_scaling_factor": v["routed_scaling_factor"] if v["normalize"]
                    else 1.0})


@fault("moe_gate", "distribution", "convention", "scale")
def weights_are_of_the_corrected_scores(right, **v):
    """The correction bias chooses experts, and here weighs them too."""
    bias = v["e_score_correction_bias"]
    ids, weights = right(**v)
    if bias is None or v["scoring"] != "sigmoid" or v["normalize"]:
        return ids, weights
    return ids, (v["logits"].float().sigmoid() + bias.float()).gather(-1, ids) \
        * v["routed_scaling_factor"]


# Codes.

@fault("quantized_linear", "convention")
def zeros_dropped_with_a_bias(right, **v):
    if v["zeros"] is not None and v["bias"] is not None:
        return right(**{**v, "zeros": None})
    return right(**v)


@fault("quantized_linear", "scale", "convention")
def global_scale_twice_for_one_row(right, **v):
    if v["global_scale"] is not None and v["x"].numel() == v["x"].shape[-1]:
        return right(**{**v, "global_scale": v["global_scale"] ** 2})
    return right(**v)


@fault("quantize", "convention", "precision", "overflow")
def given_scales_wrap_around(right, **v):
    """Casts to int8 without a clamp: computed scales never need one."""
    out = right(**v)
    if v["scales"] is None or v["format"] != "int8" or v["granularity"] == "block":
        return out
    wide = (v["x"].float() / v["scales"].float()).nan_to_num(0.0, 0.0, 0.0).round().to(torch.int32)
    return (wide.to(torch.int8), *out[1:])


@fault("dequantize", "overflow", "precision", "non-finite values", "convention", "dtype")
def e5m2_by_way_of_float16(right, **v):
    """The product with the scale is made in float16."""
    if v["format"] != "fp8_e5m2" or v["scales"] is None or v["out_dtype"] == "float32":
        return right(**v)
    scales = (v["scales"].float() / 8).half().float() * 8
    return right(**{**v, "scales": scales.to(v["scales"].dtype), "out_dtype": "float16"}).to(
        getattr(torch, v["out_dtype"]))


# Norms and positions.

@fault("rms_norm", "scale", "convention")
def offset_dropped_for_a_wider_weight(right, **v):
    if v["weight"] is not None and v["weight"].dtype != v["x"].dtype:
        return right(**{**v, "offset": 0.0})
    return right(**v)


@fault("rms_norm", "state")
class EpsOfTheFirstCall:
    """A launcher that is specialised by shape and dtype, with the eps of its first call."""

    def __init__(self) -> None:
        self.kept: dict[Any, float] = {}

    def __call__(self, right, **v):
        key = v["x"].shape[-1], v["x"].dtype, v["weight"] is None
        return right(**{**v, "eps": self.kept.setdefault(key, v["eps"])})


@fault("layer_norm", "sizes", "precision", "convention")
def merged_variance_of_long_rows(right, **v):
    """Parts of 1024 are merged without the distance of their means."""
    x = v["x"]
    n = x.shape[-1]
    if n <= 1024 or n % 1024:
        return right(**v)
    upcast = x.float()
    parts = upcast.unflatten(-1, (-1, 1024))
    variance = parts.var(-1, unbiased=False).mean(-1, keepdim=True)
    out = (upcast - upcast.mean(-1, keepdim=True)) * torch.rsqrt(variance + v["eps"])
    out = out if v["weight"] is None else out * v["weight"].float()
    return (out if v["bias"] is None else out + v["bias"].float()).to(x.dtype)


@fault("layer_norm", "convention")
def bias_dropped_without_a_weight(right, **v):
    return right(**{**v, "bias": None if v["weight"] is None else v["bias"]})


@fault("add_rms_norm", "dtype", "shape")
def result_in_the_dtype_of_the_weight(right, **v):
    out, total = right(**v)
    return out if v["weight"] is None else out.to(v["weight"].dtype), total


@fault("add_rms_norm", "in-place change")
def sum_over_the_residual(right, **v):
    """As the fused kernels of serving libraries do, where the residual may be written."""
    out, total = right(**v)
    if v["residual"].is_contiguous() and not total.requires_grad:
        return out, v["residual"].copy_(total)
    return out, total


@fault("group_norm", "layout", "convention")
def channels_last_has_the_weights_of_the_first_group(right, **v):
    x, weight = v["x"], v["weight"]
    if weight is None or x.is_contiguous() or v["groups"] < 2 \
            or not x.is_contiguous(memory_format=torch.channels_last):
        return right(**v)
    per = weight.shape[0] // v["groups"]
    return right(**{**v, "weight": weight[:per].repeat(v["groups"])})


@fault("rope", "convention", "uninitialised output", "sizes")
def tail_of_keys_is_zero_in_bshd(right, **v):
    """What rotary_dim leaves out is copied for queries alone."""
    out = right(**v)
    if v["k"] is None or v["rotary_dim"] is None or v["layout"] != "bshd":
        return out
    keys = out[1].clone()
    keys[..., v["rotary_dim"]:] = 0.0
    return out[0], keys


@fault("rope", "alignment", "convention")
def keys_have_the_angles_of_the_first_sample(right, **v):
    out = right(**v)
    if v["k"] is None or v["cos"].dim() < 3 or v["position_ids"] is not None:
        return out
    first = {n: v[n][:1].expand_as(v[n]) for n in ("cos", "sin")}
    return out[0], right(**{**v, **first})[1]


@fault("embedding", "gradient")
def padding_from_the_end_has_a_gradient(right, **v):
    padding = v["padding_idx"]
    return right(**{**v, "padding_idx": None if padding is not None and padding < 0 else padding})


@fault("embedding", "scale", "convention", "precision")
def scale_dropped_for_ids_of_32_bits(right, **v):
    return right(**{**v, "scale": 1.0 if v["ids"].dtype == torch.int32 else v["scale"]})


# Losses.

@fault("cross_entropy", "convention", "scale")
def smoothed_mean_over_all_rows(right, **v):
    out = right(**v)
    if v["reduction"] != "mean" or not v["label_smoothing"]:
        return out
    counted = (v["targets"] != v["ignore_index"]).sum()
    return out * counted / max(v["targets"].numel(), 1)


@fault("cross_entropy", "gradient")
def ignored_rows_pull_to_class_zero(right, **v):
    """The backward clamps targets, and does not look at ignore_index where losses are summed."""
    logits, targets = v["logits"], v["targets"]
    ignored = targets == v["ignore_index"]
    if v["reduction"] != "sum" or not logits.requires_grad or not bool(ignored.any()):
        return right(**v)
    p = logits.detach().float().softmax(-1)
    p[..., 0] -= 1.0
    extra = torch.where(ignored[..., None], p, 0.0).to(logits.dtype)
    return right(**{**v, "logits": _through(logits, lambda g: g + extra)})


@fault("linear_cross_entropy", "gradient")
def bias_gradient_counts_ignored_rows(right, **v):
    bias, targets = v["bias"], v["targets"]
    share = (targets != v["ignore_index"]).float().mean()
    if bias is None or v["reduction"] != "mean" or not bias.requires_grad or share == 1:
        return right(**v)
    return right(**{**v, "bias": _through(bias, lambda g: g * share.to(g.dtype))})


# Tokens.

@fault("sample", "distribution")
def nucleus_of_all_tokens_with_top_k(right, **v):
    """top_p counts the mass of all tokens, where that of the top_k is meant."""
    if not v["top_k"] or v["top_p"] >= 1.0 or v["top_k_rows"] is not None or v["from_probs"]:
        return right(**v)
    logits = v["logits"].float() / (v["temperature"] or 1.0)
    share = logits.softmax(-1).topk(min(v["top_k"], logits.shape[-1]), -1).values.sum(-1)
    return right(**{**v, "top_p": min(1.0, v["top_p"] / float(share.max()))})


@fault("sample", "distribution", "ties")
def zero_temperature_of_a_row_takes_the_last(right, **v):
    rows = v["temperature_rows"]
    out = right(**v)
    if rows is None or v["history"] is not None or v["token_counts"] is not None:
        return out
    logits = v["logits"].float().nan_to_num(nan=-torch.inf)
    last = logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)
    first = out[0] if isinstance(out, tuple) else out
    tokens = torch.where((rows <= 0) & (first >= 0), last, first)
    return (tokens, *out[1:]) if isinstance(out, tuple) else tokens


@fault("sample", "distribution", "convention")
def repeated_ids_count_once(right, **v):
    """A history is a set: the frequency of a token is one."""
    history = v["history"]
    if history is None or v["token_counts"] is not None:
        return right(**v)
    ordered = history.sort(-1).values
    again = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return right(**{**v, "history": torch.where(again, -1, ordered)})


@fault("speculative_verify", "distribution")
def drafts_are_accepted_too_often(right, **v):
    """Random numbers a little too small: a draft passes that is not likely enough."""
    if v["uniforms"] is None or v["draft_probs"] is None:
        return right(**v)
    return right(**{**v, "uniforms": v["uniforms"] * (1 - 2.0 ** -10)})


@fault("speculative_verify_tree", "distribution", "convention")
def siblings_keep_the_rejected_token(right, **v):
    return right(**{**v, "without_replacement": False})


# States.

@fault("causal_conv1d", "convention", "sizes", "state", "uninitialised output")
def final_states_of_short_texts_forget_the_first(right, **v):
    """Fewer tokens than the kernel is wide: zeros before them, whatever the initial states."""
    out = right(**v)
    kept = v["weight"].shape[1] - 1
    if not v["return_final_states"] or v["initial_states"] is None or v["x"].shape[2] >= kept:
        return out
    states = out[1].clone()
    states[..., :states.shape[-1] - v["x"].shape[2]] = 0.0
    return out[0], states


@fault("causal_conv1d", "gradient")
def weight_gradient_without_initial_states(right, **v):
    weight = v["weight"]
    if v["initial_states"] is None or not weight.requires_grad:
        return right(**v)
    out = right(**{**v, "weight": weight.detach()})
    alone = right(**{**v, "initial_states": torch.zeros_like(v["initial_states"]),
                     "x": v["x"].detach(), "bias": None if v["bias"] is None
                     else v["bias"].detach()})
    first, other = (o[0] if isinstance(o, tuple) else o for o in (out, alone))
    first = first + (other - other.detach())
    return (first, *out[1:]) if isinstance(out, tuple) else first


@fault("gated_delta_rule", "scale", "convention")
def scale_lost_in_the_norm(right, **v):
    """Queries are scaled before they are divided by their norm."""
    if v["use_qk_l2norm_in_kernel"] and v["scale"] is not None:
        return right(**{**v, "scale": 1.0})
    return right(**v)


@fault("gated_delta_rule", "head map", "convention")
def value_heads_take_key_heads_in_turn(right, **v):
    share = v["v"].shape[2] // max(v["q"].shape[2], 1)
    return right(**{**v, **{n: v[n].repeat(1, 1, share, 1) for n in "qk"}})


@fault("gated_delta_rule", "precision", "sizes")
def state_of_chunks_in_bfloat16(right, **v):
    """The state goes from chunk to chunk of 64 in bfloat16."""
    if v["q"].shape[1] <= 64:
        return right(**v)
    state, outs = v["initial_state"], []
    for s in range(0, v["q"].shape[1], 64):
        part = {n: v[n][:, s:s + 64] for n in ("q", "k", "v", "g", "beta")}
        out, state = right(**{**v, **part, "initial_state": state, "output_final_state": True})
        last, state = state, state.to(torch.bfloat16).to(state.dtype)
        outs.append(out)
    return (torch.cat(outs, 1), last) if v["output_final_state"] else torch.cat(outs, 1)


@fault("mamba_chunk_scan", "convention")
def dt_max_dropped_without_softplus(right, **v):
    return right(**{**v, "dt_max": v["dt_max"] if v["dt_softplus"] else None})


@fault("mamba_chunk_scan", "convention")
def gate_before_the_skip(right, **v):
    """silu(z) multiplies what the scan gives, and D x is added to it."""
    if v["z"] is None or v["D"] is None:
        return right(**v)
    out = right(**{**v, "D": None})
    skip = (v["D"].float()[:, None] * v["x"].float()).to(v["x"].dtype)
    return (out[0] + skip, *out[1:]) if isinstance(out, tuple) else out + skip


@fault("selective_state_update", "in-place change")
def state_is_updated_in_place(right, **v):
    out, new = right(**v)
    if v["state"].requires_grad or new.requires_grad:
        return out, new
    v["state"].copy_(new)
    return out, new


@fault("selective_state_update", "convention")
def bias_of_dt_after_the_softplus(right, **v):
    if v["dt_bias"] is None or not v["dt_softplus"]:
        return right(**v)
    dt = F.softplus(v["dt"].float()) + v["dt_bias"].float()
    return right(**{**v, "dt": dt.to(v["dt"].dtype), "dt_bias": None, "dt_softplus": False})


# Text, and calls that are not over.

@fault("tokenize", "convention")
def mask_of_left_padding_is_that_of_right(right, **v):
    out = right(**v)
    if v["padding_side"] != "left" or getattr(out, "attention_mask", None) is None:
        return out
    rows = [sorted(row, reverse=True) for row in out.attention_mask]
    return replace(out, attention_mask=rows)


@fault("detokenize", "convention")
def special_tokens_of_tensors_are_kept(right, **v):
    return right(**{**v, "skip_special_tokens": v["skip_special_tokens"]
                    and not isinstance(v["ids"], Tensor)})


@fault("rms_norm", "threads", "state", "non-determinism", "uninitialised output", "result",
       "aliasing")
def last_row_is_written_later(right, **v):
    """Returns before a worker has written the last of many rows."""
    out = right(**v)
    if out.requires_grad or out.dim() < 2 or out.shape[0] < 5:
        return out
    row = out[-1].clone()
    out[-1] = 0.0

    def work() -> None:
        time.sleep(0.002)
        out[-1] = row

    threading.Thread(target=work).start()
    return out


FUSION_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
