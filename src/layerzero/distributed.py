"""Ranks of a process group: agree on kernels, and compute the same bits on any number of them."""

from .integrations.distributed.exchange import StoreGroup
from .integrations.distributed.lifecycle import agree, check, init, shutdown, status, sync
from .integrations.distributed.parallel import (
    column_linear,
    parallel_attention,
    parallel_embedding,
    parallel_mlp,
    row_linear,
    shard,
)
from .world.tables import Agreement

__all__ = ["Agreement", "StoreGroup", "agree", "check", "column_linear", "init",
           "parallel_attention", "parallel_embedding", "parallel_mlp", "row_linear", "shard",
           "shutdown", "status", "sync"]
