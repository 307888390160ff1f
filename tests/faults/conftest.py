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

# A verdict takes seconds, and there are hundreds of faults: `make test` plants one of nine, and at
# least one for each test. LZ_TEST_FULL=1 plants all of them, and so does naming one, or its file.
EVERY = 1 if os.environ.get("LZ_TEST_FULL") == "1" else 9


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if EVERY == 1 or config.option.keyword or any("faults" in argument for argument in config.args):
        return
    planted: dict[str, list[tuple[int, pytest.Item]]] = {}
    for item in items:
        fault = _fault_of(item)
        if fault is not None:
            test = item.nodeid.partition("[")[0]
            planted.setdefault(test, []).append((zlib.crc32(fault.name.encode()), item))
    left_out = {item for rows in planted.values() for number, item in rows
                if number % EVERY and number != min(rows, key=lambda row: row[0] % EVERY)[0]}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _fault_of(item: pytest.Item) -> Fault | None:
    given = getattr(item, "callspec", None)
    return next((v for v in given.params.values() if isinstance(v, Fault)), None) if given else None


@pytest.fixture(autouse=True)
def unseeded():
    """A kernel that seeds torch would not show where one before had seeded it alike."""
    torch.seed()
