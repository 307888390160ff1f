"""Sampling one token per row of logits."""
