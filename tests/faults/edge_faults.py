"""Kernels that are wrong at an edge: of numbers, of sizes together with an argument, of a page, a
group or a block. Each is wrong in one way.

`benchmarks/planted_faults.py --set edges` runs all of them, with those of use_faults.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from attention_author_faults import _blockwise, _on_first, _on_second, _seq
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor

from layerzero.ops.formulas.block_masks import dense_mask

_BEFORE = len(FAULTS)


# A size together with an argument.

@fault("linear", "convention", "sizes")
def one_row_path_forgets_the_activation(right, **v):
    if v["x"].numel() == v["x"].shape[-1] and v["activation"] in ("gelu", "relu"):
        v["activation"] = None
    return right(**v)


@fault("quantized_linear", "convention", "sizes", "scale")
def one_row_path_forgets_the_zeros(right, **v):
    if v["x"].numel() == v["x"].shape[-1] and v["zeros"] is not None:
        v["zeros"] = torch.full_like(v["zeros"], 8 if v["format"] == "int4" else 0)
    return right(**v)


@fault("mlp", "convention", "sizes")
def one_row_path_forgets_the_last_bias(right, **v):
    return right(**{**v, "bias_down": None if v["x"].numel() == v["x"].shape[-1]
                    else v["bias_down"]})


@fault("attention", "window", "sizes")
def kernel_for_head_dim_64_ignores_the_window(right, **v):
    if v["query"].shape[-1] == 64:
        v["window_left"] = -1
    return right(**v)


@fault("attention", "scale", "sizes", "convention", "mask")
def kernel_for_head_dim_128_has_no_softcap_when_causal(right, **v):
    if v["query"].shape[-1] == 128 and v["is_causal"]:
        v["softcap"] = 0.0
    return right(**v)


@fault("paged_attention", "scale", "sizes", "convention")
def pages_of_32_forget_the_key_scale(right, **v):
    size = v["key_cache"].shape[1 if v["kv_layout"] == "NHD" else 2]
    if size == 32 and v["key_scale"] is not None:
        v["key_scale"] = torch.ones_like(v["key_scale"])
    return right(**v)


@fault("rope", "convention", "sizes", "layout")
def decode_of_interleaved_pairs_turns_halves(right, **v):
    if v["q"].shape[2 if v["layout"] == "bhsd" else 1] == 1 and v["style"] == "interleaved":
        v["style"] = "rotate_half"
    return right(**v)


@fault("varlen_attention", "position bias", "window", "convention", "mask")
def slopes_beside_a_window_are_dropped(right, **v):
    return right(**{**v, "alibi_slopes": None if v["window_left"] >= 0 else v["alibi_slopes"]})


@fault("attention", "convention", "scale")
def lse_before_the_softcap(right, **v):
    if not v["softcap"] or not v["return_lse"]:
        return right(**v)
    return right(**v)[0], right(**{**v, "softcap": 0.0})[1]


@fault("paged_attention", "non-finite values", "mask", "convention")
def lse_of_no_keys_is_plus_infinity(right, **v):
    return _on_second(right(**v), lambda lse: lse.masked_fill(lse == -math.inf, math.inf))


@fault("varlen_attention", "convention", "scale")
def packed_lse_without_the_scale(right, **v):
    if not v["return_lse"] or v["scale"] is None:
        return right(**v)
    return right(**v)[0], right(**{**v, "scale": None})[1]


# Long sums in few bits.

@fault("linear", "precision", "sizes")
def long_sums_split_in_16_bits(right, **v):
    """Parts of a long inner size are added in the dtype of x."""
    x, weight, k = v["x"], v["weight"], v["x"].shape[-1]
    if k <= 2048 or x.dtype.itemsize != 2 or torch.is_grad_enabled() or v["activation"]:
        return right(**v)
    total = sum(a @ b.T for a, b in zip(x.split(64, -1), weight.split(64, -1)))
    return total if v["bias"] is None else total + v["bias"]


@fault("attention", "precision", "sizes")
def long_contexts_weigh_in_16_bits(right, **v):
    """Beyond 512 keys the weights are rounded to bfloat16 in every dtype."""
    axis = _seq(v)
    if v["key"].shape[axis] <= 512 or v["value"].dtype == torch.bfloat16:
        return right(**v)
    return right(**{**v, "value": v["value"].bfloat16().to(v["value"].dtype)})


@fault("gated_delta_rule", "precision", "sizes")
def state_of_a_long_sequence_in_bfloat16(right, **v):
    n = v["q"].shape[1]
    if n <= 256 or torch.is_grad_enabled() or not n:
        return right(**v)
    first = {k: v[k][:, :n // 2] for k in ("q", "k", "v", "g", "beta")}
    rest = {k: v[k][:, n // 2:] for k in ("q", "k", "v", "g", "beta")}
    a, state = right(**{**v, **first, "output_final_state": True})
    out = right(**{**v, **rest, "initial_state": state.bfloat16().to(state.dtype)})
    whole = torch.cat((a, out[0] if isinstance(out, tuple) else out), 1)
    return (whole, out[1]) if v["output_final_state"] else whole


@fault("rms_norm", "precision", "sizes", "overflow")
def long_rows_summed_in_half_precision(right, x, weight=None, eps=1e-6, offset=0.0):
    if x.shape[-1] <= 4096 or x.dtype != torch.bfloat16 or torch.is_grad_enabled():
        return right(x, weight, eps, offset=offset)
    total = sum(part.square().sum(-1, keepdim=True) for part in x.split(16, -1))
    out = x.float() * torch.rsqrt(total.float() / x.shape[-1] + eps)
    return (out if weight is None else out * (weight.float() + offset)).to(x.dtype)


@fault("cross_entropy", "precision", "sizes")
def large_vocabularies_in_half_precision(right, **v):
    if v["logits"].shape[-1] <= 8192 or v["logits"].dtype != torch.float32:
        return right(**v)
    return right(**{**v, "logits": v["logits"].half()}).float()


# Extreme numbers.

@fault("cross_entropy", "overflow", "non-finite values", "unknown", "precision")
def maximum_of_a_row_starts_at_zero(right, **v):
    """Logits far below zero leave no exponential above zero."""
    low = v["logits"].float().amax(-1) < -100 if v["logits"].numel() else None
    out = right(**v)
    if low is None or not bool(low.any()) or v["logits"].requires_grad:
        return out
    return out * math.inf if v["reduction"] != "none" else torch.where(low, math.inf, out)


@fault("attention", "overflow", "non-finite values", "unknown", "mask", "precision")
def maximum_of_the_scores_starts_at_zero(right, **v):
    if torch.is_grad_enabled() or v["dropout_p"]:
        return right(**v)
    out, lse = right(**{**v, "return_lse": True})
    low = (lse < -100) & (lse > -math.inf)
    low = low if v["layout"] == "bhsd" or low.shape == out.shape[:-1] else low.transpose(1, 2)
    out = out.masked_fill(low[..., None], 0.0)
    return (out, lse) if v["return_lse"] else out


@fault("merge_attention", "overflow", "non-finite values", "unknown", "convention", "precision")
def parts_with_a_low_lse_count_nothing(right, outs, lses):
    """exp(lse) is taken as it is where it is below one."""
    out, lse = right(outs, lses)
    low = (lse < -87) & (lse > -math.inf)
    return out.masked_fill(low[..., None], 0.0), lse


@fault("mamba_chunk_scan", "overflow", "non-finite values", "unknown", "precision")
def softplus_overflows(right, **v):
    """log(1 + exp(dt)) in half precision: infinite beyond 11."""
    dt = v["dt"].float() + (0 if v["dt_bias"] is None else v["dt_bias"].float())
    if v["dt_softplus"] and dt.numel() and float(dt.max()) > 11 and not torch.is_grad_enabled():
        return _on_first(right(**v), lambda out: out * math.nan)
    return right(**v)


@fault("rms_norm", "non-finite values", "unknown")
def minus_infinity_becomes_zero(right, x, **v):
    return right(torch.where(x == -math.inf, 0, x), **v)


@fault("layer_norm", "non-finite values", "convention")
def nan_weights_count_as_one(right, x, weight=None, bias=None, eps=1e-5):
    if weight is not None:
        weight = torch.where(weight.isnan(), 1, weight)
    return right(x, weight, bias, eps)


@fault("linear", "non-finite values")
def nan_in_the_bias_is_zero(right, **v):
    bias = v["bias"]
    return right(**{**v, "bias": None if bias is None else torch.where(bias.isnan(), 0, bias)})


@fault("gated_delta_rule", "non-finite values")
def nan_in_the_first_state_is_zero(right, **v):
    state = v["initial_state"]
    return right(**{**v, "initial_state": None if state is None
                    else torch.where(state.isnan(), 0, state)})


@fault("cross_entropy", "non-finite values", "overflow", "unknown", "mask")
def first_chunk_of_minus_infinity_is_nan(right, **v):
    """An online logsumexp whose first 32 logits are all -inf."""
    logits = v["logits"]
    if logits.shape[-1] <= 32 or not logits.numel():
        return right(**v)
    lost = (logits[..., :32] == -math.inf).all(-1)
    return right(**{**v, "logits": logits.masked_fill(lost[..., None], math.nan)})


@fault("attention", "non-finite values", "mask", "sizes")
def first_tile_hidden_by_the_mask_is_nan(right, **v):
    mask = v["attn_mask"]
    if mask is None or mask.dtype != torch.bool or mask.shape[-1] <= 16:
        return right(**v)
    lost = ~mask[..., :16].any(-1, keepdim=True) & mask.any(-1, keepdim=True)
    if v["layout"] == "bshd":
        return right(**v)
    return _on_first(right(**v), lambda out: torch.where(lost.expand(*out.shape[:-1], 1), math.nan,
                                                         out))


@fault("quantize", "scale", "overflow", "non-finite values", "unknown", "precision", "sizes",
       "convention")
def reciprocal_of_a_tiny_scale_overflows(right, **v):
    """Multiplies by 1 / scale, which is infinite for rows of very small numbers."""
    out = right(**v)
    x = v["x"].float()
    if v["format"] != "int8" or v["scales"] is not None or not x.numel() or x.dim() < 1:
        return out
    tiny = (x.abs().amax(-1, keepdim=True) < 1e-36) & (x != 0)
    return _on_first(out, lambda codes: torch.where(tiny, 127 * x.sign(), codes).to(codes.dtype))


@fault("quantize", "convention", "ties", "precision", "unknown", "sizes")
def halves_round_away_from_zero(right, **v):
    if v["format"] != "int8" or not v["symmetric"] or v["block_size"] or v["block_rows"] > 1:
        return right(**v)
    codes, scales, *rest = right(**v)
    steps = v["x"].float() / scales.float()
    tied = (steps.abs() % 1 == 0.5) & (steps.abs() < 126)
    away = (steps.abs() + 0.5).floor() * steps.sign()
    return (torch.where(tied, away, codes).to(codes.dtype), scales, *rest)


@fault("quantized_linear", "non-finite values", "overflow", "sizes", "unknown", "convention")
def row_of_zeros_divides_by_zero(right, **v):
    """int8 activations: a row of zeros has a scale of zero."""
    x = v["x"]
    if v["activations"] != "int8" or not x.numel():
        return right(**v)
    lost = (x == 0).all(-1, keepdim=True)
    return torch.where(lost, math.nan, right(**v))


@fault("moe_gate", "distribution", "convention", "unknown")
def closed_groups_get_zero(right, **v):
    """A bias may make every score of an open group negative."""
    bias, n = v["e_score_correction_bias"], v["n_group"]
    if bias is None or n < 2:
        return right(**v)
    wide = v["logits"].float()
    scores = wide.sigmoid() if v["scoring"] == "sigmoid" else wide.softmax(-1)
    groups = (scores + bias.float()).unflatten(-1, (n, -1))
    best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., :v["topk_group"]]
    hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
    choice = groups.masked_fill(hidden[..., None], 0.0).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :v["top_k"]]
    weights = scores.gather(-1, ids)
    if v["normalize"]:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    return ids, weights * v["routed_scaling_factor"]


# Draws.

@fault("sample", "distribution")
def uniform_of_zero_takes_the_first_token(right, **v):
    """cumulative >= u holds at once for u = 0, whatever the first weight is."""
    out, uniforms = right(**v), v["uniforms"]
    if uniforms is None:
        return out
    zero = uniforms.reshape(-1) == 0
    return _on_first(out, lambda t: torch.where(zero & (t >= 0), 0, t))


@fault("sample", "distribution")
def uniform_of_nearly_one_takes_the_last_token(right, **v):
    out, uniforms = right(**v), v["uniforms"]
    if uniforms is None:
        return out
    one = uniforms.reshape(-1).double() >= 1 - 2.0 ** -24
    return _on_first(out, lambda t: torch.where(one & (t >= 0), v["logits"].shape[-1] - 1, t))


@fault("sample", "distribution", "convention", "index overflow")
def seeds_in_32_bits(right, **v):
    rows, seed = v["seed_rows"], v["seed"]
    return right(**{**v, "seed_rows": None if rows is None else rows & 0xFFFFFFFF,
                    "seed": None if seed is None else seed & 0xFFFFFFFF})


@fault("sample", "distribution", "convention", "index overflow")
def step_in_16_bits(right, **v):
    return right(**{**v, "offset": v["offset"] & 0xFFFF})


@fault("speculative_verify", "distribution", "convention", "index overflow")
def verification_seeds_in_32_bits(right, **v):
    rows, seed = v["seed_rows"], v["seed"]
    return right(**{**v, "seed_rows": None if rows is None else rows & 0xFFFFFFFF,
                    "seed": None if seed is None else seed & 0xFFFFFFFF})


@fault("speculative_verify", "distribution", "convention")
def impossible_token_accepted_at_zero(right, **v):
    """u <= p / q accepts a token of probability zero where u is zero."""
    uniforms = v["uniforms"]
    if uniforms is None or v["draft_probs"] is None:
        return right(**v)
    target = v["target_probs"].clone()
    for i in range(v["draft_tokens"].shape[1]):
        rows = (uniforms[:, i] == 0).nonzero()[:, 0].tolist()
        for r in rows:
            token = int(v["draft_tokens"][r, i])
            if 0 <= token < target.shape[-1] and float(target[r, i, token]) == 0:
                target[r, i, token] = 1e-6
    return right(**{**v, "target_probs": target})


@fault("sample", "distribution", "convention")
def presence_counts_the_prompt_too(right, **v):
    """With both a history and counts, presence looks at the history."""
    if v["history"] is None or v["token_counts"] is None:
        return right(**v)
    history, vocab = v["history"], v["logits"].shape[-1]
    seen = torch.zeros((history.shape[0], vocab + 1))
    seen.scatter_(1, torch.where((history >= 0) & (history < vocab), history, vocab).long(), 1.0)
    counts = torch.maximum(v["token_counts"], seen[:, :vocab].to(v["token_counts"].dtype))
    return right(**{**v, "token_counts": counts})


@fault("speculative_verify_tree", "distribution", "convention")
def tree_with_two_roots_keeps_one(right, **v):
    parents = v["parents"].clone()
    for row in parents:
        roots = (row < 0).nonzero()[:, 0].tolist()
        for i in roots[1:]:
            row[i] = roots[0]
    return right(**{**v, "parents": parents})


# Pages, groups and experts.

@fault("paged_attention", "stale page", "mask", "unknown", "sizes")
def full_last_page_is_dropped(right, **v):
    """A context of whole pages: the last one is taken for the next, empty one."""
    size = v["key_cache"].shape[1 if v["kv_layout"] == "NHD" else 2]
    lens = v["context_lens"]
    full = (lens % size == 0) & (lens > size)
    return right(**{**v, "context_lens": torch.where(full, lens - size, lens)})


@fault("paged_attention", "stale page", "unknown", "mask", "sizes", "convention")
def a_page_belongs_to_one_sequence(right, **v):
    """Goes through the pages: one that two sequences share counts for the last of them."""
    table = v["block_table"].clone()
    size = v["key_cache"].shape[1 if v["kv_layout"] == "NHD" else 2]
    used = [table[i, :-(-int(n) // size)] for i, n in enumerate(v["context_lens"])]
    last = {int(p): i for i, pages in enumerate(used) for p in pages}
    for i, pages in enumerate(used):
        for j, p in enumerate(pages.tolist()):
            if last[p] != i:
                table[i, j] = (p + 1) % v["key_cache"].shape[0]
    return right(**{**v, "block_table": table})


@fault("paged_attention", "stale page", "convention", "unknown", "mask", "sizes")
def pages_taken_for_one_run(right, **v):
    """The first page and those that lie behind it."""
    table = v["block_table"].clone()
    size = v["key_cache"].shape[1 if v["kv_layout"] == "NHD" else 2]
    for i, n in enumerate(v["context_lens"].tolist()):
        pages = -(-n // size)
        if pages == 2:
            table[i, 1] = (table[i, 0] + 1) % v["key_cache"].shape[0]
    return right(**{**v, "block_table": table})


@fault("mla_paged_attention", "out of bounds", "stale page", "mask", "sizes", "last rows")
def last_latent_page_is_read_whole(right, **v):
    size = v["ckv_cache"].shape[1]
    lens = v["context_lens"]
    capacity = v["block_table"].shape[1] * size
    filled = ((lens + size - 1) // size * size).clamp(max=capacity)
    near = (filled - lens == 1)
    return right(**{**v, "context_lens": torch.where(near, filled, lens)})


@fault("grouped_gemm", "sizes", "unknown", "convention", "mask", "last rows")
def empty_group_takes_the_weight_of_the_next(right, **v):
    sizes = v["group_sizes"]
    if sizes is None or not bool((sizes == 0).any()):
        return right(**v)
    order = torch.cat((torch.arange(len(sizes))[sizes > 0], torch.arange(len(sizes))[sizes == 0]))
    keep = torch.zeros_like(sizes)
    keep[:int((sizes > 0).sum())] = sizes[sizes > 0]
    return right(**{**v, "weights": v["weights"][torch.arange(len(order))],
                    "group_sizes": keep})


@fault("moe", "sizes", "capacity", "unknown", "last rows", "convention")
def an_expert_holds_at_most_64_tokens(right, **v):
    if v["topk_ids"] is not None and not v["capacity"]:
        v["capacity"] = 64
    return right(**v)


@fault("varlen_attention", "mask", "unknown", "sizes", "last rows")
def sequence_after_an_empty_one_begins_late(right, **v):
    """Boundaries without repeats: what is empty is not counted."""
    starts = v["cu_seqlens_q"]
    empty = (starts.diff() == 0).nonzero()[:, 0].tolist()
    out = right(**v)
    if not empty or torch.is_grad_enabled():
        return out
    begin, end = int(starts[empty[0]]), int(starts[-1])
    return _on_first(out, lambda t: torch.cat((t[:begin], t[begin:end].roll(1, 0), t[end:])))


@fault("block_sparse_attention", "mask", "convention", "sizes", "head map", "unknown")
def blocks_of_the_first_sample(right, **v):
    mask = dense_mask(v["block_mask"])
    return _blockwise(v, mask[:1].expand_as(mask)) if mask.shape[0] > 1 else right(**v)


# Codes.

def _bytes(v: dict[str, Any], name: str, format: str, size: int, change: Any) -> dict[str, Any]:
    if v["format"] != format or not v[name].numel():
        return v
    blocks = v[name].clone(memory_format=torch.contiguous_format).unflatten(-1, (-1, size))
    change(blocks)
    return {**v, name: blocks.flatten(-2)}


@fault("dequantize", "convention", "scale", "precision", "unknown")
def upper_bits_of_q4_k_scales_are_lost(right, **v):
    def change(b: Tensor) -> None:
        b[..., 4:12] &= 63

    return right(**_bytes(v, "q", "q4_k", 144, change))


@fault("quantized_linear", "convention", "scale", "precision", "unknown")
def q6_k_scales_without_a_sign(right, **v):
    def change(b: Tensor) -> None:
        b[..., 192:208] &= 127

    return right(**_bytes(v, "weight_q", "q6_k", 210, change))


@fault("dequantize", "convention", "scale", "precision", "unknown", "sizes")
def fifth_bits_of_the_second_half_exchanged(right, **v):
    def change(b: Tensor) -> None:
        b[..., 4:6] = b[..., 4:6].flip(-1)

    return right(**_bytes(v, "q", "q5_0", 22, change))


@fault("quantized_linear", "convention", "scale", "precision", "unknown", "sizes")
def minimum_of_q4_1_is_subtracted(right, **v):
    def change(b: Tensor) -> None:
        b[..., 3] ^= 128

    return right(**_bytes(v, "weight_q", "q4_1", 20, change))


@fault("dequantize", "convention", "scale", "precision", "unknown", "sizes")
def blocks_of_rows_by_their_columns(right, **v):
    """With several rows to a scale the first row's scales serve all."""
    scales = v["scales"]
    if scales is None or v["block_rows"] < 2 or scales.shape[-2] < 2:
        return right(**v)
    return right(**{**v, "scales": scales[..., :1, :].expand_as(scales).contiguous()})


@fault("quantize", "convention", "scale", "precision", "unknown", "non-finite values")
def infinity_counts_in_the_scale(right, **v):
    x = v["x"]
    out = right(**v)
    if v["format"] != "int8" or v["scales"] is not None or not bool(x.isinf().any()):
        return out
    capped = x.float().nan_to_num(nan=0.0, posinf=1e4, neginf=-1e4)
    return right(**{**v, "x": capped.to(x.dtype)})


# Memory far away.

@fault("rms_norm", "index overflow")
def offsets_in_unsigned_32_bits(right, x, **v):
    if x.dim() > 1 and x.numel() and max((n - 1) * s for n, s in zip(x.shape, x.stride())) \
            >= 1 << 32:
        x = x[:1].expand_as(x)
    return right(x, **v)


@fault("moe", "index overflow", "layout")
def expert_offsets_in_32_bits(right, **v):
    w = v["w_down"]
    if w.numel() and w.shape[0] > 1 and (w.shape[0] - 1) * w.stride(0) >= 1 << 31:
        v["w_down"] = w[:1].expand_as(w)
    return right(**v)


# Text.

@fault("tokenize", "convention", "unknown", "sizes")
def padding_to_a_multiple_adds_a_whole_one(right, **v):
    out, n = right(**v), v["pad_to_multiple_of"]
    rows = out.ids if n and out.ids and isinstance(out.ids[0], list) else None
    if rows is None or not v["padding"] or any(len(r) % n for r in rows) \
            or v["return_offsets"] or out.attention_mask is None:
        return out
    pad = rows[0][-1:] * n
    return replace(out, ids=[r + pad for r in rows],
                   attention_mask=[m + [0] * n for m in out.attention_mask])


@fault("tokenize", "convention", "unknown", "sizes")
def empty_text_gets_no_special_tokens(right, **v):
    out = right(**v)
    if v["text"] == "" and out.ids:
        return replace(out, ids=[])
    if isinstance(v["text"], list) and not v["padding"] and out.attention_mask is None:
        return replace(out, ids=[[] if not t else i for t, i in zip(v["text"], out.ids)])
    return out


@fault("detokenize", "convention", "unknown", "sizes")
def special_tokens_are_skipped_at_the_ends_alone(right, **v):
    if not v["skip_special_tokens"]:
        return right(**v)
    whole = right(**{**v, "skip_special_tokens": False})
    clean = right(**v)
    if isinstance(clean, str):
        return clean if clean in whole else whole
    return [c if c in w else w for c, w in zip(clean, whole)]


EDGE_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
