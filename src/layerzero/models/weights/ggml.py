"""A weight in ggml's blocks, as a GGUF file holds it: what a Decoder takes in place of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

import torch
from torch import Tensor

from ...ops.formulas.ggml import GGML_FORMATS, dequantize_blocks
from ...spec.errors import ConfigError


@dataclass(frozen=True, eq=False)
class GgmlWeight:
    """`blocks` are (..., rows, bytes of a row) uint8 in the layout of `format`."""

    blocks: Tensor
    format: str                                # of lz.quantize: "q4_k", "q8_0", ...

    @property
    def shape(self) -> tuple[int, ...]:
        known = GGML_FORMATS[self.format]
        *rows, nbytes = self.blocks.shape
        return (*rows, nbytes // known.block_bytes * known.block)

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def __getitem__(self, index: int) -> GgmlWeight:
        return GgmlWeight(self.blocks[index], self.format)

    def rows(self, ids: Tensor) -> Tensor:
        """Return these rows, dequantized to float32."""
        return dequantize_blocks(self.blocks[ids], self.format)

    def dequantized(self) -> Tensor:
        return dequantize_blocks(self.blocks, self.format)


Weight = Union[Tensor, GgmlWeight]


def join_rows(*weights: Weight) -> Weight:
    """Return the rows of several weights of one format as one weight."""
    first = weights[0]
    if isinstance(first, GgmlWeight):
        same = [w.blocks for w in weights if isinstance(w, GgmlWeight) and w.format == first.format]
        if len(same) == len(weights):
            return GgmlWeight(torch.cat(same, -2), first.format)
    tensors = [w for w in weights if isinstance(w, Tensor)]
    if len(tensors) != len(weights):
        raise ConfigError("join_rows wants weights of one format, got "
                          f"{', '.join(format_of(w) or 'a tensor' for w in weights)}")
    return torch.cat(tensors, -2 if tensors[0].dim() > 1 else 0)


def format_of(weight: Weight) -> str:
    """Return the format of a quantized weight, "" for a tensor."""
    return weight.format if isinstance(weight, GgmlWeight) else ""


def raw_tensor(weight: Weight) -> Tensor:
    """Return the tensor that an op is given: the blocks of a quantized weight."""
    return weight.blocks if isinstance(weight, GgmlWeight) else weight


def weight_formats(weights: Mapping[str, Weight], prefix: str) -> dict[str, str]:
    """Return the names of the weights of a layer ("3.") and their formats; of the norm for ""."""
    if not prefix:
        return {name: "" for name in ("norm", "norm.bias") if name in weights}
    return {name[len(prefix):]: format_of(w) for name, w in weights.items()
            if name.startswith(prefix)}
