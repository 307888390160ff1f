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


ATTENTION_CALL_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # the long lane runs them
