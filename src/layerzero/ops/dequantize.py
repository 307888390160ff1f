"""Dequantizes codes to values. formulas/quant.py defines the encoding and layout of each format.

The product of code and scale is computed in float32 and rounded once, to `out_dtype`. `size` is the
length of a row of values; it is needed where a byte holds two codes and the length is odd.

The formats of ggml (formulas/ggml.py) keep their scales among the codes: `scales` is None.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.mistake import Mistake
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import (
    absent,
    any_of,
    at_least,
    dtypes,
    equals,
    multiple_of,
    one_of,
    present,
    when,
)
from .formulas.common import FLOATS
from .formulas.ggml import (
    GGML_FORMATS,
    SUBNORMAL,
    GgmlName,
    dequantize_blocks,
    random_blocks,
)
from .formulas.mistakes import QUANTIZED, swap_nibbles
from .formulas.quant import (
    FORMATS,
    check_scales,
    dequantize_codes,
    encode,
    expand_scales,
    make_scales,
    with_fractions,
)

FormatName = Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2", "nf4", "mxfp4", "nvfp4", GgmlName]


def reference(
    q: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None, *, format: FormatName,
    block_size: int = 0, block_rows: int = 1, global_scale: Tensor | None = None,
    size: int | None = None, out_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> Tensor:
    """Returns the values of codes, with the format, block_size and block_rows of lz.quantize."""
    if scales is None:
        return dequantize_blocks(q, format).to(getattr(torch, out_dtype))
    fmt = FORMATS[format]
    block_size = block_size or fmt.block_size
    size = check_size(q, scales, zeros, format, block_size, block_rows, global_scale, size)
    values = dequantize_codes(q, scales, zeros, fmt, size, block_size, block_rows, global_scale)
    return values.to(getattr(torch, out_dtype))


def check_size(q: Tensor, scales: Tensor, zeros: Tensor | None, format: str, block_size: int,
               block_rows: int, global_scale: Tensor | None, size: int | None) -> int:
    """Returns the length of a row of values; raises InvalidCall for scales of another layout."""
    width = q.shape[-1] * (8 // FORMATS[format].bits)
    if size is None:
        size = width
    elif not width - 1 <= size <= width or (size < width and FORMATS[format].bits == 8):
        raise InvalidCall.of("dequantize", Reason(
            Code.DIM_MISMATCH, f"{width}, or {width - 1} for an odd row of a four-bit format", size,
            "size"))
    shape = torch.Size((*q.shape[:-1], size))
    check_scales("dequantize", "scales", scales, shape, block_size, block_rows)
    if zeros is not None:
        check_scales("dequantize", "zeros", zeros, shape, block_size, block_rows)
    if global_scale is not None:
        check_scales("dequantize", "global_scale", global_scale, torch.Size((1,) * q.dim()), 1, 1)
    return size


def meta(q: Tensor, *args: Any, format: str, size: int | None = None, out_dtype: str = "float32",
         **kwargs: Any) -> Tensor:
    if format in GGML_FORMATS:
        width = GGML_FORMATS[format].row_width(q.shape[-1])
        return q.new_empty((*q.shape[:-1], width), dtype=getattr(torch, out_dtype))
    width = q.shape[-1] * (8 // FORMATS[format].bits) if size is None else size
    return q.new_empty((*q.shape[:-1], width), dtype=getattr(torch, out_dtype))


def inputs(
    format: str = "int8", rows: tuple[int, ...] = (5,), width: int = 64,
    granularity: str | None = None, block_size: int = 0, block_rows: int = 1,
    symmetric: bool = True, stride: str = "", scale_dtype: str = "", large: bool = False,
    out_dtype: str = "", sized: bool = False, small: bool = False,
    zero_dtype: str = "", dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """Returns the codes of random values; `dtype` is the dtype to dequantize to, unless `out_dtype`
    says another. `large`: their scales are beyond float16, where the result is not. `sized`: the
    length is given though it is even. `small`: scales are
    subnormal in float16. `zero_dtype`: that of zeros that are no whole numbers."""
    gen = torch.Generator("cpu").manual_seed(seed)
    out = out_dtype or ("float32" if dtype == torch.float64 else str(dtype).removeprefix("torch."))
    if format in GGML_FORMATS:
        blocks_of_it = random_blocks(gen, rows, width, format, SUBNORMAL if small else 1.0)
        return {"q": blocks_of_it.to(device), "format": format, "out_dtype": out}
    x = torch.randn((*rows, width), generator=gen) * (SUBNORMAL if small else 1.0)
    if large and out != "float16":
        x = x * 2.0 ** 30
    fmt = FORMATS[format]
    blocks = block_size or fmt.block_size
    scales, zeros, global_scale = make_scales(x, fmt, granularity or fmt.granularity, blocks,
                                              block_rows, symmetric, None)
    factors = scales.float() if global_scale is None else scales.float() * global_scale
    q = encode(x / expand_scales(factors, x.shape, blocks, block_rows), fmt,
               None if zeros is None else expand_scales(zeros, x.shape, blocks, block_rows))
    if stride == "sparse":
        q = torch.stack((q, q), -1)[..., 0]
    if zeros is not None and zero_dtype:
        zeros = with_fractions(zeros, zero_dtype, gen)
    if scale_dtype:
        scales = scales.to(getattr(torch, scale_dtype))
    tensors = {"q": q, "scales": scales, "zeros": zeros, "global_scale": global_scale}
    return {**{name: t if t is None else t.to(device) for name, t in tensors.items()},
            "format": format, "block_size": block_size, "block_rows": block_rows, "size": width
            if width % 2 or sized else None, "out_dtype": out}


CASES: tuple[dict[str, Any], ...] = (
    *({"format": f} for f in FORMATS),
    *({"format": f, "width": 37, "rows": (2, 3)} for f in FORMATS),
    *({"format": f, "stride": "sparse"} for f in ("int8", "int4", "fp8_e4m3")),
    *({"format": f, "symmetric": False} for f in ("int8", "int4")),
    {"granularity": "tensor", "rows": (2, 3)},
    {"format": "fp8_e4m3", "granularity": "tensor", "rows": ()},
    {"granularity": "block", "block_size": 16}, {"format": "int4", "block_size": 32, "width": 100},
    {"format": "fp8_e4m3", "granularity": "block", "block_size": 32, "block_rows": 4,
     "rows": (2, 9), "width": 70},
    {"format": "int4", "block_size": 16, "symmetric": False, "rows": (2, 4)}, {"rows": (0,)},
    {"format": "fp8_e5m2", "scale_dtype": "bfloat16"}, {"format": "mxfp4", "width": 1},
    {"format": "mxfp4", "large": True}, {"format": "int4", "sized": True},
    {"format": "int8", "granularity": "block", "block_size": 8, "symmetric": False,
     "scale_dtype": "float16"},
    *({"format": f, "symmetric": False, "zero_dtype": d}
      for f, d in (("int8", "float32"), ("int4", "bfloat16"), ("int4", "float16"))),
    *({"format": f, "rows": (2,), "width": 512} for f in GGML_FORMATS),
    *({"format": f, "rows": (2,), "width": 512, "small": True} for f in ("q4_0", "q8_0", "q4_k")),
    *({"format": f, "small": True, "out_dtype": "float16"} for f in ("int8", "fp8_e4m3", "nvfp4")),
    # a dtype that is not that of the other cases of a run
    {"out_dtype": "bfloat16"}, {"format": "int4", "symmetric": False, "out_dtype": "float16"},
    {"format": "nvfp4", "width": 37, "rows": (2, 3), "out_dtype": "float32"},
    {"format": "q4_k", "rows": (2,), "width": 512, "out_dtype": "bfloat16"},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    if values["format"] not in GGML_FORMATS and values["scales"] is None:
        raise InvalidCall.of("dequantize", Reason(
            Code.MISSING_METADATA, f"the scales that belong to codes in {values['format']}", None,
            "scales"))
    if values["format"] == "nvfp4" and values["global_scale"] is None:
        raise InvalidCall.of("dequantize", Reason(
            Code.MISSING_METADATA, "nvfp4 has one scale for the tensor beside those of its blocks",
            None, "global_scale"))


def _storage_dtype(name: str) -> str:
    return str(FORMATS[name].storage).removeprefix("torch.")

STRESS: tuple[dict[str, Any], ...] = (
    {"rows": (8,), "width": 64, "granularity": "block", "block_size": 8, "format": "int8"},
    {"rows": (4,), "width": 64, "granularity": "block", "block_size": 16, "format": "int4"},
    # more than 256 blocks in a row, rows beyond 2^16
    {"rows": (2,), "width": 16_448, "format": "int4", "block_size": 32},
    {"rows": (66_001,), "width": 2})

MISTAKES: tuple[Mistake, ...] = (
    *QUANTIZED, Mistake("convention", "the two codes of a byte exchanged", swap_nibbles("q")))

OP = Op(
    name="dequantize", family="quantization", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS, mistakes=MISTAKES,
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2),
                         "float32": (1e-6, 1e-6)}),
    shapes={"q": "*rows packed", "scales": "*scale_rows groups"},
    exact=("packed", "block_size", "block_rows"),
    ranges={"block_size": INT32, "block_rows": INT32, "size": INT32},
    requires=(
        *(when(one_of("format", f), dtypes(_storage_dtype(f), of="q.dtype")) for f in FORMATS),
        *(when(one_of("format", f.name), multiple_of("packed", f.block_bytes))
          for f in GGML_FORMATS.values()),
        *(when(one_of("format", *GGML_FORMATS), rule) for rule in (
            dtypes("uint8", of="q.dtype"), absent("scales.dtype", Code.SCALE_LAYOUT_MISMATCH),
            absent("zeros.dtype"), equals("block_size", 0, Code.SCALE_LAYOUT_MISMATCH),
            equals("block_rows", 1, Code.SCALE_LAYOUT_MISMATCH), absent("size"))),
        one_of("scales.dtype", None, *FLOATS, "float8_e8m0fnu", "float8_e4m3fn",
               code=Code.SCALE_LAYOUT_MISMATCH),
        at_least("block_size", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("block_rows", 1, Code.VALUE_OUT_OF_RANGE),
        when(present("zeros.dtype"), one_of("format", "int8", "int4")),
        any_of(absent("global_scale.dtype"), one_of("format", "nvfp4")),
    ),
    flops="2 * rows * packed", bytes="5 * rows * packed", extra_check=extra_check,
)
