"""Quantizes values to codes and scales. formulas/quant.py defines the encoding and layout of each
format.

The scales are computed from the finite values of their block, or given. Everything is computed in
float32, so that every kernel gives the same codes. Values beyond the largest code saturate,
infinities too; NaN becomes 0, in the fp8 formats it stays NaN. A block of zeros gets a tiny scale
and dequantizes to zeros.

The formats of ggml (formulas/ggml.py) keep their scales among the codes: there is one result, uint8
(..., row_bytes), with the bytes that ggml would write.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import absent, any_of, at_least, dtypes, equals, multiple_of, on, one_of, when
from .formulas.common import FLOATS, random_rows
from .formulas.ggml import GGML_FORMATS, GgmlName, quantize_blocks
from .formulas.quant import (
    FORMATS,
    NF4_MIDPOINTS,
    check_scales,
    code_values,
    encode,
    expand_scales,
    make_scales,
    scale_shape,
)

FormatName = Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2", "nf4", "mxfp4", "nvfp4", GgmlName]


def reference(
    x: Tensor, format: FormatName, granularity: Literal["tensor", "channel", "block"] | None = None,
    block_size: int = 0, symmetric: bool = True, *, block_rows: int = 1,
    scales: Tensor | None = None, zeros: Tensor | None = None, global_scale: Tensor | None = None,
) -> Any:
    """Returns (codes, scales), then zeros if symmetric is False, then the global scale of nvfp4;
    for a format of ggml the codes alone.

    granularity: one scale for the tensor, for each row ("channel"), or for each block of a row; by
    default blocks for four-bit formats, else rows. block_size: 0 for the format's default.
    block_rows: rows of a block.
    scales, zeros, global_scale: from calibration, in the layout that would be returned; else
    computed from x.
    """
    if format in GGML_FORMATS:
        return quantize_blocks(x.detach(), format)
    fmt = FORMATS[format]
    grain = granularity or fmt.granularity
    block_size = block_size or fmt.block_size
    upcast = x.detach().float()
    if scales is None:
        finite = upcast.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        scales, zeros, global_scale = make_scales(
            finite, fmt, grain, block_size, block_rows, symmetric, global_scale)
    else:
        check_given_scales(x, grain, block_size, block_rows, scales, zeros, global_scale)
        scales, zeros = scales.clone(), clone_optional(zeros)
        if global_scale is not None:
            global_scale = global_scale.to(torch.float32, copy=True)
    factors = scales.float() if global_scale is None else scales.float() * global_scale.float()
    spread_zeros = None if zeros is None else expand_scales(zeros, x.shape, block_size, block_rows)
    codes = encode(upcast / expand_scales(factors, x.shape, block_size, block_rows), fmt,
                   spread_zeros)
    return tuple(t for t in (codes, scales, zeros, global_scale) if t is not None)


def clone_optional(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.clone()


def check_given_scales(x: Tensor, granularity: str, block_size: int, block_rows: int,
                       scales: Tensor, zeros: Tensor | None, global_scale: Tensor | None) -> None:
    """Raises InvalidCall unless given scales have the layout that would be returned."""
    want = scale_shape(x.shape, granularity, block_size, block_rows)
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None and tensor.shape != want:
            raise InvalidCall.of("quantize", Reason(
                Code.SCALE_LAYOUT_MISMATCH,
                f"{name} of shape {want} (granularity {granularity}, block_size "
                f"{block_size}, block_rows {block_rows}) for x of shape {tuple(x.shape)}",
                str(tuple(tensor.shape)),
                name))
    if global_scale is not None:
        check_scales("quantize", "global_scale", global_scale, torch.Size((1,) * x.dim()), 1, 1)


def meta(x: Tensor, format: str, granularity: str | None = None, block_size: int = 0,
         symmetric: bool = True, *, block_rows: int = 1, scales: Tensor | None = None,
         zeros: Tensor | None = None, **kwargs: Any) -> Any:
    if format in GGML_FORMATS:
        row_bytes = GGML_FORMATS[format].row_bytes(x.shape[-1])
        return x.new_empty((*x.shape[:-1], row_bytes), dtype=torch.uint8)
    fmt = FORMATS[format]
    layout = scale_shape(x.shape, granularity or fmt.granularity, block_size or fmt.block_size,
                         block_rows)
    width = x.shape[-1] if fmt.bits == 8 else (x.shape[-1] + 1) // 2
    results = [x.new_empty((*x.shape[:-1], width), dtype=fmt.storage),
               x.new_empty(layout, dtype=fmt.scale if scales is None else scales.dtype)]
    if not symmetric:
        results.append(x.new_empty(layout, dtype=fmt.storage if zeros is None else zeros.dtype))
    if format == "nvfp4":
        results.append(x.new_empty((1,) * x.dim(), dtype=torch.float32))
    return tuple(results)


def inputs(
    format: str = "int8", rows: tuple[int, ...] = (5,), width: int = 64,
    granularity: str | None = None, block_size: int = 0, block_rows: int = 1,
    symmetric: bool = True, stride: str = "", special: str = "",
    given: bool | str = False, dtype: torch.dtype = torch.float32, device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    x = random_rows(gen, rows, width, stride, dtype, "cpu")
    if special == "zeros":
        x.zero_()
    elif special == "constant":
        x.fill_(0.7)
    elif special == "broken":
        x[..., 0], x[..., 1], x[..., -1] = torch.nan, torch.inf, -torch.inf
    elif special == "integers":
        x = torch.randint(-7, 8, x.shape, generator=gen).to(dtype)
        x[..., 0] = 7.0
        x[..., 1] = -7.0                       # as far from zero: the first one counts
    elif special == "loud end":
        x[..., -1:] = 9.0
    elif special == "idle":                    # the first part of a row is zeros
        x[..., :256] = 0.0
    elif special == "halves":
        x = halfway(gen, x.shape, format).to(dtype)
    elif special == "denormal":
        x = x * torch.finfo(dtype).tiny / 16
    elif special == "edges":                   # each row ends just below or at a power of two
        exponents = torch.arange(x[..., :1].numel()).view(x[..., :1].shape) % 9 - 4
        largest = 2.0 ** exponents * (1 - torch.finfo(dtype).eps / 2 * (exponents % 2))
        x = (x.clamp(-3, 3) / 4 * largest).to(dtype)
        x[..., ::16] = largest.to(dtype)
    elif special == "huge":
        x = x / x.abs().amax() * torch.finfo(dtype).max
    values: dict[str, Any] = {"x": x.to(device), "format": format, "granularity": granularity,
                              "block_size": block_size, "block_rows": block_rows,
                              "symmetric": symmetric}
    if given:
        # of numbers that are smaller than those of x, by row: many saturate
        less = 0.5 ** torch.randint(1, 4, (*x.shape[:-1], 1), generator=gen)
        other = torch.randn(x.shape, generator=gen) * less
        if not symmetric:                      # each row about a middle of its own
            other += (2 * torch.rand((*x.shape[:-1], 1), generator=gen) - 1) * 2 * less
        other = other.to(dtype)
        quantized = reference(other, format, granularity,  # type: ignore[arg-type]
                              block_size, symmetric, block_rows=block_rows)
        names = ["scales", *([] if symmetric else ["zeros"]),
                 *(["global_scale"] if format == "nvfp4" else [])]
        values.update({name: t.to(device) for name, t in zip(names, quantized[1:])})
        if given == "global_scale":            # the scales of many blocks are beyond float8
            values = {**values, "scales": None, "global_scale": values["global_scale"] / 4}
        elif special == "halves":              # halfway between codes of these scales too
            # not one each: the inverse of one is one
            ones = {"scales": 0.5, "global_scale": 2.0} if format == "nvfp4" else {"scales": 1.0}
            values.update({n: torch.full(values[n].shape, one).to(values[n])
                           for n, one in ones.items()})
        elif special == "dead":                # a channel that calibration saw nothing of
            values["scales"][:1] = 0.0
    return values


def halfway(gen: torch.Generator, shape: torch.Size, format: str) -> Tensor:
    """Returns numbers halfway between two codes, and now and then the largest: their scale is
    one."""
    fmt = FORMATS[format]
    if fmt.integer:
        peak = 7 if fmt.bits == 4 else 127
        x = torch.randint(-2 * peak, 2 * peak + 1, shape, generator=gen) / 2
        x[..., 0] = peak
        return x
    codes = (torch.arange(256, dtype=torch.uint8).view(fmt.storage).float() if fmt.bits == 8
             else code_values(format, gen.device))
    codes = codes[codes.isfinite()].unique()
    middle = torch.tensor(NF4_MIDPOINTS) if format == "nf4" else (codes[1:] + codes[:-1]) / 2
    x = middle[torch.randint(len(middle), shape, generator=gen)]
    x[..., ::16] = codes[-1]
    return x


PLAIN_BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_k")

CASES: tuple[dict[str, Any], ...] = (
    *({"format": f} for f in FORMATS),
    *({"format": f, "width": 37, "rows": (2, 3)} for f in FORMATS),
    *({"format": f, "special": s} for f in FORMATS for s in ("zeros", "broken")),
    *({"format": f, "special": "halves", "given": g} for f in ("int8", "int4")
      for g in (False, True)),
    *({"format": f, "rows": (20,), "special": "edges"} for f in FORMATS),
    *({"format": f, "special": "halves", "given": f != "nf4"} for f in FORMATS
      if not f.startswith("int")),
    *({"format": f, "special": "dead", "given": True} for f in ("int8", "fp8_e4m3")),
    *({"format": f, "given": True} for f in ("int8", "fp8_e4m3", "mxfp4", "nvfp4")),
    {"format": "nvfp4", "given": "global_scale"},
    *({"format": f, "symmetric": False, "granularity": g} for f in ("int8", "int4")
      for g in ("tensor", "block")),
    *({"special": s, "symmetric": y} for s in ("constant", "denormal", "huge")
      for y in (True, False)),
    {"granularity": "tensor", "rows": (2, 3)},
    {"format": "fp8_e4m3", "granularity": "tensor", "rows": ()},
    {"granularity": "block", "block_size": 16}, {"format": "int4", "block_size": 32, "width": 100},
    {"format": "fp8_e4m3", "granularity": "block", "block_size": 32, "block_rows": 4,
     "rows": (2, 9), "width": 70},
    {"format": "int8", "granularity": "block", "block_size": 8, "block_rows": 2, "symmetric": False,
     "rows": (6,)},
    # zero points that differ by row, by block, and along both dimensions of the rows
    {"format": "int4", "given": True, "symmetric": False},
    {"format": "int8", "given": True, "symmetric": False, "granularity": "block", "block_size": 8,
     "rows": (2, 3)},
    {"format": "int4", "given": True, "symmetric": False, "granularity": "block", "block_size": 16,
     "block_rows": 2, "rows": (6,)},
    {"special": "integers"},
    {"stride": "sparse"},
    {"format": "nf4", "stride": "padded"}, {"format": "int8", "rows": (0,)},
    {"format": "mxfp4", "width": 1},
    *({"format": f, "rows": (2,), "width": 256} for f in PLAIN_BLOCKS),
    *({"format": f, "rows": (2,), "width": 512, "special": s} for f in PLAIN_BLOCKS
      for s in ("integers", "idle")),
    # the search for their scales takes long
    *({"format": f, "rows": (1,), "width": 512, "special": "idle"} for f in GGML_FORMATS
      if f not in PLAIN_BLOCKS),
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    """Raises InvalidCall unless everything that goes with given scales is given too."""
    if values["scales"] is None:
        return
    needed = {"zeros": not values["symmetric"], "global_scale": values["format"] == "nvfp4"}
    for name, is_needed in needed.items():
        if is_needed and values[name] is None:
            raise InvalidCall.of("quantize",
                                 Reason(Code.MISSING_METADATA, "it goes with the given scales",
                                        None, name))


# more than 2^20 numbers in blocks
STRESS: tuple[dict[str, Any], ...] = (
    {"format": "q8_0", "rows": (4_100,), "width": 256},
    # the largest of a large tensor at its end
    *({"format": f, "rows": (1,), "width": 66_563, "special": "loud end", "granularity": "tensor"}
      for f in ("int8", "fp8_e4m3")))

_MICROSCALED = ("mxfp4", "nvfp4")

OP = Op(
    name="quantize", family="quantization", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS,
    # Codes and scales must equal the reference's.
    tolerance=Tolerance({"float32": (0.0, 0.0)}),
    shapes={"x": "*rows width"}, exact=("block_size", "block_rows"),
    ranges={"block_size": INT32, "block_rows": INT32},
    requires=(
        dtypes(*FLOATS), at_least("width", 1, Code.EMPTY_INPUT),
        at_least("block_size", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("block_rows", 1, Code.VALUE_OUT_OF_RANGE),
        when(one_of("format", *_MICROSCALED),
             one_of("granularity", None, "block", code=Code.SCALE_LAYOUT_MISMATCH)),
        when(one_of("format", *_MICROSCALED), equals("block_rows", 1, Code.SCALE_LAYOUT_MISMATCH)),
        when(one_of("format", "mxfp4"),
             one_of("block_size", 0, 32, code=Code.SCALE_LAYOUT_MISMATCH)),
        when(one_of("format", "nvfp4"),
             one_of("block_size", 0, 16, code=Code.SCALE_LAYOUT_MISMATCH)),
        *(when(one_of("format", *(f.name for f in GGML_FORMATS.values() if f.block == block)),
               multiple_of("width", block)) for block in (32, 256)),
        *(when(one_of("format", *GGML_FORMATS), rule) for rule in (
            one_of("granularity", None, "block", code=Code.SCALE_LAYOUT_MISMATCH),
            equals("block_size", 0, Code.SCALE_LAYOUT_MISMATCH),
            equals("block_rows", 1, Code.SCALE_LAYOUT_MISMATCH),
            absent("scales.dtype", Code.SCALE_LAYOUT_MISMATCH))),
        when(one_of("format", *(f for f in (*FORMATS, *GGML_FORMATS) if not f.startswith("int"))),
             on("symmetric")),
        when(absent("scales.dtype"), absent("zeros.dtype")),
        when(on("symmetric"), absent("zeros.dtype")),
        any_of(one_of("format", "nvfp4"), absent("global_scale.dtype")),
    ),
    flops="4 * rows * width", bytes="2 * itemsize * rows * width", extra_check=extra_check,
    outputs="Tensor[]",
)
