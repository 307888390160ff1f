"""Tokenizers for `lz.tokenize` and `lz.detokenize`, alone or in a model's pipeline."""

from .integrations.pipeline_tokens import patch_tokenizer, tokenizer_for, unpatch_tokenizer
from .models.tokenizers import forget_prefixes, load_tokenizer, prefix_memories

__all__ = ["forget_prefixes", "load_tokenizer", "patch_tokenizer", "prefix_memories",
           "tokenizer_for", "unpatch_tokenizer"]
