"""The fixtures of helpers.py: the world as it was, events as a list, both call paths."""

from helpers import emitted, frozen_heap, path, world

__all__ = ["emitted", "frozen_heap", "path", "world"]
