"""The parts of a decoder that has a decode step, as data: each layer's parts and numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..replacements import ROTATIONS

OWN = "the model's own code"
# cos and sin, for each kind of layer that has its own
Angles = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Norm:
    op: str                                    # rms_norm, layer_norm, or OWN
    weights: tuple[Tensor, ...]                # the weight, and the bias, of one that has them
    eps: float
    offset: float                              # what is added to the weight of an RMS norm
    gains: tuple[Linear, ...] = ()             # whose weights, in turn, are those of the heads
    module: Any = None                         # that computes it by itself: OWN


@dataclass(frozen=True)
class Linear:
    module: Any
    transposed: bool                           # its weight is kept as (in, out)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        rows, columns = self.module.weight.shape
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True)
class FeedForward:
    """`gate_up`: layers whose weights, joined, are one product: gate and up, or up alone."""

    gate_up: tuple[Linear, ...]
    down: Linear
    activation: str                            # as lz.mlp calls it
    gate_last: bool = False                    # in the product, after what it gates


@dataclass(frozen=True)
class OwnPart:
    """A feed-forward part that the model's own code computes; `first`: of the tuple it returns."""

    module: Any
    first: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `top_k` of many for each token, and maybe one shared by all."""

    router: Tensor
    top_k: int
    normalize: bool
    gate_up: Tensor                            # (experts, 2 * inner, hidden)
    down: Tensor                               # (experts, hidden, inner)
    activation: str
    shared: FeedForward | None
    shared_gate: Linear | None                 # None: what it gives is added as it is
    # tokens (tokens, hidden) -> weights and ids, (tokens, top_k), by the model's own router; None:
    # softmax, the best top_k, and `normalize`
    route: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True)
class CrossParts:
    """Cross-attention. The prompt left the keys and values of the encoder in the model's cache."""

    norm: Norm | None
    query: Linear
    out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class LatentParts:
    """Queries, keys and values of multi-head latent attention: the cache holds a compressed state
    (`rank`) and one rotated key (`rope_dim`) for each token."""

    query_down: Linear                         # or the whole query, where there is no query_up
    query_norm: Norm | None
    query_up: Linear | None
    norm: Norm                                 # of the compressed state
    up: Linear                                 # (heads * (nope_dim + value_dim), rank)
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    # query and key (batch, heads, 1, rope_dim), angles -> rotated, by the model's own function
    rotate: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer. A norm that is None is not there.

    In turn: x += attn_post(attention(norm(x))), then x += mlp_post(mlp(mlp_norm(x))). Side by side
    (`parallel`): x += attention(norm(x)) + mlp(mlp_norm(x)), where no mlp_norm means that both get
    the same. What is added is times `branch_scale`.
    """

    norm: Norm | None
    # layers whose weights, one after the other, are one product
    qkv: tuple[Linear, ...]
    # query, key and value of a head lie together, head after head
    by_head: bool
    # over each head, or over all of them, as its weight is long
    q_norm: Norm | None
    k_norm: Norm | None
    out: Linear
    attn_post: Norm | None
    mlp_norm: Norm | None
    mlp: FeedForward | Experts | OwnPart
    mlp_post: Norm | None
    parallel: bool
    branch_scale: float
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float                             # of the scores; 0.0 is none
    window: int | None                         # tokens that are seen, the new one too
    angles: int | None                         # which of the angles rotate it; None: no rope
    # the norms are of the sums: x = norm(x + attention(x)), then x = mlp_norm(x + mlp(x))
    normed_sums: bool = False
    norm_last: bool = False                    # queries and keys are rotated, then normed
    cross: CrossParts | None = None            # between the attention and the feed-forward part
    sinks: Tensor | None = None                # (heads,), one more score of each head
    out_norm: Norm | None = None               # of what the heads give, before the product
    # qkv are then the products down: of the query, and to the state and key that are kept
    latent: LatentParts | None = None


@dataclass(frozen=True)
class DecoderParts:
    """A whole decoder; `head` is None where the model ends with its last norm."""

    base: Any
    embed: nn.Embedding
    embed_scale: Tensor | float | None         # the embedding's is a tensor, the decoder's a number
    positions: nn.Embedding | None             # learned ones, which are added to the token
    first_position: int                        # where the table of these begins
    # a position is the number of tokens before it that the mask shows
    counted: bool
    layers: tuple[LayerParts, ...]
    norm: Norm | None
    rotary: Any                                # None where positions are learned
    rotation: str                              # one of ROTATIONS
    # of layers with angles of their own; one kind "" where all are alike
    kinds: tuple[str, ...]
    by_axes: bool                              # a position may be three: time, row and column
    head: Linear | None
    softcap: float                             # of the logits; 0.0 is none
    logit_scale: float
    result: Any                                # the class of what the model returns
    token_scale: float = 1.0                   # of the embedding, whose scale is no tensor
    embed_norm: Norm | None = None             # of token and position together
    codebooks: tuple[nn.Embedding, ...] = ()   # of a token that is several, one from each
    # what is added to the scores of one token after `length` others, (1, heads, 1, length + 1)
    bias: Callable[[int], Tensor] | None = None
    # by what queries are scaled at a position; None: by nothing
    query_scale: Callable[[Tensor], Tensor] | None = None
    # the angles depend on the position alone, so that there can be a table of them
    fixed_rope: bool = True
    single: bool = False                       # the model's cos and sin hold each column once

    @property
    def unplain_feature(self) -> str:
        """Returns what this decoder has that kernels written for the plain one cannot do, or "".
        Plain are norms, one product for q, k and v, attention, and a feed-forward part that lz
        computes."""
        if self.uncapturable_feature:
            return self.uncapturable_feature
        for layer in self.layers:
            norms = (layer.norm, layer.attn_post, layer.mlp_norm, layer.mlp_post, self.norm)
            features = {
                "norms of the sums": layer.normed_sums,
                "a norm of its heads' result": layer.out_norm,
                "norms of rotated heads": layer.norm_last,
                OWN: isinstance(layer.mlp, OwnPart) or any(n and n.op == OWN for n in norms),
                "a gate that comes last": getattr(layer.mlp, "gate_last", False),
                "a router of its own": getattr(layer.mlp, "route", None)}
            for feature, present in features.items():
                if present:
                    return feature
        return ("a scaled or normed embedding" if self.token_scale != 1.0
                or self.embed_norm is not None else "")

    @property
    def uncapturable_feature(self) -> str:
        """Returns what of this decoder the buffers and graphs of captured.py cannot do, or ""."""
        for layer in self.layers:
            if layer.cross is not None:
                return "cross-attention"
            if layer.latent is not None:
                return "latent attention"
            if layer.sinks is not None:
                return "attention sinks"
        if self.bias is not None:
            return "a bias of the scores by position"
        if self.query_scale is not None:
            return "queries that are scaled by position"
        return "" if self.fixed_rope else "a rope whose angles depend on the length"

    @property
    def weights(self) -> Tensor:
        """The weights of the embedding, whose dtype and device are the model's."""
        return self.embed.weight.detach()

    @cached_property
    def half(self) -> int:
        """Pairs of a head that are rotated."""
        angles = self.angles_at(torch.zeros((1, 1), dtype=torch.int64, device=self.weights.device))
        return int(angles[0][0].shape[-1]) // 2 if angles else 0

    def embedded(self, ids: Tensor) -> Tensor:
        """Returns the tokens embedded as the model does it, which is what `inputs_embeds` holds."""
        if self.codebooks:
            books = ids.view(-1, len(self.codebooks), ids.shape[-1]).unbind(1)
            return sum(F.embedding(i, book.weight) for i, book in zip(books, self.codebooks))  # type: ignore[return-value]
        x = F.embedding(ids, self.embed.weight)
        x = x * self.token_scale if self.token_scale != 1.0 else x
        return x * self.embed_scale.to(x.dtype) if isinstance(self.embed_scale, Tensor) else x

    def first_input(self, x: Tensor, positions: Tensor) -> Tensor:
        """Returns the input of the first layer, from embedded tokens."""
        if self.embed_scale is not None and not isinstance(self.embed_scale, Tensor):
            x = x * self.embed_scale
        if self.positions is not None:
            x = x + F.embedding(positions + self.first_position if self.first_position
                                else positions, self.positions.weight)
        if self.embed_norm is not None:
            weight, bias = (*self.embed_norm.weights, None, None)[:2]
            x = F.layer_norm(x, x.shape[-1:], weight, bias, self.embed_norm.eps)
        return x

    def angles_at(self, positions: Tensor) -> Angles:
        """Returns cos and sin, (batch, tokens, 2 * half), where the second half is the first again;
        none where positions are learned. The model's own rotary module computes them."""
        if self.rotary is None:
            return ()
        like, twice = self.weights, ROTATIONS[self.rotation][1]
        if self.by_axes and positions.dim() == 2:              # the same on all axes
            positions = positions.expand(3, *positions.shape)
        tables = [self.rotary(like, positions, *((kind,) if kind else ())) for kind in self.kinds]
        if self.single:
            tables = [(torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)) for cos, sin in tables]
        return tuple((_table(cos, like, twice), _table(sin, like, twice)) for cos, sin in tables)


def _table(values: Tensor, like: Tensor, twice: bool) -> Tensor:
    values = values.to(like.dtype)
    return values if twice else values[..., ::2].repeat(1, 1, 2)
