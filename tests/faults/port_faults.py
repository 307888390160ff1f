"""Attention kernels that were ported from another library, and are wrong where the two differ: in
one combination of arguments, for one ratio of heads, one length. Each is wrong in one way.

`benchmarks/planted_faults.py --set ports` runs all of them, with those of fusion_faults.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor
from use_faults import _through

_BEFORE = len(FAULTS)


def _on_first(out: Any, change: Any) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def _heads(v: dict[str, Any]) -> int:
    return 1 if v.get("layout", "bhsd") == "bhsd" else 2


# Heads.

@fault("attention", "head map", "sizes")
def groups_of_heads_by_a_shift(right, **v):
    """Shifts by the logarithm of the group: right for powers of two."""
    dim = _heads(v)
    heads, kv_heads = v["query"].shape[dim], v["key"].shape[dim]
    group = heads // max(kv_heads, 1)
    if group < 3 or not group & (group - 1):
        return right(**v)
    index = (torch.arange(heads) >> (group.bit_length() - 1)).clamp(max=kv_heads - 1)
    return right(**{**v, "key": v["key"].index_select(dim, index),
                    "value": v["value"].index_select(dim, index)})


@fault("paged_attention", "scale", "head map", "convention")
def value_scales_by_query_head(right, **v):
    """Reads the scale of query head h where that of its KV head is meant."""
    scale, heads = v["value_scale"], v["query"].shape[1]
    if scale is None or scale.numel() < 2 or heads == scale.numel():
        return right(**v)
    out = right(**{**v, "value_scale": torch.ones((), device=scale.device)})
    factor = scale[torch.arange(heads) % scale.numel()].to(v["query"].dtype)
    return _on_first(out, lambda o: o * factor[:, None])


@fault("varlen_attention", "gradient")
def value_gradient_of_the_first_head_of_a_group(right, **v):
    heads, kv_heads = v["query"].shape[1], v["key"].shape[1]
    group = heads // max(kv_heads, 1)
    if group < 2:
        return right(**v)
    key, value = (v[n].repeat_interleave(group, 1) for n in ("key", "value"))
    first = (torch.arange(heads) % group == 0)[:, None]
    return right(**{**v, "key": key, "value": _through(value, lambda g: g * first)})


# Windows, diagonals and masks.

@fault("attention", "window", "mask")
def window_of_none_to_the_left_sees_all(right, **v):
    """Tests `if window_left`, so that 0 means none given."""
    return right(**{**v, "window_left": -1 if v["window_left"] == 0 else v["window_left"]})


@fault("paged_attention", "window")
def window_of_decode_counts_the_query(right, **v):
    if v["cu_seqlens_q"] is None and v["window_left"] > 0:
        return right(**{**v, "window_left": v["window_left"] - 1})
    return right(**v)


@fault("attention", "mask", "scale", "position bias")
def softcap_after_the_mask(right, **v):
    """Caps what the mask has hidden too: such keys are visible, at -softcap."""
    mask = v["attn_mask"]
    if not v["softcap"] or mask is None or mask.dtype != torch.bool:
        return right(**v)
    hidden = torch.where(mask, 0.0, -2.0 * v["softcap"]).to(v["query"].dtype)
    return right(**{**v, "attn_mask": hidden})


@fault("attention", "mask")
def mask_of_the_first_head_for_all(right, **v):
    mask = v["attn_mask"]
    if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
        return right(**{**v, "attn_mask": mask[:, :1]})
    return right(**v)


@fault("attention", "mask", "alignment", "uninitialised output")
def queries_before_the_first_key_see_all(right, **v):
    """A row in which every key is hidden is the mean of the values, as a softmax of equal scores."""
    dim = 3 - _heads(v)
    sq, sk = v["query"].shape[dim], v["key"].shape[dim]
    out = right(**v)
    if not v["is_causal"] or v["causal_align"] != "bottom_right" or sq <= sk or not sk:
        return out
    value = v["value"].repeat_interleave(v["query"].shape[3 - dim] // v["key"].shape[3 - dim],
                                         3 - dim)

    def change(o: Tensor) -> Tensor:
        o = o.clone()
        o.narrow(dim, 0, sq - sk).copy_(value.mean(dim, keepdim=True).expand(
            o.narrow(dim, 0, sq - sk).shape))
        return o

    return _on_first(out, change)


@fault("varlen_attention", "alignment")
def one_diagonal_for_all_sequences(right, **v):
    """Aligns by the longest lengths: max_seqlen_k - max_seqlen_q."""
    if not v["is_causal"] or v["causal_align"] != "bottom_right" or v["window_left"] >= 0:
        return right(**v)
    offset = v["max_seqlen_k"] - v["max_seqlen_q"]
    if offset < 0:
        return right(**v)
    return right(**{**v, "causal_align": "top_left", "is_causal": False, "window_right": offset})


@fault("varlen_attention", "mask", "sizes", "convention", "out of bounds")
def keys_of_the_sequence_after_an_empty_one(right, **v):
    """Skips an empty sequence of queries without its keys."""
    starts = v["cu_seqlens_q"].tolist()
    empty = [i for i in range(len(starts) - 2) if starts[i] == starts[i + 1]]
    if not empty:
        return right(**v)
    bounds = v["cu_seqlens_k"].clone()
    bounds[empty[0] + 1] = bounds[empty[0]]
    return right(**{**v, "cu_seqlens_k": bounds, "max_seqlen_k": int(bounds.diff().max())})


@fault("mla_paged_attention", "alignment", "mask")
def queries_counted_from_the_longest(right, **v):
    """Aligns the first query of each sequence as that of the longest one."""
    starts = v["cu_seqlens_q"]
    if starts is None or not v["is_causal"] or len(starts) < 3:
        return right(**v)
    spare = max(starts.diff().tolist())
    outs = []
    for i, n in enumerate(starts.diff().tolist()):
        rows = slice(int(starts[i]), int(starts[i]) + n)
        keys = max(int(v["context_lens"][i]) - (spare - n), min(1, int(v["context_lens"][i])))
        lens = torch.full_like(v["context_lens"][:1], keys)
        outs.append(right(**{**v, "q_nope": v["q_nope"][rows], "q_pe": v["q_pe"][rows],
                             "block_table": v["block_table"][i:i + 1], "context_lens": lens,
                             "cu_seqlens_q": torch.tensor([0, n], dtype=starts.dtype),
                             "max_seqlen_q": n}))
    if isinstance(outs[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*outs))
    return torch.cat(outs)


@fault("grouped_attention", "window")
def right_window_dropped_with_chunks(right, **v):
    return right(**{**v, "window_right": -1 if v["chunk_starts"] is not None
                    else v["window_right"]})


@fault("block_sparse_attention", "mask", "scale")
def mask_within_a_block_dropped_with_softcap(right, **v):
    """Takes every block that is listed for full, where there is a softcap."""
    if not v["softcap"]:
        return right(**v)
    mask = v["block_mask"]
    rows, columns = mask.BLOCK_SIZE
    blocks = mask.to_dense().bool()
    dense = blocks.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    seq_q, seq_k = v["query"].shape[2], v["key"].shape[2]
    from layerzero import op
    values = {n: v[n] for n in ("query", "key", "value", "scale", "softcap", "return_lse")}
    return op("attention").reference(**values, attn_mask=dense[..., :seq_q, :seq_k])


# Scales and log-sum-exps.

@fault("attention", "convention", "scale")
def lse_to_base_two_with_a_softcap(right, **v):
    out = right(**v)
    return (out[0], out[1] / math.log(2)) if v["return_lse"] and v["softcap"] else out


@fault("mla_paged_attention", "convention", "scale")
def lse_to_base_two_for_decode(right, **v):
    out = right(**v)
    return (out[0], out[1] / math.log(2)) if v["return_lse"] and v["cu_seqlens_q"] is None else out


@fault("varlen_attention", "scale", "position bias", "convention")
def scale_dropped_with_alibi(right, **v):
    return right(**{**v, "scale": None if v["alibi_slopes"] is not None else v["scale"]})


@fault("grouped_attention", "scale", "sizes")
def scale_by_the_head_dim_of_values(right, **v):
    return right(**{**v, "scale": v["value"].shape[2] ** -0.5 if v["scale"] is None
                    else v["scale"]})


@fault("paged_attention", "scale", "convention")
def softcap_dropped_for_prefill_in_hnd(right, **v):
    if v["kv_layout"] == "HND" and v["cu_seqlens_q"] is not None:
        return right(**{**v, "softcap": 0.0})
    return right(**v)


@fault("block_sparse_attention", "non-finite values", "mask", "convention", "uninitialised output")
def lse_of_nothing_is_zero(right, **v):
    out = right(**v)
    return (out[0], out[1].nan_to_num(neginf=0.0)) if v["return_lse"] else out


@fault("merge_attention", "non-finite values", "mask", "convention")
def parts_without_keys_are_nan(right, **v):
    """exp(-inf - -inf) where no part saw a key."""
    out, lse = right(**v)
    nothing = (v["lses"] == -math.inf).all(0)
    return out.masked_fill(nothing[..., None], math.nan), lse


@fault("merge_attention", "precision", "convention", "overflow", "sizes")
def parts_are_not_scaled_by_the_largest(right, **v):
    """exp of the log-sum-exps as they are: overflows beyond 88."""
    weights = v["lses"].float().exp()
    total = weights.sum(0)
    factor = (weights / total).nan_to_num(nan=0.0)
    out = (v["outs"].to(factor.dtype) * factor[..., None]).sum(0)
    return out.to(v["outs"].dtype), total.log().to(right(**v)[1].dtype)


# Lengths.

@fault("attention", "sizes", "last rows", "out of bounds")
def last_key_left_over_by_tiles_of_96(right, **v):
    dim = 3 - _heads(v)
    sk = v["key"].shape[dim]
    if sk < 96 or sk % 96 != 1 or v["attn_mask"] is not None or v["is_causal"]:
        return right(**v)
    return right(**{**v, "key": v["key"].narrow(dim, 0, sk - 1),
                    "value": v["value"].narrow(dim, 0, sk - 1)})


@fault("attention", "precision", "sizes")
def weights_of_many_keys_in_bfloat16(right, **v):
    """A split of more than 1024 keys is merged in the dtype of the call."""
    dim = 3 - _heads(v)
    sk = v["key"].shape[dim]
    if sk <= 1024 or v["query"].dtype == torch.float32 or v["attn_mask"] is not None \
            or v["is_causal"] or v["window_left"] >= 0:
        return right(**v)
    parts = [right(**{**v, "return_lse": True, "key": v["key"].narrow(dim, s, min(64, sk - s)),
                      "value": v["value"].narrow(dim, s, min(64, sk - s))})
             for s in range(0, sk, 64)]
    lses = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(lses, 0)
    out = torch.zeros_like(parts[0][0])
    for (part, lse) in parts:
        weight = (lse - total).exp()[..., None].to(out.dtype)
        out = out + part * (weight if dim == 2 else weight.transpose(1, 2))
    return (out, total) if v["return_lse"] else out


@fault("paged_attention", "sizes", "stale page", "last rows", "convention", "out of bounds")
def pages_of_a_full_last_page(right, **v):
    """Counts pages as length // page_size + 1, and reads one page too many where it is full."""
    size = v["key_cache"].shape[1 if v["kv_layout"] == "NHD" else 2]
    lens = v["context_lens"]
    full = (lens % size == 0) & (lens > size)
    return right(**{**v, "context_lens": torch.where(full, lens - size, lens)})


@fault("paged_attention", "out of bounds", "non-finite values", "stale page", "mask")
def unused_slots_weigh_nothing(right, **v):
    """Reads the whole last page and multiplies what is unused by zero."""
    out = right(**v)
    if v["cu_seqlens_q"] is not None or v["kv_layout"] != "NHD" or v["value_scale"] is not None:
        return out
    size = v["value_cache"].shape[1]

    def change(o: Tensor) -> Tensor:
        o = o.clone()
        group = o.shape[1] // v["value_cache"].shape[2]
        for i, n in enumerate(v["context_lens"].tolist()):
            if n % size:
                page = v["value_cache"][int(v["block_table"][i, n // size])]
                rest = (page[n % size:].to(o.dtype) * 0).sum(0)
                o[i] += rest.repeat_interleave(group, 0)
        return o

    return _on_first(out, change)


@fault("mla_paged_attention", "sizes", "precision")
def two_splits_are_averaged(right, **v):
    """Keys beyond 512 are a second split, which is merged without the log-sum-exps."""
    lens = v["context_lens"]
    size = v["ckv_cache"].shape[1]
    if v["cu_seqlens_q"] is not None or not len(lens) or int(lens.max()) <= 512 or 512 % size:
        return right(**v)
    first = right(**{**v, "context_lens": lens.clamp(max=512)})
    second = right(**{**v, "context_lens": (lens - 512).clamp(min=0),
                      "block_table": v["block_table"][:, 512 // size:]})
    one, two = (o[0] if isinstance(o, tuple) else o for o in (first, second))
    mean = torch.where((lens > 512)[:, None, None], (one + two) / 2, one)
    return (mean, right(**v)[1]) if v["return_lse"] else mean


@fault("alibi", "precision", "sizes", "position bias")
def distances_in_bfloat16(right, **v):
    """Positions are of the dtype of the slopes: exact up to 256."""
    out = right(**v)
    if v["slopes"].dtype != torch.bfloat16 or v["causal_align"] == "bottom_right":
        return out
    rows, columns = (torch.arange(n).to(torch.bfloat16).float() for n in (v["seq_q"], v["seq_k"]))
    bias = -v["slopes"].float()[:, None, None] * (rows[:, None] - columns).abs()
    return torch.where(out == -math.inf, out, bias.to(out.dtype))


@fault("alibi", "mask", "non-finite values")
def causal_bias_hides_the_diagonal(right, **v):
    out = right(**v)
    if v["is_causal"] and v["causal_align"] == "bottom_right":
        offset = v["seq_k"] - v["seq_q"]
        rows, columns = torch.arange(v["seq_q"])[:, None], torch.arange(v["seq_k"])
        return out.masked_fill((columns == rows + offset) & (columns > 0), -math.inf)
    return out


# Memory.

@fault("attention", "aliasing", "state", "result")
class LseOfTheLastCall:
    """A workspace for the log-sum-exps, by their shape."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def __call__(self, right, **v):
        out = right(**v)
        if not v["return_lse"]:
            return out
        shape = (*out[1].shape, out[1].dtype)
        buffer = self.kept.setdefault(shape, torch.empty_like(out[1]))
        return out[0], buffer.copy_(out[1])


@fault("paged_attention", "convention", "dtype", "stale page", "sizes", "out of bounds", "fault")
def table_of_int64_read_as_int32(right, **v):
    table = v["block_table"]
    if table.dtype != torch.int64 or table.shape[1] < 2:
        return right(**v)
    words = table.contiguous().view(torch.int32)[:, :table.shape[1]].clamp(min=0)
    return right(**{**v, "block_table": words})


@fault("attention", "in-place change")
def result_over_a_query_of_one_token(right, **v):
    """Decode writes its result where the query was."""
    query, dim = v["query"], 3 - _heads(v)
    out = right(**v)
    result = out[0] if isinstance(out, tuple) else out
    if (query.shape[dim] == 1 and query.shape == result.shape and not query.requires_grad
            and query.shape[3 - dim] > v["key"].shape[3 - dim]):
        query.copy_(result)
    return out


PORTED_ATTENTION_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
