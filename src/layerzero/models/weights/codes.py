"""The codes of a linear layer's weight, and in which format lz.accelerate is asked to hold them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import Tensor

from ...ops.formulas.ggml import GGML_FORMATS
from ...ops.formulas.quant import FORMATS
from ...spec.errors import ConfigError
from ...spec.names import suggest

ALIASES = {"fp8": "fp8_e4m3"}
# what our kernels for a CPU multiply: codes of the same bits, with a scale for each 32
ON_CPU = {"int4": "q4_0", "int8": "q8_0"}
# formats that lz.quantized_linear takes
NAMES = tuple(n for n in (*FORMATS, *GGML_FORMATS) if n not in ("fp8_e5m2", "q8_1", "q8_k"))
PROMPTS = {"int8": "int8", "fp8_e4m3": "fp8"}  # format -> what activations may be rounded to
FEW_ROWS = 16                                  # of activations that are never rounded
ORIGINALS = ("cpu", "device", "drop")
# rows that are no whole blocks of 256, as llama.cpp holds them
SMALLER_BLOCKS = {"q2_k": "iq4_nl", "q3_k": "iq4_nl", "iq4_xs": "iq4_nl", "q4_k": "q5_0",
                  "q5_k": "q5_1", "q6_k": "q8_0"}


@dataclass(frozen=True)
class WeightOnly:
    """What lz.accelerate(model, weights=...) does with the weights of linear layers.

    group_size: inputs that share a scale, of int4, int8, fp8 and nf4; 0 is the format's own.
    originals: where the weights as they were are kept while the codes serve: in the memory of the
    CPU, on their device, or nowhere ("drop"). head: also the layer that gives the logits. skip:
    patterns of names of modules that stay as they are, such as "*.down_proj". activations: what
    the inputs of more than sixteen rows are rounded to, those of prompts: "int8" for int8, "fp8"
    for fp8, so that tensor cores multiply codes with codes.
    """

    format: str
    group_size: int = 0
    originals: Literal["cpu", "device", "drop"] = "cpu"
    head: bool = False
    skip: tuple[str, ...] = ()
    activations: Literal["none", "int8", "fp8"] = "none"

    def __post_init__(self) -> None:
        name = ALIASES.get(self.format, self.format)
        if name not in NAMES:
            raise ConfigError(f"weights wants a format of lz.quantized_linear, got {self.format!r}"
                              f"{suggest(self.format, (*NAMES, *ALIASES))}")
        object.__setattr__(self, "format", name)
        if self.originals not in ORIGINALS:
            raise ConfigError(f"originals wants one of {', '.join(ORIGINALS)}, got "
                              f"{self.originals!r}")
        if self.activations not in ("none", PROMPTS.get(name)) or (
                self.activations != "none" and self.group_size):
            raise ConfigError("activations wants 'none', or with group_size 0 'int8' for int8 and "
                              f"'fp8' for fp8, got {self.activations!r} for {name} and group_size "
                              f"{self.group_size}")
        fixed = name in GGML_FORMATS or name in ("mxfp4", "nvfp4")
        if self.group_size < 0 or (self.group_size and fixed):
            raise ConfigError(f"group_size wants 0 for {name}, whose blocks have one size, or a "
                              f"positive number for other formats, got {self.group_size}")

    @classmethod
    def of(cls, weights: WeightOnly | str) -> WeightOnly:
        if not isinstance(weights, (str, WeightOnly)):
            raise ConfigError("weights wants the name of a format or an lz.quant.WeightOnly, got "
                              f"{type(weights).__name__}")
        return weights if isinstance(weights, WeightOnly) else cls(weights)

    def skips(self, path: str) -> bool:
        return any(fnmatch(path, pattern) for pattern in self.skip)

    def stored_format(self, device: torch.device, inputs: int) -> str:
        """Returns the format in which a weight with `inputs` inputs is held on this device."""
        name = self.format
        if device.type == "cpu" and not self.group_size and inputs % 32 == 0:
            name = ON_CPU.get(name, name)
        return SMALLER_BLOCKS.get(name, name) if inputs % 256 else name


@dataclass(frozen=True, eq=False)
class WeightCodes:
    """A weight (outputs, inputs) as lz.quantized_linear takes it."""

    codes: Tensor                              # (outputs, bytes of a row)
    scales: Tensor | None                      # (outputs, groups); None: they are in the codes
    global_scale: Tensor | None
    format: str
    group_size: int
    activations: str
    inputs: int
    prompts: str = "none"                      # activations where there are more than FEW_ROWS

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.inputs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    def options(self, rows: int) -> dict[str, Any]:
        """Returns the options of lz.quantized_linear, beside the tensors."""
        whole = {} if self.global_scale is None else {"global_scale": self.global_scale}
        rounded = self.prompts if rows > FEW_ROWS and self.prompts != "none" else self.activations
        return {"format": self.format, "group_size": self.group_size, "activations": rounded,
                **whole}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def rows(self, first: int, end: int) -> WeightCodes:
        """These outputs alone, in the same memory."""
        return replace(self, codes=self.codes[first:end],
                       scales=None if self.scales is None else self.scales[first:end])

    def to(self, device: torch.device) -> WeightCodes:
        moved = (None if t is None else t.to(device) for t in (self.scales, self.global_scale))
        return replace(self, codes=self.codes.to(device), scales=next(moved),
                       global_scale=next(moved))


def why_not_held(wanted: WeightOnly, device: torch.device, inputs: int) -> str:
    """Returns why a weight with `inputs` inputs cannot be held in the format, or ""."""
    name = wanted.stored_format(device, inputs)
    block = GGML_FORMATS[name].block if name in GGML_FORMATS else 1
    return f"{inputs} inputs are no whole blocks of {block} for {name}" if inputs % block else ""
