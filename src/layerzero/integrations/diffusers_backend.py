"""LayerZero as an attention backend of diffusers."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from ..spec.errors import ConfigError
from . import rewiring

BACKEND = "layerzero"
NO_CONTEXT_PARALLEL = (
    'the attention backend "layerzero" was given a parallel config and cannot split a sequence '
    'over devices; '
    'unpatch_diffusers(model), or model.set_attention_backend("native"), where context parallelism '
    'is on')
_registering = threading.RLock()


def register_diffusers() -> None:
    """Add "layerzero" to the attention backends of diffusers, for `model.set_attention_backend`."""
    dispatch = attention_dispatch()
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    with _registering:
        if BACKEND in names._value2member_map_:
            return
        # diffusers takes no plain string and has no way to add a name
        member = str.__new__(names, BACKEND)
        member._name_, member._value_ = BACKEND.upper(), BACKEND
        member.__reduce_ex__ = lambda protocol: (backend_name, ())     # unpickling registers it
        # without context parallelism, which diffusers then refuses
        registry.register(member)(attend)
        setattr(names, member._name_, member)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[BACKEND] = member


def backend_name() -> Any:
    register_diffusers()
    return attention_dispatch().AttentionBackendName(BACKEND)


def attention_dispatch() -> Any:
    try:
        from diffusers.models import attention_dispatch as module
    except ImportError as e:
        raise ConfigError(f"wanted diffusers with attention backends (0.36 or later): {e}; "
                          "pip install -U diffusers") from e
    return module


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, _parallel_config: Any = None,
) -> Any:
    """Serve the backend: (batch, seq, heads, dim); a (batch, keys) mask marks padding."""
    if _parallel_config is not None:
        raise ConfigError(NO_CONTEXT_PARALLEL)
    if (attn_mask is not None and attn_mask.ndim == 2
        and attn_mask.shape == (query.shape[0], key.shape[1])):
        attn_mask = attn_mask[:, None, None, :]
    return rewiring.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                           return_lse, "bshd")
