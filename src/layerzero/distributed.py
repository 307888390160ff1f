"""Ranks of a process group: agree on kernels, and compute the same bits on any number of them."""

from .integrations.distributed import (
    Agreement,
    StoreGroup,
    agree,
    check,
    init,
    shutdown,
    status,
    sync,
)

__all__ = ["Agreement", "StoreGroup", "agree", "check", "init", "shutdown", "status", "sync"]
