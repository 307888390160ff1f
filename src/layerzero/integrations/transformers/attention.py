"""The attention function that transformers calls for `attn_implementation="layerzero"`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging

from ...dispatch import dispatcher as dispatch
from ...dispatch import torch_library as torch_face
from ...spec.errors import ConfigError
from ...world.registry import catalog
from ..rewiring import replaced_sdpa, shards_sequences
from .masks import Pattern, pattern_of, plain_pattern
from .owned_config import OWNED, is_uncapped

logger = logging.get_logger("transformers.layerzero")
# the hooks by which transformers collects outputs
CAPTURING = "transformers.utils.output_capturing"

_op = catalog.builtin_op("attention")
attention = dispatch.public_function(_op)
# torch.compile and torch.export find it under torch.ops.layerzero
torch_face.define(_op)


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key, value: (batch, heads, seq, dim), where keys may have fewer heads; out: (batch,
    seq, heads, dim).

    A mask is the whole truth about who sees whom. Without one, `is_causal` and `sliding_window`
    are, and more keys than queries are those of a static cache that was empty.
    s_aux: one sink per head. position_bias: added to the scores. indices: the keys that each query
    selected.
    """
    # since lz.patch: that is the latest choice; and over a part of a sequence no other would do
    if shards_sequences() or (getattr(module, OWNED, None) is not None and replaced_sdpa()):
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout, scaling, is_causal,
            position_bias=position_bias, **({"softcap": softcap} if softcap else {}), **kwargs)
    if kwargs.get("output_attentions"):
        logger.warning_once(
            "attn_implementation='layerzero' computes no attention weights, so "
            "output_attentions=True gives None for them. Set the attention implementation to "
            "'eager' if you want them.")
    _refuse_unknown(kwargs)
    if softcap and is_uncapped(module):
        softcap = None
    pattern = None
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    elif position_bias is None and indices is None and not torch.compiler.is_compiling():
        pattern = pattern_of(attention_mask, query.shape[2], key.shape[2])
    return _attend(query, key, value, attention_mask, pattern, dropout, scaling, is_causal,
                   sliding_window, softcap, s_aux, position_bias, indices), None


def matches_eager(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns eager attention as lz computes it; `stock` serves who wants weights or dropout."""
    parameters = eager_parameters(stock)

    @functools.wraps(stock)
    def eager_attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                                attention_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("dropout") or wants_weights(module, kwargs):
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        return eager_attend(parameters, module, query, key, value, attention_mask, **kwargs), None

    return eager_attention_forward


def eager_attend(parameters: frozenset[str], module: torch.nn.Module, query: Tensor, key: Tensor,
                 value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
    """Computes what an eager function with these parameters computes. The mask is the whole truth
    about who sees whom: without one every key is seen."""
    _refuse_unknown(kwargs)
    bias, softcap = (kwargs.get(name) if name in parameters else None
                     for name in ("position_bias", "softcap"))
    sinks, pattern = getattr(module, "sinks", None), None
    if attention_mask is not None and bias is None:
        pattern = plain_pattern(attention_mask, query.shape[2], key.shape[2],
                                kwargs.get("sliding_window"))
        if pattern is None and sinks is None:
            query, attention_mask = _mean_of_hidden(query, attention_mask)
    return _attend(query, key, value, attention_mask, pattern, 0.0, kwargs.get("scaling"), False,
                   None, softcap, sinks, bias, None)


def eager_parameters(stock: Callable[..., Any]) -> frozenset[str]:
    """Returns what an eager function takes by name beside module, query, key, value, mask."""
    return frozenset(p.name for p in [*inspect.signature(stock).parameters.values()][5:]
                     if p.kind != p.VAR_KEYWORD)


def wants_weights(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Tells whether someone looks at the attention weights of this call: by an argument, the
    configuration, the outputs that transformers collects, or a hook on the module."""
    if (kwargs.get("output_attentions")
        or getattr(getattr(module, "config", None), "output_attentions", False)):
        return True
    hooks = (*module._forward_hooks.values(), *nn_module._global_forward_hooks.values())
    if any(getattr(hook, "__module__", "") != CAPTURING for hook in hooks):
        return True
    collector = getattr(sys.modules.get(CAPTURING), "_active_collector", None) if hooks else None
    collected = collector.get() if collector is not None else None
    return any("attentions" in name for name in collected or ())


def _attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
            pattern: Pattern | None, dropout: float, scaling: float | None, is_causal: Any,
            sliding_window: int | None, softcap: float | None,
            s_aux: Tensor | None, position_bias: Tensor | None, indices: Tensor | None) -> Tensor:
    queries, left, right = query.shape[2], -1, -1
    causal = False
    if attention_mask is None:
        # in this order: with a symbolic length the other way gives no bool
        causal = queries > 1 and is_causal
        if causal and key.shape[2] > queries:
            key, value = key[:, :, :queries], value[:, :, :queries]
            position_bias = position_bias[..., :queries] if position_bias is not None else None
        if sliding_window is not None and key.shape[2] > sliding_window:
            left, right = sliding_window - 1, -1 if causal or queries == 1 else sliding_window - 1
    elif pattern is not None:
        attention_mask = None
        first, last, causal, left, right = pattern
        if last - first < key.shape[2]:
            key, value = key[:, :, first:last], value[:, :, first:last]
    if indices is not None:
        attention_mask = _hide_unselected(attention_mask, indices, key.shape[2])
    if position_bias is not None:
        attention_mask = _with_bias(attention_mask, position_bias.to(query.dtype))
    elif attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(query.dtype)
    # a bias beside causality: "nothing right of the diagonal"
    if causal and attention_mask is not None:
        causal, right = False, 0
    out = attention(
        query, key, value, attention_mask, dropout, causal, scaling, causal_align="bottom_right",
        window_left=left, window_right=right, softcap=softcap or 0.0, return_lse=s_aux is not None)
    if s_aux is not None:
        out, lse = out
        out = with_sinks(out, lse, s_aux)
    return out.transpose(1, 2).contiguous()  # type: ignore[no-any-return]


def _mean_of_hidden(query: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Lets a query that sees no key take the mean of all values, as eager attention has it: every
    score is the same lowest number there. In float16 that number is too near to the scores for
    kernels that add in float32."""
    if mask.dtype != torch.float16:
        return query, mask
    hidden = (mask <= torch.finfo(mask.dtype).min).all(-1, keepdim=True)
    return query.masked_fill(hidden, 0.0), mask.masked_fill(hidden, 0.0)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scales the output by e^lse / (e^lse + e^sink): a sink is one more score whose value is
    zero."""
    share = torch.sigmoid(lse - sinks.to(lse.dtype).reshape(1, -1, 1))
    return (out * share.unsqueeze(-1)).to(out.dtype)


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask.to(bias.dtype)


def _hide_unselected(mask: Tensor | None, indices: Tensor, keys: int) -> Tensor:
    """Returns the mask with only the selected keys seen; `indices` is (batch, seq_q, count)."""
    hidden = indices.new_ones((*indices.shape[:-1], keys),
                              dtype=torch.bool).scatter(-1, indices.long(), False)
    hidden = hidden.unsqueeze(1)
    if mask is None:
        return ~hidden
    return (mask & ~hidden if mask.dtype == torch.bool
            else mask.masked_fill(hidden, torch.finfo(mask.dtype).min))


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    """Arguments that change the result and are not served: an error, not a wrong answer."""
    for name in ("block_indices", "cache"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"attn_implementation='layerzero' does not serve {name}=, which this model or "
                "cache asks for; set its attention implementation to 'sdpa' or 'eager'")
