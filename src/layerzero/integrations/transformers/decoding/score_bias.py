"""What a model adds to the scores of its attention by how far a key is from the query: T5's learned
buckets, and alibi.

For one token after `length` others, (1, heads, 1, length + 1). Whatever depends on the distance
alone is made once, for the longest sequence so far and backwards from its end, so that a shorter
one has the last of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 256                                    # distances that are made at once


class BucketBias:
    """T5's: each distance belongs to a bucket, which has a weight for each head. The buckets are
    those of the model's own function; the weights are read anew for each token."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._buckets = torch.empty(0, dtype=torch.int64)

    def __call__(self, length: int) -> Tensor:
        weight = self._attention.relative_attention_bias.weight.detach()
        have = len(self._buckets)
        if have <= length or self._buckets.device != weight.device:
            have = max(LEAST, 2 * (length + 1))
            at = self._attention
            distances = torch.arange(1 - have, 1, device=weight.device)
            self._buckets = at._relative_position_bucket(
                distances, bidirectional=not at.is_decoder,
                num_buckets=at.relative_attention_num_buckets,
                max_distance=at.relative_attention_max_distance)
        return F.embedding(self._buckets[have - 1 - length:], weight).t()[None, :, None]


class Alibi:
    """Each head has a slope, and a key loses that much for each token that it is away. A query's
    scores may all be raised alike, so what counts is the place of the key."""

    def __init__(self, slopes: Tensor) -> None:
        self._slopes, self._table = slopes, slopes.new_zeros((1, len(slopes), 1, 0))

    def __call__(self, length: int) -> Tensor:
        have = self._table.shape[-1]
        if have <= length:
            have = max(LEAST, 2 * (length + 1))
            places = torch.arange(1 - have, 1, device=self._slopes.device, dtype=torch.float32)
            self._table = (self._slopes.float()[:, None, None] * places).to(
                self._slopes.dtype)[None]
        return self._table[..., have - 1 - length:]
