"""Quantized and packed weights: choose a format, read those of GPTQ and AWQ checkpoints, split over
ranks, bound the packed copies."""

from .models.checkpoint_formats import from_awq, from_gptq
from .models.packing import forget_packed, limit_packed, packed_weights
from .models.quantization import choose_format, column_shard, quantized_shard, row_shard
from .models.weight_codes import WeightOnly

__all__ = ["WeightOnly", "choose_format", "column_shard", "forget_packed", "from_awq", "from_gptq",
           "limit_packed", "packed_weights", "quantized_shard", "row_shard"]
