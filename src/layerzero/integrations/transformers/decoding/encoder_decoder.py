"""The decode step of a decoder that also attends to what an encoder gave: Whisper, BART, T5 and
their kin.

The outer model and its `generate()` stay as they are; its decoder gets the step. Keys and values of
the encoder were computed with the prompt and lie in the model's EncoderDecoderCache, where the step
reads them for every token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from ..decoders.families import NotRecognised
from .accelerated import Accelerated
from .decode_step import DecodeStep
from .growing_cache import make_growing
from .host_kv import HostKV


class CrossKV(HostKV):
    """Keys and values of a token and of the encoder; `mask` is (batch, 1, 1, keys) or None."""

    def __init__(self, step: DecodeStep, layers: list[Any], masks: list[Tensor | None], angles: Any,
                 bias: Tensor | None, cross_layers: list[Any], mask: Tensor | None) -> None:
        super().__init__(step, layers, masks, angles, bias)
        self._cross_layers, self._mask = cross_layers, () if mask is None else (mask,)

    def cross_attend(self, layer: int, query: Tensor) -> Tensor:
        cache = self._cross_layers[layer]
        run = self._step.cross_attention(layer, cache.keys, cache.values, *self._mask)
        out = run(query.transpose(1, 2), cache.keys, cache.values, *self._mask)
        return out.transpose(1, 2).reshape(len(query), 1, -1)  # type: ignore[no-any-return]


class AcceleratedEncoderDecoder(Accelerated):
    """Takes the place of the decoder's forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = {**dict(zip(self._names, args)), **kwargs}.get("past_key_values")
        if cache is None or (isinstance(cache, EncoderDecoderCache) and not cache.get_seq_length()):
            # the prompt, which may be a single token, is the model's own
            return type(self.model).forward(self.model, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _one_token(self, input_ids: Tensor | None = None, attention_mask: Any = None,  # type: ignore[override]
                   position_ids: Any = None, past_key_values: Any = None,
                   inputs_embeds: Tensor | None = None, encoder_hidden_states: Any = None,
                   encoder_attention_mask: Any = None, **others: Any) -> Any:
        if type(past_key_values) is not EncoderDecoderCache:
            raise NotRecognised("no cache" if past_key_values is None
                                else f"a cache that is {type(past_key_values).__name__}")
        own, across = past_key_values.self_attention_cache, past_key_values.cross_attention_cache
        self._check(own, 0, others)
        token = self._token(input_ids, inputs_embeds)
        books = len(self.parts.codebooks)
        if books and token.is_floating_point():
            raise NotRecognised("inputs_embeds, of which the model knows no position")
        batch = len(token) // (books or 1)
        if encoder_hidden_states is None:
            raise NotRecognised("nothing of an encoder is given")
        if type(across) is not type(own) or len(across.layers) != len(self._windows) or not all(
                past_key_values.is_updated.get(i) for i in range(len(self._windows))):
            raise NotRecognised("a cache that does not hold the encoder's keys yet")
        refused = make_growing(own, self._windows)
        if refused:
            raise NotRecognised(refused)
        length = own.get_seq_length()
        if any(layer.get_seq_length() != length for layer in own.layers):
            raise NotRecognised("a cache whose layers hold different numbers of tokens")
        if {len(x.layers[0].keys) for x in (own, across)} != {batch}:
            raise NotRecognised("a cache for another batch")
        cross_mask = self._cross_mask(encoder_attention_mask, batch, across.layers[0].keys.shape[2])
        masks = self._masks(attention_mask, batch, length)
        position_ids = self._position(position_ids)
        step = self.step(batch)
        out = self._cross_token(step, token, position_ids, own.layers, length, masks,
                                across.layers, cross_mask)
        self.served["step"] += 1
        return self._result(last_hidden_state=out, past_key_values=past_key_values)

    def _cross_token(self, step: DecodeStep, token: Tensor, position_ids: Tensor | None,
                     layers: list[Any], length: int, masks: list[Tensor | None],
                     cross_layers: list[Any], cross_mask: Tensor | None) -> Tensor:
        if position_ids is None:
            position_ids = torch.full((1, 1), length, device=token.device)
        x = token if token.is_floating_point() else self.parts.embedded(token)
        bias = None if self.parts.bias is None else self.parts.bias(length)
        kv = CrossKV(step, layers, masks, self.parts.angles_at(position_ids), bias, cross_layers,
                     cross_mask)
        try:
            return step(self.parts.first_input(x, position_ids), kv.angles, kv)
        # passed on, an interrupt too: half a token must not stay in the cache
        except BaseException:
            kv.undo()
            raise

    @staticmethod
    def _cross_mask(mask: Any, batch: int, keys: int) -> Tensor | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.shape != (batch, keys):
            raise NotRecognised("a mask of the encoder that is made already")
        return None if bool(mask.all()) else mask.bool()[:, None, None, :]
