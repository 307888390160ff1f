"""Attention kernels that are wrong in calls of few models: a bias that is trained, masks of other
ranks, dropout beside other arguments, windows without an end, expanded keys that are trained.
"""

from __future__ import annotations

import math

import torch
from broken_kernels import FAULTS, Fault, fault
from process_faults import _WithBackward, zero_from

_BEFORE = len(FAULTS)


# Masks.

@fault("attention", "gradient", "mask")
def bias_of_all_samples_has_the_gradient_of_the_first(right, attn_mask=None, **v):
    samples = v["query"].shape[0]
    if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[0] == 1 < samples:
        attn_mask = _WithBackward.apply(attn_mask.expand(samples, -1, -1, -1),
                                        lambda grad: zero_from(grad, 0, 1))
    return right(attn_mask=attn_mask, **v)


@fault("attention", "gradient", "position bias")
def slopes_have_no_gradient(right, alibi_slopes=None, **v):
    return right(alibi_slopes=None if alibi_slopes is None else alibi_slopes.detach(), **v)


@fault("attention", "mask", "convention", "shape")
def mask_of_three_dimensions_is_one_for_each_sample(right, attn_mask=None, **v):
    if attn_mask is not None and attn_mask.dim() == 3 and attn_mask.shape[0] == v["query"].shape[0]:
        attn_mask = attn_mask[:, None]
    return right(attn_mask=attn_mask, **v)


@fault("attention", "mask", "convention", "shape")
def mask_of_one_dimension_is_of_the_queries(right, attn_mask=None, **v):
    queries = v["query"].shape[1 if v["layout"] == "bshd" else 2]
    if attn_mask is not None and attn_mask.shape == (queries,):
        attn_mask = attn_mask[:, None]
    return right(attn_mask=attn_mask, **v)


# Dropout.

@fault("attention", "distribution", "mask")
def causal_calls_drop_nothing(right, dropout_p=0.0, **v):
    return right(dropout_p=0.0 if v["is_causal"] else dropout_p, **v)


@fault("attention", "distribution", "non-finite values")
def dropping_everything_divides_by_zero(right, dropout_p=0.0, **v):
    out = right(dropout_p=dropout_p, **v)
    return out * math.nan if dropout_p == 1.0 and not v["return_lse"] else out


@fault("attention", "distribution", "gradient")
def gradient_of_the_scores_drops_nothing(right, dropout_p=0.0, **v):
    if not dropout_p or v["return_lse"]:
        return right(dropout_p=dropout_p, **v)
    fixed = {n: v[n].detach() for n in ("query", "key")}
    plain = right(dropout_p=0.0, **{**v, "value": v["value"].detach()})
    return right(dropout_p=dropout_p, **{**v, **fixed}) + (plain - plain.detach())


@fault("attention", "distribution", "non-determinism", "global state")
class SeedOfItsOwn:
    def __init__(self):
        self.calls = 0

    def __call__(self, right, dropout_p=0.0, **v):
        self.calls += 1
        if not dropout_p:
            return right(dropout_p=0.0, **v)
        with torch.random.fork_rng():
            torch.manual_seed(self.calls)
            return right(dropout_p=dropout_p, **v)


# Other calls.

@fault("attention", "window", "index overflow")
def end_of_a_window_counted_in_32_bits(right, window_right=-1, **v):
    wraps = window_right > 0 and window_right + v["key"].shape[2] >= 2 ** 31
    return right(window_right=0 if wraps else window_right, **v)


@fault("attention", "gradient", "layout", "aliasing")
def heads_of_an_expanded_key_share_a_gradient(right, key, **v):
    if key.dim() == 4 and key.stride(1) == 0 and key.shape[1] > 1:
        key = _WithBackward.apply(key, lambda grad: grad[:, -1:].expand_as(grad).contiguous())
    return right(key=key, **v)


@fault("attention", "head map", "convention", "unknown")
def without_gqa_there_is_one_head(right, enable_gqa=True, **v):
    if not enable_gqa and v["layout"] == "bhsd":
        v |= {n: v[n][:, :1] for n in ("key", "value")}
    return right(enable_gqa=enable_gqa, **v)


@fault("attention", "precision", "dtype")
def capped_scores_of_float64_in_float32(right, softcap=0.0, **v):
    if not softcap or v["query"].dtype != torch.float64:
        return right(softcap=softcap, **v)
    results = right(softcap=softcap, **{n: t.float() if isinstance(t, torch.Tensor)
                                        and t.is_floating_point() else t for n, t in v.items()})
    return tuple(t.double() for t in results) if v["return_lse"] else results.double()


@fault("block_sparse_attention", "fault", "mask")
def every_mask_lists_full_blocks(right, **v):
    v["block_mask"].full_kv_num_blocks.sum()
    return right(**v)


@fault("merge_attention", "precision", "dtype")
def sums_of_float64_in_float32(right, outs, lses):
    out, lse = right(outs, lses.float())
    return out, lse.to(lses.dtype)


ATTENTION_CALL_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # the long lane runs them
