"""The commands of `lz`: each asks the library one question and prints the answer; none decides
anything.
"""

from __future__ import annotations

from .panels import ask, measure, plan, prove, serve, setup  # noqa: F401  in the order of the help
from .root import app

__all__ = ["app"]
