"""Quantized and packed weights: choose a format, read those of GPTQ and AWQ checkpoints, split over
ranks, bound the packed copies."""

from .models.weights.checkpoint_formats import from_awq, from_gptq
from .models.weights.codes import WeightOnly
from .models.weights.packing import forget_packed, limit_packed, packed_weights
from .models.weights.quantization import choose_format, column_shard, quantized_shard, row_shard

__all__ = ["WeightOnly", "choose_format", "column_shard", "forget_packed", "from_awq", "from_gptq",
           "limit_packed", "packed_weights", "quantized_shard", "row_shard"]
