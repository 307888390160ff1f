"""The fixtures of helpers.py: the world as it was, events as a list, both call paths."""

from helpers import frozen_heap, happened, path, world

__all__ = ["frozen_heap", "happened", "path", "world"]
