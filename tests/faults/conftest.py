"""The fixtures of helpers.py, and random numbers that no fault before has seeded; of the planted
faults one of three.
"""

import os
import zlib

import pytest
import torch
from broken_kernels import Fault
from helpers import emitted, path, world

__all__ = ["emitted", "path", "world"]

# A verdict takes seconds, and there are hundreds of faults. LZ_TEST_FULL=1 plants all of them, and
# so does naming one, or its file.
EVERY = 1 if os.environ.get("LZ_TEST_FULL") == "1" else 3


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.keyword or any("faults" in argument for argument in config.args):
        return
    left_out = [item for item in items if EVERY > 1 and _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    kept = set(items) - set(left_out)
    items[:] = [item for item in items if item in kept]


def _is_left_out(item: pytest.Item) -> bool:
    given = getattr(item, "callspec", None)
    faults = [v for v in given.params.values() if isinstance(v, Fault)] if given else []
    return bool(faults) and zlib.crc32(faults[0].name.encode()) % EVERY > 0


@pytest.fixture(autouse=True)
def unseeded():
    """A kernel that seeds torch would not show where one before had seeded it alike."""
    torch.seed()
