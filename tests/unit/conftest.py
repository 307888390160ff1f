"""The fixtures of helpers.py: the world as it was, events as a list, both call paths."""

from helpers import happened, path, world

__all__ = ["happened", "path", "world"]
