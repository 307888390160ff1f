"""Items for `lz.grouped_attention`, and grouped calls under flash-attention's forks' names."""

from .models.grouped import (
    _flash_attn_varlen_backward_grouped,
    _flash_attn_varlen_forward_grouped,
    items_from_cu_seqlens,
)

__all__ = ["_flash_attn_varlen_backward_grouped", "_flash_attn_varlen_forward_grouped",
           "items_from_cu_seqlens"]
