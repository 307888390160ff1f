"""The fixtures of helpers.py."""

from helpers import happened, path, world

__all__ = ["happened", "path", "world"]
