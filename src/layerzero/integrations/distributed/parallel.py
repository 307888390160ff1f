"""Tensor-parallel layers with the same bits on any number of ranks that divides `splits`.

The work is cut into `splits` pieces of one size, however many ranks there are, and a rank computes
its share of them: every call has the same sizes on 1, 2 and 4 ranks. Where pieces are added, their
sums form one binary tree: a rank adds up its own branch in float32, then the branches of all ranks
are gathered and added in the order of ranks. An all_reduce adds in an order of its own.

All layers take replicated inputs unless they say otherwise, and serve training too: gradients are
added up in the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...dispatch.dispatcher import dispatcher_named
from ...spec.errors import InvalidCall
from .exchange import process_group

SPLITS = 8                                     # pieces; as many ranks at most
_DETERMINISTIC = {"deterministic": True}


class ShardGroup:
    """This rank among `size` ranks that share `splits` pieces."""

    def __init__(self, group: Any, splits: int) -> None:
        single_process = not dist.is_available() or not dist.is_initialized()
        self.group = None if single_process else process_group(group)
        self.rank = 0 if single_process else dist.get_rank(self.group)
        self.size = 1 if single_process else dist.get_world_size(self.group)
        if splits < 1 or splits & (splits - 1) or splits % self.size:
            raise InvalidCall(f"lz.distributed: splits must be a power of two and a multiple of "
                              f"the {self.size} ranks, got {splits}")
        self.pieces = splits // self.size      # of this rank

    def cut(self, t: Tensor, dim: int, what: str) -> tuple[Tensor, ...]:
        """Cut this rank's shard into its pieces."""
        if t.shape[dim] % self.pieces:
            raise InvalidCall(f"lz.distributed: {what} is {t.shape[dim]} on this rank, which is "
                              f"not a multiple of its {self.pieces} pieces; give another splits=")
        return t.chunk(self.pieces, dim)

    def cut_activations(self, t: Tensor, dim: int, what: str) -> tuple[Tensor, ...]:
        """Returns the same with copies: a library may compute otherwise for distant rows."""
        return tuple(part.contiguous() for part in self.cut(t, dim, what))

    def gather(self, t: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks; the own one keeps its gradient."""
        if self.size == 1:
            return [t]
        own = t.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own.detach(), group=self.group)
        parts[self.rank] = own
        return parts

    def add(self, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Add the pieces of all ranks, in the one tree."""
        acc_dtype = torch.promote_types(dtype, torch.float32)
        return _tree(self.gather(_tree([p.to(acc_dtype) for p in pieces]))).to(dtype)


def _tree(terms: Sequence[Tensor]) -> Tensor:
    """Add neighbours, then the sums of neighbours, and so on."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2])]
    return terms[0]


class _Share(torch.autograd.Function):
    """A replicated input, once for each piece; all pieces' gradients add up in one tree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: ShardGroup) -> tuple[Tensor, ...]:
        ctx.shards = shards
        return tuple(x.view_as(x) for _ in range(shards.pieces))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.shards.add(grads, grads[0].dtype), None


def _shared(x: Tensor, shards: ShardGroup) -> tuple[Tensor, ...]:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return (x,) * shards.pieces
    return _Share.apply(x, shards)  # type: ignore[no-any-return, no-untyped-call]


def _call(op: str, *args: Any, **kwargs: Any) -> Tensor:
    return dispatcher_named(op).public(*args, **kwargs,  # type: ignore[no-any-return]
                                       policy=_DETERMINISTIC)


def shard(t: Tensor, dim: int = 0, *, group: Any = None, splits: int = SPLITS) -> Tensor:
    """Return this rank's part of a whole weight: dim=0 for a column-parallel layer, heads or the
    width of a table (dim=1), dim=1 for a row-parallel one."""
    shards = ShardGroup(group, splits)
    if t.shape[dim] % splits:
        raise InvalidCall(f"lz.distributed.shard: dimension {dim} is {t.shape[dim]}, which is not "
                          f"a multiple of splits={splits}")
    return t.chunk(shards.size, dim)[shards.rank].contiguous()


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None,
                  activation: str | None = None, *, group: Any = None,
                  splits: int = SPLITS) -> Tensor:
    """activation(x @ weight.T + bias) for this rank's rows of the weight: its columns of the
    result, which a row_linear takes as they are."""
    shards = ShardGroup(group, splits)
    biases = shards.cut(bias, 0, "the bias") if bias is not None else (None,) * shards.pieces
    weights = shards.cut(weight, 0, "out_features")
    return torch.cat([_call("linear", part, w, b, activation) for part, w, b in
                      zip(_shared(x, shards), weights, biases)], -1)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Any = None,
               splits: int = SPLITS) -> Tensor:
    """x @ weight.T + bias for this rank's columns of x and of the weight: the whole result, on
    every rank. The bias is that of the whole layer."""
    shards = ShardGroup(group, splits)
    inputs = shards.cut_activations(x, -1, "in_features")
    weights = shards.cut(weight, 1, "in_features")
    out = shards.add([_call("linear", a, w) for a, w in zip(inputs, weights)], x.dtype)
    return out if bias is None else out + bias


def parallel_mlp(x: Tensor, weight_gate: Tensor, weight_up: Tensor | None, weight_down: Tensor,
                 activation: str = "silu", *, group: Any = None, splits: int = SPLITS) -> Tensor:
    """A feed-forward layer: gate and up column-parallel, down row-parallel. Without `weight_up` it
    is not gated."""
    inner = column_linear(x, weight_gate, activation=activation, group=group, splits=splits)
    if weight_up is not None:
        inner = inner * column_linear(x, weight_up, group=group, splits=splits)
    return row_linear(inner, weight_down, group=group, splits=splits)


def parallel_attention(query: Tensor, key: Tensor, value: Tensor, *, group: Any = None,
                       splits: int = SPLITS, **options: Any) -> Tensor:
    """lz.attention of this rank's heads, (batch, heads, tokens, head_dim), in pieces of one size.
    The KV heads of all ranks must be a multiple of `splits`, or give another."""
    shards = ShardGroup(group, splits)
    parts = zip(*(shards.cut_activations(t, 1, "the number of heads") for t in (query, key, value)))
    return torch.cat([_call("attention", *part, **options) for part in parts], 1)


def parallel_embedding(ids: Tensor, weight: Tensor, *, group: Any = None,
                       splits: int = SPLITS) -> Tensor:
    """Rows of a table whose width the ranks share: the whole rows, on every rank. Nothing is
    added."""
    return torch.cat(ShardGroup(group, splits).gather(_call("embedding", ids, weight)), -1)
