"""The fixtures of helpers.py, and random numbers that no fault before has seeded; of the planted
faults one of nine.
"""

import os
import zlib

import pytest
import torch
from broken_kernels import Fault
from helpers import emitted, path, world

__all__ = ["emitted", "path", "world"]

# A verdict takes seconds, and there are hundreds of faults: `make test` plants one of nine, of those
# that a test names one of four, and at least one for each test. LZ_TEST_FULL=1 plants all of them,
# and so does naming one, or its file.
FULL = os.environ.get("LZ_TEST_FULL") == "1"
EVERY, EVERY_NAMED = 9, 4


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if FULL or config.option.keyword or any("faults" in argument for argument in config.args):
        return
    planted: dict[str, list[tuple[int, pytest.Item]]] = {}
    for item in items:
        name, every = _fault_of(item)
        if name:
            test = item.nodeid.partition("[")[0]
            planted.setdefault(test, []).append((zlib.crc32(name.encode()) % every, item))
    left_out = {item for rows in planted.values() for number, item in rows
                if number and item is not min(rows, key=lambda row: row[0])[1]}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _fault_of(item: pytest.Item) -> tuple[str, int]:
    """Returns the name of the fault that a test plants, if any, and one of how many is planted."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    fault = next((v for v in given.values() if isinstance(v, Fault)), None)
    if fault is not None:
        return fault.name, EVERY
    name = given.get("name") if "faults" in item.nodeid.split("/") else None
    return (name, EVERY_NAMED) if isinstance(name, str) else ("", 1)


@pytest.fixture(autouse=True)
def unseeded():
    """A kernel that seeds torch would not show where one before had seeded it alike."""
    torch.seed()
