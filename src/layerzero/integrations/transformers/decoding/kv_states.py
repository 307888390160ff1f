"""Chooses the StepKV of a token outside of a graph; and caches that are no DynamicCache.

A static or quantized cache keeps keys and values in its own way: its layers' own `update` is called
for each token, and the attention reads what that gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, StaticCache, StaticLayer

from ..decoders.families import NotRecognised
from ..decoders.parts import DecoderParts
from . import shared_prompt
from .decode_step import DecodeStep
from .host_kv import HostKV
from .latent_attention import LatentKV

QuantizedCache: Any = getattr(cache_utils, "QuantizedCache", ())
QuantizedLayer: Any = getattr(cache_utils, "BaseQuantizedLayer",
                              getattr(cache_utils, "QuantizedLayer", ()))


def kv_for(step: DecodeStep, parts: DecoderParts, layers: list[Any],
           masks: Sequence[Tensor | None], positions: Tensor, length: int) -> Any:
    """Returns the StepKV for one token after `length` others, in layers that append in place."""
    if parts.layers[0].latent is not None:
        return LatentKV(parts, layers, masks, positions)
    if shared_prompt.serves(layers):
        return shared_prompt.SharedPromptKV(step, layers, parts.angles_at(positions))
    bias = None if parts.bias is None else parts.bias(length)
    scale = None if parts.query_scale is None else parts.query_scale(positions)
    kind = HostKV if not isinstance(layers[0], (StaticLayer, QuantizedLayer)) else UpdatingKV
    return kind(step, layers, masks, parts.angles_at(positions), bias, scale)


class _LayerAdapter:
    """A layer of another cache, as HostKV writes and reads it."""

    def __init__(self, layer: Any) -> None:
        self.layer, self._length = layer, int(layer.get_seq_length())
        self._before = dict(vars(layer))

    def reserve(self, more: int) -> int:
        return self._length

    def write(self, position: int, key: Tensor, value: Tensor) -> None:
        self._all = self.layer.update(key.transpose(1, 2), value.transpose(1, 2))

    def view(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = self._all               # of a static cache also what is not written yet
        return keys[:, :, start:end], values[:, :, start:end]

    def set_end(self, end: int) -> None:
        if isinstance(self.layer, StaticLayer):
            length = self.layer.cumulative_length
            if isinstance(length, Tensor):
                length.fill_(end)
            else:
                self.layer.cumulative_length = end
        else:
            vars(self.layer).update(self._before)


class UpdatingKV(HostKV):
    """Keys and values in a static or quantized cache."""

    compiled = False

    def __init__(self, step: DecodeStep, layers: list[Any], *others: Any) -> None:
        super().__init__(step, [_LayerAdapter(layer) for layer in layers], *others)


def is_updating(cache: Any) -> bool:
    """Is it a static or quantized cache?"""
    return isinstance(cache, (StaticCache, QuantizedCache))


def updating_token(accelerated: Any, input_ids: Tensor | None = None, attention_mask: Any = None,
                   position_ids: Any = None, past_key_values: Any = None,
                   inputs_embeds: Tensor | None = None, logits_to_keep: Any = 0,
                   **others: Any) -> Any:
    """Computes one token in such a cache, as Accelerated does in others."""
    accelerated._check(DynamicCache(), logits_to_keep, others)
    parts, layers = accelerated.parts, past_key_values.layers
    token = accelerated._token(input_ids, inputs_embeds)
    batch, length = len(token), int(past_key_values.get_seq_length())
    if parts.layers[0].latent is not None or any(layer.window for layer in parts.layers):
        raise NotRecognised(f"a cache that is {type(past_key_values).__name__}, with "
                            + ("latent attention" if parts.layers[0].latent else "a window"))
    if getattr(past_key_values, "offloading", False) or len(layers) != len(parts.layers) or any(
            not (type(layer) is StaticLayer or isinstance(layer, QuantizedLayer))
            or not layer.is_initialized or int(layer.get_seq_length()) != length
            for layer in layers):
        raise NotRecognised(f"a cache that is {type(past_key_values).__name__}, not as the model "
                            "leaves it after a prompt")
    static = isinstance(layers[0], StaticLayer)
    if static and (length >= layers[0].keys.shape[2] or layers[0].keys.shape[0] != batch):
        raise NotRecognised("a static cache that is full, or for another batch")
    mask = attention_mask
    if static and isinstance(mask, Tensor):    # made for all that there is room for
        mask = mask[..., :length + 1]
    masks = accelerated._masks(mask, batch, length)
    position_ids = accelerated._position(position_ids)
    if parts.counted and position_ids is None and any(m is not None for m in masks):
        raise NotRecognised("positions that follow from the mask")
    step = accelerated.step(batch)
    out = accelerated._uncaptured(step, token, position_ids, layers, length, masks)
    accelerated.served["step"] += 1
    result = {"last_hidden_state" if parts.head is None else "logits": out}
    return accelerated._result(**result, past_key_values=past_key_values)
