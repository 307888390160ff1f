"""The configuration of its own that a patched module has, and what the one it had before says."""

from __future__ import annotations

from typing import Any

from torch import nn

# the attribute of a module that has got a configuration of its own
OWNED = "_layerzero_config"


def is_uncapped(module: nn.Module) -> bool:
    """Does it ask for a softcap that its own attention leaves out? transformers' sdpa knows none,
    and some releases run it all the same. A model that is patched goes on without: its results stay
    what they were."""
    if not getattr(module, "attn_logit_softcapping", None):
        return False
    owned: Any = getattr(module, OWNED, None)
    config: Any = module.config if owned is None else owned.stock
    return bool(config._attn_implementation == "sdpa")
