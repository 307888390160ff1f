"""Speculative decoding: draft, verify by the target model, accept; in a chain or a tree."""

from .models.speculative import generate, tree_attention_mask, tree_positions, verify, verify_tree

__all__ = ["generate", "tree_attention_mask", "tree_positions", "verify", "verify_tree"]
