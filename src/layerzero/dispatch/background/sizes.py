"""The same call at other sizes of its bucket.

A compiler may make code for the first size it sees, more general code for the second, and
specialize on whether a size is a multiple of 16. After a call at both ends of a bucket there is
code for all sizes in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ...selection.engine import kind_to_compile
from ...spec.errors import InvalidCall
from ...spec.grid import bucket, bucket_bottom, bucket_top
from ...spec.op import Op
from . import jit

EXACT = 16                                     # sizes up to this are a bucket of their own


class Caller(Protocol):
    """The interface of a dispatcher that is used here."""

    @property
    def op(self) -> Op: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def facts(self, values: tuple[Any, ...]) -> dict[str, Any]: ...


def at_bucket_ends(dispatcher: Caller, facts: Mapping[str, Any], values: tuple[Any, ...],
                   kind: str) -> Iterator[tuple[Any, ...]]:
    """Yield the call at the smallest and largest sizes of its kind, if it can be resized."""
    op, named = dispatcher.op, dict(zip(dispatcher.names, values))
    patterns = op.patterns[facts[op.variant] if op.variant else ""]
    axes = {name: _axes(op, patterns[name], t) for name, t in named.items()
            if isinstance(t, Tensor) and name in patterns}
    fixed = {dim for name, dims in axes.items() for dim in dims.values()
             if not _is_resizable(named[name])}
    sizes = {dim: n for name, dims in axes.items() for axis, dim in dims.items()
             if dim not in fixed and (n := named[name].shape[axis]) > EXACT}
    for low in (True, False):
        new = _at_bucket_end(sizes, low)
        if new == sizes:
            continue
        resized = {**named,
                   **{name: _resize(named[name], {a: new[d] for a, d in dims.items() if d in new})
                               for name, dims in axes.items()
                      if any(d in new for d in dims.values())}}
        call = tuple(resized[name] for name in dispatcher.names)
        try:
            if kind_to_compile(op, dispatcher.facts(call)) == kind:
                yield call
        except InvalidCall:                    # sizes that do not go together
            continue


def _axes(op: Op, tokens: tuple[str, ...], t: Tensor) -> dict[int, str]:
    """Return axis -> name of its size, for the axes that differ between calls of the kind."""
    if tokens and tokens[0].startswith("*") and t.dim() != len(tokens):
        tokens = ("", *tokens[1:])             # several dimensions under one name
    offset = t.dim() - len(tokens)
    names = {i + offset: token.lstrip("*~") for i, token in enumerate(tokens) if token
             and not token.isdigit()}
    return {i: dim for i, dim in names.items() if i >= 0 and dim not in op.exact
            and not (tokens[i - offset].startswith("~") and t.shape[i] == 1)}


def _is_resizable(t: Tensor) -> bool:
    """Integers cannot be made up, and only dense tensors can be given another size."""
    is_dense = jit.memory_order(tuple(t.shape), t.stride())[:1] != (-1,)
    return is_dense and (t.is_floating_point() or t.dtype is torch.bool)


def _at_bucket_end(sizes: Mapping[str, int], low: bool) -> dict[str, int]:
    """Return each size at an end of its bucket; equal sizes stay equal, others different."""
    ranks: dict[int, list[int]] = {}
    for n in sorted(set(sizes.values())):
        ranks.setdefault(bucket(n), []).append(n)
    new = {n: bucket_bottom(n) + i if low else bucket_top(n) - (len(group) - 1 - i)
           for group in ranks.values() for i, n in enumerate(group)}
    return {dim: new[n] for dim, n in sizes.items()}


def _resize(t: Tensor, new_sizes: Mapping[int, int]) -> Tensor:
    """Repeat or cut off the numbers of a tensor, keeping the order of its dimensions in memory."""
    order = jit.memory_order(tuple(t.shape), t.stride())
    out = t.detach().permute(order)
    for axis, n in new_sizes.items():
        i = order.index(axis)
        out = out.index_select(i, torch.arange(n, device=t.device) % out.shape[i])
    back = [order.index(i) for i in range(len(order))]
    return out.contiguous().permute(back).requires_grad_(t.requires_grad)
