"""Ranks of a process group: agree on kernels, and compute the same bits on any number of them."""

from .integrations.distributed.exchange import StoreGroup
from .integrations.distributed.lifecycle import agree, check, init, shutdown, status, sync
from .integrations.distributed.parallel import (
    attention,
    column_linear,
    embedding,
    mlp,
    row_linear,
    shard,
)
from .world.tables import Agreement

__all__ = ["Agreement", "StoreGroup", "agree", "attention", "check", "column_linear", "embedding",
           "init", "mlp", "row_linear", "shard", "shutdown", "status", "sync"]
