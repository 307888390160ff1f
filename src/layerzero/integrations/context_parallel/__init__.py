"""Context parallelism: attention over sequences that are sharded among the ranks of a process
group.

    from layerzero.integrations import context_parallel as cp

    local = cp.shard(tokens, cu_seqlens, rank, world_size)             # zigzag: equal work for all
    out = cp.zigzag_attention(q, k, v, cp.local_cu_seqlens(cu_seqlens, world_size), group=group)

zigzag_attention all-gathers keys, ring_attention passes them around, ulysses_attention exchanges
heads for tokens; all have a backward. The names of ring-flash-attention are here too. For models:
register_context_parallel (transformers), and context_parallel in the place of torch's own.
"""

from __future__ import annotations

from .methods import ring_attention, ulysses_attention, zigzag_attention
from .model_attention import register_context_parallel
from .ranks import SimulatedRanks
from .ring_flash_attn import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    zigzag_llama3_flash_attn_varlen_func,
    zigzag_llama3_flash_attn_varlen_kvpacked_func,
    zigzag_llama3_flash_attn_varlen_qkvpacked_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)
from .sharding import local_cu_seqlens, shard, shard_batch, shard_indices, shard_positions, unshard
from .torch_context import context_parallel

__all__ = [
    "SimulatedRanks", "context_parallel", "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func", "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func", "local_cu_seqlens", "register_context_parallel",
    "ring_attention", "ring_flash_attn_func", "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func", "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func", "ring_flash_attn_varlen_qkvpacked_func", "shard",
    "shard_batch", "shard_indices", "shard_positions", "ulysses_attention", "unshard",
    "zigzag_attention", "zigzag_llama3_flash_attn_varlen_func",
    "zigzag_llama3_flash_attn_varlen_kvpacked_func",
    "zigzag_llama3_flash_attn_varlen_qkvpacked_func", "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func", "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func", "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]
