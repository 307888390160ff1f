"""The three attentions over sequences that are sharded among ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Union

import torch
from torch import Tensor

from ...spec.errors import ConfigError
from .gather import gathered_attention, grouped_calls, rearranged_calls
from .ranks import Ranks, SimulatedRanks, ranks_of
from .recorded import Attention
from .ring import ring_attention_of
from .sharding import Items, Layout, Sequences, sequences_of
from .ulysses import ulysses_attention_of

# one tensor, or one per rank where all ranks are simulated
Tensors = Union[Tensor, Sequence[Tensor]]
Boundaries = Union[Tensor, Sequence[int]]
Function = TypeVar("Function", bound=Callable[..., Any])


def _eager(function: Function) -> Function:
    """Lets a compiled model leave its graph for the exchanges. torch.compiler.disable alone would
    do that, and import the compiler for everyone."""
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@_eager
def zigzag_attention(
    query: Tensors, key: Tensors, value: Tensors, cu_seqlens: Boundaries,
    max_seqlen: int | None = None, *, is_causal: bool = True, scale: float | None = None,
    window_left: int = -1, softcap: float = 0.0, return_lse: bool = False, heads_k_stride: int = 1,
    layout: Layout = "zigzag", group: Any = None, rearrange: bool = False,
) -> Any:
    """Attention of this rank's tokens over those of all ranks: keys are all-gathered, some heads
    at a time.

    query, key, value: (tokens, heads, dim), this rank's tokens in the order of `shard`.
    cu_seqlens, max_seqlen: the boundaries of each sequence's local part, and the longest of them;
    the latter may be left out where cu_seqlens is on the host.
    heads_k_stride: how many KV heads are gathered at a time; must divide them.
    layout: "zigzag", or "contiguous" chunks, which under a causal mask are not equal work.
    group: a process group, a one-dimensional DeviceMesh, None for all processes, or SimulatedRanks;
    with these, query, key, value and the result are lists of one per rank.
    rearrange: copy the gathered keys in order and call twice, as others do; to compare with.
    """
    ranks, (q, k, v) = _check_tensors(group, query, key, value)
    attention = _attention(is_causal, scale, window_left, softcap)
    sequences = _sequences(q, cu_seqlens, max_seqlen, layout, ranks)
    items = [sequences.gathered(rank, q[0].shape[0], is_causal) for rank in ranks.local]
    if rearrange and layout != "zigzag":
        raise ConfigError(f"rearrange=True wants layout='zigzag', got {layout!r}")
    calls = (rearranged_calls if rearrange else grouped_calls)(attention, items, return_lse)
    return _result(ranks, gathered_attention(ranks, q, k, v, calls, heads_k_stride, return_lse))


@_eager
def items_attention(
    query: Tensors, key: Tensors, value: Tensors, items: Sequence[Items] | Items, *,
    is_causal: bool = True, scale: float | None = None, window_left: int = -1, softcap: float = 0.0,
    return_lse: bool = False, heads_k_stride: int = 1, group: Any = None,
) -> Any:
    """As zigzag_attention, with the items over the gathered keys given, one `Items` per rank."""
    ranks, (q, k, v) = _check_tensors(group, query, key, value)
    attention = Attention(is_causal, scale, window_left, softcap)
    calls = grouped_calls(attention, [items] if isinstance(items, Items) else items, return_lse)
    return _result(ranks, gathered_attention(ranks, q, k, v, calls, heads_k_stride, return_lse))


@_eager
def ring_attention(
    query: Tensors, key: Tensors, value: Tensors, cu_seqlens: Boundaries,
    max_seqlen: int | None = None, *, is_causal: bool = True, scale: float | None = None,
    softcap: float = 0.0, return_lse: bool = False, layout: Layout = "zigzag", group: Any = None,
) -> Any:
    """As zigzag_attention, with the keys of one rank at a time: they go from rank to rank, and the
    partial results are merged. It takes the least memory and has no windows."""
    ranks, (q, k, v) = _check_tensors(group, query, key, value)
    sequences = _sequences(q, cu_seqlens, max_seqlen, layout, ranks)
    results = ring_attention_of(ranks, q, k, v, sequences, Attention(is_causal, scale, -1, softcap))
    return _result(ranks, results if return_lse else [out for out, _ in results])


@_eager
def ulysses_attention(
    query: Tensors, key: Tensors, value: Tensors, cu_seqlens: Boundaries,
    max_seqlen: int | None = None, *, is_causal: bool = True, scale: float | None = None,
    window_left: int = -1, softcap: float = 0.0, return_lse: bool = False,
    layout: Layout = "zigzag", group: Any = None,
) -> Any:
    """As zigzag_attention, with all tokens of some heads on each rank: the number of ranks must
    divide that of the query heads."""
    ranks, (q, k, v) = _check_tensors(group, query, key, value)
    attention = _attention(is_causal, scale, window_left, softcap)
    sequences = _sequences(q, cu_seqlens, max_seqlen, layout, ranks)
    return _result(ranks, ulysses_attention_of(ranks, q, k, v, sequences, attention, return_lse))


METHODS: dict[str, Callable[..., Any]] = {
    "zigzag": zigzag_attention, "ring": ring_attention, "ulysses": ulysses_attention}


def _attention(is_causal: bool, scale: float | None, window_left: int, softcap: float) -> Attention:
    if window_left >= 0 and not is_causal:
        raise ConfigError(f"a window (window_left={window_left}) is relative to the causal "
                          "diagonal here; pass is_causal=True, or no window")
    return Attention(is_causal, scale, window_left, softcap)


def _sequences(q: Sequence[Tensor], cu_seqlens: Boundaries, max_seqlen: int | None, layout: Layout,
               ranks: Ranks) -> Sequences:
    if layout not in ("zigzag", "contiguous"):
        raise ConfigError(f"layout must be 'zigzag' or 'contiguous', got {layout!r}")
    return sequences_of(cu_seqlens, max_seqlen, layout, ranks.size, q[0].device)


def _check_tensors(group: Any, *tensors: Tensors) -> tuple[Ranks, list[list[Tensor]]]:
    """Returns the ranks, and query, key and value as lists of one per local rank."""
    ranks = ranks_of(group)
    lists: list[list[Tensor]] = []
    for name, shards in zip(("query", "key", "value"), tensors):
        simulated = isinstance(ranks, SimulatedRanks)
        if isinstance(shards, Tensor) is simulated or (simulated and len(shards) != ranks.size):
            raise ConfigError(f"{name} must be "
                              + (f"a list with one tensor for each of {ranks.size} simulated ranks"
                                 if simulated else "the tensor of this rank")
                              + f", got {type(shards).__name__} of {len(shards)}")
        lists.append([shards] if isinstance(shards, Tensor) else list(shards))
    for t in (t for tensors_of in lists for t in tensors_of):
        if t.dim() != 3 or t.shape[0] != lists[0][0].shape[0]:
            raise ConfigError("query, key and value must be (tokens, heads, dim) with the same "
                              f"number of tokens on every rank, got {tuple(t.shape)} beside "
                              f"{tuple(lists[0][0].shape)}")
    return ranks, lists


def _result(ranks: Ranks, results: list[Any]) -> Any:
    return results if isinstance(ranks, SimulatedRanks) else results[0]
