"""Weights that are not plain tensors: quantized, packed, in the layouts of checkpoints."""
