"""Kernels that are wrong as they would be in the field: at the sizes of a prompt, in the newest
operations, for a neighbour's state, in the backward pass alone. Each is wrong in one way.

`benchmarks/planted_faults.py --set field` runs all of them; the tests run a few.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from process_faults import PROCESS_FAULTS, zero_from

_BEFORE = len(FAULTS)


def _with_first(out: Any, change: Any) -> Any:
    """Applies `change` to the first of one or several results."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


# Sizes of a prompt, and counts in few bits.

@fault("gated_delta_rule", "sizes", "index overflow", "last rows")
def state_lost_after_1024_tokens(right, **v):
    return _with_first(right(**v), lambda out: zero_from(out, 1, 1024))


@fault("gated_delta_rule", "sizes")
def wrong_at_head_dim_128(right, **v):
    return _with_first(right(**v), lambda out: out * (1.1 if v["q"].shape[-1] == 128 else 1))


@fault("grouped_attention", "sizes", "index overflow", "last rows")
def items_counted_in_8_bits(right, **v):
    if v["items"].shape[0] > 256:
        v["items"] = v["items"].clone()
        v["items"][256:, 1] = 0
    return right(**v)


@fault("grouped_attention", "sizes", "index overflow")
def key_starts_in_16_bits(right, **v):
    if v["items"].numel():
        v["items"] = v["items"].clone()
        v["items"][:, 2] &= 0xFFFF
    return right(**v)


@fault("varlen_attention", "sizes", "index overflow", "last rows")
def sequences_past_256_are_skipped(right, **v):
    out, ends = right(**v), v["cu_seqlens_q"]
    if ends.numel() > 257:
        out = _with_first(out, lambda t: zero_from(t, 0, int(ends[256])))
    return out


@fault("paged_attention", "sizes", "index overflow", "last rows")
def batch_past_128_reads_the_first_tables(right, **v):
    if v["block_table"].shape[0] > 128:
        v["block_table"] = v["block_table"].clone()
        v["block_table"][128:] = v["block_table"][:1]
    return right(**v)


@fault("moe", "sizes", "index overflow", "last rows")
def tokens_past_4096_are_dropped(right, **v):
    return zero_from(right(**v), 0, 4096)


@fault("moe", "sizes", "index overflow", "fault")
def experts_in_7_bits(right, **v):
    if v["topk_ids"] is not None and v["w_down"].shape[0] > 128:
        v["topk_ids"] = torch.where(v["topk_ids"] >= 128, v["topk_ids"] - 128, v["topk_ids"])
    return right(**v)


@fault("sample", "sizes", "index overflow", "distribution", "last rows")
def rows_past_2048_get_the_first_token(right, **v):
    return _with_first(right(**v), lambda t: zero_from(t, 0, 2048))


@fault("sample", "convention", "distribution", "index overflow", "sizes")
def counts_in_8_bits(right, **v):
    if v["token_counts"] is not None:
        v["token_counts"] = v["token_counts"] & 0xFF
    return right(**v)


@fault("sample", "sizes", "distribution", "convention")
def at_most_1024_candidates(right, **v):
    return right(**{**v, "top_k": min(v["top_k"], 1024)})


@fault("quantized_linear", "sizes", "index overflow", "last rows")
def prompt_rows_past_4096(right, **v):
    out = right(**v)
    return zero_from(out, 0, 4096) if out.dim() > 1 else out


@fault("linear_cross_entropy", "sizes", "index overflow", "last rows")
def loss_rows_past_4096(right, **v):
    out = right(**v)
    return zero_from(out, 0, 4096)


@fault("merge_attention", "sizes", "index overflow", "last rows")
def merged_tokens_past_4096(right, **v):
    return _with_first(right(**v), lambda out: zero_from(out, 0, 4096))


@fault("group_norm", "sizes", "index overflow", "precision")
def pixels_past_16384(right, x, **v):
    out = right(x, **v)
    return zero_from(out.flatten(2), 2, 16384).view(out.shape) if out.dim() > 2 else out


@fault("quantize", "sizes", "index overflow", "last rows")
def quantized_rows_past_4096(right, **v):
    return _with_first(right(**v), lambda q: zero_from(q.view(torch.uint8), 0, 4096).view(q.dtype))


@fault("attention", "window", "sizes")
def windows_end_at_1024(right, **v):
    return right(**{**v, "window_left": min(v["window_left"], 1024)})


@fault("mla_paged_attention", "sizes", "index overflow", "last rows")
def heads_past_64(right, **v):
    return _with_first(right(**v), lambda out: zero_from(out, 1, 64))


@fault("speculative_verify_tree", "sizes", "distribution", "index overflow")
def nodes_past_32_are_rejected(right, **v):
    out = right(**v)
    if v["draft_tokens"].shape[1] > 32:
        out = (out[0].clone().fill_(-1), *out[1:])
    return out


@fault("rope", "sizes", "index overflow", "last rows")
def rope_of_a_prompt_past_8192(right, **v):
    axis = 2 if v["layout"] == "bhsd" else 1
    return _with_first(right(**v), lambda q: zero_from(q, axis, 8192))


# Arguments as users give them.

@fault("grouped_attention", "mask", "convention", "sizes", "unknown", "fault")
def max_seqlen_k_is_the_length(right, **v):
    if v["items"].shape[0] == 1 and v["chunk_starts"] is None:
        v["items"] = v["items"].clone()
        most = min(v["max_seqlen_k"], v["key"].shape[0] - int(v["items"][0, 2]))
        v["items"][0, 3] = most
    return right(**v)


@fault("varlen_attention", "mask", "convention", "sizes", "unknown")
def max_seqlen_q_shifts_the_diagonal(right, **v):
    longest = int((v["cu_seqlens_q"][1:] - v["cu_seqlens_q"][:-1]).max()) if v[
        "cu_seqlens_q"].numel() > 1 else 0
    return _with_first(right(**v), lambda out: out * (1.5 if v["max_seqlen_q"] > longest else 1))


@fault("rope", "layout", "convention")
def positions_of_one_row_read_with_a_stride(right, **v):
    ids = v["position_ids"]
    if ids is not None and ids.dim() == 2 and ids.shape[0] > 1 and ids.stride(0) == 0:
        v["position_ids"] = ids.roll(1, 1)
    return right(**v)


@fault("moe", "layout")
def ids_read_as_if_contiguous(right, **v):
    ids = v["topk_ids"]
    if ids is not None and not ids.is_contiguous():
        v["topk_ids"] = ids.flip(-1)
    return right(**v)


@fault("gated_delta_rule", "layout")
def first_state_read_as_if_contiguous(right, **v):
    state = v["initial_state"]
    if state is not None and not state.is_contiguous():
        v["initial_state"] = state.mT if state.shape[-1] == state.shape[-2] else state * 0
    return right(**v)


@fault("grouped_attention", "layout", "mask")
def items_read_as_if_contiguous(right, **v):
    if not v["items"].is_contiguous() and v["items"].shape[0] > 1:
        v["items"] = v["items"].flip(0).contiguous() * 0 + v["items"][:1]
    return right(**v)


@fault("attention", "layout")
def wrong_where_query_and_key_are_both_strided(right, **v):
    wrong = v["query"].stride(-1) > 1 and v["key"].stride(-1) > 1
    return _with_first(right(**v), lambda out: out * (1.1 if wrong else 1))


@fault("attention", "scale", "convention")
def negative_scale_is_taken_for_none(right, **v):
    return right(**{**v, "scale": None if v["scale"] is not None and v["scale"] < 0
                    else v["scale"]})


@fault("rms_norm", "convention", "scale", "precision")
def eps_is_at_least_1e_6(right, x, weight=None, eps=1e-6, offset=0.0):
    return right(x, weight, max(eps, 1e-6), offset=offset)


@fault("attention", "scale", "convention")
def lse_without_softcap(right, **v):
    out = right(**v)
    if v["return_lse"] and v["softcap"]:
        out = (out[0], right(**{**v, "softcap": 0.0})[1])
    return out


@fault("paged_attention", "stale page", "sizes", "unknown", "mask")
def a_shared_page_belongs_to_its_first_owner(right, **v):
    table, lens = v["block_table"], v["context_lens"].tolist()
    page_size = v["key_cache"].shape[1 if v["kv_layout"] == "NHD" else 2]
    seen: set[int] = set()
    table = table.clone()
    for i, n in enumerate(lens):
        used = -(-n // page_size)
        own = table[i, :used].tolist()
        if used and i and own[0] in seen:
            table[i, 0] = own[-1]
        seen.update(own)
    return right(**{**v, "block_table": table})


@fault("moe", "convention", "scale")
def weights_on_the_input_forget_the_offset(right, **v):
    if v["weight_on"] == "input" and v["expert_offset"]:
        v["weight_on"] = "output"
    return right(**v)


@fault("sample", "distribution", "convention")
def min_p_after_top_k_uses_the_cut_maximum(right, **v):
    if v["min_p"] > 0 and v["top_k"] > 0:
        v["min_p"] = 0.0
    return right(**v)


@fault("quantized_linear", "convention", "scale", "precision", "sizes")
def subnormal_codes_are_zero(right, **v):
    if v["format"] == "fp8_e4m3":
        code = v["weight_q"].view(torch.uint8)
        v["weight_q"] = torch.where((code & 0x78) == 0, code & 0x80, code).view(
            v["weight_q"].dtype)
    return right(**v)


@fault("dequantize", "convention", "sizes", "unknown", "scale")
def lowest_int8_code_is_clamped(right, **v):
    if v["format"] == "int8":
        v["q"] = v["q"].clamp(min=-127)
    return right(**v)


@fault("cross_entropy", "mask", "convention")
def class_zero_is_never_ignored(right, **v):
    return right(**{**v, "ignore_index": -100 if v["ignore_index"] == 0 else v["ignore_index"]})


# Precision.

@fault("gated_delta_rule", "precision", "dtype")
def state_returned_in_the_precision_of_q(right, **v):
    out = right(**v)
    if v["output_final_state"]:
        out = (out[0], out[1].to(v["q"].dtype).to(out[1].dtype))
    return out


@fault("attention", "precision", "dtype", "convention")
def lse_in_the_precision_of_the_query(right, **v):
    out = right(**v)
    return (out[0], out[1].to(v["query"].dtype).to(out[1].dtype)) if v["return_lse"] else out


@fault("gated_delta_rule", "precision", "convention", "dtype")
def gates_rounded_to_the_dtype_of_q(right, **v):
    return right(**{**v, "g": v["g"].to(v["q"].dtype).to(v["g"].dtype),
                    "beta": v["beta"].to(v["q"].dtype).to(v["beta"].dtype)})


@fault("grouped_gemm", "precision")
def sums_of_products_in_half_precision(right, **v):
    x = v["x"]
    if x.dtype == torch.float32:
        return right(**{**v, "x": x.half().float()})
    return right(**v)


@fault("linear", "invariance", batch_invariant=True)
def other_sums_beyond_64_rows(right, **v):
    x, half = v["x"], v["x"].shape[-1] // 2
    if x.numel() // max(x.shape[-1], 1) <= 64 or not half or v["activation"]:
        return right(**v)
    first = right(**{**v, "x": x[..., :half], "weight": v["weight"][:, :half], "bias": None})
    return first + right(**{**v, "x": x[..., half:], "weight": v["weight"][:, half:]})


# Numbers that are not finite, and equal ones.

@fault("merge_attention", "non-finite values", "convention", "sizes")
def part_without_keys_spreads_nan(right, **v):
    out = right(**v)
    empty = (v["lses"] == -math.inf).any(0)
    return (torch.where(empty[..., None], torch.nan, out[0]), out[1])


@fault("gated_delta_rule", "non-finite values", "sizes")
def nan_in_a_value_is_forgotten(right, **v):
    return right(**{**v, "v": v["v"].nan_to_num(nan=0.0)})


@fault("quantize", "sizes", "unknown", "non-finite values", "convention", "precision")
def zero_blocks_divide_by_zero(right, **v):
    out = right(**v)
    if not bool(v["x"].any()) and v["x"].numel():
        out = (out[0], out[1] * math.nan if out[1].dtype.itemsize > 1 else out[1], *out[2:])
    return out


@fault("sample", "ties", "distribution", "sizes")
def equal_logits_at_the_cut_all_stay(right, **v):
    logits, k = v["logits"], v["top_k"]
    if 0 < k < logits.shape[-1] and v["temperature"] > 0 and not v["from_probs"]:
        kth = logits.topk(k, -1).values[..., -1:]
        if bool(((logits >= kth).sum(-1) > k).any()):
            v["top_k"] = int((logits >= kth).sum(-1).max())
    return right(**v)


FIELD_FAULTS: list[Fault] = [*FAULTS[_BEFORE:], *PROCESS_FAULTS]
del FAULTS[_BEFORE:]                           # they have tests of their own
