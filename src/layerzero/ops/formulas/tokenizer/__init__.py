"""Tokenizers: what one is, byte-level BPE, and the result of lz.tokenize."""
