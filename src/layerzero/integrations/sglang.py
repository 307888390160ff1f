"""SGLang's plugin: an attention backend that lz serves, written against SGLang 0.5.23.

SGLang loads it through the entry point `sglang.srt.plugins`. That only offers the backend; SGLang's
own option asks for it: `sglang serve --attention-backend layerzero`. Its token pool is a paged
cache with pages of one token, so a whole batch is one lz.paged_attention. Not run on a GPU yet, and
without CUDA graphs: pass --disable-cuda-graph.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..operate.inspection import dispatcher_of
from ..spec.errors import ConfigError

BACKEND = "layerzero"


def register() -> None:
    """Offer the backend to SGLang; it may be called several times."""
    try:
        registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        arguments = importlib.import_module("sglang.srt.server_args")
    except ImportError as e:
        raise ConfigError(f"lz as an attention backend of SGLang needs sglang 0.5: {e}") from e
    if BACKEND not in registry.ATTENTION_BACKENDS:
        registry.register_attention_backend(BACKEND)(create_backend)
        arguments.add_attention_backend_choices([BACKEND])


def create_backend(runner: Any) -> Any:
    """Return the backend for a model runner; SGLang's own SDPA serves what it does not."""
    native: Any = importlib.import_module(
        "sglang.srt.layers.attention.torch_native_backend").TorchNativeAttnBackend

    class LayerZeroBackend(native):  # type: ignore[misc]
        def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any,
                           **kwargs: Any) -> Any:
            check_layer(layer)
            return super().forward_extend(q, k, v, layer, *args, **kwargs)

        def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any,
                           **kwargs: Any) -> Any:
            check_layer(layer)
            return super().forward_decode(q, k, v, layer, *args, **kwargs)

        def _run_sdpa_forward_extend(
                self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor,
                req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor,
                extend_prefix_lens: Tensor, extend_seq_lens: Tensor,
                encoder_lens: Tensor | None = None, **options: Any) -> Any:
            if encoder_lens is not None or k_cache.dtype != query.dtype:
                return super()._run_sdpa_forward_extend(
                    query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                    extend_prefix_lens, extend_seq_lens, encoder_lens, **options)
            return output.copy_(attend(query, k_cache, v_cache, req_to_token[req_pool_indices],
                                       seq_lens, extend_seq_lens, **options))

        def _run_sdpa_forward_decode(
                self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor,
                req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor,
                encoder_lens: Tensor | None = None, **options: Any) -> Any:
            if encoder_lens is not None or k_cache.dtype != query.dtype:
                return super()._run_sdpa_forward_decode(
                    query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                    encoder_lens, **options)
            return output.copy_(attend(query, k_cache, v_cache, req_to_token[req_pool_indices],
                                       seq_lens, None, **options))

    return LayerZeroBackend(runner)


def check_layer(layer: Any) -> None:
    """SGLang's SDPA backend, which this one extends, drops a logit cap without a word."""
    if getattr(layer, "logit_cap", 0.0):
        raise ConfigError(f"--attention-backend {BACKEND} has no logit cap, this model has "
                          f"{layer.logit_cap}; choose another backend for it, such as triton")


def attend(query: Tensor, k_cache: Tensor, v_cache: Tensor, token_table: Tensor, seq_lens: Tensor,
           extend_seq_lens: Tensor | None, *, scaling: float | None = None, causal: bool = False,
           sliding_window_size: int | None = None, enable_gqa: bool = False,
           is_cross_attn: bool = False) -> Tensor:
    """Attend over a pool of tokens; `token_table` has the slots of each sequence in a row.

    query (tokens, heads, dim), k_cache (slots, kv_heads, dim). extend_seq_lens: new tokens of each
    sequence, None for one each.
    """
    table = token_table[:, :int(seq_lens.max())].to(torch.int32)
    starts = longest = None
    if extend_seq_lens is not None:
        starts = F.pad(extend_seq_lens.cumsum(0), (1, 0)).to(torch.int32)
        longest = int(extend_seq_lens.max())
    out: Tensor = dispatcher_of("paged_attention").public(
        query, k_cache.unsqueeze(1), v_cache.unsqueeze(1), table, seq_lens.to(torch.int32), starts,
        is_causal=causal, scale=scaling, max_seqlen_q=longest,
        window_left=-1 if sliding_window_size is None else sliding_window_size)
    return out
