"""The block formats of ggml (llama.cpp, GGUF files): their bytes, and the values of those bytes.

A row of values is a sequence of blocks of 32 or 256; each block holds its codes and its scales, in
the order of ggml's structs (ggml-common.h), little-endian. So codes have no tensor of scales beside
them. `d`, `m` and `s` are float16 and `s_j`, `m_j` the integer scales of part j of a block of 256:

- `q4_0`, `q5_0`, `q8_0`  d * (code - 8, 16, 0)         32 values
- `q4_1`, `q5_1`          d * code + m                  32 values
- `q2_k`, `q4_k`, `q5_k`  (d * s_j) * code - m * m_j    256 values, parts of 16, 32, 32
- `q3_k`, `q6_k`          (d * s_j) * (code - 4, 32)    256 values, parts of 16
- `iq4_nl`, `iq4_xs`      d * table[code], (d * s_j) * table[code]     32, 256 in parts of 32
- `q8_k`                  d * code, d float32, then the sums of 16 codes; 256 values
- `q8_1`                  d * code, then s = d * sum of the codes; 32 values; activations only

`dequantize_blocks` computes in float32 what ggml's dequantize_row_* do. Every product but q6_k's
and q8_k's is exact, so that a fused multiply-add gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .ggml_search import (
    GROUP_MAX_EPS,
    IQ4_VALUES,
    inverse,
    make_iq4_scales,
    make_q3_quants,
    make_qkx2_quants,
    make_qx_quants,
    nearest_int,
    nearest_iq4,
    quotient,
    search_parts,
    signed_peak,
)


@dataclass(frozen=True)
class GgmlFormat:
    """A block format; ggml rounds the other operand of a product to `activations`."""

    name: str
    block: int                                 # values
    block_bytes: int
    activations: str
    halves: tuple[int, ...] = (0,)             # the bytes at which a float16 lies
    nibbles: int = 0       # the byte from which on codes lie two in a byte, 0 if there is none

    def row_bytes(self, width: int) -> int:
        """Returns the bytes of a row of `width` values, a multiple of the block."""
        return width // self.block * self.block_bytes

    def row_width(self, row_bytes: int) -> int:
        """Returns the values in a row of `row_bytes` bytes, a multiple of block_bytes."""
        return row_bytes // self.block_bytes * self.block


GGML_FORMATS = {f.name: f for f in (
    GgmlFormat("q4_0", 32, 18, "q8_0", nibbles=2), GgmlFormat("q4_1", 32, 20, "q8_1", (0, 2), 4),
    GgmlFormat("q5_0", 32, 22, "q8_0", nibbles=6), GgmlFormat("q5_1", 32, 24, "q8_1", (0, 2), 8),
    GgmlFormat("q8_0", 32, 34, "q8_0"), GgmlFormat("q2_k", 256, 84, "q8_k", (80, 82)),
    GgmlFormat("q3_k", 256, 110, "q8_k", (108,)), GgmlFormat("q4_k", 256, 144, "q8_k", (0, 2), 16),
    GgmlFormat("q5_k", 256, 176, "q8_k", (0, 2), 48), GgmlFormat("q6_k", 256, 210, "q8_k", (208,)),
    GgmlFormat("q8_k", 256, 292, "q8_k", ()), GgmlFormat("iq4_nl", 32, 18, "q8_0", nibbles=2),
    GgmlFormat("iq4_xs", 256, 136, "q8_k", nibbles=8))}
GgmlName = Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
                   "q8_k", "iq4_nl", "iq4_xs"]
Q8_1 = GgmlFormat("q8_1", 32, 36, "q8_1", (0, 2))    # of activations only: no weights come in it


# Bits.

def shifts(like: Tensor, step: int, count: int) -> Tensor:
    """Returns the shifts 0, step, 2 * step … in the dtype and on the device of `like`."""
    return torch.arange(0, step * count, step, dtype=like.dtype, device=like.device)


def reinterpret(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bytes of t as another dtype, of a copy: torch wants plain strides and an even
    offset, which `contiguous` does not give to a tensor of one element."""
    return t.clone(memory_format=torch.contiguous_format).view(dtype)


def bits(packed: Tensor, width: int, run: int) -> Tensor:
    """Returns codes of `width` bits: the lowest of each of `run` bytes, then the next of each …
    (..., n) bytes -> (..., n * 8 // width) codes."""
    mask = (1 << width) - 1
    if run % 8:
        runs = packed.unflatten(-1, (-1, 1, run))
        return ((runs >> shifts(packed, width, 8 // width)[:, None]) & mask).flatten(-3)
    # eight bytes at a time
    words = reinterpret(packed, torch.int64).unflatten(-1, (-1, run // 8))
    mask *= 0x0101010101010101
    codes = torch.stack([(words >> shift) & mask for shift in range(0, 8, width)], -2)
    return codes.view(torch.uint8).flatten(-3)


def float16_at(blocks: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """Returns the float16 at a byte of every block: (..., n, bytes) -> (..., n, 1)."""
    return reinterpret(blocks[..., offset:offset + 2], torch.float16).to(dtype)


def k4_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the eight scales and eight minima of q4_k and q5_k, six bits each, of 12 bytes."""
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    return (torch.cat((low & 63, (rest & 15) | (low >> 6 << 4)), -1),
            torch.cat((high & 63, (rest >> 4) | (high >> 6 << 4)), -1))


def k3_scales(packed: Tensor) -> Tensor:
    """Returns the sixteen scales of q3_k, plus 32, six bits each, of 12 bytes."""
    return bits(packed[..., :8], 4, 8) | (bits(packed[..., 8:], 2, 4) << 4)


# Values: blocks (..., n, block_bytes) -> (..., n, block).

def scaled_parts(values: Tensor, scales: Tensor) -> Tensor:
    """Returns values (..., n, block) times the scale of their part, scales (..., n, parts)."""
    return (values.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def nibble_values(b: Tensor, dtype: torch.dtype) -> Tensor:
    return bits(b, 4, 16).to(dtype)


def fifth_bits(b: Tensor) -> Tensor:
    """Returns 16 or 0 for each of 32 values of four bytes: by a table of the eight of each byte."""
    table = bits(torch.arange(256, dtype=torch.uint8, device=b.device)[:, None], 1, 1) << 4
    eights = table.view(torch.int64)[:, 0].index_select(0, b.flatten().int())
    return eights.view(*b.shape[:-1], 4).view(torch.uint8)


def decode_q4_0(b: Tensor, dtype: torch.dtype) -> Tensor:
    return nibble_values(b[..., 2:], dtype).sub_(8).mul_(float16_at(b, 0, dtype))


def decode_q4_1(b: Tensor, dtype: torch.dtype) -> Tensor:
    return nibble_values(b[..., 4:], dtype).mul_(float16_at(b, 0, dtype)).add_(
        float16_at(b, 2, dtype))


def decode_q5_0(b: Tensor, dtype: torch.dtype) -> Tensor:
    codes = bits(b[..., 6:], 4, 16) | fifth_bits(b[..., 2:6])
    return codes.to(dtype).sub_(16).mul_(float16_at(b, 0, dtype))


def decode_q5_1(b: Tensor, dtype: torch.dtype) -> Tensor:
    codes = bits(b[..., 8:], 4, 16) | fifth_bits(b[..., 4:8])
    return codes.to(dtype).mul_(float16_at(b, 0, dtype)).add_(float16_at(b, 2, dtype))


def decode_q8_0(b: Tensor, dtype: torch.dtype) -> Tensor:
    return b[..., 2:].view(torch.int8).to(dtype) * float16_at(b, 0, dtype)


def decode_q8_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    scale = reinterpret(b[..., :4], torch.float32).to(dtype)
    return b[..., 4:260].view(torch.int8).to(dtype) * scale


def minus_minima(values: Tensor, minima: Tensor) -> Tensor:
    return values.unflatten(-1, (minima.shape[-1], -1)).sub_(minima[..., None]).flatten(-2)


def decode_q2_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    scales = float16_at(b, 80, dtype) * (b[..., :16] & 15).to(dtype)
    minima = float16_at(b, 82, dtype) * (b[..., :16] >> 4).to(dtype)
    return minus_minima(scaled_parts(bits(b[..., 16:80], 2, 32).to(dtype), scales), minima)


def decode_q3_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    codes = bits(b[..., 32:96], 2, 32) | (bits(b[..., :32], 1, 32) << 2)
    scales = float16_at(b, 108, dtype) * (k3_scales(b[..., 96:108]).to(dtype) - 32)
    return scaled_parts(codes.to(dtype).sub_(4), scales)


def decode_k4(b: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    scales, minima = k4_scales(b[..., 4:16])
    values = scaled_parts(codes.to(dtype), float16_at(b, 0, dtype) * scales.to(dtype))
    return minus_minima(values, float16_at(b, 2, dtype) * minima.to(dtype))


def decode_q4_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    return decode_k4(b, bits(b[..., 16:], 4, 32), dtype)


def decode_q5_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    return decode_k4(b, bits(b[..., 48:], 4, 32) | (bits(b[..., 16:48], 1, 32) << 4), dtype)


def decode_q6_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    codes = bits(b[..., :128], 4, 64) | (bits(b[..., 128:192], 2, 32) << 4)
    scales = float16_at(b, 208, dtype) * b[..., 192:208].view(torch.int8).to(dtype)
    return scaled_parts(codes.to(dtype).sub_(32), scales)


def iq4_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    table = torch.tensor(IQ4_VALUES, dtype=dtype, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def decode_iq4_nl(b: Tensor, dtype: torch.dtype) -> Tensor:
    return iq4_values(bits(b[..., 2:], 4, 16), dtype) * float16_at(b, 0, dtype)


def decode_iq4_xs(b: Tensor, dtype: torch.dtype) -> Tensor:
    codes = bits(b[..., 4:8], 4, 1) | (bits(b[..., 2:4], 2, 1) << 4)
    scales = float16_at(b, 0, dtype) * (codes.to(dtype) - 32)
    return scaled_parts(iq4_values(bits(b[..., 8:], 4, 16), dtype), scales)


DECODERS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "q4_0": decode_q4_0, "q4_1": decode_q4_1, "q5_0": decode_q5_0, "q5_1": decode_q5_1,
    "q8_0": decode_q8_0, "q2_k": decode_q2_k, "q3_k": decode_q3_k, "q4_k": decode_q4_k,
    "q5_k": decode_q5_k, "q6_k": decode_q6_k, "q8_k": decode_q8_k, "iq4_nl": decode_iq4_nl,
    "iq4_xs": decode_iq4_xs}


def dequantize_blocks(blocks: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the values of ggml's blocks: uint8 (..., row_bytes) -> float32 (..., k), as ggml.
    dtype=torch.float64 gives them without any rounding."""
    size = GGML_FORMATS[format].block_bytes
    return DECODERS[format](blocks.unflatten(-1, (-1, size)), dtype).flatten(-2)


# Activations.

def round_half_away(x: Tensor) -> Tensor:
    """C's roundf: halves away from zero."""
    whole = x.trunc()
    return whole + (x - whole).mul(2.0).trunc()


def as_bytes(*fields: Tensor) -> Tensor:
    """Returns the fields of blocks, each (..., n, length) of its dtype, as bytes side by side."""
    return torch.cat([f.view(torch.uint8) if f.dtype.itemsize == 1
                      else reinterpret(f, torch.uint8) for f in fields], -1)


def divided(x: Tensor, by: float) -> Tensor:
    """Returns x / by, rounded once: on a GPU torch would multiply by the reciprocal of a number."""
    return x / x.new_tensor(by)


def encode_q8_0(x: Tensor) -> Tensor:
    d = divided(x.abs().amax(-1, keepdim=True), 127.0)
    codes = round_half_away(x * inverse(d))
    return as_bytes(d.to(torch.float16), codes.to(torch.int8))


def encode_q8_1(x: Tensor) -> Tensor:
    d = divided(x.abs().amax(-1, keepdim=True), 127.0)
    codes = round_half_away(x * inverse(d))
    total = codes.sum(-1, keepdim=True) * d
    return as_bytes(d.to(torch.float16), total.to(torch.float16), codes.to(torch.int8))


def encode_q8_k(x: Tensor) -> Tensor:
    step = inverse(signed_peak(x, -1), -127.0)
    codes = nearest_int(step * x).clamp(max=127)
    sums = codes.unflatten(-1, (16, 16)).sum(-1)
    return as_bytes(inverse(step), codes.to(torch.int8), sums.to(torch.int16))


ACTIVATION_ENCODERS = {"q8_0": encode_q8_0, "q8_1": encode_q8_1, "q8_k": encode_q8_k}


def rounded_activations(x: Tensor, format: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns x as ggml rounds it beside a weight in `format`, and for q8_1 the sums (..., k // 32)
    that the minima of the weight are multiplied by, as stored: in float16.

    The gradient of a rounded value is that of the value.
    """
    name = GGML_FORMATS[format].activations
    fmt = Q8_1 if name == "q8_1" else GGML_FORMATS[name]
    blocks = ACTIVATION_ENCODERS[name](x.detach().float().unflatten(-1, (-1, fmt.block)))
    if name == "q8_1":
        values = blocks[..., 4:].view(torch.int8).to(dtype) * float16_at(blocks, 0, dtype)
        sums = float16_at(blocks, 2, dtype)[..., 0]
    else:
        values, sums = DECODERS[name](blocks, dtype), None
    if x.requires_grad:
        change = (x - x.detach()).to(dtype).unflatten(-1, (-1, fmt.block))         # zeros
        values = values + change
        sums = None if sums is None else sums + change.sum(-1)
    return values.flatten(-2), sums


def block_product(values: Tensor, sums: Tensor | None, blocks: Tensor, format: str) -> Tensor:
    """Returns rounded activations (..., k) times the weight (n, row_bytes), in their dtype: what
    ggml's vec_dot functions compute, up to the order in which they add."""
    weight = dequantize_blocks(blocks, format, values.dtype)
    if sums is None:
        return values @ weight.t()
    minima = float16_at(blocks.unflatten(-1, (-1, GGML_FORMATS[format].block_bytes)), 2,
                        values.dtype)
    steps = (weight.unflatten(-1, (-1, 32)) - minima).flatten(-2)
    return values @ steps.t() + sums @ minima[..., 0].t()


# Codes: values (..., n, block) -> blocks (..., n, block_bytes). As ggml's quantize_row_*_ref, and
# iq4_nl as its quantize_iq4_nl, which searches further.

def pack_bits(codes: Tensor, width: int, run: int) -> Tensor:
    """Returns the bytes of codes; the inverse of `bits`."""
    runs = codes.to(torch.uint8).unflatten(-1, (-1, 8 // width, run))
    return (runs << shifts(runs, width, 8 // width)[:, None]).sum(-2, dtype=torch.uint8).flatten(-2)


def pack_fifth_bits(codes: Tensor) -> Tensor:
    return pack_bits(codes >> 4, 1, 1)


def nearest_up(x: Tensor, levels: float) -> Tensor:
    """C's (int8_t)(x + 0.5) for x of at least 0, at most `levels`."""
    return x.trunc().clamp(0.0, levels).to(torch.uint8)


def encode_q4_0(x: Tensor) -> Tensor:
    d = divided(signed_peak(x, -1), -8.0)
    return as_bytes(d.half(), pack_bits(nearest_up(x * inverse(d) + 8.5, 15.0), 4, 16))


def encode_q5_0(x: Tensor) -> Tensor:
    d = divided(signed_peak(x, -1), -16.0)
    codes = nearest_up(x * inverse(d) + 16.5, 31.0)
    return as_bytes(d.half(), pack_fifth_bits(codes), pack_bits(codes & 15, 4, 16))


def from_minimum(x: Tensor, levels: float) -> tuple[Tensor, Tensor, Tensor]:
    # the first minimum, which may be -0.0 or 0.0: argmin may take one for less than the other, and
    # argmax of what equals it need not be the first
    places = torch.arange(x.shape[-1], device=x.device)
    first = places.where(x == x.amin(-1, keepdim=True), x.shape[-1] - 1).amin(-1, keepdim=True)
    low = x.gather(-1, first)
    # a maximum of zeros may be -0.0 (x86), and the step then would be
    d = divided(x.amax(-1, keepdim=True) - low + 0.0, levels)
    return d.half(), low.half(), nearest_up((x - low) * inverse(d) + 0.5, levels)


def encode_q4_1(x: Tensor) -> Tensor:
    d, low, codes = from_minimum(x, 15.0)
    return as_bytes(d, low, pack_bits(codes, 4, 16))


def encode_q5_1(x: Tensor) -> Tensor:
    d, low, codes = from_minimum(x, 31.0)
    return as_bytes(d, low, pack_fifth_bits(codes), pack_bits(codes & 15, 4, 16))


def final_codes(x: Tensor, steps: Tensor, shifts: Tensor | float, searched: Tensor, low: int,
                high: int) -> Tensor:
    """Returns the codes of values for the scales of their part as stored; the searched ones where
    that scale is 0."""
    d = steps.repeat_interleave(x.shape[-1] // steps.shape[-1], -1)
    codes = nearest_int((x + shifts) / d).clamp(low, high) - low
    return torch.where(d == 0, searched, codes)


def scaled_integers(scales: Tensor, levels: float) -> tuple[Tensor, Tensor]:
    """Returns the float16 that is one unit of scales of at least 0, and the scales in that unit."""
    peak = scales.amax(-1, keepdim=True).clamp(min=0.0)
    unit = torch.where(peak > 0, divided(peak, levels), 0.0).half()
    return unit, nearest_int(inverse(peak, levels) * scales) & 255


def with_minima(x: Tensor, parts: int, levels: int, scale_levels: float, start: float, steps: int,
                magnitudes: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns both units, the integer scales and minima, and the codes of q2_k, q4_k, q5_k."""
    scales, minima, searched = search_parts(x, x.shape[-1] // parts, make_qkx2_quants, levels,
                                            start, steps, magnitudes)
    unit, small = scaled_integers(scales, scale_levels)
    low_unit, small_low = scaled_integers(minima, scale_levels)
    small, small_low = small.clamp(max=int(scale_levels)), small_low.clamp(max=int(scale_levels))
    lows = (low_unit.float() * small_low).repeat_interleave(x.shape[-1] // parts, -1)
    codes = final_codes(x, unit.float() * small, lows, searched, 0, levels)
    return unit, low_unit, small.to(torch.uint8), small_low.to(torch.uint8), codes


def encode_q2_k(x: Tensor) -> Tensor:
    unit, low_unit, scales, minima, codes = with_minima(x, 16, 3, 15.0, -0.5, 15, True)
    return as_bytes(scales | (minima << 4), pack_bits(codes, 2, 32), unit, low_unit)


def pack_k4_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """The inverse of `k4_scales`."""
    return torch.cat((scales[..., :4] | (scales[..., 4:] >> 4 << 6),
                      minima[..., :4] | (minima[..., 4:] >> 4 << 6),
                      (scales[..., 4:] & 15) | (minima[..., 4:] << 4)), -1)


def encode_q4_k(x: Tensor) -> Tensor:
    unit, low_unit, scales, minima, codes = with_minima(x, 8, 15, 63.0, -1.0, 20, False)
    return as_bytes(unit, low_unit, pack_k4_scales(scales, minima), pack_bits(codes, 4, 32))


def encode_q5_k(x: Tensor) -> Tensor:
    unit, low_unit, scales, minima, codes = with_minima(x, 8, 31, 63.0, -0.5, 15, False)
    return as_bytes(unit, low_unit, pack_k4_scales(scales, minima), pack_bits(codes >> 4, 1, 32),
                    pack_bits(codes & 15, 4, 32))


def encode_q3_k(x: Tensor) -> Tensor:
    scales, searched = search_parts(x, 16, make_q3_quants, 4)
    peak = signed_peak(scales, -1)
    factor = inverse(peak, -32.0)
    unit = torch.where(peak == 0, 0.0, quotient(1.0, factor)).half()
    small = torch.where(peak == 0, 0, nearest_int(factor * scales).clamp(-32, 31) + 32)
    codes = final_codes(x, unit.float() * (small - 32), 0.0, searched, -4, 3)
    return as_bytes(pack_bits(codes >> 2, 1, 32), pack_bits(codes & 3, 2, 32),
                    pack_bits(small & 15, 4, 8), pack_bits(small >> 4, 2, 4), unit)


def encode_q6_k(x: Tensor) -> Tensor:
    scales, searched = search_parts(x, 16, make_qx_quants, 32)
    peak = signed_peak(scales, -1)
    factor = torch.where(peak.abs() < GROUP_MAX_EPS, 0.0, quotient(-128.0, peak))
    unit = inverse(factor).half()
    small = nearest_int(factor * scales).clamp(max=127)
    codes = final_codes(x, unit.float() * small, 0.0, searched, -32, 31)
    codes = torch.where(peak.abs() < GROUP_MAX_EPS, 0, codes)
    return as_bytes(pack_bits(codes & 15, 4, 64), pack_bits(codes >> 4, 2, 32),
                    small.to(torch.int8), unit)


def encode_iq4_nl(x: Tensor) -> Tensor:
    (scale,) = search_parts(x, 32, make_iq4_scales)
    return as_bytes(scale.half(), pack_bits(nearest_iq4(inverse(scale) * x), 4, 16))


def encode_iq4_xs(x: Tensor) -> Tensor:
    (scales,) = search_parts(x, 32, make_iq4_scales)
    d = divided(-signed_peak(scales, -1), 32.0)
    small = nearest_int(inverse(d) * scales).clamp(-32, 31)
    codes = nearest_iq4(scaled_parts(x, inverse(d * small)))
    small = small + 32
    return as_bytes(d.half(), pack_bits(small >> 4, 2, 1), pack_bits(small & 15, 4, 1),
                    pack_bits(codes, 4, 16))


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATION_ENCODERS, "q4_0": encode_q4_0, "q4_1": encode_q4_1, "q5_0": encode_q5_0,
    "q5_1": encode_q5_1, "q2_k": encode_q2_k, "q3_k": encode_q3_k, "q4_k": encode_q4_k,
    "q5_k": encode_q5_k, "q6_k": encode_q6_k, "iq4_nl": encode_iq4_nl, "iq4_xs": encode_iq4_xs}


def quantize_blocks(x: Tensor, format: str) -> Tensor:
    """Returns x (..., k) in blocks: uint8 (..., row_bytes), the bytes that ggml's quantizers write.

    They leave open what becomes of values that are not finite: here NaN is 0, and an infinity the
    largest finite magnitude of its block.
    """
    size = Q8_1.block if format == "q8_1" else GGML_FORMATS[format].block
    blocks = x.float().unflatten(-1, (-1, size))
    finite = blocks.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    peak = finite.abs().amax(-1, keepdim=True)
    # no minimum or maximum: of 0.0 and -0.0 either may come, and a block's minimum keeps its sign
    blocks = torch.where(blocks.isinf(), peak.copysign(blocks), finite)
    return ENCODERS[format](blocks).flatten(-2)


SUBNORMAL = 2.0 ** -13                         # values whose scales are subnormal in float16


def random_blocks(gen: torch.Generator, rows: tuple[int, ...], width: int, format: str,
                  size: float = 1.0) -> Tensor:
    """Returns blocks of random bytes, every code and scale alike, whose values are about `size`."""
    fmt = GGML_FORMATS[format]
    if not fmt.halves:                         # q8_k has sums that must fit its codes
        return quantize_blocks(torch.randn((*rows, width), generator=gen), format)
    blocks = torch.randint(256, (*rows, width // fmt.block, fmt.block_bytes), generator=gen,
                           dtype=torch.uint8)
    def set_halves(low: float, size: float) -> None:
        for offset in fmt.halves:
            drawn = (torch.rand((*blocks.shape[:-1], 1), generator=gen) + low) * size
            blocks[..., offset:offset + 2] = drawn.half().view(torch.uint8)

    set_halves(1.0, 1.0)
    spread = dequantize_blocks(blocks.flatten(-2), format).std().clamp(min=1.0)
    set_halves(0.5, size / float(spread))
    return blocks.flatten(-2)
