"""The Python code of a kernel: what of it ran, and calls that reach the rest."""
