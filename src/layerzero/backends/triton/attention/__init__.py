"""Attention in Triton: few queries over many keys, and attention of items."""
