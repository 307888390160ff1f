"""The fixtures of helpers.py."""

from helpers import emitted, path, world

__all__ = ["emitted", "path", "world"]
