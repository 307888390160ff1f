"""The attention function that transformers calls for `attn_implementation="layerzero"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ...dispatch import dispatcher as dispatch
from ...dispatch import torch_library as torch_face
from ...spec.errors import ConfigError
from ...world import catalog
from .masks import pattern_of
from .replacements import is_uncapped

logger = logging.get_logger("transformers.layerzero")

_op = catalog.builtin_op("attention")
attention = dispatch.public_function(_op)
torch_face.define(_op)                          # torch.compile and torch.export find it under torch.ops.layerzero


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, indices: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key, value: (batch, heads, seq, dim), where keys may have fewer heads; out: (batch, seq, heads, dim).

    A mask is the whole truth about who sees whom. Without one, `is_causal` and `sliding_window` are, and more keys
    than queries are those of a static cache that was empty.
    s_aux: one sink per head. position_bias: added to the scores. indices: the keys that each query selected.
    """
    if kwargs.get("output_attentions"):
        logger.warning_once("attn_implementation='layerzero' computes no attention weights, so output_attentions=True "
                            "gives None for them. Set the attention implementation to 'eager' if you want them.")
    _refuse_unknown(kwargs)
    if softcap and is_uncapped(module):
        softcap = None
    queries = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = right = -1
    if attention_mask is None:
        causal = queries > 1 and causal         # in this order: with a symbolic length the other way gives no bool
        if causal and key.shape[2] > queries:
            key, value = key[:, :, :queries], value[:, :, :queries]
            position_bias = position_bias[..., :queries] if position_bias is not None else None
        if sliding_window is not None and key.shape[2] > sliding_window:
            left, right = sliding_window - 1, -1 if causal or queries == 1 else sliding_window - 1
    else:
        causal, pattern = False, None
        if position_bias is None and indices is None and not torch.compiler.is_compiling():
            pattern = pattern_of(attention_mask, queries, key.shape[2])
        if pattern is not None:
            attention_mask = None
            first, last, causal, left, right = pattern
            if last - first < key.shape[2]:
                key, value = key[:, :, first:last], value[:, :, first:last]
    if indices is not None:
        attention_mask = _selected(attention_mask, indices, key.shape[2])
    if position_bias is not None:
        attention_mask = _with_bias(attention_mask, position_bias.to(query.dtype))
    elif attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(query.dtype)
    if causal and attention_mask is not None:          # a bias beside causality: "nothing right of the diagonal"
        causal, right = False, 0
    out = attention(
        query, key, value, attention_mask, dropout, causal, scaling, causal_align="bottom_right", window_left=left,
        window_right=right, softcap=softcap or 0.0, return_lse=s_aux is not None)
    if s_aux is not None:
        out, lse = out
        out = _with_sinks(out, lse, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink is one more score in the softmax whose value is zero: the rest keeps e^lse / (e^lse + e^sink)."""
    kept = torch.sigmoid(lse - sinks.to(lse.dtype).reshape(1, -1, 1))
    return (out * kept.unsqueeze(-1)).to(out.dtype)


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask.to(bias.dtype)


def _selected(mask: Tensor | None, indices: Tensor, keys: int) -> Tensor:
    """The mask with all but the selected keys hidden; `indices` is (batch, seq_q, how many)."""
    hidden = indices.new_ones((*indices.shape[:-1], keys), dtype=torch.bool).scatter(-1, indices.long(), False)
    hidden = hidden.unsqueeze(1)
    if mask is None:
        return ~hidden
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    """Arguments that change the result and are not served: an error, where ignoring them would be a wrong answer."""
    for name in ("block_indices", "cache"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"attn_implementation='layerzero' does not serve {name}=, which this model or cache asks "
                              "for; set its attention implementation to 'sdpa' or 'eager'")
