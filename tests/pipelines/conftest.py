"""The fixtures of helpers.py: the world as it was, events as a list."""

from helpers import emitted, world

__all__ = ["emitted", "world"]
