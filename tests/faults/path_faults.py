"""Kernels that take a path of their own in some calls: beside an argument, in a mode of torch, for a
first dtype, for all rows of a table; and the name each mistake has."""

from __future__ import annotations

import math

import torch
from broken_kernels import FAULTS, Fault, fault

_BEFORE = len(FAULTS)


@fault("rms_norm", "mode")
def offset_is_left_out_in_inference_mode(right, x, weight=None, eps=1e-6, offset=0.0):
    return right(x, weight, eps, offset=0.0 if torch.is_inference_mode_enabled() else offset)


@fault("linear_cross_entropy", "mode")
def evaluation_without_the_bias(right, hidden, weight, targets, bias=None, **v):
    """Where nothing is recorded a kernel without a bias is taken."""
    recorded = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return right(hidden, weight, targets, bias if recorded else None, **v)


@fault("dequantize", "state", "precision")
class TableOfTheFirstDtype:
    def __init__(self):
        self.first = None

    def __call__(self, right, q, scales=None, zeros=None, *, out_dtype="float32", **v):
        if v["format"] != "nf4":
            return right(q, scales, zeros, out_dtype=out_dtype, **v)
        self.first = self.first or out_dtype
        out = right(q, scales, zeros, out_dtype=self.first, **v)
        return out.to(getattr(torch, out_dtype))


@fault("embedding", "aliasing", "result")
def all_rows_are_the_table_itself(right, ids, weight, padding_idx=None, scale=1.0):
    if (padding_idx is None and scale == 1.0 and ids.dim() == 1 and len(ids) == len(weight)
            and torch.equal(ids, torch.arange(len(ids), dtype=ids.dtype))):
        return weight
    return right(ids, weight, padding_idx, scale)


@fault("embedding", "threads")
class ScratchOfScaledRows:
    """Unscaled rows are no matter of threads."""

    def __init__(self):
        self.scratch = torch.empty(0)

    def __call__(self, right, ids, weight, padding_idx=None, scale=1.0):
        if scale == 1.0 or weight.requires_grad or weight.dtype != torch.float32:
            return right(ids, weight, padding_idx, scale)
        with torch.inference_mode(False):
            self.scratch = right(ids, weight.detach(), None).clone()
            self.scratch.mul_(scale)
        return right(ids, weight, padding_idx, scale) if padding_idx else self.scratch.clone()


@fault("merge_attention", "non-finite values")
def infinity_is_an_empty_part(right, outs, lses):
    return right(outs, torch.where(lses == math.inf, -math.inf, lses))


@fault("alibi", "layout")
def slopes_along_memory(right, slopes, seq_q, seq_k, **v):
    if slopes.numel() > 1 and slopes.stride(0) > 1:
        slopes = torch.as_strided(slopes, slopes.shape, (1,), slopes.storage_offset())
    return right(slopes, seq_q, seq_k, **v)


@fault("alibi", "index overflow")
def distances_in_16_bits(right, slopes, seq_q, seq_k, **v):
    if max(seq_q, seq_k) <= 32768 or v["is_causal"]:
        return right(slopes, seq_q, seq_k, **v)
    offset = seq_k - seq_q if v["causal_align"] == "bottom_right" else 0
    far = torch.arange(seq_k)[None] - torch.arange(seq_q)[:, None] - offset
    wide = torch.promote_types(slopes.dtype, torch.float32)
    return (-slopes.to(wide)[:, None, None] * far.to(torch.int16).abs().to(wide)).to(slopes.dtype)


@fault("cross_entropy", "index overflow", "convention")
def ignored_number_in_32_bits(right, targets, ignore_index=-100, **v):
    if targets.dtype == torch.int32:
        ignore_index = (ignore_index + (1 << 31)) % (1 << 32) - (1 << 31)
    return right(targets=targets, ignore_index=ignore_index, **v)


@fault("mlp", "last rows", "uninitialised output", "mode")
def rows_behind_the_last_tile_are_not_written(right, x, **v):
    out = right(x=x, **v)
    rows = out.reshape(-1, out.shape[-1])
    whole = len(rows) // 64 * 64
    if out.requires_grad or whole == len(rows) or len(rows) < 64:
        return out
    fresh = torch.empty_like(rows)
    fresh[:whole] = rows[:whole]
    return fresh.view(out.shape)


@fault("mla_paged_attention", "last rows", "sizes")
def rest_of_the_position_part_left_out(right, q_pe, kpe_cache, **v):
    n = q_pe.shape[-1] // 8 * 8
    if n and n < q_pe.shape[-1]:
        q_pe, kpe_cache = q_pe[..., :n], kpe_cache[..., :n]
    return right(q_pe=q_pe, kpe_cache=kpe_cache, **v)


@fault("selective_state_update", "leak")
class StatesOfAllSteps:
    def __init__(self):
        self.states = []

    def __call__(self, right, **v):
        out = right(**v)
        self.states.append(out[1])
        return out


@fault("attention", "mask")
def softcap_over_the_mask(right, query, key, value, attn_mask=None, **v):
    """Hidden keys get the weight of a score of minus the cap."""
    cap = v["softcap"]
    plain = (v["is_causal"] or v["alibi_slopes"] is not None or v["return_lse"] or v["dropout_p"]
             or v["window_left"] >= 0 or v["window_right"] >= 0 or v["layout"] != "bhsd")
    if not cap or attn_mask is None or attn_mask.dtype != torch.bool or plain or not key.numel():
        return right(query, key, value, attn_mask, **v)
    bias = torch.where(attn_mask, 0.0, -math.inf)
    hidden = right(query, key, value, bias.clamp(min=-2 * cap).to(query.dtype), **v)
    return hidden


@fault("rms_norm", "precision")
def offset_added_in_the_dtype_of_the_weight(right, x, weight=None, eps=1e-6, offset=0.0):
    return right(x, weight if weight is None else weight + offset, eps)


PATH_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
