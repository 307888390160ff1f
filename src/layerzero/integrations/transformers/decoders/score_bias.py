"""Biases of attention scores by the distance from query to key: T5's learned buckets, and ALiBi.

A bias is called with the number of tokens before the new one and returns (1, heads, 1, length + 1).
What depends on the distance alone is computed once, for the longest sequence so far and backwards
from its end, so that a shorter sequence takes the last part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .families import NotRecognised

MIN_DISTANCES = 256                            # distances that are computed at once


class BucketBias:
    """T5: each distance belongs to a bucket, which has a weight for each head. The model's own
    function assigns the buckets; the weights are read anew for each token."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._buckets = torch.empty(0, dtype=torch.int64)

    def __call__(self, length: int) -> Tensor:
        weight = self._attention.relative_attention_bias.weight.detach()
        have = len(self._buckets)
        if have <= length or self._buckets.device != weight.device:
            have = max(MIN_DISTANCES, 2 * (length + 1))
            at = self._attention
            distances = torch.arange(1 - have, 1, device=weight.device)
            self._buckets = at._relative_position_bucket(
                distances, bidirectional=not at.is_decoder,
                num_buckets=at.relative_attention_num_buckets,
                max_distance=at.relative_attention_max_distance)
        return F.embedding(self._buckets[have - 1 - length:], weight).t()[None, :, None]


class Alibi:
    """ALiBi: the slope of a head times the position of a key. A constant added to all scores of a
    query changes nothing but the rounding: models count from the first key (Bloom), or back from
    the last (MPT, `backwards`). `most`: the length of the model's own table."""

    def __init__(self, slopes: Tensor, dtype: torch.dtype, backwards: bool,
                 most: int | None = None) -> None:
        self._slopes, self._dtype, self._backwards = slopes.float(), dtype, backwards
        self._most, self._table = most, slopes.new_zeros((1, len(slopes), 1, 0))

    def __call__(self, length: int) -> Tensor:
        if self._most is not None and length >= self._most:
            raise NotRecognised(f"more than the {self._most} tokens of its alibi")
        have = self._table.shape[-1]
        if have <= length:
            have = max(MIN_DISTANCES, 2 * (length + 1))
            first = 1 - have if self._backwards else 0
            places = torch.arange(first, first + have, device=self._slopes.device)
            self._table = (self._slopes[:, None, None] * places).to(self._dtype)[None]
        return (self._table[..., have - 1 - length:] if self._backwards
                else self._table[..., :length + 1])
