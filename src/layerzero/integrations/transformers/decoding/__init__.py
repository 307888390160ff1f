"""The decode step: the parts of a decoder, its kernels, its cache, and which calls it serves."""
