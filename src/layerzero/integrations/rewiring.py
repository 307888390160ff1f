"""Copies of functions that call torch's attention, with globals under which they call lz.attention
instead.

The original function, its module and its other callers stay unchanged.
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
from ..world.registry import catalog

SDPA = "scaled_dot_product_attention"
# nn.functional may hold that of another library
_torchs_own = torch._C._nn.scaled_dot_product_attention


def public(name: str) -> Any:
    """Return lz.<name>, defined for torch.compile too."""
    op = catalog.builtin_op(name)
    function = dispatch.public_function(op)
    torch_face.define(op)
    return function


_attention = public("attention")


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool, return_lse: bool, layout: str,
) -> Any:
    if attn_mask is not None and attn_mask.dtype != query.dtype and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(query.dtype)  # torch takes a float32 mask with any query
    out = _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                     causal_align="top_left" if is_causal else None, return_lse=return_lse,
                     layout=layout)
    return (out[0], out[1].transpose(1, 2)) if return_lse else out


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Serve scaled_dot_product_attention in a rewired function."""
    # replaced since: that is the latest choice
    if nn.functional.scaled_dot_product_attention is not _torchs_own:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if (not query.dim() == key.dim() == value.dim() == 4
        or not query.shape[0] == key.shape[0] == value.shape[0]):
        return nn.functional.scaled_dot_product_attention(     # torch broadcasts
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    # torch broadcasts a single head
    enable_gqa = enable_gqa or key.shape[1] == value.shape[1] == 1
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, False,
                  "bhsd")


def mentions(code: CodeType, name: str) -> bool:
    return (name in code.co_names or any(mentions(c, name) for c in code.co_consts
                                         if isinstance(c, CodeType)))


def replaced_sdpa() -> str:
    """Returns what replaced torch's attention, which lz then leaves alone; "" if nothing."""
    function = nn.functional.scaled_dot_product_attention
    if function is _torchs_own:
        return ""
    name = ".".join(str(getattr(function, part, "?")) for part in ("__module__", "__qualname__"))
    return (f"torch.nn.functional.{SDPA} is {name} here, which stays; put torch's own back to have "
            "lz.attention")


def shards_sequences() -> bool:
    """Tells whether torch's attention is replaced by one over a sequence of which this process
    holds a part: inside context_parallel, torch's or ours."""
    function = nn.functional.scaled_dot_product_attention
    return function is not _torchs_own and str(getattr(function, "__module__", "")).startswith(
        ("torch.distributed.", f"{__package__}.context_parallel."))


def sdpa_aliases(fn: FunctionType) -> dict[str, Any]:
    """Map the globals through which a function reaches torch's attention to their replacements."""
    if not mentions(fn.__code__, SDPA) or replaced_sdpa():
        return {}
    replacements = {id(nn.functional): _functional(), id(_torchs_own): sdpa}
    if mentions(fn.__code__, "functional"):
        replacements |= {id(nn): _nn, id(torch): _torch}
    return {name: replacements[id(value)] for name, value in fn.__globals__.items()
            if id(value) in replacements and mentions(fn.__code__, name)}


def rewired(fn: FunctionType, aliases: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function in which `aliases` replace globals."""
    scope = {**fn.__globals__, **aliases}
    # with it, torch.compile would read the module's globals
    scope.pop("__name__", None)
    copy = FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__, copy.__doc__, copy.__qualname__ = (fn.__kwdefaults__, fn.__doc__,
                                                            fn.__qualname__)
    copy.__annotations__ = fn.__annotations__
    return copy


@functools.cache
def _functional() -> ModuleType:
    """Return a copy of torch.nn.functional with our attention."""
    module = ModuleType(nn.functional.__name__)
    vars(module).update(vars(nn.functional))
    setattr(module, SDPA, sdpa)
    return module


class _ModuleProxy:
    """A module with one name replaced."""

    def __init__(self, module: ModuleType, name: str, replacement: Any) -> None:
        self._module, self._name, self._replacement = module, name, replacement

    def __getattr__(self, name: str) -> Any:
        return self._replacement() if name == self._name else getattr(self._module, name)


_nn = _ModuleProxy(nn, "functional", _functional)
_torch = _ModuleProxy(torch, "nn", lambda: _nn)
