"""Multi-head latent attention of one token (DeepSeek-V2 and V3, GLM-4.7-Flash, Youtu, MiniCPM3).

The cache holds a compressed state and one rotated key for each token. The model's own code expands
all states into the keys and values of all heads, for every token anew. Here that product is
absorbed into the query and into the result instead, so that a token reads the cache once:

    q (state W_k)^T = (q W_k) state^T        and        p (state W_v) = (p state) W_v
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..decoders.parts import DecoderParts, LayerParts, Linear, Norm
from .planning import Run

Product = Callable[[str, Tensor, Sequence[Tensor], Tensor | None], Run]


class LatentKV:
    """States and keys of a token: the mask of a layer is (batch, 1, 1, keys), True: seen."""

    angles = None                              # for the step: it rotates nothing

    def __init__(self, parts: DecoderParts, layers: list[Any], masks: Sequence[Tensor | None],
                 positions: Tensor) -> None:
        self._layers, self._masks = layers, masks
        self._positions = [layer.reserve(1) for layer in layers]
        # as the model's function wants it
        self.rope = parts.rotary(parts.weights, positions)

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError("latent attention has no keys and values of its heads")

    def keep(self, layer: int, state: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the token's state (batch, 1, 1, rank) and key (batch, 1, 1, rope_dim); returns all
        states and keys."""
        cache, position = self._layers[layer], self._positions[layer]
        cache.write(position, state, key)
        states, keys = cache.view(0, position + 1)
        return states[:, 0], keys[:, 0]

    def mask(self, layer: int) -> Tensor | None:
        return self._masks[layer]

    def undo(self) -> None:
        """Takes this token back, after the step broke."""
        for layer, position in zip(self._layers, self._positions):
            layer.set_end(position)


def bound(p: LayerParts, up: Tensor, x: Tensor, product: Product,
          norm: Callable[[str, Norm, Tensor], Run]) -> Callable[..., Tensor]:
    """Binds latent attention. The result takes the layer's number, the product of the two down
    projections and the cache, and returns (batch, 1, heads * value_dim)."""
    latent, batch, heads = p.latent, len(x), p.heads
    assert latent is not None
    down, rank, rope = latent.query_down.shape[0], latent.rank, latent.rope_dim
    dim, scale, rotate = latent.nope_dim + rope, p.scale, latent.rotate
    state_norm = norm("norm of the latent", latent.norm, x.new_zeros((batch, 1, rank)))
    between = x.new_zeros((batch, 1, down))
    query_norm = None if latent.query_norm is None else norm("norm of the latent",
                                                             latent.query_norm, between)
    query_up = None if latent.query_up is None else _linear("query up", between, latent.query_up,
                                                            product)

    def run(layer: int, qk: Tensor, kv: LatentKV) -> Tensor:
        query, state, key = qk.split((down, rank, rope), -1)
        if query_norm is not None:
            query = query_norm(query)
        query = (query if query_up is None else query_up(query)).view(batch, 1, heads, dim)
        plain, rotated = query.transpose(1, 2).split((latent.nope_dim, rope), -1)
        rotated, key = rotate(rotated, key.view(batch, 1, 1, rope), kv.rope)
        states, keys = kv.keep(layer, state_norm(state).view(batch, 1, 1, rank),
                               key.view(batch, 1, 1, rope))
        # (heads, nope_dim + value_dim, rank), read anew: the weight may be written to
        key_up, value_up = up.view(heads, -1, rank).split((latent.nope_dim, latent.value_dim), 1)
        absorbed = torch.matmul(plain.squeeze(2).transpose(0, 1), key_up).transpose(0, 1)
        scores = torch.matmul(absorbed, states.transpose(1, 2))
        scores = torch.add(scores, torch.matmul(rotated.squeeze(2), keys.transpose(1, 2))) * scale
        mask = kv.mask(layer)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], -torch.inf)
        seen = torch.softmax(scores, -1, dtype=torch.float32).to(states.dtype)
        compressed = torch.matmul(seen, states).transpose(0, 1)    # (heads, batch, rank)
        out = torch.matmul(compressed, value_up.transpose(1, 2))
        return out.transpose(0, 1).reshape(batch, 1, -1)

    return run


def _linear(what: str, x: Tensor, linear: Linear, product: Product) -> Run:
    weight = linear.module.weight
    return product(what, x, [weight.t() if linear.transposed else weight], linear.module.bias)
