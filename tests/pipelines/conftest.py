"""The fixtures of helpers.py: the world as it was, events as a list."""

from helpers import happened, world

__all__ = ["happened", "world"]
