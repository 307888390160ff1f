"""Functions that call torch's attention, made to call lz.attention instead: a copy of the function with other globals.

The function itself, its module and everyone else who calls it stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..dispatch import dispatcher as dispatch
from ..dispatch import torch_library as torch_face
from ..world import catalog

SDPA = "scaled_dot_product_attention"


def public(op: str) -> Any:
    """lz.<op>, also for torch.compile."""
    declared = catalog.builtin_op(op)
    found = dispatch.public_function(declared)
    torch_face.define(declared)
    return found


_attention = public("attention")


def attended(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, return_lse: bool, layout: str,
) -> Any:
    if attn_mask is not None and attn_mask.dtype != query.dtype and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(query.dtype)  # torch takes a float32 mask with any query
    out = _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                     causal_align="top_left" if is_causal else None, return_lse=return_lse, layout=layout)
    return (out[0], out[1].transpose(1, 2)) if return_lse else out


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:
    """What scaled_dot_product_attention means in a function that was rewired."""
    if not query.dim() == key.dim() == value.dim() == 4 or not query.shape[0] == key.shape[0] == value.shape[0]:
        return nn.functional.scaled_dot_product_attention(     # torch broadcasts
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    enable_gqa = enable_gqa or key.shape[1] == value.shape[1] == 1     # one head for all, also by broadcasting
    return attended(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, False, "bhsd")


def mentions(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(mentions(c, name) for c in code.co_consts if isinstance(c, CodeType))


def sdpa_aliases(fn: FunctionType) -> dict[str, Any]:
    """The globals by which a function gets at torch's attention, and what they become; nothing for another function."""
    if not mentions(fn.__code__, SDPA):
        return {}
    ours = {id(nn.functional): _functional(), id(nn.functional.scaled_dot_product_attention): sdpa}
    if mentions(fn.__code__, "functional"):
        ours |= {id(nn): _nn, id(torch): _torch}
    return {name: ours[id(value)] for name, value in fn.__globals__.items()
            if id(value) in ours and mentions(fn.__code__, name)}


def rewired(fn: FunctionType, aliases: Mapping[str, Any]) -> FunctionType:
    scope = {**fn.__globals__, **aliases}
    scope.pop("__name__", None)                # with it, torch.compile would read the module's globals, not these
    made = FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__, made.__doc__, made.__qualname__ = fn.__kwdefaults__, fn.__doc__, fn.__qualname__
    made.__annotations__ = fn.__annotations__
    return made


@functools.cache
def _functional() -> ModuleType:
    """torch.nn.functional with our attention."""
    made = ModuleType(nn.functional.__name__)
    vars(made).update(vars(nn.functional))
    setattr(made, SDPA, sdpa)
    return made


class _Instead:
    """A module, but for one name."""

    def __init__(self, module: ModuleType, name: str, make: Any) -> None:
        self._module, self._name, self._make = module, name, make

    def __getattr__(self, name: str) -> Any:
        return self._make() if name == self._name else getattr(self._module, name)


_nn = _Instead(nn, "functional", _functional)
_torch = _Instead(torch, "nn", lambda: _nn)
