"""torch's own `context_parallel`, with lz's attention in it.

torch.distributed.tensor.experimental.context_parallel shards buffers in place and replaces
torch.nn.functional.scaled_dot_product_attention by one that hands DTensors to torch's ring, which
knows the CUDA kernels of torch alone. Here the buffers are sharded by torch, and the function in
its place calls zigzag, ring or Ulysses attention of lz, on any device and backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...spec.errors import ConfigError
from .methods import METHODS
from .ranks import ranks_of
from .sharding import Layout, equal_lengths, shard_indices


@contextlib.contextmanager
def context_parallel(
    mesh: Any, *, buffers: list[Tensor] | None = None, buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    method: Literal["zigzag", "ring", "ulysses"] = "zigzag", heads_k_stride: int = 1,
) -> Iterator[None]:
    """Shards `buffers` along `buffer_seq_dims` among the ranks of a one-dimensional DeviceMesh
    and serves scaled_dot_product_attention over all of them, as torch's function of this name
    does."""
    try:
        from torch.distributed.tensor.experimental import context_parallel as torchs
    except ImportError as e:
        raise ConfigError(f"context_parallel wants a torch with torch.distributed.tensor: {e}; "
                          "zigzag_attention needs none of it") from e
    if not buffers or not buffer_seq_dims:
        raise ConfigError("context_parallel wants the buffers that hold the sequences, and the "
                          "axis of each; got none")
    length, ranks = buffers[0].shape[buffer_seq_dims[0]], ranks_of(mesh)
    # torch balances the ranks or not, as it is set up: its own sharding says which tokens are here
    position = torch.arange(length, device=buffers[0].device)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(torchs(
                mesh, buffers=[*buffers, position], buffer_seq_dims=[*buffer_seq_dims, 0],
                no_restore_buffers={*(no_restore_buffers or ()), position}))
        except AssertionError as e:            # torch says no more than that
            if length % (2 * ranks.size) == 0:
                raise
            raise ConfigError(
                f"this torch ({torch.__version__}) shards sequences among {ranks.size} ranks whose "
                f"length is a multiple of {2 * ranks.size}, got {length}; pad them, or use torch "
                "2.13, which does not balance the ranks then") from e
        layout = _layout(position.cpu(), length, ranks)
        replaced = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = _sdpa(mesh, layout, method, heads_k_stride)
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = replaced


def _layout(position: Tensor, length: int, ranks: Any) -> Layout:
    layouts: tuple[Layout, ...] = ("zigzag", "contiguous")
    for layout in layouts:
        chunks = ranks.size * (2 if layout == "zigzag" else 1)
        if length % chunks == 0 and torch.equal(
                position, shard_indices([0, length], ranks.local[0], ranks.size, layout)):
            return layout
    raise ConfigError(f"torch has sharded {length} tokens over {ranks.size} ranks in a way that lz "
                      "does not know; use torch's own context_parallel, or zigzag_attention")


def _sdpa(mesh: Any, layout: Layout, method: str, heads_k_stride: int) -> Any:
    options = {"heads_k_stride": heads_k_stride} if method == "zigzag" else {}

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or dropout_p:
            raise ConfigError("context_parallel serves scaled_dot_product_attention without "
                              "attn_mask and dropout_p: a mask of this rank's tokens says nothing "
                              "of the others'")
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise ConfigError(f"{query.shape[1]} query heads and {key.shape[1]} key heads want "
                              "enable_gqa=True")
        return batched(method, query, key, value, layout=layout, group=mesh, is_causal=is_causal,
                       scale=scale, **options).transpose(1, 2)

    return scaled_dot_product_attention


def batched(method: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention over (batch, heads, seq, dim); the result is (batch, seq, heads, dim)."""
    batch, heads, length, _ = query.shape
    if key.shape[2] != length:
        raise ConfigError(f"every rank holds the keys of its own {length} tokens; got "
                          f"{key.shape[2]}. A KV cache cannot be sharded this way")
    packed = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out = METHODS[method](*packed, equal_lengths(batch, length, query.device), length, **options)
    return out.view(batch, length, heads, -1)  # type: ignore[no-any-return]
