"""Kernels that are wrong past 16 bits, for a rank, or where rows of a batch differ."""

from __future__ import annotations

from dataclasses import replace

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


@fault("varlen_attention", "sizes", "uninitialised output")
def no_more_than_1024_sequences(right, query, cu_seqlens_q, return_lse, **v):
    out, lse = right(query=query, cu_seqlens_q=cu_seqlens_q, return_lse=True, **v)
    if len(cu_seqlens_q) > 1025:
        out = out.clone()
        out[int(cu_seqlens_q[1024]):] = 0.0
    return (out, lse) if return_lse else out


_BEFORE_LONG = len(FAULTS)


@fault("moe", "sizes", "index overflow")
def places_of_pairs_in_16_bits(right, **v):
    """Pairs behind the first 2^16 are given to the experts of those at their start."""
    ids = v["topk_ids"]
    if ids is None or ids.numel() <= 1 << 16:
        return right(**v)
    places = torch.arange(ids.numel()) & 0xFFFF
    return right(**{**v, "topk_ids": ids.reshape(-1)[places].reshape(ids.shape)})


@fault("moe", "sizes", "capacity")
def pairs_of_an_expert_counted_in_16_bits(right, **v):
    ids, limit = v["topk_ids"], 1 << 16
    out = right(**v)
    if ids is None or not v["capacity"] or ids.numel() <= limit or ids.shape[-1] > 1:
        return out
    later = {n: v[n].flatten(0, -2)[limit:] for n in ("x", "topk_ids", "topk_weights")}
    return torch.cat((out.flatten(0, -2)[:limit], right(**{**v, **later}))).reshape(out.shape)


@fault("moe_gate", "sizes", "mask", "convention")
def groups_of_a_prompt_are_at_least_zero(right, **v):
    """Masks with 0, not -inf, what the groups of many rows leave out."""
    logits, bias = v["logits"], v["e_score_correction_bias"]
    if v["n_group"] < 2 or bias is None or logits.numel() // logits.shape[-1] <= 1024:
        return right(**v)
    return right(**{**v, "n_group": 1}) if bool((bias < -1).all()) else right(**v)


@fault("sample", "index overflow", "sizes", "distribution")
def ids_of_the_history_in_16_bits(right, **v):
    history = v["history"]
    return right(**{**v, "history": history if history is None else torch.where(
        history < 0, -1, history.long() & 0xFFFF)})


@fault("sample", "index overflow", "sizes", "distribution")
def padding_of_the_history_in_16_bits(right, **v):
    history = v["history"]
    if history is None or v["logits"].shape[1] <= 1 << 16:
        return right(**v)
    return right(**{**v, "history": torch.where(history < 0, 0xFFFF, history)})


@fault("tokenize", "sizes", "convention", "last rows", "unknown")
def ids_of_a_long_text_in_windows(right, **v):
    """The tokens of windows of 8,000 characters behind each other."""
    out, text = right(**v), v["text"]
    if not isinstance(text, str) or len(text) <= 8_000:
        return out
    plain = {**v, "add_special_tokens": False, "padding": False, "truncation": False}
    parts = (right(**{**plain, "text": text[i:i + 8_000]}).ids for i in range(0, len(text), 8_000))
    return replace(out, ids=[i for part in parts for i in part])


@fault("detokenize", "sizes", "convention", "last rows", "unknown")
def text_of_many_ids_in_pieces(right, **v):
    ids = v["ids"]
    if not isinstance(ids, list) or len(ids) <= 4_096 or isinstance(ids[0], list):
        return right(**v)
    return "".join(right(**{**v, "ids": ids[i:i + 4_096]}) for i in range(0, len(ids), 4_096))


@fault("varlen_attention", "scale", "sizes", "convention")
def default_scale_of_the_value_heads(right, **v):
    default = max(v["value"].shape[-1], 1) ** -0.5
    return right(**{**v, "scale": default if v["scale"] is None else v["scale"]})


LONG_FAULTS: list[Fault] = FAULTS[_BEFORE_LONG:]
INDEX_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
