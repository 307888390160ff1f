"""Generates the cases of an operation: sizes, pairs of arguments, declared properties."""
