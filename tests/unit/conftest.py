"""Fixtures: the world as it was, events as a list, both call paths."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))     # helpers.py


@pytest.fixture
def world():
    """What the test registers, configures and breaks is gone after it."""
    from layerzero.runtime import context, events
    from layerzero.runtime import world as worlds

    saved, override = worlds.current(), context.current.get()
    yield
    assert context.current.get() is override, "a test left an override behind"
    worlds.publish(lambda w: replace(saved, epoch=w.epoch + 1, memo={}, born=time.monotonic()), "end of a test")
    events.reset()


@pytest.fixture
def happened(world):
    """Every event of the test, in order."""
    import layerzero as lz

    seen: list = []
    stop = lz.subscribe(seen.append)
    yield seen
    stop()


@pytest.fixture(params=["native", "python"])
def path(request):
    """Both ways a call can go: through the compiled table, and through the generated Python."""
    from layerzero.runtime import native

    if request.param == "native" and native.module() is None:
        pytest.skip(f"the native path is not in use: {native.status().text}")
    return request.param
