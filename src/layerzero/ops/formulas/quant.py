"""Number formats with few bits: how a value becomes a code, how codes are stored, how scales are
laid out.

- `int8`
        value = (code - zero) * scale; symmetric codes are -127..127 with zero 0, others -128..127.
- `int4`      value = (code - zero) * scale; codes are 0..15, and zero is 8 where none is given.
- `fp8_e4m3`, `fp8_e5m2`  value = code * scale; the largest codes are 448 and 57344.
- `nf4`
        value = table[code] * scale; the sixteen quantiles of QLoRA, scale = largest magnitude of
        the block.
- `mxfp4`  value = e2m1[code] * scale; scale is a power of two (e8m0) for each 32 elements (OCP MX).
- `nvfp4`     value = e2m1[code] * scale * global_scale; scale is e4m3 for each 16 elements.

Four-bit codes are stored two in a byte: element 2i in the low four bits, element 2i + 1 in the high
four. A row of odd length ends with a byte whose high bits are zero.

Scales have as many dimensions as the tensor. In the last one there is one for each `block_size`
elements (the last block may be shorter), or one for the row; in the one before it, one for each
`block_rows` rows; where a dimension of the scales is 1, the scale is shared along it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason

NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Format:
    """A number format; `largest` is the code magnitude that the largest value of a block gets."""

    name: str
    bits: int
    largest: float
    block_size: int                            # the default
    storage: torch.dtype
    scale: torch.dtype = torch.float32

    @property
    def integer(self) -> bool:
        return self.name.startswith("int")

    @property
    def granularity(self) -> str:
        """Returns the default granularity: four bits are too few for one scale per row."""
        return "block" if self.bits == 4 else "channel"


FORMATS = {f.name: f for f in (
    Format("int8", 8, 127.0, 128, torch.int8),
    Format("int4", 4, 7.0, 128, torch.uint8),
    Format("fp8_e4m3", 8, 448.0, 128, torch.float8_e4m3fn),
    Format("fp8_e5m2", 8, 57344.0, 128, torch.float8_e5m2),
    Format("nf4", 4, 1.0, 64, torch.uint8),
    Format("mxfp4", 4, 6.0, 32, torch.uint8, torch.float8_e8m0fnu),
    Format("nvfp4", 4, 6.0, 16, torch.uint8, torch.float8_e4m3fn))}


# Packing of four-bit codes.

def pack_nibbles(codes: Tensor) -> Tensor:
    """Packs uint8 codes 0..15 (..., n) into bytes (..., ceil(n / 2))."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, size: int) -> Tensor:
    """Unpacks bytes (..., ceil(size / 2)) into uint8 codes (..., size)."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :size]


def code_values(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the values of a four-bit format's codes; int4's before its zero is subtracted."""
    values = {"int4": tuple(map(float, range(16))), "nf4": NF4}.get(name, E2M1)
    return torch.tensor(values, device=device, dtype=dtype)


NF4_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(NF4))


# Scales.

def scale_shape(shape: torch.Size, granularity: str, block_size: int,
                block_rows: int) -> tuple[int, ...]:
    """Returns the shape of the scales of a tensor."""
    if granularity == "tensor":
        return (1,) * len(shape)
    if granularity == "channel":
        return (*shape[:-1], 1)
    rows = () if len(shape) == 1 else (*shape[:-2], math.ceil(shape[-2] / block_rows))
    return (*rows, math.ceil(shape[-1] / block_size))


def expand_scales(scales: Tensor, shape: torch.Size, block_size: int, block_rows: int) -> Tensor:
    """Repeats block scales to one per element, or to a shape that broadcasts to it."""
    if scales.shape[-1] not in (1, shape[-1]):
        scales = scales.repeat_interleave(block_size, -1)[..., :shape[-1]]
    if len(shape) > 1 and scales.shape[-2] not in (1, shape[-2]):
        scales = scales.repeat_interleave(block_rows, -2)[..., :shape[-2], :]
    return scales


def check_scales(op: str, name: str, scales: Tensor, shape: torch.Size, block_size: int,
                 block_rows: int) -> None:
    """Raises InvalidCall (SCALE_LAYOUT_MISMATCH) unless the scales fit a tensor like this."""
    got = scales.shape
    if got == (1,) * len(shape) or (len(got) == len(shape) and got == (*shape[:-1], 1)):
        return
    want = scale_shape(shape, "block", block_size or max(shape[-1], 1), block_rows)
    if got != want:
        raise InvalidCall.of(op, Reason(
            Code.SCALE_LAYOUT_MISMATCH,
            f"{name} of shape {want} (block_size {block_size}, block_rows {block_rows}), "
            f"{(*shape[:-1], 1)} or {(1,) * len(shape)} for a tensor of shape {tuple(shape)}",
            str(tuple(got)), name))


def split_blocks(x: Tensor, granularity: str, block_size: int,
                 block_rows: int) -> tuple[Tensor, tuple[int, ...]]:
    """Returns `x` reshaped into blocks, padded with zeros, and the axes that make up a block."""
    if granularity == "tensor":
        return x, tuple(range(x.dim()))
    if granularity == "channel":
        return x, (-1,)
    width = x.shape[-1]
    rows = x.shape[-2] if x.dim() > 1 else 1
    missing_rows = -rows % block_rows if x.dim() > 1 else 0
    if width % block_size or missing_rows:
        x = torch.nn.functional.pad(x, (0, -width % block_size, 0,
                                        missing_rows) if missing_rows else (0, -width % block_size))
    x = x.unflatten(-1, (-1, block_size))
    if x.dim() == 2 or block_rows == 1:
        return x, (-1,)
    return x.unflatten(-3, (-1, block_rows)), (-1, -3)


def block_amax(x: Tensor, granularity: str, block_size: int, block_rows: int) -> Tensor:
    """Returns the largest magnitude of each block, in the shape of the scales."""
    if not x.numel():
        return x.new_zeros(scale_shape(x.shape, granularity, block_size, block_rows))
    blocks, axes = split_blocks(x, granularity, block_size, block_rows)
    return blocks.abs().amax(axes, keepdim=granularity != "block")


def block_min_max(x: Tensor, granularity: str, block_size: int,
                  block_rows: int) -> tuple[Tensor, Tensor]:
    """Returns the minimum and the maximum over each block and zero."""
    if not x.numel():
        zeros = x.new_zeros(scale_shape(x.shape, granularity, block_size, block_rows))
        return zeros, zeros
    blocks, axes = split_blocks(x, granularity, block_size, block_rows)
    keep = granularity != "block"
    return blocks.amin(axes, keepdim=keep).clamp(max=0.0), blocks.amax(axes, keepdim=keep).clamp(
        min=0.0)


def make_scales(finite: Tensor, fmt: Format, granularity: str, block_size: int, block_rows: int,
                symmetric: bool, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None,
                                                                       Tensor | None]:
    """Returns scales, zeros and the global scale for finite float32 values."""
    if fmt.integer and not symmetric:
        low, high = block_min_max(finite, granularity, block_size, block_rows)
        steps, bottom = (255.0, -128) if fmt.name == "int8" else (15.0, 0)
        scales = (high / steps - low / steps).clamp(min=TINY)
        zeros = (bottom - (low / scales).round()).to(fmt.storage)
        return scales, zeros, None
    amax = block_amax(finite, granularity, block_size, block_rows)
    if fmt.name == "mxfp4":
        # floor(log2) - 2, the exponent of 4
        exponent = (torch.frexp(amax).exponent - 3).clamp(-127, 127)
        return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu), None, None
    if fmt.name == "nvfp4":
        if global_scale is None:
            tensor_amax = amax.amax() if amax.numel() else amax.new_zeros(())
            global_scale = (tensor_amax / (448.0 * 6.0)).clamp(min=TINY).reshape((1,) * amax.dim())
        else:                                  # it is returned: memory of its own
            global_scale = global_scale.to(torch.float32, copy=True)
        block_scales = (amax / 6.0 / global_scale).clamp(2.0 ** -9, 448.0)
        return block_scales.to(torch.float8_e4m3fn), None, global_scale
    return (amax / fmt.largest).clamp(min=TINY), None, None


# Encoding and decoding.

def with_fractions(zeros: Tensor, dtype: str, gen: torch.Generator) -> Tensor:
    """Returns zeros that are no whole numbers, as HQQ fits them."""
    return (zeros + torch.rand(zeros.shape, generator=gen) - 0.5).to(getattr(torch, dtype))


def encode(ratio: Tensor, fmt: Format, zeros: Tensor | None) -> Tensor:
    """Encodes values over their scale: nearest, ties to even, saturating; NaN is 0."""
    if fmt.name == "fp8_e4m3" or fmt.name == "fp8_e5m2":
        return ratio.clamp(-fmt.largest, fmt.largest).to(fmt.storage)      # NaN stays NaN
    ratio = ratio.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    if fmt.name == "int8":
        low = -127.0 if zeros is None else -128.0
        return (ratio.round() if zeros is None
                else ratio.round() + zeros).clamp(low, 127.0).to(torch.int8)
    if fmt.name == "int4":
        shifted = ratio.round() + (8.0 if zeros is None else zeros)
        return pack_nibbles(shifted.clamp(1.0 if zeros is None else 0.0, 15.0).to(torch.uint8))
    if fmt.name == "nf4":
        midpoints = torch.tensor(NF4_MIDPOINTS, device=ratio.device, dtype=torch.float32)
        return pack_nibbles((ratio[..., None] > midpoints).sum(-1, dtype=torch.uint8))
    magnitude = ratio.abs()
    # ties to the even code
    code = ((magnitude > 0.25).to(torch.uint8) + (magnitude >= 0.75) + (magnitude > 1.25)
            + (magnitude >= 1.75) + (magnitude > 2.5) + (magnitude >= 3.5) + (magnitude > 5.0))
    return pack_nibbles(code + (ratio < 0).to(torch.uint8) * 8)


def decode(q: Tensor, fmt: Format, size: int, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the values of codes in units of their scale; `zeros` is expanded to the elements."""
    if fmt.bits == 8:
        values = q.to(dtype)
        return values if zeros is None else values - zeros.to(dtype)
    values = code_values(fmt.name, q.device, dtype)[unpack_nibbles(q, size).long()]
    if fmt.name == "int4":
        values = values - (8.0 if zeros is None else zeros.to(dtype))
    return values


def dequantize_codes(q: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format, size: int,
                     block_size: int,
                     block_rows: int, global_scale: Tensor | None = None) -> Tensor:
    """Dequantizes codes to float32, or to float64 if the scales are float64."""
    dtype = torch.float64 if scales.dtype == torch.float64 else torch.float32
    shape = torch.Size((*q.shape[:-1], size))
    if zeros is not None:
        zeros = expand_scales(zeros, shape, block_size, block_rows)
    scales = scales.to(dtype) if global_scale is None else scales.to(dtype) * global_scale.to(dtype)
    return decode(q, fmt, size, zeros, dtype) * expand_scales(scales, shape, block_size, block_rows)
