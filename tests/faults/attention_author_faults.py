"""Kernels that are wrong as the author of a new attention kernel may write them: for block masks,
pages, packed sequences, items, merged parts, rotations and recurrences. Each is wrong in one way.

`benchmarks/planted_faults.py --set authors` runs all of them, with those of layer_author_faults.py.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from process_faults import _WithBackward, zero_from
from torch import Tensor

from layerzero.ops.formulas.block_masks import dense_mask, listed_blocks
from layerzero.ops.formulas.common import attend

_BEFORE = len(FAULTS)


def _on_first(out: Any, change: Any) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def _on_second(out: Any, change: Any) -> Any:
    return (out[0], change(out[1])) if isinstance(out, tuple) else out


def _seq(v: dict[str, Any]) -> int:
    return 2 if v.get("layout", "bhsd") == "bhsd" else 1


# Block masks.

def _blockwise(v: dict[str, Any], mask: Tensor) -> Any:
    out, lse = attend(v["query"], v["key"], v["value"], mask, 0.0, False, v["scale"], None, -1, -1,
                      None, v["softcap"])
    return (out, lse) if v["return_lse"] else out


def _spread(table: Tensor, mask: Any) -> Tensor:
    rows, columns = (torch.arange(n) // size for n, size in zip(mask.seq_lengths, mask.BLOCK_SIZE))
    return table.index_select(-1, columns).index_select(-2, rows)


@fault("block_sparse_attention", "mask")
def partial_blocks_taken_for_full(right, **v):
    blocks = listed_blocks(v["block_mask"])
    return _blockwise(v, _spread(blocks.partial | blocks.full, v["block_mask"]))


@fault("block_sparse_attention", "mask")
def full_blocks_are_skipped(right, **v):
    blocks = listed_blocks(v["block_mask"])
    return _blockwise(v, dense_mask(v["block_mask"]) & ~_spread(blocks.full, v["block_mask"]))


@fault("block_sparse_attention", "mask", "head map")
def block_mask_of_the_first_head(right, **v):
    mask = dense_mask(v["block_mask"])
    return _blockwise(v, mask[:, :1].expand_as(mask))


@fault("block_sparse_attention", "mask", "sizes")
def keys_of_a_ragged_block_are_dropped(right, **v):
    mask, width = dense_mask(v["block_mask"]).clone(), v["block_mask"].BLOCK_SIZE[1]
    mask[..., mask.shape[-1] // width * width:] &= mask.shape[-1] < width
    return _blockwise(v, mask)


@fault("block_sparse_attention", "mask", "non-finite values", "convention")
def rows_without_keys_are_nan(right, **v):
    dead = ~dense_mask(v["block_mask"]).any(-1)
    return _on_first(right(**v), lambda out: out.masked_fill(
        dead.expand(out.shape[:-1])[..., None], math.nan))


@fault("block_sparse_attention", "head map")
def query_heads_over_block_masks_interleaved(right, **v):
    heads, kv_heads = v["query"].shape[1], v["key"].shape[1]
    order = torch.arange(heads) % max(kv_heads, 1)
    return right(**{**v, "key": v["key"][:, order], "value": v["value"][:, order]})


@fault("block_sparse_attention", "mask", "state", "stale cache")
class MaskByItsSizes:
    """Keeps the dense mask by the sizes of the BlockMask."""

    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        key = (tuple(v["block_mask"].shape), v["block_mask"].BLOCK_SIZE)
        return _blockwise(v, self.kept.setdefault(key, dense_mask(v["block_mask"])))


@fault("block_sparse_attention", "scale", "convention")
def block_sparse_softcap_is_a_clamp(right, **v):
    cap = v["softcap"]
    if not cap:
        return right(**v)
    group = v["query"].shape[1] // max(v["key"].shape[1], 1)
    key, value = (v[n].repeat_interleave(group, 1) for n in ("key", "value"))
    scale = v["query"].shape[-1] ** -0.5 if v["scale"] is None else v["scale"]
    scores = (v["query"] @ key.mT * scale).clamp(-cap, cap)
    scores = scores.masked_fill(~dense_mask(v["block_mask"]), -math.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ value
    lse = torch.logsumexp(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)
    return (out, lse) if v["return_lse"] else out


# Dense attention.

@fault("attention", "mask", "alignment", "window")
def causal_hides_the_diagonal_too(right, **v):
    if not v["is_causal"] or v["window_left"] >= 0:
        return right(**v)
    axis = _seq(v)
    sq, sk = v["query"].shape[axis], v["key"].shape[axis]
    offset = sk - sq if v["causal_align"] == "bottom_right" else 0
    mask = torch.ones(sq, sk, dtype=torch.bool).tril(offset - 1)
    return right(**{**v, "attn_mask": mask, "is_causal": False})


@fault("attention", "window")
def window_includes_the_query_itself(right, **v):
    return right(**{**v, "window_left": v["window_left"] - (v["window_left"] > 0)})


@fault("attention", "window", "mask")
def no_window_in_a_decode_step(right, **v):
    one = v["query"].shape[_seq(v)] == 1
    return right(**{**v, "window_left": -1 if one else v["window_left"]})


@fault("attention", "position bias")
def slopes_in_the_other_order(right, **v):
    slopes = v["alibi_slopes"]
    return right(**{**v, "alibi_slopes": None if slopes is None else slopes.flip(0)})


@fault("attention", "mask", "scale", "convention")
def mask_added_before_the_scale(right, **v):
    mask = v["attn_mask"]
    if mask is not None and mask.dtype != torch.bool:
        scale = v["query"].shape[-1] ** -0.5 if v["scale"] is None else v["scale"]
        v["attn_mask"] = mask * scale
    return right(**v)


@fault("attention", "mask", "non-finite values", "convention")
def lse_of_a_row_without_keys_is_zero(right, **v):
    return _on_second(right(**v), lambda lse: lse.masked_fill(lse == -math.inf, 0.0))


@fault("attention", "precision", "scale")
def scale_in_half_precision(right, **v):
    scale = v["query"].shape[-1] ** -0.5 if v["scale"] is None else v["scale"]
    return right(**{**v, "scale": float(torch.tensor(scale, dtype=torch.bfloat16))})


@fault("attention", "sizes", "precision", "mask", "overflow", "last rows")
def online_softmax_never_rescales(right, **v):
    """Sums of earlier tiles of 64 keys keep the maximum of their own."""
    q, k, value = v["query"], v["key"], v["value"]
    plain = (v["attn_mask"] is None and not v["is_causal"] and v["window_left"] < 0
             and v["window_right"] < 0 and v["alibi_slopes"] is None and not v["softcap"]
             and not v["return_lse"] and v["layout"] == "bhsd" and q.shape[1] == k.shape[1])
    if not plain or k.shape[2] <= 64:
        return right(**v)
    scale = q.shape[-1] ** -0.5 if v["scale"] is None else v["scale"]
    scores = q.float() @ k.float().mT * scale
    total, out = torch.zeros(()), torch.zeros(())
    for part, rows in zip(scores.split(64, -1), value.float().split(64, 2)):
        weights = (part - part.amax(-1, keepdim=True)).exp()
        total, out = total + weights.sum(-1, keepdim=True), out + weights @ rows
    return (out / total).to(q.dtype)


@fault("attention", "sizes", "last rows", "unknown")
def values_wider_than_keys_are_cut(right, **v):
    width = v["query"].shape[-1]
    return _on_first(right(**v), lambda out: zero_from(out, -1, width))


@fault("attention", "mask", "convention", "layout")
def bool_mask_read_as_numbers(right, **v):
    mask = v["attn_mask"]
    if mask is not None and mask.dtype == torch.bool:
        v["attn_mask"] = mask.to(v["query"].dtype)
    return right(**v)


@fault("attention", "in-place change")
def scales_the_query_in_place(right, **v):
    v["query"].data.mul_(0.5)
    return right(**{**v, "query": v["query"] * 2})


@fault("attention", "gradient")
def query_gradient_without_the_scale(right, **v):
    v["query"] = _WithBackward.apply(v["query"], lambda g: g * 1.125)
    return right(**v)


# Packed sequences, items.

@fault("varlen_attention", "alignment")
def packed_diagonal_from_the_top_left(right, **v):
    return right(**{**v, "causal_align": "top_left"})


@fault("varlen_attention", "sizes", "last rows", "mask", "unknown")
def last_token_of_each_sequence_is_not_seen(right, **v):
    ends = v["cu_seqlens_k"].tolist()
    value = v["value"].clone()
    for a, b in pairwise(ends):
        if b - a > 1:
            value[b - 1] = 0
    return right(**{**v, "value": value})


@fault("varlen_attention", "window")
def packed_window_off_by_one_to_the_right(right, **v):
    return right(**{**v, "window_right": v["window_right"] + (v["window_right"] >= 0)})


@fault("varlen_attention", "shape", "layout")
def packed_lse_heads_first(right, **v):
    return _on_second(right(**v), lambda lse: lse.T.contiguous())


@fault("varlen_attention", "non-finite values", "sizes", "mask", "convention")
def empty_key_sequence_gives_nan(right, **v):
    out = right(**v)
    lengths_k, starts = v["cu_seqlens_k"].diff(), v["cu_seqlens_q"].tolist()
    for i, n in enumerate(lengths_k.tolist()):
        if n == 0:
            first = out[0] if isinstance(out, tuple) else out
            first[starts[i]:starts[i + 1]] = math.nan
    return out


@fault("grouped_attention", "uninitialised output", "non-determinism")
def rows_of_no_item_are_not_written(right, **v):
    out = right(**v)
    first = out[0] if isinstance(out, tuple) else out
    fresh = torch.empty_like(first)
    for q_start, n, _, _ in v["items"].tolist():
        fresh[q_start:q_start + n] = first[q_start:q_start + n]
    return _on_first(out, lambda _: fresh)


@fault("grouped_attention", "convention", "mask", "layout", "fault", "sizes")
def chunk_length_of_the_first_item(right, **v):
    lengths = v["chunk_lengths"]
    if lengths is not None and lengths.numel() > 1:
        v["chunk_lengths"] = lengths[:1].expand_as(lengths).contiguous()
    return right(**v)


@fault("grouped_attention", "window")
def window_of_an_item_one_too_narrow(right, **v):
    return right(**{**v, "window_left": v["window_left"] - (v["window_left"] > 0)})


# Pages.

@fault("paged_attention", "mask", "out of bounds")
def the_newest_token_is_not_seen(right, **v):
    return right(**{**v, "context_lens": (v["context_lens"] - 1).clamp(min=0)})


@fault("paged_attention", "non-finite values", "out of bounds", "mask")
def unused_slots_get_weight_zero(right, **v):
    """0 times the infinity of an unused slot."""
    out, cache = right(**v), v["value_cache"]
    size = cache.shape[1 if v["kv_layout"] == "NHD" else 2]
    if cache.dtype.itemsize == 1 or v["cu_seqlens_q"] is not None:
        return out
    first = out[0] if isinstance(out, tuple) else out
    for i, n in enumerate(v["context_lens"].tolist()):
        if n % size:
            page = cache[int(v["block_table"][i, n // size])]
            page = page if v["kv_layout"] == "NHD" else page.transpose(0, 1)
            rest = (page[n % size:] * 0).sum(0).to(first.dtype)
            first[i] += rest.repeat_interleave(first.shape[1] // rest.shape[0], 0)
    return out


@fault("paged_attention", "scale", "convention")
def key_scale_applied_twice(right, **v):
    scale = v["key_scale"]
    return right(**{**v, "key_scale": None if scale is None else scale * scale})


@fault("paged_attention", "scale", "convention")
def no_softcap_in_a_prompt(right, **v):
    return right(**{**v, "softcap": v["softcap"] if v["cu_seqlens_q"] is None else 0.0})


@fault("paged_attention", "stale page", "dtype", "convention", "layout", "fault", "sizes")
def wide_table_read_as_32_bits(right, **v):
    table = v["block_table"]
    if table.dtype == torch.int64 and table.numel():
        half = table.contiguous().view(torch.int32)[:, :table.shape[1]]
        v["block_table"] = half.clamp(min=0, max=v["key_cache"].shape[0] - 1).contiguous()
    return right(**v)


@fault("paged_attention", "window")
def paged_window_counts_the_query(right, **v):
    return right(**{**v, "window_left": v["window_left"] - (v["window_left"] > 0)})


@fault("paged_attention", "head map")
def paged_heads_interleaved(right, **v):
    axis = 2 if v["kv_layout"] == "NHD" else 1
    heads, kv_heads = v["query"].shape[1], v["key_cache"].shape[axis]
    if 1 < kv_heads < heads and v["key_scale"] is None:
        order = torch.arange(heads) % kv_heads
        v["key_cache"], v["value_cache"] = (v[n].index_select(axis, order)
                                            for n in ("key_cache", "value_cache"))
    return right(**v)


@fault("paged_attention", "alignment", "mask")
def queries_of_a_prompt_from_position_zero(right, **v):
    """Causality as if the queries were the first tokens of the context."""
    starts = v["cu_seqlens_q"]
    if starts is None or not v["is_causal"]:
        return right(**v)
    lengths = starts.diff().to(v["context_lens"].dtype)
    return right(**{**v, "context_lens": torch.minimum(lengths, v["context_lens"])})


@fault("mla_paged_attention", "alignment", "mask", "unknown")
def latent_queries_are_not_causal(right, **v):
    return right(**{**v, "is_causal": False})


@fault("mla_paged_attention", "convention")
def latent_lse_in_base_two(right, **v):
    return _on_second(right(**v), lambda lse: lse / math.log(2))


@fault("mla_paged_attention", "scale", "position bias", "convention")
def scale_on_the_latent_part_alone(right, **v):
    return right(**{**v, "q_pe": v["q_pe"] / v["scale"]})


# Merged parts.

@fault("merge_attention", "convention")
def merged_lse_is_the_largest(right, outs, lses):
    out, _ = right(outs, lses)
    return out, lses.amax(0)


@fault("merge_attention", "scale", "convention")
def merged_parts_are_not_normalised(right, outs, lses):
    out, lse = right(outs, lses)
    peak = lses.amax(0)
    factor = torch.where(peak == -math.inf, 1.0, (lse - peak).exp())
    return (out * factor[..., None]).to(out.dtype), lse


@fault("merge_attention", "non-finite values", "mask", "convention")
def row_without_keys_is_nan(right, outs, lses):
    out, lse = right(outs, lses)
    return torch.where((lse == -math.inf)[..., None], math.nan, out), lse


@fault("merge_attention", "precision")
def parts_weighed_in_their_dtype(right, outs, lses):
    out, lse = right(outs, lses)
    if outs.dtype not in (torch.float16, torch.bfloat16):
        return out, lse
    weights = (lses - lse.masked_fill(lse == -math.inf, 0.0)).exp().to(outs.dtype)
    total = torch.zeros_like(out)
    for part, weight in zip(outs, weights):
        total = total + torch.where(weight[..., None] == 0, 0, part * weight[..., None])
    return total, lse


# Rotations and ALiBi.

@fault("rope", "convention", "sizes")
def pairs_half_a_head_apart_when_partial(right, **v):
    """rotate_half over rotary_dim, but with the partner head_dim / 2 away."""
    turned, q = v["rotary_dim"], v["q"]
    if turned is None or v["style"] != "rotate_half" or turned > q.shape[-1] // 2:
        return right(**v)
    half, middle = turned // 2, q.shape[-1] // 2
    order = torch.arange(q.shape[-1])
    order[half:turned], order[middle:middle + half] = (
        order[middle:middle + half].clone(), order[half:turned].clone())
    inverse = order.argsort()
    out = right(**{**v, "q": q[..., order], "k": None if v["k"] is None else v["k"][..., order]})
    return (tuple(t[..., inverse].contiguous() for t in out) if isinstance(out, tuple)
            else out[..., inverse].contiguous())


@fault("rope", "alignment", "convention")
def positions_of_the_first_row_for_all(right, **v):
    ids = v["position_ids"]
    if ids is not None and ids.dim() == 2:
        v["position_ids"] = ids[:1].expand_as(ids).contiguous()
    return right(**v)


@fault("rope", "precision", "dtype", "gradient")
def tables_rounded_to_the_dtype_of_q(right, **v):
    return right(**{**v, **{n: v[n].to(v["q"].dtype) for n in ("cos", "sin")}})


@fault("rope", "alignment", "convention", "sizes")
def positions_begin_at_one(right, **v):
    if v["position_ids"] is None:
        v["cos"], v["sin"] = (v[n].roll(-1, -2) for n in ("cos", "sin"))
    return right(**v)


@fault("rope", "in-place change", "aliasing")
def rotates_the_keys_in_place(right, **v):
    out = right(**v)
    if isinstance(out, tuple) and not torch.is_grad_enabled():
        v["k"].data.copy_(out[1])
    return out


@fault("alibi", "position bias", "convention")
def later_keys_get_the_other_sign(right, **v):
    bias = right(**v)
    offset = v["seq_k"] - v["seq_q"] if v["causal_align"] == "bottom_right" else 0
    ahead = torch.ones(v["seq_q"], v["seq_k"], dtype=torch.bool).triu(offset + 1)
    return torch.where(ahead & bias.isfinite(), -bias, bias)


@fault("alibi", "precision", "gradient")
def distances_in_the_dtype_of_the_slopes(right, **v):
    if v["slopes"].dtype not in (torch.float16, torch.bfloat16) or v["is_causal"]:
        return right(**v)
    offset = v["seq_k"] - v["seq_q"] if v["causal_align"] == "bottom_right" else 0
    distance = (torch.arange(v["seq_k"])[None] - torch.arange(v["seq_q"])[:, None] - offset).abs()
    return -v["slopes"][:, None, None] * distance.to(v["slopes"].dtype)


ATTENTION_AUTHOR_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # the long lane runs them
