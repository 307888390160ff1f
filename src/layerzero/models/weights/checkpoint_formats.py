"""Weights of GPTQ and AWQ checkpoints, brought into the layout of lz.quantized_linear.

Both store a weight transposed, codes of 0 .. 2^bits - 1 in int32, and one scale and zero for each
group of inputs and each output: W = (code - zero) * scale.

- GPTQ (AutoGPTQ, GPTQModel): qweight (in * bits / 32, out), neighbouring inputs in one int32, the
  first in the lowest bits; qzeros (groups, out * bits / 32) likewise by outputs, minus one unless
  the checkpoint_format is "gptq_v2"; scales (groups, out); g_idx (in,) the group of each input.
- AWQ (AutoAWQ, version "gemm"): qweight (in, out / 8), qzeros (groups, out / 8), the outputs 0, 2,
  4, 6, 1, 3, 5, 7 of eight from the lowest bits up; scales (groups, out); four bits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...ops.formulas.quant import pack_nibbles
from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class QuantizedWeight(NamedTuple):
    """A weight for lz.quantized_linear(x, weight_q, scales, zeros, format=…, group_size=…).
    input_order: None, or the order in which its inputs lie: give x[..., input_order]."""

    weight_q: Tensor
    scales: Tensor
    zeros: Tensor | None                       # None if they are those of a symmetric format
    format: Literal["int4", "int8"]
    group_size: int
    input_order: Tensor | None = None


def from_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *,
              bits: int = 4, checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
              ) -> QuantizedWeight:
    """Returns the weight of a GPTQ checkpoint of 4 or 8 bits as int4 or int8 with groups.

    With act_order (desc_act) the groups of g_idx are scattered over the inputs. These are sorted by
    group then, and `input_order` says how x must be ordered.
    """
    check("from_gptq", "bits", bits in (4, 8), Code.VALUE_OUT_OF_RANGE, "4 or 8", bits)
    check("from_gptq", "checkpoint_format", checkpoint_format in ("gptq", "gptq_v2"),
          Code.VALUE_OUT_OF_RANGE, "gptq or gptq_v2", checkpoint_format)
    per_word = 32 // bits
    inputs, outputs, groups = qweight.shape[0] * per_word, qweight.shape[-1], scales.shape[0]
    check_layout("from_gptq", qweight, (inputs // per_word, outputs), qzeros,
                 (groups, outputs // per_word), scales, (groups, outputs))
    codes = unpack_words(qweight.t(), bits)
    zeros = unpack_words(qzeros, bits)
    if checkpoint_format == "gptq":
        zeros = (zeros + 1) & ((1 << bits) - 1)
    size = group_size("from_gptq", inputs, groups)
    order = None
    if g_idx is not None and g_idx.numel():
        check("from_gptq", "g_idx", tuple(g_idx.shape) == (inputs,), Code.DIM_MISMATCH,
              f"of shape ({inputs},)", str(tuple(g_idx.shape)))
        plain = torch.arange(inputs, device=g_idx.device) // size
        order = g_idx.long().argsort(stable=True)
        check("from_gptq", "g_idx", bool((g_idx[order] == plain).all()), Code.SCALE_LAYOUT_MISMATCH,
              f"{groups} groups of {size} inputs each", "groups of other sizes")
        order = None if torch.equal(g_idx.long(), plain) else order
    if order is not None:
        codes = codes[:, order]
    return _weight(codes, scales, zeros, bits, size, order)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantizedWeight:
    """Returns the weight of an AWQ checkpoint (version "gemm", 4 bits) as int4 with groups."""
    inputs, outputs, groups = qweight.shape[0], qweight.shape[-1] * 8, scales.shape[0]
    check_layout("from_awq", qweight, (inputs, outputs // 8), qzeros, (groups, outputs // 8),
                 scales, (groups, outputs))
    size = group_size("from_awq", inputs, groups)
    order = torch.tensor(AWQ_ORDER, device=qweight.device).argsort()

    def unpack(words: Tensor) -> Tensor:
        return unpack_words(words, 4).unflatten(-1, (-1, 8))[..., order].flatten(-2)

    return _weight(unpack(qweight).t(), scales, unpack(qzeros), 4, size, None)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Returns the codes of int32 (..., n), the lowest bits first: int32 (..., n * 32 / bits)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _weight(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, size: int,
            order: Tensor | None) -> QuantizedWeight:
    """Makes the weight of codes (out, in), scales and zeros (groups, out)."""
    middle = 1 << (bits - 1)
    zeros = zeros.t()
    if bits == 4:
        packed = pack_nibbles(codes.to(torch.uint8))
        shifted = zeros.to(torch.uint8)
    else:
        packed, shifted = (codes - middle).to(torch.int8), (zeros - middle).to(torch.int8)
    symmetric = bool((zeros == middle).all())
    return QuantizedWeight(packed.contiguous(), scales.t().contiguous(),
                           None if symmetric else shifted.contiguous(),
                           "int4" if bits == 4 else "int8", size, order)


def group_size(function: str, inputs: int, groups: int) -> int:
    check(function, "scales", groups > 0 and inputs % max(groups, 1) == 0,
          Code.SCALE_LAYOUT_MISMATCH, f"a number of groups that divides {inputs} inputs", groups)
    return inputs // groups


def check_layout(function: str, qweight: Tensor, weight_shape: tuple[int, ...], qzeros: Tensor,
                 zeros_shape: tuple[int, ...], scales: Tensor, scales_shape: tuple[int, ...]
                 ) -> None:
    for name, tensor, shape in (("qweight", qweight, weight_shape), ("qzeros", qzeros, zeros_shape),
                                ("scales", scales, scales_shape)):
        check(function, name, tuple(tensor.shape) == shape, Code.DIM_MISMATCH,
              f"of shape {shape}", str(tuple(tensor.shape)))
        dtypes = ("int32",) if name != "scales" else ("float16", "bfloat16", "float32")
        got = str(tensor.dtype).removeprefix("torch.")
        check(function, f"{name}.dtype", got in dtypes, Code.DTYPE_UNSUPPORTED, " or ".join(dtypes),
              got)


def check(function: str, fact: str, holds: bool, code: Code, want: str, got: str | int) -> None:
    if not holds:
        raise InvalidCall.of(function, Reason(code, want, got, fact))
