"""Kernels that are wrong in what a caller may leave out or give otherwise: one optional tensor
without its neighbour, another dtype, entries that nobody reads, zeros with a sign. Each is wrong in
one way.

`benchmarks/planted_faults.py --set authors` runs all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault

_BEFORE = len(FAULTS)


def _on_first(out: Any, change: Any) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


# One without the other.

@fault("layer_norm", "convention", "scale")
def weight_counts_with_a_bias_only(right, x, weight=None, bias=None, eps=1e-5):
    return right(x, None if bias is None else weight, bias, eps)


@fault("group_norm", "convention", "scale")
def channel_weight_counts_with_a_bias_only(right, x, groups, weight=None, bias=None, eps=1e-5):
    return right(x, groups, None if bias is None else weight, bias, eps)


@fault("paged_attention", "scale", "convention")
def key_scale_alone_serves_the_values(right, **v):
    if v["value_scale"] is None and v["key_scale"] is not None:
        v["value_scale"] = v["key_scale"]
    return right(**v)


@fault("sample", "distribution", "convention")
def top_k_of_rows_needs_their_top_p(right, **v):
    return right(**{**v, "top_k_rows": None if v["top_p_rows"] is None else v["top_k_rows"]})


@fault("sample", "distribution", "convention")
def temperatures_of_rows_need_their_min_p(right, **v):
    rows = v["temperature_rows"]
    return right(**{**v, "temperature_rows": None if v["min_p_rows"] is None else rows})


@fault("mlp", "convention")
def last_bias_needs_the_first(right, **v):
    return right(**{**v, "bias_down": None if v["bias_in"] is None else v["bias_down"]})


@fault("mamba_chunk_scan", "convention")
def skip_needs_the_bias_of_dt(right, **v):
    return right(**{**v, "D": None if v["dt_bias"] is None else v["D"]})


# Dtypes.

@fault("rms_norm", "precision", "dtype")
def float64_computed_in_float32(right, x, weight=None, eps=1e-6, offset=0.0):
    if x.dtype != torch.float64:
        return right(x, weight, eps, offset=offset)
    return right(x.float(), None if weight is None else weight.float(), eps, offset=offset).double()


@fault("attention", "precision", "dtype")
def float64_attention_in_float32(right, **v):
    if v["query"].dtype != torch.float64:
        return right(**v)
    narrow = {n: t.float() if isinstance(t, torch.Tensor) and t.dtype == torch.float64 else t
              for n, t in v.items()}
    return _on_first(right(**narrow), lambda out: out.double())


@fault("gated_delta_rule", "dtype", "convention", "layout")
def first_state_of_16_bits_is_ignored(right, **v):
    state = v["initial_state"]
    if state is not None and state.dtype.itemsize == 2:
        v["initial_state"] = None
    return right(**v)


@fault("group_norm", "dtype", "convention", "fault", "precision")
def wide_weights_are_read_as_narrow(right, x, groups, weight=None, bias=None, eps=1e-5):
    if weight is not None and weight.dtype != x.dtype and weight.dtype.itemsize == 2:
        weight = weight.flip(0)
    return right(x, groups, weight, bias, eps)


# What nobody reads, and what has no value.

@fault("paged_attention", "fault", "out of bounds", "stale page", "convention")
def every_entry_of_the_table_is_a_page(right, **v):
    """Gathers the whole table and hides the rest; -1 is clamped, other numbers are not."""
    table = v["block_table"].clamp(min=0)
    if table.numel():
        v["key_cache"].index_select(0, table.flatten().long())
    return right(**v)


@fault("mla_paged_attention", "fault", "out of bounds", "stale page", "convention")
def every_entry_of_the_latent_table_is_a_page(right, **v):
    table = v["block_table"].clamp(min=0)
    if table.numel():
        v["ckv_cache"].index_select(0, table.flatten().long())
    return right(**v)


@fault("quantize", "sizes", "convention", "unknown", "precision", "non-finite values")
def negative_zero_loses_its_sign(right, **v):
    if v["format"] not in ("fp8_e4m3", "fp8_e5m2"):
        return right(**v)
    return _on_first(right(**v), lambda codes: torch.where(
        codes.view(torch.uint8) == 0x80, 0, codes.view(torch.uint8)).view(codes.dtype))


@fault("attention", "mask", "non-finite values")
def row_hidden_by_infinities_is_nan(right, **v):
    mask = v["attn_mask"]
    if mask is None or mask.dtype == torch.bool or v["layout"] != "bhsd":
        return right(**v)
    dead = (mask == -math.inf).all(-1, keepdim=True)
    return _on_first(right(**v), lambda out: torch.where(dead, math.nan, out))


# Text.

@fault("tokenize", "convention", "unknown", "sizes")
def truncates_on_the_other_side(right, **v):
    side = v["truncation_side"]
    return right(**{**v, "truncation_side": {"left": "right", "right": "left"}.get(side, side)})


@fault("tokenize", "convention", "unknown")
def padding_is_seen_by_the_mask(right, **v):
    out = right(**v)
    mask = out.attention_mask
    if mask is None:
        return out
    seen = [[1] * len(row) if isinstance(row, list) else 1 for row in mask]
    return replace(out, attention_mask=seen)


@fault("detokenize", "convention", "unknown", "sizes", "last rows")
def last_token_of_a_batch_is_dropped(right, **v):
    ids = v["ids"]
    if bool(ids) and not isinstance(ids[0], int):
        v["ids"] = [list(row)[:-1] if len(row) > 2 else row for row in ids]
    return right(**v)


OPTIONAL_AUTHOR_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # the long lane runs them
