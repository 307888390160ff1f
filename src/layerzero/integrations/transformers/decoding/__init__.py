"""The decode step: its kernels, its cache, how it is captured, and which calls it serves."""
