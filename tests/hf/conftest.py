"""`attn_implementation="layerzero"` is known to transformers in all of these tests."""

from __future__ import annotations

import pytest
from helpers import emitted, path, world

from layerzero.integrations.transformers import register

__all__ = ["emitted", "path", "world"]

register()


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every call of lz.attention that comes from transformers, which serves it as
    ever."""
    from layerzero.integrations.transformers import attention as ours

    seen: list[dict] = []
    real = ours.attention

    def watched(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                **more):
        seen.append({"query": query, "key": key, "attn_mask": attn_mask, "is_causal": is_causal,
                     **more})
        return real(query, key, value, attn_mask, dropout_p, is_causal, scale, **more)

    monkeypatch.setattr(ours, "attention", watched)
    return seen
