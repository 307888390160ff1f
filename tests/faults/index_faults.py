"""Kernels that are wrong past 16 bits, for a rank, or where rows of a batch differ."""

from __future__ import annotations

import torch
from broken_kernels import FAULTS, Fault, fault

_BEFORE = len(FAULTS)


def _keys_in_16_bits(v, offset):
    """Returns a mask of the keys that a causal call or a window shows by positions that wrap."""
    queries, keys = (v[n].shape[-2 if v["layout"] == "bhsd" else -3] for n in ("query", "key"))
    k = torch.arange(keys).to(torch.int16).long()
    distance = torch.arange(queries)[:, None] + offset - k
    shown = torch.ones((queries, keys), dtype=torch.bool)
    shown &= (distance >= 0) if v["is_causal"] else shown
    shown &= (distance <= v["window_left"]) if v["window_left"] >= 0 else shown
    return shown & ((-distance <= v["window_right"]) if v["window_right"] >= 0 else shown)


@fault("attention", "sizes", "mask", "window", "position bias", "convention", "alignment")
def attention_key_positions_in_signed_16_bits(right, **v):
    queries, keys = (v[n].shape[-2 if v["layout"] == "bhsd" else -3] for n in ("query", "key"))
    positional = v["is_causal"] or v["window_left"] >= 0 or v["window_right"] >= 0
    if keys <= 1 << 15 or not positional or v["attn_mask"] is not None \
            or v["alibi_slopes"] is not None:
        return right(**v)
    offset = keys - queries if v["causal_align"] == "bottom_right" else 0
    return right(**{**v, "attn_mask": _keys_in_16_bits(v, offset), "is_causal": False,
                    "window_left": -1, "window_right": -1})


@fault("varlen_attention", "sizes", "scale", "convention")
def softcap_is_left_out_past_15_bits(right, **v):
    return right(**{**v, "softcap": 0.0 if v["max_seqlen_k"] > 1 << 15 else v["softcap"]})


@fault("paged_attention", "sizes", "window", "convention")
def window_of_a_context_in_16_bits(right, **v):
    longest = int(v["context_lens"].max()) if len(v["context_lens"]) else 0
    return right(**{**v, "window_left": -1 if longest > 1 << 15 else v["window_left"]})


@fault("alibi", "sizes", "position bias", "convention", "mask")
def key_positions_in_unsigned_16_bits(right, **v):
    out = right(**v)
    return torch.cat((out[..., :1 << 16], out[..., :max(v["seq_k"] - (1 << 16), 0)]), -1)


@fault("rms_norm", "sizes", "layout", "shape", "unknown")
def squares_of_rank_five_over_two_dimensions(right, **v):
    x = v["x"]
    if x.dim() != 5:
        return right(**v)
    out = right(**v)
    squares = x.square().mean(-1, keepdim=True) + v["eps"]
    return out * (squares / squares.mean(-2, keepdim=True)).sqrt()


@fault("speculative_verify_tree", "convention", "unknown", "sizes")
def tree_of_the_first_row_for_the_batch(right, **v):
    return right(**{**v, "parents": v["parents"][:1].expand_as(v["parents"])})


@fault("speculative_verify_tree", "convention", "unknown", "distribution")
def seed_of_the_first_row_for_the_batch(right, **v):
    rows = v["seed_rows"]
    return right(**{**v, "seed_rows": rows if rows is None else rows[:1].expand_as(rows)})


INDEX_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
