"""Kernels that are wrong for some sizes, some arguments or some strides alone, in operations and
along axes that the other sets leave out. Each is wrong in one way.

`benchmarks/planted_faults.py --set shapes` runs all of them; the tests run a few.
"""

from __future__ import annotations

from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from process_faults import zero_from
from torch import Tensor

_BEFORE = len(FAULTS)
_OF_SIZE = ("sizes", "index overflow", "last rows")


def _on_first(out: Any, change: Any) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def _flat(t: Tensor) -> Tensor:
    """Reads the memory behind a tensor as if it were contiguous."""
    if t.is_contiguous() or 0 in t.stride():
        return t.roll(1, -1) if 0 in t.stride() else t
    return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride(), t.storage_offset())


# Sizes.

@fault("attention", *_OF_SIZE, "mask", "unknown")
def one_key_beyond_a_tile_is_dropped(right, **v):
    axis = 2 if v["layout"] == "bhsd" else 1
    n = v["key"].shape[axis]
    if n > 64 and n % 64 == 1 and v["attn_mask"] is None and not v["is_causal"]:
        v["key"], v["value"] = (v[t].narrow(axis, 0, n - 1) for t in ("key", "value"))
    return right(**v)


@fault("attention", *_OF_SIZE, "head map")
def batch_times_heads_past_2048(right, **v):
    q, axis = v["query"], 1 if v["layout"] == "bhsd" else 2
    wrong = q.shape[0] * q.shape[axis] > 2048
    return _on_first(right(**v), lambda out: zero_from(out, axis, q.shape[axis] // 2)
                     if wrong and q.shape[axis] > 1 else out * (0 if wrong else 1))


@fault("attention", *_OF_SIZE, "alignment", "mask")
def more_queries_than_keys_beyond_a_tile(right, **v):
    axis = 2 if v["layout"] == "bhsd" else 1
    sq, sk = v["query"].shape[axis], v["key"].shape[axis]
    return _on_first(right(**v), lambda out: out * (1.05 if sq > 128 > sk else 1))


@fault("layer_norm", *_OF_SIZE)
def rows_past_40000(right, x, **v):
    out = right(x, **v)
    return out if out.dim() < 2 or not out.numel() else zero_from(
        out.reshape(-1, out.shape[-1]), 0, 40000).view(out.shape)


@fault("linear", *_OF_SIZE)
def products_past_30000_rows(right, **v):
    out = right(**v)
    return out if out.dim() < 2 or not out.numel() else zero_from(
        out.reshape(-1, out.shape[-1]), 0, 30000).view(out.shape)


@fault("group_norm", *_OF_SIZE)
def channels_past_4096(right, x, **v):
    return zero_from(right(x, **v), 1, 4096)


@fault("group_norm", *_OF_SIZE)
def groups_past_512(right, x, groups, **v):
    out = right(x, groups=groups, **v)
    return zero_from(out, 1, x.shape[1] // groups * 512) if groups > 512 else out


@fault("group_norm", *_OF_SIZE)
def images_of_more_than_144_squared(right, x, **v):
    out = right(x, **v)
    return out * (1.1 if out.dim() == 4 and min(out.shape[2:]) > 144 else 1)


@fault("rope", *_OF_SIZE)
def heads_past_128_are_not_turned(right, **v):
    axis = 1 if v["layout"] == "bhsd" else 2
    return _on_first(right(**v), lambda q: zero_from(q, axis, 128))


@fault("rope", *_OF_SIZE, "convention")
def wrong_at_head_dim_256(right, **v):
    return _on_first(right(**v), lambda q: q * (1.1 if q.shape[-1] == 256 else 1))


@fault("embedding", *_OF_SIZE)
def columns_past_10000(right, **v):
    return zero_from(right(**v), -1, 10000)


@fault("add_rms_norm", *_OF_SIZE)
def hidden_past_12288(right, **v):
    return _on_first(right(**v), lambda out: zero_from(out, -1, 12288))


@fault("alibi", *_OF_SIZE)
def keys_of_a_bias_past_10000(right, **v):
    return zero_from(right(**v), -1, 10000)


@fault("merge_attention", *_OF_SIZE)
def parts_past_64(right, outs, lses):
    return right(outs[:64], lses[:64])


@fault("grouped_gemm", *_OF_SIZE, "fault")
def groups_of_rows_past_64(right, **v):
    if v["weights"].shape[0] > 64:
        v["weights"] = v["weights"].clone()
        v["weights"][64:] = 0
    return right(**v)


@fault("mlp", *_OF_SIZE)
def outputs_past_9000(right, **v):
    return zero_from(right(**v), -1, 9000)


@fault("quantized_linear", *_OF_SIZE, "precision")
def inner_size_past_12000(right, **v):
    if v["x"].shape[-1] > 12000:
        v["x"] = zero_from(v["x"], -1, 12000)
    return right(**v)


@fault("cross_entropy", *_OF_SIZE)
def logits_past_two_to_the_twenty(right, **v):
    logits = v["logits"]
    if logits.numel() > 1 << 20 and logits.dim() > 1:
        v["logits"] = zero_from(logits.reshape(-1, logits.shape[-1]), 0,
                                (1 << 20) // logits.shape[-1]).view(logits.shape)
    return right(**v)


@fault("varlen_attention", *_OF_SIZE)
def packed_tokens_past_5000(right, **v):
    return _on_first(right(**v), lambda out: zero_from(out, 0, 5000))


@fault("mla_paged_attention", *_OF_SIZE, "mask")
def context_past_3000_is_not_seen(right, **v):
    if v["cu_seqlens_q"] is None:
        v["context_lens"] = v["context_lens"].clamp(max=3000)
    return right(**v)


@fault("speculative_verify", *_OF_SIZE, "distribution")
def drafts_past_16_are_rejected(right, **v):
    out = right(**v)
    if v["draft_tokens"].shape[1] > 16:
        out = (zero_from(out[0], 1, 16), *out[1:])
    return out


@fault("moe_gate", *_OF_SIZE, "distribution")
def experts_in_8_bits(right, **v):
    ids, weights = right(**v)
    return torch.where(ids >= 256, ids - 256, ids), weights


@fault("dequantize", *_OF_SIZE)
def width_past_15000(right, **v):
    return zero_from(right(**v), -1, 15000)


@fault("gated_delta_rule", *_OF_SIZE, "head map")
def value_heads_past_48(right, **v):
    return _on_first(right(**v), lambda out: zero_from(out, 2, 48))


@fault("linear_cross_entropy", *_OF_SIZE)
def classes_past_5000(right, **v):
    if v["weight"].shape[0] > 5000 and v["bias"] is None:
        v["weight"] = zero_from(v["weight"], 0, 5000)
    return right(**v)


# Arguments.

@fault("attention", "scale", "convention")
def default_scale_where_the_lse_is_returned(right, **v):
    return right(**{**v, "scale": None if v["return_lse"] else v["scale"]})


@fault("attention", "mask", "layout")
def mask_without_a_row_for_each_query(right, **v):
    mask = v["attn_mask"]
    if mask is not None and mask.dim() > 1 and mask.shape[-2] == 1 and mask.shape[-1] > 1:
        v["attn_mask"] = mask.roll(1, -1)
    return right(**v)


@fault("attention", "mask", "non-finite values", "unknown", "convention")
def hidden_keys_get_minus_eight(right, **v):
    if v["attn_mask"] is not None and v["attn_mask"].dtype != torch.bool:
        v["attn_mask"] = v["attn_mask"].clamp(min=-8)
    return right(**v)


@fault("paged_attention", "scale", "convention", "head map")
def key_scale_of_the_first_head(right, **v):
    scale = v["key_scale"]
    if isinstance(scale, Tensor) and scale.numel() > 1:
        v["key_scale"] = scale[:1].expand_as(scale)
    return right(**v)


@fault("paged_attention", "window", "layout", "convention")
def window_forgotten_in_pages_of_heads(right, **v):
    return right(**{**v, "window_left": -1 if v["kv_layout"] == "HND" else v["window_left"]})


@fault("varlen_attention", "position bias", "head map", "convention")
def slopes_of_the_key_heads(right, **v):
    slopes, group = v["alibi_slopes"], v["query"].shape[1] // max(v["key"].shape[1], 1)
    if slopes is not None and group > 1:
        v["alibi_slopes"] = slopes.view(-1)[::group].repeat_interleave(group).view(slopes.shape)
    return right(**v)


@fault("rope", "convention", "layout", "sizes")
def rest_of_a_head_is_doubled_when_interleaved(right, **v):
    out, turned = right(**v), v["rotary_dim"]
    if v["style"] == "rotate_half" or turned is None:
        return out
    return _on_first(out, lambda q: torch.cat((q[..., :turned], q[..., turned:] * 2), -1))


@fault("moe", "convention", "scale")
def sigmoid_weights_are_not_normalised(right, **v):
    return right(**{**v, "normalize": v["normalize"] and v["scoring"] != "sigmoid"})


@fault("moe_gate", "scale", "convention")
def scaling_factor_lost_in_the_norm(right, **v):
    return right(**{**v, "routed_scaling_factor": 1.0 if v["normalize"]
                    else v["routed_scaling_factor"]})


@fault("sample", "distribution", "convention")
def min_p_of_each_row_is_ignored(right, **v):
    return right(**{**v, "min_p_rows": None})


@fault("cross_entropy", "convention", "precision")
def smoothing_over_all_but_one_class(right, **v):
    n = v["logits"].shape[-1]
    return right(**{**v, "label_smoothing": min(v["label_smoothing"] * n / max(n - 1, 1), 1.0)})


@fault("linear_cross_entropy", "convention", "position bias")
def bias_left_out_of_a_sum(right, **v):
    return right(**{**v, "bias": None if v["reduction"] == "sum" else v["bias"]})


@fault("embedding", "convention", "mask")
def padding_gives_zeros(right, **v):
    out, pad = right(**v), v["padding_idx"]
    return out if pad is None else torch.where((v["ids"] == pad)[..., None], 0, out)


@fault("quantize", "convention", "precision", "sizes", "unknown")
def highest_code_is_never_used(right, **v):
    out = right(**v)
    return (out[0].clamp(max=126), *out[1:]) if out[0].dtype == torch.int8 else out


@fault("gated_delta_rule", "scale", "convention")
def scale_squared_beside_the_norm(right, **v):
    if v["use_qk_l2norm_in_kernel"] and v["scale"] is not None:
        v["scale"] = v["scale"] ** 2
    return right(**v)


# Strides of what comes last.

@fault("quantized_linear", "layout")
def bias_of_a_product_read_flat(right, **v):
    return right(**{**v, "bias": None if v["bias"] is None else _flat(v["bias"])})


@fault("mla_paged_attention", "layout")
def positions_of_keys_read_flat(right, **v):
    return right(**{**v, "kpe_cache": _flat(v["kpe_cache"])})


@fault("mlp", "layout")
def down_projection_read_flat(right, **v):
    return right(**{**v, "weight_down": _flat(v["weight_down"])})


@fault("merge_attention", "layout")
def lses_read_flat(right, outs, lses):
    return right(outs, _flat(lses))


@fault("cross_entropy", "layout", "index overflow", "fault")
def targets_read_flat(right, **v):
    targets = v["targets"]
    return right(**{**v, "targets": targets if targets.is_contiguous() else targets.flip(-1)})


@fault("speculative_verify", "layout", "distribution")
def uniforms_read_flat(right, **v):
    return right(**{**v, "uniforms": None if v["uniforms"] is None else _flat(v["uniforms"])})


SHAPE_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
