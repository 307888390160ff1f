"""Attention in double precision as one more implementation for transformers:
`attn_implementation="exact"`.

transformers' eager attention takes its softmax in float32 whatever the model is in, and gives NaN
for a row of padding in float64; this one is the truth that both are measured by.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from models import tiny
from torch import Tensor
from transformers.masking_utils import sdpa_mask


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None,
           bias: Tensor | None = None, scale: float | None = None, softcap: float | None = None,
           sinks: Tensor | None = None) -> Tensor:
    """(batch, heads, seq, dim) in, (batch, seq, heads, dim) out.

    `seen`: which query sees which key.
    """
    query, key, value = (t.double() for t in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores if bias is None else scores + bias.double()
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.nan_to_num() @ value).transpose(1, 2)          # nothing seen: nothing


def _forward(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
             scaling: float | None = None, softcap: float | None = None,
             s_aux: Tensor | None = None, position_bias: Tensor | None = None,
             **ignored: Any) -> tuple[Tensor, None]:
    return attend(query, key, value, attention_mask, position_bias, scaling, softcap, s_aux), None


def _mask(**options: Any) -> Tensor:
    return sdpa_mask(**{**options, "allow_is_causal_skip": False,
                        "allow_is_bidirectional_skip": False})


transformers.AttentionInterface.register("exact", _forward)
transformers.AttentionMaskInterface.register("exact", _mask)


def exact_model(family: str) -> Any:
    """The model of this family, all of it in double precision."""
    model = tiny(family, attn_implementation="exact").double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")      # the others have no double
    return model
