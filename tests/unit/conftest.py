"""The fixtures of helpers.py (the world as it was, events as a list, both call paths), and those of
the native path.
"""

import shutil

import pytest
from helpers import emitted, frozen_heap, path, world
from random_calls import register_synthetic

from layerzero.dispatch import dispatcher as dispatch
from layerzero.dispatch import native
from layerzero.operate.inspection import dispatcher_of
from layerzero.world import snapshot as worlds

__all__ = ["emitted", "frozen_heap", "path", "world"]


@pytest.fixture(scope="session")
def compiled():
    """The native module, built now if it is not there and a compiler is."""
    if (native.module() is None and native.is_enabled()
        and (shutil.which("g++") or shutil.which("clang++"))):
        native.build()
    if native.module() is None:
        pytest.skip(f"there is no native path here: {native.status().text}")
    for name, dispatcher in list(dispatch.dispatchers.items()):
        if dispatcher.native is None:               # made before it was built
            dispatch.dispatchers[name] = dispatch.Dispatcher(dispatcher.op)


@pytest.fixture
def both(compiled, world):
    """The dispatcher of an op: `both("attention").public` is native, `.python_call` is Python."""
    def find(name):
        if name == "synthetic" and name not in worlds.current().catalog.ops:
            register_synthetic()
        dispatcher = dispatcher_of(name)
        dispatcher.ensure_world()
        assert dispatcher.native is not None and dispatcher.public is not dispatcher.python_call
        return dispatcher

    return find
