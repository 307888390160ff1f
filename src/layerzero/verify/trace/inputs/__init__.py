"""Inputs for a definition: sizes that its constraints allow, numbers that show mistakes."""

from .generation import generate

__all__ = ["generate"]                         # tests that were written import it from here
