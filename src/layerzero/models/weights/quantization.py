"""Chooses a quantized format for a device and accuracy, and shards weights for tensor parallelism.

Column-parallel: each rank has some rows of the weight and computes some outputs. Row-parallel: each
rank has some of the inputs, and the outputs of all ranks are summed. A feed-forward layer is
sharded by columns first (in a fused weight, gate and up separately), then by rows, and needs one
all-reduce at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...machine import hardware
from ...ops.formulas.quant import FORMATS
from ...spec.device import Device
from ...spec.errors import ConfigError, InvalidCall
from ...spec.reason import Code, Reason

# format -> (relative RMS error of normally distributed weights in rows of 4096, in lz.quantize's
# default layout; bits per weight with its share of the scales)
EXPECTED = {"int8": (0.0087, 8.0), "fp8_e4m3": (0.0265, 8.0), "fp8_e5m2": (0.0526, 8.0),
            "nvfp4": (0.0953, 4.5), "nf4": (0.0921, 4.5), "mxfp4": (0.1147, 4.25),
            "int4": (0.1177, 4.25)}
ACCURACIES = {"high": 0.01, "balanced": 0.03, "small": 0.12}


@dataclass(frozen=True)
class FormatChoice:
    """`format` is None if none is accurate enough: keep the weights as they are."""

    format: str | None
    granularity: str
    block_size: int
    bits: float
    error: float
    rejected: tuple[tuple[str, Reason], ...] = ()

    def __str__(self) -> str:
        if self.format is None:
            head = "none: keep the weights as they are"
        else:
            block = f" of {self.block_size}" if self.granularity == "block" else ""
            head = (f"{self.format}, scales by {self.granularity}{block}, {self.bits:g} bits, "
                    f"error {self.error:.2g}")
        return "\n".join([head,
                          *(f"  not {name}: {reason.message}" for name, reason in self.rejected)])


def choose_format(device: str | Device = "cpu", accuracy: float | str = "balanced",
                  formats: Sequence[str] | None = None) -> FormatChoice:
    """Returns the smallest format with an expected relative error of at most `accuracy` that the
    device supports.

    accuracy: a relative RMS error, or "high" (0.01), "balanced" (0.03), "small" (0.12). formats:
    only these.
    """
    if isinstance(device, str):
        torch_device = torch.device(device)
        device = hardware.probe(torch_device.type, torch_device.index or 0)
    if isinstance(accuracy, str) and accuracy not in ACCURACIES:
        raise ConfigError(
            f"accuracy must be a number or one of {', '.join(ACCURACIES)}, got {accuracy!r}")
    unknown = [f for f in formats or () if f not in EXPECTED]
    if unknown:
        raise ConfigError(
            f"formats must be some of {', '.join(EXPECTED)}, got {', '.join(unknown)}")
    limit = ACCURACIES[accuracy] if isinstance(accuracy, str) else float(accuracy)
    rejected: list[tuple[str, Reason]] = []
    for name, (error, bits) in sorted(EXPECTED.items(), key=lambda item: (item[1][1], item[1][0])):
        reason = None
        if formats is not None and name not in formats:
            continue
        if error > limit:
            reason = Reason(Code.VALUE_OUT_OF_RANGE, f"at most {limit:g}", error,
                            "its relative error")
        else:
            reason = unsupported(name, device)
        if reason is None:
            spec = FORMATS[name]
            return FormatChoice(name, spec.granularity, spec.block_size
                                if spec.granularity == "block" else 0, bits,
                                error, tuple(rejected))
        rejected.append((name, reason))
    return FormatChoice(None, "", 0, 16.0, 0.0, tuple(rejected))


def unsupported(name: str, device: Device) -> Reason | None:
    """Returns why the device cannot compute with the format, or None. nf4 is only stored."""
    facts = device.facts()
    if name in ("mxfp4", "nvfp4") and not facts["supports_fp4"]:
        return Reason(Code.QUANT_FORMAT_UNSUPPORTED,
                      "one that the device multiplies (no FP4 units)", name)
    if name.startswith("fp8") and not facts["supports_fp8"]:
        return Reason(Code.QUANT_FORMAT_UNSUPPORTED,
                      "one that the device multiplies (no FP8 units)", name)
    if (name == "int8" and device.type == "cuda" and device.vendor == "nvidia"
        and (facts["sm"] or 0) < 75):
        return Reason(Code.SM_TOO_OLD, ">= 75", facts["sm"])
    if name == "nf4" and device.type == "cpu":
        return Reason(Code.QUANT_FORMAT_UNSUPPORTED, "one with a CPU kernel (int4 is as small)",
                      name)
    return None


# Tensor parallelism.

def column_shard(weight: Tensor, rank: int, world: int, *, parts: int = 1) -> Tensor:
    """Returns the rows of `weight` (..., out, in), or of a bias (out,), that belong to `rank`.

    parts: how many weights are stacked in it, each of which is sharded separately: 2 for a fused
    gate and up.
    """
    axis = 0 if weight.dim() == 1 else -2
    pieces = weight.chunk(parts, axis)
    if weight.shape[axis] % parts:
        raise InvalidCall.of("column_shard", Reason(
            Code.DIM_MISMATCH, f"a multiple of parts ({parts})", weight.shape[axis],
            f"weight.shape[{axis}]"))
    shards = [_shard("column_shard", piece, axis, rank, world, 1) for piece in pieces]
    return shards[0] if parts == 1 else torch.cat(shards, axis)


def row_shard(weight: Tensor, rank: int, world: int, *, unit: int = 1) -> Tensor:
    """Returns the inputs of `weight` (..., out, in) that belong to `rank`; a bias (out,) is zero
    except on rank 0.

    unit: how many neighbouring inputs must stay together, such as a quantization group.
    """
    if weight.dim() == 1:
        return weight if rank == 0 else torch.zeros_like(weight)
    return _shard("row_shard", weight, -1, rank, world, unit)


def quantized_shard(weight_q: Tensor, scales: Tensor, zeros: Tensor | None, rank: int, world: int,
                    *, format: str, group_size: int = 0, by: str = "column", parts: int = 1
                    ) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the shard of a quantized weight, its scales and zeros for `rank`, in
    lz.quantized_linear's layout.

    A shard by inputs must be whole groups; with one scale per row every rank gets that scale.
    """
    if by == "column":
        if scales.shape[0] == 1:
            return column_shard(weight_q, rank, world, parts=parts), scales, zeros
        return (column_shard(weight_q, rank, world, parts=parts),
                column_shard(scales, rank, world, parts=parts),
                None if zeros is None else column_shard(zeros, rank, world, parts=parts))
    per_byte = 8 // FORMATS[format].bits
    unit = max(group_size // per_byte, 1)
    q = _shard("quantized_shard", weight_q, -1, rank, world, unit)
    if not group_size:
        return q, scales, zeros
    return (q, _shard("quantized_shard", scales, -1, rank, world, 1),
            None if zeros is None else _shard("quantized_shard", zeros, -1, rank, world, 1))


def _shard(function: str, t: Tensor, axis: int, rank: int, world: int, unit: int) -> Tensor:
    if not 0 <= rank < world:
        raise InvalidCall.of(function, Reason(Code.VALUE_OUT_OF_RANGE, f"between 0 and {world - 1}",
                                              rank, "rank"))
    size = t.shape[axis]
    if size % (world * unit):
        raise InvalidCall.of(function, Reason(
            Code.DIM_MISMATCH, f"a multiple of {world * unit} ({world} ranks, {unit} together)",
            size, f"shape[{axis}] of {tuple(t.shape)}"))
    return t.narrow(axis, rank * (size // world), size // world)
