"""The commands of `lz`: each asks the library one question and prints the answer."""

from __future__ import annotations

import functools
from typing import Any

import typer

from .panels import ask, measure, plan, prove, serve, setup  # noqa: F401  in the order of the help
from .root import app

__all__ = ["app", "command"]


@functools.cache
def command() -> Any:
    """Return the command line as one object that can be called with arguments."""
    return typer.main.get_command(app)
