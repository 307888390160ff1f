"""What `lz.rope`, `lz.alibi` and `lz.attention` take for positions: tables, slopes, biases."""

from .models.positions import alibi_bias, alibi_slopes, rope_tables, xpos_tables

__all__ = ["alibi_bias", "alibi_slopes", "rope_tables", "xpos_tables"]
