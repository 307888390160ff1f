"""Calls of lz.grouped_attention whose backward runs later, with keys and values given anew.

What a kernel saves for its backward is replaced: a view of the keys' buffer by where it was in the
buffer, everything else by its number in a list that the caller saves. So the graph of the call
holds no memory, the gathered keys are freed after the forward, and the backward is that of
whichever kernel served the call, without computing the forward again. A kernel that saves a copy of
its keys keeps that copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ..rewiring import public
from .sharding import Items

grouped_attention: Callable[..., Any] = public("grouped_attention")


@dataclass(frozen=True)
class Attention:
    """The arguments that all calls of one attention share."""

    is_causal: bool
    scale: float | None
    window_left: int = -1
    softcap: float = 0.0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, items: Items,
                 return_lse: bool = False, is_causal: bool | None = None) -> Any:
        return grouped_attention(
            query, key, value, is_causal=self.is_causal if is_causal is None else is_causal,
            scale=self.scale, window_left=self.window_left, softcap=self.softcap,
            return_lse=return_lse, **items.arguments())


class _View(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Lend(torch.autograd.Function):
    """Lends tensors to a graph; their gradients go to a list, not into it."""

    @staticmethod
    def forward(ctx: Any, grads: list[Any], anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.grads[:] = grads
        return None, None, *[None] * len(grads)


class Recorded:
    """One call and its graph; `results` are its results without it."""

    def __init__(self, call: Callable[..., Any], query: Tensor, buffer: Tensor,
                 split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """Runs call(query, key, value) with key, value = split(buffer)."""
        self._saved: list[Tensor] = []
        self._again: tuple[Sequence[Tensor], Tensor] | None = None
        self._grads: list[Any] = []
        self._anchor = torch.zeros(0, device=query.device, requires_grad=True)
        # without the buffer itself, which the hooks would keep alive
        storage, dtype = buffer.untyped_storage().data_ptr(), buffer.dtype

        def pack(t: Tensor) -> Any:
            if t.numel() and t.untyped_storage().data_ptr() == storage and t.dtype == dtype:
                return _View(tuple(t.shape), t.stride(), int(t.storage_offset()))
            self._saved.append(t.detach())
            return len(self._saved) - 1

        def unpack(packed: Any) -> Tensor:
            assert self._again is not None
            saved, again = self._again
            return again.as_strided(*packed) if isinstance(packed, _View) else saved[packed]

        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            lent = _Lend.apply(self._grads, self._anchor, query, *split(buffer))
            results = call(*lent)
        results = results if isinstance(results, tuple) else (results,)
        self.results = [t.detach() for t in results]
        self._edges = [get_gradient_edge(t) if t.requires_grad else None for t in results]

    def release(self) -> list[Tensor]:
        """Returns what the backward wants beside the buffer, and forgets it and the results."""
        saved, self._saved, self.results = self._saved, [], []
        return saved

    def backward(self, saved: Sequence[Tensor], buffer: Tensor,
                 grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Returns the gradients of query, key and value; `saved` and buffer stay as they were."""
        pairs = [(e, g) for e, g in zip(self._edges, grads) if e is not None and g is not None]
        if not pairs:
            return None, None, None
        self._again = saved, buffer
        try:
            torch.autograd.grad([e for e, _ in pairs], self._anchor, [g for _, g in pairs],
                                retain_graph=True, allow_unused=True)
            return tuple(self._grads)
        finally:
            self._again = None
            self._grads[:] = ()
