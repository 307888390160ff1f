"""Keys and values of one token in a cache whose layers append in place; see growing_cache.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....backends.native.declaration import DTYPES
from ..attention import with_sinks
from ..decoders.recognition import Angles
from .decode_step import DecodeStep


class HostKV:
    """Keys and values of a token: the mask of a layer is (batch, 1, 1, keys), True: seen, or None
    where all are; `angles` are those of the token, `bias` is added to the scores. Where the
    compiled kernels can do it they rotate, store and attend in one call."""

    compiled = True                            # where there is a kernel, it writes to the cache

    def __init__(self, step: DecodeStep, layers: list[Any], masks: Sequence[Tensor | None],
                 angles: Angles, bias: Tensor | None = None,
                 query_scale: Tensor | None = None) -> None:
        self._step, self._layers = step, layers
        self._positions = [layer.reserve(1) for layer in layers]
        self._first = [max(0, position + 1 - bound.window) if bound.window else 0
                       for position, bound in zip(self._positions, step.layers)]
        plain = bias is None and query_scale is None and all(mask is None for mask in masks)
        self._query_scale = query_scale
        self._token = step.token if plain and self.compiled else None
        self.angles = angles if self._token is None else None      # for the step to rotate by
        self._own_angles = angles or ((step._like, step._like),)   # of no angles nothing is read
        self._masks: list[tuple[Tensor, ...]] = []
        if self._token is None:
            lengths = [position + 1 - first
                       for position, first in zip(self._positions, self._first)]
            biased = [mask if bias is None else bias if mask is None else torch.where(
                mask, bias, torch.finfo(bias.dtype).min) for mask in masks]
            self._masks = [() if mask is None else (mask[..., -length:],)
                           for mask, length in zip(biased, lengths)]
            self._runs = [step.attention(i, length, masks[i] is not None, bias is not None)
                          for i, length in enumerate(lengths)]

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        cache, position, first = self._layers[layer], self._positions[layer], self._first[layer]
        if self._token is not None:
            bound = self._step.layers[layer]
            cos, sin = self._own_angles[bound.angles or 0]
            keys, values = cache.key_buffer, cache.value_buffer
            before = first * keys.stride(1) * keys.element_size() if first else 0
            out = qk.new_empty((len(qk), 1, bound.heads * bound.head_dim))
            self._token(DTYPES[qk.dtype], qk.data_ptr(), cos.data_ptr(), sin.data_ptr(),
                        keys.data_ptr() + before, values.data_ptr() + before, out.data_ptr(),
                        len(qk), bound.heads, bound.kv_heads, bound.head_dim,
                        0 if bound.angles is None else self._step.half,
                        cos.stride(0) if len(cos) > 1 else 0,
                        keys.stride(0), position - first, bound.scale, torch.get_num_threads())
            cache.set_end(position + 1)
            return out
        queries = qk.shape[2] - value.shape[2]
        cache.write(position, qk[:, :, queries:], value)
        seen = cache.view(first, position + 1)
        query = qk[:, :, :queries].transpose(1, 2)
        if self._query_scale is not None:
            query = query * self._query_scale
        out = self._runs[layer](query, *seen, *self._masks[layer])
        sinks = self._step.layers[layer].sinks
        if sinks is not None:
            out, lse = out
            out = with_sinks(out, lse, sinks)
        return out.transpose(1, 2).reshape(len(qk), 1, -1)  # type: ignore[no-any-return]

    def undo(self) -> None:
        """Takes this token back, after the step broke."""
        for layer, position in zip(self._layers, self._positions):
            layer.set_end(position)
