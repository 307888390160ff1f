"""A pytest hook for runs of other projects' tests: how often each test called our attention."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes how often a test called our attention: one that never came to it proves nothing."""
    before = _calls()
    try:
        return (yield)
    finally:
        item.user_properties.append(("calls", str(_calls() - before)))


def _calls() -> int:
    lz = sys.modules.get("layerzero")          # absent in a run of the stock library
    calls = lz.stats().calls if lz is not None else {}
    return sum(sum(calls.get(op, {}).values()) for op in ("attention", "varlen_attention"))
