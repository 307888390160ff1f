"""Ranks of a process group that choose alike.

    lz.distributed.init("inference", group=tensor_parallel_group)
    lz.distributed.agree(model, example)       # ahead, or: lz.distributed.sync() now and then

`init` compares versions, policy, capabilities and tables of the ranks. A difference is an error in
training; in inference the kernels that not all ranks have alike serve no more, and an event says
so. The parallel layers (column_linear, ...) give the same bits on 1, 2 and 4 ranks.
"""

from __future__ import annotations

from ...world.tables import Agreement
from .exchange import StoreGroup
from .lifecycle import agree, check, init, shutdown, status, sync
from .parallel import (
    column_linear,
    parallel_attention,
    parallel_embedding,
    parallel_mlp,
    row_linear,
    shard,
)

__all__ = ["Agreement", "StoreGroup", "agree", "check", "column_linear", "init",
           "parallel_attention", "parallel_embedding", "parallel_mlp", "row_linear", "shard",
           "shutdown", "status", "sync"]
