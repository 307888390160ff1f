"""Kernels that are wrong as the author of a new kernel may write them: norms, projections, losses,
tables, sampling, experts and codes of few bits. Each is wrong in one way.

`benchmarks/planted_faults.py --set authors` runs all of them, with those of
attention_author_faults.py and state_author_faults.py.
"""

from __future__ import annotations

from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from process_faults import _WithBackward
from torch.nn import functional as F

from layerzero.ops.formulas.moe import activate

_BEFORE = len(FAULTS)


def _on_first(out: Any, change: Any) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


# Norms.

@fault("layer_norm", "convention", "precision")
def variance_over_one_fewer(right, x, **v):
    n = x.shape[-1]
    if n < 2:
        return right(x, **v)
    eps = v["eps"]
    wide = x.float()
    var = wide.var(-1, unbiased=False, keepdim=True)
    factor = ((var + eps) / (var * n / (n - 1) + eps)).sqrt()
    plain = right(x.float(), None, None, eps) * factor
    plain = plain if v["weight"] is None else plain * v["weight"].float()
    return (plain if v["bias"] is None else plain + v["bias"].float()).to(x.dtype)


@fault("layer_norm", "convention")
def bias_is_scaled_by_the_weight(right, x, weight=None, bias=None, eps=1e-5):
    if weight is not None and bias is not None:
        bias = bias * weight.to(bias.dtype)
    return right(x, weight, bias, eps)


@fault("rms_norm", "convention", "sizes", "precision", "last rows")
def mean_over_a_multiple_of_eight(right, x, weight=None, eps=1e-6, offset=0.0):
    """The width is rounded up to whole vectors where the mean is taken."""
    n = x.shape[-1]
    wide = x.float()
    mean = wide.square().sum(-1, keepdim=True) / (-(-n // 8) * 8)
    out = wide * torch.rsqrt(mean + eps)
    return (out if weight is None else out * (weight.float() + offset)).to(x.dtype)


@fault("rms_norm", "stale cache", "state")
class WeightByItsShape:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, x, weight=None, **v):
        if weight is not None and not weight.requires_grad:
            key = (weight.shape, weight.dtype)
            weight = self.kept.setdefault(key, weight.clone())
        return right(x, weight, **v)


@fault("add_rms_norm", "convention", "scale")
def residual_is_returned_as_it_came(right, **v):
    out = right(**v)
    return out[0], v["residual"].clone()


@fault("add_rms_norm", "in-place change", "aliasing")
def adds_into_the_residual(right, **v):
    out = right(**v)
    if not torch.is_grad_enabled() and not v["residual"].is_inference():
        v["residual"].copy_(out[1])
    return out


@fault("group_norm", "convention", "layout", "sizes")
def groups_of_interleaved_channels(right, x, groups, weight=None, bias=None, eps=1e-5):
    c = x.shape[1]
    order = torch.arange(c).view(-1, groups).T.reshape(-1)
    plain = right(x[:, order], groups, None, None, eps)[:, order.argsort()]
    shape = (1, -1, *(1,) * (x.dim() - 2))
    wide = plain.float()
    wide = wide if weight is None else wide * weight.float().view(shape)
    return torch.empty_like(x).copy_(wide if bias is None else wide + bias.float().view(shape))


@fault("group_norm", "layout")
def channels_last_is_read_flat(right, x, **v):
    if x.dim() == 4 and not x.is_contiguous() and x.permute(0, 2, 3, 1).is_contiguous():
        flat = x.permute(0, 2, 3, 1).reshape(x.shape).contiguous()
        return torch.empty_like(x).copy_(right(flat, **v))
    return right(x, **v)


# Projections.

@fault("linear", "convention")
def bias_after_the_activation(right, **v):
    if v["activation"] is None or v["bias"] is None:
        return right(**v)
    return right(**{**v, "bias": None}) + v["bias"]


@fault("linear", "precision", "dtype")
def partial_sums_rounded_every_64(right, **v):
    x, weight = v["x"], v["weight"]
    if x.dtype not in (torch.float16, torch.bfloat16) or x.shape[-1] <= 64 \
            or torch.is_grad_enabled():
        return right(**v)
    total = sum(a @ b.T for a, b in zip(x.split(64, -1), weight.split(64, -1)))
    total = total if v["bias"] is None else total + v["bias"]
    return total if v["activation"] is None else activate(total, v["activation"])


@fault("linear", "stale cache", "state")
class PackedByAddressAndShape:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        weight = v["weight"]
        if weight.requires_grad or not weight.is_contiguous():
            return right(**v)
        key = (weight.data_ptr(), weight.shape, weight.dtype)
        return right(**{**v, "weight": self.kept.setdefault(key, weight.clone())})


@fault("linear", "gradient")
def input_gradient_of_a_vector_is_summed(right, **v):
    if v["bias"] is not None and v["x"].dim() > 2:
        n = v["x"].shape[0]
        v["bias"] = _WithBackward.apply(v["bias"], lambda g: g / max(n, 1))
    return right(**v)


@fault("mlp", "convention")
def up_and_gate_exchanged(right, **v):
    if v["weight_up"] is not None and v["bias_up"] is None and v["bias_in"] is None:
        v["weight_in"], v["weight_up"] = v["weight_up"], v["weight_in"]
    elif v["weight_up"] is None and v["weight_in"].shape[0] == 2 * v["weight_down"].shape[1] \
            and v["activation"] in ("swiglu", "geglu", "geglu_tanh", "reglu"):
        a, b = v["weight_in"].chunk(2)
        v["weight_in"] = torch.cat((b, a))
        if v["bias_in"] is not None:
            c, d = v["bias_in"].chunk(2)
            v["bias_in"] = torch.cat((d, c))
    return right(**v)


@fault("mlp", "convention", "precision")
def erf_by_its_tanh_approximation(right, **v):
    names = {"gelu": "gelu_tanh", "geglu": "geglu_tanh"}
    return right(**{**v, "activation": names.get(v["activation"], v["activation"])})


@fault("mlp", "convention", "fault")
def separate_up_bias_is_forgotten(right, **v):
    return right(**{**v, "bias_up": None})


@fault("grouped_gemm", "convention", "fault", "sizes", "mask", "last rows")
def offsets_taken_for_starts(right, **v):
    ends = v["offsets"]
    if ends is not None and ends.numel() > 1:
        v["offsets"] = torch.cat((ends[1:], ends[-1:]))
    return right(**v)


@fault("grouped_gemm", "uninitialised output", "sizes", "last rows")
def rows_past_the_last_group_are_left(right, **v):
    out = right(**v)
    bounds = v["offsets"] if v["offsets"] is not None else v["group_sizes"].cumsum(0)
    end = int(bounds[-1])
    if end < out.shape[0] and not torch.is_grad_enabled():
        fresh = torch.empty_like(out)
        fresh[:end] = out[:end]
        return fresh
    return out


# Losses and tables.

@fault("cross_entropy", "non-finite values", "convention", "mask")
def loss_of_no_rows_is_zero(right, **v):
    out = right(**v)
    return out.nan_to_num(nan=0.0) if v["reduction"] == "mean" and bool(
        (v["targets"] == v["ignore_index"]).all()) else out


@fault("cross_entropy", "mask", "convention")
def only_minus_one_hundred_is_ignored(right, **v):
    if v["ignore_index"] == -100:
        return right(**v)
    return right(**{**v, "targets": v["targets"].clamp(min=0), "ignore_index": -100})


@fault("cross_entropy", "mask", "convention")
def ignored_rows_are_smoothed(right, **v):
    if not v["label_smoothing"] or v["reduction"] != "none":
        return right(**v)
    log_p = v["logits"].float().log_softmax(-1)
    hidden = v["targets"] == v["ignore_index"]
    out = right(**v)
    return torch.where(hidden, -v["label_smoothing"] * log_p.mean(-1).to(out.dtype), out)


@fault("cross_entropy", "in-place change")
def subtracts_the_maximum_in_place(right, **v):
    out = right(**v)
    with torch.no_grad():
        logits = v["logits"]
        if logits.numel() and not logits.is_inference():
            logits.data.sub_(logits.amax(-1, keepdim=True))
    return out


@fault("linear_cross_entropy", "convention", "scale")
def mean_over_every_row(right, **v):
    out = right(**v)
    if v["reduction"] != "mean":
        return out
    kept = (v["targets"] != v["ignore_index"]).sum()
    return out * kept / max(v["targets"].numel(), 1)


@fault("linear_cross_entropy", "convention")
def smoothing_ignored_where_there_is_a_bias(right, **v):
    return right(**{**v, "label_smoothing": 0.0 if v["bias"] is not None
                    else v["label_smoothing"]})


@fault("embedding", "sizes", "convention", "last rows", "fault")
def last_row_of_the_table_is_not_reached(right, **v):
    return right(**{**v, "ids": v["ids"].clamp(max=max(v["weight"].shape[0] - 2, 0))})


@fault("embedding", "aliasing")
def one_row_is_a_view_of_the_table(right, **v):
    ids, weight = v["ids"], v["weight"]
    if ids.numel() == 1 and v["scale"] == 1.0 and not torch.is_grad_enabled():
        return weight[int(ids)].view(*ids.shape, weight.shape[1])
    return right(**v)


@fault("embedding", "dtype", "layout", "convention", "sizes", "fault")
def ids_of_32_bits_read_as_64(right, **v):
    ids = v["ids"]
    if ids.dtype == torch.int32 and ids.numel() > 1:
        v["ids"] = ids.flatten().repeat(2)[::2][:ids.numel()].view(ids.shape)
    return right(**v)


# Sampling.

@fault("sample", "distribution", "convention")
def negative_logits_are_divided_by_the_penalty(right, **v):
    """The repetition penalty divides, whatever the sign of the logit."""
    if v["repetition_penalty"] == 1.0 or v["repetition_penalty_rows"] is not None \
            or v["history"] is None or v["token_counts"] is not None:
        return right(**v)
    logits, history = v["logits"].clone(), v["history"]
    for row, seen in zip(logits, history):
        ids = seen[seen >= 0].unique()
        row[ids] = torch.where(row[ids] < 0, row[ids] / v["repetition_penalty"] ** 2, row[ids])
    return right(**{**v, "logits": logits})


@fault("sample", "distribution", "convention")
def padding_of_the_history_penalises_the_last_token(right, **v):
    history = v["history"]
    if history is not None:
        v["history"] = torch.where(history < 0, v["logits"].shape[1] - 1, history)
    return right(**v)


@fault("sample", "distribution", "convention")
def filters_before_the_temperature(right, **v):
    """top_p and min_p look at the probabilities at temperature 1."""
    t = v["temperature"]
    if v["top_p"] >= 1.0 or t in (0.0, 1.0) or v["temperature_rows"] is not None:
        return right(**v)
    return right(**{**v, "top_p": min(v["top_p"] * 1.1, 1.0)})


@fault("sample", "distribution", "convention")
def offset_of_the_stream_is_ignored(right, **v):
    return right(**{**v, "offset": 0})


@fault("sample", "distribution", "convention")
def seeds_of_rows_by_their_position(right, **v):
    rows = v["seed_rows"]
    return right(**{**v, "seed_rows": None if rows is None else rows + torch.arange(len(rows))})


@fault("sample", "distribution", "convention", "ties")
def rows_with_temperature_zero_are_sampled(right, **v):
    rows = v["temperature_rows"]
    return right(**{**v, "temperature_rows": None if rows is None else rows.clamp(min=1e-2)})


@fault("sample", "distribution", "convention")
def log_probabilities_of_the_whole_vocabulary(right, **v):
    out = right(**v)
    if not isinstance(out, tuple) or (v["top_k"] == 0 and v["top_p"] == 1.0):
        return out
    whole = right(**{**v, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
    return out[0], torch.minimum(out[1], whole[1])


@fault("sample", "in-place change")
def sorts_the_logits_in_place(right, **v):
    out = right(**v)
    if v["top_k"] and not v["logits"].is_inference():
        v["logits"].data.copy_(v["logits"].sort(-1, descending=True).values)
    return out


@fault("speculative_verify", "distribution")
def rejected_token_replaced_from_the_target(right, **v):
    """The token after a rejection comes from p, not from max(p - q, 0)."""
    accepted, number, following = right(**v)
    drafted = v["draft_tokens"].shape[1]
    if v["draft_probs"] is None or v["uniforms"] is None or not drafted:
        return accepted, number, following
    rows = torch.arange(len(number))
    p = v["target_probs"][rows, number].double().nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
    edge = v["uniforms"][:, -1:].double() * p.sum(-1, keepdim=True)
    drawn = (p.cumsum(-1) > edge).to(torch.int64).argmax(-1)
    return accepted, number, torch.where((number < drafted) & (following >= 0), drawn, following)


@fault("speculative_verify", "distribution", "convention")
def number_counts_the_next_token_too(right, **v):
    accepted, number, following = right(**v)
    return accepted, number + (following >= 0), following


@fault("speculative_verify", "distribution", "convention")
def certain_draft_is_always_accepted(right, **v):
    if v["draft_probs"] is not None or v["uniforms"] is None:
        return right(**v)
    uniforms = v["uniforms"].clone()
    uniforms[:, :-1] = 0
    return right(**{**v, "uniforms": uniforms})


@fault("speculative_verify_tree", "distribution", "convention")
def siblings_are_drawn_with_replacement(right, **v):
    return right(**{**v, "without_replacement": False})


@fault("speculative_verify_tree", "distribution")
def only_the_first_child_is_tried(right, **v):
    parents = v["parents"].clone()
    for i in range(parents.shape[1]):
        for row in range(parents.shape[0]):
            if int(parents[row, i]) in parents[row, :i].tolist():
                parents[row, i] = parents.shape[1] + 1
    return right(**{**v, "parents": parents})


# Experts.

@fault("moe", "head map", "convention", "fault")
def offset_added_instead_of_subtracted(right, **v):
    return right(**{**v, "expert_offset": -v["expert_offset"]})


@fault("moe", "capacity")
def last_tokens_come_first_to_an_expert(right, **v):
    if not v["capacity"] or v["topk_ids"] is None or v["x"].dim() != 2:
        return right(**v)
    flipped = {n: v[n].flip(0) for n in ("x", "topk_ids", "topk_weights")}
    return right(**{**v, **flipped}).flip(0)


@fault("moe", "scale", "convention")
def weights_of_a_slot_are_normalised_again(right, **v):
    weights = v["topk_weights"]
    if weights is not None and weights.shape[-1] > 1:
        v["topk_weights"] = weights / weights.sum(-1, keepdim=True)
    return right(**v)


@fault("moe_gate", "ties", "convention", "distribution", "unknown")
def experts_in_the_order_of_their_index(right, **v):
    ids, weights = right(**v)
    order = ids.argsort(-1)
    return ids.gather(-1, order), weights.gather(-1, order)


@fault("moe_gate", "distribution", "convention")
def groups_by_their_best_expert_beside_a_bias(right, **v):
    """With a correction bias a group counts its two best; this takes one."""
    bias, n = v["e_score_correction_bias"], v["n_group"]
    if bias is None or n < 2:
        return right(**v)
    wide = v["logits"].float()
    scores = wide.sigmoid() if v["scoring"] == "sigmoid" else wide.softmax(-1)
    best = (scores + bias.float()).unflatten(-1, (n, -1)).amax(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., :v["topk_group"]]
    open_groups = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
    seen = open_groups.repeat_interleave(scores.shape[-1] // n, -1)
    choice = (scores + bias.float()).masked_fill(~seen, -torch.inf)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :v["top_k"]]
    weights = scores.gather(-1, ids)
    if v["normalize"]:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    return ids, weights * v["routed_scaling_factor"]


@fault("moe_gate", "scale", "convention")
def softmax_over_the_chosen_alone(right, **v):
    ids, weights = right(**v)
    if v["scoring"] != "softmax" or v["normalize"]:
        return ids, weights
    return ids, F.softmax(v["logits"].float().gather(-1, ids), -1) * v["routed_scaling_factor"]


LAYER_AUTHOR_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # the long lane runs them
