"""The fixtures of helpers.py, and random numbers that no fault before has seeded."""

import pytest
import torch
from helpers import emitted, path, world

__all__ = ["emitted", "path", "world"]


@pytest.fixture(autouse=True)
def unseeded():
    """A kernel that seeds torch would not show where one before had seeded it alike."""
    torch.seed()
